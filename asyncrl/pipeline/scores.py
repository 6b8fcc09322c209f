"""How good answers were, and how sure one can be: avg@k and pass@k with intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncrl.errors import InvalidDataError
from asyncrl.rollout.trajectory import REWARD_PARTS

__all__ = [
    "Estimate",
    "TaskScores",
    "estimate_mean",
    "pass_at_k",
    "score_tasks",
    "summarise_answers",
    "wilson_interval",
]

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
    """Rewards of the answers to one task, and where the task comes from."""

    rewards: tuple[float, ...]
    data_source: str = ""


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Chance that at least one of ``k`` answers is right, from ``right`` of ``samples``: unbiased.

    ``1 - C(samples - right, k) / C(samples, k)`` (Chen et al., arXiv:2107.03374, eq. 1).

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not 0 <= right <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, and at most as many right: got {right} of {samples}")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def wilson_interval(right: int, trials: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share (J. Am. Stat. Assoc. 22, 1927): sensible at 0 and 1, where others vanish."""
    share, squared = right / trials, _Z**2
    centre = (share + squared / (2 * trials)) / (1 + squared / trials)
    half = _Z / (1 + squared / trials) * math.sqrt(share * (1 - share) / trials + squared / (4 * trials**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def estimate_mean(values: Sequence[float], *, seed: int = 0) -> Estimate:
    """Mean of one value per task. All of them 0 or 1: with Wilson's interval; else the bootstrap's over tasks."""
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
    """``reward``, ``avg@n`` (share of right answers) and ``pass@k`` for k = 1, 2, 4, ... up to the n samples of a task.

    An answer is right if its reward reaches ``success_reward``. Where tasks have different numbers of answers, n is the
    smallest.

    Raises:
        ValueError: there is no task, or one without an answer.
    """
    if not tasks or not all(task.rewards for task in tasks):
        raise ValueError("scores need at least one task, and an answer to each")
    right = [sum(reward >= success_reward - 1e-9 for reward in task.rewards) for task in tasks]
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
    """What there is to say of answers (:func:`asyncrl.pipeline.answers.answer_record`).

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
