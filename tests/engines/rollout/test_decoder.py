"""The forward pass over a paged cache: which models are served, and which are refused."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.errors import ConfigError, EngineError
from engines.rollout.transformers.decoder import Decoder
from engines.rollout.transformers.kv_cache import KVCache, Pass

ModelOf = Callable[..., Any]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_families_that_are_served(model_of: ModelOf, kind: str, dtype: torch.dtype) -> None:
    decoder = Decoder(model_of(kind, seed=0).to(dtype), max_model_tokens=None)
    assert decoder.max_model_tokens == 256
    with torch.inference_mode():
        decoder.check()


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


def test_a_model_that_does_not_use_the_cache_is_refused(model_of: ModelOf) -> None:
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


def test_no_row_reaches_where_rotary_positions_change(model_of: ModelOf, caplog: pytest.LogCaptureFixture) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [9.0] * 4, "factor": 8.0}
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": 32, **factors}
    decoder = Decoder(model_of("llama", seed=0, rope_parameters=rope), max_model_tokens=None)
    assert decoder.max_model_tokens == 32
    assert "at most 32 tokens, beyond which the model's rotary positions (longrope) are others" in caplog.text
    with torch.inference_mode():
        decoder.check()
    with pytest.raises(ConfigError, match=r"must lie in 2\.\.32, beyond which"):
        Decoder(model_of("llama", seed=0, rope_parameters=rope), max_model_tokens=33)


@pytest.fixture
def cache() -> KVCache:
    return KVCache(
        layers=1,
        kv_heads=64,
        head_dim=64,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_tokens=64,
        max_rows=7,
        memory_bytes=None,
    )


def test_a_cache_holds_what_rows_can_fill_at_most(cache: KVCache) -> None:
    assert cache.block_bytes == 2 * 16 * 64 * 64 * 4
    assert cache.capacity_tokens == 8 * 64  # one row more: the health probe


def test_a_cache_that_does_not_hold_one_row_is_refused(model_of: ModelOf) -> None:
    with pytest.raises(ConfigError, match="does not hold one request of 256 tokens; at least 69632, or"):
        Decoder(model_of("llama", seed=0), max_model_tokens=None, kv_cache_bytes=69631)
    assert Decoder(model_of("llama", seed=0), max_model_tokens=None, kv_cache_bytes=69632).cache.blocks == 17


@pytest.mark.parametrize("context", [16, 17, 40, 64, 100])
def test_the_least_cache_suffices_for_the_check(model_of: Callable[..., Any], context: int) -> None:
    with pytest.raises(ConfigError, match="at least") as refused:
        Decoder(model_of("llama", seed=0), max_model_tokens=context, kv_cache_bytes=1)
    least = int(refused.value.remedy.split()[-1])
    Decoder(model_of("llama", seed=0), max_model_tokens=context, kv_cache_bytes=least).check()


def held_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_blocks_take_memory_when_written_and_return_it_when_freed(cache: KVCache) -> None:
    before = held_bytes()
    blocks = list(range(1, 33))
    cache.current = Pass(cache.places(torch.tensor(blocks).repeat_interleave(16), torch.arange(512)), ())
    states = torch.ones(1, 64, 512, 64)
    ours = held_bytes()
    cache.update(states, states, 0)
    assert 15 << 20 <= held_bytes() - ours <= 34 << 20  # 16 MiB; and what torch keeps of the copies
    cache.give_back(blocks[:16])
    cache.give_back(blocks[:15:-1])
    assert held_bytes() - before <= 27 << 20
    stored = cache._storage.view(cache.blocks, -1)
    assert not stored[blocks].any(), "what is freed is zero"


def test_rows_of_like_length_are_read_together(cache: KVCache) -> None:
    def tables(*lengths: int) -> list[list[int]]:
        return [[1] * length for length in lengths]

    def shapes(*lengths: int) -> list[tuple[int, ...]]:
        parts = cache.decode_parts(tables(*lengths))
        assert [part.begin for part in parts] == [0, *(part.end for part in parts)][:-1]
        return [tuple(part.table.shape) for part in parts if part.table is not None]

    assert shapes() == []
    assert shapes(1, 1, 1) == [(3, 1)]
    assert shapes(10, 11, 12, 190, 200) == [(3, 12), (2, 200)]
    assert shapes(1, 2, 3, 4, 5, 6, 7) == [(1, 1), (2, 3), (3, 6), (1, 7)]
    assert shapes(600, 600) == [(1, 600), (1, 600)], "what is gathered at once is bounded"
