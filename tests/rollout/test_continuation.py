"""A request over several engines: what is taken, what is refused."""

from __future__ import annotations

import pytest

from asyncrl.errors import EngineError
from asyncrl.interfaces import GenerationChunk, GenerationRequest, SamplingParams
from asyncrl.rollout.dispatcher import RequestContinuation


def chunk(*tokens: int, version: int = 1) -> GenerationChunk:
    return GenerationChunk(token_ids=tokens, log_probs=(-0.5,) * len(tokens), weight_versions=(version,) * len(tokens))


def asked(**options: int) -> GenerationRequest:
    return GenerationRequest(
        request_id="a", prompt_token_ids=(1, 2, 3), sampling=SamplingParams(max_new_tokens=5, seed=7), **options
    )


def test_it_goes_on_where_it_was():
    state = RequestContinuation(asked())
    assert state.request() == asked()
    state.take(chunk(10, 11))
    state.take(chunk(12, version=4))
    again = state.request()
    assert again.request_id == "a~1"
    assert again.prompt_token_ids == (1, 2, 3, 10, 11, 12)
    assert (again.continued_tokens, again.sampling, state.version, state.left) == (3, asked().sampling, 4, 2)


def test_one_that_had_been_moved_before_it_came_here():
    state = RequestContinuation(asked(continued_tokens=2))
    assert state.left == 3
    state.take(chunk(9))
    assert state.request().continued_tokens == 3


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (GenerationChunk(token_ids=(1, 2), log_probs=(0.0,), weight_versions=(3, 3)), "2 tokens came with 1 log-probs"),
        (GenerationChunk(token_ids=(1,), log_probs=(0.0,), weight_versions=()), "and 0 versions"),
        (chunk(5, version=2), "a token of weight version 2 came after one of 3"),
        (chunk(5, 6, 7, 8, version=3), "4 tokens came where 3 were left"),
    ],
)
def test_what_no_engine_may_say_is_not_taken(wrong: GenerationChunk, complaint: str):
    state = RequestContinuation(asked())
    state.take(chunk(10, 11, version=3))
    with pytest.raises(EngineError, match=complaint):
        state.take(wrong)
    assert (state.tokens, state.version) == (2, 3)


def test_a_request_that_continues_nothing_at_all_cannot_be_asked():
    with pytest.raises(ValueError, match="must leave a token of the prompt"):
        asked(continued_tokens=3)
