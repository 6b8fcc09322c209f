"""What a cancellation must not cut in half."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable
from typing import TypeVar

__all__ = ["to_its_end"]

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


async def to_its_end(doing: Awaitable[_T]) -> _T:
    """Await ``doing`` to its end, however often this call is cancelled; then the cancellation goes on.

    What ``doing`` raises when nobody waits for it any more is logged.

    >>> async def hand_over(kept):
    ...     await asyncio.sleep(0)
    ...     kept.append("whole")
    >>> async def main():
    ...     kept = []
    ...     task = asyncio.create_task(to_its_end(hand_over(kept)))
    ...     await asyncio.sleep(0)
    ...     task.cancel()
    ...     await asyncio.wait([task])
    ...     return kept, task.cancelled()
    >>> asyncio.run(main())
    (['whole'], True)
    """
    task = asyncio.ensure_future(doing)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("cancelled, and then failed: %s: %s", type(error).__name__, error)
        raise
