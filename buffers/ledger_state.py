"""The states of a group from issue to use: a pure state machine over events, without a file, a clock or a wait.

                            .------------------ resumed -------------------.
                            v                                              |
    issued(group_id) ---> ISSUED --dispatched(attempt, version)--> DISPATCHED --turns_appended--.
                            ^                                          |   ^                    |
                            |                                          |   '--------------------'
                       attempt_lost                            completed(attempt)
                            |                                          v
                            '-------------------------------------- COMPLETED --rewarded(rewards)--.
                                                                     |  ^  ^                       |
                                           consumed(step, position)--'  |  '-----------------------'
                                                     v                  |
                                                 CONSUMED ---resumed----'   unless committed(step): a checkpoint has it

    from ISSUED, DISPATCHED or COMPLETED, for good:   dropped(reason) ---> DROPPED,   group_failed(failure) ---> FAILED

ISSUED, DISPATCHED and COMPLETED groups are *live*. Laws that hold after every event and after every recovery:

1. ``issued = consumed + dropped + failed + live``: no group is lost, none is counted twice.
2. Each dispatch of a group has a higher attempt number than the one before. A turn or a result is identified by group,
   row and attempt; one that is late, of an attempt that has ended, or a duplicate changes nothing
   (:meth:`LedgerState.apply` returns False). So a group is completed by one attempt, however many were dispatched.
3. A group is consumed by one step. Training on it again, where a buffer allows that, is another event
   (:class:`Reused`), which counts uses and no groups.
4. ``resumed(step)`` undoes what the checkpoint of ``step`` does not have: groups consumed later are COMPLETED again,
   since their rows are recorded, and dispatched ones are ISSUED again. What was dropped or failed stays so. Replaying
   all events, ``resumed`` among them, results in the same state as applying them one by one.

An event that the diagram does not have raises :class:`InvalidDataError` and changes nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from math import isfinite

from asyncrl.errors import InvalidDataError
from asyncrl.ledger import (
    AttemptLost,
    Committed,
    Completed,
    Consumed,
    Dispatched,
    Dropped,
    GroupFailed,
    Issued,
    LedgerEvent,
    LedgerStatistics,
    Published,
    Rebased,
    Resumed,
    Reused,
    Rewarded,
    RunStarted,
    SampledTurn,
    TurnsAppended,
)
from buffers.group_ids import GroupIdSet


class GroupState(Enum):
    ISSUED = "issued"
    DISPATCHED = "dispatched"
    COMPLETED = "completed"


@dataclass(slots=True)
class _LiveGroup:
    state: GroupState = GroupState.ISSUED
    attempt: int = -1
    rewarded: bool = False
    turns: dict[int, int] = field(default_factory=dict)
    """By row, how many turns of the attempt were recorded."""


class LedgerState:
    """Live groups, and counts of the others. Memory grows with live groups, and by ten bytes for each group."""

    def __init__(self) -> None:
        self._live: dict[int, _LiveGroup] = {}
        self._known = GroupIdSet()
        self._consumed = GroupIdSet()
        self._batches: dict[int, array[int]] = {}
        self._uses: dict[int, array[int]] = {}
        self._dropped: dict[str, int] = {}
        self._failed: dict[str, int] = {}
        self._issued = self._consumed_count = self._reused = self._superseded = 0
        self._processes = 1
        self._committed_step = self._base_step = 0
        self.next_group_id = 0
        """Lowest number above every group ever issued."""

    def live(self) -> dict[int, GroupState]:
        """Return the states of the live groups, in group_id order."""
        return {group_id: self._live[group_id].state for group_id in sorted(self._live)}

    def attempt(self, group_id: int) -> int:
        return self._group(group_id, "has no attempts").attempt

    def statistics(self) -> LedgerStatistics:
        states = [group.state for group in self._live.values()]
        return LedgerStatistics(
            issued=self._issued,
            consumed=self._consumed_count,
            dropped=dict(sorted(self._dropped.items())),
            failed=dict(sorted(self._failed.items())),
            waiting=states.count(GroupState.ISSUED),
            dispatched=states.count(GroupState.DISPATCHED),
            completed=states.count(GroupState.COMPLETED),
            reused=self._reused,
            superseded=self._superseded,
            processes=self._processes,
            committed_step=self._committed_step,
        )

    def apply(self, event: LedgerEvent) -> bool:
        """Apply ``event``; return False if it was late or a duplicate, and changed only the count of these.

        Raises:
            InvalidDataError: the diagram above does not have it.
        """
        match event:
            case Issued():
                return self._issue(event.group_id)
            case Dispatched():
                return self._dispatch(event)
            case TurnsAppended():
                return self._append_turns(event)
            case Completed():
                return self._complete(event)
            case AttemptLost():
                return self._lose_attempt(event)
            case Rewarded():
                return self._reward(event)
            case Consumed():
                return self._consume(event)
            case Reused():
                return self._reuse(event)
            case Dropped():
                return self._end(event.group_id, self._dropped, event.reason, "a reason")
            case GroupFailed():
                return self._end(event.group_id, self._failed, event.failure, "a kind of failure")
            case Committed():
                return self._commit(event.step)
            case Resumed():
                return self._resume(event.step)
            case Rebased():
                return self._rebase(event)
            case RunStarted() | Published():  # about weights, not about groups: needed to replay the run
                return True

    def replay(self, events: Iterable[LedgerEvent]) -> LedgerState:
        for event in events:
            self.apply(event)
        return self

    # -------------------------------------------------------------------------------------------- up to completion

    def _issue(self, group_id: int) -> bool:
        if group_id < 0 or group_id in self._known:
            raise InvalidDataError(f"group {group_id} was issued before; a group is issued once")
        self._known.add(group_id)
        self._live[group_id] = _LiveGroup()
        self._issued += 1
        self.next_group_id = max(self.next_group_id, group_id + 1)
        return True

    def _dispatch(self, event: Dispatched) -> bool:
        group = self._group(event.group_id, "cannot be dispatched")
        if group.state is GroupState.COMPLETED:
            raise InvalidDataError(f"group {event.group_id} cannot be dispatched: it is completed")
        if event.attempt <= group.attempt:
            raise InvalidDataError(
                f"group {event.group_id} cannot be dispatched as attempt {event.attempt}: the newest is "
                f"{group.attempt}, and attempt numbers grow"
            )
        group.state, group.attempt = GroupState.DISPATCHED, event.attempt
        group.turns.clear()
        return True

    def without_superseded(self, event: TurnsAppended) -> TurnsAppended:
        """Return the event without turns that are late or duplicates.

        Raises:
            InvalidDataError: a turn comes before the one that it follows.
        """
        counted: list[SampledTurn] = []
        expected: dict[tuple[int, int], int] = {}
        for turn in event.turns:
            group = self._with_attempt(turn.group_id, turn.attempt)
            if group is None:
                continue
            place = (turn.group_id, turn.row)
            following = expected.setdefault(place, group.turns.get(turn.row, 0))
            if turn.turn > following:
                raise InvalidDataError(
                    f"turn {turn.turn} of group {turn.group_id}, row {turn.row} came before turn {following}; "
                    "turns come in order"
                )
            if turn.turn == following:
                expected[place] += 1
                counted.append(turn)
        return TurnsAppended(turns=tuple(counted), digest=event.digest)

    def _append_turns(self, event: TurnsAppended) -> bool:
        counted = self.without_superseded(event).turns
        self._superseded += len(event.turns) - len(counted)
        for turn in counted:
            self._live[turn.group_id].turns[turn.row] = turn.turn + 1
        return bool(counted)

    def _complete(self, event: Completed) -> bool:
        group = self._with_attempt(event.group_id, event.attempt)
        if group is None:
            return self._supersede()
        group.turns.clear()
        group.state = GroupState.COMPLETED
        group.rewarded = False
        return True

    def _with_attempt(self, group_id: int, attempt: int) -> _LiveGroup | None:
        """Return the group, if ``attempt`` is the one it waits for; None if that attempt has ended."""
        if group_id not in self._known:
            raise InvalidDataError(f"group {group_id} was never issued")
        group = self._live.get(group_id)
        if group is None or group.state is GroupState.COMPLETED:
            return None
        if attempt > group.attempt:
            raise InvalidDataError(
                f"attempt {attempt} at group {group_id} was never dispatched; the newest is {group.attempt}"
            )
        return group if attempt == group.attempt and group.state is GroupState.DISPATCHED else None

    def _supersede(self) -> bool:
        self._superseded += 1
        return False

    def _lose_attempt(self, event: AttemptLost) -> bool:
        group = self._group(event.group_id, "has no rows to lose")
        if group.state is not GroupState.COMPLETED:
            raise InvalidDataError(f"group {event.group_id} has no rows to lose: it is {group.state.value}")
        self._live[event.group_id] = _LiveGroup(attempt=event.attempt)
        return True

    def _reward(self, event: Rewarded) -> bool:
        group = self._group(event.group_id, "cannot be rewarded")
        if group.state is not GroupState.COMPLETED or not event.rewards:
            raise InvalidDataError(
                f"group {event.group_id} cannot be rewarded with {len(event.rewards)} rewards: "
                f"it is {group.state.value}"
            )
        if not all(map(isfinite, event.rewards)):  # JSON has no such numbers: the event could not be read again
            raise InvalidDataError(f"group {event.group_id} cannot be rewarded with {event.rewards}: not finite")
        if group.rewarded:
            return self._supersede()
        group.rewarded = True
        return True

    # ---------------------------------------------------------------------------------------------- use and ending

    def _consume(self, event: Consumed) -> bool:
        group = self._group(event.group_id, "cannot be consumed")
        if group.state is not GroupState.COMPLETED:
            raise InvalidDataError(f"group {event.group_id} cannot be consumed: it is {group.state.value}")
        if event.step <= self._committed_step:
            raise InvalidDataError(
                f"group {event.group_id} cannot be consumed by step {event.step}: there is a checkpoint of step "
                f"{self._committed_step} already"
            )
        del self._live[event.group_id]
        self._batches.setdefault(event.step, array("q")).append(event.group_id)
        self._consumed.add(event.group_id)
        self._consumed_count += 1
        return True

    def _reuse(self, event: Reused) -> bool:
        if event.group_id not in self._consumed:
            raise InvalidDataError(f"group {event.group_id} cannot be trained on again: it was not consumed yet")
        self._uses.setdefault(event.step, array("q")).append(event.group_id)
        self._reused += 1
        return True

    def _end(self, group_id: int, counts: dict[str, int], why: str, what: str) -> bool:
        if not why:
            raise InvalidDataError(f"group {group_id} cannot end without {what}")
        self._group(group_id, f"cannot end ({why})")
        del self._live[group_id]
        counts[why] = counts.get(why, 0) + 1
        return True

    def _group(self, group_id: int, what: str) -> _LiveGroup:
        group = self._live.get(group_id)
        if group is None:
            past = "it was consumed, dropped or failed" if group_id in self._known else "it was never issued"
            raise InvalidDataError(f"group {group_id} {what}: {past}")
        return group

    # ---------------------------------------------------------------------------------- checkpoints and resumption

    def _commit(self, step: int) -> bool:
        if step < self._committed_step:
            raise InvalidDataError(f"a checkpoint of step {step} came after one of step {self._committed_step}")
        self._committed_step = step
        return True

    def _resume(self, step: int) -> bool:
        if step < self._base_step:
            raise InvalidDataError(
                f"a run cannot resume from step {step}: this ledger begins at step {self._base_step}"
            )
        for later in [each for each in self._batches if each > step]:
            for group_id in self._batches.pop(later):
                self._consumed.remove(group_id)
                self._consumed_count -= 1
                # Its attempt number is not kept: any result that still arrives for it is superseded.
                self._live[group_id] = _LiveGroup(state=GroupState.COMPLETED)
        for later in [each for each in self._uses if each > step]:
            self._reused -= len(self._uses.pop(later))
        for group in self._live.values():
            if group.state is GroupState.DISPATCHED:
                group.state = GroupState.ISSUED
                group.turns.clear()
        self._committed_step = step
        self._processes += 1
        return True

    def _rebase(self, event: Rebased) -> bool:
        if self._issued:
            raise InvalidDataError("a ledger is rebased by its first event only")
        if event.consumed + event.dropped + len(event.live) != event.next_group_id:
            raise InvalidDataError(
                f"{event.next_group_id} groups cannot be {event.consumed} consumed, {event.dropped} dropped and "
                f"{len(event.live)} live"
            )
        live = set(event.live)  # these are issued next, under their numbers
        for group_id in range(event.next_group_id):
            if group_id not in live:
                self._known.add(group_id)
        self._issued = event.next_group_id - len(live)
        self.next_group_id = event.next_group_id
        self._consumed_count = event.consumed
        if event.dropped:
            self._dropped["before"] = event.dropped
        self._committed_step = self._base_step = event.step
        return True
