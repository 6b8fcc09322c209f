"""Combinations of an algorithm that cannot run or are known to go wrong, checked when the configuration is read.

A policy gradient on samples of another policy needs their importance ratio somewhere: in the loss itself, in a
correction, or in the ratio to an anchor that is the behaviour policy. Without it, or with the trust region around old
weights, training goes on without an error and ends worse (AReaL, arXiv:2505.24298, reports 23.3 against 42.2 points at
staleness 4).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from asyncrl.algorithms.advantages import (
    TOKEN_COLUMNS,
    TURN_COLUMNS,
    AdvantageEstimator,
    pass_at_k_advantages,
    reinforce_plus_plus_baseline_advantages,
)
from asyncrl.algorithms.credit import Credit
from asyncrl.algorithms.objective import PolicyObjective

_ROW_COLUMNS = frozenset({"rewards", "groups", "lengths", "greedy_rewards", "divergences"})
_COLUMNS = {
    "row": _ROW_COLUMNS,
    "turn": _ROW_COLUMNS | TURN_COLUMNS,
    "token": frozenset({"rewards", "lengths"}) | TOKEN_COLUMNS,
}
"""Columns that a training step computes, by what the advantage is given to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What an algorithm is used on; ``optimizer_steps`` are those on one batch, ``max_uses`` those of one group.

    ``drops_equal_rewards`` is whether the buffer drops groups in which all that is compared has the same reward.
    """

    max_staleness: int
    optimizer_steps: int
    group_size: int
    max_uses: int = 1
    kl_in_reward: bool = False
    credit: Credit = "outcome"
    drops_equal_rewards: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigIssue:
    """One combination that is refused, at the dotted path ``key``.

    It is ``overridable`` if ``algorithm.allow_unsound`` lets it run all the same, and not if it cannot run.
    """

    key: str
    reason: str
    remedy: str
    overridable: bool = True


def config_issues(objective: PolicyObjective, estimator: AdvantageEstimator, setting: Setting) -> Iterator[ConfigIssue]:
    """Yield every issue of this algorithm in this setting."""
    yield from _impossible(estimator, setting)
    loss, correction = objective.loss, objective.correction
    behaviour_is_used = loss.corrects or correction.corrects or objective.anchor == "behaviour"
    if setting.max_staleness > 0 and not behaviour_is_used:
        yield ConfigIssue(
            key="algorithm.correction",
            reason=f"tokens may be {setting.max_staleness} versions old (max_staleness), and neither loss nor "
            "correction uses the policy that sampled them: the gradient is that of other samples, and training "
            "collapses without an error",
            remedy='use correction = "tis" or another, a loss that corrects itself (topr, m2po), or max_staleness = 0',
        )
    if setting.max_staleness > 1 and objective.anchor == "behaviour" and not loss.corrects:
        yield ConfigIssue(
            key="algorithm.anchor",
            reason=f"the trust region lies around weights up to {setting.max_staleness} versions old: what was "
            "learned since is clipped away or undone (plain PPO on stale data)",
            remedy='use anchor = "proximal" with correction = "tis", anchor = "interpolated", or max_staleness = 1',
        )
    if correction.corrects and loss.corrects:
        yield ConfigIssue(
            key="algorithm.correction",
            reason="the loss already weighs tokens by the policy that sampled them: a correction would count it twice",
            remedy='use correction = "none"',
        )
    if correction.corrects and objective.anchor == "behaviour" and not loss.corrects:
        yield ConfigIssue(
            key="algorithm.correction",
            reason="with the behaviour policy as anchor the ratio of the loss corrects everything: every weight is 1",
            remedy='use correction = "none", or anchor = "proximal"',
        )
    if loss.needs_several_steps and setting.optimizer_steps == 1:
        yield ConfigIssue(
            key="algorithm.loss",
            reason="its penalty is 0 until the weights have moved, and a batch gets one optimizer step",
            remedy="use trainer.num_mini_batches or trainer.epochs above 1, or another loss",
        )
    if "divergences" in estimator.needs and objective.loss_agg_mode == "sequence_mean":
        yield ConfigIssue(
            key="algorithm.loss_agg_mode",
            reason="preferences are about whole answers: divided by their lengths, long ones would hardly count",
            remedy="use token_mean or fixed_length",
        )
    if "turn_rewards" in estimator.needs and setting.kl_in_reward:
        yield ConfigIssue(
            key="algorithm.kl_placement",
            reason="the penalty is subtracted from the rewards of whole rows, not from those of single turns: half of "
            "the advantage would not contain it",
            remedy='use kl_placement = "loss"',
        )
    from_groups = {"groups"} <= {*estimator.needs} <= {"rewards", "groups", "lengths", "divergences"}
    whitened = objective.whiten_advantages or estimator.function is reinforce_plus_plus_baseline_advantages
    if setting.drops_equal_rewards and (setting.kl_in_reward or whitened or not from_groups):
        yield ConfigIssue(
            key="buffer.options.zero_variance",
            reason="groups with equal rewards are dropped, and their advantages are not 0: they are made of more than "
            "the rewards of a group",
            remedy='use zero_variance = "keep"; or no penalty in the reward, no whitening, and an advantage of rows '
            "from their groups (grpo, dr_grpo, rloo)",
        )
    if objective.kl_coef and objective.kl_estimator == "k1":
        yield ConfigIssue(
            key="algorithm.kl_estimator",
            reason="the gradient of k1 is 0 on average: as a loss it is noise and does not pull to the reference",
            remedy="use k2 or k3",
        )
    if setting.kl_in_reward and objective.kl_estimator != "k1":
        yield ConfigIssue(
            key="algorithm.kl_estimator",
            reason="in a reward only k1 has the gradient of the divergence: the others hardly pull to the reference, "
            "and may push away from it",
            remedy='use k1, which is the default there, or kl_placement = "loss"',
        )


def _impossible(estimator: AdvantageEstimator, setting: Setting) -> Iterator[ConfigIssue]:
    level, available = estimator.level, _COLUMNS[estimator.level]
    missing = [name for name in estimator.needs if name not in available]
    if missing:
        alone = "; an advantage of tokens sees rows without their groups" if level == "token" else ""
        yield ConfigIssue(
            key="algorithm.advantage",
            reason=f"it needs {', '.join(missing)}, which no stage computes for an advantage of {level}s{alone}",
            remedy=f"use one that needs only {', '.join(sorted(available))}",
            overridable=False,
        )
    elif "groups" in estimator.needs and setting.group_size < 2:
        yield ConfigIssue(
            key="trainer.group_size",
            reason="a group of one has no baseline: every advantage would be 0",
            remedy="use at least 2, or an advantage without groups (reinforce_plus_plus)",
            overridable=False,
        )
    if setting.credit != "outcome" and not (level == "row" and {*estimator.needs} <= {"rewards", "groups"}):
        yield ConfigIssue(
            key="algorithm.credit",
            reason="an advantage of turns or tokens gives credit by itself, and others compare what only rows have",
            remedy='use credit = "outcome", or an advantage of rows from rewards and groups (grpo, dr_grpo, rloo)',
            overridable=False,
        )
    k = estimator.option("k")
    if isinstance(k, int) and k > setting.group_size:
        yield ConfigIssue(
            key="algorithm.advantage_options.k",
            reason=f"{k} answers cannot be chosen from trainer.group_size = {setting.group_size}",
            remedy=f"use at most {setting.group_size}, or a larger trainer.group_size",
            overridable=False,
        )
    if setting.max_uses != 1:
        once = "are computed once for a group, and buffer.options.max_uses uses groups more often"
        if setting.kl_in_reward:
            yield ConfigIssue(
                key="algorithm.kl_placement",
                reason=f"divergences {once}",
                remedy='use kl_placement = "loss", or max_uses = 1',
                overridable=False,
            )
        for column in ("greedy_rewards", "divergences"):
            if column in estimator.needs:
                yield ConfigIssue(
                    key="algorithm.advantage",
                    reason=f"{column.replace('_', ' ')} {once}",
                    remedy="use another advantage, or max_uses = 1",
                    overridable=False,
                )
    if "divergences" in estimator.needs and setting.kl_in_reward:
        yield ConfigIssue(
            key="algorithm.kl_placement",
            reason="this advantage already holds the policy to the reference: a penalty in the reward would change "
            "which answer of a pair is preferred",
            remedy='use kl_placement = "loss", or kl_coef = 0',
            overridable=False,
        )
    if estimator.function is pass_at_k_advantages and setting.kl_in_reward:
        yield ConfigIssue(
            key="algorithm.kl_placement",
            reason="an answer succeeds from advantage_options.success_reward on: with a penalty in the reward right "
            "answers would fail as soon as the policy has moved, and otherwise the penalty would not count",
            remedy='use kl_placement = "loss", or kl_coef = 0',
            overridable=False,
        )
