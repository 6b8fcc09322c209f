"""Checkpoints of a run on disk, and when the next one is due.

    checkpoints/step-000040/
        trainer/       weights, optimizer, schedule and RNG, by the training engine
        critic/        the same of the critic, where there is one
        model/         the same weights as a Hugging Face folder: what rollouts start from, and what `eval` takes
        driver.json    the driver's own state, and the ledger's position
        manifest.json  size and checksum of each file above; written last

A checkpoint is a sealed folder (:mod:`asyncrl.io`): one that has its final name is complete. Where a checksum shows
that the disk has changed it since, the checkpoint before it is used. One that cannot be written is removed, since the
disk may be full; the next checkpoint removes what interrupted ones left.

It is taken between two steps, where every rank copies its shards into its host's memory, and written while training
goes on: every rank writes its shards, rank 0 makes the model of them, the folder is sealed. Then it counts as written;
where the run has a URL (:mod:`asyncrl.trainer.stored_run`) it is sent there beside what follows.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.errors import CheckpointError, RankErrors, WorkerError
from asyncrl.io import DurableFiles, FileEntry, is_sealed, partial_name, read_sealed, verify_folder
from asyncrl.ledger import LedgerPosition
from asyncrl.runtime import shield_until_done
from asyncrl.trainer.workers import EngineGroup

if TYPE_CHECKING:
    from asyncrl.trainer.stored_run import StoredRun

MAX_SHARE = 0.02
"""Share of the time that checkpoints may take where ``checkpoint.every`` is not set."""

MIN_INTERVAL_S = 60.0
"""Shortest time between two of them then: what is trained on in between can be trained again from the ledger."""

NOT_WRITTEN = (OSError, CheckpointError, WorkerError, RankErrors)
"""Errors of a write that training survives; the checkpoint before stays."""

_log = logging.getLogger(__name__)


class CheckpointPace:
    """Decides after which steps a checkpoint is due: every ``every`` steps, never for 0.

    For None it is as often as takes at most :data:`MAX_SHARE` of the time, and not sooner than :data:`MIN_INTERVAL_S`.
    """

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._due_s = math.inf

    def begin(self, *, now_s: float) -> None:
        self._due_s = now_s + MIN_INTERVAL_S

    def due(self, step: int, *, now_s: float) -> bool:
        if self._every is None:
            return now_s >= self._due_s
        return self._every > 0 and step % self._every == 0

    def taken(self) -> None:
        """Record that a checkpoint is being written; the next is due some time after :meth:`written`."""
        self._due_s = math.inf

    def written(self, *, now_s: float, took_s: float) -> None:
        """Record that a checkpoint was written or failed, for which training stood still for ``took_s``."""
        self._due_s = now_s + max(MIN_INTERVAL_S, took_s / MAX_SHARE)


class DriverState(msgspec.Struct, frozen=True, kw_only=True):
    """The driver's part of a checkpoint; counts are over the whole run so far.

    Attributes:
        step: training steps done; also the weight version.
        next_group_id: the first id that was never issued.
        outstanding: group ids issued and neither trained on nor dropped; without a ledger they are issued again.
        generated: tokens sampled for training.
        trained: tokens trained on; ``dropped`` those given up, by reason.
        staleness: tokens trained on by staleness.
        history: evaluations and first rewards, for the summary at the end.
        consumed: prompts trained on.
        ledger: position of the ledger's last record.
        kl_coef: coefficient of the KL penalty in the reward; None without one.
        kl_start: coefficient that it was configured with, where it is controlled.
    """

    step: int
    next_group_id: int
    outstanding: tuple[int, ...]
    generated: int
    trained: int
    dropped: dict[str, int]
    staleness: dict[int, int]
    history: dict[str, Any]
    consumed: int = 0
    ledger: LedgerPosition = LedgerPosition()
    kl_coef: float | None = None
    kl_start: float | None = None


class Checkpoints:
    """The checkpoints of one run in ``folder``: the newest ``keep``, and ``in_use``, which replicas load again.

    Each that is whole is sent to the ``stored`` run, if there is one, and stays here as long as that takes.
    """

    def __init__(
        self, folder: Path, *, keep: int, in_use: Path | None = None, files: DurableFiles | None = None
    ) -> None:
        self._folder = folder
        self._keep = keep
        self._in_use = in_use
        self._files = files or DurableFiles()
        self.stored: StoredRun | None = None

    async def save(
        self,
        trainer: EngineGroup,
        state: DriverState,
        *,
        step: int,
        critic: EngineGroup | None = None,
    ) -> Path:
        """Write a checkpoint of ``step``; no update may begin before this returns."""
        return await (await self.take(trainer, state, step=step, critic=critic))()

    async def take(
        self, trainer: EngineGroup, state: DriverState, *, step: int, critic: EngineGroup | None = None
    ) -> Callable[[], Awaitable[Path]]:
        """Copy what a checkpoint of ``step`` consists of; return what writes it, while training goes on.

        No update may begin before this returns, and no other checkpoint may be taken before that one is written.
        """
        final = self.folder(step)
        groups = {"trainer": trainer, **({"critic": critic} if critic is not None else {})}
        partial = await shield_until_done(asyncio.to_thread(self._begin, final, list(groups)))
        async with _removed_if_it_fails(partial):
            for name, group in groups.items():
                await group.snapshot(partial / name, partial / "model" if name == "trainer" else None)
        return functools.partial(self._write, groups, partial, final, msgspec.json.encode(state))

    async def _write(self, groups: Mapping[str, EngineGroup], partial: Path, final: Path, state: bytes) -> Path:
        written: dict[str, dict[str, FileEntry]] = {}
        async with _removed_if_it_fails(partial):
            for name, group in groups.items():
                parts = await group.write_snapshot(partial / name)
                written[name] = {file: entry for part in parts for file, entry in part.items()}
            await groups["trainer"].export_snapshot(partial / "trainer", partial / "model")
            await shield_until_done(asyncio.to_thread(self._finish, partial, final, state, written))

        async def send(to: str) -> list[str]:
            """Let every rank copy the files that it has written to a URL; return their names."""
            for name, group in groups.items():
                await group.send_snapshot(final / name, f"{to}/{name}")
            return [f"{name}/{file}" for name, files in written.items() for file in files]

        if self.stored is not None:
            self.stored.send(final, send)
        return final

    async def sent(self, *, patience_s: float | None = None) -> None:
        """Wait until the stored run has what was sent to it, or has refused it; after ``patience_s`` give it up."""
        if self.stored is not None:
            await self.stored.sent(patience_s=patience_s)
            await shield_until_done(asyncio.to_thread(self._remove_old))

    def _begin(self, final: Path, parts: Sequence[str]) -> Path:
        partial = partial_name(final)
        for leftover in (*self._folder.glob(".step-*.partial"),):
            self._files.remove(leftover)
        for part in parts:
            self._files.make_folder(partial / part)
        return partial

    def _finish(self, partial: Path, final: Path, state: bytes, written: Mapping[str, Mapping[str, FileEntry]]) -> None:
        for part, entries in written.items():
            if entries:
                self._files.seal(partial / part, known=entries)
        self._files.write(partial / "driver.json", state)
        known = {f"{part}/{file}": entry for part, entries in written.items() for file, entry in entries.items()}
        self._files.seal(partial, known=known)
        self._files.replace(partial, final)
        self._remove_old()

    def _remove_old(self) -> None:
        held = self.stored.held if self.stored is not None else set[Path]()
        try:
            for leftover in (*self.all()[: -self._keep], *sorted(self._folder.glob(".step-*"))):
                if leftover not in (self._in_use, *held):
                    self._files.remove(leftover)
        except OSError as error:  # the next checkpoint tries again
            _log.warning("what is replaced in %s could not be removed: %s", self._folder, error)

    def rewind(self, step: int) -> None:
        """Discard the checkpoints after ``step``; the next complete checkpoint removes their files."""
        for path in self.all():
            if step_of(path) > step:
                undone = path.with_name(f".{path.name}.undone")
                if undone.exists():
                    self._files.remove(undone)
                self._files.rename(path, undone)

    def folder(self, step: int) -> Path:
        """Return where the checkpoint of a step is, or would be."""
        return self._folder / f"step-{step:06d}"

    def all(self) -> list[Path]:
        """Return the complete checkpoints, oldest first."""
        return [path for path in self._steps() if is_sealed(path)]

    def _steps(self) -> list[Path]:
        return sorted(self._folder.glob("step-*"), key=lambda path: (len(path.name), path.name))

    def latest(self) -> Path:
        """Return the newest undamaged checkpoint; damaged ones are logged.

        Raises:
            CheckpointError: there is none.
        """
        damaged: list[str] = []
        for path in (*reversed(self._steps()), *sorted(self._folder.glob(".step-*.replaced"), reverse=True)):
            try:
                verify_folder(path)
            except CheckpointError as error:
                damaged.append(str(error))
                _log.warning("skipping a checkpoint: %s", error)
            else:
                return path
        if damaged:
            raise CheckpointError(f"no checkpoint in {self._folder} can be used: {'; '.join(damaged)}")
        raise CheckpointError(
            f"no checkpoint in {self._folder}: the run ended before its first one. "
            "Start it anew, and set checkpoint.every to save more often"
        )


@asynccontextmanager
async def _removed_if_it_fails(partial: Path) -> AsyncIterator[None]:
    """Remove what an error of the block leaves half written; a block that is cancelled may still be writing it."""
    try:
        yield
    except Exception:
        await shield_until_done(asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True))
        raise


def step_of(checkpoint: Path | str) -> int:
    """Return the step of a checkpoint by the name of its folder."""
    return int(str(checkpoint).rpartition("-")[2])


def read_driver_state(folder: Path) -> DriverState:
    """Read the driver's state; raise :class:`CheckpointError` if it is missing or damaged."""
    try:
        return msgspec.json.decode(read_sealed(folder, "driver.json"), type=DriverState)
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{folder}/driver.json cannot be read: {error}") from error
