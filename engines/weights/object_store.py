"""Weights through Ray's object store: for a trainer and engines on the nodes of one Ray cluster.

The publisher puts the tensors into the store of its node; Ray carries them once to each node that asks. A keeper, an
actor that dies with the publisher, knows which objects a version consists of, so the manifest stays small and says
where they are in words: ``KEEPER/VERSION@CLUSTER``. A process that is no part of a cluster yet, as that of an engine,
joins the one that the manifest names.
"""

from __future__ import annotations

import re
import secrets
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import xxhash

from asyncrl.errors import WeightError, WeightMismatchError
from asyncrl.weights.manifest import TensorEntry, WeightManifest
from engines.weights.checking import check_layout, check_tensors, checked_copy
from engines.weights.held_versions import HeldVersions
from engines.weights.placement import in_batches

__all__ = ["ObjectStoreTransport"]

_TRANSPORT = "object_store"
_RAY_NAMESPACE = "asyncrl-weights"
_NAMESPACE = re.compile(r"[A-Za-z0-9_.-]{1,100}")


class ObjectStoreTransport:
    """Implements :class:`asyncrl.interfaces.WeightTransport` for processes of one Ray cluster.

    Its calls block: call them from a thread where an event loop runs. Tensors from :meth:`pull` are the caller's own.
    Released versions leave the store when nobody reads them any more.

    Args:
        namespace: name of the run: letters, digits, ``_``, ``.`` and ``-``.
        max_versions: versions held at once; the store of every node needs room for them.
        batch_size_bytes: an object gets no more tensors once it has this many bytes. A reader has one at a time.
    """

    def __init__(self, *, namespace: str, max_versions: int = 2, batch_size_bytes: int = 256 << 20) -> None:
        if not _NAMESPACE.fullmatch(namespace):
            raise ValueError(f"a namespace is 1..100 letters, digits, '_', '.' or '-', got {namespace!r}")
        if batch_size_bytes < 1:
            raise ValueError(f"batch_size_bytes must be at least 1, got {batch_size_bytes}")
        self.namespace = namespace
        self.batch_size_bytes = batch_size_bytes
        self._held: HeldVersions[None] = HeldVersions(max_versions=max_versions)
        self._lock = threading.Lock()
        self._keeper: Any = None  # Any: Ray's actor handles are untyped
        self._keeper_name = f"weights.{namespace}.{secrets.token_hex(4)}"
        self._location = re.compile(
            rf"(?P<keeper>weights\.{re.escape(namespace)}\.[0-9a-f]{{8}})/(?P<version>[0-9]+)@(?P<cluster>[\w.:\[\]-]+)"
        )

    @property
    def max_versions(self) -> int:
        """Versions held at once, at most."""
        return self._held.max_versions

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions held, oldest first."""
        return self._held.numbers

    def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], *, version: int) -> WeightManifest:
        """Put the tensors into the store, batch by batch as they come, and make them available under ``version``.

        Raises:
            WeightVersionError: ``version`` is not newer than the last one published.
            WeightError: ``max_versions`` are held already, a tensor is not plain, this process belongs to no Ray
                cluster, or Ray failed. Nothing is published then, and the version can be tried again.
        """
        with self._lock:
            self._held.check(version)
            ray = _ray()
            if not ray.is_initialized():
                raise WeightError(
                    f"version {version} cannot be published: weights.transport = 'object_store' needs Ray, and this "
                    f"process belongs to no cluster; start the run on Ray, or take another transport"
                )
            entries: list[TensorEntry] = []
            objects: list[Any] = []
            try:
                for batch in in_batches(tensors, size_bytes=self.batch_size_bytes):
                    objects.append(ray.put({part.name: np.frombuffer(part.data, dtype=np.uint8) for part in batch}))
                    entries += [part.entry(xxhash.xxh3_64_intdigest(part.data)) for part in batch]
                if self._keeper is None:
                    self._keeper = _keeper_class().options(name=self._keeper_name, namespace=_RAY_NAMESPACE).remote()
                    weakref.finalize(self, _end, self._keeper)
                manifest = WeightManifest(
                    version=version,
                    transport=_TRANSPORT,
                    location=f"{self._keeper_name}/{version}@{ray.get_runtime_context().gcs_address}",
                    tensors=tuple(entries),
                )
                ray.get(self._keeper.hold.remote(version, manifest.digest, objects))
            except ray.exceptions.RayError as error:
                raise WeightError(f"version {version} cannot be put into Ray's object store: {error}") from error
            self._held.add(version, None)
            return manifest

    @contextmanager
    def pull(self, manifest: WeightManifest) -> Iterator[Mapping[str, torch.Tensor]]:
        """Verified tensors by name, in memory of their own.

        Raises:
            WeightMismatchError: the bytes, or an entry of the manifest, are not what they were.
            WeightError: the version is not available (any more), or belongs to another transport.
        """
        yield MappingProxyType(self._read(manifest))

    def release(self, version: int) -> None:
        """Let the store free ``version``. Idempotent."""
        with self._lock:
            if version in self._held.numbers:
                self._held.remove(version)
                self._keeper.drop.remote(version)

    def close(self) -> None:
        """Free everything. Idempotent; also done when this process ends."""
        with self._lock:
            self._held.close()
            if self._keeper is not None:
                _end(self._keeper)

    def _read(self, manifest: WeightManifest) -> dict[str, torch.Tensor]:
        found = self._location.fullmatch(manifest.location)
        if manifest.transport != _TRANSPORT or found is None:
            raise WeightError(
                f"version {manifest.version} lies at {manifest.transport}:{manifest.location}, not in the object store "
                f"of namespace {self.namespace!r}"
            )
        check_layout(manifest)
        ray = _ray()
        try:
            if not ray.is_initialized():
                ray.init(address=found["cluster"], log_to_driver=False, logging_level="ERROR")
            keeper = ray.get_actor(found["keeper"], namespace=_RAY_NAMESPACE)
            held = ray.get(keeper.held.remote(int(found["version"])))
            if held is None:
                raise WeightError(f"version {manifest.version} was released")
            digest, objects = held
            if digest != manifest.digest:
                raise WeightMismatchError(f"version {manifest.version}: what is held is not the manifest's")
            return _copies(ray, objects, manifest)
        except (ray.exceptions.RayError, ConnectionError, ValueError) as error:  # ValueError: no actor of that name
            raise WeightError(
                f"version {manifest.version} is not available in Ray's object store ({manifest.location}): {error}"
            ) from error


class _Keeper:
    """Runs in an actor: which objects the versions consist of. The publisher owns them, and it."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[bytes, list[Any]]] = {}

    def hold(self, version: int, digest: bytes, objects: list[Any]) -> None:
        self._held[version] = (digest, objects)

    def held(self, version: int) -> tuple[bytes, list[Any]] | None:
        return self._held.get(version)

    def drop(self, version: int) -> None:
        self._held.pop(version, None)


def _copies(ray: Any, objects: list[Any], manifest: WeightManifest) -> dict[str, torch.Tensor]:
    entries = {entry.name: entry for entry in manifest.tensors}
    read: dict[str, torch.Tensor] = {}
    for each in objects:
        batch = ray.get(each)

        def is_right(entry: TensorEntry, batch: Mapping[str, Any] = batch) -> bool:
            copy = checked_copy(batch[entry.name].data, entry)
            if copy is None:
                return False
            read[entry.name] = copy
            return True

        check_tensors([entries[name] for name in batch if name in entries], is_right, manifest=manifest)
    if read.keys() != entries.keys():
        raise WeightMismatchError(
            f"version {manifest.version}: the store has {len(read)} of the manifest's {len(entries)} tensors"
        )
    return {name: read[name] for name in entries}


def _keeper_class() -> Any:
    return _ray().remote(num_cpus=0, max_restarts=0)(_Keeper)


def _end(keeper: Any) -> None:
    ray = _ray()
    with suppress(Exception):  # the cluster may be gone before
        if ray.is_initialized():
            ray.kill(keeper)


def _ray() -> Any:
    import ray

    return ray
