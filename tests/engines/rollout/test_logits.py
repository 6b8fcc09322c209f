"""Penalties, biases and bans: hand-worked numbers, and equality with a plain reference whatever is combined."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.interfaces import Generation, GenerationRequest, SamplingParams
from engines.rollout.logits import LogitRules, RowLogits
from engines.rollout.request import ModelTokens, StopText
from engines.rollout.transformers.engine import TransformersEngine

VOCABULARY = 8
NEVER = -math.inf


def rules(prompt: int, ends: Sequence[int] = (), bad: Sequence[list[int]] = (), **sampling: Any) -> LogitRules:
    return LogitRules(SamplingParams(max_new_tokens=20, **sampling), prompt, list(ends), list(bad))


def after(logits: Sequence[float], tokens: Sequence[int], how: LogitRules) -> list[float]:
    own = torch.tensor(logits)
    RowLogits(how).apply(own, tokens)
    return own.tolist()


def test_frequency_and_presence_count_what_was_sampled_alone() -> None:
    # Token 0 is in the prompt, 1 was sampled twice, 2 once.
    how = rules(2, frequency_penalty=0.5, presence_penalty=0.25)
    assert after([1.0, 1.0, 1.0, 1.0], [0, 0, 1, 2, 1], how) == [1.0, -0.25, 0.25, 1.0]
    assert after([1.0, 1.0], [0, 0, 1], rules(2, presence_penalty=-2.0)) == [1.0, 3.0]


def test_repetition_scales_prompt_and_sampled_away_from_likely() -> None:
    assert after([4.0, -4.0, 4.0, -4.0], [0, 1], rules(1, repetition_penalty=2.0)) == [2.0, -8.0, 4.0, -4.0]


@pytest.mark.parametrize("penalty", [1e-38, 1e38])
def test_a_repetition_penalty_by_which_logits_overflow_is_refused(penalty: float) -> None:
    with pytest.raises(ValueError, match=r"repetition_penalty must lie in 0\.01\.\.100"):
        rules(1, repetition_penalty=penalty)
    assert after([4.0, -4.0], [0, 1], rules(1, repetition_penalty=0.01)) == pytest.approx([400.0, -0.04])


def test_bias_comes_before_repetition_and_repetition_before_frequency() -> None:
    how = rules(1, logit_bias=((1, 3.0), (0, -100.0)), repetition_penalty=2.0, frequency_penalty=1.0)
    assert after([0.0, 1.0, 5.0], [2, 1], how) == [-100.0, 1.0, 2.5]


def test_only_allowed_tokens_are_left() -> None:
    assert after([1.0, 2.0, 3.0], [0], rules(1, allowed_token_ids=(1, 1), logit_bias=((2, 9.0),))) == [
        NEVER,
        2.0,
        NEVER,
    ]


def test_the_last_token_of_a_bad_word_is_forbidden_after_the_others() -> None:
    words = [[3], [1, 2], [1, 1, 0]]
    assert after([0.0] * 4, [1], rules(1, bad=words)) == [0.0, 0.0, 0.0, NEVER]  # a prompt begins no word
    assert after([0.0] * 4, [0, 1], rules(1, bad=words)) == [0.0, 0.0, NEVER, NEVER]
    assert after([0.0] * 4, [0, 1, 1], rules(1, bad=words)) == [NEVER, 0.0, NEVER, NEVER]


def test_bad_words_that_the_model_cannot_sample_forbid_nothing() -> None:
    written = {
        "ab": [1, 2],
        " ab": [3, 2],
        "outside": [VOCABULARY],
        " outside": [1, VOCABULARY],
        "none": [],
        " none": [],
    }

    class Tokenizer:
        def __call__(self, texts: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
            return {"input_ids": [written[text] for text in texts]}

    tokens = ModelTokens("m", Tokenizer(), vocabulary=VOCABULARY, max_model_tokens=9)
    sampling = SamplingParams(max_new_tokens=4, bad_words=("outside", "ab", "none"))
    row = tokens.row(GenerationRequest(request_id="r", prompt_token_ids=(0,), sampling=sampling))
    assert row.logits is not None
    assert row.logits.rules.bad_words == [[1, 2], [3, 2]]
    assert row.sampling.bad_words == ("ab",)


def test_the_end_is_kept_back_until_enough_tokens_were_sampled() -> None:
    how = rules(1, ends=[0, 2], min_tokens=2)
    assert after([1.0, 1.0, 1.0], [1, 1], how) == [NEVER, 1.0, NEVER]
    assert after([1.0, 1.0, 1.0], [1, 1, 1], how) == [1.0, 1.0, 1.0]
    complete = [1.0, NEVER, NEVER]  # what a grammar leaves of a complete text
    assert after(complete, [1], rules(1, ends=[0], min_tokens=2, grammar="start: /a/")) == complete
    assert after(complete, [1], rules(1, ends=[0], min_tokens=2)) == [NEVER] * 3


def test_min_p_is_of_the_tempered_distribution() -> None:
    # At temperature 2 the shares of the largest are 1, exp(-0.5), exp(-1) = 0.37, exp(-1.5) = 0.22.
    logits = [0.0, -1.0, -2.0, -3.0]
    assert after(logits, [0], rules(1, min_p=0.3, temperature=2.0)) == [0.0, -1.0, -2.0, NEVER]
    assert after(logits, [0], rules(1, min_p=0.3)) == [0.0, -1.0, NEVER, NEVER]
    assert after(logits, [0], rules(1, min_p=1.0)) == [0.0, NEVER, NEVER, NEVER]


TOKENS = st.integers(0, VOCABULARY - 1)
TENTHS = st.integers(-20, 20).map(lambda n: n / 10)


@given(
    logits=st.lists(st.floats(-9, 9, width=32), min_size=VOCABULARY, max_size=VOCABULARY),
    prompt=st.lists(TOKENS, min_size=1, max_size=5),
    sampled=st.lists(TOKENS, max_size=9),
    bad=st.lists(st.lists(TOKENS, min_size=1, max_size=3), max_size=3),
    ends=st.lists(TOKENS, max_size=2, unique=True),
    fields=st.fixed_dictionaries(
        {},
        optional={
            "frequency_penalty": TENTHS,
            "presence_penalty": TENTHS,
            "repetition_penalty": st.integers(1, 30).map(lambda n: n / 10),
            "logit_bias": st.dictionaries(TOKENS, TENTHS).map(lambda bias: tuple(bias.items())),
            "allowed_token_ids": st.lists(TOKENS).map(tuple),
            "min_tokens": st.integers(0, 9),
            "min_p": st.sampled_from((0.03, 0.2)),
            "temperature": st.sampled_from((0.5, 1.0, 2.0)),
        },
    ),
)
@settings(deadline=None)
def test_every_step_equals_a_plain_reference(
    plain_logits: Any,
    logits: list[float],
    prompt: list[int],
    sampled: list[int],
    bad: list[list[int]],
    ends: list[int],
    fields: Any,
) -> None:
    written = msgspec.json.encode(rules(len(prompt), ends, bad, **fields))  # as another process gets it
    row = RowLogits(msgspec.json.decode(written, type=LogitRules))
    for n in range(len(sampled) + 1):
        own = torch.tensor(logits)
        row.apply(own, [*prompt, *sampled[:n]])
        expected = plain_logits(logits, prompt, sampled[:n], row.rules)
        assert own.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)
    # A row that begins anew in the middle goes on alike.
    assert after(logits, [*prompt, *sampled], row.rules) == own.tolist()


async def test_rows_that_are_preempted_keep_their_counts(
    folder_of: Callable[..., Path], collect: Callable[..., Any], request_of: Callable[..., GenerationRequest]
) -> None:
    ways: list[dict[str, Any]] = [
        {"frequency_penalty": 0.7},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 2.0},
        {},
    ]
    answers: list[list[tuple[int, ...]]] = []
    for size in (1 << 20, 40960):  # of the cache: room for all, and for two
        engine = TransformersEngine(
            str(folder_of()), device="cpu", threads=1, kv_cache_bytes=size, max_model_tokens=64, seed=3
        )
        await engine.start()
        try:
            asked = [request_of(n, [n, 5, 6], 50, seed=n, **way) for n, way in enumerate(ways)]
            done: list[Generation] = await asyncio.gather(*(collect(engine, each) for each in asked))
            answers.append([got.token_ids for got in done])
            assert engine._generation is not None
            preempted = engine._generation.schedule.preemptions
        finally:
            await engine.close()
    assert preempted > 0
    assert answers[0] == answers[1]


def test_no_stop_string_begins_in_the_first_tokens() -> None:
    def decode(tokens: Sequence[int]) -> str:
        return "".join(chr(token) for token in tokens)

    def found(sampled: str, **passed: int) -> list[bool]:
        watch = StopText(["ab"], decode=decode, prompt=[120], **passed)
        return [watch.found([120, *map(ord, sampled[: n + 1])]) for n in range(len(sampled))]

    assert found("abab") == [False, True, True, True]
    assert found("abab", passed=2) == [False, False, False, True]
    assert found("aabab", passed=2) == [False, False, False, False, True]  # none of it lies in the first two
    taken_over = StopText(["ab"], decode=decode, prompt=[120], passed=2)
    assert not taken_over.found(list(map(ord, "xabb")))
    assert taken_over.found(list(map(ord, "xabbab")))
