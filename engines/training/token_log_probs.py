"""Log-probs and entropies straight from hidden states, without ever holding the logits of all tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from asyncrl.algorithms import log_probs_and_entropy

__all__ = ["Extras", "TokenScores", "token_log_probs"]

Extras: TypeAlias = Literal["none", "entropy", "entropy_gradient", "correct"]
"""What is computed beside the log-prob: nothing, entropy as a number, entropy to be differentiated, greedy hits."""


class TokenScores(NamedTuple):
    """Scores of N tokens; float32. A named tuple, because FSDP looks for tensors in what a module returns.

    Attributes:
        log_probs: [N] of the given tokens.
        entropy: [N] of the distributions they come from, in nats; empty unless asked for.
        correct: [N] 1 where the token is the most likely one, else 0; empty unless asked for.
    """

    log_probs: Tensor
    entropy: Tensor
    correct: Tensor


def token_log_probs(
    hidden: Tensor,
    targets: Tensor,
    *,
    logits_of: Callable[[Tensor], Tensor],
    vocabulary: int,
    extras: Extras = "none",
    temperature: float = 1.0,
    max_logits_bytes: int = 256 * 2**20,
) -> TokenScores:
    """Score ``targets`` under softmax(logits_of(hidden) / temperature).

    Tokens are worked on in chunks whose float32 logits fill at most ``max_logits_bytes``. If there is more than one
    chunk, none keeps its logits: the backward pass makes them again, one chunk at a time.

    Args:
        hidden: [N, H] last hidden states, each at the position *before* its target.
        targets: [N] int64.
        logits_of: the output head, [n, H] -> [n, V].
        vocabulary: V.
        extras: what to compute beside the log-probs.
        temperature: positive; the one the tokens were sampled with.
        max_logits_bytes: peak memory of the logits of a chunk; several times this is used for moments.
    """

    def score(part: Tensor, wanted: Tensor) -> TokenScores:
        logits = logits_of(part)
        log_probs, entropy = log_probs_and_entropy(logits, wanted, temperature=temperature)
        nothing = log_probs.new_zeros(0)
        correct = nothing
        if extras == "correct":
            correct = (logits.argmax(dim=-1) == wanted).to(log_probs.dtype)
        if extras == "entropy":
            entropy = entropy.detach()
        return TokenScores(log_probs, entropy if extras in ("entropy", "entropy_gradient") else nothing, correct)

    chunk = max(1, max_logits_bytes // (4 * vocabulary))
    if len(targets) <= chunk:
        return score(hidden, targets)
    parts: list[TokenScores] = []
    for part, wanted in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        if torch.is_grad_enabled():
            parts.append(TokenScores(*checkpoint(score, part, wanted, use_reentrant=False, preserve_rng_state=False)))
        else:
            parts.append(score(part, wanted))
    return TokenScores(*(torch.cat(column) for column in zip(*parts, strict=True)))
