"""Names the bottleneck of a run in one sentence, with its figure and the configuration key to change.

A run is healthy while every candidate is below a quarter; else the largest is its bottleneck. Candidates are

- the causes of the trainer's time other than ``update`` and ``pause`` (:mod:`asyncrl.telemetry.idle`);
- ``update``, where the trainer updates for two thirds of the time or more: the time for which replicas have no groups
  because of the staleness bound, less a quarter, so that they may idle for half the time beside a busy trainer (in a
  synchronous run one side always waits: it is rarely healthy);
- ``prompts``: the time for which replicas wait for them; before all others where the driver makes prompts for half the
  time, since nothing else goes on in it meanwhile;
- the share of the tokens that is thrown away for one reason.

``rollouts`` has the first cause that holds of: replicas restart or are fenced (15 % of their time); the buffer is full
(20 %); groups are longer with reward, reference or critic than in rollouts; rows are mostly in the environment;
replicas wait longer for publications than they work; the number of rows in flight is over the time below 0.4 of what it
is over the rows (the mean of a row's lifetime, geometric over rows: where it never changes, both are the same), since
few last far longer than the others (``long tail``); replicas of a synchronous run wait a quarter of the time for the
bound, or requests hardly slow down when there are more (exponent below 0.5), so that more groups at a time would help
(``staleness bound``). Else the engines are saturated (``rollout``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LEAST_PERCENT = 25.0
"""Share of the time, or of the tokens, from which a cause is a bottleneck."""

LEAST_STEPS = 4
"""Steps of a process after which there is enough to tell."""

_NOT_LOST = {"update", "pause", "not recorded", "rollouts"}
_WASTED = {
    "zero_variance": "filters",
    "masked": "stale tokens",
    "stale": "stale tokens",
    "replica_lost": "replicas",
    "rollouts_lost": "replicas",
    "environment_failed": "environment failures",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A bottleneck.

    Attributes:
        figure: percent of the training time, or of the tokens, that it takes.
        key: of the configuration.
        direction: ``up``, ``down``, or the value to set; ``check`` where it depends on the part that is configured.
    """

    cause: str
    sentence: str
    figure: float
    key: str
    direction: str


def advise(summary: Mapping[str, Any], config: Mapping[str, Any]) -> Advice | None:
    """Return the bottleneck of a run of at least :data:`LEAST_STEPS` steps; None for a healthy one.

    Keys of the summary that are read: ``idle``, ``episodes``, ``work_s``, ``tokens``, all as in
    :class:`asyncrl.trainer.report.RunSummary`. ``config`` are the tables of the configuration.
    """
    idle = summary["idle"]
    trainer = idle.get("trainer", {})
    replicas = [causes for name, causes in idle.items() if name not in _SINGLE]
    waits = {cause: share for cause, share in trainer.items() if cause not in _NOT_LOST}
    candidates = [(share, cause) for cause, share in waits.items()]
    rollouts = trainer.get("rollouts", 0.0)
    candidates.append((rollouts, _rollout_cause(summary, replicas, config)))
    if trainer.get("update", 0.0) >= 66:
        candidates.append((_mean(replicas, "staleness bound") - 50 + LEAST_PERCENT, "update"))
    prompts = idle.get("driver", {}).get("prompts", 0.0)
    candidates.append((100.0 if prompts >= 50 else _mean(replicas, "prompts"), "prompts"))
    candidates += _wasted(summary.get("tokens", {}))
    figure, cause = max(candidates)
    if figure < LEAST_PERCENT:
        return None
    if cause == "update":
        figure = _mean(replicas, "staleness bound")
    if cause == "prompts":
        figure = max(prompts, _mean(replicas, "prompts"))
    what, key, direction, remedy = _remedy(cause, config)
    now = _value(config, key)
    how = {"up": f"raise {key}", "down": f"lower {key}", "check": f"check {key}"}.get(direction, f"set {key}")
    how += f" to {direction!r}" if how.startswith("set") else ""
    now = f"{now:g}" if isinstance(now, float) else now
    how += f" (now {now})" if isinstance(now, int | str) and not isinstance(now, bool) else ""
    sentence = f"the bottleneck is {what.format(figure=f'{figure:.0f} %')}; {how}{remedy}"
    return Advice(cause=cause, sentence=sentence, figure=figure, key=key, direction=direction)


_SINGLE = {"trainer", "reward", "reference", "critic", "driver"}


def _mean(replicas: list[Mapping[str, float]], *causes: str) -> float:
    return sum(each.get(cause, 0.0) for each in replicas for cause in causes) / max(len(replicas), 1)


def _wasted(tokens: Mapping[str, Any]) -> list[tuple[float, str]]:
    dropped: dict[str, int] = {}
    for reason, count in tokens.get("dropped", {}).items():
        cause = _WASTED.get(reason)
        if cause is not None:
            dropped[cause] = dropped.get(cause, 0) + count
    total = tokens.get("trained", 0) + sum(tokens.get("dropped", {}).values())
    return [(100 * count / total, cause) for cause, count in dropped.items() if total]


def _rollout_cause(summary: Mapping[str, Any], replicas: list[Mapping[str, float]], config: Mapping[str, Any]) -> str:
    """Return why the trainer waits for groups that are being sampled."""
    if _mean(replicas, "restart", "weights") >= 15:
        return "replicas"
    if _mean(replicas, "buffer") >= 20:
        return "buffer"
    work_s = summary.get("work_s", {})
    later = max(("reward", "reference", "values"), key=lambda stage: work_s.get(stage, 0.0))
    if work_s.get(later, 0.0) > work_s.get("rollout", 0.0):
        return later
    times = summary.get("episodes", {})
    by_place = {where: times.get(f"rows_{where}_s", 0.0) for where in ("generate", "environment", "episodes")}
    rows_s = sum(by_place.values())
    if by_place["environment"] > rows_s / 2:
        return "environment"
    works = _mean(replicas, "generate", "environment", "episodes", "transfer")
    if _mean(replicas, "publication") > works:
        return "publication"
    present_s = sum(times.get(f"{where}_s", 0.0) for where in by_place)
    ended = times.get("rows", 0.0)
    if ended and rows_s < 0.4 * math.exp(times["rows_load"] / ended) * present_s:
        return "long tail"
    bound = _mean(replicas, "staleness bound", "publication")
    if config.get("max_staleness") == 0 and bound > LEAST_PERCENT:
        return "staleness bound"
    return "staleness bound" if slowdown(times) < 0.5 else "rollout"


def slowdown(times: Mapping[str, float]) -> float:
    """Return the exponent with which the time of a token grows with the number of requests of a replica.

    0: the engine has room for more requests; 1: they share its speed, which also is the answer where the number was
    always the same. It is the slope of the least squares of both logarithms over all requests.
    """
    count = times.get("requests", 0.0)
    if count < 2:
        return 1.0
    load, pace = times["load"] / count, times["pace"] / count
    spread = times["load_load"] / count - load * load
    return (times["load_pace"] / count - load * pace) / spread if spread > 1e-5 else 1.0


def _remedy(cause: str, config: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Return what the bottleneck is (with its ``figure``), the key, its direction, and what more there is to say."""
    waits = "the trainer waits for groups {figure} of the time"
    known: dict[str, tuple[str, str, str, str]] = {
        "rollout": (f"the rollout engines: {waits}, and the engines are saturated", "rollout.replicas", "up", ""),
        "staleness bound": (
            f"the staleness bound: {waits}, and the bound keeps groups from being sampled meanwhile",
            *("max_staleness", "up", ""),
        ),
        "stale tokens": (
            "the staleness bound, past which {figure} of the tokens are not trained on",
            *("max_staleness", "up", ", or set staleness.policy to 'wait'"),
        ),
        "long tail": (f"a long tail of rollouts: {waits}, most of it for few long rollouts", *_tail(config)),
        "environment": (
            f"the environment: {waits}, and most of the time of a rollout is spent in the environment",
            *_environment(config),
        ),
        "reward": ("the reward: the trainer waits for it {figure} of the time", "reward.workers", "up", ""),
        "reference": (
            "the reference policy: the trainer waits for it {figure} of the time",
            *("trainer.world_size", "up", ", whose ranks it has as many of"),
        ),
        "values": ("the critic: the trainer waits for it {figure} of the time", "critic.world_size", "up", ""),
        "update": (
            "the update: replicas wait {figure} of the time for new weights, while the trainer works all the time",
            *("trainer.world_size", "up", ", or lower rollout.replicas"),
        ),
        "publication": ("the publication of weights, which takes {figure} of the time", *_publication(config)),
        "checkpoint": ("checkpoints, which take {figure} of the trainer's time", "checkpoint.every", "up", ""),
        "hand-over": (
            "the hand-over of devices between rollouts and trainer, which takes {figure} of the time",
            *("trainer.groups_per_step", "up", ", so that there are fewer turns, or give each devices of its own"),
        ),
        "evaluation": ("the evaluation: the trainer waits for it {figure} of the time", "eval.every", "up", ""),
        "prompts": ("the making of prompts, which takes {figure} of the time", "env.options", "check", ""),
        "buffer": (f"the buffer: {waits}, and it has no room for more", "buffer.capacity_groups", "up", ""),
        "replicas": (
            "the replicas, which die and start again: it costs {figure}",
            *("rollout.options", "check", ", and the log of the run for the reason"),
        ),
        "filters": (
            "the filter of groups without signal, which drops {figure} of the tokens",
            *("trainer.group_size", "up", ", or pose tasks that are neither too easy nor too hard"),
        ),
        "environment failures": (
            "failures of the environment, which cost {figure} of the tokens",
            *("env.options", "check", ", and the failures in the report"),
        ),
    }
    return known[cause]


def _environment(config: Mapping[str, Any]) -> tuple[str, str, str]:
    if _value(config, "env.latency_s"):
        return "env.latency_s", "down", ""
    return "max_staleness", "up", ", so that more rollouts overlap, or make its steps faster"


def _tail(config: Mapping[str, Any]) -> tuple[str, str, str]:
    if config.get("max_staleness") == 0:
        return "max_staleness", "up", ""
    if _value(config, "staleness.policy") == "wait":
        return "staleness.policy", "mask", ""
    return "rollout.max_new_tokens", "down", ""


def _publication(config: Mapping[str, Any]) -> tuple[str, str, str]:
    if _value(config, "weights.transport") == "disk" and _value(config, "cluster.address") is None:
        return "weights.transport", "shared_memory", ""
    return "trainer.groups_per_step", "up", ", so that there are fewer versions"


def _value(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
