"""A pool of sandboxes: leases with a time to live, and warm sandboxes that are used again after a proven reset."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from asyncrl.errors import ConfigError, SandboxError
from asyncrl.runtime import run_all, shield_until_done
from asyncrl.sandboxes.contract import Sandbox, SandboxBackend, SandboxLimits

_log = logging.getLogger(__name__)
_MOST_ATTEMPTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxPoolStatistics:
    """State and counters of a pool. Counters only grow.

    ``reused`` leases got a sandbox that an earlier one had; ``failed`` sandboxes could not be made, or died;
    ``expired`` leases were ended by their time to live.
    """

    leased: int
    warm: int
    waiting: int
    created: int
    reused: int
    failed: int
    expired: int


class SandboxPool:
    """Leases sandboxes of one backend, ``most`` at a time.

        >>> pool = SandboxPool(backend, SandboxLimits(), most=4)
        >>> async with pool.lease(timeout_s=10.0) as sandbox:
        ...     end = await sandbox.exec(["true"])

    A sandbox that comes back stays warm, if there are fewer than ``warm``. Before it is leased again it is reset; one
    whose reset is not proven, or which died meanwhile, is destroyed and replaced.

    Args:
        backend: makes the sandboxes; :meth:`close` closes it.
        limits: of each of them.
        most: sandboxes that are leased at a time.
        warm: sandboxes that are kept for later leases.
        lease_s: time to live of a lease; then its sandbox is destroyed, and its next use raises SandboxError.
    """

    def __init__(
        self, backend: SandboxBackend, limits: SandboxLimits, *, most: int, warm: int = 0, lease_s: float = 3600.0
    ) -> None:
        if most < 1 or not 0 <= warm <= most:
            raise ConfigError(f"most is {most}, warm is {warm}", path="most", remedy="1 <= most, 0 <= warm <= most")
        if not 0 < lease_s < math.inf:
            raise ConfigError(f"lease_s is {lease_s}", path="lease_s", remedy="a positive number of seconds")
        self._backend = backend
        self._limits = limits
        self._most = most
        self._warm = warm
        self._lease_s = lease_s
        self._places = asyncio.Semaphore(most)
        self._idle: deque[Sandbox] = deque()
        self._leased: set[Sandbox] = set()
        self._expiring: set[asyncio.Task[None]] = set()
        self._waiting = self._created = self._reused = self._failed = self._expired = 0
        self._closed = False

    @asynccontextmanager
    async def lease(self, *, timeout_s: float) -> AsyncGenerator[Sandbox, None]:
        """Wait for a sandbox with an empty folder, and have it inside the block.

        Raises:
            SandboxError: there is none within ``timeout_s``, none can be made, or the pool is closed.
        """
        await self._place(timeout_s)
        try:
            sandbox = await self._take()
            self._leased.add(sandbox)
            ending = asyncio.get_running_loop().call_later(self._lease_s, self._expire, sandbox)
            try:
                yield sandbox
            except BaseException as error:
                if isinstance(error, SandboxError):
                    self._failed += 1
                    if sandbox not in self._leased:
                        error.add_note(f"its lease of {self._lease_s:g} s had ended")
                self._leased.discard(sandbox)
                await sandbox.destroy()
                raise
            finally:
                ending.cancel()
                if sandbox in self._leased:
                    await self._give_back(sandbox)
        finally:
            self._places.release()

    def statistics(self) -> SandboxPoolStatistics:
        return SandboxPoolStatistics(
            leased=len(self._leased),
            warm=len(self._idle),
            waiting=self._waiting,
            created=self._created,
            reused=self._reused,
            failed=self._failed,
            expired=self._expired,
        )

    async def close(self) -> None:
        """Destroy all sandboxes, those that are leased too, and refuse further leases. Idempotent."""
        self._closed = True
        sandboxes = [*self._idle, *self._leased]
        self._idle.clear()
        self._leased.clear()
        await run_all([*(each.destroy() for each in sandboxes), _all_of(self._expiring)])
        await self._backend.close()

    async def _place(self, timeout_s: float) -> None:
        self._waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                await self._places.acquire()
        except TimeoutError as error:
            text = f"no sandbox was free within {timeout_s:g} s: {len(self._leased)} of {self._most} are leased"
            raise SandboxError(f"{text}, {self._waiting - 1} others wait") from error
        finally:
            self._waiting -= 1

    async def _take(self) -> Sandbox:
        while self._idle:
            sandbox = self._idle.popleft()
            if await self._is_reset(sandbox):
                self._reused += 1
                return sandbox
        for attempt in range(1, _MOST_ATTEMPTS + 1):
            if self._closed:
                raise SandboxError("the pool of sandboxes is closed")
            try:
                sandbox = await self._backend.create(self._limits)
            except SandboxError as error:
                self._failed += 1
                _log.warning("a sandbox could not be made (attempt %d): %s", attempt, error)
                if attempt == _MOST_ATTEMPTS:
                    raise
            else:
                self._created += 1
                return sandbox
        raise AssertionError

    async def _is_reset(self, sandbox: Sandbox) -> bool:
        try:
            if await sandbox.reset():
                return True
        except SandboxError as error:
            self._failed += 1
            _log.warning("a warm sandbox failed: %s", error)
        except BaseException:
            await sandbox.destroy()
            raise
        await sandbox.destroy()
        return False

    async def _give_back(self, sandbox: Sandbox) -> None:
        self._leased.discard(sandbox)
        if self._closed or len(self._idle) >= self._warm:
            await sandbox.destroy()
        else:
            self._idle.append(sandbox)

    def _expire(self, sandbox: Sandbox) -> None:
        if sandbox in self._leased:
            self._leased.discard(sandbox)
            self._expired += 1
            task = asyncio.ensure_future(sandbox.destroy())
            self._expiring.add(task)
            task.add_done_callback(self._expiring.discard)


async def _all_of(tasks: set[asyncio.Task[None]]) -> None:
    if tasks:
        await shield_until_done(asyncio.wait(set(tasks)))
