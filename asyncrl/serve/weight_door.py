"""How new weights come into a served pool: as a manifest of bytes published already, or as a folder to publish."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.errors import WeightError, WeightVersionError
from asyncrl.interfaces import WeightTransport
from asyncrl.serve.served_pool import ServedPool
from asyncrl.weights.manifest import WeightManifest
from asyncrl.weights.publication import Ended

if TYPE_CHECKING:
    import torch

__all__ = ["WeightDoor"]


class WeightDoor:
    """One version at a time.

    Args:
        pool: gets the weights.
        transport: publishes folders; the pool pulls from its other end.
    """

    def __init__(self, pool: ServedPool, transport: WeightTransport) -> None:
        self._pool = pool
        self._transport = transport
        self._prepared: WeightManifest | None = None
        self._published: set[int] = set()
        self._busy = asyncio.Lock()

    @property
    def prepared(self) -> int | None:
        """Version that waits for its commit."""
        return self._prepared.version if self._prepared is not None else None

    def prepare(self, manifest: WeightManifest) -> None:
        """First phase: remember what :meth:`commit` brings in. Replaces what was prepared before.

        Raises:
            WeightVersionError: it is not newer than what is served.
        """
        if manifest.version <= self._pool.weight_version:
            raise WeightVersionError(
                f"version {manifest.version} is not newer than {self._pool.weight_version}, which is served"
            )
        self._prepared = manifest

    async def prepare_folder(self, folder: Path, *, version: int | None = None) -> WeightManifest:
        """Publish the safetensors of a model folder, as the next version by default, and prepare it.

        Raises:
            WeightError: there is no readable safetensors file.
            WeightVersionError: the version is not newer.
        """
        number = self._pool.weight_version + 1 if version is None else version
        if number <= self._pool.weight_version:
            raise WeightVersionError(f"version {number} is not newer than {self._pool.weight_version}, which is served")
        async with self._busy:
            await self._release()
            manifest = await asyncio.to_thread(lambda: self._transport.publish(_tensors(folder), version=number))
        self._published.add(number)
        self.prepare(manifest)
        return manifest

    async def commit(self, version: int) -> Ended:
        """Second phase: every replica verifies the prepared version, then samples under it.

        Raises:
            WeightVersionError: another version is prepared, or none.
            WeightError: no replica could take it.
        """
        manifest = self._prepared
        if manifest is None or manifest.version != version:
            raise WeightVersionError(f"version {version} cannot be committed: {self.prepared} is prepared")
        if self._busy.locked():
            raise WeightError("another publication is under way")
        async with self._busy:
            self._prepared = None
            try:
                return await self._pool.publish(manifest)
            finally:
                await self._release()

    async def _release(self) -> None:
        """Free the versions that were published here and that no replica will ask for any more."""
        needed = self._pool.needed_versions | ({self._prepared.version} if self._prepared is not None else set())
        for version in self._published - needed:
            await asyncio.to_thread(self._transport.release, version)
        self._published &= needed


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightError(f"{folder} holds no safetensors file")
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - no mapping, in spite of its name
                    yield name, tensors.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise WeightError(f"{file}: {error}") from error
