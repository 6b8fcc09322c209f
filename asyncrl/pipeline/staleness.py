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

That is the policy ``wait``. The others train on groups as they finish, the lowest slot first, so that nobody waits for
the slow ones; then the law bounds how far generation runs ahead, and the bound on staleness is kept where a batch is
trained on (:class:`StalenessPolicy`). Counts and progress hold as said, since the proofs do not ask which live slots a
step takes. A group that has been out for more than ``overdue_after`` versions does not hold its place any longer: it
will be trained on when it comes, and meanwhile another one keeps the trainer busy. At most a window of places is given
away like this, so at most twice the window is ever alive: a generator that is merely overloaded cannot be overloaded
further without end. ``docs/staleness.md`` derives what each policy costs, and measures it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from asyncrl.errors import ConfigError, InvalidDataError, WeightVersionError

__all__ = ["POLICIES", "AdmissionLaw", "StalenessPolicy", "staleness_policy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessPolicy:
    """What becomes of groups that take longer than the bound allows.

        >>> [name for name, policy in POLICIES.items() if policy.selection == "fifo"]  # who waits for slow groups
        ['wait']
        >>> POLICIES["wait"].too_old, POLICIES["wait"].overdue
        ('none', False)

    Attributes:
        name: in configurations.
        selection: order in which the buffer hands groups out, unless the configuration names another.
        too_old: what is done with tokens past the bound when their group is trained on. ``none``: there are none, since
            slow groups are waited for. ``drop``: their whole group is dropped. ``mask``: they are left out of the loss;
            the rewards of their group count for its baseline as ever. ``correct``: they are trained on, with the weight
            that their measured log-probs give them (``algorithm.correction``).
        overdue: whether a group that is out for too long gives its place away.
    """

    name: str
    selection: str
    too_old: Literal["none", "drop", "mask", "correct"]
    overdue: bool

    @property
    def keeps_groups(self) -> bool:
        """True if the buffer must hand out groups that passed the bound: the bound is kept by token, or not at all.

        >>> [name for name, policy in POLICIES.items() if policy.keeps_groups]
        ['mask', 'correct']
        """
        return self.too_old in ("mask", "correct")

    def overdue_after(self, max_staleness: int) -> int | None:
        """Versions after which a group gives its place away: when it is lost, or two whole windows. None: never.

        >>> {name: policy.overdue_after(3) for name, policy in POLICIES.items()}
        {'mask': 8, 'wait': None, 'drop': 3, 'correct': 8}
        """
        if not self.overdue:
            return None
        return max_staleness if self.too_old == "drop" else 2 * (max_staleness + 1)

    def oldest_version(self, trainer_version: int, *, max_staleness: int) -> int | None:
        """Lowest version whose tokens are trained on at ``trainer_version``; None if every token may be.

        >>> mask = POLICIES["mask"]
        >>> [mask.oldest_version(version, max_staleness=2) for version in (1, 2, 3, 4)]
        [0, 0, 1, 2]
        >>> POLICIES["correct"].oldest_version(4, max_staleness=2) is None
        True
        """
        return max(0, trainer_version - max_staleness) if self.too_old == "mask" else None


POLICIES: Mapping[str, StalenessPolicy] = MappingProxyType(
    {
        policy.name: policy
        for policy in (
            StalenessPolicy(name="mask", selection="fifo_ready", too_old="mask", overdue=True),
            StalenessPolicy(name="wait", selection="fifo", too_old="none", overdue=False),
            StalenessPolicy(name="drop", selection="fifo_ready", too_old="drop", overdue=True),
            StalenessPolicy(name="correct", selection="fifo_ready", too_old="correct", overdue=True),
        )
    }
)
"""The policies that a configuration can name."""


def staleness_policy(name: str, *, max_staleness: int) -> StalenessPolicy:
    """The policy called ``name``; ``wait`` for a bound of 0, where a step has nothing to do but wait.

        >>> staleness_policy("mask", max_staleness=4).name, staleness_policy("mask", max_staleness=0).name
        ('mask', 'wait')
        >>> staleness_policy("hope", max_staleness=4)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        asyncrl.errors.ConfigError: ...no staleness policy is called 'hope'...

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in POLICIES:
        raise ConfigError(
            f"no staleness policy is called {name!r}", path="staleness.policy", remedy=f"one of {', '.join(POLICIES)}"
        )
    return POLICIES["wait" if max_staleness == 0 else name]


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
        overdue_after: versions after which a group that is still out gives its place away; None for never.

    >>> law = AdmissionLaw(2, max_staleness=1, total_groups=6)
    >>> [law.issue() for _ in range(4)], law.may_issue()
    ([0, 1, 2, 3], False)
    >>> law.explain()
    'slot 4 waits for version 1: it is for the step at version 2, 2 ahead of version 0; the bound is 1'
    >>> law.published(1)
    >>> law.issue()
    4

    Raises:
        ValueError: a number is out of its range, ``total_groups`` is no whole number of steps or less than what is
            outstanding, or ``held`` and ``again`` are not different slots below ``first_slot``.
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
        overdue_after: int | None = None,
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
        if overdue_after is not None and overdue_after < 1:
            raise ValueError(f"overdue_after must be at least 1 version, got {overdue_after}")
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
        self.overdue_after = overdue_after
        self.first_version = first_version
        self._version = first_version
        self._first_slot = first_slot
        self._next_slot = first_slot
        self._outstanding = outstanding
        self._again = deque(again_slots)
        self._issued = 0
        self._dropped: set[int] = set()
        self._dropped_outstanding: list[int] = []
        self._out: OrderedDict[int, int] = OrderedDict()  # by slot, the version it was issued under, oldest first
        self._overdue: set[int] = set()

    @property
    def version(self) -> int:
        """Newest version that every serving engine holds.

        >>> law = AdmissionLaw(2, max_staleness=1)
        >>> law.published(3)
        >>> law.version
        3
        """
        return self._version

    @property
    def issued(self) -> int:
        """How often :meth:`issue` gave out a slot; those dropped later count.

        >>> law = AdmissionLaw(2, max_staleness=1)
        >>> law.dropped(law.issue())
        >>> law.issued, law.live
        (1, 0)
        """
        return self._issued

    @property
    def next_slot(self) -> int:
        """Lowest slot that was never issued, by this run or the one it goes on from.

        >>> law = AdmissionLaw(2, max_staleness=1, first_version=5, first_slot=10)
        >>> law.issue(), law.next_slot
        (10, 11)
        """
        return self._next_slot

    @property
    def again(self) -> tuple[int, ...]:
        """Slots of an earlier run that are still to be issued again.

        >>> law = AdmissionLaw(2, max_staleness=1, first_version=5, first_slot=13, held=[11], again=[10, 12])
        >>> law.issue(), law.again
        (10, (12,))
        """
        return tuple(self._again)

    @property
    def live(self) -> int:
        """Groups trained on since ``first_version``, or still to be: outstanding and new ones, without the dropped.

        >>> law = AdmissionLaw(2, max_staleness=1, first_version=5, first_slot=12, held=[11])
        >>> law.issue(), law.issue(), law.live
        (12, 13, 3)
        >>> law.dropped(12)
        >>> law.live
        2
        """
        return len(self._outstanding) + self._next_slot - self._first_slot - len(self._dropped)

    @property
    def window(self) -> int:
        """Most groups that are ever alive and not yet trained on: the capacity a buffer needs.

        >>> AdmissionLaw(2, max_staleness=3).window
        8
        >>> AdmissionLaw(2, max_staleness=3, overdue_after=8).window  # a place may be given away once
        16
        """
        return self.lead * (1 if self.overdue_after is None else 2)

    @property
    def lead(self) -> int:
        """Most groups that hold a place at once.

        >>> AdmissionLaw(2, max_staleness=3, overdue_after=8).lead
        8
        """
        return self.groups_per_step * (self.max_staleness + 1)

    @property
    def overdue(self) -> int:
        """Groups that are out and have given their place away.

        >>> law = AdmissionLaw(1, max_staleness=1, overdue_after=2)
        >>> law.issue(), law.issue(), law.may_issue()
        (0, 1, False)
        >>> law.published(3)  # neither has come for three versions
        >>> law.overdue
        2
        """
        return len(self._overdue)

    @property
    def finished(self) -> bool:
        """True while every group that the run needs is issued; a drop makes it False again.

        >>> law = AdmissionLaw(1, max_staleness=1, total_groups=2)
        >>> law.issue(), law.issue(), law.finished
        (0, 1, True)
        >>> law.dropped(1)
        >>> law.finished, law.issue()
        (False, 2)
        """
        return not self._again and self.total_groups is not None and self.live >= self.total_groups

    def may_issue(self) -> bool:
        """True if the next group may be issued now.

        >>> law = AdmissionLaw(2, max_staleness=0)  # the synchronous loop
        >>> law.issue(), law.issue(), law.may_issue()
        (0, 1, False)
        >>> law.published(1)
        >>> law.may_issue()
        True
        """
        return not self.finished and self._version_of_next() - self._version <= self.max_staleness

    def issue(self) -> int:
        """The next slot, now issued.

            >>> law = AdmissionLaw(1, max_staleness=0, total_groups=1)
            >>> law.issue()
            0
            >>> law.issue()
            Traceback (most recent call last):
            asyncrl.errors.InvalidDataError: no group may be issued: all 1 groups of the run are issued

        Raises:
            InvalidDataError: the law does not allow it; the message is :meth:`explain`'s.
        """
        if not self.may_issue():
            raise InvalidDataError(f"no group may be issued: {self.explain()}")
        self._issued += 1
        if self._again:
            slot = self._again.popleft()
        else:
            slot = self._next_slot
            self._next_slot += 1
        if self.overdue_after is not None:
            self._out[slot] = self._version
        return slot

    def published(self, version: int) -> None:
        """Every engine that serves holds ``version`` now (steps may be skipped, versions never go back).

            >>> law = AdmissionLaw(2, max_staleness=1)
            >>> law.published(3)
            >>> law.published(2)
            Traceback (most recent call last):
            asyncrl.errors.WeightVersionError: weight versions only grow: 2 was published after 3

        Raises:
            WeightVersionError: ``version`` is older than the one held.
        """
        if version < self._version:
            raise WeightVersionError(f"weight versions only grow: {version} was published after {self._version}")
        self._version = version
        while self._out and version - next(iter(self._out.values())) > (self.overdue_after or 0):
            slot, _issued_under = self._out.popitem(last=False)
            self._overdue.add(slot)

    def finished_group(self, slot: int) -> None:
        """The group is rolled out: it lies in the buffer now, and holds a place again if it had given its away.

        >>> law = AdmissionLaw(1, max_staleness=1, overdue_after=2)
        >>> slow = law.issue()
        >>> law.published(3)
        >>> law.overdue
        1
        >>> law.finished_group(slow)
        >>> law.overdue
        0
        """
        self._out.pop(slot, None)
        self._overdue.discard(slot)

    def dropped(self, slot: int) -> None:
        """The group was not and will not be trained on. A later slot takes its place.

            >>> law = AdmissionLaw(2, max_staleness=0)
            >>> law.issue(), law.issue(), law.may_issue()
            (0, 1, False)
            >>> law.dropped(0)
            >>> law.issue()  # now 1 and 2 make the batch
            2

        Raises:
            InvalidDataError: the slot was never issued, or was dropped before.
        """
        outstanding = self._is_outstanding(slot)
        if not outstanding and not self._first_slot <= slot < self._next_slot:
            raise InvalidDataError(f"slot {slot} was dropped but never issued (next: {self._next_slot})")
        if slot in self._dropped:
            raise InvalidDataError(f"slot {slot} was dropped twice; its place must be given away only once")
        self._dropped.add(slot)
        self.finished_group(slot)
        if outstanding:
            insort(self._dropped_outstanding, slot)
            if slot in self._again:
                self._again.remove(slot)

    def explain(self) -> str:
        """Whether the next group may be issued, and if not, what it waits for.

        >>> law = AdmissionLaw(1, max_staleness=0)
        >>> law.explain(), law.issue()
        ('slot 0 may be issued', 0)
        >>> law.explain()
        'slot 1 waits for version 1: it is for the step at version 1, 1 ahead of version 0; the bound is 0'
        """
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
            rank = self.live - min(len(self._overdue), self.lead)
        return self.first_version + rank // self.groups_per_step
