"""Files that are on the disk when a call returns, and whole or not there at all.

One small class between what must survive a crash and the operating system. It tells whoever wants to know of each
moment at which a crash would leave something else than a moment before: ``benchmarks/crash_points.py`` dies there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

__all__ = ["DurableFiles"]


def _nobody(moment: str, path: Path) -> None:
    """Is told, and does nothing."""


class DurableFiles:
    """The operations that checkpoints and ledgers are made of. All block.

    Args:
        reached: told of each moment (``"before write"``, ``"written"``, ``"synced"``, ...) and the path it is about.
    """

    def __init__(self, reached: Callable[[str, Path], None] = _nobody) -> None:
        self.reached = reached

    def write(self, path: Path, content: bytes) -> None:
        """Write a file and bring it to the disk; its name in the folder follows with :meth:`sync_folder`."""
        self.reached("before write", path)
        with path.open("wb") as file:
            self.reached("opened", path)
            file.write(content)
            file.flush()
            self.reached("written", path)
            os.fsync(file.fileno())
        self.reached("synced", path)

    def overwrite(self, path: Path, content: bytes, *, position: int) -> None:
        """Replace bytes inside a file that exists. Survives the death of this process, not that of the machine."""
        self.reached("before overwrite", path)
        handle = os.open(path, os.O_WRONLY)
        try:
            os.pwrite(handle, content, position)
        finally:
            os.close(handle)
        self.reached("overwritten", path)

    def sync(self, path: Path) -> None:
        """Bring a file that others wrote to the disk."""
        self.reached("before sync", path)
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        self.reached("synced", path)

    def sync_folder(self, folder: Path) -> None:
        """Bring a folder's list of names to the disk."""
        self.sync(folder)

    def make_folder(self, folder: Path) -> None:
        """Make an empty folder, in place of what may be there."""
        self.reached("before making", folder)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.reached("made", folder)

    def rename(self, path: Path, new: Path) -> None:
        """Give a file or folder another name in its folder, at once; the disk knows when this returns."""
        self.reached("before rename", path)
        path.rename(new)
        self.reached("renamed", new)
        self.sync_folder(new.parent)

    def remove(self, folder: Path) -> None:
        """Remove a folder and all that is in it, file by file."""
        self.reached("before removing", folder)
        for path in sorted(folder.rglob("*"), reverse=True):
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink()
                self.reached("amid removing", folder)
        folder.rmdir()
        self.reached("removed", folder)
