"""Cross-entropy of given tokens."""

import math

import pytest
import torch

from asyncrl.algorithms import supervised_token_losses
from asyncrl.errors import SchemaError


def test_masked_tokens_cost_nothing_and_pull_nowhere() -> None:
    log_probs = torch.tensor([math.log(0.25), math.nan, -math.inf, math.log(0.5)], requires_grad=True)
    losses = supervised_token_losses(log_probs, mask=torch.tensor([True, False, False, True]))
    losses.loss.sum().backward()
    assert losses.loss.tolist() == pytest.approx([math.log(4), 0.0, 0.0, math.log(2)])
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [-1.0, 0.0, 0.0, -1.0]
    assert losses.metrics == {}


def test_a_mask_of_another_shape_is_refused() -> None:
    with pytest.raises(SchemaError, match="log_probs has shape"):
        supervised_token_losses(torch.zeros(3), mask=torch.ones(2, dtype=torch.bool))
