"""Weights through a folder that trainer and engines see, on one machine or over a network file system.

    DIRECTORY/asyncrl.NAMESPACE.HOST.PROCESS.TOKEN/
        owner                           locked for as long as the publisher lives
        new-3/                          a version being written
        2/                              a version
            model-00001.safetensors     tensors, as many as come to a shard's size
            model-00002.safetensors
            model.safetensors.index.json
            manifest.msgpack
            complete                    the manifest's digest; written last

A version is a folder that transformers can load, too. It appears under its number by a rename, when its files and their
names are on the disk. Readers copy what they read, so a released version is of no consequence to them.
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
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from asyncrl.durable import DurableFiles
from asyncrl.errors import ConfigError, WeightError, WeightMismatchError
from asyncrl.weights.manifest import TensorEntry, WeightManifest
from engines.weights.checking import check_layout, check_tensors, checked_copy
from engines.weights.held_versions import HeldVersions
from engines.weights.placement import PlacedTensor, in_batches, tensor_bytes

__all__ = ["DiskTransport"]

_TRANSPORT = "disk"
_NAMESPACE = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_OWNER = "owner"
_MANIFEST = "manifest.msgpack"
_INDEX = "model.safetensors.index.json"
_COMPLETE = "complete"


class DiskTransport:
    """Implements :class:`asyncrl.interfaces.WeightTransport` for processes that share a folder.

    Its calls block, a publication until its bytes are on the disk: call them from a thread where an event loop runs.
    Tensors from :meth:`pull` are the caller's own.

    Args:
        namespace: name of the run: letters, digits, ``_``, ``.`` and ``-``.
        directory: the folder. It must be there, under the same name, for publisher and pullers.
        max_versions: versions held at once.
        shard_size_bytes: a file gets no more tensors once it has this many bytes.

    What publishers of this machine left behind when they were killed is removed by the next publisher of the folder.
    Raises :class:`ConfigError` where there is no such folder.
    """

    def __init__(
        self, *, namespace: str, directory: str, max_versions: int = 2, shard_size_bytes: int = 1 << 30
    ) -> None:
        if not _NAMESPACE.fullmatch(namespace):
            raise ValueError(f"a namespace is 1..100 letters, digits, '_', '.' or '-', got {namespace!r}")
        if shard_size_bytes < 1:
            raise ValueError(f"shard_size_bytes must be at least 1, got {shard_size_bytes}")
        self.namespace = namespace
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise ConfigError(
                f"directory = {str(self.directory)!r}: no such folder on this machine",
                path="weights.options.directory",
                remedy="make it, and let every machine of the run see it under this name",
            )
        self.shard_size_bytes = shard_size_bytes
        self._held: HeldVersions[Path] = HeldVersions(max_versions=max_versions)
        self._lock = threading.Lock()
        self._home: _Home | None = None
        self._location = re.compile(re.escape(f"asyncrl.{namespace}.") + r"[A-Za-z0-9-]+\.[0-9]+\.[0-9a-f]{8}/[0-9]+")

    @property
    def max_versions(self) -> int:
        """Versions held at once, at most."""
        return self._held.max_versions

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions held, oldest first."""
        return self._held.numbers

    def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], *, version: int) -> WeightManifest:
        """Write the tensors, shard by shard as they come, and make them available under ``version``.

        Raises:
            WeightVersionError: ``version`` is not newer than the last one published.
            WeightError: ``max_versions`` are held already, a tensor is not plain or of a dtype that safetensors does
                not know, or the disk does not take them. Nothing is published then, and the version can be tried again.
        """
        with self._lock:
            self._held.check(version)
            if self._home is None:
                _purge_stale(self.directory)
                try:
                    self._home = _Home(self.directory, self.namespace)
                except OSError as error:
                    raise WeightError(f"version {version} cannot be written to {self.directory}: {error}") from error
            folder = self._home.path / str(version)
            unfinished = folder.with_name(f"new-{version}")
            try:
                manifest = self._write(unfinished, tensors, version=version, location=f"{folder.parent.name}/{version}")
                DurableFiles().rename(unfinished, folder)
            except BaseException as error:
                shutil.rmtree(unfinished, ignore_errors=True)
                if isinstance(error, OSError | SafetensorError):
                    raise WeightError(f"version {version} cannot be written to {self.directory}: {error}") from error
                raise
            self._held.add(version, folder)
            return manifest

    @contextmanager
    def pull(self, manifest: WeightManifest) -> Iterator[Mapping[str, torch.Tensor]]:
        """Verified tensors by name, in memory of their own.

        Raises:
            WeightMismatchError: a file, or an entry of the manifest, is not what it was.
            WeightError: the version is not available (any more), or belongs to another transport.
        """
        yield MappingProxyType(self._read(manifest))

    def release(self, version: int) -> None:
        """Remove ``version``. Idempotent."""
        with self._lock:
            folder = self._held.remove(version)
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Remove everything. Idempotent; also done when the interpreter ends."""
        with self._lock:
            self._held.close()
            if self._home is not None:
                self._home.remove()

    def _write(
        self, folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], *, version: int, location: str
    ) -> WeightManifest:
        files = DurableFiles()
        files.make_folder(folder)
        entries: list[TensorEntry] = []
        shards: dict[str, str] = {}
        for number, batch in enumerate(in_batches(tensors, size_bytes=self.shard_size_bytes), start=1):
            name = f"model-{number:05}.safetensors"
            _save(batch, folder / name)
            files.sync(folder / name)
            for part in batch:
                entries.append(part.entry(xxhash.xxh3_64_intdigest(part.data)))
                shards[part.name] = name
        manifest = WeightManifest(version=version, transport=_TRANSPORT, location=location, tensors=tuple(entries))
        index = {"metadata": {"total_size": manifest.size_bytes}, "weight_map": shards}
        files.write(folder / _INDEX, json.dumps(index).encode())
        files.write(folder / _MANIFEST, manifest.encode())
        files.write(folder / _COMPLETE, manifest.digest.hex().encode())
        files.sync_folder(folder)
        return manifest

    def _read(self, manifest: WeightManifest) -> dict[str, torch.Tensor]:
        if manifest.transport != _TRANSPORT or not self._location.fullmatch(manifest.location):
            raise WeightError(
                f"version {manifest.version} lies at {manifest.transport}:{manifest.location}, not on the disk of "
                f"namespace {self.namespace!r}"
            )
        folder = self.directory / manifest.location
        check_layout(manifest)
        try:
            complete = (folder / _COMPLETE).read_bytes()
            if complete != manifest.digest.hex().encode():
                raise WeightMismatchError(
                    f"version {manifest.version}: what lies in {folder} is not complete, or not the manifest's"
                )
            shards = json.loads((folder / _INDEX).read_bytes())["weight_map"]
            return _tensors(folder, shards, manifest)
        except OSError as error:
            raise WeightError(
                f"version {manifest.version} is not available: {error.strerror or error} ({folder})"
            ) from error
        except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightMismatchError(f"version {manifest.version}: {folder} is damaged: {error}") from error


class _Home:
    """A publisher's folder, locked for as long as this process lives; a forked child leaves it alone."""

    def __init__(self, directory: Path, namespace: str) -> None:
        while True:
            name = f"asyncrl.{namespace}.{_host()}.{os.getpid()}.{secrets.token_hex(4)}"
            self.path = directory / name
            self.path.mkdir(mode=0o700)
            owner = os.open(self.path / _OWNER, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with contextlib.suppress(OSError):  # a file system without locks: then nobody can purge it, either
                fcntl.flock(owner, fcntl.LOCK_EX)
            # Between creation and lock it looked stale, and another process may have purged it.
            if os.fstat(owner).st_nlink:
                break
            os.close(owner)
        self._finalizer = weakref.finalize(self, _remove_home, self.path, owner, os.getpid())

    def remove(self) -> None:
        self._finalizer()


def _remove_home(path: Path, owner: int, process: int) -> None:
    if process == os.getpid():
        shutil.rmtree(path, ignore_errors=True)
        os.close(owner)


def _purge_stale(directory: Path) -> None:
    """Remove what dead publishers of this machine left: of others nobody here can know whether they live."""
    for home in directory.glob(f"asyncrl.*.{_host()}.*.*"):
        try:
            owner = os.open(home / _OWNER, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # another user's, none of ours, or removed meanwhile
            continue
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(home, ignore_errors=True)
        except OSError:  # it lives, or the file system has no locks
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
            if place in places:  # safetensors refuses tensors that share their memory
                data = bytearray(data)
            places.add(place)
            tensor = torch.frombuffer(data, dtype=part.tensor.dtype).reshape(part.tensor.shape)
        shard[part.name] = tensor
    try:
        save_file(shard, path, metadata={"format": "pt"})
    except (KeyError, ValueError, RuntimeError) as error:
        dtypes = ", ".join(sorted({str(part.tensor.dtype) for part in batch}))
        raise WeightError(f"safetensors does not take these tensors ({dtypes}): {error}") from error


def _tensors(folder: Path, shards: Mapping[str, str], manifest: WeightManifest) -> dict[str, torch.Tensor]:
    read: dict[str, torch.Tensor] = {}
    mapped: dict[str, torch.Tensor] = {}
    for shard in sorted(set(shards.values())):
        if Path(shard).name != shard:
            raise ValueError(f"{shard!r} is no file of it")
        with safe_open(folder / shard, framework="pt") as file:
            mapped |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping

    def is_right(entry: TensorEntry) -> bool:
        tensor = mapped[entry.name]
        copy = checked_copy(tensor_bytes(entry.name, tensor), entry)
        if copy is None or copy.dtype != tensor.dtype or copy.shape != tensor.shape:
            return False
        read[entry.name] = copy
        return True

    check_tensors(manifest.tensors, is_right, manifest=manifest)
    return {entry.name: read[entry.name] for entry in manifest.tensors}
