"""A run's checkpoints at a URL, each with all that a machine needs which has nothing of the run (``checkpoint.url``).

    URL/RUN/000002-5f0c1d9e-00000007-step-000040/   the 7th write of the second process of the run, named at random
        checkpoints/step-000040/                    the sealed folder of :mod:`asyncrl.trainer.checkpoint`
        ledger.sqlite, config.toml, ...             what else of the run's folder a resume reads, as it was then
        manifest.json                               size and checksum of each file above; written last

A store of objects has no rename, so the manifest is what makes a checkpoint: it is the last that is written and the
first that is deleted, and readers take the newest one of which every file is there with its checksum. S3 and Google
Cloud Storage show every write to every later read; nothing more is relied on. Each write has a name of its own, so no
file of one lies under the manifest of another. Names are in the order of time.

One process at a time goes on with a run: each claims the next number by a write without a manifest and then lists what
is there, so of two that begin at once at least one finds the other; and one that finds a later process seals and
removes nothing any more. The run's folder names in ``.stored`` the writes and processes whose progress it has, so a
folder that was left behind does not go on beside what another machine has done since.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import re
import secrets
import shutil
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

from asyncrl.errors import CheckpointError, ConfigError, StorageError
from asyncrl.io import (
    MANIFEST,
    DurableFiles,
    FileEntry,
    encode_manifest,
    file_entry,
    read_manifest,
)
from asyncrl.ledger import Ledger
from asyncrl.runtime import in_abandonable_thread, shield_until_done
from asyncrl.storage import Store, path_below
from asyncrl.trainer.checkpoint import NOT_WRITTEN, step_of

_CHANGING = ("config*.toml", "*.jsonl", "meters/*")
"""Files of a run that change while it goes on; they are copied, and the copies are written."""
_UNCHANGING = ("model", "critic", "checkpoints/warm_start")
"""Folders that stay as they are. What else is in the folder of a run, no resume reads."""
_KNOWN = ".stored"
_WRITE = re.compile(r"\d{6}-[0-9a-f]{8}-\d{8}-step-\d{6,}")
_PROCESS = len("000001-5f0c1d9e")

Ranks: TypeAlias = Callable[[str], Awaitable[Collection[str]]]
"""Called with the URL of a checkpoint; returns the names of its files that the ranks have written there."""

_log = logging.getLogger(__name__)


class StoredRun:
    """Writes the checkpoints of the run in folder ``run`` below ``url``, one at a time, and keeps the newest ``keep``.

    ``ledger`` is copied with each. ``failed`` is called with the step of one that could not be written, and why. Making
    one asks the store and claims the run, so it blocks.

    Raises:
        ConfigError: the URL cannot be used.
        StorageError: there is no such bucket, it refuses, or it cannot be reached.
        CheckpointError: checkpoints of another run are there, or, where it is ``resumed``, progress that ``run`` lacks;
            or another process begins at the same time.
    """

    def __init__(
        self,
        url: str,
        run: Path,
        *,
        keep: int,
        resumed: bool,
        failed: Callable[[int, str], object] = lambda step, reason: None,
    ) -> None:
        self._store = Store(f"{url.rstrip('/')}/{run.name}", key="checkpoint.url")
        self._run, self._keep, self._failed = run, keep, failed
        self.ledger: Ledger | None = None
        self._numbers = itertools.count()
        self._waiting: list[tuple[Path, Ranks]] = []
        self._sending: asyncio.Task[None] | None = None
        sealed, unsealed = _writes(self._store)
        number = max((int(write.partition("-")[0]) for write in (*sealed, *unsealed)), default=0) + 1
        if number > 1 and not resumed:
            raise CheckpointError(f"{self._store.url} has checkpoints of another run: choose another name or URL")
        if sealed and not sealed[-1].startswith(_known(run)):
            raise CheckpointError(
                f"{self._store.url} went on to step {step_of(sealed[-1])} in another process, and {run} lacks that: "
                "move the folder away and resume the URL, or choose another checkpoint.url"
            )
        self._process = f"{number:06d}-{secrets.token_hex(4)}"
        claim = self._next_write(step=0)
        self._store.write(f"{claim}/process", f"{socket.gethostname()} {os.getpid()}\n".encode())
        try:
            self._check_alone()
            _add_known(run, [self._process])
        except BaseException:
            self._store.remove(claim)
            raise

    def send(self, checkpoint: Path, ranks: Ranks) -> None:
        """Write a sealed checkpoint beside what follows; it takes the place of one that still waits for another."""
        self._waiting[1:] = [(checkpoint, ranks)]
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send(), name="checkpoints to their URL")

    @property
    def held(self) -> set[Path]:
        """The checkpoints whose folders must stay."""
        return {checkpoint for checkpoint, _ in self._waiting}

    async def sent(self, *, patience_s: float | None = None) -> None:
        """Wait until all has been written, or has failed; after ``patience_s`` give it up, and leave a call behind."""
        if self._sending is not None:
            done, _ = await asyncio.wait([self._sending], timeout=patience_s)
            for sending in done:
                sending.result()
            self._sending.cancel()
            await asyncio.wait([self._sending])

    async def _send(self) -> None:
        while self._waiting:
            try:
                await self.write(*self._waiting[0])
            except NOT_WRITTEN as error:
                where = f"on this machine, not at {self._store.url}"
                self._failed(step_of(self._waiting[0][0]), f"it is {where}: {type(error).__name__}: {error}")
            del self._waiting[0]

    async def write(self, checkpoint: Path, ranks: Ranks) -> None:
        """Write a sealed checkpoint.

        Raises:
            StorageError: the store refuses, or cannot be reached; what was valid before is valid still.
            CheckpointError: another process goes on with the run.
            OSError: what changes cannot be copied.
        """
        write = self._next_write(step=step_of(checkpoint))
        copies, place = self._run / ".copies", checkpoint.relative_to(self._run).as_posix()
        try:
            entries, paths = await in_abandonable_thread(lambda: self._gather(checkpoint, place, copies))
            for name in await ranks(f"{self._store.url}/{write}/{place}"):
                paths.pop(f"{place}/{name}", None)
            await in_abandonable_thread(lambda: self._finish(write, entries, paths))
        finally:
            await shield_until_done(asyncio.to_thread(shutil.rmtree, copies, ignore_errors=True))

    def _gather(self, checkpoint: Path, place: str, copies: Path) -> tuple[dict[str, FileEntry], dict[str, Path]]:
        """Return the entries and local paths of all files by their names; those that may change are copied first."""
        self._check_alone()
        DurableFiles().make_folder(copies)
        if self.ledger is not None:  # before the meters, which must count what it has
            self.ledger.copy(copies / "ledger.sqlite")
        for path in (each for pattern in _CHANGING for each in self._run.glob(pattern)):
            copy = copies / path.relative_to(self._run)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
        folders = [(copies, copies), *((self._run, self._run / each) for each in _UNCHANGING)]
        files = [(root, path) for root, folder in folders for path in folder.rglob("*") if path.is_file()]
        paths = {path.relative_to(root).as_posix(): path for root, path in files}
        known = {f"{place}/{name}": entry for name, entry in read_manifest(checkpoint).items()}
        paths |= {name: self._run / name for name in (*known, f"{place}/{MANIFEST}")}
        return {name: known.get(name) or file_entry(path) for name, path in paths.items()}, paths

    def _finish(self, write: str, entries: Mapping[str, FileEntry], paths: Mapping[str, Path]) -> None:
        """Write the files that no rank has written, and the manifest; then remove what this write replaces."""
        self._store.put({f"{write}/{name}": path for name, path in paths.items()})
        sealed, unsealed = self._check_alone()
        self._store.write(f"{write}/{MANIFEST}", encode_manifest(entries))
        try:
            # What has no manifest and is older was cut off, or is of a process that another has followed.
            for old in (*[*sealed, write][: -self._keep], *(each for each in unsealed if each < write)):
                self._store.remove(f"{old}/{MANIFEST}")
                self._store.remove(old)
        except StorageError as error:  # the next write tries again
            _log.warning("what %s replaces could not be removed: %s", write, error)

    def _next_write(self, *, step: int) -> str:
        return f"{self._process}-{next(self._numbers):08d}-step-{step:06d}"

    def _check_alone(self) -> tuple[list[str], list[str]]:
        """Return what is there as :func:`_writes`; raise CheckpointError if it is of another process that goes on."""
        sealed, unsealed = _writes(self._store)
        others = [
            each for each in (*sealed, *unsealed) if each[:_PROCESS] != self._process and each > self._process[:6]
        ]
        if others:
            raise CheckpointError(
                f"{self._store.url}: another process goes on with this run, or begins at the same time ({others[-1]}); "
                "end all but one of them"
            )
        return sealed, unsealed


def _writes(store: Store) -> tuple[list[str], list[str]]:
    """Return the names of the writes of a run with a manifest, and of those without one, each oldest first."""
    names = {*store.names()}
    writes = sorted({write for name in names if _WRITE.fullmatch(write := name.partition("/")[0])})
    sealed = [write for write in writes if f"{write}/{MANIFEST}" in names]
    return sealed, [write for write in writes if write not in sealed]


def _known(run: Path) -> tuple[str, ...]:
    """Return the writes and the processes whose progress the folder of a run has."""
    return (*(run / _KNOWN).read_text().split(),) if (run / _KNOWN).is_file() else ()


def _add_known(run: Path, names: Iterable[str]) -> None:
    files, partial = DurableFiles(), run / f"{_KNOWN}.part"
    files.write(partial, "\n".join((*_known(run), *names)).encode())
    files.rename(partial, run / _KNOWN)


def fetch(
    url: str, into: Path, *, step: int | None = None, wanted: Callable[[str], bool] = lambda name: True
) -> list[str]:
    """Make the folder ``into`` with the files of the newest whole checkpoint of the run at ``url``, as its own folder.

    ``step`` names another one; ``wanted`` chooses among the files. Damaged checkpoints are logged. Return the names of
    the writes that were tried, the one that was read last. Blocks.

    Raises:
        ConfigError: the URL cannot be used.
        StorageError: there is no such bucket, it refuses, or it cannot be reached.
        CheckpointError: no such checkpoint is there, or all are damaged.
    """
    store, damaged = Store(url, key="RUN"), dict[str, str]()
    # Listed again after each damaged one: a run that still writes may have removed what was the newest.
    while left := [each for each in _writes(store)[0] if each not in damaged and step in (None, step_of(each))]:
        try:
            _fetch(store, left[-1], into, wanted)
        except StorageError:
            raise
        except (CheckpointError, FileNotFoundError) as error:
            damaged[left[-1]] = f"{type(error).__name__}: {error}"
            _log.warning("skipping a checkpoint at %s: %s: %s", url, left[-1], damaged[left[-1]])
        else:
            return [*damaged, left[-1]]
    if damaged:
        raise CheckpointError(f"no checkpoint at {store.url} can be used: {'; '.join(map(': '.join, damaged.items()))}")
    which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    raise CheckpointError(f"{which} at {store.url}; give the URL of a run: checkpoint.url, and the name of its folder")


def _fetch(store: Store, write: str, into: Path, wanted: Callable[[str], bool]) -> None:
    DurableFiles().make_folder(into)
    store.get(f"{write}/{MANIFEST}", into / MANIFEST, size_bytes=0)
    entries = read_manifest(into)
    (into / MANIFEST).unlink()
    for name in filter(wanted, entries):
        store.get(f"{write}/{name}", path := path_below(into, name), size_bytes=entries[name]["size_bytes"])
        if (found := file_entry(path)) != entries[name]:
            raise CheckpointError(f"{name} is damaged: it is {found}, its manifest says {entries[name]}")


def restore(url: str, runs: Path) -> Path:
    """Make the folder of the run at ``url`` below ``runs``, as it was at its newest whole checkpoint; return it.

    Raises:
        ConfigError: the folder exists.
        StorageError, CheckpointError: as :func:`fetch`.
    """
    folder = runs.absolute() / url.rstrip("/").rpartition("/")[2]
    if folder.exists():
        remedy = f"resume {folder}, or move it away to continue from the URL"
        raise ConfigError(f"{folder} exists on this machine already; {remedy}", path="--resume", remedy=remedy)
    with DurableFiles().replacing(folder, sealed=False) as partial:
        _add_known(partial, fetch(url, partial))
    return folder
