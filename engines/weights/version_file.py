"""The file that holds one version of the weights, as its owner writes it."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from asyncrl.weights.manifest import TensorEntry, WeightManifest
from engines.weights.block import block_size, header
from engines.weights.placement import HEADER_SIZE_BYTES, PlacedTensor, aligned, in_batches

__all__ = ["VersionFile"]

_CHUNK_SIZE_BYTES = 4 << 20  # most tensors whole; stays in the third-level cache between checksum and copy
_BATCH_SIZE_BYTES = 16 << 20  # what a thread is handed at a time: threads cost little beside it
_THREADS = min(2, os.cpu_count() or 1)  # one leaves half of the memory's bandwidth unused, three find none left


class VersionFile:
    """A file of this process, under a shared lock from creation to removal.

    What it holds for the first time is written by ``pwrite``: a full memory file system is an error then, not a
    signal. Its pages stay, and are copied into through a map from the second time on: the kernel's way takes twice as
    long as a copy.
    """

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor = descriptor
        self._path = path
        self._pages: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)

    @classmethod
    def create(cls, directory: Path, name: str) -> VersionFile:
        """A new file ``name.new-TOKEN``, locked."""
        while True:
            path = directory / f"{name}.new-{secrets.token_hex(4)}"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            # Between creation and lock it looked stale, and another process may have purged it.
            if os.fstat(descriptor).st_nlink:
                return cls(descriptor, path)
            os.close(descriptor)

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> list[TensorEntry]:
        """Write the tensors as they come, in two threads that take the checksums while the bytes are warm.

        At most four batches are held: two that are written, one that waits for a thread, and the next. No thread writes
        any more when it returns or raises.
        """
        self._map()
        writing: list[Future[list[TensorEntry]]] = []
        unfinished: set[Future[list[TensorEntry]]] = set()
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="publish-weights") as threads:
            for batch in in_batches(tensors, size_bytes=_BATCH_SIZE_BYTES):
                if len(unfinished) > _THREADS:  # whichever ends first: one may be half of the model
                    ended, unfinished = wait(unfinished, return_when=FIRST_COMPLETED)
                    for each in ended:
                        each.result()
                writing.append(threads.submit(self._write_batch, batch))
                unfinished.add(writing[-1])
                del batch
            return [entry for future in writing for entry in future.result()]

    def seal(self, manifest: WeightManifest, path: Path) -> None:
        """Make the written block complete, under its final name."""
        os.ftruncate(self._descriptor, block_size(manifest))
        self._path.rename(path)
        self._path = path
        self._write_at(0, header(manifest))

    def retire(self, path: Path) -> bool:
        """Take the block out of sight. True if the file can be written again; if not, only removed."""
        try:
            self._path.rename(path)
        except FileNotFoundError:  # somebody emptied the directory: there is nothing to use again
            return False
        self._path = path
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # a reader is left
            return False
        # A reader that had opened the old name and locks only now finds no header.
        self._write_at(0, bytes(HEADER_SIZE_BYTES))
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)
        # While one lock is exchanged for the other there is none, and another process may have purged the file.
        return os.fstat(self._descriptor).st_nlink > 0

    def remove(self) -> None:
        """Unlink the file; its bytes stay for as long as somebody reads them."""
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def _map(self) -> None:
        """Make what the file has room for writable in place."""
        size_bytes = os.fstat(self._descriptor).st_size
        if size_bytes > len(self._pages):
            self._pages = np.frombuffer(mmap.mmap(self._descriptor, size_bytes), dtype=np.uint8)
        self._pages = self._pages[:size_bytes]

    def _write_batch(self, batch: list[PlacedTensor]) -> list[TensorEntry]:
        entries = []
        for part in batch:
            checksum = xxhash.xxh3_64()
            for start in range(0, len(part.data), _CHUNK_SIZE_BYTES):
                chunk = part.data[start : start + _CHUNK_SIZE_BYTES]
                checksum.update(chunk)
                self._write_at(part.offset + start, chunk)
            end = part.offset + len(part.data)
            self._write_at(end, bytes(aligned(end) - end))
            entries.append(part.entry(checksum.intdigest()))
        return entries

    def _write_at(self, offset: int, data: bytes | memoryview) -> None:
        end = offset + len(data)
        if end <= len(self._pages):
            self._pages[offset:end] = np.frombuffer(data, dtype=np.uint8)
            return
        rest = memoryview(data)
        while rest:
            rest = rest[os.pwrite(self._descriptor, rest, end - len(rest)) :]
