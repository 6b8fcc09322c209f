"""Failures that other systems of this kind have shown: each check finds a planted copy of the bug, and none here."""

from __future__ import annotations

import asyncio
import math
import shutil
import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from asyncrl.algorithms import AdvantageEstimator
from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.errors import CheckpointError, DeadlineError, EnvironmentFailure, InvalidDataError
from asyncrl.interfaces import GroupSummary
from asyncrl.ledger import Completed, Consumed, Dispatched, Dropped, Issued, Ledger, LedgerBase, Recovered
from asyncrl.rollout.publication import Ended
from asyncrl.rollout.trajectory import Trajectory, Turn, decode_rows, encode_rows
from asyncrl.staleness import POLICIES, AdmissionLaw
from asyncrl.telemetry.timeline import Timeline
from asyncrl.testing import EchoFactory
from asyncrl.testing.clock import run_virtually
from asyncrl.trainer.checkpoint import Checkpoints, DriverState, read_driver_state
from asyncrl.trainer.driver import Driver, TrainingPlan
from asyncrl.trainer.group import Group, GroupStages
from asyncrl.trainer.journal import Journal
from asyncrl.trainer.learner import Advantages, Learner
from asyncrl.trainer.recovery import starting_point
from asyncrl.weights import WeightManifest
from buffers.ledger import SQLiteLedger
from buffers.replay import AsyncReplayBuffer

GROUPS, STEPS = 2, 4


def rows_of(group_id: int, version: int) -> bytes:
    return encode_rows(
        [
            Trajectory(
                task={"number": group_id},
                token_ids=(1, 2),
                loss_mask=(False, True),
                behaviour_log_probs=(0.0, -1.0),
                weight_versions=(-1, version),
                reward=float(row),
                turns=(Turn(start=1, end=2, finish_reason="stop", message={"role": "assistant", "content": ""}),),
                finish_reason="done",
            )
            for row in range(2)
        ]
    )


def interrupted(folder: Path) -> DriverState:
    """Step 1 trained on 0 and 1 and is in the checkpoint; 2 waits in the buffer, 3 was dropped, 4 is under way."""
    with SQLiteLedger(folder / "ledger.sqlite", threaded=False) as ledger:
        for group_id in range(5):
            ledger.append(Issued(group_id))
            ledger.append(Dispatched(group_id=group_id, attempt=0, version=0))
        for group_id in range(4):
            ledger.append(Completed(group_id=group_id, attempt=0, tokens=2), rows=rows_of(group_id, 0))
        ledger.append(Consumed(group_id=0, step=1, position=0), Consumed(group_id=1, step=1, position=1))
        ledger.append(Dropped(group_id=3, reason="stale", tokens=2))
        position = ledger.position
    return DriverState(
        step=1,
        next_group_id=5,
        outstanding=(2, 4),
        generated=10,
        trained=4,
        dropped={"stale": 2},
        staleness={0: 4},
        history={},
        consumed=2,
        ledger=position,
    )


def recover(folder: Path, state: DriverState) -> Recovered:
    base = LedgerBase(
        step=state.step,
        next_group_id=state.next_group_id,
        consumed=state.consumed,
        outstanding=state.outstanding,
        position=state.ledger,
    )
    with SQLiteLedger(folder / "ledger.sqlite", resume=base, threaded=False) as ledger:
        assert ledger.recovered is not None
        return ledger.recovered


Resume = Callable[[DriverState, Recovered], list[int]]
"""From what is on the disk to the prompts that the rest of the run trains on, in order."""


def resumed_here(state: DriverState, found: Recovered) -> list[int]:
    total = (STEPS - state.step) * GROUPS
    start = starting_point(
        state,
        cast("Ledger", SimpleNamespace(recovered=found)),
        steps=STEPS,
        groups_per_step=GROUPS,
        max_staleness=STEPS,
        policy=POLICIES["wait"],
    )
    held = [group_id for group_id, group in start.groups.items() if group.rows is not None]
    issued = []
    while start.law.may_issue():
        issued.append(start.law.issue())
    return sorted([*held, *issued])[:total]


def with_a_cursor_ahead_of_the_buffer(state: DriverState, _found: Recovered) -> list[int]:
    """The checkpoint keeps where the data set was read to, and not what had been read and not trained on."""
    return list(range(state.next_group_id, state.next_group_id + (STEPS - state.step) * GROUPS))


def without_what_was_sampled_too_much(state: DriverState, found: Recovered) -> list[int]:
    """Prompts under way are issued again; those whose rollouts lay in the buffer are forgotten."""
    rest = (STEPS - state.step) * GROUPS - len(found.waiting)
    return [*found.waiting, *range(state.next_group_id, state.next_group_id + rest)]


def pinned_by_what_was_dropped(state: DriverState, found: Recovered) -> list[int]:
    """It resumes at the lowest prompt that was not trained on, and a dropped one is never trained on."""
    lowest = min(set(range(state.next_group_id)) - {0, 1} - set(found.waiting) - set(found.groups))
    return list(range(lowest, lowest + (STEPS - state.step) * GROUPS))


def wrong(trained: Iterable[int]) -> list[str]:
    """What is wrong with a run of 4 steps that trained on these prompts after its first step."""
    prompts = [0, 1, *trained]
    expected = [0, 1, 2, 4, 5, 6, 7, 8]  # 3 was dropped, and another one takes its place
    found = []
    if lost := sorted(set(expected) - set(prompts)):
        found.append(f"lost {lost}")
    if again := sorted({prompt for prompt in prompts if prompts.count(prompt) > 1 or prompt == 3}):
        found.append(f"repeated {again}")
    return found


@pytest.mark.parametrize(
    ("resume", "finding"),
    [
        (resumed_here, []),
        (with_a_cursor_ahead_of_the_buffer, ["lost [2, 4]"]),
        (without_what_was_sampled_too_much, ["lost [2]"]),
        (pinned_by_what_was_dropped, ["lost [2]", "repeated [3]"]),
    ],
)
def test_no_prompt_is_lost_or_repeated_by_a_resume(tmp_path: Path, resume: Resume, finding: list[str]):
    state = interrupted(tmp_path)
    assert wrong(resume(state, recover(tmp_path, state))) == finding


@pytest.mark.parametrize("planted", [False, True])
async def test_the_bound_holds_after_a_recovery(tmp_path: Path, planted: bool):
    """The run goes on with a smaller bound than it had when the rows were sampled."""
    state = interrupted(tmp_path)
    found = recover(tmp_path, state)
    # Planted: rows that come back are taken for fresh, since no other version is known of them.
    restored = [group.summary for group in found.groups.values()]
    if planted:
        restored = [
            GroupSummary(
                group_id=each.group_id,
                rows=each.rows,
                oldest_version=4,
                tokens=each.tokens,
                version_tokens={4: each.tokens},
                rewards=each.rewards,
                lengths=each.lengths,
            )
            for each in restored
        ]
    buffer = AsyncReplayBuffer(capacity=4, max_staleness=1)
    for group in restored:
        await buffer.admit(group.group_id)
        buffer.put(group, found.groups[group.group_id].rows)
    try:
        (taken,) = await buffer.select(1, weight_version=4, timeout_s=0.0)
    except DeadlineError:
        assert not planted
        assert buffer.statistics().dropped == {"stale": 1}
        return
    with sqlite3.connect(tmp_path / "ledger.sqlite") as ledger:  # what sampled them really stands there
        (oldest,) = ledger.execute(
            "SELECT min(oldest_version) FROM rows WHERE group_id = ?", (taken.summary.group_id,)
        ).fetchone()
    assert 4 - oldest > 1
    assert planted, "a group past the bound was trained on"


class WritingTrainer:
    """Is interrupted while it writes its second checkpoint."""

    def __init__(self) -> None:
        self.stops = False

    async def snapshot(self, folder: Path, model: Path | None = None) -> None: ...

    async def write_snapshot(self, folder: Path) -> list[dict[str, Any]]:
        (folder / "weights").write_bytes(b"whole")
        return [{}]

    async def export_snapshot(self, saved: Path, folder: Path) -> None:
        folder.mkdir()
        if self.stops:
            raise KeyboardInterrupt
        (folder / "model").write_bytes(b"whole")


def newest_folder(checkpoints: Path) -> Path:
    """The planted bug: whatever was begun last."""
    return max(checkpoints.iterdir(), key=lambda path: path.name.strip(".").removesuffix(".partial"))


def test_a_checkpoint_that_is_still_being_written_is_not_resumed_from(tmp_path: Path):
    trainer, checkpoints = WritingTrainer(), Checkpoints(tmp_path, keep=2)
    state = DriverState(
        step=1, next_group_id=2, outstanding=(), generated=0, trained=0, dropped={}, staleness={}, history={}
    )
    asyncio.run(checkpoints.save(trainer, state, step=1))
    trainer.stops = True
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(checkpoints.save(trainer, msgspec.structs.replace(state, step=2), step=2))
    assert newest_folder(tmp_path).name == ".step-000002.partial"
    with pytest.raises(CheckpointError):
        read_driver_state(newest_folder(tmp_path))
    assert read_driver_state(checkpoints.latest()).step == 1
    shutil.rmtree(tmp_path / "step-000001")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        checkpoints.latest()


def test_an_answer_that_comes_twice_is_taken_once(tmp_path: Path):
    """A replica was taken for dead, and answers after all."""
    with SQLiteLedger(tmp_path / "ledger.sqlite", threaded=False) as ledger:
        ledger.append(Issued(0))
        ledger.append(Dispatched(group_id=0, attempt=0, version=0))
        ledger.append(Dispatched(group_id=0, attempt=1, version=1))
        assert ledger.append(Completed(group_id=0, attempt=1, tokens=2), rows=rows_of(0, 1))
        assert not ledger.append(Completed(group_id=0, attempt=0, tokens=2), rows=rows_of(0, 0))
        ledger.append(Consumed(group_id=0, step=1, position=0))
        with pytest.raises(InvalidDataError, match="it was consumed"):
            ledger.append(Consumed(group_id=0, step=2, position=0))
        batch = ledger.query()
    assert batch.batch["weight_versions"].values().max() == 1
    assert len(batch) == 2


class Parts:
    """Pool and trainer of a small run; some prompts fail, or lose rows on the way."""

    needed_versions: frozenset[int] = frozenset()

    def __init__(self, *, fails_on: tuple[int, ...] = (), loses_rows_of: tuple[int, ...] = ()) -> None:
        self.weight_version = 0
        self.trained: list[int] = []
        self.tried: list[int] = []
        self._fails_on, self._loses_rows_of = fails_on, loses_rows_of

    async def rollout(self, prompts: DataProto, **_: Any) -> DataProtoFuture:
        group_id = int(prompts.batch["group_id"][0])
        self.tried.append(group_id)
        await asyncio.sleep(1.0)
        if group_id in self._fails_on:
            raise EnvironmentFailure(f"the world of prompt {group_id} is broken")
        rows = decode_rows(rows_of(group_id, self.weight_version), group_id=group_id)
        if group_id in self._loses_rows_of:
            rows = rows.slice(0, 1)
            rows.meta_info["summary"] |= {"rows": 1, "tokens": 1, "version_tokens": {self.weight_version: 1}}
            rows.meta_info["summary"] |= {"rewards": (0.0,), "lengths": (1,)}
        rows.meta_info["wasted_tokens"] = 0
        return DataProtoFuture.of(rows)

    async def update(self, batch: DataProtoFuture, *_: Any) -> list[dict[str, float]]:
        rows = await batch
        self.trained.append(len(rows))
        return [{"tokens_trained": float(rows.batch["loss_mask"].values().sum())}]

    async def publish(self, version: Any) -> Any:
        if isinstance(version, int):
            return [WeightManifest(version=version, transport="none", location="", tensors=())]
        self.weight_version = version.version
        return Ended(version=version.version, committed=(), fenced={})

    def take_proofs(self) -> list[Any]:
        return []

    async def release(self, version: int) -> None: ...


class Silent:
    def stepped(self, record: Any) -> None: ...
    def evaluated(self, result: Any, *, step: int) -> None: ...
    def sampled(self, trajectory: Any, *, step: int, group_id: int) -> None: ...


class Stubborn(GroupStages):
    """The planted bug: a prompt that failed is tried again, until it works, in its place."""

    async def sample(self, group: Group, *, show: bool = False) -> Any:
        while True:
            failure, shown = await super().sample(group, show=show)
            if failure is None:
                return None, shown


def run_small(parts: Any, stages: type[GroupStages]) -> None:
    """Four steps of two prompts, with as many places; a virtual hour at most."""

    async def run() -> None:
        async with asyncio.timeout(3600):
            law = AdmissionLaw(GROUPS, max_staleness=0, total_groups=STEPS * GROUPS, overdue_after=math.inf)
            await Driver(
                plan=TrainingPlan(steps=STEPS, groups_per_step=GROUPS, group_size=2),
                law=law,
                stages=stages(
                    group_size=2,
                    seed=0,
                    pool=parts,
                    environments=EchoFactory(),
                    buffer=AsyncReplayBuffer(capacity=GROUPS, max_staleness=0),
                    journal=Journal(),
                    timeline=Timeline(),
                    version=lambda: law.version,
                ),
                learner=Learner(
                    trainer=parts,
                    advantages=Advantages(
                        estimator=AdvantageEstimator("none", lambda rewards: torch.zeros_like(rewards), {})
                    ),
                    policy=POLICIES["wait"],
                    max_staleness=0,
                ),
                observer=Silent(),
            ).run()

    run_virtually(run())


@pytest.mark.parametrize(("stages", "planted"), [(GroupStages, False), (Stubborn, True)])
def test_a_prompt_that_keeps_failing_does_not_hold_the_run(stages: type[GroupStages], planted: bool):
    parts = Parts(fails_on=(3,))
    try:
        run_small(parts, stages)
    except TimeoutError:
        assert planted, "one prompt held all the places"
        assert parts.tried.count(3) > 1000
    else:
        assert not planted
        assert parts.tried == [0, 1, 2, 3, 4, 5, 6, 7, 8]  # 8 takes the place of 3
        assert parts.trained == [4, 4, 4, 4]


class Trusting(GroupStages):
    """The planted bug: what comes back is what was asked for."""

    async def sample(self, group: Group, *, show: bool = False) -> Any:
        rows = await self.pool.rollout(DataProto.from_dict({"group_id": torch.tensor([group.group_id])}))
        group.summary, group.rows = GroupSummary(**(await rows.header()).meta_info["summary"]), rows
        return None, None


@pytest.mark.parametrize(("stages", "planted"), [(GroupStages, False), (Trusting, True)])
def test_fewer_rollouts_than_asked_for_are_no_success(stages: type[GroupStages], planted: bool):
    parts = Parts(loses_rows_of=(3,))
    try:
        run_small(parts, stages)
    except ExceptionGroup as group:
        (error,) = group.exceptions
        assert "2 rollouts of group 3 were asked for, and 1 came back" in str(error)
        assert not planted
    else:
        assert parts.trained == [4, 3, 4, 4]
        assert planted, "a group that lost a row was trained on"
