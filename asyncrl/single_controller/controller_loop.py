"""The loop that all controller work runs on, and the owners of that work."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

__all__ = ["ControllerLoop", "TaskOwner", "Work"]

WATCH_AFTER_S = 0.02
"""How long replies go unwatched if nobody asks: most threads that block for a result have begun to by then."""

_lock = threading.Lock()
_running: dict[int, ControllerLoop] = {}
"""The background loop of this process, by process id: a forked child does not inherit its parent's thread."""


class ControllerLoop:
    """An asyncio loop, and a door to it for other threads.

    Futures and worker groups of one process share :meth:`default`: a daemon thread that starts when it is first
    needed, so that ``result()`` works in scripts, notebooks and inside other event loops. :meth:`current` puts
    everything on the loop that is running, where tests can make time and order deterministic.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.now = loop.time  # bound once, for all the calls that keep it
        self.owner = TaskOwner(self, name="controller loop")
        # Weakly: what has ended in the meantime takes its results along.
        self._unwatched: deque[weakref.ref[Watchable]] = deque()
        self._watching = False

    @staticmethod
    def default() -> ControllerLoop:
        """The background loop of this process, started if need be (a forked child gets one of its own)."""
        with _lock:
            controller = _running.get(os.getpid())
            if controller is None or controller.loop.is_closed():
                controller = _running[os.getpid()] = _start_thread()
            return controller

    @staticmethod
    def current() -> ControllerLoop:
        """The loop that runs in this thread.

        Raises:
            RuntimeError: none does.
        """
        return ControllerLoop(asyncio.get_running_loop())

    @property
    def is_here(self) -> bool:
        """Whether the caller runs on this loop, where blocking would wait for itself."""
        return _running_loop() is self.loop

    @property
    def is_closed(self) -> bool:
        """Whether nothing runs on it any more."""
        return self.loop.is_closed()

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call ``function`` soon on the loop, in the order of these calls. From any thread."""
        if self.is_here:
            self.loop.call_soon(function, *arguments)
        else:
            self.loop.call_soon_threadsafe(function, *arguments)

    def notify(self, function: Callable[..., object], *arguments: Any) -> None:
        """:meth:`call` for news that nobody waits for any more once the loop is closed."""
        try:
            self.call(function, *arguments)
        except RuntimeError:
            if not self.is_closed:
                raise

    def watch_soon(self, each: Watchable) -> None:
        """Watch it a moment from now, unless somebody has done so by then. From any thread, and cheap."""
        self._unwatched.append(weakref.ref(each))
        if not self._watching:
            self._watching = True
            self.notify(self._watch_later)

    def _watch_later(self) -> None:
        self.loop.call_later(WATCH_AFTER_S, self._watch)

    def _watch(self) -> None:
        if not self._unwatched:
            self._watching = False
            # One that came between the two lines above.
            if not self._unwatched:
                return
            self._watching = True
        self._watch_later()
        for _ in range(len(self._unwatched)):
            each = self._unwatched.popleft()()
            if each is not None:
                each.watch()

    def __repr__(self) -> str:
        return f"<ControllerLoop {'closed' if self.is_closed else 'open'}>"


class Watchable(Protocol):
    """Something that has to be watched to be seen to end."""

    def watch(self) -> None:
        """Watch it from now on; again is nothing."""


class Work:
    """One task of an owner. Exists at once; the task itself begins on the loop."""

    __slots__ = ("_cancelled", "_loop", "_task")

    def __init__(self, loop: ControllerLoop) -> None:
        self._loop = loop
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False

    def cancel(self) -> None:
        """Cancel the task, or keep it from beginning. From any thread."""
        self._cancelled = True
        self._loop.notify(self._cancel_task)

    def watch(self) -> None:
        """The loop sees its tasks."""

    def wait_here(self, timeout_s: float | None) -> None:
        """Tasks run on the loop only."""

    def _cancel_task(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def begin(self, task: asyncio.Task[Any]) -> None:
        """``task`` is the one. On the loop."""
        self._task = task
        if self._cancelled:
            task.cancel()


class TaskOwner:
    """A set of tasks that belong to somebody and end with it."""

    def __init__(self, loop: ControllerLoop, *, name: str) -> None:
        self._loop = loop
        self._name = name
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, make: Callable[[], Coroutine[Any, Any, Any]], then: Callable[[asyncio.Task[Any]], object]) -> Work:
        """Run ``make()`` as a task and hand the finished task to ``then``. From any thread; tasks begin in order."""
        work = Work(self._loop)
        self._loop.call(self._begin, work, make, then)
        return work

    def _begin(
        self, work: Work, make: Callable[[], Coroutine[Any, Any, Any]], then: Callable[[asyncio.Task[Any]], object]
    ) -> None:
        task = self._loop.loop.create_task(make())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(then)
        work.begin(task)

    async def cancel_all(self) -> None:
        """Cancel every task but the calling one, and wait until they have ended. On the loop."""
        tasks = self._tasks - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def __repr__(self) -> str:
        return f"<TaskOwner {self._name}: {len(self._tasks)} tasks>"


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _start_thread() -> ControllerLoop:
    loop = asyncio.new_event_loop()
    controller = ControllerLoop(loop)
    started = threading.Event()
    process = os.getpid()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.call_soon(started.set)
        try:
            loop.run_forever()
        finally:
            loop.close()

    thread = threading.Thread(target=run, name="asyncrl-controller", daemon=True)
    thread.start()
    started.wait()

    def stop() -> None:
        if process != os.getpid() or loop.is_closed():
            return

        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=1.0)
            loop.stop()

        # The loop refers to its tasks weakly; the frame below holds this one until the thread has ended.
        ending = asyncio.run_coroutine_threadsafe(end(), loop)
        thread.join(timeout=2.0)
        del ending

    atexit.register(stop)
    return controller
