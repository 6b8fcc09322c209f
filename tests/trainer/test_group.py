"""The record of a group, and what each stage adds to it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.errors import EnvironmentFailure, InvalidDataError, InvariantError, RewardError
from asyncrl.interfaces import GroupSummary
from asyncrl.rollout.recheck import CheckBudget
from asyncrl.telemetry.timeline import Timeline
from asyncrl.testing import EchoFactory
from asyncrl.trainer.group import Group, GroupStages
from asyncrl.trainer.journal import Journal
from asyncrl.trainer.workers import RewardWorker


def test_rows_are_asked_of_sampled_groups_only() -> None:
    group = Group(group_id=3)
    for read in (lambda: group.known, lambda: group.sampled_rows):
        with pytest.raises(InvalidDataError, match="group 3 has no rows yet"):
            read()


@pytest.mark.parametrize("score", [math.nan, -math.inf, 1e39])
async def test_a_score_that_is_no_finite_float32_is_an_error(score: float) -> None:
    class Model:
        async def score(self, batch: DataProto) -> DataProto:
            return DataProto.from_dict({"rewards": torch.tensor([0.5, score], dtype=torch.float64)})

    worker = RewardWorker(("", {}))
    worker._model = Model()  # type: ignore[assignment]
    with pytest.raises(RewardError, match=r"row 1 .*, not a finite float32"):
        await worker.score(DataProto(), "")


class Pool:
    """Answers with rows whose reward is 1, greedily with 0.25; fails for the purposes named."""

    def __init__(self, *fails: str) -> None:
        self.purposes: list[str] = []
        self._fails = fails

    async def rollout(self, prompts: DataProto, again: Any = None) -> DataProtoFuture:
        purpose = prompts.meta_info["purpose"]
        self.purposes.append(purpose)
        await asyncio.sleep(0)
        if purpose in self._fails:
            raise EnvironmentFailure("the world is broken")
        reward = 0.25 if purpose == "baseline" else 1.0
        summary = {
            "group_id": int(prompts.batch["group_id"][0]),
            "rows": len(prompts),
            "oldest_version": 4,
            "tokens": 2 * len(prompts),
            "version_tokens": {4: 2 * len(prompts)},
            "rewards": (reward,) * len(prompts),
            "lengths": (2,) * len(prompts),
        }
        rows = prompts.select(["group_id", "row"], [], [])
        return DataProtoFuture.of(
            rows.union(
                DataProto.from_dict({}, meta_info={"summary": summary, "wasted_tokens": 1, "sample": {"row": 0}})
            )
        )


class Buffer:
    """Keeps what is put into it."""

    def __init__(self) -> None:
        self.put_groups: list[tuple[int, int, int]] = []
        self.extended: dict[str, Any] = {}

    def put(self, summary: GroupSummary, rows: DataProtoFuture, *, uses: int = 0, reserved_uses: int = 0) -> None:
        self.put_groups.append((summary.group_id, uses, reserved_uses))

    def extend(self, group_id: int, columns: tuple[str, ...], rows: DataProtoFuture, *, rewards: Any = None) -> None:
        self.extended[columns[0]] = rewards if rewards is not None else rows


def stages(pool: Pool, buffer: Buffer, **options: Any) -> GroupStages:
    return GroupStages(
        group_size=2,
        seed=0,
        pool=pool,  # type: ignore[arg-type]
        environments=EchoFactory(),
        buffer=buffer,  # type: ignore[arg-type]
        journal=Journal(),
        timeline=Timeline(),
        version=lambda: 4,
        **options,
    )


def column(name: str, values: list[float]) -> Callable[[DataProtoFuture], DataProtoFuture]:
    return lambda rows: DataProtoFuture.of(DataProto.from_dict({name: torch.tensor(values)}))


async def test_a_group_is_sampled_and_completed() -> None:
    pool, buffer = Pool(), Buffer()
    made = stages(pool, buffer, reward=column("scores", [0.5, 2.0]))
    group = Group(group_id=7)
    assert await made.sample(group, show=True) == (None, {"row": 0})
    assert (group.known.rewards, group.baseline_reward) == ((1.0, 1.0), None)
    assert made.journal.take_drops().tokens == 1  # wasted by rows that had to start again
    await made.complete(group)
    assert (buffer.put_groups, buffer.extended) == ([(7, 0, 0)], {"scores": (0.5, 2.0)})


def scoring(*, shifted: bool, deterministic: bool = True) -> Callable[[DataProtoFuture], DataProtoFuture]:
    """Scores each row by its number; ``shifted``, it gives the scores of a group to the wrong rows."""

    def score(rows: DataProto) -> DataProto:
        assert rows.batch is not None
        scores = rows.batch["row"].float()
        meta = {"deterministic": deterministic}
        return DataProto.from_dict({"scores": scores.roll(1) if shifted else scores}, meta_info=meta)

    return lambda rows: rows.then(score)


@pytest.mark.parametrize(("shifted", "deterministic"), [(False, True), (True, False), (True, True)])
async def test_some_rows_are_scored_again(shifted: bool, deterministic: bool) -> None:
    made = stages(Pool(), Buffer(), reward=scoring(shifted=shifted, deterministic=deterministic), checks=CheckBudget(1))
    group = Group(group_id=7)
    await made.sample(group)
    if shifted and deterministic:
        with pytest.raises(ExceptionGroup) as failed:
            await made.complete(group)
        assert isinstance(failed.value.exceptions[0], InvariantError)
        assert "of group 7 has the reward" in str(failed.value.exceptions[0])
        return
    await made.complete(group)
    assert made.journal.take_checks()["rewards_checked"] == deterministic


async def test_the_greedy_baseline_is_sampled_beside_the_rollouts() -> None:
    pool = Pool()
    group = Group(group_id=7)
    assert await stages(pool, Buffer(), needs_baseline=True).sample(group) == (None, None)
    assert sorted(pool.purposes) == ["baseline", "train"]
    assert group.baseline_reward == 0.25
    with_model = Group(group_id=8)
    made = stages(pool, Buffer(), needs_baseline=True, reward=column("scores", [0.75]))
    await made.sample(with_model)
    assert with_model.baseline_reward == 0.75


@pytest.mark.parametrize(("fails", "sampled"), [("train", False), ("baseline", True)])
async def test_what_fails_is_returned_and_says_where(fails: str, sampled: bool) -> None:
    group = Group(group_id=7)
    failure, _ = await stages(Pool(fails), Buffer(), needs_baseline=True).sample(group)
    assert isinstance(failure, EnvironmentFailure)
    assert (group.rows is not None) is sampled


async def test_a_recorded_group_is_not_rolled_out_again() -> None:
    pool, buffer = Pool(), Buffer()
    made = stages(pool, buffer, reward=column("scores", [9.0, 9.0]))
    group = Group(group_id=7)
    await made.sample(group)
    recorded = Group(
        group_id=7,
        summary=group.known,
        rows=group.rows,
        uses=1,
        reserved_uses=1,
        rewarded=True,
    )
    assert await made.sample(recorded, show=True) == (None, None)
    await made.complete(recorded)
    assert pool.purposes == ["train"]
    assert (buffer.put_groups, buffer.extended["scores"]) == ([(7, 1, 1)], (1.0, 1.0))  # not scored again


async def test_divergences_are_kept_where_something_needs_them() -> None:
    def reference(rows: DataProtoFuture) -> DataProtoFuture:
        return DataProtoFuture.of(
            DataProto.from_dict({"reference_log_probs": torch.zeros(2), "divergences": torch.tensor([0.5, 1.5])})
        )

    for needed, expected in ((True, (0.5, 1.5)), (False, None)):
        buffer = Buffer()
        group = Group(group_id=7)
        made = stages(Pool(), buffer, reference=reference, needs_divergences=needed)
        await made.sample(group)
        await made.complete(group)
        assert group.divergences == expected
        assert (await buffer.extended["reference_log_probs"].header()).schema.names == ("reference_log_probs",)
