"""The model's forward passes over rows, and the models that can be served."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from asyncrl.errors import AsyncRLError, ConfigError, EngineError
from asyncrl.interfaces import SamplingParams
from asyncrl.model_folder import rotary_change
from engines.rollout.request import ModelTokens, Row, load_tokenizer
from engines.rollout.transformers.adapters import Adapters
from engines.rollout.transformers.kv_cache import (
    ATTENTION,
    BLOCK_TOKENS,
    KVCache,
    Part,
    Pass,
)
from engines.rollout.transformers.schedule import Chunk, Step
from engines.training.model import model_loading_lock

_PROBE_TOKENS = 2 * BLOCK_TOKENS + 4
_log = logging.getLogger(__name__)


class Decoder:
    """A transformers causal language model with full attention in every layer, served row by row.

    ``model`` is in eval mode. Its layers call ``past_key_values.update`` and transformers' attention interface, and
    obey ``position_ids``; :meth:`check` proves it by comparison. ``max_model_tokens`` is the model's own where None, or
    what its rotary positions leave: all rows of a pass share them (:class:`~asyncrl.model_folder.RotaryChange`).
    ``kv_cache_bytes`` is 4 GiB where None, or what one row of that length needs if that is more; of it, no more is used
    than ``max_running_requests`` rows can fill.

    Raises:
        EngineError: the model has layers that this engine cannot serve.
        ConfigError: ``max_model_tokens`` does not fit the model, or ``kv_cache_bytes`` not one row.
    """

    def __init__(
        self,
        model: Any,  # Any: transformers' models share no type
        *,
        max_model_tokens: int | None,
        max_running_requests: int = 64,
        kv_cache_bytes: int | None = None,
        max_adapter_rank: int | None = None,
    ) -> None:
        config = model.config.get_text_config(decoder=True)
        self.model = model
        self.max_model_tokens = _context_length(model.config, max_model_tokens)
        _refuse_other_layers(model, config, self.max_model_tokens)
        parameter = next(model.parameters())
        self.device: torch.device = parameter.device
        self.vocabulary: int = int(model.get_input_embeddings().weight.shape[0])
        self._dtype = parameter.dtype
        self.cache = KVCache(
            layers=config.num_hidden_layers,
            kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            dtype=self._dtype,
            device=self.device,
            max_model_tokens=self.max_model_tokens,
            max_rows=max_running_requests,
            memory_bytes=kv_cache_bytes,
        )
        self.adapters = Adapters(model, max_rank=max_adapter_rank)
        self._sampled: torch.Tensor | None = None
        head = model.get_output_embeddings()
        if head is not None:
            head.register_forward_pre_hook(self._only_sampled)
        self._tables: list[Part] = []
        self._columns = torch.arange(0, device=self.device)
        self._bias = torch.tensor([0.0, -torch.inf], dtype=self._dtype, device=self.device)

    def _only_sampled(self, _: object, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        """Hand the head only the positions after which a token is sampled or scored: other logits are not used."""
        return None if self._sampled is None else (inputs[0][:, self._sampled], *inputs[1:])

    def read(self, step: Step) -> torch.Tensor:
        """Read the step's tokens in one pass; return logits [S, V] for ``step.rows``, then for its scored places."""
        device, ready, cache = self.device, step.ready, self.cache
        tokens = [row.tokens[-1] for row in ready]
        positions = [row.cached for row in ready]
        adapters = [row.adapter for row in ready]
        blocks = [row.blocks[row.cached // BLOCK_TOKENS] for row in ready]
        sampled, scored = list(range(len(ready))), list[int]()
        parts: list[Part] = []
        for chunk in step.prefills:
            row, begin, end = chunk.row, chunk.row.cached, chunk.row.cached + chunk.tokens
            parts += cache.chunk_parts(row.blocks, begin=len(tokens), cached=begin, tokens=chunk.tokens)
            scored += range(len(tokens), len(tokens) + len(chunk.scored))
            tokens += row.tokens[begin:end]
            positions += range(begin, end)
            adapters += [row.adapter] * (end - begin)
            blocks += [row.blocks[at // BLOCK_TOKENS] for at in range(begin, end)]
            if chunk.completes:
                sampled.append(len(tokens) - 1)
        at = torch.tensor(positions, device=device)
        parts = self._decode_parts(step, at) + parts
        cache.current = Pass(cache.places(torch.tensor(blocks, device=device), at), parts)
        self._sampled = torch.tensor(sampled + scored, dtype=torch.int64, device=device)
        try:
            with self.adapters.of_pass(adapters):
                logits: torch.Tensor = self.model(
                    input_ids=torch.tensor([tokens], device=device),
                    position_ids=at[None],
                    past_key_values=cache,
                    use_cache=True,
                    kv_cache=cache,
                ).logits[0]
        finally:
            self._sampled = cache.current = None
        return logits

    def _decode_parts(self, step: Step, positions: torch.Tensor) -> list[Part]:
        if step.changed or step.taken:
            self._tables = self.cache.decode_parts([row.blocks for row in step.ready])
        parts = []
        for part in self._tables:
            assert part.table is not None
            width = part.table.shape[1] * BLOCK_TOKENS
            if width > len(self._columns):
                self._columns = torch.arange(2 * width, device=self.device)
            seen = self._columns[:width] <= positions[part.begin : part.end, None, None, None]
            parts.append(Part(part.begin, part.end, part.table, torch.where(seen, self._bias[0], self._bias[1])))
        return parts

    def check(self) -> None:
        """Prove that prefill, a chunk that continues a row, and decode steps equal one plain forward pass.

        Raises:
            EngineError: they do not, so the engine cannot serve the model.
        """
        length = min(_PROBE_TOKENS, self.max_model_tokens)
        ids = torch.arange(1, length + 1, device=self.device) % self.vocabulary
        plain = self.model(input_ids=ids[None], use_cache=False).logits[0].float().log_softmax(-1)
        tolerance = (1e-3 if self._dtype == torch.float32 else 0.25) * (1.0 + float(plain.abs().max()))
        self.model.set_attn_implementation(ATTENTION)
        rows = [_probe_row(ids[:known].tolist(), length=length) for known in (max(length // 2, 1), 1)]
        free = list(range(1, self.cache.blocks))
        for row in rows:
            row.blocks = [free.pop() for _ in range(-(-length // BLOCK_TOKENS))]
        worst = 0.0

        def compare(step: Step) -> None:
            nonlocal worst
            sampled = step.rows
            logits = self.read(step).float().log_softmax(-1)
            for row in step.ready:
                row.cached += 1
            for chunk in step.prefills:
                chunk.row.cached += chunk.tokens
            for row, got in zip(sampled, logits, strict=True):
                worst = max(worst, float((plain[row.cached - 1] - got).abs().nan_to_num(torch.inf).max()))

        compare(Step(prefills=[Chunk(row, row.pending) for row in rows]))
        further = min(2, length - 1)
        rows[1].tokens.extend(ids[1 : 1 + further].tolist())
        compare(Step(prefills=[Chunk(rows[1], further)]))
        while rows[1].cached < length:
            unfinished = [row for row in rows[::-1] if row.cached < length]
            for row in unfinished:
                row.tokens.append(int(ids[row.cached]))
            compare(Step(ready=unfinished))
        self.cache.give_back([block for row in rows for block in row.blocks])
        if not worst <= tolerance or self.cache.updates % self.cache.layers_cached:
            raise EngineError(
                f"{type(self.model).__name__} cannot be served by the transformers engine: its cached decoding differs "
                f"from its plain forward pass by {worst:.2g} nats (allowed {tolerance:.2g}); it needs full attention "
                f"through past_key_values in every layer"
            )


def _probe_row(tokens: list[int], *, length: int) -> Row:
    return Row(
        request_id="",
        tokens=tokens,
        prompt_length=len(tokens),
        length_limit=length,
        sampling=SamplingParams(max_new_tokens=1),
        seed=0,
    )


def _context_length(settings: Any, wanted: int | None) -> int:
    own = getattr(settings.get_text_config(decoder=True), "max_position_embeddings", None)
    most, what = own, "the model's context"
    change = rotary_change(settings)
    if change is not None and (own is None or change.tokens < own):
        most = change.tokens
        what = f"beyond which the model's rotary positions ({change.kind}) are others, for all rows of a pass"
    if wanted is None:
        if most is None:
            raise ConfigError(
                "the model's config has no max_position_embeddings: give max_model_tokens", path="max_model_tokens"
            )
        if most != own:
            _log.warning("serving at most %d tokens, %s", most, what)
        return int(most)
    if wanted < 2 or (most is not None and wanted > most):
        raise ConfigError(
            f"max_model_tokens must lie in 2..{most}, {what}, got {wanted}",
            path="max_model_tokens",
            remedy=f"2..{most}",
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


def load(
    model_path: str,
    *,
    dtype: torch.dtype,
    device: str,
    max_model_tokens: int | None,
    max_running_requests: int,
    kv_cache_bytes: int | None,
    max_adapter_rank: int | None = None,
) -> tuple[Decoder, ModelTokens]:
    """Load a model with its tokenizer, and prove that it can be served.

    Raises:
        EngineError: it cannot be loaded, or not be served.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        with model_loading_lock:
            model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype)
        model = model.to(device).eval().requires_grad_(False)
    except (OSError, ValueError, RuntimeError, ImportError, KeyError) as error:
        raise EngineError(f"cannot load {model_path} on {device}: {type(error).__name__}: {error}") from error
    decoder = Decoder(
        model,
        max_model_tokens=max_model_tokens,
        max_running_requests=max_running_requests,
        kv_cache_bytes=kv_cache_bytes,
        max_adapter_rank=max_adapter_rank,
    )
    with torch.inference_mode():
        try:
            decoder.check()
        except AsyncRLError:
            raise
        except Exception as error:
            raise EngineError(
                f"{type(model).__name__} cannot be served by the transformers engine: {type(error).__name__}: {error}"
            ) from error
    tokens = ModelTokens(
        model_path,
        load_tokenizer(model_path),
        eos_token_ids=[getattr(model.generation_config, "eos_token_id", None)],
        vocabulary=decoder.vocabulary,
        max_model_tokens=decoder.max_model_tokens,
    )
    return decoder, tokens
