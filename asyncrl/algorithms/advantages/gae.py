"""Generalised advantage estimation: advantages of tokens, from a critic's values."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.errors import SchemaError

__all__ = ["gae", "gae_advantages"]


def gae(
    token_rewards: Tensor,
    values: Tensor,
    lengths: Tensor,
    *,
    discount: float = 1.0,
    trace: float = 0.95,
    last_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantage and return of every sampled token. Schulman et al., arXiv:1506.02438, eq. 16.

        delta_t = reward_t + discount * value_{t+1} - value_t
        advantage_t = delta_t + discount * trace * advantage_{t+1}
        return_t = advantage_t + value_t

    Only sampled tokens are steps: what an environment says between two turns is no action and is left out before.

        >>> advantages, returns = gae(
        ...     torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.75]), torch.tensor([2]), discount=1.0, trace=0.5
        ... )
        >>> advantages, returns  # 0.25 at the last token, 0.25 + 0.5 * 0.25 before it
        (tensor([0.3750, 0.2500]), tensor([0.8750, 1.0000]))

    Args:
        token_rewards: [T] floating, row after row without padding; an outcome's reward stands at a row's last token.
        values: [T] floating, the critic's value *before* each token is sampled.
        lengths: [B] integer, sampled tokens of each row; they sum to T.
        discount: 0..1, gamma.
        trace: 0..1, lambda: 1 is the plain return, 0 the one-step error.
        last_values: [B] value after a row's last token: 0 (None) for a finished row, the critic's for one cut off.

    Returns:
        ``(advantages, returns)``, both [T] float32, without gradient.

    Raises:
        SchemaError: shapes do not fit together.
    """
    batch, tokens = len(lengths), int(lengths.sum())
    if token_rewards.shape != (tokens,) or values.shape != (tokens,):
        raise SchemaError(
            f"token_rewards and values must be [{tokens}], one per sampled token, "
            f"got {tuple(token_rewards.shape)} and {tuple(values.shape)}"
        )
    if last_values is not None and last_values.shape != (batch,):
        raise SchemaError(f"last_values must be [{batch}], one per row, got {tuple(last_values.shape)}")
    counts = lengths.to(token_rewards.device)
    row_of = torch.repeat_interleave(torch.arange(batch, device=counts.device), counts)
    # Steps until the row's end: 0 for its last token. Rows lie in a rectangle with their ends together.
    to_end = (torch.cumsum(counts, 0)[row_of] - 1) - torch.arange(tokens, device=counts.device)
    width = int(counts.max()) if batch else 0
    reward = token_rewards.detach().double().new_zeros(width, batch)
    value = torch.zeros_like(reward)
    reward[to_end, row_of] = token_rewards.detach().double()
    value[to_end, row_of] = values.detach().double()
    after = torch.zeros(batch, dtype=torch.float64, device=counts.device)
    following = after if last_values is None else last_values.detach().double()
    advantages = torch.zeros_like(reward)
    for step in range(width):
        delta = reward[step] + discount * following - value[step]
        after = delta + discount * trace * after
        advantages[step] = after
        following = value[step]
    chosen = advantages[to_end, row_of]
    return chosen.float(), (chosen + values.detach().double()).float()


def gae_advantages(
    token_rewards: Tensor, values: Tensor, lengths: Tensor, *, discount: float = 1.0, trace: float = 0.95
) -> Tensor:
    """The advantages of :func:`gae` alone. arXiv:1506.02438, eq. 16.

        >>> gae_advantages(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.75]), torch.tensor([2]), trace=1.0)
        tensor([0.5000, 0.2500])

    Raises:
        SchemaError: as :func:`gae`.
    """
    return gae(token_rewards, values, lengths, discount=discount, trace=trace)[0]
