"""Weights through shared memory: one file per version in ``/dev/shm``, for a trainer and engines on one machine.

A file belongs to whoever created it for as long as that process holds its shared ``flock``; readers hold one too, for
as long as a tensor over the file is alive. The kernel lets go of locks when a process dies, however it dies, so

- a file that can be locked exclusively has neither owner nor reader: :meth:`SharedMemoryTransport.purge_stale` removes
  it (process numbers would lie here: they are reused, and differ between containers that share a ``/dev/shm``);
- a released file without readers is written again for a later version. Its pages are already there, and getting fresh
  pages from the kernel is most of the cost of a publication;
- a released file that is still read is only unlinked. What a reader sees never changes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import tempfile
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import torch

from asyncrl.errors import ConfigError, WeightError, WeightMismatchError
from asyncrl.weights.manifest import WeightManifest
from engines.weights.block import tensor_views, verify
from engines.weights.held_versions import HeldVersions
from engines.weights.version_file import VersionFile
from engines.weights.version_maps import VersionMaps

__all__ = ["SharedMemoryTransport"]

_TRANSPORT = "shared_memory"
_PREFIX = "asyncrl"
_NAMESPACE = re.compile(r"[A-Za-z0-9_.-]{1,100}")
# prefix.NAMESPACE.process.token.state: a version, or a file being written or waiting to be written again
_FILE_NAME = re.compile(
    re.escape(_PREFIX) + r"\.[A-Za-z0-9_.-]+\.[0-9]+\.[0-9a-f]{8}\.(?:[0-9]+|(?:new|spare)-[0-9a-f]+)"
)


class SharedMemoryTransport:
    """Implements :class:`asyncrl.interfaces.WeightTransport` for processes that share a memory file system.

    Publisher and pullers are made with the same ``namespace`` and ``directory``. Its calls block (a pull as long as
    it takes to read the weights once): call them from a thread where an event loop runs.

    Tensors from :meth:`pull` lie over a private, copy-on-write map of the file. Writing to one changes this process's
    copy and nothing else. The map lives as long as any tensor over it, so none ever dangles, but it keeps the memory
    of the whole version: a :class:`RuntimeWarning` says so if more than one (a loop variable) is alive when the
    ``with`` block ends.

    Args:
        namespace: name of the run: letters, digits, ``_``, ``.`` and ``-``.
        max_versions: versions held at once. Memory stays allocated for as many as were ever held together.
        directory: where the files lie; by default ``/dev/shm``, or the temporary directory where there is none.

    Files that runs left behind when they were killed are removed on the way in.
    """

    def __init__(self, *, namespace: str, max_versions: int = 2, directory: str | None = None) -> None:
        if not _NAMESPACE.fullmatch(namespace):
            raise ValueError(f"a namespace is 1..100 letters, digits, '_', '.' or '-', got {namespace!r}")
        self.namespace = namespace
        self.max_versions = max_versions
        self.directory = Path(directory) if directory is not None else _memory_directory()
        if not self.directory.is_dir():
            raise ConfigError(
                f"directory = {str(self.directory)!r}: no such folder on this machine",
                path="weights.options.directory",
                remedy="make it, or leave it out for shared memory",
            )
        self._lock = threading.Lock()
        self._files = _OwnFiles(max_versions)
        self._maps = VersionMaps()
        self._name = f"{_PREFIX}.{namespace}.{os.getpid()}.{secrets.token_hex(4)}"
        self._location = re.compile(re.escape(f"{_PREFIX}.{namespace}.") + r"[0-9]+\.[0-9a-f]+\.[0-9]+")
        self._finalizer = weakref.finalize(self, self._files.remove_all)
        self.purge_stale()

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions held, oldest first."""
        return self._files.held.numbers

    def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], *, version: int) -> WeightManifest:
        """Write the tensors, one at a time as they come, and make them available under ``version``.

        Raises:
            WeightVersionError: ``version`` is not newer than the last one published.
            WeightError: ``max_versions`` are held already, a tensor is not plain, or memory ran out. Nothing is
                published then, and the same version can be tried again.
        """
        with self._lock:
            self._files.held.check(version)
            file = self._files.spare.pop() if self._files.spare else VersionFile.create(self.directory, self._name)
            try:
                entries = file.write(tensors)
                path = self.directory / f"{self._name}.{version}"
                manifest = WeightManifest(
                    version=version, transport=_TRANSPORT, location=path.name, tensors=tuple(entries)
                )
                file.seal(manifest, path)
            except BaseException as error:
                file.remove()
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
                    raise WeightError(
                        f"no memory left in {self.directory} for version {version}: {error}; enlarge it "
                        f"(docker: --shm-size), or give another directory"
                    ) from error
                raise
            self._files.held.add(version, file)
            return manifest

    @contextmanager
    def pull(self, manifest: WeightManifest) -> Iterator[Mapping[str, torch.Tensor]]:
        """Verified tensors by name, over the published bytes, valid inside the ``with`` block.

        Raises:
            WeightMismatchError: a byte of the block, or an entry of the manifest, is not what it was.
            WeightError: the version is not available (any more), or belongs to another transport.
        """
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

    def release(self, version: int) -> None:
        """Free what ``version`` occupies, for a later version or altogether. Idempotent."""
        with self._lock:
            file = self._files.held.remove(version)
            if file is None:
                return
            if file.retire(self.directory / f"{self._name}.spare-{version}"):
                self._files.spare.append(file)
            else:
                file.remove()

    def close(self) -> None:
        """Unlink every file. Idempotent; also done when the interpreter ends."""
        with self._lock:
            self._files.remove_all()
        self._maps.close()

    def purge_stale(self) -> tuple[str, ...]:
        """Remove files of any run that have neither owner nor reader; returns their names.

        Not only of this namespace: a run that was killed may have had a name that no other run will ever have.
        """
        removed = []
        for path in sorted(self.directory.glob(f"{_PREFIX}.*")):
            if not _FILE_NAME.fullmatch(path.name):
                continue
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:  # another user's, a link, or removed meanwhile: not ours to purge
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
        """The verified block of a version, locked until the last view of it is gone."""
        name = manifest.location
        if manifest.transport != _TRANSPORT or not self._location.fullmatch(name):
            raise WeightError(
                f"version {manifest.version} lies at {manifest.transport}:{name}, not in the shared memory of "
                f"namespace {self.namespace!r}"
            )
        path = self.directory / name
        try:
            block, kept = self._maps.open(path)
            try:
                verify(block, manifest)
            except WeightMismatchError:
                if not kept:
                    raise
                # A tensor pulled before was written to: those pages are this process's own, not the file's.
                block, _ = self._maps.open(path, fresh=True)
                verify(block, manifest)
        except BlockingIOError as error:
            raise WeightError(f"version {manifest.version} was released") from error
        except OSError as error:
            raise WeightError(f"version {manifest.version} is not available: {error.strerror} ({path})") from error
        return block


class _OwnFiles:
    """Files this process created; a forked child leaves them alone."""

    def __init__(self, max_versions: int) -> None:
        self.held: HeldVersions[VersionFile] = HeldVersions(max_versions=max_versions)
        self.spare: list[VersionFile] = []
        self._process = os.getpid()

    def remove_all(self) -> None:
        if os.getpid() != self._process:
            return
        for file in (*self.held.close(), *self.spare):
            file.remove()
        self.spare.clear()


def _memory_directory() -> Path:
    memory = Path("/dev/shm")  # noqa: S108 files there are created exclusively, mode 0600
    return memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
