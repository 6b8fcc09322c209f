"""A client of MCP servers, without a task of its own: JSON-RPC over a process's pipes or streamable HTTP.

One request runs at a time, and nothing is read between two of them: what a server writes unasked stops at a full pipe.
The protocol is https://modelcontextprotocol.io/specification/2025-06-18, without sampling, roots and elicitation.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from asyncrl.errors import EnvironmentDeadlineError, EnvironmentFailure

if TYPE_CHECKING:
    import aiohttp

PROTOCOL_VERSION = "2025-06-18"
_LARGEST_MESSAGE_BYTES = 1 << 22
_MOST_UNASKED = 1_000
"""Messages of a server that answer nothing, while one request waits."""
_MOST_PAGES = 100
_GRACE_S = 2.0
"""Time for a server to end after its input was closed; then its process group is killed."""
_METHOD_NOT_FOUND, _INVALID_PARAMS, _INTERNAL_ERROR = -32601, -32602, -32603
_MOST_ERRORS = 10
"""Internal errors of a server that has answered nothing else."""
_INHERITED = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "USER")
_PROGRAM = """import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
try: os.execvp(sys.argv[1], sys.argv[1:])
except OSError as error: sys.exit(f"{sys.argv[1]}: {error}")
"""
"""Becomes the server, and ends with the thread that started it (PR_SET_PDEATHSIG)."""


class Transport(Protocol):
    """How messages reach one server."""

    async def open(self) -> None: ...

    def exchange(self, message: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
        """Send a message, and return what the server sends from then on, one message at a time."""
        ...

    def last_words(self) -> str:
        """Return what is known of the server's end, for an error."""
        ...

    async def close(self) -> None: ...


class StdioTransport(asyncio.SubprocessProtocol):
    """A server's process, in a session of its own; of its stderr the last characters are kept.

    Args:
        command: program and arguments.
        env: environment variables beside those that every server gets (``PATH``, ``HOME`` ...).
    """

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str]) -> None:
        self._command = list(command)
        self._env = {name: os.environ[name] for name in _INHERITED if name in os.environ} | dict(env)
        self._process: asyncio.SubprocessTransport | None = None
        self._exited = asyncio.Event()
        self._stderr = b""
        self._output: asyncio.StreamReader

    async def open(self) -> None:
        self._output = asyncio.StreamReader(limit=_LARGEST_MESSAGE_BYTES)  # which needs a running loop
        command = [sys.executable, "-I", "-S", "-c", _PROGRAM, *self._command]
        loop = asyncio.get_running_loop()
        await loop.subprocess_exec(lambda: self, *command, env=self._env, start_new_session=True)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._process = transport
        output = transport.get_pipe_transport(1)
        if output is not None:
            self._output.set_transport(output)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 1:
            self._output.feed_data(data)
        else:
            self._stderr = (self._stderr + data)[-500:]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 1:
            self._output.feed_eof()

    def process_exited(self) -> None:
        self._exited.set()

    async def exchange(self, message: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
        assert self._process is not None
        pipe = self._process.get_pipe_transport(0)
        assert isinstance(pipe, asyncio.WriteTransport)
        pipe.write(json.dumps(message).encode() + b"\n")
        if not _is_request(message):
            return
        while line := await self._output.readline():
            yield line
        with suppress(TimeoutError):  # its status is for the error that follows
            await asyncio.wait_for(self._exited.wait(), _GRACE_S / 4)

    def last_words(self) -> str:
        status = self._process.get_returncode() if self._process is not None else None
        ended = "" if status is None else f"; its process ended with status {status}"
        return ended + (f"; its stderr ends with {self._stderr.decode(errors='replace')!r}" if self._stderr else "")

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        try:
            pipe = process.get_pipe_transport(0)
            if pipe is not None:
                pipe.close()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._exited.wait(), _GRACE_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.get_pid(), signal.SIGKILL)
            process.close()
        await self._exited.wait()


class HTTPTransport:
    """A session with a server over streamable HTTP. Redirects are not followed, since they might take the key along.

    Args:
        url: of the server's endpoint.
        key_variable: environment variable that holds a bearer token; empty for none.
    """

    def __init__(self, url: str, *, key_variable: str = "") -> None:
        self._url = url
        self._headers = {"Accept": "application/json, text/event-stream", "MCP-Protocol-Version": PROTOCOL_VERSION}
        if key_variable:
            self._headers["Authorization"] = f"Bearer {os.environ.get(key_variable, '')}"
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        import aiohttp

        unlimited = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(timeout=unlimited, read_bufsize=_LARGEST_MESSAGE_BYTES)

    async def exchange(self, message: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
        import aiohttp
        from aiohttp.http_exceptions import HttpProcessingError

        assert self._session is not None
        try:
            async with self._session.post(
                self._url, json=message, headers=self._headers, allow_redirects=False
            ) as response:
                if response.status not in (200, 202):
                    raise ConnectionError(f"status {response.status}: {(await response.content.read(200))!r}")
                if session := response.headers.get("Mcp-Session-Id"):
                    self._headers["Mcp-Session-Id"] = session
                if response.content_type == "text/event-stream":
                    async for event in _events(response.content):
                        yield event
                elif _is_request(message):
                    body = b""
                    while chunk := await response.content.read(_LARGEST_MESSAGE_BYTES):
                        body += chunk
                        _check_size(body)
                    yield body
        except (aiohttp.ClientError, HttpProcessingError) as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error

    def last_words(self) -> str:
        return f" ({self._url})"

    async def close(self) -> None:
        import aiohttp

        session, self._session = self._session, None
        if session is None:
            return
        try:
            if "Mcp-Session-Id" in self._headers:
                with suppress(aiohttp.ClientError, TimeoutError):
                    async with (
                        asyncio.timeout(_GRACE_S),
                        session.delete(self._url, headers=self._headers, allow_redirects=False),
                    ):
                        pass
        finally:
            await session.close()


async def _events(lines: aiohttp.StreamReader) -> AsyncGenerator[bytes, None]:
    """Yield the data of server-sent events."""
    data = b""
    async for line in lines:
        text = line.rstrip(b"\r\n")
        if text.startswith(b"data:"):
            data += text[5:].removeprefix(b" ") + b"\n"
            _check_size(data)
        elif not text and data:
            yield data
            data = b""


def _is_request(message: Mapping[str, Any]) -> bool:
    return "id" in message and "method" in message


def _check_size(data: bytes) -> None:
    if len(data) > _LARGEST_MESSAGE_BYTES:
        raise ValueError(f"a message has more than {_LARGEST_MESSAGE_BYTES} bytes")


class MCPServer:
    """A connection to one server, for one episode.

    Args:
        name: of the server, for errors.
        transport: how messages reach it.
        deadline_s: for one request.
    """

    def __init__(self, name: str, transport: Transport, *, deadline_s: float) -> None:
        self.name = name
        self._transport = transport
        self._deadline_s = deadline_s
        self._requests = 0
        self._errors = 0
        self._works = False

    async def open(self) -> list[dict[str, Any]]:
        """Connect, and return the tools that the server lists, each with a ``name`` and an ``inputSchema``.

        Raises:
            EnvironmentFailure: it cannot be reached, ended, or does not keep to the protocol.
            EnvironmentDeadlineError: it did not answer.
        """
        try:
            await self._transport.open()
            return await self._tools()
        except (OSError, ValueError) as error:
            raise EnvironmentFailure(f"MCP server {self.name!r} cannot be used: {error}") from error

    async def _tools(self) -> list[dict[str, Any]]:
        client = {"name": "asyncrl", "version": "0"}
        await self.request("initialize", protocolVersion=PROTOCOL_VERSION, capabilities={}, clientInfo=client)
        await self._send({"jsonrpc": "2.0", "method": "notifications/initialized"})
        tools: list[dict[str, Any]] = []
        cursor: dict[str, Any] = {}
        for _ in range(_MOST_PAGES):
            page = await self.request("tools/list", **cursor)
            listed = page.get("tools")
            for each in listed if isinstance(listed, list) else [listed]:
                if not _is_tool(each):
                    raise ValueError(f"it lists a tool with a broken schema: {each!r:.300}")
                tools.append(each)
            if not isinstance(page.get("nextCursor"), str):
                return tools
            cursor = {"cursor": page["nextCursor"]}
        raise ValueError(f"it lists more than {_MOST_PAGES} pages of tools")

    async def request(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a request and return its result.

        Raises:
            ValueError: the server refused the parameters, or its tool failed, as not all its calls do.
            EnvironmentFailure: it ended, answered with another error, or does not keep to the protocol.
            EnvironmentDeadlineError: no answer came in time.
        """
        self._requests += 1
        message = {"jsonrpc": "2.0", "id": self._requests, "method": method, "params": params}
        deadline: asyncio.Timeout | None = None
        try:
            async with asyncio.timeout(self._deadline_s) as deadline:
                answer = await self._answer(message)
        except TimeoutError as error:
            if deadline is None or not deadline.expired():
                raise
            text = f"MCP server {self.name!r} gave no answer to {method} in {self._deadline_s:g} s"
            raise EnvironmentDeadlineError(text + self._transport.last_words()) from error
        except (OSError, ValueError) as error:
            text = f"MCP server {self.name!r} failed in {method}: {error}"
            raise EnvironmentFailure(text + self._transport.last_words()) from error
        problem = answer.get("error")
        problem = problem if isinstance(problem, dict) else {}
        code = problem.get("code")
        # An exception in a tool is an internal error to some servers, and a result with isError to others.
        is_error = code == _INTERNAL_ERROR and method == "tools/call"
        self._errors += is_error
        self._works |= method == "tools/call" and not is_error
        if code == _INVALID_PARAMS or (is_error and (self._works or self._errors < _MOST_ERRORS)):
            raise ValueError(str(problem.get("message", "invalid parameters")))
        result = answer.get("result")
        if not isinstance(result, dict):
            raise EnvironmentFailure(f"MCP server {self.name!r} failed in {method}: {problem or answer!r:.300}")
        return result

    async def close(self) -> None:
        """End the server's process, or the session with it. Idempotent."""
        await self._transport.close()

    async def _answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        async with aclosing(self._transport.exchange(message)) as received:
            unasked = 0
            async for text in received:
                answer = _parsed(text)
                if answer.get("id") == message["id"] and "method" not in answer:
                    return answer
                unasked += 1
                if unasked > _MOST_UNASKED:
                    raise ValueError(f"it sent {unasked} messages without a request")
                if "method" in answer and "id" in answer:  # a request of the server
                    refusal = {"error": {"code": _METHOD_NOT_FOUND, "message": "not supported"}}
                    content = {"result": {}} if answer["method"] == "ping" else refusal
                    await self._send({"jsonrpc": "2.0", "id": answer["id"], **content})
        raise ConnectionError("it closed the connection")

    async def _send(self, message: Mapping[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._deadline_s), aclosing(self._transport.exchange(message)) as received:
                async for _ in received:
                    break
        except OSError as error:
            raise EnvironmentFailure(f"MCP server {self.name!r} failed: {str(error) or 'no answer'}") from error


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it sent what is not JSON: {text[:100]!r}") from error
    if not isinstance(answer, dict) or answer.get("jsonrpc") != "2.0":
        raise ValueError(f"it sent what is not JSON-RPC: {text[:100]!r}")
    return answer


def _is_tool(value: Any) -> TypeGuard[dict[str, Any]]:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return False
    schema = value.get("inputSchema")
    if not isinstance(schema, dict) or schema.get("type") != "object":
        return False
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    return (
        isinstance(value.get("description", ""), str | None)
        and isinstance(properties, dict)
        and all(isinstance(each, dict | bool) for each in properties.values())
        and isinstance(required, list)
        and all(isinstance(each, str) for each in required)
    )
