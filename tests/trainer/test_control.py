"""Orders to a run come from outside: whatever a line holds, it is answered."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from asyncrl.config.file import set_key
from asyncrl.errors import ConfigError
from asyncrl.trainer.control import give_order, listening

NESTED = b'{"a":' * 9000 + b"1" + b"}" * 9000


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 60_000,
        b'{"order": "set", "key": "a", "value": %s}' % NESTED,
        b'{"order": "set", "key": 5, "value": 1}',
        b'{"order": "set", "value": 1}',
        b'{"order": ["set"]}',
        b"[" * 100_000,
        b"\xff",
        b"5",
    ],
)
async def test_an_order_that_is_none_is_answered_with_an_error(tmp_path: Path, line: bytes) -> None:
    tables: dict[str, object] = {}
    async with listening(tmp_path, {"set": lambda key, value: set_key(tables, key, value)}):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "control.sock"))
        writer.write(line + b"\n")
        assert json.loads(await asyncio.wait_for(reader.readline(), 5))["error"]
        writer.close()
    assert tables == {}


async def test_a_number_of_numpy_is_sent_as_one(tmp_path: Path) -> None:
    tables: dict[str, object] = {}
    async with listening(tmp_path, {"set": lambda key, value: set_key(tables, key, value)}):
        await asyncio.to_thread(give_order, tmp_path, "set", key="trainer.lr", value=np.float32(0.5))
    assert tables == {"trainer": {"lr": 0.5}}


def test_what_is_no_plain_data_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)algorithm.loss = <function .* no plain data.* as package\.module:name"):
        give_order(tmp_path, "set", key="algorithm.loss", value=lambda rows: rows)


def test_an_order_that_is_too_long_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"at most 65536 bytes, and this one 70\d{3}"):
        give_order(tmp_path, "set", key="algorithm.loss_options", value="x" * 70_000)
