"""Weights through Ray's object store: for a trainer and engines on the nodes of one Ray cluster.

The publisher puts the tensors into the store of its node; Ray copies them once to each node that reads them. An index,
an actor beside the publisher that dies with it, has the references of each version's objects, so the manifest stays
small: its location is ``INDEX/VERSION@CLUSTER``. Where the index alone dies, the next publication makes it again. A
process outside any cluster, such as that of an engine, joins that cluster.
"""

from __future__ import annotations

import re
import secrets
import sys
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, TypeAlias

import numpy as np
import torch
import xxhash

from asyncrl.errors import ConfigError, WeightError, WeightMismatchError
from asyncrl.weights import TensorEntry, WeightManifest
from engines.weights.transport import VersionedTransport, check_layout, check_tensors, checked_copy, in_batches

_RAY_NAMESPACE = "asyncrl-weights"

_Version: TypeAlias = tuple[bytes, list[Any]]
"""The manifest's digest and the objects. Any: Ray's references, which are untyped."""


class ObjectStoreTransport(VersionedTransport[_Version]):
    """Implements :class:`asyncrl.weights.WeightTransport` for processes of one Ray cluster.

    At most ``max_versions`` are held, and the store of every node needs room for them; released versions leave it when
    their last reader is done. An object gets no more tensors once it has ``batch_size_bytes``; a reader has one at a
    time. With ``delta`` a version is what it changes, where that is little.
    """

    name = "object_store"
    medium = "in the object store"

    def __init__(
        self, *, namespace: str, max_versions: int = 2, batch_size_bytes: int = 256 << 20, delta: bool = False
    ) -> None:
        super().__init__(
            namespace=namespace,
            max_versions=max_versions,
            delta=delta,
            location=rf"(?P<index>weights\.{re.escape(namespace)}\.[0-9a-f]{{8}})/(?P<version>[0-9]+)"
            r"@(?P<cluster>[\w.:\[\]-]+)",
        )
        if find_spec("ray") is None:  # in the environment of an engine
            raise ConfigError(
                "weights.transport = 'object_store' needs Ray wherever it is used, and this environment has none",
                path="weights.transport",
                remedy=f"{sys.executable} -m pip install ray=={{the cluster's version}}, or another transport",
            )
        if batch_size_bytes < 1:
            raise ValueError(f"batch_size_bytes must be at least 1, got {batch_size_bytes}")
        self.batch_size_bytes = batch_size_bytes
        self._index: Any = None  # Any: Ray's actor handles are untyped
        self._index_name = f"weights.{namespace}.{secrets.token_hex(4)}"

    def _write(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> tuple[WeightManifest, _Version]:
        ray = _ray()
        if not ray.is_initialized():
            raise WeightError(
                f"version {version} cannot be published: weights.transport = 'object_store' needs Ray, and this "
                f"process belongs to no cluster; start the run on Ray, or use another transport"
            )
        entries: list[TensorEntry] = []
        objects: list[Any] = []
        try:
            for batch in in_batches(tensors, size_bytes=self.batch_size_bytes):
                objects.append(ray.put({part.name: np.frombuffer(part.data, dtype=np.uint8) for part in batch}))
                entries += [part.entry(xxhash.xxh3_64_intdigest(part.data)) for part in batch]
            location = f"{self._index_name}/{version}@{ray.get_runtime_context().gcs_address}"
            manifest = self._manifest(version, location, entries)
            self._add(ray, version, (manifest.digest, objects))
        except ray.exceptions.RayError as error:
            raise WeightError(f"version {version} cannot be put into Ray's object store: {error}") from error
        return manifest, (manifest.digest, objects)

    def _add(self, ray: Any, version: int, added: _Version) -> None:
        """Add a version to the index; make that if there is none, or again if it died, with the versions it had."""
        versions = {version: added}
        if self._index is not None:
            try:
                ray.get(self._index.add.remote(versions))
            except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError):  # the latter: killed for memory
                versions |= self._held
            else:
                return
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor = ray.remote(num_cpus=0, max_restarts=0, scheduling_strategy=here)(_Index)
        self._index = actor.options(name=self._index_name, namespace=_RAY_NAMESPACE, get_if_exists=True).remote()
        weakref.finalize(self, _kill, self._index)
        ray.get(self._index.add.remote(versions))

    def _free(self, version: int, place: _Version) -> None:
        self._index.remove.remote(version)

    def _close(self) -> None:
        if self._index is not None:
            _kill(self._index)

    def _read(self, manifest: WeightManifest) -> Mapping[str, torch.Tensor]:
        location = self._located(manifest)
        check_layout(manifest)
        ray = _ray()
        try:
            if not ray.is_initialized():
                ray.init(address=location["cluster"], log_to_driver=False, logging_level="ERROR")
            index = ray.get_actor(location["index"], namespace=_RAY_NAMESPACE)
            found = ray.get(index.find.remote(int(location["version"])))
            if found is None:
                raise WeightError(f"version {manifest.version} was released")
            digest, objects = found
            if digest != manifest.digest:
                raise WeightMismatchError(f"version {manifest.version}: the published version is not the manifest's")
            return _copies(ray, objects, manifest)
        except (ray.exceptions.RayError, ConnectionError, ValueError) as error:  # ValueError: no actor of that name
            raise WeightError(
                f"version {manifest.version} is not available in Ray's object store ({manifest.location}): {error}"
            ) from error


class _Index:
    """An actor with the objects of every version. The publisher owns them, and the actor."""

    def __init__(self) -> None:
        self._held: dict[int, _Version] = {}

    def add(self, versions: Mapping[int, _Version]) -> None:
        self._held |= versions

    def find(self, version: int) -> _Version | None:
        return self._held.get(version)

    def remove(self, version: int) -> None:
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


def _kill(index: Any) -> None:
    ray = _ray()
    with suppress(Exception):  # the cluster may have ended before
        if ray.is_initialized():
            ray.kill(index)


def _ray() -> Any:
    import ray

    return ray
