"""Environments behind a server of OpenEnv, over its WebSocket. No package is needed.

Each episode is a connection, for which the server makes an environment. An action of one text is the reply itself; any
other is a tool, whose schema is the server's. The protocol is that of OpenEnv 0.10: ``GET /schema`` and ``/ws``.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from asyncrl.envs.calculator import question_messages
from asyncrl.envs.gymnasium import observation_text
from asyncrl.errors import ConfigError, EnvironmentFailure
from asyncrl.interfaces import Message, Step, Task, Tool

if TYPE_CHECKING:
    import aiohttp

_LARGEST_MESSAGE_BYTES = 1 << 22
_CONNECT_S = 30.0
_TOOL = "act"
_MISTAKE = "VALIDATION_ERROR"


class OpenEnvEnvironment:
    """One episode, over one connection.

    Args:
        url: of the server.
        schema: of the environment's actions.
        field: the action's text that the reply is; empty for actions as calls of a tool.
        observation: the field of an observation that is shown; all of it if empty.
        instructions: system message; none if empty.
    """

    def __init__(
        self, url: str, schema: Mapping[str, Any], *, field: str, observation: str, instructions: str, replayable: bool
    ) -> None:
        self.replayable = replayable
        self._url = url
        self._field = field
        self._observation = observation
        self._instructions = instructions
        self._tool = Tool(name=_TOOL, description=schema.get("description", "Act."), parameters=dict(schema))
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    @property
    def tools(self) -> Sequence[Tool]:
        return () if self._field else (self._tool,)

    async def reset(self, task: Task) -> Sequence[Message]:
        import aiohttp

        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, connect=_CONNECT_S))
        try:
            self._socket = await self._session.ws_connect(f"{self._url}/ws", max_msg_size=_LARGEST_MESSAGE_BYTES)
        except (aiohttp.ClientError, OSError) as error:
            raise EnvironmentFailure(f"{self._url} cannot be reached: {error}") from error
        found = await self._ask("reset", {"seed": task["seed"]})
        return question_messages(self._text(found), instructions=self._instructions)

    async def step(self, reply: Message) -> Step:
        calls = list(reply.get("tool_calls", ()))
        if self._field:
            action: Any = {self._field: str(reply.get("content") or "")}
        elif len(calls) == 1 and calls[0]["function"]["name"] == _TOOL and not reply.get("malformed"):
            action = calls[0]["function"]["arguments"]
        else:
            return Step(messages=(self._message(f"error: call {_TOOL} once", calls),), info={"mistake": True})
        try:
            found = await self._ask("step", action)
        except ValueError as error:
            return Step(messages=(self._message(f"error: {error}", calls),), info={"mistake": True})
        done = bool(found.get("done"))
        messages = () if done else (self._message(self._text(found), calls),)
        return Step(messages=messages, reward=float(found.get("reward") or 0.0), done=done)

    async def close(self) -> None:
        if self._socket is not None:
            await self._socket.close()
        if self._session is not None:
            await self._session.close()

    def _message(self, text: str, calls: Sequence[Mapping[str, Any]]) -> Message:
        if not calls:
            return {"role": "user", "content": text}
        return {"role": "tool", "tool_call_id": calls[0].get("id", ""), "name": _TOOL, "content": text}

    def _text(self, found: Mapping[str, Any]) -> str:
        observation = found.get("observation")
        if self._observation:
            if not isinstance(observation, Mapping) or self._observation not in observation:
                raise EnvironmentFailure(f"an observation has no {self._observation!r}: {observation!r:.200}")
            observation = observation[self._observation]
        return observation_text(observation)

    async def _ask(self, kind: str, data: Any) -> dict[str, Any]:
        """Send a message and return the observation; raise ValueError if the server refuses the action."""
        assert self._socket is not None
        try:
            await self._socket.send_str(json.dumps({"type": kind, "data": data}))
            answer = json.loads(await self._socket.receive_str())
            content = dict(answer["data"])
        except (TypeError, ValueError, KeyError, ConnectionError) as error:
            raise EnvironmentFailure(f"{self._url} gave no answer to {kind}: {error}") from error
        if answer.get("type") == "error":
            if content.get("code") == _MISTAKE:
                raise ValueError(f"{content.get('message')}: {json.dumps(content.get('errors'))[:500]}")
            raise EnvironmentFailure(f"{self._url} failed in {kind}: {content.get('code')}: {content.get('message')}")
        return content


class OpenEnvFactory:
    """Episodes of a server by seed: task n of a split is a seed of its own.

    Args:
        url: of the server, ``http://host:port``. It must allow as many environments at a time as a worker has episodes.
        field: the field of an action that the reply is. By default, the only one that is required, if it is a text;
            otherwise actions are calls of the tool ``act``. ``""`` asks for the tool.
        observation: the field of an observation that is shown to the model; all fields if empty.
        instructions: system message; none if empty.
        replayable: whether a killed run may repeat the actions of its unfinished episodes.
    """

    def __init__(
        self,
        *,
        url: str,
        seed: int = 0,
        field: str | None = None,
        observation: str = "",
        instructions: str = "",
        replayable: bool = True,
    ) -> None:
        if not re.match(r"https?://[^/\s]+", url):
            raise ConfigError(f"url is {url!r}", path="env.options.url", remedy="http://host:port")
        self._url = url.rstrip("/")
        self._seed = seed
        self._options: dict[str, Any] = {
            "observation": observation, "instructions": instructions, "replayable": replayable
        }  # fmt: skip
        self._schema = _schema_of(self._url)
        properties = self._schema.get("properties", {})
        required = self._schema.get("required", [])
        if field is None:
            texts = len(required) == 1 and properties.get(required[0], {}).get("type") == "string"
            field = required[0] if texts else ""
        elif field and field not in properties:
            raise ConfigError(f"actions have no {field!r}", path="env.options.field", remedy=f"of {list(properties)}")
        self._field = field or ""

    def task(self, index: int, *, split: Literal["train", "held_out"]) -> Task:
        return {"seed": (self._seed << 20) % (1 << 30) + 2 * index + (split == "held_out")}

    def make(self) -> OpenEnvEnvironment:
        return OpenEnvEnvironment(self._url, self._schema, field=self._field, **self._options)

    def demonstration(self, index: int) -> list[Message]:
        raise ConfigError("openenv has no demonstrations", path="sft", remedy="start from a pretrained model")


def _schema_of(url: str) -> dict[str, Any]:
    """Return the schema of the actions; raise ConfigError if the server has none. Blocks."""
    try:
        with urllib.request.urlopen(f"{url}/schema", timeout=_CONNECT_S) as response:  # noqa: S310  http, as checked
            found = dict(json.loads(response.read(_LARGEST_MESSAGE_BYTES))["action"])
    except (ValueError, KeyError, TypeError, OSError) as error:
        text = f"{url}/schema cannot be read: {type(error).__name__}: {error}"
        raise ConfigError(text, path="env.options.url", remedy="start the server, or correct the address") from error
    for name in ("title", "additionalProperties"):
        found.pop(name, None)
    found.get("properties", {}).pop("metadata", None)  # of the protocol, not of the environment
    return found
