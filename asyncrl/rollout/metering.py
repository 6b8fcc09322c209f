"""Counting tokens where they come out of the engine, apart from what becomes of them afterwards.

A meter may keep its counts in a file that is mapped into memory: they outlive the process that counts, however it ends.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from asyncrl.interfaces import GenerationChunk, GenerationRequest, TokenGenerator

__all__ = ["MeteredEngine", "TokenAccount", "TokenMeter", "meter_tokens", "metered_tokens"]

_PURPOSES = ("train", "eval", "baseline")
_COUNTS = struct.Struct("<qqq")


@dataclass(slots=True)
class TokenAccount:
    """Tokens delivered for one piece of work."""

    purpose: str
    tokens: int = 0


class TokenMeter:
    """Tokens delivered by an engine, by purpose, and how many of them belong to work still going on.

    The sum over what was trained on, dropped and is in flight must equal ``delivered``: the meter is the independent
    side of that equation.

    Args:
        folder: where a file of this meter's own is made; None keeps counts in memory only.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.path: Path | None = None
        self._file: mmap.mmap | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.path = folder / f"{os.getpid()}-{secrets.token_hex(4)}.tokens"
            with self.path.open("x+b") as file:
                file.write(bytes(_COUNTS.size))
                file.flush()
                self._file = mmap.mmap(file.fileno(), _COUNTS.size)
        self._delivered: Counter[str] = Counter()
        self._accounts: dict[int, TokenAccount] = {}
        self._next = 0

    @contextmanager
    def account(self, purpose: str) -> Iterator[TokenAccount]:
        """Open an account for one piece of work; its tokens count as in flight until the block ends."""
        account = TokenAccount(purpose)
        key = self._next
        self._next += 1
        self._accounts[key] = account
        try:
            yield account
        finally:
            del self._accounts[key]

    def count(self, account: TokenAccount, tokens: int) -> None:
        """Add tokens that were just delivered."""
        account.tokens += tokens
        self._delivered[account.purpose] += tokens
        if self._file is not None:
            _COUNTS.pack_into(self._file, 0, *(self._delivered[purpose] for purpose in _PURPOSES))

    def delivered(self, purpose: str) -> int:
        """Tokens delivered for this purpose since the start."""
        return self._delivered[purpose]

    def in_flight(self, purpose: str) -> int:
        """Tokens delivered to accounts of this purpose that are still open."""
        return sum(account.tokens for account in self._accounts.values() if account.purpose == purpose)


def meter_tokens(file: Path, purpose: str) -> int:
    """Tokens that the meter with this file has counted, living or dead."""
    return int(_COUNTS.unpack(file.read_bytes())[_PURPOSES.index(purpose)])


def metered_tokens(folder: Path, purpose: str) -> int:
    """Tokens that all meters with a file in ``folder`` have counted."""
    return sum(meter_tokens(file, purpose) for file in folder.glob("*.tokens"))


class MeteredEngine:
    """The generating face of an engine, counted into one account."""

    def __init__(self, engine: TokenGenerator, meter: TokenMeter, account: TokenAccount) -> None:
        self._engine = engine
        self._meter = meter
        self._account = account

    async def _stream(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        stream = self._engine.generate(request)
        try:
            async for chunk in stream:
                self._meter.count(self._account, len(chunk.token_ids))
                yield chunk
        finally:
            if isinstance(stream, AsyncGenerator):
                await stream.aclose()

    def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        """As :meth:`asyncrl.interfaces.TokenGenerator.generate`."""
        return self._stream(request)

    async def abort(self, request_id: str) -> bool:
        """As :meth:`asyncrl.interfaces.TokenGenerator.abort`."""
        return await self._engine.abort(request_id)
