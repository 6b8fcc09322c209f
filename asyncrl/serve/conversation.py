"""Messages as clients write them, brought to one form, and recognised when they come back."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from asyncrl.agents.chat import tool_call_json
from asyncrl.interfaces import Message, Tool
from asyncrl.serve.failure import Refusal

__all__ = ["chain", "mark_of", "parsed_arguments", "root_mark", "text_of_parts"]

_canonical = msgspec.json.Encoder(order="deterministic")


def text_of_parts(content: Any, *, where: str) -> str:
    """The text of a message's content: a string, or parts of which each is text.

    Any: what a client sent.

    Raises:
        Refusal: there is a part of another kind. Nothing is ever fetched.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = []
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise Refusal(400, f"{where} has a part of type {kind!r}; only text is taken, and no URL is fetched")
            texts.append(part["text"])
        return "".join(texts)
    raise Refusal(400, f"{where} must be a text or a list of text parts, got {type(content).__name__}")


def parsed_arguments(arguments: Any, *, where: str) -> dict[str, Any]:
    """The arguments of a tool call, which OpenAI writes as JSON within a string.

    Any: what a client sent.
    """
    if isinstance(arguments, str):
        try:
            arguments = tool_call_json(arguments or "{}")
        except ValueError as error:
            raise Refusal(400, f"{where}: the arguments of a tool call: {error}") from error
    if not isinstance(arguments, dict):
        raise Refusal(400, f"{where}: the arguments of a tool call must be an object")
    return arguments


def mark_of(message: Message) -> bytes:
    """What identifies a message, whoever wrote it back: role, text, and calls. Ids of calls do not count."""
    content = message.get("content") or ""
    role = message["role"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or ()]
    return _canonical.encode([role, content.strip() if role == "assistant" else content, calls])


def root_mark(tools: Sequence[Tool]) -> bytes:
    """Where a conversation with these tools begins."""
    return hashlib.blake2b(_canonical.encode([tool.schema() for tool in tools]), digest_size=16).digest()


def chain(root: bytes, messages: Sequence[Message]) -> list[bytes]:
    """One mark per message, each standing for the whole conversation up to and including it."""
    marks = []
    for message in messages:
        root = hashlib.blake2b(root + mark_of(message), digest_size=16).digest()
        marks.append(root)
    return marks
