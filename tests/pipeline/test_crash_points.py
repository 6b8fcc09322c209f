"""A run that is stopped at every point where something reaches the disk, and resumed: the same weights, each time.

The production driver, law, buffer, ledger, checkpoints and resumption, between a policy whose tokens depend on its
weights and a trainer whose weights depend on every token: one prompt that is lost, repeated or trained on out of turn
changes everything after it. What a killed process leaves is what its files held at that moment.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.durable import DurableFiles
from asyncrl.errors import CheckpointError
from asyncrl.pipeline.checkpoint import Checkpoints, DriverState, read_driver_state
from asyncrl.pipeline.driver import Driver, TrainingPlan
from asyncrl.pipeline.journal import Journal
from asyncrl.pipeline.resumption import (
    admission_law,
    driver_state,
    ledger_base,
    resumed_accounts,
    still_outstanding,
)
from asyncrl.pipeline.staleness import POLICIES
from asyncrl.rollout.record import encode_rows
from asyncrl.rollout.trajectory import Trajectory, Turn, trajectories_to_batch
from asyncrl.telemetry.timeline import Timeline
from asyncrl.testing import EchoFactory
from buffers.ledger import SQLiteLedger
from buffers.replay import AsyncReplayBuffer

STEPS, GROUPS, ROWS = 10, 2, 2
EVERY = int(os.environ.get("CRASH_POINTS_EVERY", "7"))
"""1 stops at every single point (some minutes)."""


DISK = threading.RLock()
"""Held while anything is written, so that a picture of the files shows a moment that was."""


class Files(DurableFiles):
    """The disk: says when something is about to happen to it, and when it has; waits for nothing."""

    def __init__(self, point: Callable[[str], None]) -> None:
        self._point = point

    def write(self, path: Path, content: bytes) -> None:
        with DISK:
            self._point(f"before write {path.name}")
            path.write_bytes(content[: len(content) // 2])
            self._point(f"amid write {path.name}")
            path.write_bytes(content)
            self._point(f"after write {path.name}")

    def overwrite(self, path: Path, content: bytes, *, position: int) -> None:
        with DISK:
            self._point(f"before overwrite {path.name}")
            super().overwrite(path, content, position=position)
            self._point(f"after overwrite {path.name}")

    def sync(self, path: Path) -> None:
        with DISK:
            self._point(f"at sync {path.name}")

    def make_folder(self, folder: Path) -> None:
        with DISK:
            super().make_folder(folder)
            self._point(f"after make {folder.name}")

    def rename(self, path: Path, new: Path) -> None:
        with DISK:
            self._point(f"before rename {path.name}")
            path.rename(new)
            self._point(f"after rename {path.name}")

    def remove(self, folder: Path) -> None:
        with DISK:
            self._point(f"before remove {folder.name}")
            for file in sorted(folder.rglob("*")):
                if file.is_file():
                    file.unlink()
                    self._point(f"amid remove {folder.name}")
                    break
            super().remove(folder)


def connecting(point: Callable[[str], None]) -> Callable[..., sqlite3.Connection]:
    class Connection(sqlite3.Connection):
        def executemany(self, sql: str, lines: Any, /) -> sqlite3.Cursor:
            with DISK:
                point("before insert")
                cursor = super().executemany(sql, lines)
                point("after insert")
            return cursor

        def commit(self) -> None:
            with DISK:
                point("before commit")
                super().commit()
                point("after commit")

    def connect(path: Path, **options: Any) -> sqlite3.Connection:
        connection = sqlite3.connect(path, factory=Connection, **options)
        connection.execute("PRAGMA synchronous = OFF")  # what the process leaves, not what the machine does
        return connection

    return connect


class Policy:
    """Pool and trainer: tokens follow from the weights, weights from the tokens."""

    def __init__(self, weights: bytes = b"", version: int = 0) -> None:
        self.weights = weights
        self.weight_version = version

    needed_versions: frozenset[int] = frozenset()

    async def rollout(self, prompts: DataProto) -> DataProtoFuture:
        slot = int(prompts.batch["slot"][0])
        group = []
        for row in range(len(prompts)):
            digest = hashlib.sha256(b"%s/%d/%d" % (self.weights, slot, row)).digest()
            group.append(
                Trajectory(
                    task=prompts.non_tensor_batch["task"][row],
                    token_ids=(1, *digest[:5]),
                    loss_mask=(False, True, True, True, True, True),
                    behaviour_log_probs=(0.0, -0.5, -0.5, -0.5, -0.5, -0.5),
                    weight_versions=(-1, *[self.weight_version] * 5),
                    reward=digest[5] / 256,
                    turns=(Turn(start=1, end=6, finish_reason="stop", message={"role": "assistant", "content": "x"}),),
                    finish_reason="done",
                )
            )
        batch = trajectories_to_batch(group, slot=slot)
        batch.meta_info |= {"wasted_tokens": 0, "record": encode_rows(group)}
        return DataProtoFuture.of(batch)

    async def update(self, batch: DataProtoFuture, *_: Any) -> list[dict[str, float]]:
        rows = await batch
        text = repr((rows.batch["input_ids"].values().tolist(), rows.batch["advantages"].tolist()))
        self.weights = hashlib.sha256(self.weights + text.encode()).hexdigest().encode()
        return [{"tokens_trained": float(rows.batch["loss_mask"].values().sum())}]

    async def publish(self, version: Any) -> Any:
        """A version by the trainer, which is its own manifest; a manifest into the pool."""
        if isinstance(version, int):
            return [("manifest", version)]
        self.weight_version = version[1]
        return None

    async def release(self, version: int) -> None: ...

    async def save(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "weights").write_bytes(self.weights)

    async def export(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")


class Silent:
    def stepped(self, record: Any) -> None: ...
    def evaluated(self, result: Any, *, step: int) -> None: ...
    def sampled(self, trajectory: Any, *, step: int, slot: int) -> None: ...


@dataclass
class End:
    weights: bytes
    trained: list[tuple[int, int, int]] = field(default_factory=list)


async def live(folder: Path, point: Callable[[str], None] = lambda _: None, *, max_staleness: int = 0) -> End:
    """One life: from the newest checkpoint in ``folder`` to the last step."""
    files = Files(point)
    checkpoints = Checkpoints(folder / "checkpoints", keep=2, files=files)
    (folder / "checkpoints").mkdir(exist_ok=True)
    resumed: DriverState | None = None
    policy = Policy()
    try:
        newest = checkpoints.latest()
        resumed = read_driver_state(newest)
        policy = Policy((newest / "trainer" / "weights").read_bytes(), resumed.step)
        checkpoints.rewind(resumed.step)
    except CheckpointError:  # stopped before the first one: it begins anew
        for file in folder.glob("ledger.sqlite*"):
            file.unlink()
    path = folder / "ledger.sqlite"
    base = ledger_base(resumed) if resumed is not None else None
    ledger = SQLiteLedger(path, resume=base, threaded=False, fsync="checkpoint", connect=connecting(point), files=files)
    journal = Journal(ledger)
    found = journal.recovered
    assert not any("damaged" in note for note in found.notes), found.notes
    done = resumed.step if resumed is not None else 0
    held, again = still_outstanding(resumed, found, total_groups=(STEPS - done) * GROUPS)
    tokens = sum(group.summary.tokens for group in found.groups.values())
    generated = (resumed.trained if resumed is not None else 0) + tokens

    async def save(driver: Driver, step: int) -> None:
        position = await ledger.durable()
        balance = driver.balance(generated=0, in_flight=0)
        state = driver_state(driver, balance, step=step, history={}, position=position)
        await checkpoints.save(policy, state, step=step)

    driver = Driver(
        plan=TrainingPlan(
            steps=STEPS,
            groups_per_step=GROUPS,
            group_size=ROWS,
            advantage=lambda columns: columns["rewards"] - columns["rewards"].mean(),
            seed=0,
            eval_tasks=0,
            checkpoint_every=2,
            sample_trajectories=0,
        ),
        trainer=policy,
        pool=policy,
        buffer=AsyncReplayBuffer(
            capacity=max(GROUPS * (max_staleness + 1), len(held) + len(again)), max_staleness=max_staleness
        ),
        law=admission_law(
            resumed,
            steps=STEPS,
            groups_per_step=GROUPS,
            max_staleness=max_staleness,
            policy=POLICIES["wait"],
            found=found,
        ),
        environments=EchoFactory(),
        timeline=Timeline(),
        observer=Silent(),
        accounts=resumed_accounts(resumed, found=found, generated=generated),
        journal=journal,
        outstanding={*held, *again},
        save_checkpoint=save,
    )
    if resumed is None:
        await save(driver, 0)
    await driver.run()
    counts = ledger.statistics()
    assert (counts.unaccounted, counts.consumed, counts.live) == (0, STEPS * GROUPS, 0)
    ledger.close()
    with sqlite3.connect(path) as told:
        trained = told.execute("SELECT step, position, slot FROM batches ORDER BY step, position").fetchall()
    return End(policy.weights, trained)


class Camera:
    """Keeps what the files hold at the points of a run: all of them, or every n-th."""

    def __init__(self, folder: Path, album: Path, *, every: int) -> None:
        self._folder, self._album, self._every = folder, album, every
        self.points: list[str] = []

    def __call__(self, what: str) -> None:
        if len(self.points) % self._every == 0:
            shutil.copytree(self._folder, self._album / f"{len(self.points):05d}")
        self.points.append(what)


@pytest.mark.parametrize(
    "every",
    [pytest.param(EVERY, marks=[pytest.mark.slow, pytest.mark.timeout(900)], id="many"), pytest.param(83, id="some")],
)
def test_stopped_at_any_point_and_resumed_the_run_ends_the_same(tmp_path: Path, every: int):
    torch.set_num_threads(1)
    whole, album = tmp_path / "whole", tmp_path / "album"
    whole.mkdir()
    camera = Camera(whole, album, every=every)
    expected = asyncio.run(live(whole, camera))
    assert [(step, position) for step, position, _ in expected.trained] == [
        (step, position) for step in range(1, STEPS + 1) for position in range(GROUPS)
    ]
    assert len(camera.points) >= 500
    assert {point.split()[1] for point in camera.points if " " in point} >= {"write", "rename", "insert", "commit"}
    resumed = 0
    for moment in sorted(album.iterdir()):
        point = f"{camera.points[int(moment.name)]} (point {int(moment.name)})"
        end = asyncio.run(live(moment))
        assert end == expected, f"stopped {point}"
        shutil.rmtree(moment)
        resumed += 1
    assert resumed == len(range(0, len(camera.points), every))
    print(f"{resumed} of {len(camera.points)} points: the same weights")


@pytest.mark.slow
def test_stopped_while_it_recovers_and_resumed_again(tmp_path: Path):
    """A second crash, at the points of the life after the first."""
    whole, album, second = tmp_path / "whole", tmp_path / "album", tmp_path / "second"
    whole.mkdir()
    expected = asyncio.run(live(whole, Camera(whole, album, every=120)))
    for moment in sorted(album.iterdir())[2:5]:
        asyncio.run(live(moment, Camera(moment, second, every=61)))
        for again in sorted(second.iterdir()):
            assert asyncio.run(live(again)) == expected, f"{moment.name}, then {again.name}"
        shutil.rmtree(second)
