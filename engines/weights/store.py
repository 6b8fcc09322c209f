"""Weights through a store that trainer and engines reach by a URL: ``s3://``, ``gs://``, ``file://`` and others.

    URL/asyncrl.NAMESPACE.PLACE.PROCESS.TOKEN/
        2/                  a version: the files that :mod:`engines.weights.disk` writes, ``complete`` last

A reader fetches a version into a temporary folder of its own, checks it there and removes it.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError

from asyncrl.errors import StorageError, WeightError
from asyncrl.io import LockedTemporaryDirectory
from asyncrl.storage import Store
from asyncrl.weights import WeightManifest
from engines.weights.disk import COMPLETE, read_version, write_version
from engines.weights.transport import VersionedTransport

_log = logging.getLogger(__name__)


class StoreTransport(VersionedTransport[str]):
    """Implements :class:`asyncrl.weights.WeightTransport` for processes that have a store in common.

    ``url`` is a folder of the store, which a run may share with others; credentials are those of fsspec's packages, in
    the environment of each process. A publication is in the store when it returns; publisher and readers need room for
    a version on their own disk meanwhile. A publisher removes what killed publishers of its machine left below the URL.

    Raises:
        ConfigError: the URL cannot be used, or the package of its protocol is missing.
    """

    name = "store"
    medium = "in the store"

    def __init__(
        self,
        *,
        namespace: str,
        url: str,
        max_versions: int = 2,
        shard_size_bytes: int = 1 << 28,
        delta: bool = False,
    ) -> None:
        super().__init__(
            namespace=namespace,
            max_versions=max_versions,
            delta=delta,
            location=rf"asyncrl\.{re.escape(namespace)}\.[0-9a-f]{{16}}\.[0-9]+\.[0-9a-f]{{8}}/[0-9]+",
        )
        if shard_size_bytes < 1:
            raise ValueError(f"shard_size_bytes must be at least 1, got {shard_size_bytes}")
        self.shard_size_bytes = shard_size_bytes
        self._store = Store(url, key="weights.options.url")
        self._home = ""

    def _write(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> tuple[WeightManifest, str]:
        try:
            if not self._home:
                self._remove_abandoned()
                self._home = f"asyncrl.{self.namespace}.{_place()}.{os.getpid()}.{secrets.token_hex(4)}"
            place = f"{self._home}/{version}"
            with LockedTemporaryDirectory("weights") as folder:
                describe = partial(self._manifest, version, place)
                manifest = write_version(folder, tensors, describe, shard_size_bytes=self.shard_size_bytes)
                files = sorted(folder.iterdir(), key=lambda path: path.name == COMPLETE)
                self._store.put({f"{place}/{path.name}": path for path in files})
        except (OSError, SafetensorError, StorageError) as error:
            raise WeightError(f"version {version} cannot be written to {self._store.url}: {error}") from error
        return manifest, place

    def _free(self, version: int, place: str) -> None:
        try:
            self._store.remove(f"{place}/{COMPLETE}")  # first: what is left of it is no version
            self._store.remove(place)
        except StorageError as error:
            _log.warning("version %d stays in the store: %s", version, error)

    def _close(self) -> None:
        if self._home:
            try:
                self._store.remove(self._home)
            except StorageError as error:
                _log.warning("%s/%s stays in the store: %s", self._store.url, self._home, error)

    def _read(self, manifest: WeightManifest) -> Mapping[str, torch.Tensor]:
        self._located(manifest)
        try:
            with LockedTemporaryDirectory("weights") as folder:

                def fetch(name: str) -> None:
                    self._store.get(f"{manifest.location}/{name}", folder / name, size_bytes=manifest.size_bytes)

                return read_version(folder, manifest, fetch=fetch)
        except (OSError, StorageError) as error:
            what = "it is not there" if isinstance(error, FileNotFoundError) else error
            url = f"{self._store.url}/{manifest.location}"
            raise WeightError(f"version {manifest.version} is not available: {what} ({url})") from error

    def _remove_abandoned(self) -> None:
        ours = re.compile(rf"(asyncrl\.[A-Za-z0-9_.-]+\.{_place()}\.([0-9]+)\.[0-9a-f]{{8}})/")
        homes = {found[1]: int(found[2]) for name in self._store.names() if (found := ours.match(name))}
        for home, process in homes.items():
            if not Path(f"/proc/{process}").exists():
                self._store.remove(home)


def _place() -> str:
    """Return where a process number means one process: until the next start of a machine, in one container."""
    known = Path("/proc/sys/kernel/random/boot_id").read_text()
    with suppress(OSError):
        known += str(Path("/proc/self/ns/pid").readlink())
    return xxhash.xxh3_64_hexdigest(known.encode())
