"""From losses of tokens to the loss of a batch, whatever micro-batches and ranks the rows are spread over."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from asyncrl.errors import ConfigError, InvalidDataError, SchemaError

__all__ = ["Aggregation", "check_aggregation", "token_weights"]

Aggregation: TypeAlias = Literal["token_mean", "sequence_mean", "fixed_length"]


def check_aggregation(aggregation: Aggregation, fixed_length: int | None) -> None:
    """Raise :class:`ConfigError` unless the two belong together."""
    if aggregation not in get_args(Aggregation):
        raise ConfigError(
            f"aggregation {aggregation!r} does not exist", remedy=f"one of {', '.join(get_args(Aggregation))}"
        )
    if aggregation == "fixed_length":
        if fixed_length is None or fixed_length < 1:
            raise ConfigError(
                f"aggregation 'fixed_length' divides by fixed_length, which is {fixed_length}",
                remedy="set fixed_length to a positive number of tokens, usually the longest generation allowed",
            )
    elif fixed_length is not None:
        raise ConfigError(
            f"fixed_length={fixed_length} has no effect with aggregation {aggregation!r}",
            remedy="leave it out, or choose aggregation 'fixed_length'",
        )


def token_weights(
    lengths: Tensor,
    *,
    aggregation: Aggregation,
    total_tokens: int,
    total_rows: int,
    fixed_length: int | None = None,
) -> Tensor:
    """Weight of each trained token of every row.

    Weights times losses sum to the loss of the global batch:

        loss = sum_i weights[i] * sum_t token_loss[i, t]

    The sum may be taken over any split into micro-batches and ranks: each part needs its own ``lengths`` and the
    totals of the *global* batch, and gradients are added, not averaged.

    ============== ============================== ==================================================================
    token_mean     1 / total_tokens               every token counts the same (DAPO, arXiv:2503.14476)
    sequence_mean  1 / (total_rows * length_i)    every row counts the same (GRPO, arXiv:2402.03300)
    fixed_length   1 / (total_rows * fixed_length) no length bias, independent of the batch (Dr. GRPO, arXiv:2503.20783)
    ============== ============================== ==================================================================

        >>> lengths = torch.tensor([2, 0, 3])  # 5 tokens in 2 rows
        >>> token_weights(lengths, aggregation="token_mean", total_tokens=5, total_rows=2)
        tensor([0.2000, 0.0000, 0.2000])
        >>> token_weights(lengths, aggregation="sequence_mean", total_tokens=5, total_rows=2)
        tensor([0.2500, 0.0000, 0.1667])

    Args:
        lengths: [B] integer, number of trained tokens of each row of this part.
        aggregation: see the table.
        total_tokens: trained tokens of the global batch.
        total_rows: rows of the global batch with at least one trained token.
        fixed_length: tokens, only for ``fixed_length``.

    Returns:
        [B] float32 on the device of ``lengths``. Rows without a trained token get 0.

    Raises:
        SchemaError: ``lengths`` are not [B] integers.
        InvalidDataError: this part alone has more tokens or rows than the totals.
        ConfigError: ``aggregation`` and ``fixed_length`` do not fit together.
    """
    check_aggregation(aggregation, fixed_length)
    if lengths.ndim != 1 or lengths.dtype.is_floating_point or lengths.dtype == torch.bool:
        raise SchemaError(f"lengths must be [B] integers, got {lengths.dtype} of shape {tuple(lengths.shape)}")
    trained = lengths > 0
    tokens, rows = int(lengths.sum()), int(trained.sum())
    if tokens > total_tokens or rows > total_rows:
        raise InvalidDataError(
            f"this part has {tokens} trained tokens in {rows} rows, the whole batch only {total_tokens} in "
            f"{total_rows}: the totals must be summed over all micro-batches and ranks"
        )
    count = lengths.clamp(min=1).double()
    if aggregation == "token_mean":
        divisor = torch.full_like(count, max(total_tokens, 1))
    elif aggregation == "sequence_mean":
        divisor = count * max(total_rows, 1)
    else:
        assert fixed_length is not None
        divisor = torch.full_like(count, max(total_rows, 1) * fixed_length)
    return torch.where(trained, 1.0 / divisor, 0.0).float()
