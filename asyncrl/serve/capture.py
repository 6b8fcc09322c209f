"""Where rewarded sessions go: a folder of batches, or a replay buffer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from asyncrl.errors import ConfigError
from asyncrl.interfaces import GroupSummary, ReplayBuffer
from asyncrl.rollout.trajectory import Trajectory, trajectories_to_batch
from asyncrl.serve.failure import Refusal

__all__ = ["BufferSink", "FolderSink", "GroupedSink", "TrajectorySink"]

_log = logging.getLogger(__name__)


class TrajectorySink(Protocol):
    """Takes groups of finished trajectories."""

    async def put(self, trajectories: Sequence[Trajectory]) -> str:
        """Keep one group. Returns where it went, in words."""
        ...


class FolderSink:
    """One file per group, ``{number:08d}.asyncrl``, read back with ``DataProto.load_from_disk``.

    A file is whole or not there. Numbers go on where the folder ends.

    Raises:
        ConfigError: the folder cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder}: {error.strerror}", path="capture", remedy="give another folder") from error
        self._folder = folder
        numbers = [int(file.stem) for file in folder.glob("*.asyncrl") if file.stem.isdigit()]
        self._next = max(numbers, default=-1) + 1

    async def put(self, trajectories: Sequence[Trajectory]) -> str:
        slot, self._next = self._next, self._next + 1
        file = self._folder / f"{slot:08d}.asyncrl"

        def write() -> None:
            trajectories_to_batch(trajectories, slot=slot).save_to_disk(file)

        await asyncio.to_thread(write)
        return file.name


class BufferSink:
    """Into a replay buffer of this process, under slots that follow those it has admitted.

    Args:
        buffer: admits each group first, and so holds agents back while it is full.
        admission_timeout_s: for the buffer to have room.
    """

    def __init__(self, buffer: ReplayBuffer, *, admission_timeout_s: float = 60.0) -> None:
        self._buffer = buffer
        self._next = 0
        self._timeout_s = admission_timeout_s

    async def put(self, trajectories: Sequence[Trajectory]) -> str:
        slot = max(self._next, self._buffer.statistics().admitted)
        self._next = slot + 1
        batch = trajectories_to_batch(trajectories, slot=slot)  # first: what is no batch takes no place
        await self._buffer.admit(slot, timeout_s=self._timeout_s)
        self._buffer.put(GroupSummary(**batch.meta_info["summary"]), batch)
        return f"slot {slot}"


@dataclass(slots=True)
class _Group:
    """Sessions that have their reward and wait for the others, and when the last of them came."""

    members: list[Sequence[Trajectory]] = field(default_factory=list[Sequence[Trajectory]])
    touched_s: float = 0.0

    @property
    def trajectories(self) -> list[Trajectory]:
        return [each for member in self.members for each in member]

    @property
    def tokens(self) -> int:
        return sum(len(each.token_ids) for each in self.trajectories)


class GroupedSink:
    """Gathers sessions that name the same group until as many as announced have come; others pass at once.

    A group whose other members do not come is handed on as it is: an hour after its last one, and at the end.

    Args:
        sink: takes whole groups.
        groups: unfinished ones at most.
        tokens: that they hold at most.
        idle_s: how long a group waits for its next member.
        clock: seconds that only grow.

    Attributes:
        tokens: that unfinished groups hold.
    """

    def __init__(
        self,
        sink: TrajectorySink,
        *,
        groups: int = 65_536,
        tokens: int = 1 << 26,
        idle_s: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sink = sink
        self._most_groups = groups
        self._most_tokens = tokens
        self._idle_s = idle_s
        self._clock = clock
        self._open: OrderedDict[str, _Group] = OrderedDict()  # the one that has waited longest comes first
        self.tokens = 0

    @property
    def unfinished(self) -> int:
        """Groups that wait for members."""
        return len(self._open)

    async def put(self, trajectories: Sequence[Trajectory], *, group: str = "", size: int = 1) -> str:
        """Keep the trajectories of one session, as a member of ``group`` if it has a name.

        Where that raises, these trajectories are not kept, and the other members wait for them still.

        Raises:
            Refusal: the groups that wait hold as much as they may.
            InvalidDataError: nothing was sampled in any of the sessions.
            OSError: a folder cannot be written.
            DeadlineError, BufferClosedError: a buffer has had no room for long, or takes nothing any more.
        """
        await self._hand_on(idle_s=self._idle_s)
        if not group:
            return await self._sink.put(trajectories)
        waiting = self._take(group)
        if len(waiting.members) + 1 >= size:
            try:
                return await self._sink.put([*waiting.trajectories, *trajectories])
            except BaseException:
                self._keep(group, waiting)
                raise
        try:
            tokens = sum(len(each.token_ids) for each in trajectories)
            if len(self._open) >= self._most_groups or self.tokens + waiting.tokens + tokens > self._most_tokens:
                raise Refusal(503, "the groups that wait for members hold as much as they may", retry_after_s=30)
            waiting.members.append(trajectories)
            waiting.touched_s = self._clock()
            return f"group {group}: {len(waiting.members)} of {size}"
        finally:
            self._keep(group, waiting)

    async def close(self, *, deadline_s: float = 10.0) -> None:
        """Hand on what is unfinished; what cannot be within ``deadline_s`` is lost, and said to be."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self._hand_on(idle_s=0.0)
        for name, group in self._open.items():
            _log.error("group %s is lost: %d sessions, %d tokens", name, len(group.members), group.tokens)
        self._open.clear()

    async def _hand_on(self, *, idle_s: float) -> None:
        """Groups that have waited so long, as they are."""
        before_s = self._clock() - idle_s
        due = itertools.takewhile(lambda entry: entry[1].touched_s <= before_s, self._open.items())
        for name, _ in list(due):
            group = self._take(name)
            if not group.members:  # it has been completed meanwhile
                continue
            try:
                kept = await self._sink.put(group.trajectories)
                _log.warning("group %s is handed on with %d members (%s)", name, len(group.members), kept)
            except BaseException as error:
                group.touched_s = self._clock()
                self._keep(name, group)
                if not isinstance(error, Exception):
                    raise
                _log.warning("group %s waits on: %s", name, error)

    def _take(self, name: str) -> _Group:
        group = self._open.pop(name, None) or _Group()
        self.tokens -= group.tokens
        return group

    def _keep(self, name: str, group: _Group) -> None:
        """Let it wait, with those of its name that have come meanwhile."""
        later = self._take(name)
        group.members += later.members
        group.touched_s = max(group.touched_s, later.touched_s)
        if group.members:
            self._open[name] = group
            self.tokens += group.tokens
