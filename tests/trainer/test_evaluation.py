"""The held-out score where some of its tasks fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrl.config import Config
from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.errors import EnvironmentFailure, InvariantError, RewardError, RolloutsLostError, WeightError
from asyncrl.tasks.run import train
from asyncrl.trainer.evaluation import EvaluationResult, evaluate


class Numbers:
    """Task n is the number n."""

    def task(self, index: int, *, split: str) -> dict[str, Any]:
        return {"number": index}


class Pool:
    """Answers task n with reward n % 2 and n + 1 tokens, but fails a call that has a task of ``failing``."""

    weight_version = 3

    def __init__(self, failing: dict[int, Exception], *, versions: tuple[int, ...] = (3,)) -> None:
        self.failing = failing
        self.versions = versions
        self.calls: list[list[int]] = []

    async def rollout(self, prompts: DataProto, *, pin: object = None) -> DataProtoFuture:
        numbers = [task["number"] for task in prompts.non_tensor_batch["task"]]
        self.calls.append(numbers)
        await asyncio.sleep(0)
        for number in numbers:
            if number in self.failing:
                raise self.failing[number]
        rewards = [float(number % 2) for number in numbers]
        lengths = [number + 1 for number in numbers]
        infos = [{"reward_parts": {"odd": reward}} for reward in rewards]
        summary = {
            "rewards": rewards,
            "lengths": lengths,
            "reward_parts": {"odd": rewards},
            "version_tokens": dict.fromkeys(self.versions, sum(lengths)),
        }
        return DataProtoFuture.of(
            DataProto.from_dict(
                {"rewards": torch.tensor(rewards)},
                {"info": infos},
                meta_info={"summary": summary},
            )
        )

    @asynccontextmanager
    async def pinned(self, replicas: int) -> AsyncIterator[SimpleNamespace]:
        yield SimpleNamespace(version=self.weight_version)


async def scored(pool: Any, *, tasks: int = 40) -> EvaluationResult:
    return await evaluate(pool, Numbers(), tasks=tasks, seed=0)  # type: ignore[arg-type]


async def test_tasks_that_fail_are_left_out_and_counted():
    pool = Pool({3: EnvironmentFailure("ill"), 5: RolloutsLostError("lost")})
    result = await scored(pool)
    assert (result.tasks, result.failed) == (38, 2)
    assert (result.success, result.tokens_mean) == (18 / 38, (820 - 4 - 6) / 38)  # 20 odd numbers, less 3 and 5
    # The call of tasks 0..31 fails as one, so each of its tasks is asked again alone; the other call is left as it is.
    assert sorted(pool.calls, key=len) == [*([number] for number in range(32)), [*range(32, 40)], [*range(32)]]


async def test_without_failures_no_task_is_asked_twice():
    pool = Pool({})
    result = await scored(pool)
    assert (result.tasks, result.failed, result.success) == (40, 0, 0.5)
    assert pool.calls == [[*range(32)], [*range(32, 40)]]


async def test_a_score_of_nothing_is_none():
    with pytest.raises(EnvironmentFailure, match="ill"):
        await scored(Pool(dict.fromkeys(range(3), EnvironmentFailure("ill"))), tasks=3)


@pytest.mark.parametrize(("failing", "scored_tasks"), [({1, 3}, 3), ({1, 2, 3, 4, 5}, 0)])
async def test_an_answer_that_cannot_be_scored_is_left_out_and_counted(failing: set[int], scored_tasks: int):
    calls = 0

    def score(rows: DataProtoFuture) -> DataProtoFuture:
        nonlocal calls
        calls += 1
        if calls in failing:  # call 1 is of all rows, the others are of one each
            raise RewardError("raised")
        return DataProtoFuture.of(DataProto.from_dict({"scores": torch.ones(1)}))

    evaluation = evaluate(Pool({}), Numbers(), tasks=4, seed=0, score=score)  # type: ignore[arg-type]
    if not scored_tasks:
        with pytest.raises(RewardError, match="raised"):
            await evaluation
    else:
        result = await evaluation
        assert (result.tasks, result.failed, result.reward_mean) == (scored_tasks, 1, 1.0)
        assert (result.tokens_mean, result.reward_parts) == (8 / 3, {"odd": 1 / 3})  # of the tasks 0, 2 and 3


async def test_a_score_of_a_batch_is_compared_in_its_precision():
    def score(rows: DataProtoFuture) -> DataProtoFuture:
        return DataProtoFuture.of(DataProto.from_dict({"scores": torch.tensor([0.9, 0.8])}))

    found = await evaluate(Pool({}), Numbers(), tasks=2, seed=0, score=score, success_reward=0.9)  # type: ignore[arg-type]
    assert found.success == 0.5


async def test_a_score_names_the_versions_of_its_tokens():
    result = await scored(Pool({}, versions=(3, 5)))
    assert (result.weight_version, result.newest_version) == (3, 5)
    assert (result.metrics()["eval/version"], result.metrics()["eval/newest_version"]) == (3.0, 5.0)


@pytest.mark.parametrize("versions", [(3, 4), (2,)])
async def test_a_token_of_another_version_is_no_part_of_a_pinned_score(versions: tuple[int, ...]):
    pool: Any = Pool({})
    assert (await evaluate(pool, Numbers(), tasks=4, seed=0, replicas=1)).weight_version == 3  # type: ignore[arg-type]
    pool.versions = versions
    with pytest.raises(InvariantError, match="the evaluation of version 3 has tokens of other versions"):
        await evaluate(pool, Numbers(), tasks=4, seed=0, replicas=1)  # type: ignore[arg-type]


async def test_any_other_failure_ends_it_by_name():
    with pytest.raises(WeightError, match="no weights"):
        await scored(Pool({3: EnvironmentFailure("ill"), 35: WeightError("no weights")}))


@pytest.mark.slow
def test_an_evaluation_may_last_longer_than_the_steps_to_the_next(small_config: Callable[..., Config]):
    config = small_config(steps=5, max_staleness=4, env={"latency_s": 0.3}, eval={"tasks": 4, "every": 1})
    assert train(config)["weight_version"] == 5


@pytest.mark.slow
def test_a_pinned_evaluation_is_of_one_version_while_newer_ones_are_published(small_config: Callable[..., Config]):
    config = small_config(
        steps=6,
        max_staleness=4,
        env={"latency_s": 0.3},
        rollout={"replicas": 2},
        eval={"tasks": 4, "every": 2, "replicas": 1},
    )
    summary = train(config)
    versions = [(score["step"], score["version"], score["newest_version"]) for score in summary["scores"]]
    assert versions == [(step, step, step) for step, _, _ in versions]
    assert sorted([*summary["unscored"], *(str(step) for step, _, _ in versions)]) == ["0", "2", "4", "6"]
    (run,) = config.runs.glob("small-2*")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    scores = [line for line in lines if "eval/success" in line]
    assert [line["eval/version"] for line in scores] == [line["step"] for line in scores]


@pytest.mark.slow
def test_a_run_goes_on_past_a_held_out_task_that_fails(small_config: Callable[..., Config]):
    config = small_config(env={"options": {"fails_on": [10_001]}}, eval={"tasks": 4, "every": 1})
    assert train(config)["weight_version"] == 3
    (run,) = config.runs.glob("small-2*")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    told = [(line["eval/tasks"], line["eval/failed"]) for line in lines if "eval/success" in line]
    assert told == [(3.0, 1.0)] * 4
