"""Checkpoints of a run: when they are due, what survives a crash, and what damage is noticed."""

from __future__ import annotations

import asyncio
import errno
import random
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import CheckpointError
from asyncrl.io import DurableFiles, FileEntry, is_sealed, verify_folder
from asyncrl.trainer.checkpoint import (
    MAX_SHARE,
    MIN_INTERVAL_S,
    CheckpointPace,
    Checkpoints,
    DriverState,
    read_driver_state,
)
from asyncrl.trainer.workers import TrainerSpec, TrainerWorker


def test_a_checkpoint_is_due_every_so_many_steps_or_never():
    pace, never = CheckpointPace(3), CheckpointPace(0)
    pace.begin(now_s=0.0)
    assert [step for step in range(1, 10) if pace.due(step, now_s=1e9)] == [3, 6, 9]
    assert not any(never.due(step, now_s=1e9) for step in range(1, 10))


@given(
    step_s=st.floats(min_value=0.01, max_value=500.0),
    took_s=st.floats(min_value=0.0, max_value=100.0),
    steps=st.integers(min_value=1, max_value=2000),
)
def test_by_default_checkpoints_take_at_most_their_share_of_the_time(step_s: float, took_s: float, steps: int):
    pace, now_s, spent_s, longest_s, last_s = CheckpointPace(None), 0.0, 0.0, 0.0, 0.0
    pace.begin(now_s=0.0)
    for step in range(1, steps + 1):
        now_s += step_s
        if pace.due(step, now_s=now_s):
            spent_s += took_s
            now_s += took_s
            pace.written(now_s=now_s, took_s=took_s)
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
    assert spent_s <= MAX_SHARE * now_s + took_s
    # What a kill costs in training is bounded, too: by a minute, or by fifty times what a checkpoint costs.
    assert longest_s <= max(MIN_INTERVAL_S, took_s / MAX_SHARE) + step_s + took_s + 1e-6


class FolderTrainer:
    """Writes a file where a trainer would write weights."""

    def __init__(self) -> None:
        self.fails = ""

    async def snapshot(self, folder: Path, model: Path | None = None) -> None:
        if self.fails == "snapshot":
            self.fill(folder)

    async def write_snapshot(self, folder: Path) -> list[dict[str, Any]]:
        (folder / "weights").write_text("w")
        if self.fails == "write":
            self.fill(folder)
        return [{}]

    def fill(self, folder: Path) -> None:
        (folder / "half").write_text("w")
        raise OSError(errno.ENOSPC, "disk full")

    async def export_snapshot(self, saved: Path, folder: Path) -> None:
        folder.mkdir()


def state(step: int) -> DriverState:
    return DriverState(
        step=step,
        next_group_id=4 * step + 3,
        outstanding=(4 * step, 4 * step + 2),
        generated=100,
        trained=80,
        dropped={"stale": 5},
        staleness={0: 60, 1: 20},
        history={"evaluations": [{"step": 0, "success": 0.25}], "rewards": [0.5]},
    )


async def test_what_is_written_is_read_back(tmp_path: Path):
    folder = await Checkpoints(tmp_path, keep=2).save(FolderTrainer(), state(3), step=3)
    assert folder.name == "step-000003"
    assert read_driver_state(folder) == state(3)
    assert (folder / "trainer" / "weights").read_text() == "w"


class ForegroundEngine:
    """An engine without snapshots."""

    def __init__(self, model_path: str, **_: Any) -> None: ...

    def save(self, folder: Path) -> None:
        (folder / "weights").write_text("saved")

    def export(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    def close(self) -> None: ...


class SnapshotsAlone(ForegroundEngine):
    """Takes snapshots, and gets no memory for them beforehand."""

    def snapshot(self) -> Any:
        return "taken"


def test_an_engine_with_snapshots_alone_takes_them(tmp_path: Path):
    worker = TrainerWorker(TrainerSpec(engine=SnapshotsAlone))
    worker.build("model", {})
    worker.prepare_snapshots()
    worker.snapshot(tmp_path / "trainer")
    assert worker._snapshot == "taken"
    assert not (tmp_path / "trainer").exists(), "nothing is written in the foreground"
    worker.close()


async def test_an_engine_without_snapshots_writes_before_training_goes_on(tmp_path: Path):
    worker = TrainerWorker(TrainerSpec(engine=ForegroundEngine))
    worker.build("model", {})
    (tmp_path / "trainer").mkdir()
    worker.prepare_snapshots()
    worker.snapshot(tmp_path / "trainer", tmp_path / "model")
    assert (tmp_path / "trainer" / "weights").read_text() == "saved"
    assert (tmp_path / "model" / "config.json").is_file()
    assert await worker.write_snapshot(tmp_path / "trainer") == {}
    await worker.export_snapshot(tmp_path / "trainer", tmp_path / "model")
    worker.close()


async def test_only_the_newest_are_kept_and_the_newest_is_latest(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (5, 10, 15):
        await checkpoints.save(FolderTrainer(), state(step), step=step)
    assert [path.name for path in checkpoints.all()] == ["step-000010", "step-000015"]
    assert read_driver_state(checkpoints.latest()).step == 15


async def test_a_seventh_digit_is_newer_than_six(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step in (999_999, 1_000_000):
        await checkpoints.save(FolderTrainer(), state(step), step=step)
    assert checkpoints.latest().name == "step-1000000"


async def test_a_step_saved_again_replaces_the_first_and_leftovers_go(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    await checkpoints.save(FolderTrainer(), state(3), step=3)
    for leftover in (".step-000002.partial", ".step-000003.replaced"):  # of a process that was killed
        (tmp_path / leftover / "trainer").mkdir(parents=True)
    (tmp_path / "warm_start").mkdir()
    await checkpoints.save(FolderTrainer(), state(4), step=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000003", "warm_start"]
    assert read_driver_state(checkpoints.latest()) == state(4)


@pytest.mark.parametrize("fails", ["snapshot", "write"])
async def test_a_checkpoint_that_failed_half_way_does_not_count_and_frees_the_disk(tmp_path: Path, fails: str):
    checkpoints = Checkpoints(tmp_path, keep=2)
    await checkpoints.save(FolderTrainer(), state(1), step=1)
    trainer = FolderTrainer()
    trainer.fails = fails
    with pytest.raises(OSError, match="disk full"):
        await checkpoints.save(trainer, state(2), step=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    trainer.fails = ""
    await checkpoints.save(trainer, state(2), step=2)
    assert checkpoints.latest().name == "step-000002"


async def test_a_write_that_is_cancelled_while_it_is_sealed_ends_first(tmp_path: Path):
    begun, goes_on = threading.Event(), threading.Event()

    class Slow(DurableFiles):
        def seal(self, folder: Path, *, known: Mapping[str, FileEntry] | None = None) -> None:
            begun.set()
            goes_on.wait()
            super().seal(folder, known=known)

    checkpoints = Checkpoints(tmp_path, keep=1, files=Slow())
    saving = asyncio.create_task(checkpoints.save(FolderTrainer(), state(1), step=1))
    await asyncio.to_thread(begun.wait)
    saving.cancel()
    await asyncio.sleep(0)
    assert not saving.done()
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await saving
    assert [path.name for path in checkpoints.all()] == ["step-000001"]


async def test_every_flipped_bit_of_the_state_is_noticed(tmp_path: Path):
    folder = await Checkpoints(tmp_path, keep=1).save(FolderTrainer(), state(1), step=1)
    file = folder / "driver.json"
    whole = file.read_bytes()
    for position in range(len(whole)):
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(CheckpointError):
            read_driver_state(folder)
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError):
        read_driver_state(folder)


def test_a_run_without_checkpoint_is_an_error_with_a_remedy(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"checkpoint\.every"):
        Checkpoints(tmp_path, keep=1).latest()
    assert not is_sealed(tmp_path)


async def test_every_cut_and_every_flipped_bit_of_any_file_is_noticed(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    await checkpoints.save(FolderTrainer(), state(1), step=1)
    folder = await checkpoints.save(FolderTrainer(), state(2), step=2)
    files = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    assert [path.name for path in files] == ["driver.json", "manifest.json", "weights"]
    dice = random.Random(0)
    for _ in range(300):
        victim = dice.choice(list(files))
        content = bytearray(files[victim])
        if dice.random() < 0.3:
            del content[dice.randrange(len(content)) :]
        else:
            content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        victim.write_bytes(content)
        with pytest.raises(CheckpointError):
            verify_folder(folder)
        victim.write_bytes(files[victim])
    verify_folder(folder)
    (folder / "stranger").write_text("x")
    with pytest.raises(CheckpointError, match="does not belong"):
        verify_folder(folder)
    assert checkpoints.latest().name == "step-000001"


async def test_a_checkpoint_without_its_manifest_is_named_when_it_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2):
        await checkpoints.save(FolderTrainer(), state(step), step=step)
    (tmp_path / "step-000002" / "manifest.json").unlink()
    assert checkpoints.latest().name == "step-000001"
    assert "step-000002" in caplog.text


async def test_the_checkpoint_in_use_stays(tmp_path: Path):
    first = await Checkpoints(tmp_path, keep=1).save(FolderTrainer(), state(1), step=1)
    checkpoints = Checkpoints(tmp_path, keep=1, in_use=first)
    for step in (2, 3):
        await checkpoints.save(FolderTrainer(), state(step), step=step)
    assert [path.name for path in checkpoints.all()] == ["step-000001", "step-000003"]


async def test_checkpoints_after_the_resumed_step_are_discarded(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (1, 2, 3):
        await checkpoints.save(FolderTrainer(), state(step), step=step)
    checkpoints.rewind(1)
    assert [path.name for path in checkpoints.all()] == ["step-000001"]
    await checkpoints.save(FolderTrainer(), state(2), step=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002"]
