"""What a request may ask for. Everything here is checked before any work is done for it."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

import numpy as np

from asyncrl.errors import ConfigError

__all__ = ["BodyWatch", "Limits", "json_problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of the server; a request past one of them is refused by name.

    Attributes:
        body_size_bytes: of a request.
        chunked_body_size_bytes: of one that does not tell its length, and so is read before it is refused.
        header_size_bytes: of the request line, and of each header.
        headers: how many of them.
        json_depth: objects and arrays inside each other.
        json_containers: objects and arrays altogether (each costs far more memory than its two bytes).
        json_strings: strings altogether (likewise).
        choices: ``n``.
        new_tokens: ``max_tokens`` of one choice.
        default_new_tokens: where a request names none.
        stop_strings: stop strings, and stop tokens.
        stop_length: characters of a stop string.
        top_log_probs: likeliest tokens told per position.
        grammar_size_bytes: of a grammar, and so of the schemas it is made of.
        messages: of a conversation.
        tools: declared by a request.
        prompts: of one /v1/completions request.
        concurrent_requests: choices being generated, for everybody.
        concurrent_requests_per_key: likewise, for one key.
        connections: open at a time; further ones are closed at once.
        body_timeout_s: for a body to arrive.
        idle_timeout_s: for the next request, its headers included, on a connection.
        write_timeout_s: for a client to take what was sent.
        request_timeout_s: for a generation from its beginning to its end.
        sessions: held at a time.
        session_tokens: of one session, all of its branches together.
        captured_tokens: of all sessions together.
        session_idle_s: until a session that nobody uses is given up.
    """

    body_size_bytes: int = 8 << 20
    chunked_body_size_bytes: int = 1 << 20
    header_size_bytes: int = 8 << 10
    headers: int = 64
    json_depth: int = 32
    json_containers: int = 100_000
    json_strings: int = 100_000
    choices: int = 64
    new_tokens: int = 131_072
    default_new_tokens: int = 2048
    stop_strings: int = 16
    stop_length: int = 256
    top_log_probs: int = 20
    grammar_size_bytes: int = 64 << 10
    messages: int = 4096
    tools: int = 128
    prompts: int = 256
    concurrent_requests: int = 4096
    concurrent_requests_per_key: int = 1024
    connections: int = 8192
    body_timeout_s: float = 30.0
    idle_timeout_s: float = 75.0
    write_timeout_s: float = 30.0
    request_timeout_s: float = 3600.0
    sessions: int = 65_536
    session_tokens: int = 1 << 20
    captured_tokens: int = 1 << 26
    session_idle_s: float = 3600.0

    def __post_init__(self) -> None:
        for each in fields(self):
            if getattr(self, each.name) <= 0:
                raise ConfigError(f"{each.name} must be positive, got {getattr(self, each.name)}", path=each.name)


_STRING = re.compile(rb'"[^"]*+"?')
_NEITHER = bytes(set(range(256)) - set(b'[]{}"'))
_BEGINNING_BYTES = 4096


def json_problem(body: bytes, limits: Limits) -> str:
    """Why ``body`` is not worth parsing; empty if it is.

    Brackets within strings do not count. The beginning of a long body is looked at first: what breaks a rule there
    does so whatever follows.
    """
    if len(body) > _BEGINNING_BYTES and (problem := _bracket_problem(body[:_BEGINNING_BYTES], limits)):
        return problem
    if _count(body, b'"') > 2 * limits.json_strings:
        quotes = _without_escapes(body).count(b'"')
        if quotes > 2 * limits.json_strings:
            return f"{quotes // 2} strings; at most {limits.json_strings} are taken"
    return _bracket_problem(body, limits)


class BodyWatch:
    """Looks at a body while it arrives, so that one which breaks a rule is refused when it does, not when it ends.

    Counts are taken of each piece; what has come is looked at whole only when they pass a limit, and again when they
    have doubled. A body that is complete still has to pass :func:`json_problem`.

    >>> watch = BodyWatch(Limits(json_containers=3))
    >>> watch.problem(b"[[[], "), watch.problem(b"[], ")
    ('', '4 arrays and objects; at most 3 are taken')
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._pieces: list[bytes] = []
        self._opened = self._quotes = 0
        self._look_at_opened = limits.json_containers
        self._look_at_quotes = 2 * limits.json_strings
        self.size_bytes = 0

    def problem(self, piece: bytes) -> str:
        """Why the body that goes on with ``piece`` need not be waited for; empty if it must."""
        first = not self._pieces
        self._pieces.append(piece)
        self.size_bytes += len(piece)
        self._opened += _opening_brackets(piece)
        self._quotes += _count(piece, b'"')
        if self._opened > self._look_at_opened or self._quotes > self._look_at_quotes:
            self._look_at_opened = max(self._look_at_opened, 2 * self._opened)
            self._look_at_quotes = max(self._look_at_quotes, 2 * self._quotes)
            return json_problem(self.body(), self._limits)
        return _bracket_problem(piece[:_BEGINNING_BYTES], self._limits) if first else ""

    def body(self) -> bytes:
        """All that came."""
        return b"".join(self._pieces)


def _count(body: bytes, character: bytes) -> int:
    """``body.count(character)``, which looks at one byte after the other, in a fifth of its time."""
    if len(body) <= _BEGINNING_BYTES:
        return body.count(character)
    return int(np.count_nonzero(np.frombuffer(body, np.uint8) == character[0]))


def _opening_brackets(body: bytes) -> int:
    return _count(body, b"[") + _count(body, b"{")


def _without_escapes(body: bytes) -> bytes:
    """``body`` less the quotes that end no string, and what makes them so."""
    return body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body


def _bracket_problem(body: bytes, limits: Limits) -> str:
    """Bodies with few brackets, nearly all, are told by two counts; of others only brackets are walked in Python."""
    if _opening_brackets(body) <= limits.json_depth:
        return ""
    body = _without_escapes(body)
    # Two quotes side by side are a string without a bracket; without them what is within strings is the same still.
    brackets = _STRING.sub(b"", body.translate(None, _NEITHER).replace(b'""', b""))
    opened = brackets.count(b"[") + brackets.count(b"{")
    if opened > limits.json_containers:
        return f"{opened} arrays and objects; at most {limits.json_containers} are taken"
    depth = 0
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        if depth > limits.json_depth:
            return f"nested deeper than {limits.json_depth} arrays and objects"
    return ""
