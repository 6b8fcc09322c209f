"""Conversations of a file, as a warm start takes them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from asyncrl.data import DataProto
from asyncrl.errors import InvalidDataError
from asyncrl.trainer.sft import file_conversations, train_ahead

GOOD = {"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"{nope", "2: not JSON"),
        (b"[]", "2: a row must be an object"),
        (b'{"messages": []}', '2: "messages" must be messages, a list'),
        (b'{"messages": [{"role": "user", "content": "1"}]}', "2: .*at least one turn of the assistant"),
        (b'{"messages": [{"role": "assistant"}, 7]}', '2: "messages" has a message of .assistant. without content'),
        (b'{"messages": [{"role": "assistant", "content": 5}]}', '2: "messages" has content that is not text'),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_a_bad_line_is_told_with_its_place(tmp_path: Path, line: bytes, told: str):
    file = tmp_path / "data.jsonl"
    file.write_bytes(json.dumps(GOOD).encode() + b"\n" + line + b"\n")
    with pytest.raises(InvalidDataError, match=told) as caught:
        file_conversations(file, seed=0)
    assert str(file) in str(caught.value)


async def test_a_stop_iteration_of_demonstrations_is_an_error_and_no_endless_wait():
    def rows(batch: int) -> DataProto:
        return next(iter(()))

    async with asyncio.timeout(30):
        with pytest.raises(RuntimeError, match="rows raised StopIteration"):
            await train_ahead([0], rows, None, on_step=print)  # type: ignore[arg-type]


def test_an_empty_file_is_told(tmp_path: Path):
    file = tmp_path / "data.jsonl"
    file.write_text("\n\n")
    with pytest.raises(InvalidDataError, match="has no rows"):
        file_conversations(file, seed=0)


def test_each_round_has_every_conversation_in_an_order_of_its_own(tmp_path: Path):
    file = tmp_path / "data.jsonl"
    texts = [f"{number}\u2028{number}" for number in range(8)]  # a line separator inside a text ends no line
    lines = [json.dumps({"messages": [{"role": "assistant", "content": text}]}, ensure_ascii=False) for text in texts]
    file.write_text("\r\n".join(lines), encoding="utf-8")
    conversation = file_conversations(file, seed=3)
    first, second = ([conversation(index)[0]["content"] for index in range(start, start + 8)] for start in (0, 8))
    assert sorted(first) == sorted(second) == texts
    assert first != second
    assert first == [file_conversations(file, seed=3)(index)[0]["content"] for index in range(8)]
