"""Causal attention over a packed sequence: each token attends to its own row only.

Everything of a transformer but attention works on single tokens, so only attention depends on how rows are packed.
Models of transformers pass the keyword :data:`ROWS` from their ``forward`` to the attention function that is registered
by name. Ours splits the sequence into its rows; no mask of the size of the sequence is ever made.

Rows that share a prefix lie behind it, and attend to it as if each had its own (:mod:`engines.training.prefixes`).

On CUDA, half-precision sequences go through one variable-length flash kernel,
:func:`torch.nn.attention.varlen.varlen_attn`. Elsewhere rows of one length form a rectangle, a view of the sequence,
and each rectangle is one causal call of :func:`torch.nn.functional.scaled_dot_product_attention`.
``benchmarks/trainer.py --attention`` compares this with the alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import scaled_dot_product_attention

from engines.training.packing import sent
from engines.training.parallel import piece_of_all_heads, whole_of_some_heads

PACKED_ATTENTION = "asyncrl_packed"
"""Name of the attention function in transformers' table; no mask function has this name, so no mask is made."""

ROWS = "asyncrl_rows"
"""Keyword of a model's ``forward`` for the :class:`RowLayout`."""


@dataclass(slots=True)
class RowLayout:
    """The division of a packed sequence of T cells into rows.

    With ``cp``, layers have a piece of the sequence on each rank of that group. ``device_type`` is whose way is taken,
    if not that of the device where the sequence lies.
    """

    rectangles: tuple[tuple[int, int], ...]  # (rows, length) in the order of the sequence; T = sum of rows * length
    cu_seqlens: Tensor  # [rows + 1] int32 on the sequence's device: the first cell of each row, and T
    # The sliding windows that layers asked for, one entry per call: they show whether a model supports packing.
    windows: list[int | None] = field(default_factory=list)
    # Of each rectangle, the one, of a single row, whose cells come before the cells of its rows; empty: of none.
    prefixes: tuple[int | None, ...] = ()
    cp: ProcessGroup | None = None
    device_type: str | None = None

    @staticmethod
    def of(
        rectangles: Sequence[tuple[int, int]],
        *,
        device: torch.device,
        prefixes: Sequence[int | None] = (),
        cp: ProcessGroup | None = None,
        device_type: str | None = None,
    ) -> RowLayout:
        lengths = [length for rows, length in rectangles for _ in range(rows)]
        cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        cu_seqlens[1:] = torch.cumsum(torch.tensor(lengths, dtype=torch.int32), 0)
        shared = tuple(prefixes) if any(each is not None for each in prefixes) else ()
        return RowLayout(tuple(rectangles), sent(cu_seqlens, device), prefixes=shared, cp=cp, device_type=device_type)

    @property
    def max_seqlen(self) -> int:
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
    asyncrl_rows: RowLayout | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_others: Any,  # transformers passes more to every attention function
) -> tuple[Tensor, None]:
    """Compute causal attention within rows; transformers calls this in every layer.

    ``query`` is [B, heads, L, D], or [1, heads, T, D] with the division ``asyncrl_rows`` into rows; ``key`` and
    ``value`` have equally many heads, or a divisor. ``scaling`` is 1 / sqrt(D) by default. A token attends to
    ``sliding_window`` tokens, itself included. With ``softcap`` scores become ``softcap * tanh(score / softcap)``.
    Attention masks, sinks (``s_aux``), ``position_bias``, ``dropout`` and ``is_causal=False`` are not supported. The
    result is [B, L, heads, D], and None for the weights.
    """
    foreign = attention_mask is not None or s_aux is not None or position_bias is not None
    if foreign or dropout or is_causal is False:
        raise NotImplementedError(
            f"{type(module).__name__}: packed attention is causal and does not support masks, sinks, biases or dropout"
        )
    if asyncrl_rows is None:
        batch, _, length, _ = query.shape
        attended = _attend(query, key, value, scaling=scaling, window=sliding_window, softcap=softcap)
        return attended.transpose(1, 2).reshape(batch, length, -1, value.shape[-1]), None
    rows = asyncrl_rows
    rows.windows.append(sliding_window)
    attend = partial(_attend_rows, rows=rows, scaling=scaling, window=sliding_window, softcap=softcap)
    if rows.cp is None:
        return attend(query, key, value), None
    query, key, value = (whole_of_some_heads(each, rows.cp) for each in (query, key, value))
    return piece_of_all_heads(attend(query, key, value), rows.cp), None


def _attend_rows(  # [1, heads, T, D]; returns [1, T, heads, D]
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    rows: RowLayout,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    tokens = [each[0].transpose(0, 1) for each in (query, key, value)]  # [T, heads, D]
    if softcap is None and not rows.prefixes and _has_varlen_kernel(query, value, rows.device_type):
        return _varlen(*tokens, rows=rows, scaling=scaling, window=window).unsqueeze(0)
    sizes = [count * length for count, length in rows.rectangles]
    # split, not slices: its backward pass joins the pieces, where each slice's would fill a whole sequence with zeros.
    queries, keys, values = (
        [
            piece.unflatten(0, shape).transpose(1, 2)
            for piece, shape in zip(each.split(sizes), rows.rectangles, strict=True)
        ]
        for each in tokens
    )
    attended_pieces: list[Tensor] = []
    for q, k, v, prefix in zip(queries, keys, values, rows.prefixes or [None] * len(queries), strict=True):
        if prefix is not None:
            k, v = (  # noqa: PLW2901
                torch.cat([each[prefix].expand(len(own), -1, -1, -1), own], dim=2)
                for each, own in ((keys, k), (values, v))
            )
        attended = _attend(q, k, v, scaling=scaling, window=window, softcap=softcap)
        attended_pieces.append(attended.transpose(1, 2).flatten(0, 1))
    return (attended_pieces[0] if len(attended_pieces) == 1 else torch.cat(attended_pieces)).unsqueeze(0)


def _attend(  # queries [B, heads, L, D] of the last L of K tokens; keys and values [B, heads, K, D]
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, window: int | None, softcap: float | None
) -> Tensor:
    length, places = query.shape[2], key.shape[2]
    if window is not None and window >= places:
        window = None
    groups = query.shape[1] // key.shape[1]
    if softcap is not None:
        return _attend_softcapped(query, key, value, scaling=scaling, window=window, softcap=softcap)
    if window is None and length == places:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=groups > 1)
    mask = _band(length, places, window or places, query.device)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=groups > 1)


def _attend_softcapped(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, window: int | None, softcap: float
) -> Tensor:
    """Compute attention with soft-capped scores, for which there is no kernel: one matrix of scores per rectangle."""
    length, size = query.shape[2:]
    places = key.shape[2]
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    scores = query @ key.transpose(2, 3) * (size**-0.5 if scaling is None else scaling)
    scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~_band(length, places, window or places, query.device), -torch.inf)
    precise = torch.promote_types(scores.dtype, torch.float32)
    return scores.softmax(dim=-1, dtype=precise).to(value.dtype) @ value


@lru_cache(maxsize=8)
def _band(length: int, places: int, window: int, device: torch.device) -> Tensor:
    """Return [L, K] bool: each of the last L tokens attends to the ``window`` tokens up to itself."""
    place = torch.arange(places, device=device)
    back = place[places - length :, None] - place[None, :]
    return (back >= 0) & (back < window)


def forget_masks() -> None:
    """Free the masks that are kept for the next layer, or micro-batch, of the same lengths."""
    _band.cache_clear()


def _has_varlen_kernel(query: Tensor, value: Tensor, device_type: str | None) -> bool:
    if (device_type or query.device.type) != "cuda" or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    if "window_size" not in _varlen_parameters():
        return False
    size = query.shape[-1]
    if size > 256 or size % 8 or value.shape[-1] != size:
        return False
    return device_type is not None or torch.cuda.get_device_capability(query.device) >= (8, 0)


def _varlen(  # [T, heads, D]
    query: Tensor, key: Tensor, value: Tensor, *, rows: RowLayout, scaling: float | None, window: int | None
) -> Tensor:
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
        rows.cu_seqlens,
        rows.cu_seqlens,
        rows.max_seqlen,
        rows.max_seqlen,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **options,
    )
    assert isinstance(attended, Tensor)
    return attended


@cache
def _varlen_parameters() -> frozenset[str]:
    """Return the parameters of torch's kernel: torch 2.10 introduced it, windows came with 2.11, groups with 2.12."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(signature(varlen_attn).parameters)


def register_packed_attention() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
