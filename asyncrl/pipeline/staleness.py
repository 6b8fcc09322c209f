"""How far generation may run ahead of training: the admission law, and the certificate of a batch.

Words: a *slot* is the number of a group in issue order; version ``v`` of the weights is what training has after ``v``
steps; a slot is *live* unless it was dropped; ``rank(i)`` is the number of live slots below slot ``i``. Each step
trains on the next ``groups_per_step`` live slots in slot order, so slot ``i`` is trained on by the step at version
``rank(i) // groups_per_step``.

The law::

    slot i may be issued  iff  rank(i) // groups_per_step - version <= max_staleness

where ``version`` is the newest one that *every serving engine* holds.

The bound. Let slot ``i`` be issued at version ``u`` with rank ``r``. Slots are issued in growing order, so no live slot
below ``i`` appears later: drops can only lower the rank, and the step that trains on ``i`` runs at a version
``w <= r // groups_per_step``. Engines never go back, so each of its tokens is sampled under a version ``>= u``. Its
staleness is at most ``w - u <= r // groups_per_step - u <= max_staleness``. This holds for every token of every group,
however long it takes, whatever is dropped, and across weight updates in the middle of a generation. Nothing has to be
thrown away for it: a slow group is waited for, so training is not biased towards short answers.

``max_staleness = 0`` is the synchronous loop: slots of step ``k`` are issued at version ``k``, when step ``k - 1`` is
over. ``max_staleness = 1`` is one-step-off: slots of step ``k`` are issued at version ``k - 1``, while step ``k - 1``
trains.

No deadlock. Suppose training waits for step ``k`` (so ``version == k``) because fewer than ``(k + 1) *
groups_per_step`` live slots exist. Then the next rank is below that, ``rank // groups_per_step <= k``, and the law lets
it be issued. A slot that fails must be reported by :meth:`AdmissionLaw.dropped`; its place is taken by the next one.

Nothing left over. At most ``total_groups`` live slots ever exist, which is what the steps of the run consume; and at
most ``groups_per_step * (max_staleness + 1)`` of them are alive and not yet trained on (:attr:`AdmissionLaw.window`),
which is the capacity a buffer needs.

With a selection that does not follow slot order, counts, window and progress hold as said; the bound on staleness is
then the buffer's, which drops what is too old (report those drops here too).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from asyncrl.errors import InvalidDataError, WeightVersionError
from asyncrl.interfaces import GroupSummary

__all__ = ["AdmissionLaw", "Certificate", "certify", "merge"]


class AdmissionLaw:
    """Says when the next group may be issued. Pure: events in, answers out; the law and its proof are above.

    Args:
        groups_per_step: groups each training step consumes.
        max_staleness: bound on trainer version minus sampling version, in versions.
        total_groups: groups the steps from ``first_version`` on consume together; None for a run without an end.
        first_version: version the run begins, or resumes, with.
        first_slot: number of the first new slot.
        held: slots of an earlier run that wait to be trained on, with rows sampled under versions up to
            ``first_version``.
        again: slots of an earlier run whose rows are lost; they are issued again, under their numbers, before new ones.

    >>> law = AdmissionLaw(2, max_staleness=1, total_groups=6)
    >>> [law.issue() for _ in range(4)], law.may_issue()
    ([0, 1, 2, 3], False)
    >>> law.explain()
    'slot 4 waits for version 1: it is for the step at version 2, 2 ahead of version 0; the bound is 1'
    >>> law.published(1)
    >>> law.issue()
    4
    """

    def __init__(
        self,
        groups_per_step: int,
        *,
        max_staleness: int,
        total_groups: int | None = None,
        first_version: int = 0,
        first_slot: int = 0,
        held: Iterable[int] = (),
        again: Iterable[int] = (),
    ) -> None:
        if groups_per_step < 1:
            raise ValueError(f"groups_per_step must be at least 1, got {groups_per_step}")
        if max_staleness < 0:
            raise ValueError(f"max_staleness must be 0 (synchronous) or more, got {max_staleness}")
        if total_groups is not None and total_groups % groups_per_step:
            raise ValueError(
                f"total_groups must be a multiple of groups_per_step, got {total_groups} and {groups_per_step}"
            )
        if first_version < 0 or first_slot < 0:
            raise ValueError(f"versions and slots begin at 0, got {first_version=}, {first_slot=}")
        again_slots = sorted(again)
        outstanding = sorted([*held, *again_slots])
        if len(set(outstanding)) != len(outstanding):
            raise ValueError("a slot is named twice in held and again")
        if outstanding and not 0 <= outstanding[0] <= outstanding[-1] < first_slot:
            raise ValueError(f"held and again must lie in 0..{first_slot - 1}, got {outstanding}")
        if total_groups is not None and len(outstanding) > total_groups:
            raise ValueError(f"{len(outstanding)} groups are outstanding, more than total_groups={total_groups}")
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self.total_groups = total_groups
        self.first_version = first_version
        self._version = first_version
        self._first_slot = first_slot
        self._next_slot = first_slot
        self._outstanding = outstanding
        self._again = deque(again_slots)
        self._issued = 0
        self._dropped: set[int] = set()
        self._dropped_outstanding: list[int] = []

    @property
    def version(self) -> int:
        """Newest version that every serving engine holds."""
        return self._version

    @property
    def issued(self) -> int:
        """How often :meth:`issue` gave out a slot; those dropped later count."""
        return self._issued

    @property
    def next_slot(self) -> int:
        """Lowest slot that was never issued, by this run or the one it goes on from."""
        return self._next_slot

    @property
    def live(self) -> int:
        """Groups trained on since ``first_version``, or still to be: outstanding and new ones, without the dropped."""
        return len(self._outstanding) + self._next_slot - self._first_slot - len(self._dropped)

    @property
    def window(self) -> int:
        """Most groups that are ever alive and not yet trained on: the capacity a buffer needs."""
        return self.groups_per_step * (self.max_staleness + 1)

    @property
    def finished(self) -> bool:
        """True while every group that the run needs is issued; a drop makes it False again."""
        return not self._again and self.total_groups is not None and self.live >= self.total_groups

    def may_issue(self) -> bool:
        """True if the next group may be issued now."""
        return not self.finished and self._version_of_next() - self._version <= self.max_staleness

    def issue(self) -> int:
        """The next slot, now issued.

        Raises:
            InvalidDataError: the law does not allow it; the message is :meth:`explain`'s.
        """
        if not self.may_issue():
            raise InvalidDataError(f"no group may be issued: {self.explain()}")
        self._issued += 1
        if self._again:
            return self._again.popleft()
        self._next_slot += 1
        return self._next_slot - 1

    def published(self, version: int) -> None:
        """Every engine that serves holds ``version`` now (steps may be skipped, versions never go back).

        Raises:
            WeightVersionError: ``version`` is older than the one held.
        """
        if version < self._version:
            raise WeightVersionError(f"weight versions only grow: {version} was published after {self._version}")
        self._version = version

    def dropped(self, slot: int) -> None:
        """The group was not and will not be trained on. A later slot takes its place.

        Raises:
            InvalidDataError: the slot was never issued, or was dropped before.
        """
        outstanding = self._is_outstanding(slot)
        if not outstanding and not self._first_slot <= slot < self._next_slot:
            raise InvalidDataError(f"slot {slot} was dropped but never issued (next: {self._next_slot})")
        if slot in self._dropped:
            raise InvalidDataError(f"slot {slot} was dropped twice; its place must be given away only once")
        self._dropped.add(slot)
        if outstanding:
            insort(self._dropped_outstanding, slot)
            if slot in self._again:
                self._again.remove(slot)

    def explain(self) -> str:
        """Whether the next group may be issued, and if not, what it waits for."""
        if self.finished:
            return f"all {self.total_groups} groups of the run are issued"
        slot = self._again[0] if self._again else self._next_slot
        if self.may_issue():
            return f"slot {slot} may be issued"
        step = self._version_of_next()
        return (
            f"slot {slot} waits for version {step - self.max_staleness}: it is for the step at version {step}, "
            f"{step - self._version} ahead of version {self._version}; the bound is {self.max_staleness}"
        )

    def _is_outstanding(self, slot: int) -> bool:
        index = bisect_left(self._outstanding, slot)
        return index < len(self._outstanding) and self._outstanding[index] == slot

    def _version_of_next(self) -> int:
        """Version of the step that will train on the next slot, if nothing before it is dropped."""
        if self._again:
            slot = self._again[0]
            rank = bisect_left(self._outstanding, slot) - bisect_left(self._dropped_outstanding, slot)
        else:
            rank = self.live
        return self.first_version + rank // self.groups_per_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What a batch (or many, merged) was trained on, and what was thrown away on the way.

    Attributes:
        first_version: lowest trainer version among the batches.
        last_version: highest one.
        groups: groups trained on.
        rows: rows trained on.
        tokens: tokens the policy sampled for those rows.
        histogram: tokens by staleness (trainer version minus sampling version), in growing order.
        dropped_rows: rows issued but not trained on.
        dropped_tokens: tokens sampled for those; an unfinished row counts as far as it came.
    """

    first_version: int
    last_version: int
    groups: int
    rows: int
    tokens: int
    histogram: Mapping[int, int]
    dropped_rows: int = 0
    dropped_tokens: int = 0

    @property
    def maximum(self) -> int:
        """Staleness of the oldest token; 0 without tokens."""
        return max(self.histogram, default=0)

    @property
    def mean(self) -> float:
        """Mean staleness of a token; 0 without tokens."""
        total = sum(staleness * tokens for staleness, tokens in self.histogram.items())
        return total / self.tokens if self.tokens else 0.0

    @property
    def mean_length_trained(self) -> float:
        """Sampled tokens per row trained on; 0 without rows."""
        return self.tokens / self.rows if self.rows else 0.0

    @property
    def mean_length_issued(self) -> float:
        """Sampled tokens per row issued, dropped ones included. A lower bound if some were dropped unfinished."""
        rows = self.rows + self.dropped_rows
        return (self.tokens + self.dropped_tokens) / rows if rows else 0.0

    @property
    def length_ratio(self) -> float:
        """Mean length trained over mean length issued: below 1, slow rows were thrown away. 1 without tokens."""
        return self.mean_length_trained / self.mean_length_issued if self.mean_length_issued else 1.0

    @property
    def waste(self) -> float:
        """Share of the sampled tokens that were thrown away, 0..1."""
        total = self.tokens + self.dropped_tokens
        return self.dropped_tokens / total if total else 0.0


def certify(
    summaries: Iterable[GroupSummary], *, trainer_version: int, dropped_rows: int = 0, dropped_tokens: int = 0
) -> Certificate:
    """Certificate of one batch: ``summaries`` are trained on by the step at ``trainer_version``.

    ``dropped_rows`` and ``dropped_tokens`` count what was thrown away since the batch before.

    Raises:
        InvalidDataError: a summary's counts disagree, or it has tokens of a version the trainer has not made yet.
    """
    histogram: dict[int, int] = {}
    groups = rows = tokens = 0
    for summary in summaries:
        if sum(summary.version_tokens.values()) != summary.tokens:
            raise InvalidDataError(
                f"group {summary.slot} has {summary.tokens} tokens, but its versions "
                f"{dict(summary.version_tokens)} count {sum(summary.version_tokens.values())}"
            )
        for version, count in summary.version_tokens.items():
            if not 0 <= version <= trainer_version:
                raise InvalidDataError(
                    f"group {summary.slot} has tokens of version {version}; the trainer is at {trainer_version}"
                )
            if count:
                histogram[trainer_version - version] = histogram.get(trainer_version - version, 0) + count
        groups += 1
        rows += summary.rows
        tokens += summary.tokens
    return Certificate(
        first_version=trainer_version,
        last_version=trainer_version,
        groups=groups,
        rows=rows,
        tokens=tokens,
        histogram=dict(sorted(histogram.items())),
        dropped_rows=dropped_rows,
        dropped_tokens=dropped_tokens,
    )


def merge(certificates: Iterable[Certificate]) -> Certificate:
    """One certificate for all of them.

    Raises:
        ValueError: there is none.
    """
    parts = list(certificates)
    if not parts:
        raise ValueError("merge needs at least one certificate")
    histogram: dict[int, int] = {}
    for part in parts:
        for staleness, tokens in part.histogram.items():
            histogram[staleness] = histogram.get(staleness, 0) + tokens
    return Certificate(
        first_version=min(part.first_version for part in parts),
        last_version=max(part.last_version for part in parts),
        groups=sum(part.groups for part in parts),
        rows=sum(part.rows for part in parts),
        tokens=sum(part.tokens for part in parts),
        histogram=dict(sorted(histogram.items())),
        dropped_rows=sum(part.dropped_rows for part in parts),
        dropped_tokens=sum(part.dropped_tokens for part in parts),
    )
