"""How far sampling may run ahead of training: the admission law, the policies past its bound, a batch's certificate.

Version ``v`` of the weights is what training has after ``v`` steps. Groups are numbered in the order in which they are
issued; a group is *live* unless it was dropped, and ``rank(i)`` is the number of live groups below group ``i``. Each
step trains on the next ``groups_per_step`` live groups, so group ``i`` is trained on by the step at version
``rank(i) // groups_per_step``.

The law::

    group i may be issued  iff  rank(i) // groups_per_step - version <= max_staleness

where ``version`` is the newest one that *every serving engine* holds.

The bound. Let group ``i`` be issued at version ``u`` with rank ``r``. Groups are issued in growing order, so no live
group below ``i`` appears later: drops can only lower the rank, and the step that trains on ``i`` runs at a version
``w <= r // groups_per_step``. Engines never go back, so each of its tokens is sampled under a version ``>= u``. Its
staleness is at most ``w - u <= r // groups_per_step - u <= max_staleness``. This holds for every token of every group,
however long it takes, whatever is dropped, and across weight updates in the middle of a generation. Nothing has to be
thrown away for it: training waits for a slow group, so it is not biased towards short answers.

``max_staleness = 0`` is the synchronous loop: the groups of step ``k`` are issued at version ``k``, when step ``k - 1``
is over. ``max_staleness = 1`` is one-step-off: the groups of step ``k`` are issued at version ``k - 1``, while step
``k - 1`` trains.

No deadlock. Suppose training waits for step ``k`` (so ``version == k``) because fewer than
``(k + 1) * groups_per_step`` live groups exist. Then the next rank is below that, ``rank // groups_per_step <= k``, and
the law admits the group. A group that fails must be reported by :meth:`AdmissionLaw.dropped`; the next one takes its
place.

Nothing left over. At most ``total_groups`` live groups ever exist, which is what the steps of the run consume; and at
most ``groups_per_step * (max_staleness + 1)`` of them are alive and not yet trained on (:attr:`AdmissionLaw.window`),
which is the capacity a buffer needs.

That is the policy ``wait``. The other policies train on groups as they finish, the lowest id first, so that training
does not wait for slow ones; then the law bounds how far sampling runs ahead, and the bound on staleness is kept where a
batch is trained on (:class:`StalenessPolicy`). The laws of counts and progress hold too, since the proofs do not depend
on which live groups a step takes. A group that has been out for more than ``overdue_after`` versions loses its place:
it is trained on when it is finished, and meanwhile the trainer uses another group. At most a window of places is given
away like this, so at most twice the window is ever alive: the load on the generator is bounded.
``docs/design/staleness.md`` derives what each policy costs, and measures it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Literal

from asyncrl.errors import ConfigError, InvalidDataError, WeightVersionError
from asyncrl.interfaces import GroupSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessPolicy:
    """What happens to groups that take longer than the bound allows.

    Attributes:
        selection: order in which the buffer returns groups, unless the configuration names another.
        too_old: what happens to tokens past the bound when their group is trained on. ``none``: none exist, since
            training waits for slow groups. ``drop``: their whole group is dropped. ``mask``: they are left out of the
            loss; the rewards of their group still count for its baseline. ``correct``: they are trained on, weighted by
            their measured log-probs (``algorithm.correction``).
        overdue: whether a group that has been out for too long gives its place away.
    """

    name: str
    selection: str
    too_old: Literal["none", "drop", "mask", "correct"]
    overdue: bool

    @property
    def keeps_groups(self) -> bool:
        """Return whether the buffer returns groups past the bound: the bound is kept by token, or not at all."""
        return self.too_old in ("mask", "correct")

    def buffer_bound(self, max_staleness: int, *, steps: int) -> int:
        """Return the bound that the buffer holds groups to, in versions.

        Where the bound is kept by token, no group is too stale: none of a run can be older than its ``steps``.
        """
        return steps if self.keeps_groups else max_staleness

    def overdue_after(self, max_staleness: int) -> int | None:
        """Return the versions after which a group gives its place away (when lost, or after two windows), or None."""
        if not self.overdue:
            return None
        return max_staleness if self.too_old == "drop" else 2 * (max_staleness + 1)

    def oldest_version(self, trainer_version: int, *, max_staleness: int) -> int | None:
        """Return the lowest version whose tokens are trained on at ``trainer_version``; None if every token may be."""
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
    """Return the policy called ``name``; with a bound of 0 always ``wait``, since a step can only wait then.

    Raises:
        ConfigError: no policy has that name.
    """
    if name not in POLICIES:
        raise ConfigError(
            f"no staleness policy is called {name!r}", path="staleness.policy", remedy=f"one of {', '.join(POLICIES)}"
        )
    return POLICIES["wait" if max_staleness == 0 else name]


class AdmissionLaw:
    """Decides when the next group may be issued. Pure; the law and its proof are above.

    Args:
        groups_per_step: groups each training step consumes.
        max_staleness: bound on trainer version minus sampling version, in versions.
        total_groups: groups the steps from ``first_version`` on consume together; None for a run without an end.
        first_version: version the run begins, or resumes, with.
        first_group_id: id of the first new group.
        held: ids of an earlier run whose groups wait to be trained on, with rows sampled under versions up to
            ``first_version``.
        again: ids of an earlier run whose rows are lost; they are issued again before new ones.
        overdue_after: versions after which a group that is still out gives its place away; None for never.

    >>> law = AdmissionLaw(2, max_staleness=1, total_groups=6)
    >>> [law.issue() for _ in range(4)], law.may_issue()
    ([0, 1, 2, 3], False)
    >>> law.explain()
    'group 4 waits for version 1: it is for the step at version 2, 2 ahead of version 0; the bound is 1'
    >>> law.published(1)
    >>> law.issue()
    4

    Raises:
        ValueError: a number is out of its range, ``total_groups`` is no whole number of steps or less than what is
            outstanding, or ``held`` and ``again`` are not different ids below ``first_group_id``.
    """

    def __init__(
        self,
        groups_per_step: int,
        *,
        max_staleness: int,
        total_groups: int | None = None,
        first_version: int = 0,
        first_group_id: int = 0,
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
        if first_version < 0 or first_group_id < 0:
            raise ValueError(f"versions and group ids begin at 0, got {first_version=}, {first_group_id=}")
        if overdue_after is not None and overdue_after < 1:
            raise ValueError(f"overdue_after must be at least 1 version, got {overdue_after}")
        again_ids = sorted(again)
        outstanding = sorted([*held, *again_ids])
        if len(set(outstanding)) != len(outstanding):
            raise ValueError("a group is in held and again, or twice in one of them")
        if outstanding and not 0 <= outstanding[0] <= outstanding[-1] < first_group_id:
            raise ValueError(f"held and again must lie in 0..{first_group_id - 1}, got {outstanding}")
        if total_groups is not None and len(outstanding) > total_groups:
            raise ValueError(f"{len(outstanding)} groups are outstanding, more than total_groups={total_groups}")
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self.total_groups = total_groups
        self.overdue_after = overdue_after
        self.first_version = first_version
        self._version = first_version
        self._first_group_id = first_group_id
        self._next_group_id = first_group_id
        self._outstanding = outstanding  # without those dropped since
        self._live_before = len(outstanding)
        self._again = deque(again_ids)
        self._dropped: set[int] = set()
        self._out: OrderedDict[int, int] = OrderedDict()  # by group_id, the version it was issued under, oldest first
        self._overdue: set[int] = set()

    @property
    def version(self) -> int:
        """Return the newest version that every serving engine holds."""
        return self._version

    @property
    def next_group_id(self) -> int:
        """Return the lowest id that was never issued, by this run or the one it resumes."""
        return self._next_group_id

    @property
    def again(self) -> tuple[int, ...]:
        return tuple(self._again)

    @property
    def live(self) -> int:
        """Return the groups trained on since ``first_version``, or still to be: outstanding and new, not dropped."""
        return self._live_before + self._next_group_id - self._first_group_id - len(self._dropped)

    @property
    def window(self) -> int:
        """Return the most groups that are ever alive and not yet trained on: the capacity a buffer needs."""
        return self.lead * (1 if self.overdue_after is None else 2)

    @property
    def lead(self) -> int:
        """Return the most groups that hold a place at once."""
        return self.groups_per_step * (self.max_staleness + 1)

    @property
    def overdue(self) -> int:
        """Return the number of groups that are still out and have given their place away."""
        return len(self._overdue)

    @property
    def finished(self) -> bool:
        """Return whether every group that the run needs is issued; a drop makes it False again."""
        return not self._again and self.total_groups is not None and self.live >= self.total_groups

    @property
    def horizon(self) -> int:
        """Return the version at which the next group may be issued at the earliest, whatever is ahead of it."""
        return max(self._version_of_next() - self.max_staleness, self.first_version)

    def may_issue(self) -> bool:
        return not self.finished and self._version_of_next() - self._version <= self.max_staleness

    def issue(self) -> int:
        """Issue the next group; return its id.

        Raises:
            InvalidDataError: the law does not allow it; the message is :meth:`explain`'s.
        """
        if not self.may_issue():
            raise InvalidDataError(f"no group may be issued: {self.explain()}")
        if self._again:
            group_id = self._again.popleft()
        else:
            group_id = self._next_group_id
            self._next_group_id += 1
        if self.overdue_after is not None:
            self._out[group_id] = self._version
        return group_id

    def published(self, version: int) -> None:
        """Record that every serving engine holds ``version`` (versions may be skipped).

        Raises:
            WeightVersionError: ``version`` is older than the one held.
        """
        if version < self._version:
            raise WeightVersionError(f"weight versions only grow: {version} was published after {self._version}")
        self._version = version
        while self._out and version - next(iter(self._out.values())) > (self.overdue_after or 0):
            group_id, _issued_under = self._out.popitem(last=False)
            self._overdue.add(group_id)

    def finished_group(self, group_id: int) -> None:
        """Record that the group is sampled and in the buffer; it holds a place again if it had given its place away."""
        self._out.pop(group_id, None)
        self._overdue.discard(group_id)

    def dropped(self, group_id: int) -> None:
        """Record that the group was not and will not be trained on. A later group takes its place.

        Raises:
            InvalidDataError: the group was never issued, or was dropped before.
        """
        if group_id in self._dropped:
            raise InvalidDataError(f"group {group_id} was dropped twice; its place can be given away only once")
        outstanding = group_id in self._outstanding
        if not outstanding and not self._first_group_id <= group_id < self._next_group_id:
            raise InvalidDataError(f"group {group_id} was dropped but never issued (next: {self._next_group_id})")
        self._dropped.add(group_id)
        self.finished_group(group_id)
        if outstanding:
            self._outstanding.remove(group_id)
            if group_id in self._again:
                self._again.remove(group_id)

    def explain(self) -> str:
        """Return a sentence: whether the next group may be issued, and if not, what it waits for."""
        if self.finished:
            return f"all {self.total_groups} groups of the run are issued"
        group_id = self._again[0] if self._again else self._next_group_id
        if self.may_issue():
            return f"group {group_id} may be issued"
        step = self._version_of_next()
        return (
            f"group {group_id} waits for version {step - self.max_staleness}: it is for the step at version {step}, "
            f"{step - self._version} ahead of version {self._version}; the bound is {self.max_staleness}"
        )

    def _version_of_next(self) -> int:
        """Return the version of the step that trains on the next group, if no group before it is dropped."""
        if self._again:
            rank = bisect_left(self._outstanding, self._again[0])
        else:
            rank = self.live - min(len(self._overdue), self.lead)
        return self.first_version + rank // self.groups_per_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What a batch (or several, merged) was trained on, and what was dropped on the way.

        >>> counts = {"rows": 2, "oldest_version": 1, "tokens": 4, "version_tokens": {1: 1, 2: 3}}
        >>> summary = GroupSummary(group_id=0, **counts, rewards=(0.0, 1.0), lengths=(1, 3))
        >>> certificate = certify([summary], trainer_version=2, dropped_rows=2, dropped_tokens=4)
        >>> dict(certificate.histogram)
        {0: 3, 1: 1}
        >>> certificate.maximum, certificate.mean, certificate.waste  # 4 of 8 tokens were dropped
        (1, 0.25, 0.5)

    Attributes:
        groups, rows, tokens: trained on.
        histogram: those tokens by staleness (trainer version minus sampling version), in growing order.
        masked_tokens: further tokens of the same rows, too old to be trained on.
        dropped_rows: rows issued but not trained on.
        dropped_tokens: tokens sampled for those; an unfinished row counts as far as it came.
    """

    groups: int
    rows: int
    tokens: int
    histogram: Mapping[int, int]
    masked_tokens: int = 0
    dropped_rows: int = 0
    dropped_tokens: int = 0

    @property
    def maximum(self) -> int:
        """Return the staleness of the oldest token; 0 without tokens."""
        return max(self.histogram, default=0)

    @property
    def mean(self) -> float:
        """Return the mean staleness of a token; 0 without tokens."""
        total = sum(staleness * tokens for staleness, tokens in self.histogram.items())
        return total / self.tokens if self.tokens else 0.0

    @property
    def mean_length_trained(self) -> float:
        """Return the sampled tokens per row trained on, masked ones included; 0 without rows."""
        return (self.tokens + self.masked_tokens) / self.rows if self.rows else 0.0

    @property
    def mean_length_issued(self) -> float:
        """Return the sampled tokens per row issued, dropped ones included (a lower bound: some are unfinished)."""
        rows = self.rows + self.dropped_rows
        return (self.tokens + self.masked_tokens + self.dropped_tokens) / rows if rows else 0.0

    @property
    def length_ratio(self) -> float:
        """Return mean length trained over mean length issued: below 1, slow rows were dropped. 1 without tokens."""
        return self.mean_length_trained / self.mean_length_issued if self.mean_length_issued else 1.0

    @property
    def waste(self) -> float:
        """Return the share of the sampled tokens that were not trained on, 0..1: masked, or dropped with their row."""
        lost = self.masked_tokens + self.dropped_tokens
        return lost / (self.tokens + lost) if lost else 0.0

    def as_metrics(self) -> dict[str, float]:
        return {
            "staleness_max": float(self.maximum),
            "staleness_mean": self.mean,
            "masked_tokens": float(self.masked_tokens),
            "dropped_tokens": float(self.dropped_tokens),
            "length_ratio": self.length_ratio,
            **{f"staleness/{staleness}": float(tokens) for staleness, tokens in self.histogram.items()},
        }

    @property
    def masked_share(self) -> float:
        """Return the share of the tokens of trained rows that were masked, 0..1."""
        return self.masked_tokens / (self.tokens + self.masked_tokens) if self.masked_tokens else 0.0


def check_summary(summary: GroupSummary, *, group_id: int, rows: int | None = None) -> None:
    """Check that the summary of a rollout is of this group, has so many rows, and does not contradict itself.

    Raises:
        InvalidDataError: it fails a check; the message says which.
    """
    if summary.group_id != group_id:
        raise InvalidDataError(f"the rollout of group {group_id} was answered with rows of group {summary.group_id}")
    if rows is not None and summary.rows != rows:
        raise InvalidDataError(f"{rows} rollouts of group {group_id} were asked for, and {summary.rows} came back")
    by_version, by_row = sum(summary.version_tokens.values()), sum(summary.lengths)
    if not by_version == by_row == summary.tokens:
        raise InvalidDataError(
            f"group {group_id} has {summary.tokens} tokens, but its versions {dict(summary.version_tokens)} count "
            f"{by_version} and its rows {by_row}"
        )
    if not summary.rows == len(summary.rewards) == len(summary.lengths):
        raise InvalidDataError(
            f"group {group_id} has {summary.rows} rows, {len(summary.rewards)} rewards, {len(summary.lengths)} lengths"
        )


def certify(
    summaries: Iterable[GroupSummary],
    *,
    trainer_version: int,
    oldest_version: int | None = None,
    dropped_rows: int = 0,
    dropped_tokens: int = 0,
) -> Certificate:
    """Certify a batch whose groups have these ``summaries`` and which the step at ``trainer_version`` trains on.

    Tokens of versions below ``oldest_version`` are masked. Dropped rows and tokens are those since the batch before.

    Raises:
        InvalidDataError: a summary has tokens of a version the trainer has not made yet.
    """
    histogram: Counter[int] = Counter()
    groups = rows = tokens = masked = 0
    for summary in summaries:
        for version, count in summary.version_tokens.items():
            if not 0 <= version <= trainer_version:
                raise InvalidDataError(
                    f"group {summary.group_id} has tokens of version {version}; the trainer is at {trainer_version}"
                )
            if oldest_version is not None and version < oldest_version:
                masked += count
            elif count:
                histogram[trainer_version - version] += count
        groups += 1
        rows += summary.rows
        tokens += summary.tokens
    return Certificate(
        groups=groups,
        rows=rows,
        tokens=tokens - masked,
        histogram=dict(sorted(histogram.items())),
        masked_tokens=masked,
        dropped_rows=dropped_rows,
        dropped_tokens=dropped_tokens,
    )


def merge(certificates: Iterable[Certificate]) -> Certificate:
    """Merge the certificates of several batches into one."""
    parts = list(certificates)
    histogram: Counter[int] = Counter()
    for part in parts:
        histogram.update(part.histogram)
    counts = [each.name for each in fields(Certificate) if each.name != "histogram"]
    return Certificate(
        histogram=dict(sorted(histogram.items())),
        **{name: sum(getattr(part, name) for part in parts) for name in counts},
    )
