"""Publishing a version of the weights to every replica, in two phases.

:class:`Publication` decides; it is a pure state machine: events go in, decisions come out.

    begin(3) --> Prepare(3) to every replica
                    | each one that serves fetches into a shadow, verifies, answers
                 all answered (or failed, or left)
                    |
                 Commit(3) to those that prepared           Fence to those that failed
                    | each one swaps between two decode steps, answers
                 all answered (or failed, or left)
                    |
                 Ended(3): every replica that serves holds 3

What holds, whatever the order of events:

- A replica serves only versions that were verified on it. One that fails is fenced: it serves nothing until it holds
  the current version.
- The current version only grows, and one publication runs at a time.
- A publication waits for the replicas that serve when it begins and for no others: it ends once they have answered. A
  replica that is fenced, joins or comes back is sent the version too, and serves when it holds the current one.
- A *tentative* version that no replica could prepare is withdrawn: all go on with the current one.
- A *pinned* replica keeps the version that it holds: publications pass it by, and none waits for it. Once it is
  unpinned it serves when it holds the current version. One that is fenced or leaves is pinned no longer.
- Only the current version and the one under way are needed: a replica that is still busy with an older one begins anew.

:class:`WeightUpdates` carries the decisions out and gives each command a deadline: a command that
exceeds it has failed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import Any, Protocol, TypeAlias, TypeVar

from asyncrl.errors import EngineClosedError, InfrastructureError, WeightError, WeightVersionError
from asyncrl.weights import WeightManifest

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Phase(Enum):
    """What the running publication waits for."""

    IDLE = "idle"
    PREPARING = "preparing"
    COMMITTING = "committing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Command: fetch ``version`` into a shadow and verify it. ``ticket`` distinguishes this command from any other."""

    replica: str
    version: int
    ticket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    replica: str
    version: int
    ticket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """Send the replica no requests, and requeue those it has."""

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

    ``committed`` are the replicas that went through both phases and serve; ``fenced`` those that served when it began
    and were lost, with the reason. Of a version that was withdrawn, ``fenced`` are those that could not prepare it.
    """

    version: int
    committed: tuple[str, ...]
    fenced: Mapping[str, str]


Decision: TypeAlias = Prepare | Commit | Fence | Serve | Ended


@dataclass(slots=True)
class ReplicaWeights:
    """The weights of a replica.

    Attributes:
        holds: version in use, verified; None if there is none, or a commit failed half-way.
        serves: whether it may be sent requests.
        pinned: whether it keeps the version that it holds.
        prepared: version verified in the shadow.
        command: the one that it has not answered yet.
    """

    name: str
    holds: int | None
    serves: bool = False
    pinned: bool = False
    prepared: int | None = None
    command: Prepare | Commit | None = None


class Publication:
    """Decides which replica holds which version of the weights, and what has to happen next.

    ``version`` is the current one: of the weights that replicas start from.

    >>> publication = Publication(version=0)
    >>> publication.joined("a", holds=0)
    (Serve(replica='a', version=0),)
    >>> (prepare,) = publication.begin(1)
    >>> (commit,) = publication.succeeded(prepare)
    >>> commit
    Commit(replica='a', version=1, ticket=1)
    >>> publication.succeeded(commit)
    (Ended(version=1, committed=('a',), fenced={}),)
    """

    def __init__(self, *, version: int) -> None:
        self.version = version
        """The current version: the newest whose commit was decided."""
        self.phase = Phase.IDLE
        self._target: int | None = None
        self._tentative = False
        self._replicas: dict[str, ReplicaWeights] = {}
        self._awaited: set[str] = set()
        self._lost: dict[str, str] = {}
        self._done: list[str] = []
        self._tickets = count()

    @property
    def awaited(self) -> tuple[str, ...]:
        """Replicas whose answer is outstanding."""
        return tuple(name for name in self._replicas if name in self._awaited)

    @property
    def replicas(self) -> tuple[ReplicaWeights, ...]:
        return tuple(self._replicas.values())

    @property
    def needed_versions(self) -> frozenset[int]:
        """Versions whose bytes a replica may have to fetch; others can be released."""
        return frozenset({self.version, self._newest})

    @property
    def _newest(self) -> int:
        return self.version if self._target is None else self._target

    def begin(self, version: int, *, tentative: bool = False) -> tuple[Decision, ...]:
        """Publish ``version``, whose bytes are available from now on.

        A ``tentative`` one becomes the current version only if a replica that serves can prepare it.

        Raises:
            WeightError: a publication is running.
            WeightVersionError: ``version`` is not newer than the current one.
        """
        if self.phase is not Phase.IDLE:
            raise WeightError(
                f"version {version} cannot be published while version {self._target} is {self.phase.value}: "
                f"it waits for {', '.join(self.awaited)}"
            )
        if version <= self.version:
            raise WeightVersionError(f"versions only grow: {version} cannot follow {self.version}")
        self._target, self._tentative = version, tentative
        self.phase = Phase.PREPARING
        self._awaited = {name for name, one in self._replicas.items() if one.serves and not one.pinned}
        self._lost, self._done = {}, []
        decisions = [self._prepare(one) for one in self._replicas.values() if one.command is None and not one.pinned]
        return (*decisions, *self._advance())

    def succeeded(self, command: Prepare | Commit) -> tuple[Decision, ...]:
        """Count ``command`` as carried out. An answer to a withdrawn command changes nothing."""
        one = self._addressee(command)
        if one is None:
            return ()
        one.command = None
        if isinstance(command, Prepare):
            one.prepared = command.version
        else:
            one.holds, one.prepared = command.version, None
            if self.phase is Phase.COMMITTING and one.name in self._awaited:
                self._done.append(one.name)
        belongs_to_phase = isinstance(command, Prepare) == (self.phase is Phase.PREPARING)
        if command.version == self._target and belongs_to_phase:
            self._awaited.discard(one.name)
        return (*self._next(one), *self._advance())

    def failed(self, command: Prepare | Commit, reason: str) -> tuple[Decision, ...]:
        """Fence the replica, which could not carry out ``command`` or did not answer in time.

        One that serves and could not prepare a tentative version is fenced when another commits that. One that could
        not prepare an older version than the newest, which may have been released, prepares that next.
        """
        one = self._addressee(command)
        if one is None:
            return ()
        if isinstance(command, Prepare) and self._tentative and one.name in self._awaited:
            one.command = None
            self._lose(one.name, reason)
            return self._advance()
        outdated = isinstance(command, Prepare) and command.version != self._newest
        return (*self.fence(one.name, reason), *(self._next(one) if outdated else ()))

    def fence(self, replica: str, reason: str) -> tuple[Decision, ...]:
        """Withdraw the replica's command; it serves nothing until :meth:`retry` or :meth:`begin` makes it current.

        Unknown replicas change nothing.
        """
        one = self._replicas.get(replica)
        if one is None:
            return ()
        if isinstance(one.command, Commit):
            one.holds = None  # it may have swapped all of the weights, some, or none
        one.command, one.prepared, one.serves, one.pinned = None, None, False, False
        self._lose(replica, reason)
        return (Fence(replica=replica, reason=reason), *self._advance())

    def retry(self, replica: str) -> tuple[Decision, ...]:
        """Bring a fenced replica back. One that serves, has a command or is unknown changes nothing."""
        one = self._replicas.get(replica)
        if one is None or one.serves or one.command is not None:
            return ()
        return self._next(one)

    def can_pin(self, replica: str) -> bool:
        """Return whether the replica serves the current version, and is neither pinned nor swapping weights."""
        one = self._replicas.get(replica)
        return (
            one is not None
            and one.serves
            and not one.pinned
            and one.holds == self.version
            and not isinstance(one.command, Commit)
        )

    def pin(self, *replicas: str) -> tuple[Decision, ...]:
        """Keep the replicas at the current version, out of this publication and the next ones, until :meth:`unpin`.

        Raises:
            WeightError: not :meth:`can_pin`.
        """
        for name in replicas:
            if not self.can_pin(name):
                raise WeightError(f"replica {name} cannot be pinned: it does not serve version {self.version} alone")
            one = self._replicas[name]
            one.pinned, one.command, one.prepared = True, None, None
        self._awaited.difference_update(replicas)
        return self._advance()

    def unpin(self, replica: str) -> tuple[Decision, ...]:
        """Let the replica serve the newest version, once it holds it. One that is not pinned changes nothing."""
        one = self._replicas.get(replica)
        if one is None or not one.pinned:
            return ()
        one.pinned, one.serves = False, one.holds == self._newest
        return () if one.serves else self._next(one)

    def joined(self, replica: str, *, holds: int | None = None) -> tuple[Decision, ...]:
        """Add a replica; ``holds`` is the version it was started with, if that is certain.

        Raises:
            WeightError: a replica of that name exists.
        """
        if replica in self._replicas:
            raise WeightError(f"replica {replica} is there already; it must leave before another takes its name")
        one = self._replicas[replica] = ReplicaWeights(replica, holds)
        return self._next(one)

    def left(self, replica: str, reason: str = "left") -> tuple[Decision, ...]:
        """Drop a replica that is gone. Unknown replicas change nothing."""
        if self._replicas.pop(replica, None) is None:
            return ()
        self._lose(replica, reason)
        return self._advance()

    def _lose(self, replica: str, reason: str) -> None:
        """Count a replica as lost by the running publication, if that waits for it or has counted it as done."""
        if replica in self._awaited or replica in self._done:
            self._lost[replica] = reason
            self._awaited.discard(replica)
            self._done = [name for name in self._done if name != replica]

    def _addressee(self, command: Prepare | Commit) -> ReplicaWeights | None:
        """Return the replica that still has to answer ``command``."""
        one = self._replicas.get(command.replica)
        return one if one is not None and one.command == command else None

    def _next(self, one: ReplicaWeights) -> tuple[Decision, ...]:
        if one.command is not None:
            return ()
        if one.holds == self.version == self._newest:
            if one.serves:
                return ()
            one.serves = True
            return (Serve(replica=one.name, version=self.version),)
        if one.prepared != self._newest:
            return (self._prepare(one),)
        return (self._commit(one),) if self._newest == self.version else ()

    def _prepare(self, one: ReplicaWeights) -> Prepare:
        one.prepared = None
        one.command = Prepare(replica=one.name, version=self._newest, ticket=next(self._tickets))
        return one.command

    def _commit(self, one: ReplicaWeights) -> Commit:
        assert one.prepared is not None, "only a prepared version is committed"
        one.command = Commit(replica=one.name, version=one.prepared, ticket=next(self._tickets))
        return one.command

    def _advance(self) -> tuple[Decision, ...]:
        decisions: list[Decision] = []
        publishing = self._newest
        if self.phase is Phase.PREPARING and not self._awaited:
            self.phase = Phase.COMMITTING
            prepared = [one for one in self._replicas.values() if one.prepared == publishing and one.command is None]
            self._awaited = {one.name for one in prepared if one.serves}
            serving = [one for one in self._replicas.values() if one.serves and not one.pinned]
            failed = [one for one in serving if one.name not in self._awaited]
            if self._tentative and self._lost and not self._awaited:
                self._target = None  # withdrawn
            else:
                self.version = publishing
                decisions += (each for one in failed for each in self.fence(one.name, self._lost[one.name]))
            decisions += (each for one in prepared for each in self._next(one))
        if self.phase is Phase.COMMITTING and not self._awaited:
            self.phase = Phase.IDLE
            self._target = None
            decisions.append(Ended(version=publishing, committed=tuple(self._done), fenced=dict(self._lost)))
        return tuple(decisions)


class UpdatableReplica(Protocol):
    """What :class:`WeightUpdates` needs of a replica. Whatever the first two raise fences this replica only."""

    async def prepare_weights(self, manifest: WeightManifest) -> None:
        """Fetch a version, verify it, and keep it in a shadow."""
        ...

    async def commit_weights(self, version: int) -> None:
        """Sample under the prepared version from the next token on."""
        ...

    def verified(self) -> None:
        """Take requests: the replica holds the current version."""
        ...

    def fenced(self, reason: str) -> None:
        """Take no requests until :meth:`verified`, and requeue those it has."""
        ...


class WeightUpdates:
    """Carries out what a :class:`Publication` decides, each command under a deadline. Used from one event loop.

    Args:
        replicas: by name; the owner's own dictionary, which changes.
        version: that replicas start with.
        tasks: owner of the commands and of the running publication; its end cancels them.
        deadline_s: seconds for each command; past it, the replica is fenced.
        max_committing: replicas that swap weights at the same time; None for all.
    """

    def __init__(
        self,
        replicas: Mapping[str, UpdatableReplica],
        *,
        version: int,
        tasks: asyncio.TaskGroup,
        deadline_s: float,
        max_committing: int | None = None,
    ) -> None:
        self._replicas = replicas
        self._publication = Publication(version=version)
        self._tasks = tasks
        self._deadline_s = deadline_s
        self._commit_slots = nullcontext() if max_committing is None else asyncio.Semaphore(max_committing)
        self._manifests: dict[int, WeightManifest] = {}
        self._commands: dict[str, asyncio.Task[None]] = {}
        self._ended: asyncio.Future[Ended] | None = None
        self._ending: asyncio.Task[Ended] | None = None

    @property
    def version(self) -> int:
        return self._publication.version

    @property
    def needed_versions(self) -> frozenset[int]:
        return self._publication.needed_versions

    async def publish(self, manifest: WeightManifest, *, tentative: bool = False) -> Ended:
        """Bring a version into every replica. Cancelling the wait does not withdraw the publication.

        Raises:
            WeightVersionError: the version is not newer than the current one.
            WeightError: a publication is running.
            EngineClosedError: the owner of the tasks ended meanwhile.
        """
        decisions = self._publication.begin(manifest.version, tentative=tentative)
        self._manifests[manifest.version] = manifest
        ended = self._ended = asyncio.get_running_loop().create_future()
        self._ending = ending = self._spawn(_result(ended), name=f"publishing version {manifest.version}")
        self._carry_out(decisions)
        over = EngineClosedError(f"the pool ended before version {manifest.version} was published")
        if ending is None:
            raise over
        try:
            return await asyncio.shield(ending)
        except asyncio.CancelledError:
            if ending.cancelled():
                raise over from None
            raise

    def close(self) -> None:
        """End the running publication with an :class:`EngineClosedError`."""
        if self._ending is not None:
            self._ending.cancel()

    def joined(self, replica: str, *, holds: int | None) -> None:
        self._carry_out(self._publication.joined(replica, holds=holds))

    def left(self, replica: str, reason: str = "left") -> None:
        """Withdraw the command of a replica that is gone."""
        command = self._commands.get(replica)
        if command is not None and command is not asyncio.current_task():
            command.cancel()
        self._carry_out(self._publication.left(replica, reason))

    def retry(self, replica: str) -> None:
        self._carry_out(self._publication.retry(replica))

    def held(self, replica: str) -> int | None:
        """Return the version that a replica holds; None if it has none."""
        return next((one.holds for one in self._publication.replicas if one.name == replica), None)

    def serves(self, replica: str) -> bool:
        """Return whether the replica serves the current version, or the one that it is pinned to."""
        return any(one.serves for one in self._publication.replicas if one.name == replica)

    def updating(self, replica: str) -> bool:
        """Return whether a replica has a command that it has not answered yet, or is to commit what it has prepared."""
        replicas = self._publication.replicas
        return any(one.name == replica and (one.command, one.prepared) != (None, None) for one in replicas)

    async def answered(self) -> None:
        """Wait until no replica has a command; each command ends within its deadline."""
        while commands := [each for each in self._commands.values() if not each.done()]:
            await asyncio.wait(commands)

    def can_pin(self, replica: str) -> bool:
        return self._publication.can_pin(replica)

    def pin(self, *replicas: str) -> None:
        """Pin replicas that :meth:`can_pin`; what they fetch is abandoned."""
        decisions = self._publication.pin(*replicas)
        for name in replicas:
            if (command := self._commands.pop(name, None)) is not None:
                command.cancel()
        self._carry_out(decisions)

    def unpin(self, replica: str) -> None:
        self._carry_out(self._publication.unpin(replica))

    @property
    def publishing(self) -> bool:
        return self._publication.phase is not Phase.IDLE

    async def settled(self) -> None:
        """Wait until the running publication has ended, if there is one."""
        if self._ending is None:
            await asyncio.sleep(0)
        else:
            await asyncio.wait([self._ending])

    def _carry_out(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Prepare | Commit):
                command = self._spawn(self._run(decision), name=f"weights {decision}")
                if command is not None:
                    self._commands[decision.replica] = command
            elif isinstance(decision, Serve):
                self._replicas[decision.replica].verified()
            elif isinstance(decision, Fence):
                _log.warning("replica %s is fenced: %s", decision.replica, decision.reason)
                self._replicas[decision.replica].fenced(decision.reason)
            else:
                assert self._ended is not None, "a publication ends once"
                if not self._ended.done():
                    self._ended.set_result(decision)
        needed = self.needed_versions
        self._manifests = {version: one for version, one in self._manifests.items() if version in needed}

    def _spawn(self, work: Coroutine[Any, Any, _T], *, name: str) -> asyncio.Task[_T] | None:
        """Start a task of the owner; return None if the owner is ending."""
        try:
            return self._tasks.create_task(work, name=name)
        except RuntimeError:
            work.close()
            return None

    async def _run(self, command: Prepare | Commit) -> None:
        error = ""
        try:
            async with self._commit_slots if isinstance(command, Commit) else nullcontext():
                async with asyncio.timeout(self._deadline_s):
                    await self._send(command)
        except TimeoutError:  # a DeadlineError is one, too
            error = f"{type(command).__name__.lower()} of version {command.version} took over {self._deadline_s:g} s"
        except InfrastructureError as failure:
            error = str(failure) or type(failure).__name__
        except Exception as failure:  # noqa: BLE001 - whatever it is, it costs this replica, and no other
            first_line, _, _ = str(failure).partition("\n")
            error = f"{type(failure).__name__}: {first_line}"
            _log.warning("replica %s failed at %s", command.replica, command, exc_info=True)
        finally:
            if self._commands.get(command.replica) is asyncio.current_task():
                del self._commands[command.replica]
        publication = self._publication
        self._carry_out(publication.failed(command, error) if error else publication.succeeded(command))

    async def _send(self, command: Prepare | Commit) -> None:
        replica = self._replicas[command.replica]
        if isinstance(command, Commit):
            await replica.commit_weights(command.version)
            return
        manifest = self._manifests.get(command.version)
        if manifest is None:
            raise WeightError(f"unknown weight version {command.version}: it was not published through this pool")
        await replica.prepare_weights(manifest)


async def _result(ended: asyncio.Future[Ended]) -> Ended:
    return await ended
