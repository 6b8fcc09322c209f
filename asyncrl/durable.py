"""Files that are on the disk when a call returns, and whole or not there at all.

One small class between what must survive a crash and the operating system, so that a test can stand in for the disk and
stop the world before or after each of its operations.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

__all__ = ["DurableFiles"]


class DurableFiles:
    """The operations that checkpoints and ledgers are made of. All block."""

    def write(self, path: Path, content: bytes) -> None:
        """Write a file and bring it to the disk; its name in the folder follows with :meth:`sync_folder`."""
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def overwrite(self, path: Path, content: bytes, *, position: int) -> None:
        """Replace bytes inside a file that exists. Survives the death of this process, not that of the machine."""
        handle = os.open(path, os.O_WRONLY)
        try:
            os.pwrite(handle, content, position)
        finally:
            os.close(handle)

    def sync(self, path: Path) -> None:
        """Bring a file that others wrote to the disk."""
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def sync_folder(self, folder: Path) -> None:
        """Bring a folder's list of names to the disk."""
        self.sync(folder)

    def make_folder(self, folder: Path) -> None:
        """Make an empty folder, in place of what may be there."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    def rename(self, path: Path, new: Path) -> None:
        """Give a file or folder another name in its folder, at once; the disk knows when this returns."""
        path.rename(new)
        self.sync_folder(new.parent)

    def remove(self, folder: Path) -> None:
        """Remove a folder and all that is in it."""
        shutil.rmtree(folder)
