"""How good answers were, and how sure one can be: avg@k and pass@k with intervals.

The held-out score: greedy episodes on tasks that are never trained on.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from asyncrl.algorithms.advantages import successes
from asyncrl.data import DataProtoFuture
from asyncrl.errors import (
    AsyncRLError,
    EnvironmentFailure,
    InvalidDataError,
    InvariantError,
    RolloutsLostError,
    UserCodeError,
)
from asyncrl.interfaces import EnvironmentFactory, FiniteHeldOutTasks
from asyncrl.rollout.pool import Pin, RolloutPool
from asyncrl.rollout.trajectory import REWARD_PARTS, derive_seed, prompt_rows, reward_parts
from asyncrl.runtime import run_all
from asyncrl.trainer.group import Score, fetch_numbers

_log = logging.getLogger(__name__)

_Z = 1.959963984540054
"""Standard normal quantile of 0.975: intervals are of 95 %."""

_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks, and the 95 % interval it lies in if other tasks of the same kind had been drawn."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.4f}  [{self.low:.4f}, {self.high:.4f}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScores:
    rewards: tuple[float, ...]
    data_source: str = ""


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return the unbiased chance that one of ``k`` answers is right, from ``right`` of ``samples``.

    It is ``1 - C(samples - right, k) / C(samples, k)`` (Chen et al., arXiv:2107.03374, eq. 1): ``pass_at_k(4, 1, 2)``
    is 0.5.
    """
    if not 0 <= right <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, and at most as many right: got {right} of {samples}")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def wilson_interval(right: int, trials: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval (J. Am. Stat. Assoc. 22, 1927): sensible at 0 and 1, where others vanish."""
    share, squared = right / trials, _Z**2
    centre = (share + squared / (2 * trials)) / (1 + squared / trials)
    half = _Z / (1 + squared / trials) * math.sqrt(share * (1 - share) / trials + squared / (4 * trials**2))
    return max(0.0, min(centre - half, share)), min(1.0, max(centre + half, share))  # rounding apart, it has the share


def estimate_mean(values: Sequence[float], *, seed: int = 0) -> Estimate:
    """Return the mean of one value per task: with Wilson's interval if all are 0 or 1, else the bootstrap's."""
    if not values:
        raise ValueError("a mean needs at least one value")
    mean = math.fsum(values) / len(values)
    if all(value in (0.0, 1.0) for value in values):
        return Estimate(mean, *wilson_interval(round(math.fsum(values)), len(values)))
    array = np.asarray(values)
    draw, even, tasks = np.random.default_rng(seed), np.full(len(array), 1 / len(array)), len(array)
    at_once = max(1, 2_000_000 // tasks)  # how often each task is drawn, for many resamples at a time
    sizes = [min(at_once, _RESAMPLES - first) for first in range(0, _RESAMPLES, at_once)]
    means = np.concatenate([draw.multinomial(tasks, even, size=size) @ array / tasks for size in sizes])
    low, high = np.quantile(means, [0.025, 0.975])
    return Estimate(mean, float(low), float(high))


def score_tasks(tasks: Sequence[TaskScores], *, success_reward: float = 1.0, seed: int = 0) -> dict[str, Estimate]:
    """Return ``reward``, ``avg@n`` (share of right answers) and ``pass@k`` for k = 1, 2, 4, ... up to n samples.

    An answer is right if its reward reaches ``success_reward``; n is the smallest number of answers to a task.

    Raises:
        ValueError: there is no task, or one without an answer.
    """
    if not tasks or not all(task.rewards for task in tasks):
        raise ValueError("scores need at least one task, and an answer to each")
    right = [int(successes(task.rewards, success_reward).sum()) for task in tasks]
    samples = [len(task.rewards) for task in tasks]
    most = min(samples)
    found = {
        "reward": estimate_mean([math.fsum(task.rewards) / len(task.rewards) for task in tasks], seed=seed),
        f"avg@{most}": estimate_mean([good / count for good, count in zip(right, samples, strict=True)], seed=seed),
    }
    k = 1
    while most > 1 and k <= most:
        each = [pass_at_k(count, good, k) for good, count in zip(right, samples, strict=True)]
        found[f"pass@{k}"] = estimate_mean(each, seed=seed)
        k = k * 2 if k * 2 <= most or k == most else most
    return found


def summarise_answers(answers: Sequence[Mapping[str, Any]], *, success_reward: float = 1.0) -> dict[str, Any]:
    """Return :func:`score_tasks` and counts of answers (:func:`asyncrl.tasks.generate.answer_record`).

    Raises:
        InvalidDataError: there is none.
    """
    if not answers:
        raise InvalidDataError("there is no answer to score")
    by_task: dict[int, list[Mapping[str, Any]]] = {}
    for answer in answers:
        by_task.setdefault(answer["task_number"], []).append(answer)
    tasks = [
        TaskScores(
            rewards=tuple(float(each["reward"]) for each in found), data_source=str(found[0].get("data_source", ""))
        )
        for _, found in sorted(by_task.items())
    ]
    sources: dict[str, list[TaskScores]] = {}
    for task in tasks:
        sources.setdefault(task.data_source, []).append(task)
    parts: dict[str, list[float]] = {}
    for answer in answers:
        for name, value in (answer.get(REWARD_PARTS) or {}).items():
            if value is not None:  # what a file has of a number that is not finite
                parts.setdefault(name, []).append(float(value))
    return {
        "tasks": len(tasks),
        "samples": len(answers) / len(tasks),
        "scores": score_tasks(tasks, success_reward=success_reward),
        "by_data_source": {
            source: score_tasks(found, success_reward=success_reward) for source, found in sorted(sources.items())
        }
        if len(sources) > 1
        else {},
        "reward_parts": {name: math.fsum(values) / len(values) for name, values in sorted(parts.items())},
        "tokens_mean": sum(answer["sampled_tokens"] for answer in answers) / len(answers),
        "truncated_share": sum(bool(answer["truncated"]) for answer in answers) / len(answers),
    }


_ROWS_PER_CALL = 32
"""Small enough that several replicas share the tasks, large enough that a call costs nothing beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPlan:
    """When and how a run evaluates; the keys of the section ``eval`` of the configuration."""

    tasks: int = 0
    every: int = 0
    replicas: int = 0
    reward: Literal["configured", "environment"] = "configured"
    success_reward: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """Score of one weight version, or of several that followed one another while answers were sampled.

    Attributes:
        weight_version: oldest version that sampled a token of the answers; ``newest_version`` the newest, which is
            the same one with pinned replicas.
        success: share of tasks whose reward reached the success reward, 0..1.
        tokens_mean: sampled tokens per task.
        tasks: how many were answered; all shares and means are over these.
        failed: how many were not: their environment failed, or replicas died under them.
        reward_parts: mean of each part of the rewards, over the rows that have it.
    """

    weight_version: int
    newest_version: int
    success: float
    reward_mean: float
    tokens_mean: float
    tasks: int
    failed: int = 0
    reward_parts: Mapping[str, float] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        return {
            "eval/version": float(self.weight_version),
            "eval/newest_version": float(self.newest_version),
            "eval/success": self.success,
            "eval/reward_mean": self.reward_mean,
            "eval/tokens_mean": self.tokens_mean,
            "eval/tasks": float(self.tasks),
            "eval/failed": float(self.failed),
            **{f"eval/reward/{name}": value for name, value in self.reward_parts.items()},
        }


def part_means(parts: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Return the mean of each part of rewards by name, from one :attr:`GroupSummary.reward_parts` per group."""
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
    replicas: int = 0,
) -> EvaluationResult:
    """Run the first ``tasks`` tasks of the split greedily, once each; no task twice.

    They run over the whole pool, or with ``replicas`` on so many that are pinned to the current version
    (:meth:`RolloutPool.pinned`). Their rewards are the environment's, or those that ``score`` gives. A task that fails
    is left out, and counted.

    Raises:
        EnvironmentFailure: no task was answered; the failure is that of the first one.
        RolloutsLostError: likewise.
        UserCodeError: no task was scored.
        ResourceError: there are too few replicas to pin.
        VersionLostError: the pinned replicas died, and no other has their version.
        InvariantError: a token of a pinned replica is of another version.
    """
    if split == "held_out" and isinstance(environments, FiniteHeldOutTasks):
        tasks = min(tasks, environments.held_out_rows)
    failures: list[AsyncRLError] = []

    async def answers(numbers: range, version: int, pin: Pin | None) -> list[DataProtoFuture]:
        rows = prompt_rows(
            [environments.task(number, split=split) for number in numbers],
            group_id=version * tasks + numbers.start,  # no other's: the evaluation of an earlier version may still run
            seeds=[derive_seed(seed, "eval", number) for number in numbers],
            purpose="eval",
        )
        try:
            return [await pool.rollout(rows, pin=pin)]
        except (EnvironmentFailure, RolloutsLostError) as failure:
            if len(numbers) == 1:
                failures.append(failure)
                return []
        # One row fails its whole call: the others may be answered without it.
        alone = await run_all(answers(range(number, number + 1), version, pin) for number in numbers)
        return [rows for found in alone for rows in found]

    starts = range(0, tasks, _ROWS_PER_CALL)
    async with AsyncExitStack() as stack:
        pin = await stack.enter_async_context(pool.pinned(replicas)) if replicas else None
        version = pin.version if pin is not None else pool.weight_version
        numbers = (range(first, min(first + _ROWS_PER_CALL, tasks)) for first in starts)
        calls = await run_all(answers(each, version, pin) for each in numbers)
    answered = [rows for found in calls for rows in found]
    if failures and not answered:
        raise failures[0]
    summaries = [(await rows.header()).meta_info["summary"] for rows in answered]
    versions: Counter[int] = Counter()
    for summary in summaries:
        versions.update(summary["version_tokens"])
    if pin is not None and set(versions) != {pin.version}:
        raise InvariantError(
            f"the evaluation of version {pin.version} has tokens of other versions (tokens by version: "
            f"{dict(sorted(versions.items()))}): an engine changed its weights while it was pinned"
        )
    scores: list[Sequence[float | None]] = [summary["rewards"] for summary in summaries]
    if score is not None:
        counted = zip(answered, map(len, scores), strict=True)
        scores = await run_all(_scores(score, rows, count, failures) for rows, count in counted)
    rewards = [reward for found in scores for reward in found if reward is not None]
    if not rewards and failures:
        raise failures[0]
    lengths = [
        length
        for summary, found in zip(summaries, scores, strict=True)
        for length, reward in zip(summary["lengths"], found, strict=True)
        if reward is not None
    ]
    parts = await run_all(_parts(*each) for each in zip(answered, summaries, scores, strict=True))
    return EvaluationResult(
        weight_version=min(versions),
        newest_version=max(versions),
        success=int(successes(rewards, success_reward).sum()) / len(rewards),
        reward_mean=sum(rewards) / len(rewards),
        tokens_mean=sum(lengths) / len(rewards),
        tasks=len(rewards),
        failed=len(failures),
        reward_parts=part_means(parts),
    )


async def _scores(
    score: Score, rows: DataProtoFuture, count: int, failures: list[AsyncRLError]
) -> Sequence[float | None]:
    """Return the scores of ``count`` rows: None, and a failure, for those for which ``score`` fails alone."""
    try:
        return await fetch_numbers(score(rows), "scores")
    except (EnvironmentFailure, UserCodeError) as failure:
        if count == 1:
            _log.warning("an answer could not be scored: %s", failure)
            failures.append(failure)
            return [None]
    alone = await run_all(_scores(score, row, 1, failures) for row in rows.chunk(count))
    return [reward for found in alone for reward in found]


async def _parts(
    rows: DataProtoFuture, summary: Mapping[str, Any], scores: Sequence[float | None]
) -> Mapping[str, Sequence[float]]:
    """Return the parts of the rewards of the rows that have a score."""
    if None not in scores:
        parts: Mapping[str, Sequence[float]] = summary["reward_parts"]
        return parts
    infos = (await rows.select([], ["info"], [])).non_tensor_batch["info"]
    return reward_parts(info for info, score in zip(infos, scores, strict=True) if score is not None)
