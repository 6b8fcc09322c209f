"""Grammars on vLLM and SGLang, beside the embedded engine: the same tokens, and the log-probs of what was left."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from asyncrl.errors import ContinuationError, InvalidDataError
from asyncrl.interfaces import Generation, GenerationRequest
from asyncrl.serve.chat import json_grammar
from engines.rollout.remote.engine import RemoteEngine
from engines.rollout.transformers.engine import TransformersEngine
from engines.training.scratch import make_scratch_model

ROOT = Path(__file__).parents[3]
SAID = [{"role": "user", "content": "how old are you, and of which colour?"}, {"role": "assistant", "content": "red"}]
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 150}, "of": {"enum": ["red", "green"]}},
    "required": ["age", "of"],
    "additionalProperties": False,
}


def engine(name: str, **options: Any) -> Any:
    python = os.environ.get(f"ASYNCRL_{name.upper()}_PYTHON") or str(ROOT / f".venv-{name}/bin/python")
    missing = pytest.mark.skipif(shutil.which(python) is None, reason=f"no {name} at {python}: asyncrl engine install")
    marks = [getattr(pytest.mark, name), missing, pytest.mark.timeout(400)]
    return pytest.param(name, python, options, marks=marks, id=name)


@pytest.mark.parametrize(
    ("name", "python", "options"),
    [engine("vllm", kv_cache_bytes=64 << 20), engine("sglang", device="cpu", kv_cache_tokens=4096)],
)
async def test_a_grammar_is_followed(
    name: str,
    python: str,
    options: dict[str, Any],
    tmp_path: Path,
    collect: Callable[..., Any],
    request_of: Callable[..., GenerationRequest],
) -> None:
    folder = str(tmp_path / "model")
    make_scratch_model(
        Path(folder),
        conversations=[SAID],
        heads=2,
        hidden_size=64,
        layers=2,
        intermediate_size=96,
        initializer_range=0.3,
    )
    local = TransformersEngine(folder, device="cpu", threads=1)
    await local.start()
    path = {"vllm": "engines.rollout.vllm.engine:VLLMEngine", "sglang": "engines.rollout.sglang.engine:SGLangEngine"}
    hosted = RemoteEngine(folder, engine=path[name], python=python, dtype="float32", threads=1, options=options)
    await hosted.start()
    try:
        never = (1 << 20,)  # no token of the model: it ends nothing
        asked = request_of(
            "json", [20, 21, 22], 120, grammar=json_grammar(SCHEMA), temperature=0.0, stop_token_ids=never
        )
        expected: Generation = await collect(local, asked)
        got: Generation = await collect(hosted, asked)
        assert got.finish_reason == expected.finish_reason == "stop"
        assert got.token_ids == expected.token_ids
        assert got.log_probs == pytest.approx(expected.log_probs, abs=1e-4)

        # Begun elsewhere: SGLang goes on in the middle of the grammar, vLLM refuses.
        begun = replace(
            asked,
            request_id="begun",
            prompt_token_ids=(*asked.prompt_token_ids, *expected.token_ids[:6]),
            continued_tokens=6,
        )
        if name == "sglang":
            assert (await collect(hosted, begun)).token_ids == expected.token_ids[6:]
        else:
            with pytest.raises(ContinuationError, match="begun with grammar by"):
                await collect(hosted, begun)
            likeliest = request_of("top", [20, 21], 4, temperature=0.7, top_k=5, top_log_probs=3, seed=1)
            sampled = 0
            async for chunk in hosted.generate(likeliest):
                for token, log_prob, top in zip(chunk.token_ids, chunk.log_probs, chunk.top_log_probs, strict=True):
                    assert len(top) == 3
                    assert [each for _, each in top] == sorted((each for _, each in top), reverse=True)
                    assert dict(top).get(token, log_prob) == pytest.approx(log_prob)
                    sampled += 1
            assert sampled == 4
        with pytest.raises(InvalidDataError, match="cannot be followed"):
            await collect(hosted, request_of("none", [20], 5, grammar="this is no grammar"))
        assert (await collect(hosted, request_of("free", [20], 5))).token_ids
    finally:
        await hosted.close()
        await local.close()
