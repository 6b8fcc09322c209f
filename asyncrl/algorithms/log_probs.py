"""Log-probs of given tokens and the entropy of their distributions, from logits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from asyncrl.errors import InvalidDataError, SchemaError


def log_probs_and_entropy(
    logits: Tensor, targets: Tensor, *, temperature: float = 1.0, chunk_tokens: int = 256
) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each target and the entropy of each distribution softmax(logits / temperature).

    Both are [T], in nats, float32 (float64 for float64 logits), differentiable. Nothing of size [T, V] is kept for
    the backward pass but the logits themselves: softmax is recomputed, chunk by chunk. Peak memory beyond logits and
    their gradient is a few times ``chunk_tokens * V`` float32.

        >>> logits = torch.tensor([[0.5, 0.5], [0.25, 0.75]]).log()
        >>> log_probs_and_entropy(logits, torch.tensor([1, 0]))
        (tensor([-0.6931, -1.3863]), tensor([0.6931, 0.5623]))

    Args:
        logits: [T, V] floating. Entries of -inf (a masked vocabulary) have probability 0.
        targets: [T] integer in 0..V-1.
        temperature: > 0; the one the tokens were sampled with, if log-probs are to be compared with the sampler's.
        chunk_tokens: rows of logits worked on at a time.

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
    # Only the parts of the logits, which are views, are kept for the backward pass.
    parts = [
        checkpoint(_score, part, chosen, temperature, use_reentrant=False, preserve_rng_state=False)
        for part, chosen in zip(logits.split(chunk_tokens), targets.long().split(chunk_tokens), strict=True)
    ]
    log_probs, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
    return log_probs, entropy


def _score(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    # log_softmax takes the maximum off first; x - logsumexp(x) would lose the digits of large logits.
    wide = logits if logits.dtype == torch.float64 else logits.float()
    log_p = torch.log_softmax(wide / temperature if temperature != 1.0 else wide, dim=-1)
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(dim=-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), entropy
