"""Log-probs of given tokens, and the entropy of the distributions they come from, out of logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from asyncrl.errors import InvalidDataError, SchemaError

__all__ = ["log_probs_and_entropy"]


def log_probs_and_entropy(
    logits: Tensor, targets: Tensor, *, temperature: float = 1.0, chunk_tokens: int = 256
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each distribution softmax(logits / temperature).

    Nothing of size [T, V] is kept for the backward pass but the logits themselves: softmax is made again, chunk by
    chunk. Peak memory beyond logits and their gradient is a few times ``chunk_tokens * V`` float32.

        >>> logits = torch.tensor([[0.5, 0.5], [0.25, 0.75]]).log()
        >>> log_probs, entropy = log_probs_and_entropy(logits, torch.tensor([1, 0]))
        >>> log_probs, entropy
        (tensor([-0.6931, -1.3863]), tensor([0.6931, 0.5623]))

    Args:
        logits: [T, V] floating. Entries of -inf (a masked vocabulary) have probability 0.
        targets: [T] integer in 0..V-1.
        temperature: > 0; the one the tokens were sampled with, if log-probs are to be compared with the sampler's.
        chunk_tokens: rows of logits worked on at a time.

    Returns:
        ``(log_probs, entropy)``, both [T], in nats, float32 (float64 for float64 logits), differentiable once.

    Raises:
        SchemaError: shapes or dtypes are others.
        InvalidDataError: a temperature that is not positive.
    """
    if logits.ndim != 2 or not logits.dtype.is_floating_point:
        raise SchemaError(f"logits must be [T, V] floating, got {logits.dtype} of shape {tuple(logits.shape)}")
    if targets.shape != logits.shape[:1] or targets.dtype.is_floating_point or targets.dtype == torch.bool:
        raise SchemaError(
            f"targets must be [{logits.shape[0]}] integers, got {targets.dtype} of shape {tuple(targets.shape)}"
        )
    if not temperature > 0:
        raise InvalidDataError(f"temperature must be positive, got {temperature}; greedy log-probs are those of 1.0")
    if chunk_tokens < 1:
        raise InvalidDataError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    log_probs, entropy = _LogProbsAndEntropy.apply(  # type: ignore[no-untyped-call]  # torch leaves apply unannotated
        logits, targets.long(), temperature, chunk_tokens
    )
    return log_probs, entropy


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    # log_softmax takes the maximum off first; x - logsumexp(x) would lose the digits of large logits.
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(wide / temperature if temperature != 1.0 else wide, dim=-1)


class _LogProbsAndEntropy(torch.autograd.Function):
    """Both directions without keeping a softmax. With x = logits / temperature, p = softmax(x), H = -sum p log p.

    d log p_target / d x_j = [j = target] - p_j
    d H            / d x_j = -p_j (log p_j + H)
    """

    @staticmethod
    def forward(
        ctx: Any,  # torch's context object: attributes are set on it freely
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        wide = logits.dtype if logits.dtype == torch.float64 else torch.float32
        tokens = logits.shape[0]
        log_probs = torch.empty(tokens, dtype=wide, device=logits.device)
        entropy = torch.empty_like(log_probs)
        for start in range(0, tokens, chunk_tokens):
            part = slice(start, start + chunk_tokens)
            log_p = _log_softmax(logits[part], temperature)
            log_probs[part] = log_p.gather(1, targets[part, None]).squeeze(1)
            entropy[part] = -_plogp(log_p).sum(dim=-1)
        ctx.save_for_backward(logits, targets, entropy)
        ctx.temperature = temperature
        ctx.chunk_tokens = chunk_tokens
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides the parameter's name
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        log_prob_gradient, entropy_gradient = gradients
        if log_prob_gradient is None and entropy_gradient is None:
            return None, None, None, None
        logits, targets, entropy = ctx.saved_tensors
        logits_gradient = torch.empty_like(logits)
        for start in range(0, logits.shape[0], ctx.chunk_tokens):
            part = slice(start, start + ctx.chunk_tokens)
            log_p = _log_softmax(logits[part], ctx.temperature)
            p = log_p.exp()
            gradient = torch.zeros_like(p)
            if log_prob_gradient is not None:
                given = log_prob_gradient[part, None]
                gradient.addcmul_(p, given, value=-1.0).scatter_add_(1, targets[part, None], given)
            if entropy_gradient is not None:
                gradient.sub_((_plogp(log_p) + p * entropy[part, None]) * entropy_gradient[part, None])
            logits_gradient[part] = (gradient / ctx.temperature).to(logits.dtype)
        return logits_gradient, None, None, None


def _plogp(log_p: Tensor) -> Tensor:
    """The product p log p, 0 where p is 0."""
    return torch.where(log_p == -torch.inf, 0.0, log_p.exp() * log_p)
