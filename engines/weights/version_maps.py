"""Files of weight versions as a reader maps them, and the maps it keeps.

A publisher writes its files again and again, and mapping the pages of one anew takes longer than checking them. So a
map is kept when its last tensor is gone, unlocked, and serves the next version that comes in the same file. It is
private: what is written to a tensor stays in this process, also in a map that is kept. Whoever opens one checks every
byte and asks for a fresh one where they differ.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections import deque
from pathlib import Path

import numpy as np

__all__ = ["VersionMaps"]

_KEPT = 2  # a version that serves, and the next one


class VersionMaps:
    """The maps of one process; may be used from several threads. A forked child takes none of its parent's."""

    def __init__(self) -> None:
        self._idle: deque[_Pages] = deque(maxlen=_KEPT)

    def open(self, path: Path, *, fresh: bool = False) -> tuple[memoryview, bool]:
        """The bytes of a file, locked until the last view of them is gone; and whether an earlier map serves for them.

        Raises:
            FileNotFoundError, PermissionError, OSError: it cannot be opened, or is a link.
            BlockingIOError: its owner has locked it, to write it again.
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
        root = np.frombuffer(pages.bytes, dtype=np.uint8)  # every view holds it, so it is the last one to go
        weakref.finalize(root, _leave, pages, weakref.ref(self)).atexit = False
        return root.data, kept is not None

    def close(self) -> None:
        """Keep no map from now on. Those that are read stay until their last view is gone."""
        self._idle = deque(maxlen=0)

    def keep(self, pages: _Pages) -> None:
        """A map that nobody reads any more."""
        self._idle.append(pages)

    def _take(self, status: os.stat_result) -> _Pages | None:
        """The map of that file, if one is kept. Maps of files that are gone are let go of."""
        taken = None
        for _ in range(len(self._idle)):
            try:
                pages = self._idle.popleft()
            except IndexError:  # another thread was faster
                break
            if taken is None and pages.fits(status):
                taken = pages
            elif os.fstat(pages.descriptor).st_nlink:
                self._idle.append(pages)
        return taken


class _Pages:
    """One map of a file, with a descriptor of its own that carries the lock."""

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


def _leave(pages: _Pages, maps: weakref.ref[VersionMaps]) -> None:
    if pages.process != os.getpid():  # a child has its parent's lock in common with it
        return
    fcntl.flock(pages.descriptor, fcntl.LOCK_UN)
    keeper = maps()
    if keeper is not None:
        keeper.keep(pages)
