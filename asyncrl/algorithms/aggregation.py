"""From losses of tokens to the loss of a batch, whatever micro-batches and ranks its rows are spread over.

Beside the weights (:func:`token_weights`) this file holds what all token losses share: their record, masks, sums over
the rows of a micro-batch, and options with a range.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from asyncrl.errors import ConfigError, InvalidDataError, SchemaError

Aggregation: TypeAlias = Literal["token_mean", "sequence_mean", "fixed_length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """Losses of single tokens, to be summed with the weights of :func:`~asyncrl.algorithms.token_weights`.

        >>> TokenLosses(loss=torch.tensor([0.5, 0.0])).metrics
        {}

    Attributes:
        loss: [T] (or the shape of the inputs), differentiable, exactly 0 where the mask is False.
        metrics: detached quantities of the same shape, 0 where the mask is False, to be averaged over the mask.
    """

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


def token_weights(
    lengths: Tensor,
    *,
    loss_agg_mode: Aggregation,
    total_tokens: int,
    total_rows: int,
    fixed_length: int | None = None,
) -> Tensor:
    """Return the weight of each trained token of every row, [B] float32; 0 for rows without a trained token.

    Weights times losses sum to the loss of the global batch:

        loss = sum_i weights[i] * sum_t token_loss[i, t]

    The sum may be taken over any split into micro-batches and ranks: each part needs its own ``lengths`` ([B] integer,
    trained tokens of each row) and the totals of the *global* batch (``total_rows`` of rows with a trained token), and
    gradients are added, not averaged.

    ============== ============================== ==================================================================
    token_mean     1 / total_tokens               every token counts the same (DAPO, arXiv:2503.14476)
    sequence_mean  1 / (total_rows * length_i)    every row counts the same (GRPO, arXiv:2402.03300)
    fixed_length   1 / (total_rows * fixed_length) no length bias, independent of the batch (Dr. GRPO, arXiv:2503.20783)
    ============== ============================== ==================================================================

        >>> lengths = torch.tensor([2, 0, 3])  # 5 tokens in 2 rows
        >>> token_weights(lengths, loss_agg_mode="sequence_mean", total_tokens=5, total_rows=2)
        tensor([0.2500, 0.0000, 0.1667])

    Raises:
        SchemaError: ``lengths`` are not [B] integers.
        InvalidDataError: this part alone has more tokens or rows than the totals.
        ConfigError: ``loss_agg_mode`` and ``fixed_length`` (tokens, for that mode alone) do not fit together.
    """
    check_aggregation(loss_agg_mode, fixed_length)
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
    if loss_agg_mode == "token_mean":
        divisor = torch.full_like(count, max(total_tokens, 1))
    elif loss_agg_mode == "sequence_mean":
        divisor = count * max(total_rows, 1)
    else:
        assert fixed_length is not None
        divisor = torch.full_like(count, max(total_rows, 1) * fixed_length)
    return torch.where(trained, 1.0 / divisor, 0.0).float()


def check_aggregation(loss_agg_mode: Aggregation, fixed_length: int | None) -> None:
    """Raise :class:`ConfigError` unless the two belong together."""
    if loss_agg_mode not in get_args(Aggregation):
        raise ConfigError(
            f"loss_agg_mode {loss_agg_mode!r} does not exist", remedy=f"one of {', '.join(get_args(Aggregation))}"
        )
    if loss_agg_mode == "fixed_length":
        if fixed_length is None or fixed_length < 1:
            raise ConfigError(
                f"loss_agg_mode 'fixed_length' divides by fixed_length, which is {fixed_length}",
                remedy="set fixed_length to a positive number of tokens, usually the longest generation allowed",
            )
    elif fixed_length is not None:
        raise ConfigError(
            f"fixed_length={fixed_length} has no effect with loss_agg_mode {loss_agg_mode!r}",
            remedy="leave it out, or choose loss_agg_mode 'fixed_length'",
        )


def keep(values: Tensor, mask: Tensor) -> Tensor:
    """Return ``values`` in at least float32 where ``mask``, 0 elsewhere.

    Selects instead of multiplying, so that inf and nan outside the mask reach neither the value nor the gradient.
    """
    wide = values if values.dtype == torch.float64 else values.float()
    return torch.where(mask, wide, 0.0)


def check_tokens(mask: Tensor, **columns: Tensor | None) -> None:
    """Raise :class:`SchemaError` unless every column given is floating and has the shape of the boolean ``mask``."""
    if mask.dtype != torch.bool:
        raise SchemaError(f"mask must be boolean (True where a token is trained on), got {mask.dtype}")
    for name, column in columns.items():
        if column is None:
            continue
        if column.shape != mask.shape:
            raise SchemaError(
                f"{name} has shape {tuple(column.shape)}, the mask {tuple(mask.shape)}: "
                "all columns hold one entry per token (a number per row must be repeated over its tokens first)"
            )
        if not column.dtype.is_floating_point:
            raise SchemaError(f"{name} must be floating, got {column.dtype}")


class Rows:
    """Sums over rows, repeated over the tokens of each. Differentiable.

    Rows are never cut: a micro-batch holds all trained tokens of a row or none, so what is summed here is the same
    whatever micro-batches and ranks the rows are spread over. ``index`` [T] (or any shape) has equal integers, in any
    order, for tokens of the same row; tokens outside ``mask`` belong to no row. ``lengths``, like ``index``, are the
    tokens inside the mask in the row of each token, at least 1, float32.

    Raises:
        SchemaError: shapes or dtypes differ.
    """

    def __init__(self, index: Tensor, mask: Tensor) -> None:
        if index.shape != mask.shape or index.dtype.is_floating_point or index.dtype == torch.bool:
            raise SchemaError(
                f"rows must be {tuple(mask.shape)} integers like the mask, got {index.dtype} of {tuple(index.shape)}"
            )
        unique, inverse = torch.unique(index, return_inverse=True)
        self._count = len(unique)
        self._index = inverse.flatten()
        self._mask = mask
        self.lengths = self.sum(torch.ones(index.shape, device=index.device)).clamp(min=1.0)

    def sum(self, values: Tensor) -> Tensor:
        """Return, for each token, the sum of ``values`` over the tokens of its row inside the mask."""
        kept = torch.where(self._mask, values, 0.0).flatten()
        sums = kept.new_zeros(self._count).index_add(0, self._index, kept)
        return sums[self._index].view(values.shape)

    def mean(self, values: Tensor) -> Tensor:
        """Return, for each token, the mean of ``values`` over its row inside the mask; 0 for an empty row."""
        return self.sum(values) / self.lengths.to(values.dtype)


def check_range(name: str, value: Any, *, low: float, high: float = math.inf, open_low: bool = False) -> None:
    """Raise :class:`ConfigError` unless ``low <= value <= high`` (``low < value`` if ``open_low``) and finite."""
    huge = isinstance(value, int) and abs(value) > sys.float_info.max
    if (
        value is None
        or isinstance(value, bool)
        or huge
        or not math.isfinite(value)
        or not low <= value <= high
        or (open_low and value == low)
    ):
        bound = f"above {low:g}" if open_low else f"of at least {low:g}"
        allowed = f"a finite number {bound}" + (f" and at most {high:g}" if math.isfinite(high) else "")
        raise ConfigError(f"{name} is {value}; {allowed} is needed", path=name, remedy=allowed)


def option(
    default: float | None, *, low: float, high: float = math.inf, open_low: bool = False, optional: bool = False
) -> Any:
    """Declare a dataclass field whose value :func:`check_options` holds to a range; None is allowed if ``optional``."""
    return field(
        default=default, metadata={"range": {"low": low, "high": high, "open_low": open_low}, "none": optional}
    )


def check_options(options: Any) -> None:
    """Raise :class:`ConfigError` unless every :func:`option` of a dataclass instance is in its range."""
    for each in fields(options):
        value: float | None = getattr(options, each.name)
        if "range" in each.metadata and (value is not None or not each.metadata["none"]):
            check_range(each.name, value, **each.metadata["range"])
