"""What a run goes on from, on disk.

    checkpoints/step-000040/
        trainer/      weights, optimizer, schedule and RNG, by the training engine
        model/        the same weights as a Hugging Face folder: what rollouts start from, and what `eval` takes
        driver.json   the driver's own state, with a digest; written last

A checkpoint is written under another name and renamed when it is whole, so a folder with its final name is complete.
What an interrupted one left behind goes when the next is complete.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any, Protocol

import msgspec
import xxhash

from asyncrl.errors import CheckpointError

__all__ = ["Checkpoints", "DriverState", "is_checkpoint", "read_driver_state"]


class DriverState(msgspec.Struct, frozen=True, kw_only=True):
    """The driver's part of a checkpoint.

    Attributes:
        step: training steps done; also the weight version.
        next_slot: number of the first prompt never issued.
        outstanding: prompts issued and not trained on; their rows are lost and they are issued again.
        generated: tokens sampled for training so far.
        trained: tokens trained on so far.
        dropped: tokens given up so far, by reason.
        staleness: tokens trained on by staleness, so far.
        history: evaluations and first rewards, for the summary at the end.
    """

    step: int
    next_slot: int
    outstanding: tuple[int, ...]
    generated: int
    trained: int
    dropped: dict[str, int]
    staleness: dict[int, int]
    history: dict[str, Any]


class _Sealed(msgspec.Struct, frozen=True):
    state: msgspec.Raw
    xxh3_64: str


class CheckpointingTrainer(Protocol):
    """The calls a checkpoint makes on the trainer's worker group."""

    def save(self, folder: Path) -> Any: ...

    def export(self, folder: Path) -> Any: ...


class Checkpoints:
    """The checkpoints of one run, newest last; keeps the newest ``keep``."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    async def save(self, trainer: CheckpointingTrainer, state: DriverState, *, step: int) -> Path:
        """Write a checkpoint of ``step``; no update may begin before this returns."""
        final = self._folder / f"step-{step:06d}"
        partial = self._folder / f".step-{step:06d}.partial"
        await asyncio.to_thread(_fresh_folder, partial)
        await trainer.save(partial / "trainer")
        await trainer.export(partial / "model")
        raw = msgspec.json.encode(state)
        sealed = msgspec.json.encode(_Sealed(msgspec.Raw(raw), _digest(raw)))
        await asyncio.to_thread(self._finish, partial, final, sealed)
        return final

    def _finish(self, partial: Path, final: Path, sealed: bytes) -> None:
        with (partial / "driver.json").open("wb") as file:
            file.write(sealed)
            file.flush()
            os.fsync(file.fileno())
        if final.exists():
            replaced = final.with_name(f".{final.name}.replaced")
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        partial.rename(final)
        for leftover in (*self.all()[: -self._keep], *self._folder.glob(".step-*")):
            shutil.rmtree(leftover)

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        found = [path for path in self._folder.glob("step-*") if is_checkpoint(path)]
        return sorted(found, key=lambda path: (len(path.name), path.name))

    def latest(self) -> Path:
        """The newest complete checkpoint.

        Raises:
            CheckpointError: there is none.
        """
        found = self.all()
        if not found:
            raise CheckpointError(
                f"no checkpoint in {self._folder}: the run ended before its first one. "
                "Start it anew, and set checkpoint.every to save more often"
            )
        return found[-1]


def is_checkpoint(folder: Path) -> bool:
    """True for a folder written to the end by :meth:`Checkpoints.save`."""
    return (folder / "driver.json").is_file()


def read_driver_state(folder: Path) -> DriverState:
    """The driver's state in a checkpoint.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    try:
        sealed = msgspec.json.decode((folder / "driver.json").read_bytes(), type=_Sealed)
        if _digest(bytes(sealed.state)) != sealed.xxh3_64:
            raise CheckpointError(f"{folder}/driver.json is damaged: its digest does not match")
        return msgspec.json.decode(sealed.state, type=DriverState)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{folder} is no checkpoint that can be read: {error}") from error


def _digest(raw: bytes) -> str:
    return f"{xxhash.xxh3_64_intdigest(raw):016x}"


def _fresh_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
