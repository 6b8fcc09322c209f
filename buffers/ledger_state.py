"""The life of a prompt from issue to use: a pure state machine over events, without a file, a clock or a wait.

                                  .------------- failed, aborted, resumed ------------.
                                  v                                                   |
    issued(slot) --------------> ISSUED --dispatched(attempt, replica, version)--> DISPATCHED --turns(row, tokens)-.
                                  |                                                   |      ^                     |
                                  |                                                   |      '---------------------'
                                  |                                              completed(attempt)
                                  |                                                   v
                                  |               .------- resumed ------------> COMPLETED --rewarded(rewards)--.
                                  |               |                                |  ^  '----------------------'
                                  |           CONSUMED <---consumed(step, position)'  |
                                  |               |                                   |
                                  |               '-- committed(step): a checkpoint knows it
                                  '------------------------------+--------------------'
                                                                 |
                                         dropped(reason): DROPPED, or given_up(kind): FAILED, for good

ISSUED, DISPATCHED and COMPLETED prompts are *live*. Laws, held after every event and after every recovery:

1. ``issued = consumed + dropped + failed + live``: no prompt is lost, none counted twice.
2. Each dispatch of a prompt has a higher attempt number than the one before. A turn or a result is known by prompt, row
   and attempt; one that comes late, from an attempt that was given up, or twice, changes nothing (:meth:`apply` says
   False). So a prompt is completed by one attempt, however many were sent out.
3. A prompt is consumed by one step. Being trained on again, where a buffer allows it, is another event
   (:class:`Reused`), which counts uses and no prompts.
4. ``resumed(step)`` undoes what no checkpoint of ``step`` or before knows: prompts consumed later are COMPLETED
   again, since their rows are recorded, and those under way are ISSUED again. What was dropped or failed stays so.
   Replaying all events, ``resumed`` among them, gives the same state as having lived through them.

An event that the picture does not have raises :class:`InvalidDataError` and changes nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from asyncrl.errors import InvalidDataError
from asyncrl.ledger import (
    Aborted,
    AttemptFailed,
    Began,
    Committed,
    Completed,
    Consumed,
    Dispatched,
    Dropped,
    GivenUp,
    Issued,
    LedgerEvent,
    LedgerStatistics,
    Lost,
    Published,
    Rebased,
    Resumed,
    Reused,
    Rewarded,
    SampledTurn,
    TurnsAppended,
)
from buffers.slots import SlotRanges

__all__ = ["LedgerState", "PromptState"]


class PromptState(Enum):
    """Where a live prompt is in its life."""

    ISSUED = "issued"
    DISPATCHED = "dispatched"
    COMPLETED = "completed"


@dataclass(slots=True)
class _Prompt:
    state: PromptState = PromptState.ISSUED
    attempt: int = -1
    rewarded: bool = False
    turns: dict[int, int] = field(default_factory=dict)


class LedgerState:
    """Counts and live prompts. Memory grows with live prompts, and by eight bytes for each one consumed."""

    def __init__(self) -> None:
        self._live: dict[int, _Prompt] = {}
        self._known = SlotRanges()
        self._consumed = SlotRanges()
        self._batches: dict[int, array[int]] = {}
        self._uses: dict[int, array[int]] = {}
        self._dropped: dict[str, int] = {}
        self._failed: dict[str, int] = {}
        self._issued = self._consumed_count = self._reused = self._superseded = 0
        self._lives = 1
        self._committed_step = self._base_step = 0
        self._next_slot = 0

    @property
    def next_slot(self) -> int:
        """Lowest number above every prompt ever issued."""
        return self._next_slot

    @property
    def committed_step(self) -> int:
        """Step of the last checkpoint, in this life; 0 before the first."""
        return self._committed_step

    @property
    def last_step(self) -> int:
        """Newest step that consumed prompts; 0 before the first."""
        return max(self._batches, default=0)

    def live(self) -> dict[int, PromptState]:
        """Live prompts and where they are, in slot order."""
        return {slot: self._live[slot].state for slot in sorted(self._live)}

    def attempt(self, slot: int) -> int:
        """Number of the newest attempt at a live prompt; -1 before the first."""
        return self._prompt(slot, "has no attempts").attempt

    def batch(self, step: int) -> tuple[int, ...]:
        """Prompts that ``step`` consumed for the first time, in batch order."""
        return tuple(self._batches.get(step, ()))

    def statistics(self) -> LedgerStatistics:
        """Counts in prompts."""
        states = [prompt.state for prompt in self._live.values()]
        return LedgerStatistics(
            issued=self._issued,
            consumed=self._consumed_count,
            dropped=dict(sorted(self._dropped.items())),
            failed=dict(sorted(self._failed.items())),
            waiting=states.count(PromptState.ISSUED),
            dispatched=states.count(PromptState.DISPATCHED),
            completed=states.count(PromptState.COMPLETED),
            reused=self._reused,
            superseded=self._superseded,
            lives=self._lives,
            committed_step=self._committed_step,
        )

    def apply(self, event: LedgerEvent) -> bool:
        """Let ``event`` happen. False if it came late or twice, and changed nothing but that count.

        Raises:
            InvalidDataError: the picture above does not have it.
        """
        match event:
            case Issued():
                return self._issue(event.slot)
            case Dispatched():
                return self._dispatch(event)
            case TurnsAppended():
                return self._append_turns(event)
            case Completed() | AttemptFailed() | Aborted():
                return self._end_attempt(event)
            case Rewarded():
                return self._reward(event)
            case Consumed():
                return self._consume(event)
            case Reused():
                return self._reuse(event)
            case Dropped():
                return self._settle(event.slot, self._dropped, event.reason, "a reason")
            case GivenUp():
                return self._settle(event.slot, self._failed, event.failure, "a kind of failure")
            case Committed():
                return self._commit(event.step)
            case Resumed():
                return self._resume(event.step)
            case Lost():
                return self._lose(event)
            case Rebased():
                return self._rebase(event)
            case Began() | Published():  # of weights, not of prompts: for whoever replays
                return True

    def replay(self, events: Iterable[LedgerEvent]) -> LedgerState:
        """Apply recorded events in order; returns this state."""
        for event in events:
            self.apply(event)
        return self

    # ------------------------------------------------------------------------------------------------- to completion

    def _issue(self, slot: int) -> bool:
        if slot < 0 or slot in self._known:
            raise InvalidDataError(f"prompt {slot} was issued before; a prompt is issued once")
        self._known.add(slot)
        self._live[slot] = _Prompt()
        self._issued += 1
        self._next_slot = max(self._next_slot, slot + 1)
        return True

    def _dispatch(self, event: Dispatched) -> bool:
        prompt = self._prompt(event.slot, "cannot be dispatched")
        if prompt.state is PromptState.COMPLETED:
            raise InvalidDataError(f"prompt {event.slot} cannot be dispatched: it is completed")
        if event.attempt <= prompt.attempt:
            raise InvalidDataError(
                f"prompt {event.slot} cannot be dispatched as attempt {event.attempt}: attempt {prompt.attempt} was "
                "before it; attempts grow"
            )
        prompt.state, prompt.attempt = PromptState.DISPATCHED, event.attempt
        prompt.turns.clear()
        return True

    def in_time(self, event: TurnsAppended) -> TurnsAppended:
        """The same without turns that come late or twice.

        Raises:
            InvalidDataError: one comes before another that it follows.
        """
        counted: list[SampledTurn] = []
        expected: dict[tuple[int, int], int] = {}
        for told in event.turns:
            prompt = self._of_attempt(told.slot, told.attempt)
            if prompt is None:
                continue
            place = (told.slot, told.row)
            if place not in expected:
                expected[place] = prompt.turns.get(told.row, 0)
            if told.turn > expected[place]:
                raise InvalidDataError(
                    f"turn {told.turn} of prompt {told.slot}, row {told.row} came before turn {expected[place]}; turns "
                    "come in order"
                )
            if told.turn == expected[place]:
                expected[place] += 1
                counted.append(told)
        return TurnsAppended(turns=tuple(counted), digest=event.digest)

    def _append_turns(self, event: TurnsAppended) -> bool:
        counted = self.in_time(event).turns
        self._superseded += len(event.turns) - len(counted)
        for told in counted:
            self._live[told.slot].turns[told.row] = told.turn + 1
        return bool(counted)

    def _end_attempt(self, event: Completed | AttemptFailed | Aborted) -> bool:
        prompt = self._of_attempt(event.slot, event.attempt)
        if prompt is None:
            return self._supersede()
        prompt.turns.clear()
        prompt.state = PromptState.COMPLETED if isinstance(event, Completed) else PromptState.ISSUED
        prompt.rewarded = False
        return True

    def _of_attempt(self, slot: int, attempt: int) -> _Prompt | None:
        """The prompt, if ``attempt`` is the one it waits for; None if that one is over."""
        if slot not in self._known:
            raise InvalidDataError(f"prompt {slot} was never issued")
        prompt = self._live.get(slot)
        if prompt is None or prompt.state is PromptState.COMPLETED:
            return None
        if attempt > prompt.attempt:
            raise InvalidDataError(
                f"attempt {attempt} at prompt {slot} was never dispatched; the newest is {prompt.attempt}"
            )
        return prompt if attempt == prompt.attempt and prompt.state is PromptState.DISPATCHED else None

    def _supersede(self) -> bool:
        self._superseded += 1
        return False

    def _reward(self, event: Rewarded) -> bool:
        prompt = self._prompt(event.slot, "cannot be rewarded")
        if prompt.state is not PromptState.COMPLETED or not event.rewards:
            raise InvalidDataError(
                f"prompt {event.slot} cannot be rewarded with {len(event.rewards)} rewards: it is {prompt.state.value}"
            )
        if prompt.rewarded:
            return self._supersede()
        prompt.rewarded = True
        return True

    # --------------------------------------------------------------------------------------------------- to its end

    def _consume(self, event: Consumed) -> bool:
        prompt = self._prompt(event.slot, "cannot be consumed")
        if prompt.state is not PromptState.COMPLETED:
            raise InvalidDataError(f"prompt {event.slot} cannot be consumed: it is {prompt.state.value}")
        if event.step <= self._committed_step:
            raise InvalidDataError(
                f"prompt {event.slot} cannot be consumed by step {event.step}: a checkpoint of step "
                f"{self._committed_step} is behind it"
            )
        del self._live[event.slot]
        self._batches.setdefault(event.step, array("q")).append(event.slot)
        self._consumed.add(event.slot)
        self._consumed_count += 1
        return True

    def _reuse(self, event: Reused) -> bool:
        if event.slot not in self._consumed:
            raise InvalidDataError(f"prompt {event.slot} cannot be trained on again: it was not consumed yet")
        self._uses.setdefault(event.step, array("q")).append(event.slot)
        self._reused += 1
        return True

    def _settle(self, slot: int, counts: dict[str, int], why: str, what: str) -> bool:
        if not why:
            raise InvalidDataError(f"prompt {slot} cannot end without {what}")
        self._prompt(slot, f"cannot end ({why})")
        del self._live[slot]
        counts[why] = counts.get(why, 0) + 1
        return True

    def _commit(self, step: int) -> bool:
        if step < self._committed_step:
            raise InvalidDataError(f"a checkpoint of step {step} came after one of step {self._committed_step}")
        self._committed_step = step
        return True

    def _resume(self, step: int) -> bool:
        if step < self._base_step:
            raise InvalidDataError(f"a run cannot go on from step {step}: this ledger begins at step {self._base_step}")
        for later in [each for each in self._batches if each > step]:
            for slot in self._batches.pop(later):
                self._consumed.remove(slot)
                self._consumed_count -= 1
                # Its attempt number is not kept; any result that still comes for it is superseded.
                self._live[slot] = _Prompt(state=PromptState.COMPLETED)
        for later in [each for each in self._uses if each > step]:
            self._reused -= len(self._uses.pop(later))
        for prompt in self._live.values():
            if prompt.state is PromptState.DISPATCHED:
                prompt.state = PromptState.ISSUED
                prompt.turns.clear()
        self._committed_step = step
        self._lives += 1
        return True

    def _lose(self, event: Lost) -> bool:
        prompt = self._prompt(event.slot, "has no rows to lose")
        if prompt.state is not PromptState.COMPLETED:
            raise InvalidDataError(f"prompt {event.slot} has no rows to lose: it is {prompt.state.value}")
        self._live[event.slot] = _Prompt(attempt=event.attempt)
        return True

    def _rebase(self, event: Rebased) -> bool:
        if self._issued:
            raise InvalidDataError("a ledger is rebased before anything else, not in its midst")
        if event.consumed + event.dropped + len(event.live) != event.next_slot:
            raise InvalidDataError(
                f"{event.next_slot} prompts cannot be {event.consumed} consumed, {event.dropped} dropped and "
                f"{len(event.live)} live"
            )
        # Those that live are issued next, under their numbers.
        alive = set(event.live)
        for slot in range(event.next_slot):
            if slot not in alive:
                self._known.add(slot)
        self._issued = event.next_slot - len(alive)
        self._next_slot = event.next_slot
        self._consumed_count = event.consumed
        if event.dropped:
            self._dropped["before"] = event.dropped
        self._committed_step = self._base_step = event.step
        return True

    def uses(self, step: int) -> tuple[int, ...]:
        """Prompts that ``step`` trained on again."""
        return tuple(self._uses.get(step, ()))

    def _prompt(self, slot: int, what: str) -> _Prompt:
        prompt = self._live.get(slot)
        if prompt is None:
            past = "it was consumed, dropped or given up" if slot in self._known else "it was never issued"
            raise InvalidDataError(f"prompt {slot} {what}: {past}")
        return prompt
