"""Files that survive crashes, and temporary directories that do not outlive their process.

:class:`DurableFiles` has every file operation that checkpoints and ledgers are made of. A *sealed folder* is written
under another name, brought to the disk, sealed with ``manifest.json`` and then renamed into place, so a folder that has
its final name is complete. The manifest holds size and checksum of every file, under a checksum of its own:
:func:`verify_folder` finds whatever the disk has changed since.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import sqlite3
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

import xxhash

from asyncrl.errors import CheckpointError

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

MANIFEST = "manifest.json"

FileEntry: TypeAlias = Mapping[str, Any]
"""``size_bytes`` and ``xxh3_128`` of a file, as a manifest has them."""


def _ignore(moment: str, path: Path) -> None:
    """Do nothing."""


class DurableFiles:
    """The file operations of checkpoints and ledgers. What they write is on the disk when they return. All block.

    ``reached`` is called at each moment at which a crash would leave something else than at the moment before, with its
    name (``"before write"``, ``"written"``, ``"synced"``, ...) and the path. The crash tests end the process there.
    """

    def __init__(self, reached: Callable[[str, Path], None] = _ignore) -> None:
        self.reached = reached

    def write(self, path: Path, content: bytes) -> FileEntry:
        """Write a file. Its name in the folder is durable after :meth:`sync` of the folder."""
        return self.write_chunks(path, [content])

    def write_chunks(self, path: Path, chunks: Iterable[bytes | memoryview]) -> FileEntry:
        digest = xxhash.xxh3_128()
        self.reached("before write", path)
        with path.open("wb") as file:
            self.reached("opened", path)
            for chunk in chunks:
                file.write(chunk)
                digest.update(chunk)
            file.flush()
            self.reached("written", path)
            os.fsync(file.fileno())
            size_bytes = file.tell()
        self.reached("synced", path)
        return _entry(size_bytes, digest)

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
        """Bring a file that was written by other means, or the names in a folder, to the disk."""
        self.reached("before sync", path)
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        self.reached("synced", path)

    def sync_tree(self, folder: Path) -> None:
        for path in sorted(folder.rglob("*")):
            self.sync(path)
        self.sync(folder)

    def make_folder(self, folder: Path) -> None:
        """Make an empty folder; remove what is there under that name."""
        self.reached("before making", folder)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.reached("made", folder)

    def rename(self, path: Path, new: Path) -> None:
        """Give a file or folder another name in its folder, atomically."""
        self.reached("before rename", path)
        path.rename(new)
        self.reached("renamed", new)
        self.sync(new.parent)

    def remove(self, folder: Path) -> None:
        """Remove a folder with its files, one by one."""
        self.reached("before removing", folder)
        for path in sorted(folder.rglob("*"), reverse=True):
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink()
                self.reached("amid removing", folder)
        folder.rmdir()
        self.reached("removed", folder)

    # -------------------------------------------------------------------------------------------------- sealed folders

    def seal(self, folder: Path, *, known: Mapping[str, FileEntry] | None = None) -> None:
        """Bring a folder to the disk and write its manifest, the last of its files.

        Files in ``known`` are not read again: they have been written through this class, on any machine.

        Raises:
            CheckpointError: one of them is not there, or has another size.
        """
        entries = _entries(folder, known=known)
        if other := sorted(name for name, entry in (known or {}).items() if entries.get(name) != entry):
            raise CheckpointError(
                f"{folder} has no {other[0]} as it was written to it elsewhere: all ranks need one file system"
            )
        self.sync_tree(folder)
        self.write(folder / MANIFEST, encode_manifest(entries))
        self.sync(folder)

    def replace(self, partial: Path, folder: Path) -> None:
        """Give ``partial``, which is complete and durable, the place of ``folder``.

        After a crash ``folder`` is the old one or the new one, or is missing (between two renames) while the old one
        lies beside it as ``.NAME.replaced``.
        """
        replaced = folder.with_name(f".{folder.name}.replaced")
        replaces = folder.exists()
        if replaces:
            if replaced.exists():
                self.remove(replaced)
            self.rename(folder, replaced)
        self.rename(partial, folder)
        if replaces:
            self.remove(replaced)

    @contextmanager
    def replacing(self, folder: Path, *, sealed: bool = True) -> Iterator[Path]:
        """Yield an empty folder which takes the place of ``folder`` when the block ends without an error.

        With ``sealed`` it gets a manifest. ``folder`` is never half written; see :meth:`replace`.
        """
        folder = folder.absolute()
        partial = partial_name(folder)
        self.make_folder(partial)
        try:
            yield partial
            if sealed:
                self.seal(partial)
            else:
                self.sync_tree(partial)
            self.replace(partial, folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


FULL_DISK_S = 600.0
"""Seconds for which the writer of a file waits for room on a full disk."""

_RETRY_S = 1.0


def written_when_there_is_room(write: Callable[[], _T], *, path: Path, ends: Callable[[float], bool]) -> _T:
    """Return what ``write`` returns; while the disk is full call it again, for at most :data:`FULL_DISK_S`. Blocks.

    ``ends`` waits for so many seconds, or until nothing is to be waited for any more, when it returns True.

    Raises:
        Exception: of the last call.
    """
    until_s: float | None = None
    while True:
        try:
            return write()
        except Exception as error:
            code, sqlite_code = getattr(error, "errno", None), getattr(error, "sqlite_errorcode", None)
            if code not in (errno.ENOSPC, errno.EDQUOT) and sqlite_code != sqlite3.SQLITE_FULL:
                raise
            if until_s is None:
                until_s = time.monotonic() + FULL_DISK_S
                _log.warning("%s cannot be written (%s): it waits for room for %g s", path, error, FULL_DISK_S)
            if time.monotonic() >= until_s or ends(_RETRY_S):
                raise


def partial_name(folder: Path) -> Path:
    """Return the path under which ``folder`` is written before it is complete."""
    return folder.with_name(f".{folder.name}.partial")


def is_sealed(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def verify_folder(folder: Path, *, part: int = 0, parts: int = 1) -> None:
    """Check every file of a sealed folder against its manifest; reads them all, or one ``part`` of several.

    Raises:
        CheckpointError: the folder is not sealed, or a file is missing, changed, or not in the manifest.
    """
    expected = read_manifest(folder)
    others = [name for number, name in enumerate(sorted(expected)) if number % parts != part]
    found = _entries(folder, known={name: expected[name] for name in others})
    for name in sorted({*expected, *found}):
        if name not in found:
            raise CheckpointError(f"{folder} is damaged: {name} is missing")
        if name not in expected:
            raise CheckpointError(f"{folder} is damaged: {name} does not belong to it")
        _compare(folder / name, found[name], expected[name])


def read_sealed(folder: Path, name: str) -> bytes:
    """Return one file of a sealed folder, checked against the manifest.

    Raises:
        CheckpointError: the folder is not sealed, or the file is missing or changed.
    """
    expected = read_manifest(folder)
    try:
        content = (folder / name).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{folder / name} cannot be read: {error}") from error
    _compare(folder / name, _entry(len(content), xxhash.xxh3_128(content)), expected.get(name))
    return content


def _compare(path: Path, found: Mapping[str, Any], expected: Any) -> None:
    if found != expected:
        raise CheckpointError(f"{path} is damaged: it is {found}, its manifest says {expected}")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return size and checksum of every file by its path below ``folder``, as they were sealed."""
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
        entries: dict[str, Any] = json.loads(content)["files"]
        damaged = encode_manifest(entries) != content
    except OSError as error:
        raise CheckpointError(f"{folder} is not a complete checkpoint: {MANIFEST}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    if damaged or not isinstance(entries, dict):
        raise CheckpointError(f"{path} is damaged: its checksum does not match")
    return entries


def encode_manifest(entries: Mapping[str, Any]) -> bytes:
    """Encode a manifest. There is one encoding of the same entries, so any other bytes are damaged."""
    checksum = xxhash.xxh3_64_hexdigest(json.dumps(entries, sort_keys=True).encode())
    return json.dumps({"files": entries, "xxh3_64": checksum}, sort_keys=True, indent=1).encode()


def _entries(folder: Path, *, known: Mapping[str, FileEntry] | None = None) -> dict[str, FileEntry]:
    """Return size and checksum of every file but the manifest by its path below ``folder``, as they are now.

    A file whose size is the one that is ``known`` is not read.
    """
    entries: dict[str, FileEntry] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != MANIFEST:
            if known and (entry := known.get(name)) and entry["size_bytes"] == path.stat().st_size:
                entries[name] = entry
                continue
            entries[name] = file_entry(path)
    return entries


def file_entry(path: Path) -> FileEntry:
    """Return size and checksum of a file, as it is now."""
    with path.open("rb") as file:
        digest: Any = hashlib.file_digest(file, xxhash.xxh3_128)
        return _entry(file.tell(), digest)


def _entry(size_bytes: int, digest: xxhash.xxh3_128) -> FileEntry:
    return {"size_bytes": size_bytes, "xxh3_128": digest.hexdigest()}


# -------------------------------------------------------------------------------------------------- temporary folders

_NAME = re.compile(r"asyncrl\.[a-z]+\.[a-z0-9_]{8}")


class LockedTemporaryDirectory:
    """A crash-safe temporary directory ``asyncrl.KIND.XXXXXXXX``, which only this user can enter.

    The directory is removed by :meth:`close`, at the end of the ``with`` block, when this object is garbage-collected,
    or when the interpreter exits. The process that made it holds its ``flock``, which the kernel releases however the
    process dies, so the first directory that another process makes removes all that can be locked. (Process numbers
    would not do: they are used again, and differ between containers that share ``/tmp``.) A forked child does not
    remove it. ``kind`` is in lower-case letters.

        >>> with LockedTemporaryDirectory("example") as folder:
        ...     (folder / "file").write_text("x")
        1
        >>> folder.exists()
        False
    """

    def __init__(self, kind: str) -> None:
        parent = tempfile.gettempdir()
        _remove_abandoned(parent)
        lock = None
        while lock is None:  # before it is locked it looks abandoned, and another process may remove it
            self.path = Path(tempfile.mkdtemp(prefix=f"asyncrl.{kind}.", dir=parent))
            lock = _lock(self.path)
        self._finalizer = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the directory with its contents. Idempotent. Blocks."""
        self._finalizer()


def _lock(path: Path) -> int | None:
    """Lock a directory of this user; None if it is gone, or is another user's or another process's."""
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
        _remove_tree(path)  # the next process that makes a directory removes what is left
        os.close(lock)


def _remove_tree(folder: Path) -> None:
    """Remove a directory as untrusted programs leave it: with some in it that have no permissions, or any depth."""
    with suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if folder.is_symlink() or not folder.is_dir():
        return
    folder.chmod(0o700)
    folders, unique = [folder], secrets.token_hex(8)
    for each in folders:  # they are moved into the first one, so that no path is too long
        for entry in list(os.scandir(each)):
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    Path(entry).chmod(0o700)
                    folders.append(Path(entry).rename(folder / f"{unique}.{len(folders)}"))
                else:
                    Path(entry).unlink()
    for each in reversed(folders):
        with suppress(OSError):
            each.rmdir()


@functools.cache
def _remove_abandoned(parent: str) -> None:
    """Remove this user's directories in ``parent`` whose processes have ended; once per process."""
    for name in os.listdir(parent):  # noqa: PTH208  the names are wanted
        path = Path(parent) / name
        if _NAME.fullmatch(name) and (lock := _lock(path)) is not None:
            _remove(path, lock, os.getpid())
