"""Constrained sampling: what a grammar allows, the log-probs of what is left, and the likeliest tokens."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import msgspec
import pytest
import torch
from msgspec.structs import replace

from asyncrl.errors import ContinuationError, InvalidDataError
from asyncrl.interfaces import Generation, GenerationRequest, SamplingParams, Tool
from asyncrl.serve.chat import calls_grammar, json_grammar
from engines.rollout.remote.protocol import Chunk, EngineMessage
from engines.rollout.request import ModelTokens
from engines.rollout.sglang.engine import SGLangEngine
from engines.rollout.transformers.engine import TransformersEngine
from engines.rollout.transformers.sampling import Sampler
from engines.rollout.vllm.engine import VLLMEngine
from engines.training.scratch import make_scratch_model

SCHEMA = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["age", "tags"],
    "additionalProperties": False,
}
CHAT = [{"role": "user", "content": "how old are you, and of which colour?"}, {"role": "assistant", "content": "red"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("scratch")
    make_scratch_model(made, conversations=[CHAT], hidden_size=32, layers=1, initializer_range=0.4)
    return made


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[TransformersEngine]:
    made = TransformersEngine(str(folder), device="cpu", threads=1)
    await made.start()
    yield made
    await made.close()


def asked(grammar: str, *, seed: int = 1, tokens: int = 300, **sampling: Any) -> GenerationRequest:
    params = SamplingParams(max_new_tokens=tokens, grammar=grammar, seed=seed, **sampling)
    return GenerationRequest(request_id=f"{grammar}{seed}", prompt_token_ids=(20, 21, 22), sampling=params)


async def run(engine: TransformersEngine, request: GenerationRequest) -> Generation:
    chunks = [chunk async for chunk in engine.generate(request)]
    return Generation(
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        log_probs=tuple(each for chunk in chunks for each in chunk.log_probs),
        weight_versions=tuple(each for chunk in chunks for each in chunk.weight_versions),
        finish_reason=chunks[-1].finish_reason or "abort",
        top_log_probs=tuple(top for chunk in chunks for top in chunk.top_log_probs),
    )


def text_of(engine: TransformersEngine, tokens: tuple[int, ...]) -> str:
    assert engine._model_tokens is not None
    return str(engine._model_tokens.tokenizer.decode(list(tokens), skip_special_tokens=True))


@pytest.mark.parametrize(
    "sampling",
    [
        *({}, {"temperature": 0.0}, {"temperature": 2.0, "top_k": 7}, {"top_p": 0.3}),
        {"stop_token_ids": (1 << 20, -1)},  # no tokens of the model: they end nothing
    ],
)
async def test_json_of_a_schema(engine: TransformersEngine, sampling: dict[str, Any]) -> None:
    for seed in range(4):
        made = await run(engine, asked(json_grammar(SCHEMA), seed=seed, **sampling))
        assert made.finish_reason == "stop"
        jsonschema.validate(json.loads(text_of(engine, made.token_ids)), SCHEMA)
        assert all(each <= 0.0 for each in made.log_probs)


async def test_calls_of_tools(engine: TransformersEngine) -> None:
    tools = [Tool(name=name, description="", parameters=SCHEMA) for name in ("f", 'g "1"')]
    for seed in range(3):
        made = await run(engine, asked(calls_grammar(tools, several=False), seed=seed))
        text = text_of(engine, made.token_ids)
        assert text.startswith("<tool_call>\n")
        assert text.endswith("\n</tool_call>")
        call = json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
        assert call["name"] in ("f", 'g "1"')
        jsonschema.validate(call["arguments"], SCHEMA)


async def test_log_probs_are_of_what_the_grammar_left(engine: TransformersEngine, folder: Path) -> None:
    """Compute each position again: try every token of the vocabulary, and take the softmax of the allowed ones."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    words = ["red", "reddish", "green"]
    assert engine._model_tokens is not None
    stops = sorted(engine._model_tokens.stop_token_ids)
    spelling = [text_of(engine, (token,)) for token in range(model.config.vocab_size)]
    for seed in range(5):
        request = asked('start: "red" | "reddish" | "green"', seed=seed, top_log_probs=3, temperature=1.5)
        made = await run(engine, request)
        assert text_of(engine, made.token_ids) in words
        with torch.no_grad():
            ids = torch.tensor([[*request.prompt_token_ids, *made.token_ids]])
            rows = model(input_ids=ids).logits[0, len(request.prompt_token_ids) - 1 : -1].double() / 1.5
        text = ""
        for row, token, log_prob, top in zip(rows, made.token_ids, made.log_probs, made.top_log_probs, strict=True):
            may = [t for t, piece in enumerate(spelling) if piece and any(w.startswith(text + piece) for w in words)]
            may += stops if text in words else []
            total = math.log(sum(math.exp(row[t]) for t in may))
            assert token in may
            assert log_prob == pytest.approx(float(row[token]) - total, abs=1e-4)
            likeliest = sorted(may, key=lambda t, row=row: -float(row[t]))[:3]
            assert [t for t, _ in top] == likeliest
            assert [value for _, value in top] == pytest.approx([float(row[t]) - total for t in likeliest], abs=1e-4)
            text += spelling[token]


async def test_a_request_that_moves_goes_on_within_its_grammar(engine: TransformersEngine) -> None:
    whole = await run(engine, asked(json_grammar(SCHEMA), seed=3))
    for cut in (1, 5, len(whole.token_ids) - 1):
        request = asked(json_grammar(SCHEMA), seed=3)
        moved = replace(
            request, prompt_token_ids=(*request.prompt_token_ids, *whole.token_ids[:cut]), continued_tokens=cut
        )
        rest = await run(engine, moved)
        assert rest.token_ids == whole.token_ids[cut:]
        assert rest.log_probs == pytest.approx(whole.log_probs[cut:], abs=1e-5)


async def test_rows_with_and_without_a_grammar_side_by_side(engine: TransformersEngine) -> None:
    import asyncio

    free = replace(asked("", tokens=40), request_id="free")
    alone = await run(engine, free)
    beside, made = await asyncio.gather(run(engine, free), run(engine, asked(json_grammar(SCHEMA))))
    assert beside.token_ids == alone.token_ids
    json.loads(text_of(engine, made.token_ids))


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ("start: nothing", "unknown name"),
        (json_grammar({"type": "nonsense"}), "nonsense"),
        (json_grammar({"$ref": "http://127.0.0.1/x"}), "does not fetch"),
        ("this is no grammar", "cannot be followed"),
    ],
)
async def test_invalid_grammars_are_refused(engine: TransformersEngine, grammar: str, why: str) -> None:
    with pytest.raises(InvalidDataError, match=why):
        await run(engine, asked(grammar))
    assert engine.statistics().running == engine.statistics().waiting == 0


async def test_without_a_tokenizer_there_are_no_grammars(folder_of: Callable[..., Path]) -> None:
    engine = TransformersEngine(str(folder_of()), device="cpu", threads=1)
    await engine.start()
    with pytest.raises(InvalidDataError, match="no tokenizer"):
        await run(engine, asked('start: "a"'))
    await engine.close()


def test_the_likeliest_tokens_are_returned_where_asked_for() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.2, 0.5, 0.3]]).log()
    params = [
        SamplingParams(max_new_tokens=1, top_log_probs=2),
        SamplingParams(max_new_tokens=1),
        SamplingParams(max_new_tokens=1, top_log_probs=9, top_k=2),
    ]
    sampler = Sampler(params, seeds=[1, 2, 3], counters=[0] * 3, vocabulary=3, device=torch.device("cpu"))
    first, second, third = sampler.sample(logits).top_log_probs
    assert first is not None
    assert [token for token, _ in first] == [0, 1]
    assert [math.exp(value) for _, value in first] == pytest.approx([0.5, 0.3])
    assert second is None
    assert third is not None
    assert [math.exp(value) for _, value in third] == pytest.approx([0.625, 0.375])  # of the two that top-k left


async def test_what_engines_refuse_before_their_vendor_sees_it() -> None:
    def wishing(**wish: Any) -> GenerationRequest:
        return replace(asked(""), sampling=SamplingParams(max_new_tokens=1, **wish))

    bare = ModelTokens("model", None, vocabulary=100, max_model_tokens=100)
    for wish, why in (
        ({"grammar": "start: /a/"}, "a grammar, but model has no tokenizer"),
        ({"stop": ("a",)}, "stop strings, but model has no tokenizer"),
    ):
        with pytest.raises(InvalidDataError, match=why):
            bare.check(wishing(**wish), held=())
    with pytest.raises(InvalidDataError, match="the sglang engine does not return"):
        SGLangEngine("model")._check(wishing(top_log_probs=2, top_p=0.5), bare)
    vllm = VLLMEngine("model")
    texts: Any = SimpleNamespace(tokens=SimpleNamespace(check=lambda request, held: None))
    vllm._started = texts
    begun = replace(wishing(grammar="start: /a/"), continued_tokens=1)
    with pytest.raises(ContinuationError, match="begun with grammar by"):
        await anext(vllm.generate(begun))


def test_the_likeliest_tokens_pass_between_processes() -> None:
    chunk = Chunk(1, (7,), (-0.5,), (3,), "stop", None, (((7, -0.5), (8, -1.5)),))
    assert msgspec.msgpack.Decoder(EngineMessage).decode(msgspec.msgpack.encode(chunk)) == chunk
