"""Online DPO: pairs that the policy makes itself, as advantages."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from asyncrl.algorithms.preference import PreferenceObjective, preference_pairs
from asyncrl.errors import SchemaError

__all__ = ["online_dpo_advantages"]


def online_dpo_advantages(
    rewards: Tensor,
    groups: Tensor,
    divergences: Tensor,
    *,
    beta: float = 0.1,
    kind: Literal["dpo", "ipo"] = "dpo",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Minus the slope of the preference loss in each row's log-prob. Online AI feedback, arXiv:2402.04792.

    The best row of a prompt is compared with the worst, the second best with the second worst, as long as their rewards
    differ. A policy step with these advantages on every token is then one of DPO or IPO on the mean over pairs, as long
    as all tokens of a batch weigh the same (``token_mean``, ``fixed_length``); ``sequence_mean`` normalises by length.

        >>> online_dpo_advantages(torch.tensor([1.0, 0.0]), torch.tensor([7, 7]), torch.zeros(2), beta=0.5)
        tensor([ 0.5000, -0.5000])

    Args:
        rewards: [B]
        groups: [B]
        divergences: [B] log(policy / reference) of each row, its sampled tokens summed, under the policy that sampled:
            exact for samples of the weights at the start of the step, as old as they are for others.
        beta: above 0, how tightly the policy is held to the reference.
        kind: ``dpo`` or ``ipo``.
        label_smoothing: 0 to below 0.5, of ``dpo``.

    Returns:
        [B] float32; 0 for rows that are compared with none.

    Raises:
        SchemaError: shapes differ.
        InvalidDataError: a reward is not finite.
        ConfigError: an option outside its range.
    """
    if divergences.shape != rewards.shape:
        raise SchemaError(f"divergences must be {tuple(rewards.shape)} like rewards, got {tuple(divergences.shape)}")
    objective = PreferenceObjective(kind=kind, beta=beta, label_smoothing=label_smoothing)
    pairs = preference_pairs(rewards.detach(), groups)
    advantages = torch.zeros(len(rewards), dtype=torch.float64)
    if len(pairs) == 0:
        return advantages.float()
    chosen, rejected = pairs[0::2], pairs[1::2]
    ratio = divergences.detach().double()
    nothing = torch.zeros(len(chosen), dtype=torch.float64)
    slopes = objective.pair_losses(
        chosen_log_probs=ratio[chosen],
        rejected_log_probs=ratio[rejected],
        reference_chosen_log_probs=nothing,
        reference_rejected_log_probs=nothing,
    ).advantage
    advantages[chosen], advantages[rejected] = slopes, -slopes
    # The loss of a batch is a mean over its rows; DPO's is one over its pairs.
    return (advantages * len(rewards) / len(chosen)).float()
