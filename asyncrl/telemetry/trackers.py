"""Where metrics go besides the run's own files. Trackers are parts: ``asyncrl.trackers`` lists them by name.

A tracker is made with the folder of the run, its name and its configuration, and then gets :meth:`Tracker.log` calls:

    class MyTracker:
        def __init__(self, folder: Path, *, name: str, config: Mapping[str, Any]) -> None: ...
        def log(self, metrics: Mapping[str, float], *, step: int) -> None: ...
        def close(self) -> None: ...

One with ``log_text(name, text, *, step)`` is given trajectories to read as well. One with a class attribute ``package``
has it looked for before the run begins. Nothing else of a tracker can touch the run: it is made, called and closed by a
thread of its own.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from asyncrl.errors import ConfigError
from asyncrl.interfaces import TextTracker, Tracker
from asyncrl.parts import install_command, load_part

__all__ = ["Trackers", "open_trackers"]

logger = logging.getLogger(__name__)

MOST_FAILURES = 3
MOST_WAITING = 10_000
CLOSE_TIMEOUT_S = 60.0


class Trackers:
    """Several trackers as one, each served by a thread of its own: a slow or dead service slows nothing but itself.

    A tracker that raises is logged and counted, and left out after three failures in a row, or when it cannot even be
    made: what a web service does must not end a run, and every metric is in ``metrics.jsonl`` anyway. Of one that is
    too slow the oldest entries go, counted too, when ``MOST_WAITING`` of them wait.

    Args:
        makers: make the trackers, by name; called in their threads.

    Attributes:
        failures: number of failed calls by tracker.
        lost: entries that never reached a tracker, by tracker.
    """

    def __init__(self, makers: Mapping[str, Callable[[], Tracker]]) -> None:
        self._served = {name: _Served(name, make) for name, make in makers.items()}

    @property
    def failures(self) -> dict[str, int]:
        return {name: served.failures for name, served in self._served.items()}

    @property
    def lost(self) -> dict[str, int]:
        return {name: served.lost for name, served in self._served.items()}

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Pass the finite numbers on; returns at once."""
        finite = {name: float(value) for name, value in metrics.items() if _is_number(value)}
        for served in self._served.values():
            served.put(lambda tracker: tracker.log(finite, step=step))

    def log_text(self, name: str, text: str, *, step: int) -> None:
        """Pass a text on to trackers that take texts; returns at once."""

        def tell(tracker: Tracker) -> None:
            if isinstance(tracker, TextTracker):
                tracker.log_text(name, text, step=step)

        for served in self._served.values():
            served.put(tell)

    def close(self) -> None:
        """Deliver what is left, then close every tracker: within a minute for all of them (blocks). Idempotent."""
        for served in self._served.values():
            served.end()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for served in self._served.values():
            served.join(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Served:
    """One tracker, its thread, and what waits for it."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self.failures = self.lost = 0
        self._name, self._make = name, make
        self._waiting: deque[Callable[[Tracker], None]] = deque()
        self._in_a_row = 0
        self._ended = self._dead = False
        self._changed = threading.Condition()
        # A daemon: a service that never answers must not keep the program from ending.
        self._thread = threading.Thread(target=self._serve, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[Tracker], None]) -> None:
        with self._changed:
            if self._dead or self._ended:
                self.lost += 1
                return
            if len(self._waiting) == MOST_WAITING:
                self._waiting.popleft()
                self.lost += 1
                if self.lost == 1:
                    logger.warning("tracker %s is too slow: its oldest entries are given up", self._name)
            self._waiting.append(call)
            self._changed.notify()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            with self._changed:
                waiting = len(self._waiting)
                self.lost += waiting
                self._waiting.clear()
            logger.error("tracker %s did not finish in time; %d entries did not reach it", self._name, waiting)

    def _serve(self) -> None:
        made: list[Tracker] = []
        if not self._try(lambda: made.append(self._make())):
            self._give_up("could not be made")
            return
        (tracker,) = made
        while (call := self._next()) is not None:
            if self._try(partial(call, tracker)):
                self._in_a_row = 0
            elif self._in_a_row >= MOST_FAILURES:
                self._give_up(f"failed {MOST_FAILURES} times in a row")
                break
        self._try(tracker.close)

    def _next(self) -> Callable[[Tracker], None] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended)
            return self._waiting.popleft() if self._waiting else None

    def _give_up(self, reason: str) -> None:
        with self._changed:
            self._dead = True
            self.lost += len(self._waiting)
            self._waiting.clear()
        logger.error("tracker %s %s and is left out from now on", self._name, reason)

    def _try(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception:  # a vendor's or a stranger's code may raise anything: told and counted
            self.failures += 1
            self._in_a_row += 1
            logger.warning("tracker %s failed", self._name, exc_info=True)
            return False
        return True


def open_trackers(names: Sequence[str], folder: Path, *, name: str, config: Mapping[str, Any]) -> Trackers:
    """Find the trackers ``names``, and have them made in their threads.

    Args:
        names: installed names or ``package.module:Tracker``.
        folder: the run's folder.
        name: the run's name.
        config: nested tables, shown beside the metrics where a tracker can.

    Raises:
        ConfigError: unknown, or its package is missing (with the command that installs it).
    """
    made: dict[str, Callable[[], Tracker]] = {}
    for each in names:
        factory = load_part("asyncrl.trackers", each, path="telemetry.trackers")
        package = getattr(factory, "package", "")
        if package and not _installed(package):
            remedy = f"install it: {install_command(package)}, or take it out of telemetry.trackers"
            raise ConfigError(
                f"telemetry.trackers: {each} needs the package {package}, which is not installed; {remedy}",
                path="telemetry.trackers",
                remedy=remedy,
            )
        made[each] = partial(factory, folder, name=name, config=config)
    return Trackers(made)


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # a module that was put in place of it, or barred
        return False


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
