"""Environments behind a server of OpenEnv: a stand-in for every case, and the package's own server."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from asyncrl.envs.openenv import OpenEnvFactory
from asyncrl.errors import ConfigError, EnvironmentFailure

Play = Callable[..., Any]
PACKAGES = os.environ.get("ASYNCRL_OPENENV_PACKAGES", "")
"""Folder with openenv and what it needs, which is not in the exact set."""
SERVER = Path(__file__).with_name("openenv_server.py")
TEXT = {"properties": {"message": {"type": "string"}, "metadata": {"type": "object"}}, "required": ["message"]}
PAIR = {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}


@asynccontextmanager
async def served(schema: dict[str, Any]) -> AsyncIterator[str]:
    """Counts steps to 3; ``boom`` fails, ``gone`` closes, a number that is no number is refused."""

    async def play(request: web.Request) -> web.WebSocketResponse:
        connection, steps = web.WebSocketResponse(), 0
        await connection.prepare(request)
        async for message in connection:
            asked = json.loads(message.data)
            action = asked["data"]
            if action.get("message") == "boom":
                answer = {"type": "error", "data": {"message": "broken", "code": "EXECUTION_ERROR"}}
            elif action.get("message") == "gone":
                break
            elif not isinstance(action.get("a", 0), int):
                answer = {"type": "error", "data": {"message": "no", "code": "VALIDATION_ERROR", "errors": ["a"]}}
            else:
                steps = 0 if asked["type"] == "reset" else steps + 1
                seen = {"echoed": action.get("message", action.get("seed")), "length": steps}
                answer = {"type": "observation", "data": {"observation": seen, "reward": steps / 2, "done": steps == 3}}
            await connection.send_str(json.dumps(answer))
        return connection

    async def schemas(_: web.Request) -> web.Response:
        return web.json_response({"action": {"title": "A", "type": "object", **schema}})

    app = web.Application()
    app.add_routes([web.get("/ws", play), web.get("/schema", schemas)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"content": "", "tool_calls": [{"id": "7", "function": {"name": name, "arguments": arguments}}]}


async def test_an_action_of_one_text_is_the_reply():
    async with served(TEXT) as url:
        factory = await asyncio.to_thread(OpenEnvFactory, url=url, seed=1, instructions="Be kind.")
        environment = factory.make()
        messages = await environment.reset(factory.task(3, split="train"))
        assert [each["content"] for each in messages] == ["Be kind.", "echoed: 1048582\nlength: 0"]
        assert environment.tools == ()
        step = await environment.step({"content": "hello"})
        assert (step.messages, step.reward, step.done) == (
            ({"role": "user", "content": "echoed: hello\nlength: 1"},), 0.5, False
        )  # fmt: skip
        await environment.step({"content": "hello"})
        last = await environment.step({"content": "hello"})
        assert (last.messages, last.reward, last.done) == ((), 1.5, True)
        await environment.close()
    assert factory.task(0, split="train") != factory.task(0, split="held_out")


async def test_other_actions_are_calls_of_a_tool_and_refused_ones_are_answered():
    async with served(PAIR) as url:
        factory = await asyncio.to_thread(OpenEnvFactory, url=url, observation="length")
        environment = factory.make()
        assert (await environment.reset(factory.task(0, split="train")))[0]["content"] == "0"
        assert environment.tools[0].parameters == {"type": "object", **PAIR}
        step = await environment.step(call("act", a=1, b=2))
        assert step.messages == ({"role": "tool", "tool_call_id": "7", "name": "act", "content": "1"},)
        for reply in (call("act", a="x"), call("jump"), {"content": "a=1"}):
            step = await environment.step(reply)
            assert (step.messages[0]["content"].startswith("error: "), step.info) == (True, {"mistake": True})
        await environment.close()


@pytest.mark.parametrize(
    ("message", "words"), [("boom", "EXECUTION_ERROR: broken"), ("gone", "gave no answer to step")]
)
async def test_what_the_server_does_wrong_is_a_failure(message: str, words: str):
    async with served(TEXT) as url:
        factory = await asyncio.to_thread(OpenEnvFactory, url=url)
        environment = factory.make()
        await environment.reset(factory.task(0, split="train"))
        with pytest.raises(EnvironmentFailure, match=words):
            await environment.step({"content": message})
        await environment.close()
    with pytest.raises(EnvironmentFailure, match="cannot be reached"):
        await factory.make().reset(factory.task(0, split="train"))


def test_a_server_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="url is"):
        OpenEnvFactory(url="ws://x")
    with pytest.raises(ConfigError, match="/schema cannot be read"):
        OpenEnvFactory(url="http://127.0.0.1:1")


@pytest.mark.slow
async def test_episodes_against_openenvs_own_server(play_many: Play):
    if not PACKAGES:
        pytest.skip("needs ASYNCRL_OPENENV_PACKAGES")
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    command = [sys.executable, str(SERVER), str(listener.fileno())]
    server = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": PACKAGES}, pass_fds=[listener.fileno()])
    listener.close()
    try:
        factory = await asyncio.to_thread(OpenEnvFactory, url=url, observation="text")
        ended = await play_many(factory, lambda prompt: "abc", episodes=50)
    finally:
        server.terminate()
        server.wait()
    assert [each.reward for each in ended] == [9.0] * 50
