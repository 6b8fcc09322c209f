"""Carries out what :mod:`asyncrl.weights.publication` decides, during publications and between them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from asyncrl.errors import EngineClosedError, InfrastructureError, WeightError
from asyncrl.weights.manifest import WeightManifest
from asyncrl.weights.publication import Commit, Decision, Ended, Fence, Prepare, Publication, Serve

__all__ = ["WeightUpdates"]

_log = logging.getLogger(__name__)

_T = TypeVar("_T")


class WeightUpdates:
    """Commands to replicas, each with a deadline; used from one event loop.

    Args:
        version: the current version: the one that engines start with.
        prepare: has a replica fetch, verify and shadow a version.
        commit: has it swap the version in.
        serve: called when a replica holds the current version.
        fence: called when one must not serve any more, with the reason.
        tasks: owner of the commands and the publication under way; its end cancels them.
        deadline_s: seconds for each command; past it, the replica is fenced.
        max_away: replicas that swap at the same time.
    """

    def __init__(
        self,
        *,
        version: int,
        prepare: Callable[[str, WeightManifest], Awaitable[object]],
        commit: Callable[[str, int], Awaitable[object]],
        serve: Callable[[str, int], None],
        fence: Callable[[str, str], None],
        tasks: asyncio.TaskGroup,
        deadline_s: float,
        max_away: int | None = None,
    ) -> None:
        self._fleet = Publication(version=version)
        self._prepare = prepare
        self._commit = commit
        self._serve = serve
        self._fence = fence
        self._tasks = tasks
        self._deadline_s = deadline_s
        self._away = asyncio.Semaphore(max_away) if max_away is not None else None
        self._manifests: dict[int, WeightManifest] = {}
        self._commands: dict[str, asyncio.Task[None]] = {}
        self._ended: asyncio.Future[Ended] | None = None

    @property
    def version(self) -> int:
        """The current version: the newest whose commit was decided."""
        assert self._fleet.version is not None, "there is one from the start"
        return self._fleet.version

    @property
    def needed_versions(self) -> frozenset[int]:
        """Versions whose bytes somebody fetches or may have to fetch: a replica that joins needs the current one."""
        return self._fleet.needed_versions

    async def publish(self, manifest: WeightManifest) -> Ended:
        """Bring a version into every replica; see :class:`asyncrl.weights.publication.Publication`.

        Cancelling the wait does not take the publication back: it ends by itself.

        Raises:
            WeightVersionError: the version is not newer than the current one.
            WeightError: a publication is running.
            EngineClosedError: the owner of the tasks ended meanwhile.
        """
        decisions = self._fleet.begin(manifest.version)
        self._manifests[manifest.version] = manifest
        ended = self._ended = asyncio.get_running_loop().create_future()
        ending = self._begin(_result(ended), name=f"publishing version {manifest.version}")
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

    def joined(self, replica: str, *, holds: int | None) -> None:
        """A replica is there: it is brought to the current version, and served then."""
        self._carry_out(self._fleet.joined(replica, holds=holds))

    def left(self, replica: str) -> None:
        """It is gone."""
        self._take_back(replica)
        self._carry_out(self._fleet.left(replica))

    def fence(self, replica: str, reason: str) -> None:
        """It must not serve until it holds the current version again; :meth:`retry` brings it there."""
        self._take_back(replica)
        self._carry_out(self._fleet.fence(replica, reason))

    def retry(self, replica: str) -> None:
        """Bring a fenced replica to the current version."""
        self._carry_out(self._fleet.retry(replica))

    def _take_back(self, replica: str) -> None:
        command = self._commands.get(replica)
        if command is not None and command is not asyncio.current_task():
            command.cancel()

    def _carry_out(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Prepare | Commit):
                command = self._begin(self._command(decision), name=f"weights {decision}")
                if command is not None:
                    self._commands[decision.replica] = command
            elif isinstance(decision, Serve):
                self._serve(decision.replica, decision.version)
            elif isinstance(decision, Fence):
                _log.warning("replica %s is fenced: %s", decision.replica, decision.reason)
                self._fence(decision.replica, decision.reason)
            else:
                assert self._ended is not None, "a publication ends once"
                if not self._ended.done():
                    self._ended.set_result(decision)
        needed = self.needed_versions
        self._manifests = {version: one for version, one in self._manifests.items() if version in needed}

    def _begin(self, work: Coroutine[Any, Any, _T], *, name: str) -> asyncio.Task[_T] | None:
        """A task of the owner; None if the owner is ending: nothing is begun then."""
        try:
            return self._tasks.create_task(work, name=name)
        except RuntimeError:
            work.close()
            return None

    async def _command(self, command: Prepare | Commit) -> None:
        error = ""
        try:
            if isinstance(command, Commit) and self._away is not None:
                async with self._away, asyncio.timeout(self._deadline_s):
                    await self._commit(command.replica, command.version)
            else:
                async with asyncio.timeout(self._deadline_s):
                    await self._do(command)
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
        self._carry_out(self._fleet.failed(command, error) if error else self._fleet.succeeded(command))

    async def _do(self, command: Prepare | Commit) -> None:
        if isinstance(command, Commit):
            await self._commit(command.replica, command.version)
            return
        manifest = self._manifests.get(command.version)
        if manifest is None:
            raise WeightError(f"nobody knows where version {command.version} lies: it was not published here")
        await self._prepare(command.replica, manifest)


async def _result(ended: asyncio.Future[Ended]) -> Ended:
    return await ended
