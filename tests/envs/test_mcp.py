"""MCP servers as tools: on stdio, over HTTP, several at once, and servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web

from asyncrl.config import Config
from asyncrl.envs.mcp import MCPFactory
from asyncrl.errors import ConfigError, EnvironmentDeadlineError, EnvironmentFailure
from asyncrl.interfaces import EnvironmentReplay
from asyncrl.tasks.run import train

SERVER = Path(__file__).with_name("mcp_server.py")
Play = Callable[..., Any]


def on_stdio(manner: str = "well") -> dict[str, Any]:
    return {"command": [sys.executable, "-I", "-S", str(SERVER), manner]}


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """Sums with their answers; 3 of 4 rows have the answer that the policy below gives."""
    file = tmp_path / "rows.jsonl"
    lines = []
    for number in range(16):
        answer = 2 * number + 3 if number % 4 else -1
        content = f"{number}+{number + 3}"
        row = {"prompt": [{"role": "user", "content": content}], "data_source": "sums"}
        lines.append(json.dumps(row | {"reward_model": {"ground_truth": str(answer)}}))
    file.write_text("\n".join(lines))
    return str(file)


def call(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def adding(tool: str) -> Callable[[str], str]:
    """A policy that calls a tool with the question's operands, then says what the tool answered."""

    def said(text: str) -> str:
        question = text.partition("<|user|>")[2].partition("<|end|>")[0]
        if "<|tool|>" not in text:
            a, b = question.split("+")
            return call(tool, {"a": int(a), "b": int(b)})
        return text.rpartition("<|tool|>")[2].partition("<|end|>")[0].split("\n")[0].strip()

    return said


def factory_of(rows: str, **options: Any) -> MCPFactory:
    return MCPFactory(**{"files": rows, "reward": "exact", "order": "file", "servers": {"sums": on_stdio()}, **options})


@pytest.mark.slow
async def test_a_hundred_episodes_with_a_server_each(rows: str, play_many: Play) -> None:
    trajectories = await play_many(factory_of(rows), adding("add"), episodes=104)
    assert [each.reward for each in trajectories] == [float(index % 4 > 0) for index in range(104)]
    assert {each.finish_reason for each in trajectories} == {"done"}
    assert {len(each.turns) for each in trajectories} == {2}


async def test_tools_are_those_of_the_servers(rows: str) -> None:
    factory = factory_of(rows, servers={"one": on_stdio(), "two": on_stdio("asks")})
    environment = factory.make()
    try:
        await environment.reset(factory.task(0, split="train"))
        assert [each.name for each in environment.tools] == ["one_add", "one_sums", "two_add", "two_sums"]
        first = environment.tools[0].schema()["function"]
        assert first["description"] == "Add two integers."
        assert first["parameters"]["required"] == ["a", "b"]
        calls = [
            {"function": {"name": "two_add", "arguments": {"a": 1, "b": 2}}},
            {"function": {"name": "two_add", "arguments": {"a": "x"}}},
            {"function": {"name": "two_sums", "arguments": {}}},
            {"function": {"name": "one_sums", "arguments": {}}},
            {"function": {"name": "sums", "arguments": {}}},
            {"function": {"name": "one_sums", "arguments": "none"}},
        ]
        step = await environment.step({"role": "assistant", "content": "", "tool_calls": calls})
        assert [message["content"] for message in step.messages] == [
            "3\n(image, not shown)",
            "error: a and b must be integers",
            '{"sums": [3]}',
            '{"sums": []}',
            "error: there is no tool 'sums'; there are: one_add, one_sums, two_add, two_sums",
            "error: arguments must be a JSON object, got str",
        ]
        assert isinstance(environment, EnvironmentReplay)
        assert not environment.replayable
    finally:
        await environment.close()
        await environment.close()


async def test_a_tool_that_raises_in_its_server_is_answered(rows: str) -> None:
    factory = factory_of(rows, servers={"sums": on_stdio("raises")})
    environment = factory.make()
    try:
        await environment.reset(factory.task(0, split="train"))
        call = {"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
        reply = {"role": "assistant", "content": "", "tool_calls": [call]}
        for _ in range(9):
            (message,) = (await environment.step(reply)).messages
            assert message["content"] == "error: no add"
        with pytest.raises(EnvironmentFailure, match="'sums' failed in tools/call"):  # it does nothing else
            await environment.step(reply)
    finally:
        await environment.close()


@pytest.mark.parametrize(
    ("manner", "error", "says"),
    [
        ("dies", EnvironmentFailure, "closed the connection; its process ended with status 3; its stderr ends with"),
        ("prints", EnvironmentFailure, "it sent what is not JSON: b'a debugging line"),
        ("floods", EnvironmentFailure, "'sums' failed in tools/call: Separator is not found"),
        ("chatters", EnvironmentFailure, "it sent 1001 messages without a request"),
        ("hangs", EnvironmentDeadlineError, "'sums' gave no answer to tools/call in 1 s"),
        ("refuses", EnvironmentFailure, "'sums' failed in tools/call: {'code': -32000"),
        ("broken", EnvironmentFailure, "'sums' cannot be used: it lists a tool with a broken schema: {'name': 'add'"),
        ("repeats", EnvironmentFailure, "MCP server 'sums' lists a second tool that would be named 'sums_add'"),
        ("forks", None, ""),
        ("stays", None, ""),
    ],
)  # fmt: skip
async def test_a_server_that_misbehaves_costs_its_episode(
    manner: str, error: type[Exception] | None, says: str, rows: str, play_many: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.envs.mcp_client._GRACE_S", 0.2)
    factory = factory_of(rows, servers={"sums": on_stdio(manner)}, deadline_s=1.0 if manner == "hangs" else 20.0)
    ended = await play_many(factory, adding("add"), episodes=2)
    if error is None:
        assert [each.reward for each in ended] == [0.0, 1.0]
    else:
        assert [type(each) for each in ended] == [error, error]
        assert says in str(ended[0])


class HTTPServer:
    """Answers in JSON or in events, and counts sessions."""

    def __init__(self) -> None:
        self.opened = self.deleted = 0
        self.manner = "json"
        self.keys: set[str | None] = set()

    async def delete(self, request: web.Request) -> web.Response:
        assert request.headers["Mcp-Session-Id"]
        self.deleted += 1
        if self.manner == "redirects":
            raise web.HTTPTemporaryRedirect(str(request.url.with_host("localhost")))
        return web.Response()

    async def post(self, request: web.Request) -> web.StreamResponse:
        message = await request.json()
        self.keys.add(request.headers.get("Authorization"))
        if "id" not in message:
            return web.Response(status=202)
        headers: dict[str, str] = {}
        if message["method"] == "initialize":
            self.opened += 1
            headers["Mcp-Session-Id"] = str(self.opened)
            result: dict[str, Any] = {"protocolVersion": "2025-06-18"}
        elif message["method"] == "tools/list":
            result = {"tools": [{"name": "add", "inputSchema": {"type": "object"}}]}
        else:
            assert request.headers["Mcp-Session-Id"]
            if self.manner == "fails":
                return web.Response(status=500, text="out of luck")
            if self.manner == "floods":
                return web.Response(body=b" " * (5 << 20))
            arguments = message["params"]["arguments"]
            result = {"content": [{"type": "text", "text": str(arguments["a"] + arguments["b"])}]}
        answer = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result})
        if self.manner == "json":
            return web.Response(text=answer, content_type="application/json", headers=headers)
        events = web.StreamResponse(headers={"Content-Type": "text/event-stream", **headers})
        await events.prepare(request)
        if self.manner == "floods events":
            await events.write(b"data: " + b"x" * (9 << 20) + b"\n\n")
        notice = json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {}})
        await events.write(f": hello\n\nevent: message\ndata: {notice}\n\ndata: {answer}\n\n".encode())
        return events


@pytest.fixture
async def http_server() -> AsyncIterator[tuple[HTTPServer, str]]:
    server = HTTPServer()
    application = web.Application()
    application.router.add_post("/mcp", server.post)
    application.router.add_delete("/mcp", server.delete)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield server, f"http://127.0.0.1:{runner.addresses[0][1]}/mcp"
    await runner.cleanup()


@pytest.mark.parametrize("manner", ["json", "events"])
async def test_a_server_over_http(
    manner: str, http_server: tuple[HTTPServer, str], rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUMS_KEY", "secret")
    server, url = http_server
    server.manner = manner
    factory = factory_of(rows, servers={"sums": {"url": url, "api_key_env": "SUMS_KEY"}, "more": on_stdio()})
    environment = factory.make()
    await environment.reset(factory.task(1, split="train"))
    calls = [{"function": {"name": "sums_add", "arguments": {"a": 1, "b": 2}}}]
    step = await environment.step({"role": "assistant", "content": "", "tool_calls": calls})
    assert step.messages[0]["content"] == "3"
    assert (await environment.step({"role": "assistant", "content": "5"})).reward == 1.0
    await environment.close()
    assert server.opened == server.deleted == 1
    assert server.keys == {"Bearer secret"}


@pytest.mark.parametrize(
    ("manner", "says"),
    [
        ("fails", "'sums' failed in tools/call: status 500: b'out of luck'"),
        ("floods", "'sums' failed in tools/call: a message has more than 4194304 bytes"),
        ("floods events", "'sums' failed in tools/call: LineTooLong"),
    ],
)
async def test_an_http_server_that_misbehaves(
    manner: str, says: str, http_server: tuple[HTTPServer, str], rows: str
) -> None:
    server, url = http_server
    factory = factory_of(rows, servers={"sums": {"url": url}})
    environment = factory.make()
    await environment.reset(factory.task(1, split="train"))
    server.manner = manner
    calls = [{"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}]
    with pytest.raises(EnvironmentFailure) as caught:
        await environment.step({"role": "assistant", "content": "", "tool_calls": calls})
    await environment.close()
    assert says in str(caught.value)


async def test_the_end_of_a_session_follows_no_redirect(http_server: tuple[HTTPServer, str], rows: str) -> None:
    server, url = http_server
    factory = factory_of(rows, servers={"sums": {"url": url}})
    environment = factory.make()
    await environment.reset(factory.task(1, split="train"))
    server.manner = "redirects"
    await environment.close()
    assert server.deleted == 1


async def test_a_server_that_nobody_started(rows: str) -> None:
    factory = factory_of(rows, servers={"sums": {"url": "http://127.0.0.1:9/mcp"}})
    environment = factory.make()
    with pytest.raises(EnvironmentFailure, match="'sums' failed in initialize: ClientConnectorError"):
        await environment.reset(factory.task(0, split="train"))
    await environment.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"servers": {}}, "mcp has no server"),
        ({"servers": {"a": {}}}, "'a' has the keys []"),
        ({"servers": {"a": {"command": ["true"], "url": "http://h"}}}, "has the keys"),
        ({"servers": {"a": {"command": ["no-such-program"]}}}, "there is no program 'no-such-program'"),
        ({"servers": {"a": {"command": "true"}}}, "command is 'true'"),
        ({"servers": {"a": {"url": "h"}}}, "url is 'h'"),
        ({"servers": {"a": {"url": "http://h", "api_key_env": "NO_SUCH_KEY"}}}, "NO_SUCH_KEY is not set"),
        ({"tools": []}, "takes its tools from servers"),
        ({"tool_deadline_s": 9.0}, "takes its tools from servers"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], says: str, rows: str) -> None:
    with pytest.raises(ConfigError) as caught:
        factory_of(rows, **options)
    assert says in str(caught.value)


@pytest.mark.slow
def test_a_run_with_a_server_for_each_episode(rows: str, small_config: Callable[..., Config], tmp_path: Path) -> None:
    said = tmp_path / "said.jsonl"
    said.write_text("\n".join(json.dumps({"prompt": f"{n}+{n + 3}", "response": str(2 * n + 3)}) for n in range(16)))
    options = {
        "files": rows,
        "held_out": rows.replace("rows", "test"),
        "reward": "exact",
        "servers": {"sums": on_stdio()},
        "demonstrations": str(said),
    }
    Path(options["held_out"]).write_text(json.dumps({**json.loads(Path(rows).read_text().splitlines()[1])}))
    env = {"name": "asyncrl.envs.mcp:MCPFactory", "max_turns": 2, "options": options}
    layers = {"options": {"max_position": 512, "hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2}}
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    summary = train(small_config(env=env, model=layers, rollout={"max_seq_len": 400}, eval={"tasks": 1}))
    assert summary["steps"] == 3
    assert summary["tokens"]["generated"] > 0
    assert not summary.get("failures")
    assert {each.pid for each in psutil.Process().children(recursive=True)} <= before


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["stdio", "http"])
async def test_servers_of_the_official_package(transport: str, rows: str, tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = tmp_path / "sums.py"
    run = "stdio" if transport == "stdio" else f"streamable-http', port={port}, host='127.0.0.1"
    program.write_text(
        f"""
from mcp.server import MCPServer
server = MCPServer("sums")

@server.tool()
def add(a: int, b: int) -> int:
    "Add two integers."
    if a > 100:
        raise ValueError("too large")
    return a + b

server.run(transport='{run}')
"""
    )
    started = None
    paths = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}  # which has the package in .ci/run
    table: dict[str, Any] = {"command": [sys.executable, str(program)], "env": paths}
    if transport == "http":
        started = await asyncio.create_subprocess_exec(sys.executable, str(program))
        table = {"url": f"http://127.0.0.1:{port}/mcp"}
    factory = factory_of(rows, servers={"sums": table})
    environment = factory.make()
    try:
        async with asyncio.timeout(60):
            while started is not None and not is_open(port):
                await asyncio.sleep(0.2)
            await environment.reset(factory.task(1, split="train"))
        (tool,) = environment.tools
        assert tool.description == "Add two integers."
        arguments = [{"a": 1, "b": 2}, {"a": 101, "b": 2}, {"a": "x", "b": 2}]
        calls = [{"function": {"name": "add", "arguments": each}} for each in arguments]
        step = await environment.step({"role": "assistant", "content": "", "tool_calls": calls})
        answers = [message["content"] for message in step.messages]
        assert answers[0] == "3"
        assert all(answer.startswith("error: ") for answer in answers[1:])
    finally:
        await environment.close()
        if started is not None:
            started.kill()
            await started.wait()


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
