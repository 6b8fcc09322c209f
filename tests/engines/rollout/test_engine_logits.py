"""Penalties, biases and bans on the three engines: one law, and log-probs of the distribution sampled from."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from msgspec.structs import replace

from asyncrl.errors import ContinuationError, InvalidDataError
from asyncrl.interfaces import Generation, GenerationRequest, RolloutEngine
from engines.rollout.logits import LogitRules
from engines.rollout.remote.engine import RemoteEngine
from engines.rollout.transformers.engine import TransformersEngine
from engines.training.scratch import make_scratch_model

Collect = Callable[..., Any]
RequestOf = Callable[..., GenerationRequest]

ROOT = Path(__file__).parents[3]
SAID = [{"role": "user", "content": "how old are you, and of which colour?"}, {"role": "assistant", "content": "red"}]
PROMPT = [20, 21, 22, 20]
pytestmark = pytest.mark.asyncio(loop_scope="module")


def hosted(name: str, **options: Any) -> Any:
    python = os.environ.get(f"ASYNCRL_{name.upper()}_PYTHON") or str(ROOT / f".venv-{name}/bin/python")
    missing = pytest.mark.skipif(shutil.which(python) is None, reason=f"no {name} at {python}: asyncrl engine install")
    marks = [getattr(pytest.mark, name), missing, pytest.mark.timeout(400)]
    return pytest.param((name, python, options), marks=marks, id=name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    make_scratch_model(
        folder, conversations=[SAID], heads=2, hidden_size=64, layers=2, intermediate_size=96, initializer_range=0.3
    )
    return str(folder)


@pytest_asyncio.fixture(
    loop_scope="module",
    scope="module",
    params=[
        pytest.param(("transformers", "", {}), id="transformers"),
        hosted("vllm", kv_cache_bytes=64 << 20),
        hosted("sglang", device="cpu", kv_cache_tokens=4096),
    ],
)
async def served(request: pytest.FixtureRequest, folder: str) -> AsyncIterator[tuple[str, RolloutEngine]]:
    name, python, options = request.param
    engine: Any = TransformersEngine(folder, device="cpu", threads=1)
    if python:
        path = {"vllm": "engines.rollout.vllm.engine:VLLMEngine"}
        path |= {"sglang": "engines.rollout.sglang.engine:SGLangEngine"}
        engine = RemoteEngine(folder, engine=path[name], python=python, dtype="float32", threads=1, options=options)
    await engine.start()
    yield name, engine
    await engine.close()


class Reference:
    """The model and tokenizer, and the log-probs of sampled tokens in plain Python."""

    def __init__(self, folder: str, plain_logits: Any, truncated_log_prob: Any) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.end = int(self.tokenizer.eos_token_id)
        self._plain_logits, self._log_prob = plain_logits, truncated_log_prob

    def spellings(self, words: tuple[str, ...]) -> list[list[int]]:
        made = []
        for word in words:
            bare, spaced = (self.tokenizer.encode(text, add_special_tokens=False) for text in (word, f" {word}"))
            made += [bare, *([spaced] if len(spaced) == len(bare) and spaced[0] != bare[0] else [])]
        return made

    def log_probs(self, asked: GenerationRequest, tokens: tuple[int, ...]) -> list[float]:
        sampling, first = asked.sampling, len(asked.prompt_token_ids) - asked.continued_tokens
        everything = [*asked.prompt_token_ids, *tokens]
        rules = LogitRules(sampling, first, [self.end, *sampling.stop_token_ids], self.spellings(sampling.bad_words))
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([everything]), use_cache=False).logits[0].double().tolist()
        return [
            self._log_prob(
                self._plain_logits(logits[at - 1], everything[:first], everything[first:at], rules),
                everything[at],
                sampling,
            )
            for at in range(len(asked.prompt_token_ids), len(everything))
        ]


@pytest.fixture(scope="module")
def reference(folder: str, plain_logits: Any, truncated_log_prob: Any) -> Reference:
    return Reference(folder, plain_logits, truncated_log_prob)


END = 1
WAYS: list[dict[str, Any]] = [
    {"min_p": 0.1},
    {"min_p": 0.05, "temperature": 1.7, "top_p": 0.9},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -1.0, "top_k": 20},
    {"repetition_penalty": 1.8},
    {"logit_bias": ((5, 4.0), (20, -100.0), (30, 3.5))},
    {"allowed_token_ids": (5, 6, 7, 30), "temperature": 0.5},
    {"bad_words": ("red", "are you", "o")},
    {"min_tokens": 12, "logit_bias": ((END, 100.0),)},
    {"ignore_eos": True, "logit_bias": ((END, 12.0),)},
    {"repetition_penalty": 0.7, "presence_penalty": -0.5, "frequency_penalty": 0.3, "logit_bias": ((9, 2.0),)},
]


async def test_log_probs_are_those_of_the_distribution_sampled_from(
    served: tuple[str, RolloutEngine], reference: Reference, collect: Collect, request_of: RequestOf
) -> None:
    _, engine = served
    ways = [*WAYS, *({**way, "temperature": 0.0} for way in WAYS), {}, {"temperature": 0.0}]
    asked = [request_of(number, PROMPT, 24, seed=number, **way) for number, way in enumerate(ways)]
    answers: list[Generation] = await asyncio.gather(*(collect(engine, each) for each in asked))
    for request, got in zip(asked, answers, strict=True):
        sampling, tokens = request.sampling, got.token_ids
        assert got.log_probs == pytest.approx(reference.log_probs(request, tokens), abs=1e-4), sampling
        assert set(tokens) <= set(sampling.allowed_token_ids or tokens)
        assert not sampling.min_tokens or (len(tokens), tokens[-1], got.finish_reason) == (13, END, "stop")
        assert not sampling.ignore_eos or (len(tokens), END in tokens) == (24, True)


async def test_a_row_that_was_begun_elsewhere_counts_what_it_has(
    served: tuple[str, RolloutEngine], reference: Reference, collect: Collect, request_of: RequestOf
) -> None:
    name, engine = served
    for number, way in enumerate(
        ({"frequency_penalty": 1.5}, {"repetition_penalty": 1.5}, {"bad_words": ("are you",)})
    ):
        asked = request_of(f"whole {number}", PROMPT, 24, temperature=0.0, ignore_eos=True, min_tokens=3, **way)
        whole: Generation = await collect(engine, asked)
        begun = replace(
            asked,
            request_id=f"begun {number}",
            prompt_token_ids=(*PROMPT, *whole.token_ids[:9]),
            continued_tokens=9,
        )
        if name == "vllm" and "repetition_penalty" not in way:
            with pytest.raises(ContinuationError, match=f"begun with {next(iter(way))}"):
                await collect(engine, begun)
            continue
        rest: Generation = await collect(engine, begun)
        assert rest.token_ids == whole.token_ids[9:]
        assert rest.log_probs == pytest.approx(whole.log_probs[9:], abs=1e-4)


async def test_a_row_without_a_token_left_ends_with_an_error(
    served: tuple[str, RolloutEngine], reference: Reference, collect: Collect, request_of: RequestOf
) -> None:
    _, engine = served
    for temperature in (0.0, 1.0):
        asked = request_of(
            f"none {temperature}",
            PROMPT,
            8,
            temperature=temperature,
            allowed_token_ids=(reference.end,),
            min_tokens=4,
        )
        beside = asyncio.ensure_future(collect(engine, request_of(f"beside {temperature}", PROMPT, 8, ignore_eos=True)))
        with pytest.raises(InvalidDataError, match="allowed_token_ids, min_tokens together forbid every token after 0"):
            await collect(engine, asked)
        assert len((await beside).token_ids) == 8
    for field, wrong in (("logit_bias", ((10**6, 1.0),)), ("allowed_token_ids", (5, 10**6))):
        with pytest.raises(InvalidDataError, match=f"{field} of request .* names token id 1000000"):
            await collect(engine, request_of("outside", PROMPT, 8, **{field: wrong}))


async def test_a_grammar_leaves_what_the_other_rules_leave(
    served: tuple[str, RolloutEngine], reference: Reference, collect: Collect, request_of: RequestOf
) -> None:
    _, engine = served
    letter = {each: reference.tokenizer.encode(each, add_special_tokens=False)[0] for each in "abc"}
    asked = request_of(
        "letters",
        PROMPT,
        24,
        grammar="start: /[abc]{4}/",
        min_tokens=20,  # a complete text ends all the same
        bad_words=("a",),
        logit_bias=((letter["b"], 100.0),),
        frequency_penalty=2.0,
    )
    got: Generation = await collect(engine, asked)
    assert (got.token_ids, got.finish_reason) == ((*[letter["b"]] * 4, END), "stop")
    assert got.log_probs == pytest.approx([0.0] * 5, abs=1e-4)
    none = replace(asked, request_id="none", sampling=replace(asked.sampling, bad_words=("a", "b", "c")))
    with pytest.raises(InvalidDataError, match="frequency_penalty, the grammar together forbid every token"):
        await collect(engine, none)
