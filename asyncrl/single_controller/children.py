"""Whether processes that this one has started are stopped (SIGSTOP). On Linux; elsewhere none is noticed.

    running --the kernel calls it stopped for named_after_s--> named --for ended_after_s--> killed
       ^                                                         |
       '----------------------- continued -----------------------'

Engines and reward functions run in processes of their own, which are busy for as long as they like: whether they are
stopped is asked of the kernel, not of them, so that no long computation is taken for a freeze. A process is watched
together with all that it has started. What follows is what follows a death: its owner sees its end. One that is stopped
between fork and exec has no owner yet, who waits for it without end: :meth:`ChildWatch.starting` watches it (not where
uvloop starts it, which waits with the interpreter's lock; a worker that stands still so is ended by its own watch).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from asyncrl.single_controller.liveness import Liveness, Silence

_log = logging.getLogger(__name__)


def stopped_among(pid: int) -> list[int]:
    """Return which are stopped of a child of this process and all that it has started. Reads files of ``/proc``."""
    if _state_and_parent(pid)[1] != os.getpid():  # it has ended; the number may be another's
        return []
    return _stopped_in_family(pid)


def _stopped_in_family(pid: int) -> list[int]:
    stopped, waiting = [pid] if _state_and_parent(pid)[0] == "T" else [], [pid]
    while waiting:
        for child in _children(waiting.pop()):
            waiting.append(child)
            if _state_and_parent(child)[0] == "T":
                stopped.append(child)
    return stopped


def _state_and_parent(pid: int) -> tuple[str, int]:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()  # a name may hold any byte
    except OSError:
        return "", 0
    state, parent = stat.rpartition(b")")[2].split()[:2]
    return state.decode(), int(parent)


def _forked() -> list[int]:
    """Return the children of this process that have not begun a program of their own."""
    own = _command_line(os.getpid())
    return [pid for pid in _children(os.getpid()) if _command_line(pid) == own]


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # it has ended, or the kernel does not list them
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (thread / "children").read_text().split())
    return found


def kill_stopped(pid: int) -> None:
    """Kill a process, and what is stopped of all that it has started: that would not notice the end of its parent."""
    for each in (*_stopped_in_family(pid), pid):
        try:
            os.kill(each, signal.SIGKILL)
        except ProcessLookupError:
            pass
        except PermissionError:
            _log.warning("process %d cannot be killed: it runs as another user", each)


class ChildWatch:
    """Names and kills stopped processes among those that were added; a thread looks while there are any.

    >>> watch = ChildWatch(Liveness(every_s=1, named_after_s=3, ended_after_s=10))
    >>> with watch.watching(os.getpid(), "this process"):
    ...     watch.names
    ['this process']
    """

    def __init__(self, liveness: Liveness) -> None:
        self._silence = Silence(liveness)
        self._names: dict[int, str] = {}
        self._kills: dict[int, Callable[[int], None]] = {}
        self._named: set[int] = set()
        self._killed: set[int] = set()
        self._starting: list[str] = []
        self._unborn: set[int] = set()
        """Those of the watched that have no owner yet."""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def names(self) -> list[str]:
        """Names of the processes that are watched now."""
        with self._changed:
            return list(self._names.values())

    def configure(self, liveness: Liveness) -> None:
        """Change the times, of what is watched already, too."""
        with self._changed:
            self._silence.liveness = liveness
            self._changed.notify()

    def add(self, pid: int, name: str, *, kill: Callable[[int], None] = kill_stopped) -> None:
        """Watch a child until :meth:`remove`; ``kill`` ends it, without blocking, if it is or has a stopped process."""
        with self._changed:
            self._names[pid], self._kills[pid] = name, kill
            self._unborn.discard(pid)
            self._look_on()

    def remove(self, pid: int) -> None:
        """Watch this process no longer. Idempotent."""
        with self._changed:
            self._names.pop(pid, None)
            self._kills.pop(pid, None)
            self._silence.answered(pid)
            self._named.discard(pid)
            self._killed.discard(pid)
            self._unborn.discard(pid)

    @contextmanager
    def watching(self, pid: int, name: str) -> Generator[None]:
        """Watch a child during the block."""
        self.add(pid, name)
        try:
            yield
        finally:
            self.remove(pid)

    @contextmanager
    def starting(self, name: str) -> Generator[None]:
        """Watch, during the block that starts a process, what this one forks until it runs its program."""
        with self._changed:
            self._starting.append(name)
            self._look_on()
        try:
            yield
        finally:
            with self._changed:
                self._starting.remove(name)
                for pid in () if self._starting else [*self._unborn]:
                    self.remove(pid)

    def _look_on(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="watching children", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._names and not self._starting:
                    self._thread = None
                    return
                self._changed.wait(self._silence.liveness.every_s)
                if self._starting:
                    for pid in {*_forked()} - {*self._names}:
                        self.add(pid, f"process {pid}, which was to be {' or '.join(self._starting)},")
                        self._unborn.add(pid)
                pids = list(self._names)
            for pid in pids:
                try:
                    self._look(pid, stopped_among(pid))
                except Exception:  # noqa: BLE001  one that cannot be looked at or killed leaves the others watched
                    _log.exception("process %d cannot be watched any more", pid)
                    self.remove(pid)

    def _look(self, pid: int, stopped: list[int]) -> None:
        now_s = time.monotonic()
        with self._changed:  # what is removed meanwhile may have ended, and another process may have its number
            name, silence, ended_after_s = self._names.get(pid), self._silence, self._silence.liveness.ended_after_s
            if name is None:
                return
            if stopped:
                silence.sent(pid, now_s=now_s)
            else:
                silence.answered(pid)
            for_s = silence.silent(now_s=now_s).get(pid)
            who = name if pid in stopped else f"process {', '.join(map(str, stopped))} of {name}"
            if for_s is not None and pid not in self._named:
                self._named.add(pid)
                _log.warning("%s has been stopped for %.0f s; it is killed after %g s", who, for_s, ended_after_s)
            elif for_s is None and pid in self._named:
                self._named.discard(pid)
                if pid not in self._killed:  # else what was stopped is dead, and the rest is about to be
                    _log.warning("%s runs again", name)
            if for_s is not None and for_s >= ended_after_s and pid not in self._killed:
                self._killed.add(pid)
                _log.error("%s has been stopped for %.0f s: it is killed", who, for_s)
                self._kills[pid](pid)


children = ChildWatch(Liveness())
"""Watches the children of this process that run engines and reward functions."""
