"""How vLLM's ranks say that they hold the next version of the weights, or why they do not.

A call into vLLM's workers stops decoding while it runs. So fetching is only begun by a call; it goes on in a thread of
each rank, and its end is told through a Unix socket in a folder that only this user can open.
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import msgspec

__all__ = ["Confirmation", "Confirmations", "confirm"]


class Confirmation(msgspec.Struct, frozen=True, array_like=True):
    """What one rank says.

    Attributes:
        number: of the order to fetch.
        rank: who.
        kind: class of the error in :mod:`asyncrl.errors`; empty if it holds the version.
        message: of the error.
    """

    number: int
    rank: int
    kind: str = ""
    message: str = ""


def confirm(address: str, confirmation: Confirmation) -> None:
    """Tell; from a thread of a worker."""
    with socket.socket(socket.AF_UNIX) as said:
        said.connect(address)
        said.sendall(msgspec.msgpack.encode(confirmation))


class Confirmations:
    """The listening end. Orders are numbered, so that late answers to an earlier one are not taken for this one's.

    Args:
        folder: where the socket lies; whoever may enter it may tell.

    Attributes:
        address: where ranks tell.
    """

    def __init__(self, folder: Path) -> None:
        self.address = str(folder / "confirmations")
        self._server: asyncio.Server | None = None
        self._number = 0
        self._answers: asyncio.Queue[Confirmation] = asyncio.Queue()

    async def open(self) -> None:
        """Listen."""
        self._server = await asyncio.start_unix_server(self._hear, self.address)

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    def expect(self) -> int:
        """The number of the next order."""
        self._number += 1
        return self._number

    async def gather(self, number: int, *, ranks: int) -> list[Confirmation]:
        """Wait for every rank's answer to an order."""
        heard: list[Confirmation] = []
        while len(heard) < ranks:
            answer = await self._answers.get()
            if answer.number == number:
                heard.append(answer)
        return heard

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self._answers.put_nowait(msgspec.msgpack.decode(await reader.read(), type=Confirmation))
        finally:
            writer.close()
