"""Folders for the files of a moment, which are cleared away even when their owner is killed.

A folder belongs to whoever made it for as long as that process holds its ``flock``. The kernel lets go of locks when a
process dies, however it dies, so a folder that can be locked has no owner any more. The first folder that a process
makes removes those (process numbers would lie: they are used again, and differ between containers that share a
``/tmp``).
"""

from __future__ import annotations

import fcntl
import functools
import os
import re
import shutil
import tempfile
import weakref
from pathlib import Path
from types import TracebackType

__all__ = ["OwnedFolder"]

_NAME = re.compile(r"asyncrl\.[a-z]+\.[a-z0-9_]{8}")


class OwnedFolder:
    """An empty folder that only this user enters, ``asyncrl.KIND.`` and eight characters, in the temporary folder.

    >>> with OwnedFolder("example") as folder:
    ...     (folder / "file").write_text("x")
    1
    >>> folder.exists()
    False

    Removed by :meth:`close`, at the end of the ``with`` block, when nobody holds this object any more, when the
    interpreter ends, or by the next process that makes one. A forked child leaves it alone.

    Args:
        kind: what it is for, in lower-case letters.

    Raises:
        OSError: it cannot be made.

    Attributes:
        path: of the folder.
    """

    def __init__(self, kind: str) -> None:
        parent = tempfile.gettempdir()
        _remove_abandoned(parent)
        self.path, lock = _made(parent, kind)
        self._finalizer = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the folder with all that lies in it. Idempotent. Blocks."""
        self._finalizer()


def _made(parent: str, kind: str) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"asyncrl.{kind}.", dir=parent))
        lock = _locked(path)
        if lock is not None:
            return path, lock
        # Between its making and its lock it looked abandoned, and another process removed it.


def _locked(path: Path) -> int | None:
    """A descriptor that holds the lock of the folder at ``path``; None if it is gone, or somebody else's."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.fstat(lock)
        if found.st_uid == os.getuid() and os.path.samestat(found, path.stat(follow_symlinks=False)):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(lock)
        raise
    os.close(lock)
    return None


def _remove(path: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)  # what is left, the next process that makes one tries again
        os.close(lock)


@functools.cache
def _remove_abandoned(parent: str) -> None:
    """Remove this user's folders in ``parent`` whose owners are gone; once in a process."""
    for name in os.listdir(parent):  # noqa: PTH208  the names are wanted
        path = Path(parent) / name
        if _NAME.fullmatch(name) and (lock := _locked(path)) is not None:
            _remove(path, lock, os.getpid())
