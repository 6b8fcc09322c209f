"""Every rank confirms each fetch once, and late confirmations of an earlier fetch are not counted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engines.rollout.vllm.weights import Confirmation, Confirmations, confirm


async def test_every_rank_is_waited_for(tmp_path: Path) -> None:
    confirmations = Confirmations(tmp_path)
    await confirmations.open()
    late, number = confirmations.expect(), confirmations.expect()
    gathering = asyncio.ensure_future(confirmations.gather(number, ranks=2))
    long = "x" * 300_000
    for confirmation in (
        Confirmation(number=number, rank=1, kind="WeightMismatchError", message=long),
        Confirmation(number=late, rank=0),
    ):
        await asyncio.to_thread(confirm, confirmations.address, confirmation)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(gathering), 0.05)
    await asyncio.to_thread(confirm, confirmations.address, Confirmation(number=number, rank=0))
    received = {each.rank: each for each in await gathering}
    assert (received[0].kind, received[1].kind, received[1].message) == ("", "WeightMismatchError", long)
    await confirmations.close()


async def test_a_folder_may_have_a_longer_path_than_sockets(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    confirmations = Confirmations(folder)
    await confirmations.open()
    number = confirmations.expect()
    await asyncio.to_thread(confirm, confirmations.address, Confirmation(number=number, rank=0))
    assert [each.rank for each in await confirmations.gather(number, ranks=1)] == [0]
    await confirmations.close()
