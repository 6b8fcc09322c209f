"""The paged KV cache, and attention over it.

Keys and values lie in blocks of :data:`BLOCK_TOKENS` tokens, in one range of memory of ``memory_bytes``: all layers of
a block side by side, and in a layer the key and the value of each token. A row has a list of blocks (PagedAttention,
Kwon et al. 2023, section 4.3). On a CPU the range is virtual: a block takes memory when it is first written, and gives
it back when it is freed. On an accelerator the range is allocated at once.

One forward pass reads the tokens of several rows, one row after another, without padding (:class:`Pass`).
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from asyncrl.errors import ConfigError, EngineError

BLOCK_TOKENS = 16
ATTENTION = "asyncrl_paged"
"""The name of :func:`paged_attention` among transformers' attention functions."""

_DEFAULT_BYTES = 4 << 30
_QUERY_TOKENS = 256  # attended at once where a chunk continues a row: bounds the mask
_GATHERED_TOKENS = 16_384  # of one group of rows in a decode step, in one layer
_PADDING_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Part:
    """The tokens ``begin .. end`` of a pass, and what they attend to.

    ``table`` [rows, blocks] has where blocks begin in layer 0, in blocks of one layer; ``mask`` [rows, 1, queries,
    blocks * BLOCK_TOKENS] says which tokens a query sees. Without a table the part is the beginning of one row, and
    attends to itself.
    """

    begin: int
    end: int
    table: torch.Tensor | None = None
    mask: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass: where the keys and values of its N tokens go, and its parts.

    ``places`` [N] are token places in layer 0.
    """

    places: torch.Tensor
    parts: Sequence[Part]


class KVCache(Cache):
    """transformers' cache interface over the blocks; block 0 is always zero, and stands for none in tables.

    transformers sees an empty cache (no layers of its own), and :func:`paged_attention` ignores its masks: what a pass
    writes and attends to is set by :attr:`current`.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        max_model_tokens: int,
        max_rows: int,
        memory_bytes: int | None,
    ) -> None:
        super().__init__(layers=[])
        self.layers_cached = layers
        self.device = device
        self._dtype = dtype
        self._heads = (kv_heads, head_dim)
        self.block_bytes = 2 * layers * BLOCK_TOKENS * kv_heads * head_dim * dtype.itemsize
        row_blocks = -(-max_model_tokens // BLOCK_TOKENS)
        # The two rows of Decoder.check have up to three blocks each.
        least = (1 + max(row_blocks, min(2 * row_blocks, 6))) * self.block_bytes
        if memory_bytes is not None and memory_bytes < least:
            raise ConfigError(
                f"kv_cache_bytes = {memory_bytes} does not hold one request of {max_model_tokens} tokens; at least "
                f"{least}, or less max_model_tokens",
                path="kv_cache_bytes",
                remedy=f"at least {least}",
            )
        bound = (memory_bytes or max(_DEFAULT_BYTES, least)) // self.block_bytes
        self.blocks = min(bound, 1 + (max_rows + 1) * row_blocks)  # a health probe runs beside max_rows
        self.current: Pass | None = None
        self.updates = 0
        self._memory: mmap.mmap | None = None
        self._storage = torch.empty(0)
        self.allocate()

    @property
    def capacity_tokens(self) -> int:
        return (self.blocks - 1) * BLOCK_TOKENS

    def allocate(self) -> None:
        """Allocate the range, all zero: values that are masked still take part in 0 * value."""
        elements = self.blocks * self.block_bytes // self._dtype.itemsize
        try:
            if self.device.type == "cpu":
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
                self._memory = mmap.mmap(-1, elements * self._dtype.itemsize, flags=flags)
                self._storage = torch.frombuffer(self._memory, dtype=self._dtype)
            else:
                self._storage = torch.zeros(elements, dtype=self._dtype, device=self.device)
        except (RuntimeError, OSError) as error:
            raise EngineError(
                f"no memory for a KV cache of {self.blocks * self.block_bytes} bytes; lower kv_cache_bytes"
            ) from error

    def free_memory(self) -> None:
        """Free the whole range; :meth:`allocate` makes it again."""
        self._storage, self._memory = torch.empty(0), None

    def clear(self, blocks: Sequence[int]) -> None:
        """Overwrite blocks with zeros, before a row gets them: they may hold what is not finite."""
        if blocks:
            index = torch.tensor(blocks, device=self.device)
            self._storage.view(self.blocks, -1).index_fill_(0, index, 0)

    def give_back(self, blocks: Sequence[int]) -> None:
        """Give the memory of freed blocks back to the system."""
        if self._memory is None or not blocks:
            return
        ordered = sorted(blocks)
        cuts = [0, *(i for i, (a, b) in enumerate(pairwise(ordered), start=1) if b != a + 1), len(ordered)]
        for first, last in pairwise(cuts):
            begin = -(-ordered[first] * self.block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (ordered[last - 1] + 1) * self.block_bytes // mmap.PAGESIZE * mmap.PAGESIZE
            if end > begin:
                self._memory.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def places(self, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the places [N] of ``positions`` [N] in rows whose blocks at these positions are ``table`` [N]."""
        return table * (self.layers_cached * BLOCK_TOKENS) + positions % BLOCK_TOKENS

    def decode_parts(self, tables: Sequence[Sequence[int]]) -> list[Part]:
        """Group rows of one token each, sorted by the number of their blocks, into parts with little padding.

        The parts have no masks yet: they change with every step.
        """
        groups: list[list[Sequence[int]]] = []
        held = 0
        for table in tables:
            padded = (len(groups[-1]) + 1) * len(table) if groups else 0
            held += len(table)
            if groups and padded <= min((1 + _PADDING_SHARE) * held, _GATHERED_TOKENS // BLOCK_TOKENS):
                groups[-1].append(table)
            else:
                groups.append([table])
                held = len(table)
        parts: list[Part] = []
        begin = 0
        for group in groups:
            width = len(group[-1])
            padded_tables = [[*table, *[0] * (width - len(table))] for table in group]
            parts.append(Part(begin, begin + len(group), self._rows_of(padded_tables)))
            begin += len(group)
        return parts

    def chunk_parts(self, table: Sequence[int], *, begin: int, cached: int, tokens: int) -> list[Part]:
        """Return the parts of the next ``tokens`` tokens of a row of which ``cached`` are cached."""
        if not cached:
            return [Part(begin, begin + tokens)]
        parts = []
        for first in range(cached, cached + tokens, _QUERY_TOKENS):
            last = min(first + _QUERY_TOKENS, cached + tokens)
            blocks = self._rows_of([table[: -(-last // BLOCK_TOKENS)]])
            positions = torch.arange(first, last, device=self.device)
            mask = torch.arange(blocks.shape[1] * BLOCK_TOKENS, device=self.device) <= positions[:, None]
            parts.append(Part(begin + first - cached, begin + last - cached, blocks, mask[None, None]))
        return parts

    def _rows_of(self, tables: Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor(tables, device=self.device) * self.layers_cached

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [1, kv_heads, N, head_dim], and return it as it is."""
        assert self.current is not None
        self.updates += 1
        rows = torch.cat((key_states, value_states), 1)[0].transpose(0, 1)
        stored = self._storage.view(-1, *rows.shape[1:])
        stored[layer_idx * BLOCK_TOKENS :].index_copy_(0, self.current.places, rows)
        return key_states, value_states

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Map queries [1, heads, N, head_dim], and the pass's own keys and values, to [1, N, heads, head_dim]."""
        assert self.current is not None
        parts = [self._attend(part, layer, query, key, value, scale) for part in self.current.parts]
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[None]

    def _attend(
        self,
        part: Part,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
    ) -> torch.Tensor:
        heads, dim, kv_heads = query.shape[1], query.shape[3], key.shape[1]
        here = slice(part.begin, part.end)
        if part.table is None:
            q, k, v = query[:, :, here], key[:, :, here], value[:, :, here]
            got = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=heads > kv_heads)
            return got[0].transpose(0, 1)
        assert part.mask is not None
        k, v = self._gather(layer, part.table)
        rows, queries = len(part.mask), part.mask.shape[2]
        # The queries of a key head are attended like more tokens, so that keys and values are not repeated.
        q, mask, group = query[0, :, here].transpose(0, 1), part.mask, heads // kv_heads
        if queries == 1:
            q = q.reshape(rows, kv_heads, group, dim)
        else:
            q = q.view(rows, queries, kv_heads, group, dim).permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, dim)
            mask = mask.repeat(1, 1, group, 1)
        got = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        return got.reshape(rows, heads, queries, dim).transpose(1, 2).reshape(rows * queries, heads, dim)

    def _gather(self, layer: int, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        stored = self._storage.view(self.blocks * self.layers_cached, -1)
        gathered = stored[layer:].index_select(0, table.flatten())
        keys, values = gathered.view(len(table), -1, 2, *self._heads).permute(2, 0, 3, 1, 4)
        return keys, values


def paged_attention(
    module: Any,  # Any: the attention layers of transformers' models share no type
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    kv_cache: KVCache | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention interface. Windows do not come here (``Decoder`` refuses them).

    Raises:
        EngineError: the layer asks for what is not served, or its model does not hand its options on.
    """
    if kv_cache is None:
        raise EngineError("the model does not hand options on to its attention layers")
    for name in ("softcap", "s_aux", "position_bias", "head_mask"):
        if options.get(name) is not None:
            raise EngineError(f"its attention layers have {name}, which the transformers engine does not serve")
    return kv_cache.attend(module.layer_idx, query, key, value, scaling), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, paged_attention)
