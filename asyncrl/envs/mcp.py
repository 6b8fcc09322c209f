"""MCP servers as tools: the model sees them beside the rows of a data set, whose rule gives the reward.

Each episode has connections of its own: a server on stdio is a process that begins and ends with the episode, a server
over HTTP gets a session. A server that ends, gives no answer, floods, or does not keep to the protocol costs its
episode, under its name. What the model does wrong (an unknown tool, arguments that the server refuses, a result marked
``isError``) is answered.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.envs.dataset import DatasetEnvironment, DatasetFactory
from asyncrl.envs.mcp_client import HTTPTransport, MCPServer, StdioTransport
from asyncrl.envs.tools import Toolbox
from asyncrl.errors import ConfigError, EnvironmentFailure
from asyncrl.interfaces import Message, Task, Tool
from asyncrl.rewards.rules import Rulebook
from asyncrl.runtime import run_all

_LONGEST_ANSWER = 20_000
"""Characters of a tool's answer that the model is shown."""


class MCPTool:
    """A tool of a server; its schema is the server's, and the server checks the arguments."""

    def __init__(self, server: MCPServer, listed: Mapping[str, Any], *, name: str) -> None:
        self._server = server
        self._listed_name = listed["name"]
        self.tool = Tool(name=name, description=listed.get("description") or "", parameters=listed["inputSchema"])

    @property
    def name(self) -> str:
        return self.tool.name

    async def call(self, arguments: object, *, deadline_s: float) -> str:
        """Return the server's answer as text. The deadline is that of the server.

        Raises:
            ValueError: a mistake of the model; the message is for the model.
            EnvironmentFailure: the server failed.
            EnvironmentDeadlineError: it gave no answer.
        """
        del deadline_s
        if not isinstance(arguments, Mapping):
            raise ValueError(f"arguments must be a JSON object, got {type(arguments).__name__}")
        result = await self._server.request("tools/call", name=self._listed_name, arguments=dict(arguments))
        text = _text(result)
        if len(text) > _LONGEST_ANSWER:
            text = f"{text[:_LONGEST_ANSWER]} ... ({len(text)} characters)"
        if result.get("isError"):
            raise ValueError(text)
        return text


class MCPEnvironment(DatasetEnvironment):
    """One prompt, tools of servers on the way, and the first message without a call as the answer."""

    deterministic = False  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]  of all tasks

    def __init__(self, rules: Rulebook, servers: Sequence[MCPServer], *, replayable: bool) -> None:
        super().__init__(rules)
        self.replayable = replayable
        self._servers = servers

    async def reset(self, task: Task) -> Sequence[Message]:
        listed = await run_all(server.open() for server in self._servers)
        tools = [(server, each) for server, each_of in zip(self._servers, listed, strict=True) for each in each_of]
        times = Counter(each["name"] for _, each in tools)
        named: dict[str, MCPTool] = {}
        for server, each in tools:
            name = each["name"] if times[each["name"]] == 1 else f"{server.name}_{each['name']}"
            if name in named:
                raise EnvironmentFailure(f"MCP server {server.name!r} lists a second tool that would be named {name!r}")
            named[name] = MCPTool(server, each, name=name)
        self._toolbox = Toolbox(named.values())
        return await super().reset(task)

    async def close(self) -> None:
        await run_all(server.close() for server in self._servers)
        await super().close()


class MCPFactory(DatasetFactory):
    """Tasks from the rows of files, with the tools of MCP servers.

    Args:
        servers: by name, each a table with either ``command`` (program and arguments of a server on stdio) and perhaps
            ``env`` (environment variables, beside ``PATH``, ``HOME`` and the like), or ``url`` (streamable HTTP) and
            perhaps ``api_key_env`` (the environment variable with its bearer token). Tools of two servers that have one
            name get the server's before it: ``notes_search``.
        deadline_s: for each request to a server.
        replayable: whether a killed run may repeat the calls of its unfinished episodes: no call has an effect outside
            the episode.
        options: those of :class:`~asyncrl.envs.dataset.DatasetFactory`, without those of tools.
            Declarations of servers' tools do not count in the filter of long prompts: episodes ask for them.

    Raises:
        ConfigError: a server's table cannot be used, or the data set's options cannot.
    """

    def __init__(
        self,
        *,
        servers: Mapping[str, Mapping[str, Any]],
        deadline_s: float = 30.0,
        replayable: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> None:
        for name, remedy in (("tools", "leave it out"), ("tool_deadline_s", "give deadline_s")):
            if name in options:
                raise ConfigError("mcp takes its tools from servers", path=f"env.options.{name}", remedy=remedy)
        super().__init__(seed=seed, **options)
        if not servers or deadline_s <= 0:
            remedy = 'a table for each server: servers.notes = { command = ["notes-server"] }, and deadline_s > 0'
            raise ConfigError("mcp has no server, or no time for it", path="env.options.servers", remedy=remedy)
        for name, table in servers.items():
            _check_table(name, table)
        self._servers = {name: dict(table) for name, table in servers.items()}
        self._deadline_s = deadline_s
        self._replayable = replayable

    def make(self) -> MCPEnvironment:
        servers = [
            MCPServer(name, _transport(table), deadline_s=self._deadline_s) for name, table in self._servers.items()
        ]
        return MCPEnvironment(self._rules, servers, replayable=self._replayable)


def _transport(table: Mapping[str, Any]) -> StdioTransport | HTTPTransport:
    if "url" in table:
        return HTTPTransport(table["url"], key_variable=table.get("api_key_env", ""))
    return StdioTransport(table["command"], env=table.get("env", {}))


def _check_table(name: str, table: Mapping[str, Any]) -> None:
    path = f"env.options.servers.{name}"
    keys = set(table)
    if not (keys <= {"command", "env"} and "command" in keys) and not (
        keys <= {"url", "api_key_env"} and "url" in keys
    ):
        remedy = "either command, and perhaps env, or url, and perhaps api_key_env"
        raise ConfigError(f"MCP server {name!r} has the keys {sorted(keys)}", path=path, remedy=remedy)
    if "url" in keys and not re.match(r"https?://[^/\s]+", str(table["url"])):
        raise ConfigError(f"url is {table['url']!r}", path=f"{path}.url", remedy="http://host:port/path")
    if (variable := table.get("api_key_env")) and not os.environ.get(variable):
        raise ConfigError(f"{variable} is not set here", path=f"{path}.api_key_env", remedy="set it")
    command = table.get("command", ["true"])
    if not isinstance(command, list) or not command or not all(isinstance(each, str) for each in command):
        raise ConfigError(f"command is {command!r}", path=f"{path}.command", remedy='["program", "argument"]')
    if shutil.which(command[0]) is None:
        raise ConfigError(f"there is no program {command[0]!r}", path=f"{path}.command", remedy="install it")


def _text(result: Mapping[str, Any]) -> str:
    """Return the texts of a result, and what else it has by its type; the structured content if there is none."""
    content = result.get("content")
    parts = [each for each in content if isinstance(each, dict)] if isinstance(content, list) else []
    if not parts and "structuredContent" in result:
        return json.dumps(result["structuredContent"])
    return "\n".join(
        str(each.get("text", "")) if each.get("type") == "text" else f"({each.get('type')}, not shown)"
        for each in parts
    )
