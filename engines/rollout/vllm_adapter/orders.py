"""Orders to vLLM that are not left half-way."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from asyncrl.errors import EngineError
from engines.rollout.vllm_adapter.updates import GONE

__all__ = ["carry_out"]


async def carry_out(order: Coroutine[Any, Any, None], *, ended: asyncio.Future[Any]) -> None:
    """Wait for ``order`` to be followed; a cancelled caller is let go only then.

    ``ended`` is done when vLLM's engine core is gone, which answers nothing any more.

    Raises:
        EngineError: it went before it had answered.
    """
    carrying = asyncio.ensure_future(order)
    cancelled: asyncio.CancelledError | None = None
    while not carrying.done():
        if ended.done():
            carrying.cancel()
        try:
            await asyncio.wait([carrying] if ended.done() else [carrying, ended], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError as error:
            cancelled = error
    failure = None if carrying.cancelled() else carrying.exception()
    if cancelled is not None:
        raise cancelled from failure
    if carrying.cancelled():
        raise EngineError(GONE)
    if failure is not None:
        raise failure
