"""Weights through a folder that trainer and engines share, on one machine or over a network file system.

    DIRECTORY/asyncrl.NAMESPACE.HOST.PROCESS.TOKEN/
        owner                           locked for as long as the publisher lives
        .3.partial/                     a version being written
        2/                              a version
            model-00001.safetensors     tensors, up to a shard's size
            model-00002.safetensors
            model.safetensors.index.json
            manifest.msgpack
            complete                    the manifest's digest; written last

transformers can load the folder of a full version, too. It is renamed to its number when its files are on the disk.
Readers copy the tensors, so releasing a version does not disturb them. It is removed beside what follows.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import save_file

from asyncrl.errors import WeightError, WeightMismatchError
from asyncrl.io import DurableFiles
from asyncrl.weights import TensorEntry, WeightManifest
from engines.weights.transport import (
    PlacedTensor,
    Removals,
    VersionedTransport,
    check_layout,
    check_tensors,
    checked_copy,
    existing_folder,
    in_batches,
    remove_in_time,
)

_OWNER = "owner"
_MANIFEST = "manifest.msgpack"
INDEX = "model.safetensors.index.json"
COMPLETE = "complete"
_LARGEST_HEADER_BYTES = 100_000_000  # as safetensors has it


class DiskTransport(VersionedTransport[Path]):
    """Implements :class:`asyncrl.weights.WeightTransport` for processes that share a folder.

    The folder ``directory`` must exist, under the same name, for publisher and pullers. A publication is on the disk
    when it returns; a file gets no more tensors once it has ``shard_size_bytes``. A publisher removes what killed
    publishers of this machine left in the folder. With ``delta`` a version is what it changes, where that is little.

    Raises:
        ConfigError: there is no such folder.
    """

    name = "disk"
    medium = "on the disk"

    def __init__(
        self,
        *,
        namespace: str,
        directory: str,
        max_versions: int = 2,
        shard_size_bytes: int = 1 << 30,
        delta: bool = False,
    ) -> None:
        super().__init__(
            namespace=namespace,
            max_versions=max_versions,
            delta=delta,
            location=rf"asyncrl\.{re.escape(namespace)}\.[A-Za-z0-9-]+\.[0-9]+\.[0-9a-f]{{8}}/[0-9]+",
        )
        if shard_size_bytes < 1:
            raise ValueError(f"shard_size_bytes must be at least 1, got {shard_size_bytes}")
        remedy = "make it, and mount it under this name on every machine of the run"
        self.directory = existing_folder(directory, remedy=remedy)
        self.shard_size_bytes = shard_size_bytes
        self._home: _Home | None = None
        self._removals = Removals()

    def _write(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> tuple[WeightManifest, Path]:
        try:
            if self._home is None:
                _remove_abandoned(self.directory)
                self._home = _Home(self.directory, self.namespace)
            folder = self._home.path / str(version)
            with DurableFiles().replacing(folder, sealed=False) as unfinished:
                describe = partial(self._manifest, version, f"{folder.parent.name}/{version}")
                manifest = write_version(unfinished, tensors, describe, shard_size_bytes=self.shard_size_bytes)
        except (OSError, SafetensorError) as error:
            raise WeightError(f"version {version} cannot be written to {self.directory}: {error}") from error
        return manifest, folder

    def _free(self, version: int, place: Path) -> None:
        self._removals.add(partial(shutil.rmtree, place))

    def _close(self) -> None:
        if self._home is not None:
            self._home.remove()

    def _read(self, manifest: WeightManifest) -> Mapping[str, torch.Tensor]:
        self._located(manifest)
        folder = self.directory / manifest.location
        try:
            return read_version(folder, manifest)
        except OSError as error:
            raise WeightError(
                f"version {manifest.version} is not available: {error.strerror or error} ({folder})"
            ) from error


def write_version(
    folder: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    describe: Callable[[list[TensorEntry]], WeightManifest],
    *,
    shard_size_bytes: int,
) -> WeightManifest:
    """Write the files of a version into a folder; ``describe`` makes the manifest of its tensors."""
    entries: list[TensorEntry] = []
    shards: dict[str, str] = {}
    for number, batch in enumerate(in_batches(tensors, size_bytes=shard_size_bytes), start=1):
        shard = f"model-{number:05}.safetensors"
        _save(batch, folder / shard)
        for part in batch:
            entries.append(part.entry(xxhash.xxh3_64_intdigest(part.data)))
            shards[part.name] = shard
    manifest = describe(entries)
    index = {"metadata": {"total_size": manifest.size_bytes}, "weight_map": shards}
    (folder / INDEX).write_text(json.dumps(index))
    (folder / _MANIFEST).write_bytes(manifest.encode())
    (folder / COMPLETE).write_text(manifest.digest.hex())
    return manifest


def read_version(
    folder: Path, manifest: WeightManifest, *, fetch: Callable[[str], object] = lambda name: None
) -> Mapping[str, torch.Tensor]:
    """Return the checked tensors of a version; ``fetch`` is called with the name of each file before it is read.

    Raises:
        OSError: a file is not there, or cannot be read.
        WeightMismatchError: the version is incomplete, damaged or not the manifest's.
    """
    check_layout(manifest)
    fetch(COMPLETE)
    if (folder / COMPLETE).read_bytes() != manifest.digest.hex().encode():
        raise WeightMismatchError(
            f"version {manifest.version}: the folder {folder} is incomplete, or not the manifest's"
        )
    try:
        fetch(INDEX)
        shards = json.loads((folder / INDEX).read_bytes())["weight_map"]
        for shard in sorted({*shards.values()}):
            if not re.fullmatch(r"model-\d+\.safetensors", shard):
                raise ValueError(f"{shard!r} is not a file of this folder")
            fetch(shard)
        return _read_tensors(folder, shards, manifest)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise WeightMismatchError(f"version {manifest.version}: {folder} is damaged: {error}") from error


class _Home:
    """A publisher's folder, locked for as long as this process lives. A forked child does not remove it."""

    def __init__(self, directory: Path, namespace: str) -> None:
        while True:
            name = f"asyncrl.{namespace}.{_host()}.{os.getpid()}.{secrets.token_hex(4)}"
            self.path = directory / name
            self.path.mkdir(mode=0o700)
            owner = os.open(self.path / _OWNER, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with contextlib.suppress(OSError):  # without locks on the file system it is never taken for abandoned
                fcntl.flock(owner, fcntl.LOCK_EX)
            # Between creation and lock it looks abandoned, and another process may have removed it.
            if os.fstat(owner).st_nlink:
                break
            os.close(owner)
        self._finalizer = weakref.finalize(self, _remove_home, self.path, owner, os.getpid())

    def remove(self) -> None:
        self._finalizer()


def _remove_home(path: Path, owner: int, process: int) -> None:
    if process == os.getpid():
        remove_in_time(partial(shutil.rmtree, path, ignore_errors=True), what=str(path))
        os.close(owner)


def _remove_abandoned(directory: Path) -> None:
    """Remove the folders of dead publishers of this machine; those of other machines may be in use."""
    for home in directory.glob(f"asyncrl.*.{_host()}.*.*"):
        try:
            owner = os.open(home / _OWNER, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # another user's or program's, or removed meanwhile
            continue
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(home, ignore_errors=True)
        except OSError:  # its publisher lives, or the file system has no locks
            continue
        finally:
            os.close(owner)


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname()) or "host"


def _save(batch: list[PlacedTensor], path: Path) -> None:
    shard: dict[str, torch.Tensor] = {}
    places: set[int] = set()
    for part in batch:
        data: memoryview | bytearray = part.data
        tensor = torch.empty(part.tensor.shape, dtype=part.tensor.dtype)
        if len(data):
            place = part.tensor.data_ptr()
            if place in places:  # safetensors refuses tensors that share memory
                data = bytearray(data)
            places.add(place)
            tensor = torch.frombuffer(data, dtype=part.tensor.dtype).reshape(part.tensor.shape)
        shard[part.name] = tensor
    try:
        save_file(shard, path, metadata={"format": "pt"})
    except (KeyError, ValueError, RuntimeError) as error:
        dtypes = ", ".join(sorted({str(part.tensor.dtype) for part in batch}))
        raise WeightError(f"safetensors cannot store these tensors ({dtypes}): {error}") from error


def _read_tensors(folder: Path, shards: Mapping[str, str], manifest: WeightManifest) -> dict[str, torch.Tensor]:
    """Read and check the tensors.

    No file is mapped: where another machine removes one of NFS, the next page fault would kill this process.
    """
    begins = {shard: _begins(folder / shard) for shard in sorted(set(shards.values()))}
    read: dict[str, torch.Tensor] = {}

    def is_right(entry: TensorEntry) -> bool:
        shard = shards[entry.name]
        with (folder / shard).open("rb") as file:
            file.seek(begins[shard][entry.name])
            copy = checked_copy(memoryview(file.read(entry.size_bytes)), entry)
        if copy is not None:
            read[entry.name] = copy
        return copy is not None

    check_tensors(manifest.tensors, is_right, manifest=manifest)
    return {entry.name: read[entry.name] for entry in manifest.tensors}


def _begins(path: Path) -> dict[str, int]:
    """Return the byte at which each tensor begins in a file of safetensors."""
    with path.open("rb") as file:
        size_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(size_bytes, _LARGEST_HEADER_BYTES)))
    tensors = {name: part for name, part in header.items() if name != "__metadata__"}
    return {name: 8 + size_bytes + int(part["data_offsets"][0]) for name, part in tensors.items()}
