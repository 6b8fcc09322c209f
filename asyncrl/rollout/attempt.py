"""One request on one engine: a task that reads, and an inbox that somebody else may read from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeAlias, cast

from asyncrl.errors import InfrastructureError
from asyncrl.interfaces import GenerationChunk, GenerationRequest, TokenGenerator

__all__ = ["Attempt", "Lost"]


class Lost(InfrastructureError):
    """The attempt was taken back: its replica cannot or may not go on with it. What came before counts.

    Attributes:
        died: whether the replica died, perhaps of this request.
    """

    def __init__(self, message: str, *, died: bool = False) -> None:
        super().__init__(message)
        self.died = died


News: TypeAlias = GenerationChunk | Exception


class Attempt:
    """Reads an engine's stream until it ends or is taken back; whatever the engine does after that is not heard.

    Args:
        engine: who generates.
        number: of the engine in its replica's lives.
        request: what.
        work: expected work, in tokens.
        tasks: owner of the reading task.
    """

    def __init__(
        self,
        engine: TokenGenerator,
        request: GenerationRequest,
        *,
        number: int,
        work: float,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self.request_id = request.request_id
        self.engine_number = number
        self.work = work
        self._engine = engine
        self._inbox: asyncio.Queue[News] = asyncio.Queue()
        self._over = False
        self._task = tasks.create_task(self._read(request), name=f"reading {request.request_id}")

    async def next_chunk(self) -> GenerationChunk:
        """The next chunk; waits for it.

        Raises:
            Lost: it was taken back.
            Exception: what the engine raised.
        """
        news = await self._inbox.get()
        if isinstance(news, Exception):
            raise news
        return news

    def take_back(self, reason: str, *, died: bool = False) -> None:
        """The reader learns of it after the chunks that have arrived; nothing comes after that."""
        if not self._over:
            self._over = True
            self._inbox.put_nowait(Lost(reason, died=died))
            self._task.cancel()

    def leave(self) -> None:
        """Nobody reads any more: the engine is told to stop."""
        self._over = True
        self._task.cancel()

    async def abort(self) -> None:
        """Have the engine end the request; one that does not know it, or is gone, is not heard any more."""
        try:
            known = await self._engine.abort(self.request_id)
        except InfrastructureError:
            known = False
        if not known:
            self.take_back("aborted")

    async def _read(self, request: GenerationRequest) -> None:
        try:
            async with aclosing(
                cast("AsyncGenerator[GenerationChunk, None]", self._engine.generate(request))
            ) as chunks:
                async for chunk in chunks:
                    self._hear(chunk)
        except Exception as error:  # noqa: BLE001 - raised again by whoever reads
            self._hear(error)
        self._over = True

    def _hear(self, news: News) -> None:
        if not self._over:
            self._inbox.put_nowait(news)
