"""Causal attention over a stream of packed rows: each token sees its own row and nothing else.

Everything of a transformer but attention works on single tokens and never learns that rows were packed. Attention is
told by a keyword, :data:`ROWS`, which models of transformers hand from their ``forward`` down to the attention function
they find by name. Ours takes a stream apart into its rows; no mask of the size of the stream is ever made.

On CUDA, half-precision streams go through one variable-length flash kernel,
:func:`torch.nn.attention.varlen.varlen_attn`. Elsewhere rows of one length lie side by side as a rectangle, a
view of the stream, and each rectangle is one causal call of
:func:`torch.nn.functional.scaled_dot_product_attention`. ``benchmarks/trainer.py --attention`` compares this with the
alternatives: a block-diagonal mask, one call a row, and padding everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

__all__ = ["PACKED_ATTENTION", "ROWS", "RowsOfStream", "packed_attention", "register_packed_attention"]

PACKED_ATTENTION = "asyncrl_packed"
"""Name of the attention function in transformers' table. No mask function has this name, so no mask is made."""

ROWS = "asyncrl_rows"
"""Keyword under which a model's ``forward`` is given the :class:`RowsOfStream`."""


@dataclass(slots=True)
class RowsOfStream:
    """How the T cells of a stream are divided into rows.

    Attributes:
        rectangles: ``(rows, length)`` in the order of the stream; T = sum of rows * length.
        boundaries: [rows + 1] int32 on the stream's device: where each row begins, and T.
        windows: sliding windows that layers asked for, one entry a call; None for full attention. A model's support for
            packing is judged by it.
    """

    rectangles: tuple[tuple[int, int], ...]
    boundaries: Tensor
    windows: list[int | None] = field(default_factory=list)

    @staticmethod
    def of(rectangles: Sequence[tuple[int, int]], *, device: torch.device) -> RowsOfStream:
        lengths = [length for rows, length in rectangles for _ in range(rows)]
        boundaries = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        boundaries[1:] = torch.cumsum(torch.tensor(lengths, dtype=torch.int32), 0)
        return RowsOfStream(tuple(rectangles), boundaries.to(device))

    @property
    def longest(self) -> int:
        return max(length for _, length in self.rectangles)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    asyncrl_rows: RowsOfStream | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_others: Any,  # what transformers passes to every attention function, whether it concerns it or not
) -> tuple[Tensor, None]:
    """Attention as transformers calls it.

    Args:
        module: the attention layer.
        query: [B, heads, L, D]; with ``asyncrl_rows`` [1, heads, T, D].
        key: as ``query``, with the heads of keys and values: equally many, or a divisor.
        value: as ``key``.
        attention_mask: must be None: causality and rows are all there is.
        dropout: must be 0, see :func:`~engines.training.model.load_policy_model`.
        scaling: factor of the scores; 1 / sqrt(D) by default.
        sliding_window: tokens a token sees, itself included.
        softcap: scores are bent to ``softcap * tanh(score / softcap)``.
        is_causal: must not be False.
        asyncrl_rows: rows of the stream; without it each of the B rows is one row.
        s_aux: attention sinks: not supported, must be None.
        position_bias: added to scores: not supported, must be None.

    Returns:
        [B, L, heads, D], and None for the weights.

    Raises:
        NotImplementedError: something else is asked for.
    """
    foreign = attention_mask is not None or s_aux is not None or position_bias is not None
    if foreign or dropout or is_causal is False:
        raise NotImplementedError(
            f"{type(module).__name__}: packed attention is causal and knows no masks, sinks, biases or dropout"
        )
    if asyncrl_rows is None:
        batch, _, length, _ = query.shape
        attended = _attend(query, key, value, scaling=scaling, window=sliding_window, softcap=softcap)
        return attended.transpose(1, 2).reshape(batch, length, -1, value.shape[-1]), None
    rows = asyncrl_rows
    rows.windows.append(sliding_window)
    tokens = [each[0].transpose(0, 1) for each in (query, key, value)]  # [T, heads, D]
    if softcap is None and _has_varlen_kernel(query):
        return _varlen(*tokens, rows=rows, scaling=scaling, window=sliding_window).unsqueeze(0), None
    sizes = [count * length for count, length in rows.rectangles]
    # split, not slices: its backward pass joins the pieces, where each slice's would fill a whole stream with zeros.
    pieces = zip(rows.rectangles, *(each.split(sizes) for each in tokens), strict=True)
    attended_pieces: list[Tensor] = []
    for shape, *piece in pieces:
        q, k, v = (each.unflatten(0, shape).transpose(1, 2) for each in piece)
        attended = _attend(q, k, v, scaling=scaling, window=sliding_window, softcap=softcap)
        attended_pieces.append(attended.transpose(1, 2).flatten(0, 1))
    return (attended_pieces[0] if len(attended_pieces) == 1 else torch.cat(attended_pieces)).unsqueeze(0), None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, window: int | None, softcap: float | None
) -> Tensor:
    """[B, heads, L, D]: causal attention within each of B rows."""
    length = query.shape[2]
    if window is not None and window >= length:
        window = None
    groups = query.shape[1] // key.shape[1]
    if softcap is not None:
        return _attend_softcapped(query, key, value, scaling=scaling, window=window, softcap=softcap)
    if window is None:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=groups > 1)
    mask = _band(length, window, query.device)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=groups > 1)


def _attend_softcapped(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, window: int | None, softcap: float
) -> Tensor:
    """No kernel bends scores, so they are written out, rectangle by rectangle."""
    length, size = query.shape[2:]
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    scores = query @ key.transpose(2, 3) * (size**-0.5 if scaling is None else scaling)
    scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~_band(length, window or length, query.device), -torch.inf)
    return scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype) @ value


@lru_cache(maxsize=8)
def _band(length: int, window: int, device: torch.device) -> Tensor:
    """[L, L] bool: what each token sees of the ``window`` tokens up to itself."""
    place = torch.arange(length, device=device)
    back = place[:, None] - place[None, :]
    return (back >= 0) & (back < window)


def _has_varlen_kernel(query: Tensor) -> bool:
    """Whether torch's flash kernel takes this: half precision, on a device that has it, heads of a fitting size."""
    if query.device.type != "cuda" or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    if "window_size" not in _varlen_parameters():
        return False
    size = query.shape[-1]
    return size <= 256 and size % 8 == 0 and torch.cuda.get_device_capability(query.device) >= (8, 0)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, *, rows: RowsOfStream, scaling: float | None, window: int | None
) -> Tensor:
    """[T, heads, D] in one kernel."""
    from torch.nn.attention.varlen import varlen_attn

    groups = query.shape[1] // key.shape[1]
    options: dict[str, Any] = {}
    if "enable_gqa" in _varlen_parameters():
        options["enable_gqa"] = groups > 1
    else:
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    attended = varlen_attn(
        query,
        key,
        value,
        rows.boundaries,
        rows.boundaries,
        rows.longest,
        rows.longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **options,
    )
    assert isinstance(attended, Tensor)
    return attended


@cache
def _varlen_parameters() -> frozenset[str]:
    """What torch's kernel can be told: before torch 2.10 there is none, windows came with 2.11, groups with 2.12."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(signature(varlen_attn).parameters)


def register_packed_attention() -> None:
    """Let transformers find :func:`packed_attention` by its name. Idempotent."""
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
