"""Which sessions hold a part of the cache: decisions, the law of their order, and the shell over an engine."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.interfaces import GenerationChunk, GenerationRequest, SamplingParams
from asyncrl.rollout.chat import ChatRenderer
from asyncrl.rollout.sessions import Decision, SessionAdmission, SessionCache
from asyncrl.rollout.trajectory import prompt_rows
from asyncrl.rollout.worker import EpisodeLimits, RolloutSpec, RolloutWorker
from asyncrl.testing import EchoEngine
from asyncrl.testing.clock import run_virtually
from asyncrl.weights import TransportSpec


def after_one(*, capacity: int, tokens: int = 20) -> SessionAdmission:
    """Return an admission in which one session has ended after two turns of a second's tool, with ``tokens``."""
    admission = SessionAdmission(capacity_tokens=capacity)
    admission.begin_turn("past", 10, now_s=0.0)
    admission.end_turn("past", 10, now_s=0.0)
    admission.begin_turn("past", tokens, now_s=1.0)
    admission.end_turn("past", tokens, now_s=1.0)
    admission.leave("past", now_s=1.0)
    return admission


def test_all_begin_until_a_session_has_come_back() -> None:
    admission = SessionAdmission(capacity_tokens=50)
    for name in "abc":
        assert admission.begin_turn(name, 40, now_s=0.0).granted == (name,)
        admission.end_turn(name, 40, now_s=0.0)


def test_a_session_waits_until_the_expected_peak_fits() -> None:
    admission = after_one(capacity=100, tokens=60)
    assert admission.begin_turn("a", 10, now_s=2.0).granted == ("a",)
    # Both would have 60 tokens at the end, and 26 each fit now.
    assert admission.begin_turn("b", 10, now_s=2.0) == Decision()
    assert admission.end_turn("a", 58, now_s=3.0) == Decision()
    assert admission.leave("a", now_s=4.0) == Decision(("b",), ("a",))


def test_none_passes_the_first_one_that_waits() -> None:
    admission = after_one(capacity=100)
    admission.begin_turn("a", 60, now_s=2.0)
    assert admission.begin_turn("b", 60, now_s=2.0).granted == ()
    assert admission.begin_turn("c", 1, now_s=2.0).granted == (), "it would fit"
    assert admission.leave("a", now_s=3.0).granted == ("b", "c")


def test_where_it_does_not_fit_the_session_that_is_away_longest_loses_its_part() -> None:
    admission = SessionAdmission(capacity_tokens=200)
    for name, tool, seconds in (("x", "slow", 9.0), ("y", "quick", 1.0)):
        admission.begin_turn(name, 1, now_s=0.0)
        admission.end_turn(name, 1, now_s=0.0)
        admission.name_tool(name, tool)
        admission.begin_turn(name, 1, now_s=seconds)
        admission.end_turn(name, 1, now_s=seconds)
        admission.leave(name, now_s=seconds)
    for name, tool in (("a", "slow"), ("b", "quick"), ("c", "quick")):
        admission.begin_turn(name, 20, now_s=10.0)
        admission.end_turn(name, 30, now_s=10.0)
        admission.name_tool(name, tool)
    assert admission.begin_turn("c", 120, now_s=10.1) == Decision(("c",), ("a",))
    assert admission.begin_turn("b", 31, now_s=10.2) == Decision(("b",))


@pytest.mark.parametrize("whole", [False, True])
def test_a_tool_that_runs_longer_than_reading_everything_gives_its_part_to_one_that_waits(whole: bool) -> None:
    admission = after_one(capacity=100)
    admission.observe_reading(10, 0.2, whole=whole)
    if whole:  # a part of it may have been read for another session
        admission.observe_reading(10, 0.1, whole=True)
    admission.begin_turn("a", 60, now_s=2.0)
    admission.end_turn("a", 60, now_s=2.0)
    assert admission.next_tick_s(now_s=2.0) == float("inf"), "none waits"
    assert admission.begin_turn("b", 60, now_s=2.5) == Decision()
    assert admission.next_tick_s(now_s=2.5) == 4.0, "100 tokens are read in 2 s, and no tool has taken longer"
    assert admission.tick(now_s=3.9) == Decision()
    assert admission.tick(now_s=4.0) == Decision(("b",), ("a",))


def test_turns_side_by_side_are_one_session() -> None:
    admission = after_one(capacity=100)
    assert admission.begin_turn("a", 30, now_s=2.0).granted == ("a",)
    assert admission.begin_turn("a", 40, now_s=2.0).granted == ("a",)
    admission.end_turn("a", 50, now_s=3.0)
    assert admission.begin_turn("b", 60, now_s=3.0).granted == ()
    admission.end_turn("a", 35, now_s=4.0)
    assert admission.leave("a", now_s=5.0).granted == ("b",)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), capacity=st.integers(20, 400), clients=st.integers(1, 12))
def test_each_session_begins_in_its_turn_and_all_end(seed: int, capacity: int, clients: int) -> None:
    """Random sessions, in rounds of events: none that waits is passed, and every one ends."""
    dice = random.Random(seed)
    admission = SessionAdmission(capacity_tokens=capacity)
    admission.observe_reading(1, dice.choice((0.0, 0.01, 1.0)))
    turns = {f"{number}": dice.randint(1, 5) for number in range(clients)}
    entered: list[str] = []
    waiting: set[str] = set()
    running: set[str] = set()
    holds: set[str] = set()
    tokens = dict.fromkeys(turns, 0)
    now_s = 0.0

    def carry_out(decision: Decision) -> None:
        assert not running & set(decision.dropped)
        holds.difference_update(decision.dropped)
        for name in decision.granted:
            waiting.remove(name)
            running.add(name)
            passed = [other for other in waiting if entered.index(other) < entered.index(name)]
            assert name in holds or not passed, f"{passed} waited longer"
            holds.add(name)

    for _ in range(2000):
        now_s += dice.random()
        ready = [name for name in turns if name not in waiting | running]
        if running and (not ready or dice.random() < 0.5):
            name = dice.choice(sorted(running))
            running.remove(name)
            turns[name] -= 1
            tokens[name] += dice.randint(1, 9)
            carry_out(admission.end_turn(name, tokens[name], now_s=now_s))
            if not turns[name]:
                del turns[name]
                carry_out(admission.leave(name, now_s=now_s))
        elif ready:
            name = dice.choice(ready)
            tokens[name] += dice.randint(1, 30)
            if name not in entered:
                entered.append(name)
            waiting.add(name)
            carry_out(admission.begin_turn(name, tokens[name], now_s=now_s))
        elif not turns:
            break
        else:
            raise AssertionError(f"{waiting} wait, and nothing else can happen")
    assert not turns


class Remembering(EchoEngine):
    """An engine of sessions: ``forgotten`` has what it was asked to free."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.forgotten: list[str] = []

    def forget_session(self, session: str) -> None:
        self.forgotten.append(session)


def request(session: str, turn: int, tokens: int) -> GenerationRequest:
    sampling = SamplingParams(max_new_tokens=5)
    prompt = tuple(range(1, tokens + 1))
    return GenerationRequest(
        request_id=f"{session}-{turn}", prompt_token_ids=prompt, sampling=sampling, session=session
    )


async def tokens_of(stream: AsyncIterator[GenerationChunk]) -> int:
    return sum([len(chunk.token_ids) async for chunk in stream])


def test_more_sessions_than_fit_take_turns_as_wholes() -> None:
    async def play() -> list[str]:
        engine = Remembering(token_s=1.0)
        await engine.start()
        sessions = SessionCache(engine, capacity_tokens=100)

        async def client(name: str) -> None:
            for turn in range(3):
                assert await tokens_of(sessions.generate(request(name, turn, 20 + 20 * turn))) == 5
                sessions.name_tools(name, {"role": "assistant", "tool_calls": [{"function": {"name": "search"}}]})
                await asyncio.sleep(0.5)
            sessions.leave(name)

        await asyncio.gather(client("a"), client("b"))
        await asyncio.sleep(1000.0)
        assert engine.forgotten == ["a", "b", "a"], "a lost its part, and then both ended"
        return [each.request_id for each in engine.requests]

    assert run_virtually(play()) == ["a-0", "b-0", "a-1", "b-1", "b-2", "a-2"]


def test_a_turn_that_is_cancelled_while_it_waits_costs_nothing() -> None:
    async def play() -> None:
        engine = Remembering(token_s=1.0)
        await engine.start()
        sessions = SessionCache(engine, capacity_tokens=100)
        for turn in range(2):
            await tokens_of(sessions.generate(request("a", turn, 60)))
        waits = asyncio.create_task(tokens_of(sessions.generate(request("b", 0, 60))))
        later = asyncio.create_task(tokens_of(sessions.generate(request("c", 0, 60))))
        await asyncio.sleep(0.001)
        assert not waits.done()
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        sessions.leave("b")
        sessions.leave("a")
        assert await later == 5
        assert [each.session for each in engine.requests] == ["a", "a", "c"]

    run_virtually(play())


def test_an_engine_that_keeps_no_sessions_does_not_get_them() -> None:
    async def play() -> None:
        engine = EchoEngine()
        await engine.start()
        sessions = SessionCache(engine, capacity_tokens=100)
        assert await tokens_of(sessions.generate(request("a", 0, 20))) == 5
        sessions.leave("a")
        assert [each.session for each in engine.requests] == [""]

    run_virtually(play())


def test_how_quickly_prompts_are_read_is_learned_from_sessions_that_come_back() -> None:
    async def play() -> None:
        engine = Remembering(token_s=1.0)
        await engine.start()
        sessions = SessionCache(engine, capacity_tokens=100)
        for turn, prompt, reading_s in ((0, 60, math.inf), (1, 60 + 5 + 20, 1.0 / 20)):
            await tokens_of(sessions.generate(request("a", turn, prompt)))
            assert sessions._admission._reading.low == pytest.approx(reading_s), "the first may be shared"
            assert sessions._admission._whole.largest == pytest.approx(1.0 / 60)

    run_virtually(play())


def test_requests_without_a_session_pass() -> None:
    async def play() -> None:
        engine = EchoEngine(token_s=1.0)
        await engine.start()
        sessions = SessionCache(engine, capacity_tokens=10)
        requests = [request("", number, 50) for number in range(4)]
        assert await asyncio.gather(*(tokens_of(sessions.generate(each)) for each in requests)) == [5] * 4
        assert asyncio.get_running_loop().time() == 5.0

    run_virtually(play())


async def test_an_episode_of_a_worker_is_a_session_from_its_first_turn_to_its_end(
    scratch: ChatRenderer, tmp_path: Path
) -> None:
    scratch.tokenizer.save_pretrained(tmp_path)
    spec = RolloutSpec(
        engine=Remembering,
        environment="asyncrl.testing:EchoFactory",
        transport=TransportSpec(name="asyncrl.testing:EmptyTransport", namespace="run"),
        limits=EpisodeLimits(max_turns=3, max_seq_len=200),
        sampling=SamplingParams(max_new_tokens=8),
    )
    worker = RolloutWorker(spec)
    await worker.start(str(tmp_path), 0)
    tasks = [{"word": "a", "turns": 3}, {"word": "b", "turns": 3}]
    await worker.rollout(prompt_rows(tasks, group_id=7, seeds=[1, 2], purpose="train"))
    engine: Any = worker._engine
    for episode in ("train-7-0-0", "train-7-1-0"):
        turns = [each for each in engine.requests if each.request_id.startswith(episode)]
        assert [each.request_id for each in turns] == [f"{episode}-{number}" for number in range(3)]
        (session,) = {each.session for each in turns}
        assert engine.forgotten.count(session) == 1
    await worker.aclose()
