"""The reference policy's part in a run: its log-probs as a stage, and its divergence as a penalty in the reward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, cast

from asyncrl.config import Config
from asyncrl.data import DataProtoFuture
from asyncrl.pipeline.judge import Judge
from asyncrl.pipeline.reward_penalty import RewardPenalty

__all__ = ["Score", "make_judge", "make_penalty", "make_reference"]

Score: TypeAlias = Callable[[DataProtoFuture], DataProtoFuture]
"""A stage between rollout and buffer: rows in, further columns of the same rows out."""


def make_reference(config: Config, group: Any) -> Score:
    """The stage that asks the worker group ``group``; it adds divergences where something counts them."""
    algorithm = config.algorithm
    if "divergences" in algorithm.estimator().needs:
        return lambda rows: group.reference_log_probs(rows, "k1")
    if algorithm.kl_placement == "loss":
        return cast("Score", group.reference_log_probs)
    return lambda rows: group.reference_log_probs(rows, algorithm.kl_estimator)


def make_penalty(config: Config, coefficient: float | None = None) -> RewardPenalty | None:
    """The penalty, from ``coefficient`` on (None: the configured one); None where the reward has none."""
    controller = config.algorithm.controller(coefficient)
    return RewardPenalty(controller) if controller is not None else None


def make_judge(config: Config, coefficient: float | None = None) -> Judge:
    """What rows of a run are trained with; a penalty in the reward begins at ``coefficient``."""
    return Judge(
        estimator=config.algorithm.estimator(),
        by_turns=config.reward.source == "environment",
        penalty=make_penalty(config, coefficient),
        trace=config.critic.trace,
        kl_estimator=config.algorithm.kl_estimator,
    )
