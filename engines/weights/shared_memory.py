"""Weights through shared memory: one file per version in ``/dev/shm``, for a trainer and engines on one machine.

The process that created a file holds a shared ``flock`` on it; readers hold one too, for as long as a tensor over the
file is alive. The kernel releases locks when a process dies, however it dies, so

- a file that can be locked exclusively has neither owner nor reader: :meth:`SharedMemoryTransport.purge_stale` removes
  it (process numbers would not do: they are used again, and differ between containers that share ``/dev/shm``);
- a released file without readers is written again for a later version. Its pages are already there, and getting fresh
  pages from the kernel is most of the cost of a publication;
- a released file that still has readers is only unlinked. The bytes that a reader sees never change.

Mapping the pages of a file anew takes longer than checking them. So a reader keeps a map, unlocked, when its last
tensor is gone, and uses it for the next version in the same file. The map is private: what this process writes to a
tensor stays in this process, also in a map that is kept. A reader checks every byte, and maps the file anew where they
differ.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import secrets
import tempfile
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from asyncrl.errors import WeightError, WeightMismatchError
from asyncrl.weights import TensorEntry, WeightManifest, host_chunks
from engines.weights.transport import (
    HEADER_SIZE_BYTES,
    PlacedTensor,
    VersionedTransport,
    aligned,
    block_size,
    existing_folder,
    header,
    in_batches,
    tensor_views,
    verify,
)

_CHUNK_SIZE_BYTES = 4 << 20  # most tensors whole; stays in the third-level cache between checksum and copy
_BATCH_SIZE_BYTES = 16 << 20  # for one thread at a time; the cost of threads is small beside it
_THREADS = min(2, os.cpu_count() or 1)  # one uses half of the memory's bandwidth, two use all of it


class VersionFile:
    """A version's file as its publisher writes it, under a shared lock from creation to removal.

    The first version is written by ``pwrite``: a full memory file system is an error then, not a signal. Later ones are
    copied through a map into the pages that are there, which takes half as long.
    """

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor = descriptor
        self._path = path
        self._pages: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)

    @classmethod
    def create(cls, directory: Path, name: str) -> VersionFile:
        while True:
            path = directory / f"{name}.new-{secrets.token_hex(4)}"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            # Between creation and lock it looks abandoned, and another process may have purged it.
            if os.fstat(descriptor).st_nlink:
                return cls(descriptor, path)
            os.close(descriptor)

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> list[TensorEntry]:
        """Write the tensors as they come, in two threads that compute the checksums while the bytes are in the cache.

        At most four batches are held: two being written, one that waits for a thread, and the next. No thread writes
        any more when this returns or raises.
        """
        self._map()
        writing: list[Future[list[TensorEntry]]] = []
        unfinished: set[Future[list[TensorEntry]]] = set()
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="publish-weights") as threads:
            for batch in in_batches(tensors, size_bytes=_BATCH_SIZE_BYTES):
                if len(unfinished) > _THREADS:  # not in order: one may be half of the model
                    ended, unfinished = wait(unfinished, return_when=FIRST_COMPLETED)
                    for each in ended:
                        each.result()
                writing.append(threads.submit(self._write_batch, batch))
                unfinished.add(writing[-1])
                del batch
            return [entry for future in writing for entry in future.result()]

    def seal(self, manifest: WeightManifest, path: Path) -> None:
        """Complete the written block, under its final name."""
        os.ftruncate(self._descriptor, block_size(manifest))
        self._path.rename(path)
        self._path = path
        self._write_at(0, header(manifest))

    def retire(self, path: Path) -> bool:
        """Make the block unavailable. Return True if the file can be written again, False if only removed."""
        try:
            self._path.rename(path)
        except FileNotFoundError:  # the directory was emptied: there is no file to write again
            return False
        self._path = path
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # it has a reader
            return False
        # A reader that had opened the old name and locks only now will find no header.
        self._write_at(0, bytes(HEADER_SIZE_BYTES))
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)
        # The exchange of locks is not atomic: another process may have purged the file.
        return os.fstat(self._descriptor).st_nlink > 0

    def remove(self) -> None:
        """Unlink the file; its bytes stay until its last reader is done."""
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def _map(self) -> None:
        size_bytes = os.fstat(self._descriptor).st_size
        if size_bytes > len(self._pages):
            self._pages = np.frombuffer(mmap.mmap(self._descriptor, size_bytes), dtype=np.uint8)
        self._pages = self._pages[:size_bytes]

    def _write_batch(self, batch: list[PlacedTensor]) -> list[TensorEntry]:
        entries = []
        for part in batch:
            checksum = xxhash.xxh3_64()
            end = part.offset
            for chunk in host_chunks(part.tensor, size_bytes=_CHUNK_SIZE_BYTES):
                checksum.update(chunk)
                self._write_at(end, chunk)
                end += len(chunk)
            self._write_at(end, bytes(aligned(end) - end))
            entries.append(part.entry(checksum.intdigest()))
        batch.clear()  # the pool of threads lets go of it only after it has reported the end
        return entries

    def _write_at(self, offset: int, data: bytes | memoryview) -> None:
        end = offset + len(data)
        if end <= len(self._pages):
            self._pages[offset:end] = np.frombuffer(data, dtype=np.uint8)
            return
        rest = memoryview(data)
        while rest:
            rest = rest[os.pwrite(self._descriptor, rest, end - len(rest)) :]


_KEPT_MAPS = 2  # for the version in use, and the next one


class VersionMaps:
    """The maps of a reading process. Thread-safe. A forked child does not use its parent's."""

    def __init__(self) -> None:
        self._idle: deque[_Pages] = deque(maxlen=_KEPT_MAPS)

    def open(self, path: Path, *, fresh: bool = False) -> tuple[memoryview, bool]:
        """Map a file, locked until the last view of its bytes is gone; return them and whether the map was kept before.

        Raises:
            OSError: it cannot be opened, or is a link; :class:`BlockingIOError` if its owner has locked it.
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            status = os.fstat(descriptor)
            if status.st_size == 0:
                return memoryview(b""), False
            kept = None if fresh else self._take(status)
            pages = _Pages(descriptor, status) if kept is None else kept
            fcntl.flock(pages.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        finally:
            os.close(descriptor)
        root = np.frombuffer(pages.bytes, dtype=np.uint8)  # every view refers to it
        weakref.finalize(root, _unlock, pages, weakref.ref(self)).atexit = False
        return root.data, kept is not None

    def close(self) -> None:
        """Keep no maps any more. Those in use stay until their last view is gone."""
        self._idle = deque(maxlen=0)

    def keep(self, pages: _Pages) -> None:
        self._idle.append(pages)

    def _take(self, status: os.stat_result) -> _Pages | None:
        taken = None
        for _ in range(len(self._idle)):
            try:
                pages = self._idle.popleft()
            except IndexError:  # another thread has taken it
                break
            if taken is None and pages.fits(status):
                taken = pages
            elif os.fstat(pages.descriptor).st_nlink:
                self._idle.append(pages)
        return taken


class _Pages:
    """One map of a file, with a descriptor of its own that holds the lock."""

    def __init__(self, descriptor: int, status: os.stat_result) -> None:
        self.descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self.descriptor).atexit = False
        self.bytes = mmap.mmap(
            descriptor, status.st_size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
        self.process = os.getpid()
        self._identity = (status.st_dev, status.st_ino, status.st_size)

    def fits(self, status: os.stat_result) -> bool:
        return self._identity == (status.st_dev, status.st_ino, status.st_size) and self.process == os.getpid()


def _unlock(pages: _Pages, maps: weakref.ref[VersionMaps]) -> None:
    if pages.process != os.getpid():  # a child shares its parent's lock
        return
    fcntl.flock(pages.descriptor, fcntl.LOCK_UN)
    keeper = maps()
    if keeper is not None:
        keeper.keep(pages)


_PREFIX = "asyncrl"
# prefix.NAMESPACE.process.token.state: a version, or a file being written or waiting to be written again
_FILE_NAME = re.compile(
    re.escape(_PREFIX) + r"\.[A-Za-z0-9_.-]+\.[0-9]+\.[0-9a-f]{8}\.(?:[0-9]+|(?:new|spare)-[0-9a-f]+)"
)


class SharedMemoryTransport(VersionedTransport[VersionFile]):
    """Implements :class:`asyncrl.weights.WeightTransport` for processes that share a memory file system.

    Publisher and pullers are made with the same ``namespace`` and ``directory`` (by default ``/dev/shm``, or the
    temporary directory without it). Making one removes the files of killed runs. Memory stays allocated for as many
    versions as were ever held together, ``max_versions`` at most.

    Tensors from :meth:`pull` lie over a private, copy-on-write map of the file. Writing to one changes this process's
    copy only. The map lives as long as any tensor over it and keeps the memory of the whole version: there is a
    :class:`RuntimeWarning` if more than one (a loop variable) is alive when the ``with`` block ends.
    """

    name = "shared_memory"
    medium = "in the shared memory"
    one_machine = True
    """Whether its pullers have to run on the publisher's machine; the start of a run checks it."""

    def __init__(self, *, namespace: str, max_versions: int = 2, directory: str | None = None) -> None:
        super().__init__(
            namespace=namespace,
            max_versions=max_versions,
            location=rf"{_PREFIX}\.{re.escape(namespace)}\.[0-9]+\.[0-9a-f]+\.[0-9]+",
        )
        remedy = "make it, or leave it out for shared memory"
        self.directory = existing_folder(_memory_directory() if directory is None else directory, remedy=remedy)
        self._files = _OwnFiles(self._held)
        self._maps = VersionMaps()
        self._file_name = f"{_PREFIX}.{namespace}.{os.getpid()}.{secrets.token_hex(4)}"
        self._finalizer = weakref.finalize(self, self._files.remove_all)
        self.purge_stale()

    def _write(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> tuple[WeightManifest, VersionFile]:
        file = self._files.spare.pop() if self._files.spare else VersionFile.create(self.directory, self._file_name)
        try:
            entries = file.write(tensors)
            path = self.directory / f"{self._file_name}.{version}"
            manifest = self._manifest(version, path.name, entries)
            file.seal(manifest, path)
        except BaseException as error:
            file.remove()
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
                raise WeightError(
                    f"no memory left in {self.directory} for version {version}: {error}; enlarge it "
                    f"(docker: --shm-size), or give another directory"
                ) from error
            raise
        return manifest, file

    @contextmanager
    def pull(self, manifest: WeightManifest) -> Iterator[Mapping[str, torch.Tensor]]:
        block = self._open(manifest)
        tensors, slices = tensor_views(block, manifest)
        alive = [weakref.ref(part) for part in slices]
        del block, slices
        yield MappingProxyType(tensors)
        # Not after an exception: its traceback keeps the frames of the block, and all their tensors, alive.
        tensors.clear()
        left = sum(reference() is not None for reference in alive)
        if left > 1:
            warnings.warn(
                f"{left} tensors of weight version {manifest.version} outlive the block that pulled them; they keep "
                f"{manifest.size_bytes} bytes of shared memory: copy what is needed",
                RuntimeWarning,
                stacklevel=3,
            )

    def _free(self, version: int, place: VersionFile) -> None:
        if place.retire(self.directory / f"{self._file_name}.spare-{version}"):
            self._files.spare.append(place)
        else:
            place.remove()

    def _close(self) -> None:
        self._files.remove_all()
        self._maps.close()

    def purge_stale(self) -> tuple[str, ...]:
        """Remove files, of any namespace, that have neither owner nor reader; return their names."""
        removed = []
        for path in sorted(self.directory.glob(f"{_PREFIX}.*")):
            if not _FILE_NAME.fullmatch(path.name):
                continue
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:  # another user's, a link, or removed meanwhile
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
                removed.append(path.name)
            except BlockingIOError:
                continue
            finally:
                os.close(descriptor)
        return tuple(removed)

    def _open(self, manifest: WeightManifest) -> memoryview:
        self._located(manifest)
        path = self.directory / manifest.location
        try:
            block, kept = self._maps.open(path)
            try:
                verify(block, manifest)
            except WeightMismatchError:
                if not kept:
                    raise
                # This process wrote to a tensor pulled before: those pages are its own, not the file's.
                block, _ = self._maps.open(path, fresh=True)
                verify(block, manifest)
        except BlockingIOError as error:
            raise WeightError(f"version {manifest.version} was released") from error
        except OSError as error:
            raise WeightError(f"version {manifest.version} is not available: {error.strerror} ({path})") from error
        return block


class _OwnFiles:
    """The files that this process created. A forked child does not remove them."""

    def __init__(self, held: dict[int, VersionFile]) -> None:
        self.held = held
        self.spare: list[VersionFile] = []
        self._process = os.getpid()

    def remove_all(self) -> None:
        if os.getpid() != self._process:
            return
        for file in (*self.held.values(), *self.spare):
            file.remove()
        self.held.clear()
        self.spare.clear()


def _memory_directory() -> Path:
    memory = Path("/dev/shm")  # noqa: S108 files there are created exclusively, mode 0600
    return memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
