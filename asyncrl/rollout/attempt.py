"""One request on one engine: a task that reads, and an inbox that somebody else may read from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypeAlias, cast

from asyncrl.errors import EngineError, InfrastructureError
from asyncrl.interfaces import FinishReason, GenerationChunk, GenerationRequest, TokenGenerator

__all__ = ["Attempt", "Lost"]


class Lost(InfrastructureError):
    """The attempt is over before its end: its replica cannot or may not go on with it. What came before counts.

    Attributes:
        vain: whether the request may be the reason: the replica died, or gave it up without one token.
    """

    def __init__(self, message: str, *, vain: bool = False) -> None:
        super().__init__(message)
        self.vain = vain


News: TypeAlias = GenerationChunk | Exception


class Attempt:
    """Reads an engine's stream until it ends or is taken back; whatever the engine does after that is not heard.

    Args:
        engine: who generates.
        number: of the engine in its replica's lives.
        request: what.
        work: expected work, in tokens.
        ended: called when the engine is done with it, or told to stop; perhaps more than once.
        tasks: owner of the reading task.

    Attributes:
        finish_reason: the engine's, once it has told it, whether or not somebody has read it.
    """

    def __init__(
        self,
        engine: TokenGenerator,
        request: GenerationRequest,
        *,
        number: int,
        work: float,
        ended: Callable[[Attempt], None],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self.request_id = request.request_id
        self.engine_number = number
        self.work = work
        self.finish_reason: FinishReason | None = None
        self._engine = engine
        self._ended = ended
        self._inbox: asyncio.Queue[News] = asyncio.Queue()
        self._over = False
        self._task = tasks.create_task(self._read(request), name=f"reading {request.request_id}")

    async def next_chunk(self) -> GenerationChunk:
        """The next chunk; waits for it.

        Raises:
            Lost: it was taken back, or the engine has aborted it.
            EngineError: the stream ended, and the engine did not say why.
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
            self._inbox.put_nowait(Lost(reason, vain=died))
            self._task.cancel()
            # After the task has heard of it: whoever finds the replica idle finds its engine told to stop.
            asyncio.get_running_loop().call_soon(self._ended, self)

    def leave(self) -> None:
        """Nobody reads any more: the engine is told to stop."""
        self._over = True
        self._task.cancel()
        self._ended(self)

    async def abort(self) -> None:
        """Have the engine end the request; one that does not know it, or is gone, is not heard any more."""
        try:
            known = await self._engine.abort(self.request_id)
        except InfrastructureError:
            known = False
        if not known:
            self.take_back("aborted")

    async def _read(self, request: GenerationRequest) -> None:
        tokens = 0
        try:
            async with aclosing(
                cast("AsyncGenerator[GenerationChunk, None]", self._engine.generate(request))
            ) as chunks:
                async for chunk in chunks:
                    tokens += len(chunk.token_ids)
                    self._hear(chunk)
        except asyncio.CancelledError:
            if self._task.cancelling():
                raise
            self._hear(EngineError("the engine cancelled the stream"))
        except Exception as error:  # noqa: BLE001 - raised again by whoever reads
            self._hear(error)
        else:
            if self.finish_reason is None:
                self._hear(EngineError("the stream ended without a finish reason"))
            elif self.finish_reason == "abort":  # read only by who did not ask for it
                self._hear(Lost("the engine aborted it", vain=not tokens))
        self._over = True
        self._ended(self)

    def _hear(self, news: News) -> None:
        if self._over:
            return
        if isinstance(news, GenerationChunk):
            self.finish_reason = self.finish_reason or news.finish_reason
        self._inbox.put_nowait(news)
