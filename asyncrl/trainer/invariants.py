"""Rules that a run checks of itself while it trains, whatever parts are plugged into it.

Each compares two counts that are made in different places; where they differ, an :class:`InvariantError` ends the run.

========================================================  ==========================  =================================
rule                                                      counted by the part         and here, from
========================================================  ==========================  =================================
a group is admitted as the staleness law says             ``AdmissionLaw``            :class:`GroupBook`, and the pool's
                                                                                      version
a group is trained on once (or ``max_uses`` times),       replay buffer               :class:`GroupBook`
and none is lost
a token is sampled under a version that serves            engines' stamps             the version at dispatch
no token passes the staleness bound, none is miscounted   certificate, from headers   the trainer, from its own rows
versions follow one another, and engines hold them        driver                      the pool's version
engine and trainer give the same log-probs                rollout engine              the trainer, under that version
a replica serves the tensors that were published          rollout engine              the manifest's checksums
a replica computes what the trainer computes              rollout engine              the manifest's canary
========================================================  ==========================  =================================

Others are checked where the rows are: seeds by the rollout worker (:func:`asyncrl.rollout.trajectory.check_seeds`), and
rewards of some rows, which are scored again (:mod:`asyncrl.rollout.recheck`); number and rewards of a row's group by
the trainer's, where the columns that go with advantages are joined to the rows' own
(:attr:`asyncrl.trainer.learner.Advantages.own_columns`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from asyncrl.errors import InvariantError
from asyncrl.interfaces import GroupSummary, SelectedGroup
from asyncrl.staleness import Certificate


def broken(rule: str, found: str) -> InvariantError:
    """Return the error of a rule that does not hold."""
    remedy = "this is a defect of asyncrl or of a part plugged into it: report it; the checkpoints before it stay"
    return InvariantError(f"{rule}, but {found}; {remedy}")


@dataclass(slots=True, kw_only=True)
class GroupBook:
    """Counts a run's groups from issue to use, beside the admission law and the buffer.

    >>> book = GroupBook(groups_per_step=1, max_staleness=0)
    >>> book.issued(0, served=0)
    >>> book.issued(1, served=0)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    asyncrl.errors.InvariantError: sampling runs at most max_staleness = 0 versions ahead, but group 1, for the step ...

    Attributes:
        overdue_after: versions after which a group that is still out gives its place away; None for never.
        max_uses: steps that may train on a group; None checks nothing.
        in_order: whether every step takes the lowest numbers.
        live: groups issued and neither trained on nor dropped; a resumed run begins with those of the runs before.
        pending: groups that the buffer cannot return yet, because their rows or columns have not been put into it.
    """

    groups_per_step: int
    max_staleness: int
    overdue_after: int | None = None
    first_version: int = 0
    max_uses: int | None = None
    in_order: bool = False
    live: set[int] = field(default_factory=set)
    pending: set[int] = field(default_factory=set)
    _used: int = 0
    _out: OrderedDict[int, int] = field(default_factory=OrderedDict)
    _overdue: set[int] = field(default_factory=set)

    def issued(self, group_id: int, *, served: int) -> None:
        """Count a group that was issued while every serving engine holds version ``served`` or a newer one."""
        again = group_id in self.live
        rank = self._used + len(self.live)
        self.live.add(group_id)
        self.pending.add(group_id)
        if self.overdue_after is not None:
            self._out[group_id] = served
            while served - next(iter(self._out.values())) > self.overdue_after:
                self._overdue.add(self._out.popitem(last=False)[0])
        lead = self.groups_per_step * (self.max_staleness + 1)
        step = self.first_version + (rank - min(len(self._overdue), lead)) // self.groups_per_step
        if not again and step - served > self.max_staleness:
            raise broken(
                f"sampling runs at most max_staleness = {self.max_staleness} versions ahead",
                f"group {group_id}, for the step at version {step}, was issued at version {served}",
            )

    def sampled(self, group_id: int) -> None:
        """Count a group that is not out any more."""
        self._out.pop(group_id, None)
        self._overdue.discard(group_id)

    def completed(self, group_id: int) -> None:
        """Count a group whose rows and columns are all in the buffer."""
        self.pending.discard(group_id)

    def dropped(self, group_id: int) -> None:
        self.live.discard(group_id)
        self.pending.discard(group_id)
        self.sampled(group_id)

    def check_pending(self, pending: int) -> None:
        """Check the number of groups that a buffer says it still waits for."""
        if pending > len(self.pending):
            raise broken(
                "a group whose rows and columns are in the buffer is ready",
                f"the buffer waits for {pending} groups, and only {len(self.pending)} are not complete",
            )

    def trained(self, step: int, groups: Sequence[SelectedGroup], *, recorded: bool = False) -> None:
        """Count the batch of a step; a ``recorded`` one is trained on again by a resumed run, as it was."""
        taken = [group.summary.group_id for group in groups if not group.uses]
        for group in groups:
            group_id = group.summary.group_id
            if not group.uses and group_id not in self.live:
                raise broken(
                    "a step trains on groups that were issued and neither trained on nor dropped",
                    f"step {step} got group {group_id}",
                )
            if self.max_uses is not None and group.uses >= self.max_uses:
                raise broken(
                    f"a group is trained on at most {self.max_uses} times",
                    f"step {step} got group {group_id} after {group.uses} uses",
                )
        if self.in_order and not recorded and sorted(taken) != (first := sorted(self.live)[: len(groups)]):
            raise broken("a step takes the oldest groups", f"step {step} got groups {sorted(taken)}, not {first}")
        self.live.difference_update(taken)
        self._used += len(taken)


def check_stamps(summary: GroupSummary, *, served: int) -> None:
    """Check that a group dispatched while every engine held version ``served`` has no token of an older one."""
    if summary.oldest_version < served:
        raise broken(
            "every serving engine holds the version that the admission law was given",
            f"group {summary.group_id}, dispatched at version {served}, has tokens of version {summary.oldest_version}",
        )


def check_served(version: int, *, law: int, pool: int) -> None:
    """Check, before the next version is published, that law and pool have ``version``."""
    if not law == pool == version:
        raise broken(
            "each step's weights are published before those of the next",
            f"after step {version} the admission law has version {law} and the pool version {pool}",
        )


def check_certificate(certificate: Certificate, metrics: Mapping[str, float]) -> None:
    """Check the staleness of a batch, counted from its headers, against what the trainer counted in its rows.

    ``metrics`` are those of the update: ``tokens_trained``, and ``share_staleness_...`` where the objective gives them.
    """
    tokens = int(metrics["tokens_trained"])
    if tokens != certificate.tokens:
        raise broken(
            "the trainer trains on the tokens that the certificate counts",
            f"it counted {tokens} tokens in its rows and the certificate {certificate.tokens}",
        )
    shares = {name: share for name, share in metrics.items() if name.startswith(_SHARE)}
    if not shares:
        return
    expected: dict[str, int] = {}
    for staleness, count in certificate.histogram.items():
        name = str(staleness) if staleness <= 4 else "5_to_8" if staleness <= 8 else "9_up"
        expected[name] = expected.get(name, 0) + count
    counted = {name.removeprefix(_SHARE): share * tokens for name, share in shares.items()}
    if any(abs(counted.get(name, 0.0) - expected.get(name, 0)) > 0.5 + 1e-5 * tokens for name in {*counted, *expected}):
        found = {name: round(count) for name, count in counted.items()}
        raise broken(
            "the trainer counts the staleness of tokens as the certificate does",
            f"its rows have {found} tokens by staleness and the certificate {expected}",
        )


_SHARE = "share_staleness_"


def check_bound(certificate: Certificate, *, step: int, max_staleness: int) -> None:
    """Check that no trained token is older than the bound allows."""
    if certificate.maximum > max_staleness:
        raise broken(
            f"no token is trained on more than max_staleness = {max_staleness} versions after it was sampled",
            f"step {step} has tokens {certificate.maximum} versions old",
        )


def check_log_probs(divergences: Iterable[float], *, version: int, limit: float) -> None:
    """Check the k3 KL of tokens, engine to trainer, all sampled under ``version``; their mean may be ``limit`` nats."""
    values = list(divergences)
    mean = sum(values) / len(values) if values else 0.0
    if not mean <= limit:
        raise broken(
            f"engines sample version {version} from the weights that the trainer has as version {version}",
            f"{len(values)} recorded tokens differ by a k3 KL of {mean:.3g} nats per token, and at most {limit:g} is "
            "rounding",
        )
