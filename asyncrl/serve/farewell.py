"""How a connection ends whose client still sends what nobody will read.

A socket that is closed with bytes unread resets its connection, and the reset may get to the client before the answer
does. So it is closed in stages (RFC 9112, section 9.6): the answer, the end of our half, then what comes is thrown away
unparsed until the client hangs up, or has had its time and its bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from aiohttp import web

__all__ = ["Farewells", "LastAnswer"]

_LONGEST_S = 2.0
_MOST_BYTES = 16 << 20  # by default Linux holds 4 MB of a connection at the end that sends, 6 MB at the other
_SHARE = 16  # of the connections, one in so many may be taking its leave; there is no place for more


class Farewells:
    """The connections of one listener that are taking their leave.

    Args:
        connections: that may be open at a time.
    """

    def __init__(self, connections: int) -> None:
        self._most = max(1, connections // _SHARE)
        self._count = 0

    async def see_off(self, request: web.Request) -> None:
        """Wait until the client, who was answered, has hung up or must be hung up on. The body is parsed no further."""
        transport, content = request.transport, request.content
        if transport is None or transport.is_closing() or content.is_eof():
            return
        discarding = _Discarding(transport)
        transport.set_protocol(discarding)
        content.feed_eof()  # else aiohttp would wait for the rest of it
        transport.pause_reading()
        if self._count >= self._most:
            return
        self._count += 1
        try:
            transport.write_eof()
            transport.resume_reading()
            async with asyncio.timeout(_LONGEST_S):
                await discarding.over
        except (TimeoutError, OSError):
            transport.abort()
        finally:
            self._count -= 1


class LastAnswer(web.Response):
    """An answer after which the connection is closed, whatever of the request is still to come."""

    def __init__(
        self, request: web.Request, farewells: Farewells, *, body: bytes, status: int, headers: Mapping[str, str]
    ) -> None:
        super().__init__(body=body, status=status, headers=headers)
        self.force_close()
        self._request = request
        self._farewells = farewells

    async def write_eof(self, data: bytes = b"") -> None:
        """Send what is left of the answer, then see the client off."""
        await super().write_eof(data)
        await self._farewells.see_off(self._request)


class _Discarding(asyncio.Protocol):
    """Takes a connection from the protocol that reads it, which still learns of its end."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._reader = transport.get_protocol()
        self._left = _MOST_BYTES
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left < 0:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.over.done():
            self.over.set_result(None)
        self._reader.connection_lost(exc)
