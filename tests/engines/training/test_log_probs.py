"""Scores in chunks are those of all logits at once, and so are their gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engines.training.log_probs import Extras, Head, token_log_probs

EXTRAS = pytest.mark.parametrize("extras", ["none", "entropy", "entropy_gradient", "correct"])
CHUNK = 3 * 11 * 4
"""Bytes of the logits of three tokens."""


def _scored(
    extras: Extras,
    *,
    matrix: bool = True,
    chunk_bytes: int = 2**20,
    kept_bytes: int = 2**20,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
    softcap: float | None = None,
    calls: list[int] | None = None,
) -> list[Tensor]:
    """Scores of 7 tokens, then the gradients of hidden states, weight and bias."""
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(7, 4, generator=draw).to(dtype).requires_grad_()
    weight = torch.randn(11, 4, generator=draw).to(dtype).requires_grad_()
    bias = torch.randn(11, generator=draw).to(dtype).requires_grad_()
    targets = torch.randint(0, 11, (7,), generator=draw)

    def logits_of(part: Tensor) -> Tensor:
        if calls is not None:
            calls.append(len(part))
        logits = (part @ weight.T + bias) * scale
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap

    scores = token_log_probs(
        hidden,
        targets,
        head=Head(weight, bias, scale, softcap) if matrix else logits_of,
        vocabulary=11,
        extras=extras,
        temperature=0.5,
        chunk_bytes=chunk_bytes,
        kept_bytes=kept_bytes,
    )
    (scores.log_probs * torch.arange(7)).sum().backward(retain_graph=extras == "entropy_gradient")
    if extras == "entropy_gradient":
        scores.entropy.square().sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert bias.grad is not None
    return [*scores, hidden.grad, weight.grad, bias.grad]


@EXTRAS
@pytest.mark.parametrize("kept_bytes", [0, 2 * CHUNK, 2**20])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.3, None), (2.0, 1.5)])
def test_a_matrix_in_chunks_gives_what_autograd_gives(
    extras: Extras, kept_bytes: int, scale: float, softcap: float | None
) -> None:
    plain = _scored(extras, matrix=False, dtype=torch.float64, scale=scale, softcap=softcap)
    found = _scored(extras, chunk_bytes=CHUNK, kept_bytes=kept_bytes, dtype=torch.float64, scale=scale, softcap=softcap)
    for mine, expected in zip(found, plain, strict=True):
        assert torch.allclose(mine, expected, rtol=1e-10, atol=1e-12)


@EXTRAS
@pytest.mark.parametrize("matrix", [True, False])
def test_chunks_change_nothing(extras: Extras, matrix: bool) -> None:
    whole = _scored(extras, matrix=matrix)
    for found, expected in zip(_scored(extras, matrix=matrix, chunk_bytes=CHUNK), whole, strict=True):
        assert torch.allclose(found, expected, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(2, 40), st.integers(1, 4), st.integers(0, 400), st.integers(0, 2**16))
def test_finite_differences(tokens: int, vocabulary: int, width: int, kept_bytes: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=draw, dtype=torch.float64).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=draw, dtype=torch.float64).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=draw)
    by_log_prob, by_entropy = torch.randn(2, tokens, generator=draw, dtype=torch.float64)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        scores = token_log_probs(
            hidden,
            targets,
            head=Head(weight),
            vocabulary=vocabulary,
            extras="entropy_gradient",
            chunk_bytes=8 * vocabulary,
            kept_bytes=kept_bytes,
        )
        return (scores.log_probs * by_log_prob + scores.entropy * by_entropy).sum()

    assert torch.autograd.gradcheck(loss, (hidden, weight))


def test_a_frozen_matrix_and_frozen_hidden_states_get_no_gradient() -> None:
    weight, hidden, targets = torch.randn(11, 4), torch.randn(7, 4), torch.zeros(7, dtype=torch.int64)
    trained = hidden.clone().requires_grad_()
    token_log_probs(trained, targets, head=Head(weight), vocabulary=11).log_probs.sum().backward()
    assert trained.grad is not None
    head = weight.clone().requires_grad_()
    token_log_probs(hidden, targets, head=Head(head), vocabulary=11).log_probs.sum().backward()
    assert head.grad is not None
    assert not token_log_probs(hidden, targets, head=Head(weight), vocabulary=11).log_probs.requires_grad


def test_half_precision_keeps_scores_and_sums_in_float32() -> None:
    whole = _scored("entropy", dtype=torch.float32)
    half = _scored("entropy", dtype=torch.bfloat16, chunk_bytes=CHUNK)
    assert [each.dtype for each in half] == [torch.float32] * 3 + [torch.bfloat16] * 3
    assert torch.allclose(half[0], whole[0], atol=0.2)
    assert torch.allclose(half[4].float(), whole[4], rtol=0.05, atol=0.5)


def test_logits_of_any_other_head_are_made_in_chunks_and_again_for_the_backward_pass() -> None:
    calls: list[int] = []
    _scored("none", matrix=False, chunk_bytes=CHUNK, calls=calls)
    assert calls == [3, 3, 1, 1, 3, 3]
    calls.clear()
    _scored("none", matrix=False, chunk_bytes=7 * 11 * 4, calls=calls)
    assert calls == [7]


def test_no_tensor_of_all_logits_is_ever_made() -> None:
    """The largest float tensor torch makes, forward and backward, is a chunk of logits or the gradient of the head."""
    largest: list[int] = []
    with _Watching(largest):
        _scored("entropy_gradient", chunk_bytes=11 * 4, kept_bytes=0)
    assert max(largest) == 11 * 4  # the weight


class _Watching(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self._sizes = sizes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        self._sizes.append(result.numel() if isinstance(result, Tensor) else 0)
        return result


HEADS: list[Head | Callable[[Tensor], Tensor]] = [Head(torch.eye(2)), lambda part: part]


@pytest.mark.parametrize("head", HEADS)
def test_by_hand(head: Head | Callable[[Tensor], Tensor]) -> None:
    # Logits (0, log 3) at temperature 1: probabilities 1/4 and 3/4.
    logits = torch.tensor([[0.0, torch.log(torch.tensor(3.0)).item()]])
    scores = token_log_probs(logits, torch.tensor([1]), head=head, vocabulary=2, extras="entropy")
    assert scores.log_probs.exp().tolist() == pytest.approx([0.75])
    quarter, rest = torch.tensor(0.25), torch.tensor(0.75)
    assert scores.entropy.tolist() == pytest.approx([-(quarter * quarter.log() + rest * rest.log()).item()])
    for target, hit in ((0, 0.0), (1, 1.0)):
        hits = token_log_probs(logits, torch.tensor([target]), head=head, vocabulary=2, extras="correct")
        assert hits.correct.tolist() == [hit]
        assert len(hits.entropy) == 0


@pytest.mark.parametrize("matrix", [True, False])
def test_entropy_carries_a_gradient_only_if_asked(matrix: bool) -> None:
    hidden = torch.randn(3, 5).requires_grad_()
    for extras, expected in (("entropy", False), ("entropy_gradient", True)):
        head = Head(torch.eye(5)) if matrix else lambda part: part * 1.0
        scores = token_log_probs(hidden, torch.tensor([0, 1, 2]), head=head, vocabulary=5, extras=extras)
        assert scores.entropy.requires_grad is expected
