"""Running a coroutine to its end, or until a signal asks it to stop; either way its cleanup runs."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

from asyncrl.errors import AsyncRLError

__all__ = ["Terminated", "first_cause", "run_to_end"]

_T = TypeVar("_T")


class Terminated(SystemExit):
    """SIGTERM arrived; everything was cleaned up. Exit status 143, as a shell expects."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


def run_to_end(main: Coroutine[Any, Any, _T]) -> _T:
    """Run ``main`` on an event loop of its own (uvloop where it is installed).

    The first SIGINT or SIGTERM cancels ``main``, whose cleanup runs; a second SIGINT interrupts the cleanup.

    Raises:
        KeyboardInterrupt: after SIGINT.
        Terminated: after SIGTERM.
        BaseException: what ended ``main``; of a group of errors the one that came first and has a name.
    """
    terminated = False

    async def guarded() -> _T:
        nonlocal terminated
        task = asyncio.current_task()
        assert task is not None

        def terminate() -> None:
            nonlocal terminated
            terminated = True
            task.cancel()

        if sys.platform != "win32":
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
        return await main

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        try:
            return runner.run(guarded())
        except asyncio.CancelledError:
            if terminated:
                raise Terminated from None
            raise
        except BaseExceptionGroup as group:
            raise first_cause(group) from group


def first_cause(error: BaseException) -> BaseException:
    """The error to name: of a group the first of asyncrl's own errors, else the first of all."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [first_cause(leaf) for leaf in error.exceptions]
    return next((leaf for leaf in leaves if isinstance(leaf, AsyncRLError)), leaves[0])


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
