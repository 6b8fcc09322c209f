"""Turns on their way to the ledger and back."""

from __future__ import annotations

import asyncio
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import CodecError
from asyncrl.interfaces import Generation
from asyncrl.ledger import SampledTurn
from asyncrl.rollout.turns import (
    Continuation,
    TurnFeed,
    TurnRecord,
    TurnRecorder,
    decode_turns,
    encode_turns,
    last_chains,
    sampled_turns,
)
from asyncrl.testing.clock import run_virtually


def said(*versions: int) -> Generation:
    tokens = tuple(range(10, 10 + len(versions)))
    return Generation(
        token_ids=tokens, log_probs=(-0.5,) * len(versions), weight_versions=versions, finish_reason="stop"
    )


def turn(*, row: int = 0, attempt: int = 0, number: int = 0, chain: int = 0, place: int = 0) -> TurnRecord:
    return TurnRecord(
        group_id=0,
        attempt=attempt,
        row=row,
        turn=number,
        tokens=2,
        chain=chain,
        place=place,
        trial=0,
        context=b"",
        token_ids=bytes(8),
        log_probs=bytes(8),
        spans=((attempt, 2),),
        finish_reason="stop",
    )


async def test_a_turn_comes_back_as_it_was():
    feed = TurnFeed(gather_s=0.0)
    turns = TurnRecorder(feed, group_id=5, attempt=2, row=1)
    turns.begin(trial=0)
    waiting = asyncio.create_task(feed.drain())
    await asyncio.sleep(0)
    turns.sampled((1, 2, 3), said(4, 4, 5))
    turns.begin(trial=1)
    turns.sampled((1, 2, 3), said())
    content = await waiting
    assert sampled_turns(content) == (SampledTurn(5, 2, 1, 0, 3), SampledTurn(5, 2, 1, 1, 0))
    first, second = decode_turns(content)
    assert (first.group_id, first.attempt, first.row, first.turn, first.chain, first.place) == (5, 2, 1, 0, 0, 0)
    assert (second.turn, second.chain, second.place, second.trial) == (1, 1, 0, 1)
    assert first.context_ids() == (1, 2, 3)
    assert (first.generation(), second.generation()) == (said(4, 4, 5), said())
    assert (first.tokens, first.newest_version, second.newest_version) == (3, 5, -1)
    with pytest.raises(CodecError, match="not the turns"):
        decode_turns(b"turns")
    with pytest.raises(CodecError, match="not the turns"):
        sampled_turns(b"turns")


def test_turns_that_wait_already_are_gathered_with_those_that_follow():
    async def story() -> None:
        feed = TurnFeed(gather_s=1.0)
        turns = TurnRecorder(feed, group_id=0, attempt=0, row=0)
        turns.begin(trial=0)
        for _ in range(3):
            turns.sampled((1,), said(0))
            waiting = asyncio.create_task(feed.drain())
            await asyncio.sleep(0.5)
            turns.sampled((1,), said(0))
            assert len(decode_turns(await waiting)) == 2

    run_virtually(story())


async def test_turns_of_a_complete_group_are_dropped():
    feed = TurnFeed(gather_s=0.0)
    for group_id in (0, 1):
        turns = TurnRecorder(feed, group_id=group_id, attempt=0, row=0)
        turns.begin(trial=0)
        turns.sampled((1,), said(0))
    feed.forget(0, 0)
    assert [turn.group_id for turn in decode_turns(await feed.drain())] == [1]
    turns.sampled((2,), said(0))
    feed.forget(1, 0)
    waiting = asyncio.create_task(feed.drain())
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()


@settings(deadline=None, max_examples=100)
@given(
    sampled=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=12), proofs=st.permutations([1, 2, 3])
)
async def test_turns_of_a_row_leave_in_order_as_far_as_their_versions_are_proven(
    sampled: list[tuple[int, int]], proofs: list[int]
) -> None:
    unproven = {1, 2, 3}
    feed = TurnFeed(gather_s=0.0, unproven=unproven)
    rows = [TurnRecorder(feed, group_id=0, attempt=0, row=row) for row in range(3)]
    for recorder in rows:
        recorder.begin(trial=0)
    fetched: list[TurnRecord] = []

    async def fetch() -> None:
        while True:
            fetched.extend(decode_turns(await feed.drain()))

    fetching = asyncio.create_task(fetch())
    for row, version in sampled:
        rows[row].sampled((1,), said(version))
    for version in (0, *proofs):
        unproven.discard(version)
        feed.proven()
        for _ in range(10):
            await asyncio.sleep(0)
        for row in range(3):
            versions = [version for of, version in sampled if of == row]
            left = [(turn.turn, turn.newest_version) for turn in fetched if turn.row == row]
            assert left == list(enumerate(takewhile(lambda each: each not in unproven, versions)))
    fetching.cancel()


def test_the_last_chain_of_the_newest_attempt_counts():
    chains = last_chains(
        [
            turn(number=0, place=0),
            turn(number=1, place=1),
            turn(number=2, chain=1, place=0),  # begun again
            turn(row=1, number=0, place=0),
            turn(row=1, number=1, place=1),
            turn(row=1, attempt=1, number=0, place=0),  # another attempt, which came less far
            turn(row=2, number=1, place=1),  # what came before cannot be read
        ]
    )
    assert {row: [(each.attempt, each.turn) for each in chain] for row, chain in chains.items()} == {
        0: [(0, 2)],
        1: [(1, 0)],
        2: [],
    }


def test_what_became_of_recorded_turns_is_counted():
    continuation = Continuation(encode_turns([turn(), turn(row=1), turn(row=1, number=1, place=1)]))
    assert [len(continuation.of_row(row)) for row in range(3)] == [1, 2, 0]
    continuation.continued(1, tokens=4)
    continuation.restarted("the environment answered differently")
    outcome = continuation.outcome()
    assert (outcome.rows, outcome.tokens) == (1, 4)
    assert outcome.restarted == {"the environment answered differently": 1}
    assert Continuation().outcome().tokens == 0
