"""Functions that users wrote: learnt here, called where they can do no harm."""

from __future__ import annotations

import asyncio
import inspect
import math
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError, RewardError
from asyncrl.parts import load_part
from asyncrl.rewards.scoring_process import ScoringProcess, checked_value
from asyncrl.rewards.scoring_program import as_value, load_file

__all__ = ["UserFunction"]


class UserFunction:
    """Calls a function with keyword arguments, under a deadline.

    A plain function runs in processes of its own, one call at a time each, so it may block, set alarms, leak or crash;
    one that passes its deadline is killed with everything it started. A call whose process is killed is made again with
    its whole deadline; the third death under one call is the function's.

    An ``async def`` function runs on the event loop, ``concurrency`` calls at a time, and is cancelled at its deadline.
    Used from one event loop.

    Args:
        name: ``package.module:name`` or ``path/to/file.py:name``. The module is imported here too, to learn the
            parameters.
        deadline_s: longest time for one call, in one process.
        processes: at most so many run; they start when needed.
        concurrency: calls of an ``async def`` function that run at once.
        start_deadline_s: longest time for starting a process and importing the module there.

    Attributes:
        wanted: parameters that may be passed by name.
        required: those that must be.
        takes_others: whether any other may be passed too.

    Raises:
        ConfigError: the function cannot be imported or called like this, or a number is out of range.
    """

    def __init__(
        self,
        name: str,
        *,
        deadline_s: float = 10.0,
        processes: int = 1,
        concurrency: int = 64,
        start_deadline_s: float = 60.0,
    ) -> None:
        for key, value in (("deadline_s", deadline_s), ("start_deadline_s", start_deadline_s)):
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{key} is {value}", path=key, remedy="a positive number of seconds")
        for key, count in (("processes", processes), ("concurrency", concurrency)):
            if count < 1:
                raise ConfigError(f"{key} is {count}", path=key, remedy="1 or more")
        self.name = name
        self._deadline_s = deadline_s
        self._function = _load(name)
        self.wanted, self.required, self.takes_others = _parameters(name, self._function)
        self._asynchronous = inspect.iscoroutinefunction(self._function) or inspect.iscoroutinefunction(
            getattr(self._function, "__call__", None)  # noqa: B004  # an object with an asynchronous __call__
        )
        self._places = asyncio.Semaphore(concurrency)
        self._processes = [ScoringProcess(name, start_deadline_s=start_deadline_s) for _ in range(processes)]
        self._idle: asyncio.LifoQueue[ScoringProcess] = asyncio.LifoQueue()
        for process in reversed(self._processes):
            self._idle.put_nowait(process)
        self._closed = False

    async def call(self, arguments: dict[str, Any]) -> float | dict[str, float]:
        """The function's value: a finite number, or a table of numbers with ``score``.

        Raises:
            RewardError: it raised, returned something else, passed its deadline, or took its processes along.
        """
        if self._closed:
            raise RewardError("was closed")
        if self._asynchronous:
            return await self._await(arguments)
        async with self._process() as process:
            return await process.call(arguments, deadline_s=self._deadline_s)

    async def close(self) -> None:
        """End all processes and what they started; calls that still run fail. Idempotent."""
        self._closed = True
        await asyncio.gather(*(process.close() for process in self._processes))

    @asynccontextmanager
    async def _process(self) -> AsyncIterator[ScoringProcess]:
        process = await self._idle.get()
        try:
            if self._closed:
                raise RewardError("was closed")
            yield process
        finally:
            self._idle.put_nowait(process)

    async def _await(self, arguments: dict[str, Any]) -> float | dict[str, float]:
        async with self._places:
            deadline = asyncio.timeout(self._deadline_s)
            try:
                async with deadline:
                    value = await self._function(**arguments)
            except Exception as error:
                if isinstance(error, TimeoutError) and deadline.expired():
                    text = f"took longer than its deadline of {self._deadline_s:g} s"
                    raise RewardError(text, how="deadline") from None
                raise RewardError(f"raised\n{traceback.format_exc()}", how="raised") from error
        return checked_value(as_value(value))


def _load(name: str) -> Any:
    module, colon, attribute = name.rpartition(":")
    if not colon or module == "__main__":
        raise ConfigError(
            f"{name!r} cannot be imported by another process",
            path="function",
            remedy="put the reward function into a module of its own and write package.module:name",
        )
    function = _from_file(module, attribute) if module.endswith(".py") else _from_module(name)
    if not callable(function):
        raise ConfigError(f"{name} is a {type(function).__name__}, not a function", path="function")
    return function


def _from_module(name: str) -> Any:
    return load_part("asyncrl.reward_functions", name, path="function")


def _from_file(path: str, attribute: str) -> Any:
    if not Path(path).is_file():
        raise ConfigError(f"{path}: no such file", path="function", remedy="check the path of the reward function")
    try:
        return getattr(load_file(path), attribute)
    except AttributeError as error:
        raise ConfigError(f"{path} has no {attribute!r}", path="function", remedy="check the name") from error
    except Exception as error:  # the user's module raises what it likes while it is imported
        raise ConfigError(
            f"{path} cannot be imported: {type(error).__name__}: {error}", path="function", remedy="see the cause"
        ) from error


def _parameters(name: str, function: Any) -> tuple[frozenset[str], frozenset[str], bool]:
    """Names that may be passed, those that must be, and whether any other may be too."""
    kinds = inspect.Parameter
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is kinds.POSITIONAL_ONLY for p in parameters):
        raise ConfigError(
            f"{name} has positional-only parameters", path="function", remedy="arguments are passed by keyword"
        )
    named = [p for p in parameters if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    required = frozenset(p.name for p in named if p.default is kinds.empty)
    return frozenset(p.name for p in named), required, any(p.kind is kinds.VAR_KEYWORD for p in parameters)
