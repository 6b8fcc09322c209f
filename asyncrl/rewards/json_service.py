"""Somebody else's service: JSON in, JSON out, with a deadline."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
from typing import TYPE_CHECKING, Any

from asyncrl.errors import ConfigError, EnvironmentDeadlineError, RewardError

if TYPE_CHECKING:
    import aiohttp

__all__ = ["JSONService"]

_LARGEST_REPLY_BYTES = 1 << 24
_FIRST_DELAY_S = 0.1
_AGAIN = {408, 425, 429, 500, 502, 503, 504}


class JSONService:
    """Posts JSON to one address, ``concurrency`` requests at a time; what may pass is tried until the deadline.

    Connections that fail and status 408, 425, 429 and 5xx are tried again, after a pause that doubles.

    Args:
        url: where to. Redirects are not followed: they might carry the key elsewhere.
        deadline_s: for one answer, all tries together; waiting for one of the ``concurrency`` places does not count.
        concurrency: requests at once.
        key_variable: environment variable that holds a bearer token; empty for none.

    Raises:
        ConfigError: a value that cannot be used, or the variable is not set.
    """

    def __init__(self, url: str, *, deadline_s: float, concurrency: int, key_variable: str = "") -> None:
        if not re.match(r"https?://[^/\s]+", url):
            raise ConfigError(f"url is {url!r}", path="url", remedy="http://host:port/path")
        if not (deadline_s > 0 and math.isfinite(deadline_s)):
            raise ConfigError(f"deadline_s is {deadline_s}", path="deadline_s", remedy="a positive number of seconds")
        if concurrency < 1:
            raise ConfigError(f"concurrency is {concurrency}", path="concurrency", remedy="1 or more")
        if key_variable and not os.environ.get(key_variable):
            raise ConfigError(
                f"api_key_env names {key_variable}, which is not set here", path="api_key_env", remedy="set it"
            )
        self.url = url
        self._deadline_s = deadline_s
        self._places = asyncio.Semaphore(concurrency)
        self._key = os.environ.get(key_variable, "") if key_variable else ""
        self._session: aiohttp.ClientSession | None = None

    async def post(self, body: dict[str, Any]) -> Any:
        """What the service answers to ``body``, from JSON.

        Raises:
            EnvironmentDeadlineError: it did not answer in time, however often it was asked.
            RewardError: it refused the request as such, or answered something that is no JSON.
        """
        last = "it did not answer"
        try:
            async with self._places, asyncio.timeout(self._deadline_s):
                delay_s = _FIRST_DELAY_S
                while True:
                    answered, last = await self._try(body)
                    if answered is not None:
                        return answered[0]
                    await asyncio.sleep(delay_s)
                    delay_s = min(2 * delay_s, self._deadline_s)
        except TimeoutError:
            raise EnvironmentDeadlineError(
                f"{self.url} gave no answer within {self._deadline_s:g} s; last: {last}"
            ) from None

    async def close(self) -> None:
        """Close its connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _try(self, body: dict[str, Any]) -> tuple[tuple[Any] | None, str]:
        """The answer, or why there is none this time."""
        import aiohttp

        if self._session is None:
            headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            self._session = aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=None))
        try:
            async with self._session.post(self.url, json=body, allow_redirects=False) as reply:
                content = await _read(reply.content)
                status = reply.status
        except (aiohttp.ClientError, OSError) as error:
            return None, f"{type(error).__name__}: {error}"
        said = content[:200].decode("utf-8", "replace").strip()
        if status in _AGAIN:
            return None, f"status {status}: {said}"
        if not 200 <= status < 300:
            raise RewardError(f"{self.url} refused a request with status {status}: {said}", how="raised")
        if len(content) > _LARGEST_REPLY_BYTES:
            raise RewardError(f"{self.url} answered more than {_LARGEST_REPLY_BYTES} bytes", how="value")
        try:
            return (json.loads(content),), ""
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise RewardError(f"{self.url} answered what is no JSON: {said}", how="value") from error


async def _read(content: aiohttp.StreamReader) -> bytes:
    """All of it, or a byte more than is allowed: one read gives what has arrived, not what will."""
    parts: list[bytes] = []
    left = _LARGEST_REPLY_BYTES + 1
    while left and (part := await content.read(left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
