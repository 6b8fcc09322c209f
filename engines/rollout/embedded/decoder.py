"""The model's forward pass over rows: prefills and decode steps, KV cache included."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from asyncrl.errors import ConfigError, EngineError
from engines.rollout.embedded.row import Row
from engines.rollout.embedded.schedule import Chunk, Move
from engines.rollout.embedded.slot_cache import CacheGeometry, SlotCache

__all__ = ["Decoder"]

_ATTENTION_ALIGNMENT_TOKENS = 8  # CUDA's masked attention kernels want aligned lengths
_PROBE_TOKENS = 8


class Decoder:
    """A transformers causal language model with full attention in every layer, served row by row.

    Args:
        model: the model, in eval mode. Anything from transformers whose layers call ``past_key_values.update`` and
            obey a 4-d mask and ``position_ids``; :meth:`check` proves it by comparison.
        max_model_tokens: context length; the model's own when None.

    Raises:
        EngineError: the model has layers that this engine cannot serve.
        ConfigError: ``max_model_tokens`` does not fit the model.
    """

    def __init__(self, model: Any, *, max_model_tokens: int | None) -> None:  # Any: transformers' models share no type
        config = model.config.get_text_config(decoder=True)
        self.model = model
        self.max_model_tokens = _context_length(config, max_model_tokens)
        _refuse_other_layers(model, config, self.max_model_tokens)
        parameter = next(model.parameters())
        self.device: torch.device = parameter.device
        self.dtype: torch.dtype = parameter.dtype
        self.vocabulary: int = int(model.get_input_embeddings().weight.shape[0])
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.cache = SlotCache(
            CacheGeometry(
                layers=config.num_hidden_layers,
                kv_heads=heads,
                head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
                dtype=self.dtype,
                device=self.device,
                max_tokens=self.max_model_tokens,
            )
        )
        self._last: torch.Tensor | None = None
        head = model.get_output_embeddings()
        if head is not None:
            head.register_forward_pre_hook(self._only_last_position)
        self._tokens = torch.empty(0)
        self._positions = torch.empty(0)
        self._places = torch.empty(0)
        self._columns = torch.arange(0)
        self._seen = torch.tensor(0.0, dtype=self.dtype, device=self.device)
        self._unseen = torch.tensor(-math.inf, dtype=self.dtype, device=self.device)
        self.longest = 0
        self._places_capacity = 0

    def _only_last_position(self, _: object, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        """The head of a prefill sees one position per row: the other logits are never looked at."""
        if self._last is None:
            return None
        hidden = inputs[0]
        rows = torch.arange(len(hidden), device=hidden.device)
        return (hidden[rows, self._last][:, None], *inputs[1:])

    def _forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None, last: torch.Tensor | None
    ) -> torch.Tensor:
        """[B, T] tokens -> [B, V] logits of position ``last`` [B] (of the only one when None)."""
        self._last = last
        try:
            logits: torch.Tensor = self.model(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
            ).logits
        finally:
            self._last = None
        if logits.shape[1] == 1:
            return logits[:, 0]
        assert last is not None
        return logits[torch.arange(len(logits), device=logits.device), last]

    def move(self, moves: Sequence[Move], *, tokens: int) -> None:
        """Carry the moves out; ``tokens`` is the longest cached length among them."""
        if moves:
            self.cache.move([m.source for m in moves], [m.target for m in moves], tokens=tokens)

    def prefill(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Read the chunks' tokens into their slots; logits [B, V] after the last token of each chunk.

        Several chunks must all begin at position 0; a chunk that goes on stands alone.
        """
        lengths = [chunk.tokens for chunk in chunks]
        longest = max(lengths)
        device = self.device
        if chunks[0].row.cached:
            (chunk,) = chunks
            return self._prefill_further(chunk.row, chunk.tokens)
        ids = torch.zeros(len(chunks), longest, dtype=torch.int64)
        for i, chunk in enumerate(chunks):
            ids[i, : chunk.tokens] = torch.tensor(chunk.row.tokens[: chunk.tokens])
        columns = torch.arange(longest)
        starts = torch.tensor([chunk.row.slot * self.cache.capacity for chunk in chunks])
        ends = torch.tensor(lengths)
        places = starts[:, None] + columns
        inside = columns < ends[:, None]
        self.cache.read_batch(index=places[inside].to(device), source=inside.flatten().nonzero()[:, 0].to(device))
        # Right padding needs no mask: a token sees only what stands before it, and padding stands behind.
        positions = columns[None].expand(len(chunks), longest).to(device)
        return self._forward(ids.to(device), positions, None, (ends - 1).to(device))

    def _prefill_further(self, row: Row, tokens: int) -> torch.Tensor:
        device = self.device
        start, end = row.cached, row.cached + tokens
        ids = torch.tensor([row.tokens[start:end]], device=device)
        positions = torch.arange(start, end, device=device)
        self.cache.read_slots(
            slice(row.slot, row.slot + 1), index=row.slot * self.cache.capacity + positions, tokens=end
        )
        mask = torch.where(torch.arange(end, device=device) <= positions[:, None], 0.0, -math.inf).to(self.dtype)
        return self._forward(ids, positions[None], mask[None, None], torch.tensor([tokens - 1], device=device))

    def reserve(self, *, slots: int, tokens: int) -> None:
        """Make room in the cache for ``slots`` rows of ``tokens`` tokens."""
        self.cache.reserve(slots=slots, tokens=tokens)

    def seat(self, rows: Sequence[Row]) -> None:
        """The rows of the decode steps that follow: row i in slot i, with one pending token each."""
        device = self.device
        self._tokens = torch.tensor([row.tokens[-1] for row in rows], device=device)
        self._positions = torch.tensor([row.cached for row in rows], device=device)
        self.longest = max((row.cached for row in rows), default=0)
        self._places_capacity = -1

    def decode(self) -> torch.Tensor:
        """Read the pending token of every seated row; logits [B, V]."""
        rows = len(self._tokens)
        capacity = self.cache.capacity
        if self._places_capacity != capacity:
            self._places_capacity = capacity
            self._places = torch.arange(rows, device=self.device) * capacity + self._positions
            self._columns = torch.arange(capacity, device=self.device)
        attended = min(-(-(self.longest + 1) // _ATTENTION_ALIGNMENT_TOKENS) * _ATTENTION_ALIGNMENT_TOKENS, capacity)
        positions = self._positions[:, None]
        mask = torch.where(self._columns[:attended] <= self._positions[:, None, None, None], self._seen, self._unseen)
        self.cache.read_slots(slice(0, rows), index=self._places, tokens=attended)
        return self._forward(self._tokens[:, None], positions, mask, None)

    def advance(self, tokens: torch.Tensor) -> None:
        """The seated rows sampled ``tokens`` [B]: these are pending now."""
        self._tokens = tokens
        self._positions += 1
        self._places += 1
        self.longest += 1

    def check(self) -> None:
        """Prove that prefill, a chunk that goes on and decode steps equal one plain forward pass.

        Raises:
            EngineError: they do not, so the model is of a kind that cannot be served here.
        """
        from asyncrl.interfaces import SamplingParams

        length = min(_PROBE_TOKENS, self.max_model_tokens)
        ids = torch.arange(1, length + 1, device=self.device) % self.vocabulary
        plain = self.model(input_ids=ids[None], use_cache=False).logits[0].float().log_softmax(-1)
        tolerance = (1e-3 if self.dtype == torch.float32 else 0.25) * (1.0 + float(plain.abs().max()))
        rows = [
            Row(
                request_id="",
                tokens=ids[:known].tolist(),
                prompt_length=known,
                length_limit=length,
                sampling=SamplingParams(max_new_tokens=1),
                seed=0,
                slot=slot,
            )
            for slot, known in enumerate((max(length // 2, 1), 1))
        ]
        self.cache.reserve(slots=2, tokens=length)
        got = [
            (row.pending - 1, logits)
            for row, logits in zip(rows, self.prefill([Chunk(r, r.pending) for r in rows]), strict=True)
        ]
        for row in rows:
            row.cached = row.pending
        further = min(2, length - rows[1].cached)
        if further:
            rows[1].tokens.extend(ids[1 : 1 + further].tolist())
            got.append((further, self._prefill_further(rows[1], further)[0]))
            rows[1].cached += further
        while max(row.cached for row in rows) < length:
            for row in rows:
                row.tokens.append(int(ids[row.cached]))
            self.seat(rows)
            got.extend((row.cached, logits) for row, logits in zip(rows, self.decode(), strict=True))
            for row in rows:
                row.cached += 1
        worst = max(float((plain[at] - logits.float().log_softmax(-1)).abs().max()) for at, logits in got)
        expected = self.cache.geometry.layers
        if not worst <= tolerance or self.cache.updates % expected:
            raise EngineError(
                f"{type(self.model).__name__} cannot be served by the transformers engine: its cached decoding differs "
                f"from its plain forward pass by {worst:.2g} nats (allowed {tolerance:.2g}); it needs full attention "
                f"through past_key_values in every layer"
            )
        self.cache.clear()


def _context_length(config: Any, wanted: int | None) -> int:
    own = getattr(config, "max_position_embeddings", None)
    if wanted is None:
        if own is None:
            raise ConfigError(
                "the model's config has no max_position_embeddings: give max_model_tokens", path="max_model_tokens"
            )
        return int(own)
    if wanted < 2 or (own is not None and wanted > own):
        raise ConfigError(
            f"max_model_tokens must lie in 2..{own}, the model's context, got {wanted}",
            path="max_model_tokens",
            remedy=f"2..{own}",
        )
    return wanted


def _refuse_other_layers(model: Any, config: Any, max_model_tokens: int) -> None:
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise EngineError(f"{name} is an encoder-decoder; the transformers engine serves decoder-only models")
    if getattr(model, "_is_stateful", False):
        raise EngineError(f"{name} keeps a recurrent state; the transformers engine serves attention layers only")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    # A window that no row can outgrow is full attention.
    slides = "sliding_attention" in kinds or (getattr(config, "layer_types", None) is None and window is not None)
    if slides and (window is None or window < max_model_tokens):
        raise EngineError(
            f"{name} attends through a window of {window} tokens, which the transformers engine does not serve; "
            f"max_model_tokens <= {window} makes it full attention"
        )
    if other := kinds - {"full_attention", "sliding_attention"}:
        raise EngineError(
            f"{name} has layers of kind {', '.join(sorted(other))}; the transformers engine serves full attention only"
        )
