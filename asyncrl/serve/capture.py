"""Where rewarded sessions go: a folder of batches, or a replay buffer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from asyncrl.errors import ConfigError, InvalidDataError
from asyncrl.interfaces import GroupSummary, ReplayBuffer
from asyncrl.rollout.trajectory import Trajectory, trajectories_to_batch

__all__ = ["BufferSink", "FolderSink", "GroupedSink", "TrajectorySink"]


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


class GroupedSink:
    """Gathers sessions that name the same group until as many as announced have come; others pass at once.

    Args:
        sink: takes whole groups.
        groups: unfinished ones at most.
    """

    def __init__(self, sink: TrajectorySink, *, groups: int = 65_536) -> None:
        self._sink = sink
        self._most = groups
        self._open: dict[str, list[Sequence[Trajectory]]] = {}

    @property
    def unfinished(self) -> int:
        """Groups that wait for members."""
        return len(self._open)

    async def put(self, trajectories: Sequence[Trajectory], *, group: str = "", size: int = 1) -> str:
        """Keep the trajectories of one session, as a member of ``group`` if it has a name.

        Where that raises, these trajectories are not kept, and the other members wait for them still.

        Raises:
            InvalidDataError: too many groups are unfinished, or nothing was sampled in any of the sessions.
            OSError: a folder cannot be written.
            DeadlineError, BufferClosedError: a buffer has had no room for long, or takes nothing any more.
        """
        if not group:
            return await self._sink.put(trajectories)
        if group not in self._open and len(self._open) >= self._most:
            raise InvalidDataError(f"{self._most} groups are unfinished; no more fit")
        members = self._open.setdefault(group, [])
        members.append(trajectories)
        if len(members) < size:
            return f"group {group}: {len(members)} of {size}"
        del self._open[group]
        try:
            return await self._sink.put([each for member in members for each in member])
        except BaseException:
            if others := [*members[:-1], *self._open.get(group, ())]:
                self._open[group] = others
            raise
