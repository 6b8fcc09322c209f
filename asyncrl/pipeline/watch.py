"""What a run is doing at this moment, and why it waits: written to its folder, and held against a deadline.

``RUN/status.json`` is written every few seconds while a run trains; ``asyncrl why RUN`` reads it. A wait of the trainer
that lasts too long is named in the log, with all that is known of its cause, and then ended by name.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from asyncrl.errors import ConfigError, DeadlineError
from asyncrl.telemetry.timeline import Timeline

__all__ = ["Doing", "RunStatus", "Waiting", "Watch", "read_status"]

_log = logging.getLogger(__name__)

MOST_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A wait that goes on: whose, what for, for how long, and when it will be ended (None: by whom it waits for)."""

    owner: str
    reason: str
    for_s: float
    deadline_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Doing:
    """A piece of work that goes on."""

    stage: str
    name: str
    for_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """One moment of a run.

    Attributes:
        pid: process of the driver.
        at: when it was taken, in seconds since the epoch.
        step: training steps done.
        steps: training steps in all.
        waits: longest first.
        work: longest first; at most 20.
        causes: sentences of the parts about themselves: the law, the buffer, the pool.
    """

    pid: int
    at: float
    step: int
    steps: int
    waits: tuple[Waiting, ...]
    work: tuple[Doing, ...]
    causes: tuple[str, ...]

    def sentences(self) -> list[str]:
        """The same, to read."""
        lines = [f"step {self.step} of {self.steps} is done"]
        for wait in self.waits:
            end = "" if wait.deadline_s is None else f"; it is ended after {wait.deadline_s:g} s"
            lines.append(f"{wait.owner} waits for {wait.reason}, {_time(wait.for_s)} already{end}")
        lines += [f"{work.stage}: {work.name}, for {_time(work.for_s)}" for work in self.work]
        return lines + list(self.causes)


class Watch:
    """Looks at a run now and then. Takes its time from the running loop.

    Args:
        path: file to write.
        timeline: knows what goes on.
        steps: training steps in all.
        done: how many of them are done.
        causes: what the parts say of themselves.
        stall_s: longest wait of the trainer.
        every_s: seconds between two looks.
    """

    def __init__(
        self,
        path: Path,
        *,
        timeline: Timeline,
        steps: int,
        done: Callable[[], int],
        causes: Callable[[], Iterable[str]],
        stall_s: float,
        every_s: float = 2.0,
    ) -> None:
        self._path = path
        self._timeline = timeline
        self._steps = steps
        self._done = done
        self._causes = causes
        self._stall_s = stall_s
        self._every_s = every_s
        self._told: set[tuple[str, str]] = set()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch while the block runs; a stall ends the block with :class:`DeadlineError` (in a group)."""
        async with asyncio.TaskGroup() as tasks:
            looking = tasks.create_task(self._look_on(), name="watch")
            try:
                yield
            finally:
                looking.cancel()

    async def _look_on(self) -> None:
        while True:
            status = self.look()
            await asyncio.to_thread(write_status, self._path, status)
            self._hold_to_deadline(status)
            await asyncio.sleep(self._every_s)

    def look(self) -> RunStatus:
        """The run at this moment."""
        waits = [
            Waiting(owner=owner, reason=reason, for_s=for_s, deadline_s=self._stall_s if owner == "train" else None)
            for owner, reasons in self._timeline.current_waits().items()
            for reason, for_s in reasons.items()
        ]
        work = [Doing(stage=stage, name=name, for_s=for_s) for stage, name, for_s in self._timeline.open_spans()]
        return RunStatus(
            pid=os.getpid(),
            at=time.time(),
            step=self._done(),
            steps=self._steps,
            waits=tuple(sorted(waits, key=lambda wait: -wait.for_s)),
            work=tuple(work[:MOST_SHOWN]),
            causes=tuple(self._causes()),
        )

    def _hold_to_deadline(self, status: RunStatus) -> None:
        now = {(wait.owner, wait.reason) for wait in status.waits}
        self._told &= now
        for wait in status.waits:
            if wait.deadline_s is None or wait.for_s < wait.deadline_s / 10:
                continue
            why = "; ".join(status.sentences()[1:])
            if (wait.owner, wait.reason) not in self._told:
                self._told.add((wait.owner, wait.reason))
                _log.warning("a long wait: %s", why)
            if wait.for_s >= wait.deadline_s:
                _log.error("a wait is ended: %s", why)
                raise DeadlineError(
                    f"{wait.owner} waited {_time(wait.for_s)} for {wait.reason} (telemetry.stall_s = "
                    f"{wait.deadline_s:g}): {why}",
                    waiting_for=wait.reason,
                    timeout_s=wait.deadline_s,
                )


def write_status(path: Path, status: RunStatus) -> None:
    """Replace the file as a whole; only its owner may read it."""
    draft = path.with_name(path.name + ".part")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(asdict(status), file)
    draft.replace(path)


def read_status(path: Path) -> RunStatus:
    """What :func:`write_status` wrote.

    Raises:
        OSError: there is none.
        ConfigError: it is something else.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        record["waits"] = tuple(Waiting(**wait) for wait in record["waits"])
        record["work"] = tuple(Doing(**work) for work in record["work"])
        record["causes"] = tuple(record["causes"])
        return RunStatus(**record)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no status of a run: {error!r}", path="run") from error


def _time(time_s: float) -> str:
    return f"{time_s:.1f} s" if time_s < 60 else f"{time_s:.0f} s"
