"""Which combinations are known to go wrong, and why: asked when the configuration is read.

A policy gradient on samples of another policy needs their importance ratio somewhere: in the loss itself, in a
correction, or in the ratio to an anchor that is the behaviour policy. Left out, or with the trust region around weights
that are long gone, training goes on without a word and is worse in the end (AReaL, arXiv:2505.24298, reports 23.3
against 42.2 points at staleness 4).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from asyncrl.algorithms.advantages.estimator import TOKEN_COLUMNS, TURN_COLUMNS, AdvantageEstimator
from asyncrl.algorithms.policy import PolicyObjective

__all__ = ["COLUMNS", "Objection", "Setting", "objections"]

_OF_ROWS = ("rewards", "groups", "lengths", "greedy_rewards", "divergences")

COLUMNS = {
    "row": frozenset(_OF_ROWS),
    "turn": frozenset(_OF_ROWS) | TURN_COLUMNS,
    "token": frozenset({"rewards", "lengths"}) | TOKEN_COLUMNS,
}
"""What there is for an advantage, by what it is given to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the maths of an update is used on.

    Attributes:
        max_staleness: most versions a trained token may be behind.
        optimizer_steps: optimizer steps on one batch.
        group_size: rows of one prompt.
    """

    max_staleness: int
    optimizer_steps: int
    group_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Objection:
    """One thing that does not go together.

    Attributes:
        key: dotted path of the key to change.
        reason: what goes wrong.
        remedy: what to use instead.
        unsound: True if it could be run all the same, for whoever wants to see it; False if it cannot be run at all.
    """

    key: str
    reason: str
    remedy: str
    unsound: bool = True


def objections(objective: PolicyObjective, estimator: AdvantageEstimator, setting: Setting) -> Iterator[Objection]:
    """Everything that is wrong with using these on that. Pure."""
    yield from _unusable(estimator, setting)
    loss, correction = objective.loss, objective.correction
    behaviour_is_used = loss.corrects or correction.corrects or objective.anchor == "behaviour"
    if setting.max_staleness > 0 and not behaviour_is_used:
        yield Objection(
            key="algorithm.correction",
            reason=f"tokens may be {setting.max_staleness} versions old (max_staleness), and neither loss nor "
            "correction knows the policy that sampled them: the gradient is that of other samples, and training "
            "collapses without a word",
            remedy='use correction = "tis" or another, a loss that corrects itself (topr, m2po), or max_staleness = 0',
        )
    if setting.max_staleness > 1 and objective.anchor == "behaviour" and not loss.corrects:
        yield Objection(
            key="algorithm.anchor",
            reason=f"the trust region lies around weights up to {setting.max_staleness} versions old: what has been "
            "learned since is clipped away or undone (plain PPO on stale data)",
            remedy='use anchor = "proximal" with correction = "tis", anchor = "interpolated", or max_staleness = 1',
        )
    if correction.corrects and loss.corrects:
        yield Objection(
            key="algorithm.correction",
            reason="the loss weighs by the policy that sampled already: a correction would count it twice",
            remedy='use correction = "none"',
        )
    if correction.corrects and objective.anchor == "behaviour" and not loss.corrects:
        yield Objection(
            key="algorithm.correction",
            reason="with the behaviour policy as anchor the ratio holds all there is to correct: every weight is 1",
            remedy='use correction = "none", or anchor = "proximal"',
        )
    if loss.moves and setting.optimizer_steps == 1:
        yield Objection(
            key="algorithm.loss",
            reason="what it adds is 0 until the weights have moved, and there is one optimizer step on a batch",
            remedy="use trainer.minibatches or trainer.epochs above 1, or another loss",
        )
    if "divergences" in estimator.needs and objective.aggregation == "sequence_mean":
        yield Objection(
            key="algorithm.aggregation",
            reason="preferences are about whole answers: divided by their lengths, long ones would hardly count",
            remedy="use token_mean or fixed_length",
        )
    if objective.kl_coefficient and objective.kl_estimator == "k1":
        yield Objection(
            key="algorithm.kl_estimator",
            reason="k1's gradient is 0 on average: as a loss it is noise without any pull to the reference",
            remedy="use k2 or k3",
        )


def _unusable(estimator: AdvantageEstimator, setting: Setting) -> Iterator[Objection]:
    level = estimator.level
    missing = [name for name in estimator.needs if name not in COLUMNS[level]]
    if missing:
        alone = "; an advantage of tokens sees rows without their groups" if level == "token" else ""
        yield Objection(
            key="algorithm.advantage",
            reason=f"it needs {', '.join(missing)}, which no stage makes for an advantage of {level}s{alone}",
            remedy=f"use one that needs only {', '.join(sorted(COLUMNS[level]))}",
            unsound=False,
        )
    elif "groups" in estimator.needs and setting.group_size < 2:
        yield Objection(
            key="trainer.group_size",
            reason="a group of one has no baseline: every advantage would be 0",
            remedy="use at least 2, or an advantage without groups (reinforce_plus_plus)",
            unsound=False,
        )
    k = estimator.option("k")
    if isinstance(k, int) and k > setting.group_size:
        yield Objection(
            key="algorithm.advantage_options.k",
            reason=f"{k} answers cannot be chosen from trainer.group_size = {setting.group_size}",
            remedy=f"use at most {setting.group_size}, or a larger trainer.group_size",
            unsound=False,
        )
