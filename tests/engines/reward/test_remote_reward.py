"""Rewards over HTTP: requests, retries and errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web

from asyncrl.data import DataProto
from asyncrl.errors import ConfigError, RewardError
from asyncrl.interfaces import RewardModel
from engines.reward.remote import RemoteReward

Answer = Callable[[list[dict[str, Any]]], Awaitable[web.Response]]


@asynccontextmanager
async def asking(answer: Answer, **options: Any) -> AsyncIterator[RemoteReward]:
    """A server that answers like this, and a reward that asks it."""

    async def reply(request: web.Request) -> web.StreamResponse:
        return await answer((await request.json())["rows"])

    app = web.Application()
    app.router.add_post("/score", reply)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    (address,) = runner.addresses
    reward = RemoteReward(url=f"http://127.0.0.1:{address[1]}/score", **options)
    try:
        yield reward
    finally:
        await reward.close()
        await runner.cleanup()


def batch(count: int) -> DataProto:
    return DataProto.from_dict(
        tensors={"rewards": torch.zeros(count)},
        non_tensors={"task": [{"answer": number} for number in range(count)], "reply": ["yes"] * count},
    )


async def right(rows: list[dict[str, Any]]) -> web.Response:
    return web.json_response({"rewards": [row["task"]["answer"] / 2 for row in rows]})


async def test_rows_are_sent_in_parts_and_scored_in_their_order() -> None:
    sizes: list[int] = []

    async def answer(rows: list[dict[str, Any]]) -> web.Response:
        sizes.append(len(rows))
        assert rows[0].keys() == {"task", "reply"}
        return await right(rows)

    async with asking(answer, batch_size=3, concurrency=2) as reward:
        part: RewardModel = reward
        assert (await part.score(batch(7))).batch["rewards"].tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert sorted(sizes) == [1, 3, 3]
    with pytest.raises(RewardError, match="after close"):
        await reward.score(batch(1))


async def test_transient_failures_are_retried() -> None:
    times = 0

    async def answer(rows: list[dict[str, Any]]) -> web.Response:
        nonlocal times
        times += 1
        return await right(rows) if times == 3 else web.Response(status=(503, 429)[times - 1], text="not now")

    async with asking(answer) as reward:
        assert (await reward.score(batch(2))).batch["rewards"].tolist() == [0.0, 0.5]
    assert times == 3


async def test_numpy_objects_are_sent_as_json() -> None:
    async def answer(rows: list[dict[str, Any]]) -> web.Response:
        assert [row["info"] for row in rows] == [{"count": 3, "scores": [0.5, 1.5]}]
        return web.json_response({"rewards": [2.0]})

    async with asking(answer) as reward:
        message = {"count": np.int64(3), "scores": np.array([0.5, 1.5])}
        rows = DataProto.from_dict(tensors={"rewards": torch.zeros(1)}, non_tensors={"info": [message]})
        assert (await reward.score(rows)).batch["rewards"].tolist() == [2.0]


async def test_a_server_that_keeps_failing_raises() -> None:
    async def answer(rows: list[dict[str, Any]]) -> web.Response:
        return web.Response(status=500, text="out of memory")

    async with asking(answer, deadline_s=0.25) as reward:
        with pytest.raises(RewardError, match=r"no answer within 0\.25 s; last attempt: status 500") as caught:
            await reward.score(batch(1))
    assert caught.value.how == "deadline"


async def test_a_server_that_hangs_raises_at_the_deadline() -> None:
    async def answer(rows: list[dict[str, Any]]) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with asking(answer, deadline_s=0.05) as reward:
        with pytest.raises(RewardError, match=r"no answer within 0\.05 s"):
            await reward.score(batch(1))


@pytest.mark.parametrize(
    ("response", "what"),
    [
        (web.Response, "must answer JSON"),
        (lambda: web.json_response({"rewards": [1.0]}), "of 2 numbers"),
        (lambda: web.json_response([1.0, 2.0]), "of 2 numbers"),
        (lambda: web.json_response({"rewards": [1.0, "2"]}), "gave row 1 the reward '2'"),
        (lambda: web.json_response({"rewards": [True, 1.0]}), "gave row 0 the reward True"),
        (lambda: web.Response(text='{"rewards": [1.0, NaN]}'), "not a finite float32"),
        (lambda: web.Response(text='{"rewards": [1.0, 1e39]}'), r"the reward 1e\+39, not a finite float32"),
        (lambda: web.Response(text=f'{{"rewards": [1.0, {10**400}]}}'), "not a finite float32"),
        (lambda: web.Response(text='{"rewards": [1.0, ' + "1" * 5000 + "]}"), "must answer JSON"),
        (lambda: web.Response(status=404, text="where?"), "refused a request with status 404: where"),
        (lambda: web.Response(status=413, text="no"), "refused a request with status 413: no"),
    ],
)
async def test_an_invalid_answer_raises_at_once(response: Callable[[], web.Response], what: str) -> None:
    times = 0

    async def answer(rows: list[dict[str, Any]]) -> web.Response:
        nonlocal times
        times += 1
        return response()

    async with asking(answer) as reward:
        with pytest.raises(RewardError, match=what):
            await reward.score(batch(2))
    assert times == 1


async def test_an_unreachable_server_raises_at_the_deadline() -> None:
    reward = RemoteReward(url="http://127.0.0.1:9/", deadline_s=0.15)
    with pytest.raises(RewardError, match=r"no answer within 0\.15 s; last attempt: ClientConnectorError"):
        await reward.score(batch(1))
    await reward.close()


@pytest.mark.parametrize(
    ("options", "path"),
    [({"url": "ftp://x"}, "url"), ({"deadline_s": 0.0}, "deadline_s"), ({"batch_size": 0}, "batch_size")],
)
def test_what_cannot_be_used_is_refused(options: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RemoteReward(**({"url": "http://x/"} | options))
    assert caught.value.path == path
