"""Log-probs and entropy out of logits, against sums over the vocabulary in plain Python."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms import log_probs_and_entropy
from asyncrl.errors import InvalidDataError, SchemaError


def plain(logits: list[float], target: int, temperature: float) -> tuple[float, float]:
    top = max(logits)
    weights = [math.exp((x - top) / temperature) for x in logits]
    total = math.fsum(weights)
    p = [w / total for w in weights]
    return math.log(p[target]), -math.fsum(x * math.log(x) for x in p if x > 0)


def random_case(tokens: int, vocabulary: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens * 1000 + vocabulary)
    logits = 3 * torch.randn(tokens, vocabulary, generator=generator, dtype=torch.float64)
    return logits.to(dtype), torch.randint(vocabulary, (tokens,), generator=generator)


@given(st.integers(1, 9), st.integers(1, 7), st.sampled_from([0.3, 1.0, 1.7]), st.integers(1, 12))
@settings(max_examples=50, deadline=None)
def test_equals_plain_python_for_every_chunk_size(
    tokens: int, vocabulary: int, temperature: float, chunk_tokens: int
) -> None:
    logits, targets = random_case(tokens, vocabulary)
    log_probs, entropy = log_probs_and_entropy(logits, targets, temperature=temperature, chunk_tokens=chunk_tokens)
    for t in range(tokens):
        log_prob, expected_entropy = plain(logits[t].tolist(), int(targets[t]), temperature)
        assert float(log_probs[t]) == pytest.approx(log_prob, rel=1e-10, abs=1e-12)
        assert float(entropy[t]) == pytest.approx(expected_entropy, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("chunk_tokens", [1, 2, 100])
def test_gradients_by_finite_differences(temperature: float, chunk_tokens: int) -> None:
    logits, targets = random_case(5, 6)
    for column in (0, 1):
        assert torch.autograd.gradcheck(
            lambda x, column=column: log_probs_and_entropy(
                x, targets, temperature=temperature, chunk_tokens=chunk_tokens
            )[column],
            (logits.requires_grad_(),),
        )


def test_gradient_of_both_together_equals_autograd_through_log_softmax() -> None:
    logits, targets = random_case(11, 17, torch.float32)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    log_probs, entropy = log_probs_and_entropy(ours, targets, temperature=0.8, chunk_tokens=4)
    (log_probs.sum() - 0.3 * (entropy**2).sum()).backward()
    full = (theirs / 0.8).log_softmax(-1)
    full_entropy = -(full.exp() * full).sum(-1)
    (full.gather(1, targets[:, None]).sum() - 0.3 * (full_entropy**2).sum()).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def test_chunks_change_no_bit() -> None:
    logits, targets = random_case(10, 33, torch.float32)
    whole = log_probs_and_entropy(logits, targets, chunk_tokens=100)
    parts = log_probs_and_entropy(logits, targets, chunk_tokens=3)
    assert whole[0].equal(parts[0])
    assert whole[1].equal(parts[1])


def test_sums_of_bfloat16_logits_are_made_in_float32() -> None:
    logits = torch.zeros(1, 4096, dtype=torch.bfloat16, requires_grad=True)
    log_probs, entropy = log_probs_and_entropy(logits, torch.tensor([5]))
    assert log_probs.dtype == torch.float32
    assert log_probs.item() == pytest.approx(-math.log(4096), rel=1e-6)  # bfloat16 sums stop growing at 256
    assert entropy.item() == pytest.approx(math.log(4096), rel=1e-6)
    log_probs.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16
    assert float(logits.grad[0, 5]) == pytest.approx(1.0)


def test_a_masked_vocabulary_has_probability_zero_and_a_clean_gradient() -> None:
    logits = torch.tensor([[0.0, -math.inf, 0.0]], requires_grad=True)
    log_probs, entropy = log_probs_and_entropy(logits, torch.tensor([2]))
    assert log_probs.item() == pytest.approx(-math.log(2))
    assert entropy.item() == pytest.approx(math.log(2))
    (log_probs.sum() + entropy.sum()).backward()
    assert logits.grad is not None
    assert logits.grad[0].tolist() == pytest.approx([-0.5, 0.0, 0.5])


def test_huge_logits_stay_finite() -> None:
    log_probs, entropy = log_probs_and_entropy(torch.tensor([[1e4, 1e4, -1e4]]), torch.tensor([0]))
    assert log_probs.item() == pytest.approx(-math.log(2))
    assert entropy.item() == pytest.approx(math.log(2))


def test_no_tokens_have_no_log_probs() -> None:
    logits = torch.empty(0, 5, requires_grad=True)
    log_probs, entropy = log_probs_and_entropy(logits, torch.empty(0, dtype=torch.int64))
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.tolist() == entropy.tolist() == []


def test_arguments_that_do_not_fit_are_refused() -> None:
    logits = torch.zeros(3, 5)
    with pytest.raises(SchemaError, match="logits must be"):
        log_probs_and_entropy(torch.zeros(3), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(SchemaError, match=r"targets must be \[3\] integers"):
        log_probs_and_entropy(logits, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(SchemaError, match="targets must be"):
        log_probs_and_entropy(logits, torch.zeros(3))
    with pytest.raises(InvalidDataError, match="temperature must be positive, got 0"):
        log_probs_and_entropy(logits, torch.zeros(3, dtype=torch.int64), temperature=0)
