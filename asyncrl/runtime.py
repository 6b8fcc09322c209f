"""The event loop that controller work runs on, its cancellation, and running a program on a loop of its own.

:func:`register_for_cancellation` and :func:`cancel_calls_of_this_thread` define what Ctrl-C, or a notebook's stop
button, cancels besides the Python code that runs.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import concurrent.futures.thread  # before programs register what has to come first at exit
import contextlib
import contextvars
import gc
import inspect
import logging
import math
import os
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType
from typing import Any, Generic, ParamSpec, Protocol, Self, TypeVar

from asyncrl.errors import AsyncRLError

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_P = ParamSpec("_P")
_R = TypeVar("_R")

# ------------------------------------------------------------------------------------------------ the controller's loop

WATCH_AFTER_S = 0.02
"""How long a call is left unwatched at first: most threads that block for a result have begun to by then."""

_lock = threading.Lock()
_running: dict[int, ControllerLoop] = {}
"""The background loop of this process, by process id: a forked child does not inherit its parent's thread."""


class Watchable(Protocol):
    """A call whose end is only noticed while it is watched."""

    def watch(self) -> None:
        """Watch it from now on. Idempotent."""


class ControllerLoop:
    """An asyncio loop that other threads can submit to.

    Futures and worker groups of one process share :meth:`default`: a daemon thread that starts when it is first
    needed, so that ``result()`` works in scripts, notebooks and inside other event loops. :meth:`current` wraps the
    running loop instead, where tests can make time and order deterministic.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.now = loop.time  # bound once, for all the calls that keep it
        self.owner = TaskOwner(self)
        # Weak references: a call that ended in the meantime must not keep its results alive.
        self._unwatched: deque[weakref.ref[Watchable]] = deque()
        self._watching = False

    @staticmethod
    def default() -> ControllerLoop:
        """Return the background loop of this process, started if need be (a forked child starts its own)."""
        with _lock:
            controller = _running.get(os.getpid())
            if controller is None or controller.loop.is_closed():
                controller = _running[os.getpid()] = _start_thread()
            return controller

    @staticmethod
    def current() -> ControllerLoop:
        """Wrap the loop that runs in this thread; raise RuntimeError if none does."""
        return ControllerLoop(asyncio.get_running_loop())

    @property
    def is_here(self) -> bool:
        """Whether the caller runs on this loop, where blocking would wait for itself."""
        try:
            return asyncio.get_running_loop() is self.loop
        except RuntimeError:
            return False

    @property
    def is_closed(self) -> bool:
        return self.loop.is_closed()

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call ``function`` soon on the loop, in the order of these calls. From any thread."""
        if self.is_here:
            self.loop.call_soon(function, *arguments)
        else:
            self.loop.call_soon_threadsafe(function, *arguments)

    def notify(self, function: Callable[..., object], *arguments: Any) -> None:
        """As :meth:`call`; does nothing if the loop is closed: no task waits any more."""
        try:
            self.call(function, *arguments)
        except RuntimeError:
            if not self.is_closed:
                raise

    def watch_soon(self, call: Watchable) -> None:
        """Watch ``call`` after :data:`WATCH_AFTER_S` if it still exists then. Cheap, and from any thread."""
        self._unwatched.append(weakref.ref(call))
        if not self._watching:
            self._watching = True
            self.notify(self._watch_later)

    def _watch_later(self) -> None:
        self.loop.call_later(WATCH_AFTER_S, self._watch)

    def _watch(self) -> None:
        if not self._unwatched:
            self._watching = False
            # Another thread may have appended a call between the two lines above.
            if not self._unwatched:
                return
            self._watching = True
        self._watch_later()
        for _ in range(len(self._unwatched)):
            call = self._unwatched.popleft()()
            if call is not None:
                call.watch()


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

        # The loop refers to its tasks weakly; this frame keeps the task alive until the thread has ended.
        ending = asyncio.run_coroutine_threadsafe(end(), loop)
        thread.join(timeout=2.0)
        del ending

    atexit.register(stop)
    return controller


class Work:
    """Handle of one task of a :class:`TaskOwner`. Exists at once; the task itself starts on the loop."""

    __slots__ = ("_cancelled", "_loop", "_task")

    def __init__(self, loop: ControllerLoop) -> None:
        self._loop = loop
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False

    def begin(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        if self._cancelled:
            task.cancel()

    def cancel(self) -> None:
        """Cancel the task, or keep it from starting. From any thread."""
        self._cancelled = True
        self._loop.notify(self._cancel_task)

    def _cancel_task(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def watch(self) -> None:
        """Do nothing: the loop watches its tasks."""

    def wait_here(self, timeout_s: float | None) -> None:
        """Do nothing: a waiting thread cannot help a task."""


class TaskOwner:
    """A set of tasks that are cancelled together."""

    def __init__(self, loop: ControllerLoop) -> None:
        self._loop = loop
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, make: Callable[[], Coroutine[Any, Any, Any]], then: Callable[[asyncio.Task[Any]], object]) -> Work:
        """Run ``make()`` as a task and pass the finished task to ``then``. From any thread; tasks start in order."""
        work = Work(self._loop)

        def begin() -> None:
            task = self._loop.loop.create_task(make())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(then)
            work.begin(task)

        self._loop.call(begin)
        return work

    async def cancel_all(self) -> None:
        """Cancel every task but the calling one, and wait until they have ended. On the loop."""
        tasks = self._tasks - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def __len__(self) -> int:
        return len(self._tasks)


# ---------------------------------------------------------------------------------------- cancelling calls on interrupt
#
# A KeyboardInterrupt in a thread that blocks in ``result()`` cancels every unfinished call that this thread has made,
# in the workers too, so that nothing of an interrupted computation runs on unseen. In a notebook it cancels those of
# the interrupted cell, wherever in the cell it arrives; calls of earlier cells continue. Calls of other threads always
# continue.


class CancellableCall(Protocol):
    thread: int

    def interrupt(self) -> bool:
        """Cancel the call; return whether it was unfinished."""
        ...


class CallingGroup(Protocol):
    def unfinished_calls(self) -> list[CancellableCall]: ...


_groups: weakref.WeakSet[CallingGroup] = weakref.WeakSet()
_calls_of_earlier_cells: weakref.WeakSet[CancellableCall] = weakref.WeakSet()
_cells_are_watched = False


def register_for_cancellation(group: CallingGroup) -> None:
    """Include the calls of ``group`` in what an interruption cancels."""
    global _cells_are_watched  # noqa: PLW0603  there is one notebook in a process
    _groups.add(group)
    if not _cells_are_watched and "IPython" in sys.modules:
        shell: Any = sys.modules["IPython"].get_ipython()
        if shell is not None:
            _cells_are_watched = True
            shell.events.register("pre_run_cell", _before_cell)
            shell.events.register("post_run_cell", _after_cell)


def cancel_calls_of_this_thread() -> int:
    """Cancel the unfinished calls of this thread (in a notebook, of the running cell); return their number."""
    here = threading.get_ident()
    calls = [call for group in list(_groups) for call in group.unfinished_calls() if call.thread == here]
    return sum(call.interrupt() for call in calls if call not in _calls_of_earlier_cells)


def _before_cell(_info: object) -> None:
    for group in list(_groups):
        _calls_of_earlier_cells.update(group.unfinished_calls())


def _after_cell(result: Any) -> None:
    if isinstance(result.error_in_exec, KeyboardInterrupt):
        cancel_calls_of_this_thread()


# -------------------------------------------------------------------------- operations that outlive a cancelled caller


def _forget(operation: Awaitable[Any]) -> None:
    """Close a coroutine that never began, so that Python does not warn that it was never awaited."""
    if inspect.iscoroutine(operation) and inspect.getcoroutinestate(operation) == inspect.CORO_CREATED:
        operation.close()


async def shield_until_done(
    operation: Awaitable[_T],
    *,
    on_cancel: Callable[[], object] | None = None,
    ended: asyncio.Future[Any] | None = None,
    ended_error: BaseException | None = None,
) -> _T:
    """Wait until ``operation`` is done, even if the caller is cancelled meanwhile; then raise that cancellation.

    An error of the operation after a cancellation is logged and becomes the cause of the CancelledError.

    Args:
        operation: a coroutine or future that must not be left half done.
        on_cancel: called once, at the first cancellation of the caller that finds the operation unfinished: to make the
            operation stop early, as setting the event that a thread reads. Must not raise.
        ended: a future that is done when the operation cannot complete any more, as the task that reads its peer's
            answers. The operation is cancelled then and waited for.
        ended_error: raised where ``ended`` ended the operation and the caller was not cancelled.
    """
    try:
        task = asyncio.ensure_future(operation)
    except RuntimeError:  # no loop runs: this is the end of a caller that was left behind
        _forget(operation)
        raise
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        awaited: list[asyncio.Future[Any]] = [task]
        if ended is not None and ended.done():
            task.cancel()
        elif ended is not None:
            awaited.append(ended)
        try:
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError as error:
            if cancelled is None and on_cancel is not None and not task.done():
                on_cancel()
            cancelled = cancelled or error
        except GeneratorExit:  # the loop has ended
            _forget(operation)
            raise
    if cancelled is not None:
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            _log.warning("an operation failed after its caller was cancelled: %s: %s", type(failure).__name__, failure)
        raise cancelled from failure
    if task.cancelled() and ended_error is not None and ended is not None and ended.done():
        raise ended_error
    return task.result()


# -------------------------------------------------------------------------------------- running a program with signals


class Terminated(SystemExit):
    """SIGTERM arrived, and the cleanup has run. Exit status 143, as a shell expects."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


def run_with_signals(main: Coroutine[Any, Any, _T]) -> _T:
    """Run ``main`` on an event loop of its own (uvloop where it is installed), blocking until it ends.

    The first SIGINT or SIGTERM cancels ``main``, whose cleanup runs; a second SIGINT interrupts the cleanup. Inside a
    running event loop, as in a notebook, the new loop runs in a thread; interrupting the cell cancels ``main`` too.

    Raises:
        KeyboardInterrupt: after SIGINT.
        Terminated: after SIGTERM.
        BaseException: the error that ended ``main``; of a group of errors the one that :func:`first_cause` picks.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(_Program(main))
    return BackgroundProgram(main).run()


class _Program(Generic[_T]):
    """A coroutine that can be cancelled from any thread, also before it starts, and by SIGTERM."""

    def __init__(self, main: Coroutine[Any, Any, _T]) -> None:
        self._main = main
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._lock = threading.RLock()  # a signal may come while this thread has it
        self._cancelled = False
        self._failure: Exception | None = None
        self.terminated = False

    async def __call__(self) -> _T:
        with self._lock:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            if self._cancelled:
                self._main.close()
                raise asyncio.CancelledError
        _program.set(self)
        try:
            return await self._with_signal()
        except BaseException as error:
            if self._failure is None or self.terminated:
                raise
            raise self._failure from (None if isinstance(error, asyncio.CancelledError) else error)

    async def _with_signal(self) -> _T:
        assert self._loop is not None
        if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
            return await self._main
        before = signal.getsignal(signal.SIGTERM)
        self._loop.add_signal_handler(signal.SIGTERM, self.terminate)
        try:
            return await self._main
        finally:  # uvloop leaves its handler in place, and later signals would be lost
            self._loop.remove_signal_handler(signal.SIGTERM)
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)

    def terminate(self) -> None:
        self.terminated = True
        self.cancel()

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def fail(self, error: Exception) -> None:
        self._failure = error
        self.cancel()

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            if self._loop is None or self._task is None:
                return
            try:
                self._loop.call_soon_threadsafe(self._task.cancel)
            except RuntimeError:
                if not self._loop.is_closed():  # else it has ended
                    raise


_program: ContextVar[_Program[Any] | None] = ContextVar("program", default=None)


def failure_of_program() -> Callable[[Exception], object] | None:
    """Return a function that cancels the program which this is called in; that then raises the function's argument.

    The function may be called in any thread. Returns None outside a program.
    """
    program = _program.get()
    return program.fail if program is not None else None


def _run(program: _Program[_T]) -> _T:
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        try:
            return runner.run(program())
        except asyncio.CancelledError:
            if program.terminated:
                raise Terminated from None
            raise
        except BaseExceptionGroup as group:
            first = first_cause(group)
            raise first from first.__cause__ or group  # its own cause explains more than what else ended


class BackgroundProgram(Generic[_T]):
    """Runs ``main`` on an event loop of its own, in a thread that :meth:`start` starts.

    An interpreter that exits waits for its programs first; Ctrl-C cancels them then, too.
    """

    def __init__(self, main: Coroutine[Any, Any, _T]) -> None:
        self._program = _Program(main)
        self._ended: concurrent.futures.Future[_T] = concurrent.futures.Future()
        self._joined: asyncio.Future[_T] | None = None
        self._thread = threading.Thread(target=self._run, name="asyncrl-run", daemon=True)
        self._may_run = threading.Event()

    def start(self) -> Self:
        """Start the thread; an interrupt meanwhile cancels the program and is raised when that has ended."""
        with self._signals() as interrupted:
            self._start()
            if interrupted():  # the caller never gets the program
                concurrent.futures.wait([self._ended])
                raise KeyboardInterrupt
        return self

    def run(self) -> _T:
        """Start the thread and :meth:`wait`."""
        with self._signals() as interrupted:
            self._start()
            return self._result(interrupted)

    @property
    def ended(self) -> bool:
        return self._ended.done()

    def cancel(self) -> None:
        """Cancel ``main``, from any thread; :meth:`wait` raises CancelledError when its cleanup is done."""
        self._program.cancel()

    def wait(self, timeout_s: float | None = None) -> _T:
        """Block until the end; return the result, or raise as :func:`run_with_signals`.

        In the main thread SIGINT and SIGTERM cancel ``main`` meanwhile. After ``timeout_s`` TimeoutError is raised, and
        ``main`` goes on.
        """
        with self._signals() as interrupted:
            return self._result(interrupted, timeout_s)

    async def join(self, timeout_s: float | None = None) -> _T:
        """As :meth:`wait`, on an event loop. If the caller is cancelled, so is ``main``, and its cleanup is awaited."""
        with self._signals() as interrupted:
            ended = self._ended_here()
            if timeout_s is not None:
                await self.cancelled_with_caller(asyncio.wait([ended], timeout=timeout_s))
                if not ended.done() and not interrupted():
                    raise TimeoutError
            try:
                return await shield_until_done(ended, on_cancel=self.cancel)
            except asyncio.CancelledError:
                if interrupted():
                    raise KeyboardInterrupt from None
                raise

    async def cancelled_with_caller(self, waiting: Awaitable[_R]) -> _R:
        """Await ``waiting``. If the caller is cancelled meanwhile, so is ``main``, and its cleanup is awaited."""
        try:
            return await waiting
        except asyncio.CancelledError as cancellation:
            self.cancel()
            ended = self._ended_here()
            await shield_until_done(asyncio.wait([ended]))
            raise cancellation from ended.exception()

    def _ended_here(self) -> asyncio.Future[_T]:
        """Return a future of the end on the running loop: one for all waits, since each would stay until the end."""
        ended = self._joined
        if ended is None or ended.get_loop() is not asyncio.get_running_loop():
            ended = self._joined = asyncio.wrap_future(self._ended)
        return ended

    def _start(self) -> None:
        _wait_at_exit(self)
        try:
            self._thread.start()
        finally:  # at a second Ctrl-C, too: the program's end is waited for
            # Only now: a thread that is started and goes on working keeps the interpreter from its starter for 5 ms.
            self._may_run.set()

    def _result(self, interrupted: Callable[[], int], timeout_s: float | None = None) -> _T:
        deadline_s = time.monotonic() + (timeout_s if timeout_s is not None else math.inf)
        while not self.ended:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 and not interrupted():
                raise TimeoutError(f"it has not ended after {timeout_s:g} s")
            # A signal that another thread received does not wake this one, and is handled when it wakes.
            concurrent.futures.wait([self._ended], min(left_s, _SIGNALS_S) if left_s > 0 else _SIGNALS_S)
        try:
            return self._ended.result()
        except asyncio.CancelledError:
            if interrupted():
                raise KeyboardInterrupt from None
            raise

    def _run(self) -> None:
        self._may_run.wait()
        try:
            result = _run(self._program)
        except BaseException as error:  # noqa: BLE001 - raised by wait() and join()
            self._ended.set_exception(error)
        else:
            self._ended.set_result(result)

    @contextmanager
    def _signals(self) -> Iterator[Callable[[], int]]:
        """Have the first SIGINT cancel the program, and SIGTERM too; yield a function that counts interrupts.

        In the main thread only. A signal reaches all programs that are waited for at the time.

        An exception may arrive at any line, also between the start of the thread and the first reference to it; then
        nothing would wait for the cleanup. So a signal is a call here, and the second SIGINT an exception.
        """
        if threading.current_thread() is not threading.main_thread():
            yield lambda: 0
            return
        watch = _Watch(self._program)
        try:
            _watches.add(watch)
            for number in (signal.SIGINT, signal.SIGTERM):  # another may have been set since (a notebook's, by cell)
                if signal.getsignal(number) is not _take:
                    _handlers_before.setdefault(number, signal.signal(number, _take))
            yield lambda: watch.interrupts
        finally:
            _watches.discard(watch)
            while _handlers_before and not _watches:
                number, handler = _handlers_before.popitem()
                signal.signal(number, handler or signal.SIG_DFL)


@dataclass(slots=True, eq=False)
class _Watch:
    """One wait for a program, which signals cancel."""

    program: _Program[Any]
    interrupts: int = 0


_watches: set[_Watch] = set()
"""Those of the main thread. They may end in any order, so all have the same handlers: from the first to the last."""

_handlers_before: dict[signal.Signals, Any] = {}


def _take(number: int, frame: FrameType | None) -> None:
    watches = [*_watches]
    if number == signal.SIGTERM:
        for watch in watches:
            watch.program.terminate()
        return
    for watch in watches:
        watch.interrupts += 1
        watch.program.cancel()
    if any(watch.interrupts > 1 for watch in watches):
        raise KeyboardInterrupt


_SIGNALS_S = 0.2
"""How late a signal may be taken."""

_programs: list[weakref.ref[BackgroundProgram[Any]]] = []


def _wait_at_exit(program: BackgroundProgram[Any]) -> None:
    """Have the interpreter wait for ``program`` before it stops the threads of executors, which the program needs."""
    if not _programs:
        threading._register_atexit(_wait_for_programs)  # type: ignore[attr-defined]  # noqa: SLF001 - comes first now
    _programs[:] = [known for known in _programs if known() is not None]
    _programs.append(weakref.ref(program))


def _wait_for_programs() -> None:
    for known in _programs:
        if (program := known()) is not None and not program.ended:
            try:
                program.wait()
            except (KeyboardInterrupt, asyncio.CancelledError):
                _log.warning("interrupted")
            except BaseException:  # noqa: BLE001 - nothing is left that could handle it
                _log.exception("a program failed that nothing waited for")


def first_cause(error: BaseException) -> BaseException:
    """Return the error to report: of a group the first of asyncrl's own errors, else the first of all."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [first_cause(leaf) for leaf in error.exceptions]
    return next((leaf for leaf in leaves if isinstance(leaf, AsyncRLError)), leaves[0])


async def in_thread(function: Callable[_P, _T], /, *arguments: _P.args, **keywords: _P.kwargs) -> _T:
    """Run a user's function with :func:`asyncio.to_thread`; raise RuntimeError if it raises StopIteration."""
    return await asyncio.to_thread(_call, function, *arguments, **keywords)


async def in_own_thread(function: Callable[_P, _T], /, *arguments: _P.args, **keywords: _P.kwargs) -> _T:
    """As :func:`in_thread`, at once, however many threads are busy: a deadline of the call is the function's alone.

    The thread of a cancelled call is left behind, as by :func:`in_abandonable_thread`.

    Raises:
        RuntimeError: very many calls that were cancelled still run.
    """
    name = getattr(function, "__qualname__", repr(function))
    if len(_left_behind) >= _MOST_LEFT_BEHIND:
        raise RuntimeError(f"{len(_left_behind)} calls that were given up still run, some of {name}; it is not called")
    ended = threading.Event()

    def call() -> _T:
        try:
            return _call(function, *arguments, **keywords)
        finally:
            ended.set()
            _left_behind.discard(ended)

    try:
        return await in_abandonable_thread(call)
    except asyncio.CancelledError:
        if not ended.is_set():
            _left_behind.add(ended)
            if len(_left_behind) in (1, 10, 100):
                _log.warning("a call of %s was given up and still runs, as do %d others", name, len(_left_behind) - 1)
        if ended.is_set():
            _left_behind.discard(ended)
        raise


_MOST_LEFT_BEHIND = 1000
_left_behind: set[threading.Event] = set()


def _call(function: Callable[_P, _T], /, *arguments: _P.args, **keywords: _P.kwargs) -> _T:
    try:
        return function(*arguments, **keywords)
    except StopIteration as error:  # a future cannot hold one, so awaiting it would never end
        name = getattr(function, "__qualname__", repr(function))
        raise RuntimeError(f"{name} raised StopIteration") from error


async def in_abandonable_thread(function: Callable[[], _T], *, hopeless: Callable[[], bool] = lambda: True) -> _T:
    """Run a function that may block for ever. A cancelled call waits for its end first, unless that is ``hopeless``.

    Then the thread is left behind, as a daemon: nothing waits for it, and its result is dropped.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[_T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(outcome: concurrent.futures.Future[_T]) -> None:
        error = outcome.exception()
        if answer.done():
            return
        if error is None:
            answer.set_result(outcome.result())
        else:
            answer.set_exception(error)

    def call() -> None:
        outcome: concurrent.futures.Future[_T] = concurrent.futures.Future()
        try:
            outcome.set_result(context.run(function))
        except BaseException as error:  # noqa: BLE001  whatever it is, it is raised where the result is awaited
            outcome.set_exception(error)
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=call, name="a call that may be abandoned", daemon=True).start()
    try:
        return await asyncio.shield(answer)
    except asyncio.CancelledError:
        if not hopeless():
            await asyncio.wait([answer])
        answer.cancel()
        raise


def program_has_failed() -> bool:
    """Return whether the program which this is called in was ended by :func:`failure_of_program`."""
    program = _program.get()
    return program is not None and program.failed


async def run_all(calls: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Run coroutines concurrently and return their results in order; the first failure cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors.exceptions[0].__cause__
    return [task.result() for task in tasks]


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


# --------------------------------------------------------------------------------------------------- garbage collection


def freeze_gc() -> None:
    """Exclude all objects that exist now from garbage collection, and collect less often. For processes that serve.

    Requests leave few cycles behind, and a full collection over everything that torch and transformers have made takes
    up to 0.2 s, during which no request is answered and no token is decoded.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
