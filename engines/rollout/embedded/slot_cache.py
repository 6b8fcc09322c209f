"""Keys and values of the running rows: one tensor, one slot per row.

Storage is [layers, 2, slots, capacity, kv_heads, head_dim]; it begins small and grows by doubling, in slots and in
length, up to what is really live. A decode step writes one position per row and attends to the longest live length
of the first slots only, so short rows and rows that have left cost nothing.

No prefix is shared between requests: a slot is read only up to what its present row has written into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache

from asyncrl.errors import EngineError

__all__ = ["CacheGeometry", "SlotCache"]

_SMALLEST_CAPACITY = 64
_SMALLEST_SLOTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGeometry:
    """What the storage of one token looks like, and how far it may grow."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    max_tokens: int


class SlotCache(Cache):
    """transformers' cache interface over the slots.

    Before each forward pass one of :meth:`read_slots` (attend to the cache) and :meth:`read_batch` (attend to the
    pass itself) says where its keys and values go. transformers sees an empty cache (no layers of its own): a mask
    and positions come with every pass, and a pass without a mask is plainly causal over itself.
    """

    def __init__(self, geometry: CacheGeometry) -> None:
        super().__init__(layers=[])
        self.geometry = geometry
        self._storage = self._allocate(0, 0)
        self._flat: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._index = torch.empty(0, dtype=torch.int64)
        self._source: torch.Tensor | None = None
        self._attended: tuple[slice, slice] | None = None
        self.updates = 0

    @property
    def slots(self) -> int:
        """Rows that fit at present."""
        return int(self._storage.shape[2])

    @property
    def capacity(self) -> int:
        """Tokens per slot at present."""
        return int(self._storage.shape[3])

    def reserve(self, *, slots: int, tokens: int) -> None:
        """Make room for ``slots`` rows of ``tokens`` tokens; what is in the cache stays."""
        if slots <= self.slots and tokens <= self.capacity:
            return
        wide = self.slots if slots <= self.slots else max(slots, 2 * self.slots, _SMALLEST_SLOTS)
        long = self.capacity
        while long < tokens:
            long = max(2 * long, _SMALLEST_CAPACITY)
        grown = self._allocate(wide, min(long, max(self.geometry.max_tokens, tokens)))
        grown[:, :, : self.slots, : self.capacity] = self._storage
        self._adopt(grown)

    def clear(self) -> None:
        """Give the memory back; nobody runs."""
        self._adopt(self._allocate(0, 0))

    def move(self, sources: Sequence[int], targets: Sequence[int], *, tokens: int) -> None:
        """Copy the first ``tokens`` positions of each source slot to its target, all at once (so cycles work)."""
        device = self.geometry.device
        source, target = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
        self._storage[:, :, target, :tokens] = self._storage[:, :, source, :tokens]

    def forget(self, slot: int) -> None:
        """Overwrite a slot with zeros: non-finite values would spoil later rows even where they are masked."""
        self._storage[:, :, slot] = 0

    def read_slots(self, slots: slice, *, index: torch.Tensor, tokens: int) -> None:
        """The next pass writes its positions to flat places ``index`` and attends to ``tokens`` positions of ``slots``.

        ``index`` [N]: slot * capacity + position, for the pass's [B, T] tokens in order.
        """
        self._index, self._source = index, None
        self._attended = (slots, slice(0, tokens))

    def read_batch(self, *, index: torch.Tensor, source: torch.Tensor) -> None:
        """The next pass attends to itself; its flat positions ``source`` [N] go to flat places ``index`` [N]."""
        self._index, self._source = index, source
        self._attended = None

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: object,
        **__: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [B, kv_heads, T, head_dim] and answer what to attend to, in the same layout."""
        self.updates += 1
        for states, stored in zip((key_states, value_states), self._flat[layer_idx], strict=True):
            rows = states.transpose(1, 2).reshape(-1, stored.shape[1])
            stored.index_copy_(0, self._index, rows if self._source is None else rows[self._source])
        if self._attended is None:
            return key_states, value_states
        slots, tokens = self._attended
        layer = self._storage[layer_idx, :, slots, tokens].transpose(2, 3)
        return layer[0], layer[1]

    def _allocate(self, slots: int, capacity: int) -> torch.Tensor:
        g = self.geometry
        shape = (g.layers, 2, slots, capacity, g.kv_heads, g.head_dim)
        try:
            # Zeros, not garbage: a masked position still takes part in 0 * value.
            return torch.zeros(shape, dtype=g.dtype, device=g.device)
        except RuntimeError as error:
            raise EngineError(
                f"no memory for a KV cache of {slots} rows x {capacity} tokens; lower max_running_requests or "
                f"max_model_tokens"
            ) from error

    def _adopt(self, storage: torch.Tensor) -> None:
        self._storage = storage
        width = self.geometry.kv_heads * self.geometry.head_dim
        self._flat = [(layer[0].view(-1, width), layer[1].view(-1, width)) for layer in storage]
