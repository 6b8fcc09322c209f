"""The forward pass over slots: which models are served, and which are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from asyncrl.errors import ConfigError, EngineError
from engines.rollout.embedded.decoder import Decoder
from engines.rollout.embedded.slot_cache import CacheGeometry, SlotCache

ModelOf = Callable[..., Any]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_families_that_are_served(model_of: ModelOf, kind: str, dtype: torch.dtype) -> None:
    decoder = Decoder(model_of(kind, seed=0).to(dtype), max_model_tokens=None)
    assert decoder.max_model_tokens == 256
    with torch.inference_mode():
        decoder.check()
    assert decoder.cache.slots == 0, "the check leaves nothing behind"


def test_a_recurrent_model_is_refused() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(vocab_size=16, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(EngineError, match="MambaForCausalLM keeps a recurrent state"):
        Decoder(model, max_model_tokens=32)


def test_a_window_that_rows_can_outgrow_is_refused(model_of: ModelOf) -> None:
    model = model_of("mistral", seed=0, sliding_window=16)
    with pytest.raises(EngineError, match="attends through a window of 16 tokens"):
        Decoder(model, max_model_tokens=None)
    decoder = Decoder(model, max_model_tokens=16)
    with torch.inference_mode():
        decoder.check()


def test_some_layers_with_a_window(model_of: ModelOf) -> None:
    model = model_of("qwen2", seed=0, use_sliding_window=True, sliding_window=16, max_window_layers=1)
    with pytest.raises(EngineError, match="window of 16"):
        Decoder(model, max_model_tokens=None)


def test_a_model_that_does_not_use_the_cache_as_told_is_caught(model_of: ModelOf) -> None:
    model = model_of("llama", seed=0)
    rotary = model.model.rotary_emb
    ordinary = rotary.forward
    # Positions are ignored, as by a model that counts them itself.
    rotary.forward = lambda x, position_ids: ordinary(x, torch.arange(x.shape[1])[None])
    decoder = Decoder(model, max_model_tokens=None)
    with torch.inference_mode(), pytest.raises(EngineError, match="differs from its plain forward pass"):
        decoder.check()


@pytest.mark.parametrize("tokens", [1, 257])
def test_a_context_the_model_does_not_have(model_of: ModelOf, tokens: int) -> None:
    with pytest.raises(ConfigError, match=r"must lie in 2\.\.256"):
        Decoder(model_of("llama", seed=0), max_model_tokens=tokens)


def geometry(max_tokens: int) -> CacheGeometry:
    return CacheGeometry(
        layers=1, kv_heads=1, head_dim=1, dtype=torch.float32, device=torch.device("cpu"), max_tokens=max_tokens
    )


def write(cache: SlotCache, slot: int, values: list[float]) -> None:
    index = slot * cache.capacity + torch.arange(len(values))
    cache.read_slots(slice(slot, slot + 1), index=index, tokens=len(values))
    states = torch.tensor(values).view(1, 1, -1, 1)
    keys, _ = cache.update(states, -states, 0)
    assert keys.flatten().tolist() == values


def read(cache: SlotCache, slot: int, tokens: int) -> list[float]:
    cache.read_slots(slice(slot, slot + 1), index=torch.empty(0, dtype=torch.int64), tokens=tokens)
    nothing = torch.empty(1, 1, 0, 1)
    keys, values = cache.update(nothing, nothing, 0)
    assert torch.equal(keys, -values)
    result: list[float] = keys.flatten().tolist()
    return result


def test_slots_grow_on_demand_and_keep_what_they_hold() -> None:
    cache = SlotCache(geometry(1000))
    assert (cache.slots, cache.capacity) == (0, 0)
    cache.reserve(slots=2, tokens=3)
    assert (cache.slots, cache.capacity) == (8, 64)
    write(cache, 1, [1.0, 2.0, 3.0])
    cache.reserve(slots=9, tokens=65)
    assert (cache.slots, cache.capacity) == (16, 128)
    assert read(cache, 1, 3) == [1.0, 2.0, 3.0]
    cache.reserve(slots=1, tokens=900)
    assert cache.capacity == 1000
    assert read(cache, 1, 3) == [1.0, 2.0, 3.0]


def test_moves_happen_all_at_once() -> None:
    cache = SlotCache(geometry(64))
    cache.reserve(slots=3, tokens=2)
    for slot in range(3):
        write(cache, slot, [10.0 + slot, 20.0 + slot])
    cache.move([0, 1, 2], [1, 2, 0], tokens=2)
    assert [read(cache, slot, 2) for slot in range(3)] == [[12.0, 22.0], [10.0, 20.0], [11.0, 21.0]]
