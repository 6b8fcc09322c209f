"""Weights through a store that trainer and engines reach by a URL: ``s3://``, ``gs://``, ``file://`` and others.

    URL/asyncrl.newest          the manifest of the version that was announced last
    URL/asyncrl.NAMESPACE.TOKEN/
        2-1/                version 2, a first attempt: the files of :mod:`engines.weights.disk`, ``complete`` last

A reader fetches a version into a temporary folder of its own, checks it there and removes it. Each attempt to write a
version has a folder of its own, since an upload that was given up may still end.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import weakref
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

import torch
from safetensors import SafetensorError

from asyncrl.errors import StorageError, WeightError, WeightMismatchError
from asyncrl.io import LockedTemporaryDirectory
from asyncrl.storage import Store
from asyncrl.weights import WeightManifest
from engines.weights.disk import COMPLETE, read_version, write_version
from engines.weights.transport import Removals, VersionedTransport, remove_in_time

_log = logging.getLogger(__name__)

_NEWEST = "asyncrl.newest"
_PLACE = r"asyncrl\.{}\.[0-9a-f]{{16}}/[0-9]+-[0-9]+"


class StoreTransport(VersionedTransport[str]):
    """Implements :class:`asyncrl.weights.WeightTransport` for processes that have a store in common.

    ``url`` is a folder of the store, which a run may share with others; credentials are those of fsspec's packages, in
    the environment of each process. A publication is in the store when it returns; publisher and readers need room for
    a version on their own disk meanwhile. What a killed publisher left stays, since no other process can tell that it
    is dead.

    With ``kept_versions`` versions are announced, for ``asyncrl serve --follow URL``, and so many of them stay once the
    run has released them, the newest also when it ends. Runs with the same URL replace each other's announcements.

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
        kept_versions: int = 0,
        delta: bool = False,
    ) -> None:
        if kept_versions < 0:
            raise ValueError(f"kept_versions must be at least 0, got {kept_versions}")
        super().__init__(
            namespace=namespace,
            max_versions=max_versions + kept_versions,
            delta=delta,
            location=_PLACE.format(re.escape(namespace)),
        )
        if shard_size_bytes < 1:
            raise ValueError(f"shard_size_bytes must be at least 1, got {shard_size_bytes}")
        self.shard_size_bytes = shard_size_bytes
        self._store = Store(url, key="weights.options.url")
        self._home = f"asyncrl.{namespace}.{secrets.token_hex(8)}"
        self._removals = Removals()
        self._attempts = 0
        self._finalizer: Any = None  # once there is something to remove
        self._kept_versions = kept_versions
        self._kept: list[int] = []  # released, oldest first
        self._newest: set[str] = set()  # the places of the version that is announced, or may be: they stay
        self._staying: list[tuple[int, str]] = []  # those that were to be freed, with their versions

    def _write(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> tuple[WeightManifest, str]:
        if self._finalizer is None:
            self._finalizer = weakref.finalize(self, _remove_home, self._store, self._home, self._newest, os.getpid())
        self._attempts += 1
        place = f"{self._home}/{version}-{self._attempts}"
        try:
            with LockedTemporaryDirectory("weights") as folder:
                describe = partial(self._manifest, version, place)
                manifest = write_version(folder, tensors, describe, shard_size_bytes=self.shard_size_bytes)
                files = sorted(folder.iterdir(), key=lambda path: path.name == COMPLETE)
                self._store.put({f"{place}/{path.name}": path for path in files})
        except (OSError, SafetensorError, StorageError) as error:
            raise WeightError(f"version {version} cannot be written to {self._store.url}: {error}") from error
        return manifest, place

    def announce(self, manifest: WeightManifest) -> None:
        if not self._kept_versions:
            return
        places = frozenset(part.location for part in (manifest, *manifest.chain))
        with self._lock:
            self._newest |= places
        try:
            self._store.write(_NEWEST, manifest.encode())
        except StorageError as error:
            _log.warning("version %d is not announced: %s", manifest.version, error)
            return
        with self._lock:
            self._newest &= places
            staying, self._staying = self._staying, []
            for version, place in staying:
                self._free(version, place)

    def announced(self) -> WeightManifest | None:
        try:
            manifest = WeightManifest.decode(self._store.read(_NEWEST))
        except FileNotFoundError:
            return None
        except (StorageError, WeightMismatchError) as error:
            raise WeightError(f"{self._store.url}/{_NEWEST}: {error}") from error
        self._location = re.compile(_PLACE.format("[A-Za-z0-9_.-]+"))  # of any publisher
        return manifest

    def _let_go(self, version: int) -> None:
        if version in self._held and version not in self._released and version not in self._kept:
            self._kept.append(version)
        while len(self._kept) > self._kept_versions:
            super()._let_go(self._kept.pop(0))

    def _free(self, version: int, place: str) -> None:
        if place in self._newest:  # no later one could be announced yet
            self._staying.append((version, place))
        else:
            self._removals.add(partial(_remove_version, self._store, version, place))

    def _close(self) -> None:
        if self._finalizer is not None:
            self._finalizer()

    def _read(self, manifest: WeightManifest) -> Mapping[str, torch.Tensor]:
        self._located(manifest)
        # Of a file of tensors, at most: it gets no more once it has its size.
        largest = self.shard_size_bytes + max((entry.size_bytes for entry in manifest.tensors), default=0)
        try:
            with LockedTemporaryDirectory("weights") as folder:

                def fetch(name: str) -> None:
                    size_bytes = largest if name.endswith(".safetensors") else 0
                    self._store.get(f"{manifest.location}/{name}", folder / name, size_bytes=size_bytes)

                return read_version(folder, manifest, fetch=fetch)
        except (OSError, StorageError) as error:
            what = "it is not there" if isinstance(error, FileNotFoundError) else error
            url = f"{self._store.url}/{manifest.location}"
            raise WeightError(f"version {manifest.version} is not available: {what} ({url})") from error


def _remove_version(store: Store, version: int, place: str) -> None:
    try:
        store.remove(f"{place}/{COMPLETE}")  # first: what is left of it is no version
        store.remove(place)
    except StorageError as error:
        _log.warning("version %d stays in the store: %s", version, error)


def _remove_home(store: Store, home: str, staying: AbstractSet[str], process: int) -> None:
    if process == os.getpid():  # not a forked child's copy
        remove_in_time(partial(_remove_all, store, home, staying), what=f"{store.url}/{home}")


def _remove_all(store: Store, home: str, staying: AbstractSet[str]) -> None:
    try:
        if not staying:
            store.remove(home)
        else:
            for place in {name.rpartition("/")[0] for name in store.names() if name.startswith(f"{home}/")} - staying:
                store.remove(place)
    except (StorageError, RuntimeError) as error:  # at the end of an interpreter no thread can be started
        _log.warning("%s/%s stays in the store: %s", store.url, home, error)
