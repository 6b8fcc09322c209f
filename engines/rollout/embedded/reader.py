"""The event loop's side of a row."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from asyncrl.interfaces import GenerationChunk
from engines.rollout.embedded.row import Row

__all__ = ["Reader"]


@dataclass(slots=True, eq=False)
class Reader:
    """How far a row has been read, and who waits for more."""

    row: Row
    read: int = 0
    waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def next_chunk(self) -> GenerationChunk:
        """The tokens that came since the last call; waits until there are some.

        Raises:
            EngineError: the row ended with an error, and all of its tokens have been read.
        """
        while True:
            error = self.row.error
            chunk = self.row.chunk(self.read)
            if chunk is not None:
                self.read += len(chunk.token_ids)
                return chunk
            if error is not None:
                raise type(error)(str(error)) from error.__cause__
            self.waiter = asyncio.get_running_loop().create_future()
            try:
                await self.waiter
            finally:
                self.waiter = None
