"""Why stale samples need a correction: expected gradients, by summing over every answer there is.

A policy gives answers of two tokens from a vocabulary of three; each of the nine answers has a reward. What an
objective moves the policy by in expectation is the sum over answers of the probability that the *behaviour* policy
gives them times the gradient of their loss. It should be the gradient of the expected reward of the trained policy.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from asyncrl.algorithms import M2PO, PPO, Correction, NoCorrection, PolicyObjective, TruncatedImportance

VOCABULARY, LENGTH = 3, 2
ANSWERS = list(itertools.product(range(VOCABULARY), repeat=LENGTH))
REWARDS = torch.tensor([1.0, 0.0, 0.5, -1.0, 2.0, 0.0, 0.3, -0.2, 0.9], dtype=torch.float64)
FREE = PPO(clip_ratio_low=1.0, clip_ratio_high=1e6)
UNCAPPED = TruncatedImportance(cap=1e6)


def logits(seed: int) -> torch.Tensor:
    """One row for the first token, and one for the second after each first: [4, 3]."""
    return torch.randn(1 + VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def token_log_probs(table: torch.Tensor) -> torch.Tensor:
    """[9, 2] log-probs of the tokens of every answer."""
    log_p = table.log_softmax(-1)
    return torch.stack([torch.stack([log_p[0, a], log_p[1 + a, b]]) for a, b in ANSWERS])


def gradient_of_the_reward(policy: torch.Tensor) -> torch.Tensor:
    leaf = policy.clone().requires_grad_()
    (token_log_probs(leaf).sum(1).exp() * REWARDS).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def expected_step(objective: PolicyObjective, policy: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    """Minus the expected gradient of the loss, every answer as often as ``behaviour`` gives it."""
    leaf = policy.clone().requires_grad_()
    current, sampled = token_log_probs(leaf), token_log_probs(behaviour)
    rows = torch.arange(len(ANSWERS)).repeat_interleave(LENGTH)
    columns: dict[str, Any] = {
        "proximal_log_probs": current.detach().flatten(),
        "behaviour_log_probs": sampled.flatten(),
        "advantages": REWARDS.repeat_interleave(LENGTH),
        "rows": rows,
    }
    prepared = objective.prepare(**columns, seed=0) if objective.prepares else {}
    losses = objective.token_losses(
        current_log_probs=current.flatten(),
        **columns,
        mask=torch.ones(len(rows), dtype=torch.bool),
        prepared=prepared,
    )
    shares = sampled.sum(1).exp()
    (losses.loss.view(len(ANSWERS), LENGTH).sum(1) * shares).sum().backward()
    assert leaf.grad is not None
    return -leaf.grad


@pytest.mark.parametrize("seed", range(4))
def test_fresh_samples_need_nothing(seed: int) -> None:
    policy = logits(seed)
    for correction in (NoCorrection(), UNCAPPED):
        step = expected_step(PolicyObjective(loss=FREE, correction=correction), policy, policy)
        torch.testing.assert_close(step, gradient_of_the_reward(policy))


@pytest.mark.parametrize("seed", range(4))
def test_old_samples_are_right_with_the_ratio_of_whole_answers(seed: int) -> None:
    policy, old = logits(seed), logits(100 + seed)
    objective = PolicyObjective(loss=FREE, correction=TruncatedImportance(cap=1e6, level="sequence"))
    torch.testing.assert_close(expected_step(objective, policy, old), gradient_of_the_reward(policy))


@pytest.mark.parametrize("seed", range(4))
def test_the_ratio_of_single_tokens_is_the_same_wherever_it_stands(seed: int) -> None:
    """In the correction, in the ratio to the behaviour policy, or in a loss that has it inside."""
    policy, old = logits(seed), logits(100 + seed)
    corrected = expected_step(PolicyObjective(loss=FREE, correction=UNCAPPED), policy, old)
    for objective in (
        PolicyObjective(loss=FREE, anchor="behaviour", correction=NoCorrection()),
        PolicyObjective(loss=M2PO(threshold=1e6), correction=NoCorrection()),
    ):
        torch.testing.assert_close(expected_step(objective, policy, old), corrected)


@pytest.mark.slow
def test_without_the_policy_that_sampled_the_step_goes_elsewhere() -> None:
    """Cosine with the right direction, mean over forty pairs of policies: 0.51 ignoring, 0.60 by token, 1 by answer."""

    def agreement(correction: Correction) -> float:
        found = []
        for seed in range(40):
            policy, old = logits(seed), logits(100 + seed)
            step = expected_step(PolicyObjective(loss=FREE, correction=correction), policy, old)
            right = gradient_of_the_reward(policy)
            found.append(float(torch.nn.functional.cosine_similarity(step.flatten(), right.flatten(), dim=0)))
        return sum(found) / len(found)

    assert agreement(TruncatedImportance(cap=1e6, level="sequence")) == pytest.approx(1.0)
    assert agreement(TruncatedImportance(cap=5.0)) > agreement(NoCorrection()) + 0.05
