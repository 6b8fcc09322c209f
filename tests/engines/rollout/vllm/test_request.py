"""Tokens, versions and finish reasons of vLLM's outputs, with fake outputs."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.errors import EngineError, InvalidDataError
from asyncrl.interfaces import GenerationChunk, GenerationRequest, SamplingParams
from engines.rollout.request import ModelTokens
from engines.rollout.vllm.request import VLLMRequest


def text_of(tokens: Any) -> str:
    return "".join(chr(ord("a") + token) for token in tokens)


async def held(*, continued: tuple[int, ...] = (), tokens: int = 10, room: int = 64, **sampling: Any) -> VLLMRequest:
    request = GenerationRequest(
        request_id="r",
        prompt_token_ids=(1, 2, *continued),
        sampling=SamplingParams(max_new_tokens=tokens, **sampling),
        continued_tokens=len(continued),
    )
    tokenizer = SimpleNamespace(decode=lambda tokens, **_: text_of(tokens), eos_token_id=25)
    made = VLLMRequest(ModelTokens("m", tokenizer, vocabulary=26, max_model_tokens=room).row(request))
    made.row.end_if_complete()
    made.state = SimpleNamespace(weight_version_starts=[])
    return made


def take(made: VLLMRequest, output: Any) -> GenerationChunk:
    chunk = made.take(output)
    assert chunk is not None
    return chunk


def output(tokens: list[int], *, finished: str | None = None, spans: Any = None) -> Any:
    completion = SimpleNamespace(
        token_ids=tokens,
        logprobs=[{token: SimpleNamespace(logprob=-float(token))} for token in tokens],
        finish_reason=finished,
        weight_versions=spans,
    )
    return SimpleNamespace(outputs=[completion], prompt_logprobs=None, finished=finished is not None)


async def test_tokens_carry_the_version_that_vllm_stamped() -> None:
    made = await held()
    assert not made.began
    made.state.weight_version_starts.append(("4", 0))
    assert made.began
    first = take(made, output([3, 5]))
    assert (first.token_ids, first.log_probs, first.weight_versions) == ((3, 5), (-3.0, -5.0), (4, 4))
    made.state.weight_version_starts.append(("7", 3))
    later = take(made, output([6, 7, 8]))
    assert later.weight_versions == (4, 7, 7)
    spans = [SimpleNamespace(version="4", start=0), SimpleNamespace(version="7", start=3)]
    last = take(made, output([9], finished="length", spans=spans))
    assert (last.weight_versions, last.finish_reason) == ((7,), "length")
    assert made.row.sampled == 6


async def test_a_token_without_a_version_is_an_error() -> None:
    with pytest.raises(EngineError, match="gave token 0 of 'r' no weight version"):
        (await held()).take(output([3]))


async def test_a_stop_string_ends_it_at_the_token_that_completes_it() -> None:
    made = await held(stop=("fg",))
    made.state.weight_version_starts.append(("0", 0))
    assert take(made, output([4, 5])).finish_reason is None
    chunk = take(made, output([6, 7]))
    assert (chunk.token_ids, chunk.log_probs, chunk.finish_reason) == ((6,), (-6.0,), "stop")


async def test_a_continued_request_counts_and_stops_as_if_it_had_never_moved() -> None:
    made = await held(continued=(5,), tokens=3, stop=("fg",))
    assert made.row.finish_reason is None
    made.state.weight_version_starts.append(("0", 0))
    assert take(made, output([6])).finish_reason == "stop"
    assert (await held(continued=(5, 6), stop=("fg",))).row.finish_reason == "stop"
    assert (await held(continued=(4, 25))).row.finish_reason == "stop"
    assert (await held(continued=(4, 5, 6), tokens=3)).row.finish_reason == "length"
    assert (await held(continued=(4, 5), tokens=30, room=4)).row.finish_reason == "length"


@pytest.mark.parametrize(("finish_reason", "expected"), [("stop", "stop"), ("length", "length"), ("abort", "abort")])
async def test_finish_reasons(finish_reason: str, expected: str) -> None:
    made = await held()
    made.state.weight_version_starts.append(("0", 0))
    assert take(made, output([3], finished=finish_reason)).finish_reason == expected


async def test_a_failure_inside_vllm_is_an_error() -> None:
    with pytest.raises(EngineError, match="failed inside vLLM"):
        (await held()).take(output([], finished="error"))


@pytest.mark.parametrize("log_prob", [math.nan, -math.inf])
@pytest.mark.parametrize(
    ("sampling", "error", "words"),
    [
        ({}, EngineError, "not finite under weight version 4"),
        ({"logit_bias": ((3, 1.0),)}, EngineError, "not finite under weight version 4"),
        ({"min_tokens": 1}, InvalidDataError, "min_tokens together forbid every token"),
    ],
)
async def test_log_probs_that_are_not_finite_are_an_error(
    log_prob: float, sampling: dict[str, Any], error: type[Exception], words: str
) -> None:
    made = await held(**sampling)
    made.state.weight_version_starts.append(("4", 0))
    wrong = output([3])
    wrong.outputs[0].logprobs[0][3].logprob = log_prob
    with pytest.raises(error, match=words):
        made.take(wrong)
