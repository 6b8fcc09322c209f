"""The reference policy's part in a run: its log-probs as a stage, and its divergence as a penalty in the reward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, cast

from asyncrl.config import Config
from asyncrl.data import DataProtoFuture
from asyncrl.pipeline.reward_penalty import RewardPenalty

__all__ = ["Score", "make_penalty", "make_reference"]

Score: TypeAlias = Callable[[DataProtoFuture], DataProtoFuture]
"""A stage between rollout and buffer: rows in, further columns of the same rows out."""


def make_reference(config: Config, group: Any) -> Score:
    """The stage that asks the worker group ``group``; its headers tell divergences where the reward counts them."""
    algorithm = config.algorithm
    if algorithm.kl_placement == "loss":
        return cast("Score", group.reference_log_probs)
    return lambda rows: group.reference_log_probs(rows, algorithm.kl_estimator)


def make_penalty(config: Config, coefficient: float | None = None) -> RewardPenalty | None:
    """The penalty, from ``coefficient`` on (None: the configured one); None where the reward has none."""
    controller = config.algorithm.controller(coefficient)
    return RewardPenalty(controller) if controller is not None else None
