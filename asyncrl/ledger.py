"""The events of a ledger, and the contract of the part that records them.

A ledger records every group (the rollouts of one prompt) from issue to use. A result is identified by the group's
``group_id``, the ``attempt`` at it and the ``row``, so late and duplicate results are recognised. The states of a
group, the legal transitions and their laws: ``buffers/ledger_state.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec

if TYPE_CHECKING:
    from asyncrl.data import DataProto
    from asyncrl.interfaces import GroupSummary


# ----------------------------------------------------------------------------------------------------------- events


class Issued(msgspec.Struct, frozen=True, tag="issued", omit_defaults=True):
    """A group got its number; and the number of its task, where that is another."""

    group_id: int
    task: int | None = None


class Dispatched(msgspec.Struct, frozen=True, tag="dispatched", kw_only=True):
    """An attempt was sent out, to be sampled under ``version`` or newer."""

    group_id: int
    attempt: int
    version: int


class SampledTurn(msgspec.Struct, frozen=True, array_like=True):
    """A rollout has sampled turn number ``turn``, of ``tokens`` tokens."""

    group_id: int
    attempt: int
    row: int
    turn: int
    tokens: int


class TurnsAppended(msgspec.Struct, frozen=True, tag="turns_appended", kw_only=True):
    """Running rollouts have sampled these turns, in order per row.

    ``digest`` is that of the recorded turns (which may include others), 0 where none were recorded.
    """

    turns: tuple[SampledTurn, ...]
    digest: int = 0


class Completed(msgspec.Struct, frozen=True, tag="completed", kw_only=True):
    """All rollouts of the attempt are finished, with ``tokens``; ``wasted`` more went into rows that were restarted.

    ``digest`` is that of the recorded rows, 0 where none were recorded.
    """

    group_id: int
    attempt: int
    tokens: int
    wasted: int = 0
    digest: int = 0


class AttemptLost(msgspec.Struct, frozen=True, tag="attempt_lost", kw_only=True):
    """The recorded rows of a completed group cannot be read; it must be dispatched again, after ``attempt``."""

    group_id: int
    attempt: int


class Rewarded(msgspec.Struct, frozen=True, tag="rewarded", kw_only=True):
    """A reward model has scored the rows; without this event the environment's rewards count."""

    group_id: int
    rewards: tuple[float, ...]


class Consumed(msgspec.Struct, frozen=True, tag="consumed", kw_only=True):
    """A training step used the group for the first time, at ``position`` of its batch."""

    group_id: int
    step: int
    position: int


class Reused(msgspec.Struct, frozen=True, tag="reused", kw_only=True):
    group_id: int
    step: int
    position: int


class Dropped(msgspec.Struct, frozen=True, tag="dropped", kw_only=True):
    """The group will not be trained on, by a decision (``stale``, ``zero_variance``, ...)."""

    group_id: int
    reason: str
    tokens: int


class GroupFailed(msgspec.Struct, frozen=True, tag="group_failed", kw_only=True):
    """The group will not be trained on, because every attempt failed (``environment_failed``, ``rollouts_lost``)."""

    group_id: int
    failure: str
    tokens: int


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    step: int


class Resumed(msgspec.Struct, frozen=True, tag="resumed"):
    """The run resumed from the checkpoint of ``step``; what later steps consumed is completed again."""

    step: int


class Rebased(msgspec.Struct, frozen=True, tag="rebased", kw_only=True):
    """The first event of a ledger that replaces one that no longer has what a checkpoint relies on.

    The groups in ``live`` are issued next, under their old numbers; the others below ``next_group_id`` have ended.
    """

    step: int
    next_group_id: int
    consumed: int
    dropped: int
    live: tuple[int, ...]
    dropped_tokens: dict[str, int] = {}


class RunStarted(msgspec.Struct, frozen=True, tag="run_started", kw_only=True):
    """A process trains from ``step`` on (0 for a new run). With the rows, this determines its updates.

    Attributes:
        config: the resolved configuration, as TOML.
        model: folder or hub id that the policy was built from, relative to the run's folder if it is inside.
        weights: fingerprint of the weights that it starts from (:mod:`asyncrl.weights`).
    """

    step: int
    config: str
    model: str
    weights: str


class Published(msgspec.Struct, frozen=True, tag="published", kw_only=True):
    """A step has produced the weights of ``version``, with this fingerprint."""

    version: int
    weights: str


LedgerEvent: TypeAlias = (
    Issued
    | Dispatched
    | TurnsAppended
    | Completed
    | AttemptLost
    | Rewarded
    | Consumed
    | Reused
    | Dropped
    | GroupFailed
    | Committed
    | Resumed
    | Rebased
    | RunStarted
    | Published
)


# ---------------------------------------------------------------------------------------------------------- records


class LedgerPosition(msgspec.Struct, frozen=True, kw_only=True):
    """A place in a ledger: how many events come before it, and the checksum over all of them."""

    sequence: int = 0
    checksum: int = 0


class LedgerBase(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint stores about groups: enough to resume from if the ledger is lost.

    Attributes:
        step: training steps done.
        next_group_id: number of the first group that was not issued.
        consumed: groups trained on.
        outstanding: groups issued, neither trained on nor dropped.
        dropped_tokens: tokens of groups that were not trained on, by reason.
        position: the ledger's end when the checkpoint was made.
        same_updates: whether the run goes on with the updates of before, which make the same weights of the same rows.
    """

    step: int
    next_group_id: int
    consumed: int
    outstanding: tuple[int, ...]
    dropped_tokens: dict[str, int] = {}
    position: LedgerPosition = LedgerPosition()
    same_updates: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerStatistics:
    """Counts in groups. Always ``issued = consumed + dropped + failed + live``.

    Attributes:
        waiting, dispatched, completed: issued but not running; running; rolled out but not trained on.
        reused: how often groups were trained on again.
        superseded: late and duplicate events that this process has ignored.
        processes: processes that have written this ledger.
        committed_step: step of the newest checkpoint.
    """

    issued: int
    consumed: int
    dropped: Mapping[str, int]
    failed: Mapping[str, int]
    waiting: int
    dispatched: int
    completed: int
    reused: int
    superseded: int
    processes: int
    committed_step: int

    @property
    def live(self) -> int:
        return self.waiting + self.dispatched + self.completed

    @property
    def unaccounted(self) -> int:
        """Return how many groups were lost (or, below 0, counted twice): always 0."""
        return self.issued - self.consumed - sum(self.dropped.values()) - sum(self.failed.values()) - self.live


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedGroup:
    """A group that was rolled out already, with its trajectory columns (:mod:`asyncrl.interfaces`).

    ``summary`` has a reward model's rewards if the group was ``rewarded``. ``uses`` are steps up to the checkpoint that
    trained on it.
    """

    summary: GroupSummary
    rows: DataProto
    rewarded: bool
    uses: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTurns:
    """Turns of a group that was running, with ``tokens`` sampled in them.

    ``content`` has for each row the chain that counts, encoded by :func:`asyncrl.rollout.turns.encode_turns`.
    """

    content: bytes
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """The state from which a resumed run continues.

    Attributes:
        next_group_id: number of the first group that was not issued.
        waiting: groups to dispatch again, in order, with the number of their next attempt.
        batches: by step after the checkpoint, the groups that it consumed, in order, to be consumed again as they were.
        groups: by group_id, every completed group, and those of ``batches`` that were used before; the run that goes on
            with them empties it.
        dropped_tokens: tokens of groups that were not trained on so far, by reason.
        turns: by group_id, what rows of ``waiting`` groups have sampled already.
        tasks: by group_id, the number of the task of a group, where that is another.
        notes: damage that was found, and how it was handled, in words; usually empty.
    """

    next_group_id: int
    waiting: Mapping[int, int]
    batches: Mapping[int, tuple[int, ...]]
    groups: dict[int, RecordedGroup]
    dropped_tokens: Mapping[str, int]
    turns: Mapping[int, RecordedTurns] = field(default_factory=dict)
    tasks: Mapping[int, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


# -------------------------------------------------------------------------------------------------------- contracts


class Ledger(Protocol):
    """Records every group on disk, with the rows sampled for it.

    ``append`` decides at once whether an event is legal and never waits; events become durable in the order in which
    they were appended. Once the file cannot be written, every call raises :class:`LedgerError`.

    >>> from asyncrl.plugins import load_part
    >>> ledger = load_part("asyncrl.ledgers", "sqlite")(folder / "ledger.sqlite", threaded=False)
    >>> ledger.append(Issued(0), Dispatched(group_id=0, attempt=0, version=1))
    True
    >>> ledger.append(Completed(group_id=0, attempt=0, tokens=2))
    True
    >>> ledger.append(Completed(group_id=0, attempt=0, tokens=2))  # a duplicate: it must not be used
    False
    >>> ledger.attempt(0), ledger.statistics().completed, ledger.statistics().superseded
    (0, 1, 1)
    >>> asyncio.run(ledger.aclose())
    """

    @classmethod
    def archive(cls, path: Path) -> LedgerArchive:
        """Open a ledger's file read-only, which its run may still be writing. Blocks.

        Raises:
            LedgerError: there is no ledger of this kind.
        """
        ...

    @property
    def recovered(self) -> Recovered | None:
        """Return what a resumed ledger has found; None for a new one."""
        ...

    def append(self, event: LedgerEvent, *more: LedgerEvent, rows: bytes | None = None) -> bool:
        """Record ``event``, and ``more`` in the same transaction.

        ``rows`` are those of a completed group (:func:`asyncrl.rollout.trajectory.encode_rows`), or turns
        (:func:`asyncrl.rollout.turns.encode_turns`). The event's ``digest`` is filled in from them.

        Returns:
            False if an event was late or a duplicate (of turns: all of them), so its result must not be used.

        Raises:
            InvalidDataError: the event is not legal in the group's state, or has no rows to record.
        """
        ...

    async def room(self) -> None:
        """Wait while the queue of unwritten events is full."""

    async def durable(self) -> LedgerPosition:
        """Wait until everything appended so far is on disk; return the position of its end."""
        ...

    def copy(self, path: Path) -> None:
        """Write what is on disk now to a file of its own, from which a run can be resumed; or raise OSError. Blocks."""
        ...

    def attempt(self, group_id: int) -> int:
        """Return the number of the newest attempt at a live group; -1 before the first."""
        ...

    def query(
        self, where: str = "", parameters: Mapping[str, Any] | None = None, *, limit: int | None = None
    ) -> DataProto:
        """Return recorded trajectories on disk that satisfy an SQL condition, in the order of group and row. Blocks.

        ``where`` is a condition on rows with ``:name`` for ``parameters``, empty for all; ``limit`` counts rows. The
        result has the trajectory columns of :mod:`asyncrl.interfaces`; ``attempt``, ``step`` (that trained on it, or
        -1) and ``position`` [B] int64; ``state`` (str).

        Raises:
            LedgerError: the condition is not valid SQL.
        """
        ...

    def statistics(self) -> LedgerStatistics: ...

    async def aclose(self) -> None:
        """Write what is queued and close the file. Idempotent."""


class LedgerArchive(Protocol):
    """A ledger that is only read: what its run was trained on, and by which processes."""

    @property
    def problems(self) -> Sequence[str]:
        """Return the damage that was found, in words. The events before it can be trusted."""
        ...

    @property
    def first_step(self) -> int:
        """Return the step after which the ledger begins; 0 unless an earlier ledger was lost."""
        ...

    @property
    def batches(self) -> Mapping[int, Sequence[int]]:
        """Return the groups that each step trained on, in order, without what a resumption has undone."""
        ...

    @property
    def processes(self) -> Sequence[RunStarted]:
        """Return the processes that trained; each made the steps from its own to that of the next."""
        ...

    @property
    def weights(self) -> Mapping[int, str]:
        """Return the fingerprints, by version, of weights that were published or that a process started from."""
        ...

    def group(self, group_id: int) -> RecordedGroup | None:
        """Return the rows of a completed group; None if they were not recorded or are damaged. Blocks."""
        ...

    def missing_rows(self) -> Sequence[int]:
        """Return the groups that a step trained on and whose rows are absent. Damaged rows count as present. Blocks."""
        ...

    def query(
        self, where: str = "", parameters: Mapping[str, Any] | None = None, *, limit: int | None = None
    ) -> DataProto:
        """As :meth:`Ledger.query`."""
        ...

    def close(self) -> None:
        """Close the file. Idempotent."""
