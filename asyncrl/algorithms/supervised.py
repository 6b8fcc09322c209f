"""Supervised fine-tuning: cross-entropy of given tokens."""

from __future__ import annotations

from torch import Tensor

from asyncrl.algorithms.token_losses import TokenLosses, check_tokens, keep

__all__ = ["supervised_token_losses"]


def supervised_token_losses(log_probs: Tensor, *, mask: Tensor) -> TokenLosses:
    """Cross-entropy of every token, in nats: ``-log_probs`` where ``mask``, exactly 0 elsewhere.

        >>> supervised_token_losses(torch.tensor([-0.5, -2.0]), mask=torch.tensor([False, True])).loss
        tensor([0., 2.])

    Args:
        log_probs: [T] (or any shape) log-prob of the token that is there, under the weights being trained.
        mask: same shape, boolean.

    Returns:
        Losses without metrics; their mean over the mask is the log of the perplexity.

    Raises:
        SchemaError: shapes or dtypes differ.
    """
    check_tokens(mask, log_probs=log_probs)
    return TokenLosses(loss=keep(-log_probs, mask))
