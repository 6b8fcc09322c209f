"""The held-out score: greedy episodes on tasks that are never trained on."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from asyncrl.data import DataProtoFuture
from asyncrl.errors import EnvironmentFailure, RolloutsLostError
from asyncrl.interfaces import CountedTasks, EnvironmentFactory
from asyncrl.pipeline.group_stages import numbers_of
from asyncrl.pipeline.reference import Score
from asyncrl.rollout.pool import RolloutPool
from asyncrl.rollout.prompts import derive_seed, prompt_rows

__all__ = ["EvaluationResult", "evaluate", "part_means"]

_Result = TypeVar("_Result")

_ROWS_PER_CALL = 32
"""Small enough that several replicas share the tasks, large enough that a call costs nothing beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """Score of one weight version.

    Attributes:
        weight_version: version the pool served when the evaluation began.
        success: share of tasks whose reward reached the success reward, 0..1.
        reward_mean: mean reward.
        tokens_mean: sampled tokens per task.
        tasks: how many were answered; all shares and means are over these.
        failed: how many were not: their environment failed, or replicas died under them.
        reward_parts: mean of each part of the rewards, over the rows that have it.
    """

    weight_version: int
    success: float
    reward_mean: float
    tokens_mean: float
    tasks: int
    failed: int = 0
    reward_parts: Mapping[str, float] = field(default_factory=dict)


def part_means(parts: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Mean of each part of rewards by name, from one table per group (:class:`asyncrl.interfaces.GroupSummary`).

    >>> part_means([{"format": (1.0, 0.0)}, {"format": (1.0, 1.0), "math": (0.0,)}])
    {'format': 0.75, 'math': 0.0}
    """
    values: dict[str, list[float]] = {}
    for table in parts:
        for name, found in table.items():
            values.setdefault(name, []).extend(found)
    return {name: sum(found) / len(found) for name, found in sorted(values.items()) if found}


async def evaluate(
    pool: RolloutPool,
    environments: EnvironmentFactory,
    *,
    tasks: int,
    seed: int,
    success_reward: float = 1.0,
    score: Score | None = None,
    split: Literal["train", "held_out"] = "held_out",
) -> EvaluationResult:
    """Run the first ``tasks`` tasks of the split greedily, once each, over the whole pool; no task twice.

    Their rewards are the environment's, or those that ``score`` gives. A task that fails is left out, and counted.

    Raises:
        EnvironmentFailure: no task was answered; why the first one was not.
        RolloutsLostError: likewise.
    """
    if split == "held_out" and isinstance(environments, CountedTasks):
        tasks = min(tasks, environments.held_out_rows)
    version = pool.weight_version
    failures: list[EnvironmentFailure | RolloutsLostError] = []

    async def answers(numbers: range) -> list[DataProtoFuture]:
        rows = prompt_rows(
            [environments.task(number, split=split) for number in numbers],
            slot=version * tasks + numbers.start,  # no other's: the evaluation of an earlier version may still run
            seeds=[derive_seed(seed, "eval", number) for number in numbers],
            purpose="eval",
        )
        try:
            return [await pool.rollout(rows)]
        except (EnvironmentFailure, RolloutsLostError) as failure:
            if len(numbers) == 1:
                failures.append(failure)
                return []
        # One row fails its whole call: the others may be answered without it.
        alone = await _all(answers(range(number, number + 1)) for number in numbers)
        return [rows for found in alone for rows in found]

    starts = range(0, tasks, _ROWS_PER_CALL)
    calls = await _all(answers(range(first, min(first + _ROWS_PER_CALL, tasks))) for first in starts)
    answered = [rows for found in calls for rows in found]
    if failures and not answered:
        raise failures[0]
    summaries = [(await rows.header()).meta_info["summary"] for rows in answered]
    rewards = [reward for summary in summaries for reward in summary["rewards"]]
    if score is not None:
        scored = await _all(numbers_of(score(rows), "scores") for rows in answered)
        rewards = [reward for part in scored for reward in part]
    tokens = sum(summary["tokens"] for summary in summaries)
    return EvaluationResult(
        weight_version=version,
        success=sum(reward >= success_reward - 1e-9 for reward in rewards) / len(rewards),
        reward_mean=sum(rewards) / len(rewards),
        tokens_mean=tokens / len(rewards),
        tasks=len(rewards),
        failed=len(failures),
        reward_parts=part_means(summary["reward_parts"] for summary in summaries),
    )


async def _all(calls: Iterable[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """What they return, in their order; the first that fails cancels the others."""
    try:
        async with asyncio.TaskGroup() as running:
            tasks = [running.create_task(call) for call in calls]
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group.exceptions[0].__cause__
    return [task.result() for task in tasks]
