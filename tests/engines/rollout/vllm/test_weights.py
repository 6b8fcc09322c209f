"""Every rank confirms each fetch once, late confirmations are not counted, and a cancelled fetch leaves nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.weights import WeightManifest
from engines.rollout.vllm.weights import Confirmation, Confirmations, WeightUpdates, confirm


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


@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancelled_fetch_is_dropped_by_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    started: Any = SimpleNamespace(
        llm=SimpleNamespace(output_handler=asyncio.get_running_loop().create_future()),
        tensors=SimpleNamespace(check_manifest=lambda manifest, held: {}),
        ranks=1,
    )
    updates, called = WeightUpdates(started, tmp_path), list[str]()
    begun = asyncio.Event()

    async def call(method: str, *arguments: Any) -> None:
        called.append(method)
        begun.set()
        if fails and method == "asyncrl_drop_fetch":
            raise RuntimeError("a rank's error, as vLLM passes it on")

    monkeypatch.setattr(updates, "_call", call)
    manifest = WeightManifest(version=1, transport="disk", location="", tensors=())
    fetching = asyncio.ensure_future(updates.fetch(manifest, after=0))
    await begun.wait()
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert (called, updates.prepared) == (["asyncrl_begin_fetch", "asyncrl_drop_fetch"], None)
