"""Publishing a version of the weights to every replica, in two phases: a pure state machine.

    begin(3) --> Prepare(3) to every replica
                    | each one that serves fetches into a shadow, verifies, answers
                 all answered (or failed, or left)
                    |
                 Commit(3) to those that prepared           Fence to those that failed, when they fail
                    | each one swaps between two decode steps, answers
                 all answered (or failed, or left)
                    |
                 Ended(3): every replica that serves holds 3

Events go in, decisions come out; a shell carries them out and gives each command a deadline (a command that passes it
has failed). What holds, whatever the order of events:

- A replica serves only versions that were verified on it. One that fails is fenced: it serves nothing until it holds
  the current version.
- The current version only grows, and one publication runs at a time.
- A publication waits for the replicas that serve when it begins and for nobody else: it ends once they have answered.
  A replica that is fenced, joins or comes back is sent the version too, and serves when it holds the current one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import TypeAlias

from asyncrl.errors import WeightError, WeightVersionError

__all__ = ["Commit", "Decision", "Ended", "Fence", "Phase", "Prepare", "Publication", "ReplicaWeights", "Serve"]


class Phase(Enum):
    """What the running publication waits for."""

    IDLE = "idle"
    PREPARING = "preparing"
    COMMITTING = "committing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Command: fetch ``version`` into a shadow and verify it. ``ticket`` tells this command from any other."""

    replica: str
    version: int
    ticket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Command: swap the prepared ``version`` in."""

    replica: str
    version: int
    ticket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """Send the replica no requests, and take back those it has."""

    replica: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Serve:
    """The replica holds the current version: send it requests (again)."""

    replica: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The publication is over: every replica that serves holds ``version``.

    Attributes:
        version: version that is current now.
        committed: replicas that went through both phases of it, and serve.
        fenced: replicas that served when it began and were lost, with the reason.
    """

    version: int
    committed: tuple[str, ...]
    fenced: Mapping[str, str]


Decision: TypeAlias = Prepare | Commit | Fence | Serve | Ended


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaWeights:
    """What a replica has.

    Attributes:
        replica: its name.
        holds: version in use, verified; None if there is none, or a commit failed half-way.
        prepared: version verified in the shadow.
        asked: command it has not answered yet.
        serves: whether it may be sent requests.
        reason: why it does not serve.
    """

    replica: str
    holds: int | None
    prepared: int | None
    asked: Prepare | Commit | None
    serves: bool
    reason: str


@dataclass(slots=True)
class _Replica:
    name: str
    holds: int | None
    serves: bool = False
    reason: str = "joining"
    prepared: int | None = None
    asked: Prepare | Commit | None = None


class Publication:
    """Who holds which version of the weights, and what has to happen next.

    Args:
        version: the current version, if there is one already (the weights that engines start from).

    >>> fleet = Publication(version=0)
    >>> fleet.joined("a", holds=0)
    (Serve(replica='a', version=0),)
    >>> (prepare,) = fleet.begin(1)
    >>> (commit,) = fleet.succeeded(prepare)
    >>> commit
    Commit(replica='a', version=1, ticket=1)
    >>> fleet.succeeded(commit)
    (Ended(version=1, committed=('a',), fenced={}),)
    """

    def __init__(self, *, version: int | None = None) -> None:
        self._current = version
        self._target: int | None = None
        self._phase = Phase.IDLE
        self._replicas: dict[str, _Replica] = {}
        self._awaited: set[str] = set()
        self._lost: dict[str, str] = {}
        self._done: list[str] = []
        self._tickets = count()

    @property
    def version(self) -> int | None:
        """The current version: the newest whose commit was decided. None before the first."""
        return self._current

    @property
    def phase(self) -> Phase:
        """What the running publication waits for, if one runs."""
        return self._phase

    @property
    def awaited(self) -> tuple[str, ...]:
        """Replicas whose answer the running publication waits for."""
        return tuple(name for name in self._replicas if name in self._awaited)

    @property
    def replicas(self) -> tuple[ReplicaWeights, ...]:
        """Every replica, in the order in which they joined."""
        return tuple(
            ReplicaWeights(
                replica=one.name,
                holds=one.holds,
                prepared=one.prepared,
                asked=one.asked,
                serves=one.serves,
                reason=one.reason,
            )
            for one in self._replicas.values()
        )

    @property
    def needed_versions(self) -> frozenset[int]:
        """Versions whose bytes somebody is fetching or may have to fetch; others can be released."""
        needed = {one.asked.version for one in self._replicas.values() if isinstance(one.asked, Prepare)}
        return frozenset(needed | {version for version in (self._current, self._target) if version is not None})

    def begin(self, version: int) -> tuple[Decision, ...]:
        """Publish ``version``, whose bytes are available from now on.

        Raises:
            WeightError: a publication is running.
            WeightVersionError: ``version`` is not newer than the current one.
        """
        if self._phase is not Phase.IDLE:
            raise WeightError(
                f"version {version} cannot be published while version {self._target} is {self._phase.value}: "
                f"it waits for {', '.join(self.awaited)}"
            )
        if version < 0 or (self._current is not None and version <= self._current):
            raise WeightVersionError(f"versions only grow: {version} cannot follow {self._current}")
        self._target = version
        self._phase = Phase.PREPARING
        self._awaited = {name for name, one in self._replicas.items() if one.serves}
        self._lost, self._done = {}, []
        decisions = [self._prepare(one) for one in self._replicas.values() if one.asked is None]
        return (*decisions, *self._advance())

    def succeeded(self, command: Prepare | Commit) -> tuple[Decision, ...]:
        """The replica did what ``command`` says. Answers to commands that were taken back count for nothing."""
        one = self._asked(command)
        if one is None:
            return ()
        one.asked = None
        if isinstance(command, Prepare):
            one.prepared = command.version
        else:
            one.holds, one.prepared = command.version, None
            if self._phase is Phase.COMMITTING and one.name in self._awaited:
                self._done.append(one.name)
        if command.version == self._target and self._wants(command):
            self._awaited.discard(one.name)
        return (*self._next(one), *self._advance())

    def failed(self, command: Prepare | Commit, reason: str) -> tuple[Decision, ...]:
        """The replica could not do what ``command`` says, or did not answer in time. It is fenced."""
        return () if self._asked(command) is None else self.fence(command.replica, reason)

    def fence(self, replica: str, reason: str) -> tuple[Decision, ...]:
        """The replica serves nothing until it is sent the current version by :meth:`retry` or the next :meth:`begin`.

        Its outstanding command is taken back. Unknown replicas change nothing.
        """
        one = self._replicas.get(replica)
        if one is None:
            return ()
        if isinstance(one.asked, Commit):
            one.holds = None  # swapped, half swapped or not: nobody knows
        one.asked, one.prepared, one.serves, one.reason = None, None, False, reason
        if replica in self._awaited:
            self._awaited.discard(replica)
            self._lost[replica] = reason
        elif replica in self._done:
            self._done.remove(replica)
            self._lost[replica] = reason
        return (Fence(replica=replica, reason=reason), *self._advance())

    def retry(self, replica: str) -> tuple[Decision, ...]:
        """Bring a fenced replica back. One that serves, is busy or unknown changes nothing."""
        one = self._replicas.get(replica)
        if one is None or one.serves or one.asked is not None:
            return ()
        return self._next(one)

    def joined(self, replica: str, *, holds: int | None = None) -> tuple[Decision, ...]:
        """A replica is there. ``holds`` is the version it was started with, if that is known for sure.

        Raises:
            WeightError: a replica of that name is there already.
        """
        if replica in self._replicas:
            raise WeightError(f"replica {replica} is there already; it must leave before another takes its name")
        one = self._replicas[replica] = _Replica(replica, holds)
        return self._next(one)

    def left(self, replica: str) -> tuple[Decision, ...]:
        """The replica is gone; nothing is expected of it any more. Unknown replicas change nothing."""
        if self._replicas.pop(replica, None) is None:
            return ()
        if replica in self._awaited or replica in self._done:
            self._lost[replica] = "left"
            self._awaited.discard(replica)
            self._done = [name for name in self._done if name != replica]
        return self._advance()

    def _asked(self, command: Prepare | Commit) -> _Replica | None:
        one = self._replicas.get(command.replica)
        return one if one is not None and one.asked == command else None

    def _wants(self, command: Prepare | Commit) -> bool:
        return isinstance(command, Prepare) == (self._phase is Phase.PREPARING)

    def _next(self, one: _Replica) -> tuple[Decision, ...]:
        """What an idle replica has to do now."""
        newest = self._current if self._target is None else self._target
        if newest is None or one.asked is not None:
            return ()
        if one.holds == self._current == newest:
            if one.serves:
                return ()
            one.serves, one.reason = True, ""
            return (Serve(replica=one.name, version=newest),)
        if one.prepared != newest:
            return (self._prepare(one),)
        return (self._commit(one),) if newest == self._current else ()

    def _prepare(self, one: _Replica) -> Prepare:
        version = self._current if self._target is None else self._target
        assert version is not None, "a replica is asked only when there is a version"
        one.prepared = None
        one.asked = Prepare(replica=one.name, version=version, ticket=next(self._tickets))
        return one.asked

    def _commit(self, one: _Replica) -> Commit:
        assert one.prepared is not None, "only a prepared version is committed"
        one.asked = Commit(replica=one.name, version=one.prepared, ticket=next(self._tickets))
        return one.asked

    def _advance(self) -> tuple[Decision, ...]:
        """Go on to the next phase if nothing is awaited any more."""
        decisions: list[Decision] = []
        if self._phase is Phase.PREPARING and not self._awaited:
            self._phase = Phase.COMMITTING
            self._current = self._target
            prepared = [one for one in self._replicas.values() if one.prepared == self._current and one.asked is None]
            self._awaited = {one.name for one in prepared if one.serves}
            decisions += [self._commit(one) for one in prepared]
        if self._phase is Phase.COMMITTING and not self._awaited:
            assert self._current is not None, "a commit was decided"
            self._phase = Phase.IDLE
            self._target = None
            decisions.append(Ended(version=self._current, committed=tuple(self._done), fenced=dict(self._lost)))
        return tuple(decisions)
