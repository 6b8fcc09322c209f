"""Limits: what a request may ask for, checked before any work is done, and how many generations may run at a time."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from dataclasses import dataclass, fields
from typing import Annotated, Any, TypeAlias

import numpy as np
from msgspec import Meta, Struct

from asyncrl.errors import ConfigError
from asyncrl.interfaces import SamplingParams
from asyncrl.serve.errors import APIError

# Ranges of request fields, whatever the limits are.
Count: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]
CountOrNone: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Temperature: TypeAlias = Annotated[float, Meta(ge=0, le=100)]
Probability: TypeAlias = Annotated[float, Meta(gt=0, le=1)]
TopK: TypeAlias = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Seed: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TopLogProbCount: TypeAlias = Annotated[int, Meta(ge=0, le=20)]
Text: TypeAlias = Annotated[str, Meta(min_length=1)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
Bias: TypeAlias = Annotated[float, Meta(ge=-100, le=100)]
Ignored: TypeAlias = Any
"""A field that does not change the answer; request types refuse every field that they do not have."""
_TOKENS_BY_ID = 16_384
"""Tokens with a bias, and those that are allowed: each choice carries them to its engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of the server. A request beyond one of them gets an error that names the bound.

    Attributes:
        chunked_body_size_bytes: of a body without Content-Length, which has to be read before it is refused.
        header_size_bytes: of the request line, and of each header.
        json_containers, json_strings: altogether (each costs far more memory than its two bytes).
        choices: ``n``.
        new_tokens, default_new_tokens: ``max_tokens`` of one choice, and its value where a request has none.
        stop_strings: stop strings, and stop tokens.
        bad_words: of one request.
        stop_length: characters of a stop string, and of a bad word.
        top_log_probs: per position.
        likeliest_tokens: that one answer, or stream, may have as top log-probs, of its prompts and of all choices.
        grammar_size_bytes: of a grammar, and so of the schemas it is made of.
        info_size_bytes: ``info`` of a reward, as JSON.
        prompts: of one /v1/completions request.
        concurrent_requests, concurrent_requests_per_key: choices that are generated, and tokenizations, at a time.
        connections: open at a time; further ones are closed at once.
        idle_timeout_s: for the next request, its headers included, on a connection.
        write_timeout_s: for a client to take what was sent.
        request_timeout_s: for a generation from its beginning to its end.
        sessions, sessions_per_key: held at a time; per key where there are several.
        session_tokens: of one session with all of its branches.
        captured_tokens, captured_tokens_per_key: of all sessions; at that per key, it begins no further session.
        session_idle_s: until an unused session is dropped.
        conversations_per_key, conversation_bytes_per_key: kept for ``previous_response_id``, the last used ones.
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
    bad_words: int = 256
    stop_length: int = 256
    top_log_probs: int = 20
    likeliest_tokens: int = 1 << 22
    grammar_size_bytes: int = 64 << 10
    info_size_bytes: int = 64 << 10
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
    sessions_per_key: int = 32_768
    session_tokens: int = 1 << 20
    captured_tokens: int = 1 << 26
    captured_tokens_per_key: int = 1 << 25
    session_idle_s: float = 3600.0
    conversations_per_key: int = 65_536
    conversation_bytes_per_key: int = 256 << 20

    def __post_init__(self) -> None:
        for each in fields(self):
            if getattr(self, each.name) <= 0:
                raise ConfigError(f"{each.name} must be positive, got {getattr(self, each.name)}", path=each.name)


# -------------------------------------------------------------------------------------------------- a body's JSON

_STRING = re.compile(rb'"[^"]*+"?')
_NEITHER = bytes(set(range(256)) - set(b'[]{}"'))
_BEGINNING_BYTES = 4096


def json_problem(body: bytes, limits: Limits) -> str:
    """Return why ``body`` must not be parsed; empty if it may be.

    Brackets within strings do not count. The beginning of a long body is checked first: a violation there stands
    whatever follows.
    """
    if len(body) > _BEGINNING_BYTES and (problem := _bracket_problem(body[:_BEGINNING_BYTES], limits)):
        return problem
    if _count(body, b'"') > 2 * limits.json_strings:
        quotes = _without_escapes(body).count(b'"')
        if quotes > 2 * limits.json_strings:
            return f"the body has {quotes // 2} strings; at most {limits.json_strings} are accepted"
    return _bracket_problem(body, limits)


class BodyWatch:
    """Checks a body while it arrives, so that one that breaks a rule is refused then and not at its end.

    Each piece is counted. The whole of what has arrived is checked only when the counts pass a limit, and again when
    they have doubled. A complete body still has to pass :func:`json_problem`.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._pieces: list[bytes] = []
        self._opened = self._quotes = 0
        self._next_opened = limits.json_containers
        self._next_quotes = 2 * limits.json_strings
        self.size_bytes = 0

    def problem(self, piece: bytes) -> str:
        """Add ``piece``; return why the rest of the body need not be read, empty if it must be."""
        first = not self._pieces
        self._pieces.append(piece)
        self.size_bytes += len(piece)
        self._opened += _opening_brackets(piece)
        self._quotes += _count(piece, b'"')
        if self._opened > self._next_opened or self._quotes > self._next_quotes:
            self._next_opened = max(self._next_opened, 2 * self._opened)
            self._next_quotes = max(self._next_quotes, 2 * self._quotes)
            return json_problem(self.body(), self._limits)
        return _bracket_problem(piece[:_BEGINNING_BYTES], self._limits) if first else ""

    def body(self) -> bytes:
        return b"".join(self._pieces)


def _count(body: bytes, character: bytes) -> int:
    """Return ``body.count(character)``, which checks byte by byte, in a fifth of its time."""
    if len(body) <= _BEGINNING_BYTES:
        return body.count(character)
    return int(np.count_nonzero(np.frombuffer(body, np.uint8) == character[0]))


def _opening_brackets(body: bytes) -> int:
    return _count(body, b"[") + _count(body, b"{")


def _without_escapes(body: bytes) -> bytes:
    """Return ``body`` less its escaped backslashes and quotes."""
    return body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body


def _bracket_problem(body: bytes, limits: Limits) -> str:
    """Decide by two counts for bodies with few brackets, nearly all; walk only the brackets of others in Python."""
    if _opening_brackets(body) <= limits.json_depth:
        return ""
    body = _without_escapes(body)
    # Two adjacent quotes are a string without a bracket; removing them leaves what is within strings the same.
    brackets = _STRING.sub(b"", body.translate(None, _NEITHER).replace(b'""', b""))
    opened = brackets.count(b"[") + brackets.count(b"{")
    if opened > limits.json_containers:
        return f"the body has {opened} arrays and objects; at most {limits.json_containers} are accepted"
    depth = 0
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        if depth < 0:
            return ""  # no parser reads further
        if depth > limits.json_depth:
            return f"the body is nested deeper than {limits.json_depth} arrays and objects"
    return ""


# ------------------------------------------------------------------------------------------- sampling parameters


class LogitFields(Struct, kw_only=True):
    """vLLM's fields for what :class:`SamplingParams` changes in logits."""

    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=_TOKENS_BY_ID)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=_TOKENS_BY_ID)] | None = None
    bad_words: list[Text] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None

    def given(self, limits: Limits) -> dict[str, Any]:
        """Return the fields that have a value, as fields of SamplingParams. Any: of different types."""
        given = {name: value for name in LogitFields.__struct_fields__ if (value := getattr(self, name)) is not None}
        if not given:  # most requests
            return given
        words = given["bad_words"] = tuple(self.bad_words or ())
        if len(words) > limits.bad_words or any(len(word) > limits.stop_length for word in words):
            raise APIError(400, f"at most {limits.bad_words} bad_words of {limits.stop_length} characters are accepted")
        given["logit_bias"] = tuple((self.logit_bias or {}).items())
        given["allowed_token_ids"] = tuple(sorted(set(self.allowed_token_ids or ())))
        return given


class SamplingFields(LogitFields, kw_only=True):
    """How a request is sampled; by default with temperature 1 and no truncation."""

    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    stop: Text | list[Text] | None = None
    stop_token_ids: list[TokenId] | None = None
    seed: Seed | None = None


def sampling_params(
    limits: Limits,
    request: SamplingFields,
    *,
    max_tokens: int | None,
    top_log_probs: int = 0,
    prompt_log_probs: int | None = None,
    grammar: str = "",
) -> SamplingParams:
    """Return the sampling parameters of a request within the limits."""
    if max_tokens is not None and max_tokens > limits.new_tokens:
        raise APIError(400, f"max_tokens is {max_tokens}; at most {limits.new_tokens} are generated")
    strings = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    stop_tokens = tuple(request.stop_token_ids or ())
    if len(strings) > limits.stop_strings or len(stop_tokens) > limits.stop_strings:
        raise APIError(400, f"at most {limits.stop_strings} stop strings and as many stop tokens are accepted")
    if strings and any(not text or len(text) > limits.stop_length for text in strings):
        raise APIError(400, f"a stop string has 1 to {limits.stop_length} characters")
    if (most := max(top_log_probs, prompt_log_probs or 0)) > limits.top_log_probs:
        raise APIError(400, f"top log-probs per token are {most}; at most {limits.top_log_probs} are given")
    more = request.given(limits)
    try:
        return SamplingParams(
            max_new_tokens=max_tokens if max_tokens is not None else limits.default_new_tokens,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=max(request.top_k or 0, 0),
            stop=strings,
            stop_token_ids=stop_tokens,
            seed=None if request.seed is None else request.seed & (2**63 - 1),
            top_log_probs=top_log_probs,
            prompt_log_probs=prompt_log_probs,
            grammar=check_grammar(limits, grammar),
            **more,
        )
    except ValueError as error:
        raise APIError(400, str(error)) from error


def check_choices(limits: Limits, n: int | None) -> int:
    """Return the number of choices that ``n`` asks for; an API error beyond the limit."""
    if n is not None and n > limits.choices:
        raise APIError(400, f"n is {n}; at most {limits.choices} choices are generated")
    return n or 1


def check_neutral(**fields: tuple[object, object]) -> None:
    """Raise an API error for a field that would change the answer and is not served.

    ``fields`` has for each its value, and the value that changes nothing.
    """
    for name, (value, neutral) in fields.items():
        if value is not None and value != neutral:
            raise APIError(400, f"{name} = {str(value)[:80]} is not served; leave it out")


def check_grammar(limits: Limits, grammar: str) -> str:
    if len(grammar.encode("utf-8", "surrogatepass")) > limits.grammar_size_bytes:
        raise APIError(400, f"the grammar, or the schemas, have more than {limits.grammar_size_bytes} bytes")
    return grammar


# ---------------------------------------------------------------------------------------------------- concurrency


class ConcurrencyLimiter:
    """Counts choices and tokenizations that are ``running`` or about to.

    Beyond a bound a request fails at once; none waits here. A key at its bound gets 429, all keys at the server's bound
    get 503, both with ``Retry-After``.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._by_holder: Counter[str] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()
        self.running = 0
        self.draining = False

    async def wait_idle(self) -> None:
        await self._idle.wait()

    def acquire(self, holder: str, count: int = 1) -> None:
        """Count more choices of ``holder``, all or none, until :meth:`release`; an API error beyond a bound."""
        if self.draining:
            raise APIError(503, "the server is shutting down", retry_after_s=5)
        held, most = self._by_holder[holder], self._limits.concurrent_requests_per_key
        if held + count > most:
            asked = f"{held + count} requests of this key would run (each choice counts)"
            raise APIError(429, f"{asked}; at most {most} may", retry_after_s=1)
        if self.running + count > self._limits.concurrent_requests:
            full = f"the server is full: {self.running} requests are running (each choice counts)"
            raise APIError(503, full, retry_after_s=1)
        self._by_holder[holder] = held + count
        self.running += count
        self._idle.clear()

    def release(self, holder: str, count: int = 1) -> None:
        self.running -= count
        if not self.running:
            self._idle.set()
        self._by_holder[holder] -= count
        if not self._by_holder[holder]:
            del self._by_holder[holder]
