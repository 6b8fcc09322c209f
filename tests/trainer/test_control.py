"""Orders to a run come from outside: whatever a line holds, it is answered."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

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


def test_an_order_that_is_too_long_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"at most 65536 bytes, and this one 70\d{3}"):
        give_order(tmp_path, "set", key="algorithm.loss_options", value="x" * 70_000)
