"""How new weights come into a served pool: as a manifest of bytes published already, or as a folder to publish."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.cancellation import to_its_end
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
        self._published: set[int] = set()  # and not released yet
        self._last = 0
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

        What was prepared before is freed first: a transport need not have room for three versions. Cancelling ends it
        when the transport has finished; nothing is prepared then.

        Raises:
            WeightError: there is no readable safetensors file.
            WeightVersionError: the version is not newer than all that were served or published.
        """
        files = await asyncio.to_thread(lambda: sorted(folder.glob("*.safetensors")))
        if not files:
            raise WeightError(f"{folder} holds no safetensors file")
        async with self._busy:
            last = max(self._pool.weight_version, self._last)
            number = last + 1 if version is None else version
            if number <= last:
                raise WeightVersionError(f"version {number} is not newer than {last}, which was served or published")
            self._prepared = None
            await self._release()
            try:
                manifest = await to_its_end(self._publish(files, number))
            except asyncio.CancelledError:
                await self._release()
                raise
            self.prepare(manifest)
        return manifest

    async def _publish(self, files: Sequence[Path], version: int) -> WeightManifest:
        manifest = await asyncio.to_thread(lambda: self._transport.publish(_tensors(files), version=version))
        self._published.add(version)
        self._last = version
        return manifest

    async def commit(self, version: int) -> Ended:
        """Second phase: every replica verifies the prepared version, then samples under it.

        Cancelling does not take it back: it ends when the replicas are done.

        Raises:
            WeightVersionError: another version is prepared, or none.
            WeightError: no replica could take it.
        """
        self._check_prepared(version)
        if self._busy.locked():
            raise WeightError("another publication is under way")
        async with self._busy:
            manifest = self._check_prepared(version)  # whoever came first may have replaced it
            self._prepared = None
            try:
                return await to_its_end(self._pool.publish(manifest))
            finally:
                await self._release()

    def _check_prepared(self, version: int) -> WeightManifest:
        if self._prepared is None or self._prepared.version != version:
            raise WeightVersionError(f"version {version} cannot be committed: {self.prepared} is prepared")
        return self._prepared

    async def _release(self) -> None:
        """Free the versions that were published here and that no replica will ask for any more."""
        needed = self._pool.needed_versions | ({self._prepared.version} if self._prepared is not None else set())
        for version in self._published - needed:
            await asyncio.to_thread(self._transport.release, version)
        self._published &= needed


def _tensors(files: Sequence[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - no mapping, in spite of its name
                    yield name, tensors.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise WeightError(f"{file}: {error}") from error
