"""What a run goes on from, on disk.

    checkpoints/step-000040/
        trainer/       weights, optimizer, schedule and RNG, by the training engine
        critic/        the same of the critic, where there is one
        model/         the same weights as a Hugging Face folder: what rollouts start from, and what `eval` takes
        driver.json    the driver's own state, and where the ledger ended
        manifest.json  size and digest of each file above, under a digest of its own; written last

A checkpoint is made under another name: its files are written and brought to the disk, then the manifest, then the
folder gets its name. So a folder with its final name is complete, unless the disk has changed it since: then a digest
tells, and the checkpoint before it is used. What an interrupted one left behind goes when the next is complete.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
import xxhash

from asyncrl.durable import DurableFiles
from asyncrl.errors import CheckpointError
from asyncrl.ledger import LedgerPosition

__all__ = ["Checkpoints", "DriverState", "check", "is_checkpoint", "read_driver_state"]

_log = logging.getLogger(__name__)


class DriverState(msgspec.Struct, frozen=True, kw_only=True):
    """The driver's part of a checkpoint.

    Attributes:
        step: training steps done; also the weight version.
        next_slot: number of the first prompt never issued.
        outstanding: prompts issued and not trained on; without a ledger they are issued again.
        generated: tokens sampled for training so far.
        trained: tokens trained on so far.
        dropped: tokens given up so far, by reason.
        staleness: tokens trained on by staleness, so far.
        history: evaluations and first rewards, for the summary at the end.
        consumed: prompts trained on so far.
        ledger: where the ledger ended.
        kl_coefficient: of the penalty in the reward; None without one.
    """

    step: int
    next_slot: int
    outstanding: tuple[int, ...]
    generated: int
    trained: int
    dropped: dict[str, int]
    staleness: dict[int, int]
    history: dict[str, Any]
    consumed: int = 0
    ledger: LedgerPosition = LedgerPosition()
    kl_coefficient: float | None = None


class _File(msgspec.Struct, frozen=True):
    size_bytes: int
    xxh3_128: str


class _Sealed(msgspec.Struct, frozen=True):
    files: msgspec.Raw
    xxh3_64: str


class CheckpointingCritic(Protocol):
    """The call a checkpoint makes on the critic's worker group."""

    def save(self, folder: Path) -> Any: ...


class CheckpointingTrainer(Protocol):
    """The calls a checkpoint makes on the trainer's worker group."""

    def save(self, folder: Path) -> Any: ...

    def export(self, folder: Path) -> Any: ...


class Checkpoints:
    """The checkpoints of one run, newest last; keeps the newest ``keep``, and ``in_use``, which replicas load again."""

    def __init__(
        self, folder: Path, *, keep: int, in_use: Path | None = None, files: DurableFiles | None = None
    ) -> None:
        self._folder = folder
        self._keep = keep
        self._in_use = in_use
        self._files = files or DurableFiles()

    async def save(
        self,
        trainer: CheckpointingTrainer,
        state: DriverState,
        *,
        step: int,
        critic: CheckpointingCritic | None = None,
    ) -> Path:
        """Write a checkpoint of ``step``; no update may begin before this returns."""
        final = self._folder / f"step-{step:06d}"
        partial = self._folder / f".step-{step:06d}.partial"
        await asyncio.to_thread(self._files.make_folder, partial)
        await trainer.save(partial / "trainer")
        await trainer.export(partial / "model")
        if critic is not None:
            await critic.save(partial / "critic")
        await asyncio.to_thread(self._finish, partial, final, msgspec.json.encode(state))
        return final

    def _finish(self, partial: Path, final: Path, state: bytes) -> None:
        files = self._files
        files.write(partial / "driver.json", state)
        contents = _contents(partial)
        for folder in sorted({(partial / name).parent for name in contents}):
            for name in sorted(name for name in contents if (partial / name).parent == folder):
                files.sync(partial / name)
            files.sync_folder(folder)
        raw = msgspec.json.encode(contents)
        files.write(partial / "manifest.json", msgspec.json.encode(_Sealed(msgspec.Raw(raw), _digest(raw))))
        files.sync_folder(partial)
        if final.exists():
            replaced = final.with_name(f".{final.name}.replaced")
            if replaced.exists():
                files.remove(replaced)
            files.rename(final, replaced)
        files.rename(partial, final)
        for leftover in (*self.all()[: -self._keep], *sorted(self._folder.glob(".step-*"))):
            if leftover != self._in_use:
                files.remove(leftover)

    def rewind(self, step: int) -> None:
        """Checkpoints after ``step`` count no more: a run goes on from there. They go when the next is complete."""
        for path in self.all():
            if int(path.name.removeprefix("step-")) > step:
                undone = path.with_name(f".{path.name}.undone")
                if undone.exists():
                    self._files.remove(undone)
                self._files.rename(path, undone)

    def all(self) -> list[Path]:
        """Checkpoints that were written to the end, oldest first."""
        found = [path for path in self._folder.glob("step-*") if is_checkpoint(path)]
        return sorted(found, key=lambda path: (len(path.name), path.name))

    def latest(self) -> Path:
        """The newest checkpoint that is as it was written; damaged ones are passed over and told in the log.

        Raises:
            CheckpointError: there is none.
        """
        damaged: list[str] = []
        for path in (*reversed(self.all()), *sorted(self._folder.glob(".step-*.replaced"), reverse=True)):
            try:
                check(path)
            except CheckpointError as error:
                damaged.append(str(error))
                _log.warning("checkpoint passed over: %s", error)
            else:
                return path
        if damaged:
            raise CheckpointError(f"no checkpoint in {self._folder} can be used: {'; '.join(damaged)}")
        raise CheckpointError(
            f"no checkpoint in {self._folder}: the run ended before its first one. "
            "Start it anew, and set checkpoint.every to save more often"
        )


def is_checkpoint(folder: Path) -> bool:
    """True for a folder that :meth:`Checkpoints.save` wrote to its end; :func:`check` tells whether it is whole."""
    return (folder / "manifest.json").is_file()


def check(folder: Path) -> None:
    """Hold every file of a checkpoint against its manifest. Reads them all.

    Raises:
        CheckpointError: one is missing, changed, or not in the manifest.
    """
    expected = _manifest(folder)
    found = _contents(folder)
    for name in sorted({*expected, *found}):
        if name not in found:
            raise CheckpointError(f"{folder} is damaged: {name} is missing")
        if name not in expected:
            raise CheckpointError(f"{folder} is damaged: {name} does not belong to it")
        if found[name] != expected[name]:
            raise CheckpointError(f"{folder} is damaged: {name} is not what was written")


def read_driver_state(folder: Path) -> DriverState:
    """The driver's state in a checkpoint.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    try:
        content = (folder / "driver.json").read_bytes()
        if _file(content) != _manifest(folder).get("driver.json"):
            raise CheckpointError(f"{folder}/driver.json is damaged: its digest does not match")
        return msgspec.json.decode(content, type=DriverState)
    except (OSError, UnicodeError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{folder} is no checkpoint that can be read: {error}") from error


def _manifest(folder: Path) -> Mapping[str, _File]:
    try:
        sealed = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=_Sealed)
        if _digest(bytes(sealed.files)) != sealed.xxh3_64:
            raise CheckpointError(f"{folder}/manifest.json is damaged: its digest does not match")
        return msgspec.json.decode(sealed.files, type=dict[str, _File])
    except (OSError, UnicodeError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{folder} is no checkpoint that can be read: {error}") from error


def _contents(folder: Path) -> dict[str, _File]:
    """Size and digest of every file but the manifest, by its path below ``folder``."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != "manifest.json":
            with path.open("rb") as file:
                size_bytes = path.stat().st_size
                if not size_bytes:
                    found[name] = _file(b"")
                    continue
                with mmap.mmap(file.fileno(), size_bytes, access=mmap.ACCESS_READ) as content:
                    found[name] = _file(content)
    return found


def _file(content: bytes | mmap.mmap) -> _File:
    return _File(len(content), xxhash.xxh3_128_hexdigest(content))


def _digest(raw: bytes) -> str:
    return f"{xxhash.xxh3_64_intdigest(raw):016x}"
