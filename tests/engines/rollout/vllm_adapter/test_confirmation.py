"""Every rank answers once for each order, and late answers are not taken for the next one's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engines.rollout.vllm_adapter.confirmation import Confirmation, Confirmations, confirm


async def test_every_rank_is_waited_for(tmp_path: Path) -> None:
    confirmations = Confirmations(tmp_path)
    await confirmations.open()
    late, number = confirmations.expect(), confirmations.expect()
    gathering = asyncio.ensure_future(confirmations.gather(number, ranks=2))
    long = "x" * 300_000
    for said in (
        Confirmation(number=number, rank=1, kind="WeightMismatchError", message=long),
        Confirmation(number=late, rank=0),
    ):
        await asyncio.to_thread(confirm, confirmations.address, said)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(gathering), 0.05)
    await asyncio.to_thread(confirm, confirmations.address, Confirmation(number=number, rank=0))
    heard = {each.rank: each for each in await gathering}
    assert (heard[0].kind, heard[1].kind, heard[1].message) == ("", "WeightMismatchError", long)
    await confirmations.close()
