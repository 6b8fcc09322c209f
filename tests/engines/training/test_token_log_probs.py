from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engines.training.token_log_probs import Extras, token_log_probs


def _scored(extras: Extras, *, max_logits_bytes: int, calls: list[int] | None = None) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(7, 4, generator=draw).requires_grad_()
    weight = torch.randn(11, 4, generator=draw).requires_grad_()
    targets = torch.randint(0, 11, (7,), generator=draw)

    def logits_of(part: Tensor) -> Tensor:
        if calls is not None:
            calls.append(len(part))
        return part @ weight.T

    scores = token_log_probs(
        hidden,
        targets,
        logits_of=logits_of,
        vocabulary=11,
        extras=extras,
        temperature=0.5,
        max_logits_bytes=max_logits_bytes,
    )
    (scores.log_probs * torch.arange(7)).sum().backward(retain_graph=extras == "entropy_gradient")
    if extras == "entropy_gradient":
        scores.entropy.square().sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [*scores, hidden.grad, weight.grad]


@pytest.mark.parametrize("extras", ["none", "entropy", "entropy_gradient", "correct"])
def test_chunks_change_nothing(extras: Extras) -> None:
    whole = _scored(extras, max_logits_bytes=2**20)
    for found, expected in zip(_scored(extras, max_logits_bytes=3 * 11 * 4), whole, strict=True):
        assert torch.allclose(found, expected, atol=1e-6)


def test_logits_are_made_in_chunks_and_again_for_the_backward_pass() -> None:
    calls: list[int] = []
    _scored("none", max_logits_bytes=3 * 11 * 4, calls=calls)
    assert calls == [3, 3, 1, 1, 3, 3]
    calls.clear()
    _scored("none", max_logits_bytes=7 * 11 * 4, calls=calls)
    assert calls == [7]


def test_by_hand() -> None:
    # Logits (0, log 3) at temperature 1: probabilities 1/4 and 3/4.
    logits = torch.tensor([[0.0, torch.log(torch.tensor(3.0)).item()]])
    scores = token_log_probs(logits, torch.tensor([1]), logits_of=lambda part: part, vocabulary=2, extras="entropy")
    assert scores.log_probs.exp().tolist() == pytest.approx([0.75])
    quarter, rest = torch.tensor(0.25), torch.tensor(0.75)
    assert scores.entropy.tolist() == pytest.approx([-(quarter * quarter.log() + rest * rest.log()).item()])
    for target, hit in ((0, 0.0), (1, 1.0)):
        hits = token_log_probs(
            logits, torch.tensor([target]), logits_of=lambda part: part, vocabulary=2, extras="correct"
        )
        assert hits.correct.tolist() == [hit]
        assert len(hits.entropy) == 0


def test_entropy_carries_a_gradient_only_if_asked() -> None:
    logits = torch.randn(3, 5).requires_grad_()
    for extras, expected in (("entropy", False), ("entropy_gradient", True)):
        scores = token_log_probs(
            logits, torch.tensor([0, 1, 2]), logits_of=lambda part: part * 1.0, vocabulary=5, extras=extras
        )
        assert scores.entropy.requires_grad is expected
