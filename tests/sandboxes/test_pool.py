"""The pool of sandboxes: places, leases, warm sandboxes, and what fails."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from asyncrl.errors import ConfigError, SandboxError
from asyncrl.sandboxes.contract import Isolation, ProgramEnd, Sandbox, SandboxLimits
from asyncrl.sandboxes.pool import SandboxPool

ALL = Isolation(user=True, network=True, processes=True, files=True, system_calls=True)


class FakeSandbox(Sandbox):
    """Ends every command at once. ``dead`` fails; ``dirty`` cannot prove its reset."""

    limits, isolation, folder = SandboxLimits(), ALL, "/"

    def __init__(self) -> None:
        self.dead = self.dirty = self.destroyed = False
        self.resets = 0

    async def exec(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        deadline_s: float | None = None,
        output_bytes: int | None = None,
    ) -> ProgramEnd:
        if self.dead or self.destroyed:
            raise SandboxError("it is gone")
        return ProgramEnd(how="exited", code=0)

    async def reset(self) -> bool:
        self.resets += 1
        await self.exec(["reset"])
        return not self.dirty

    async def destroy(self) -> None:
        self.destroyed = True


class FakeBackend:
    """Fails as often as it is asked to."""

    def __init__(self, *, failures: int = 0) -> None:
        self.failures = failures
        self.made: list[FakeSandbox] = []

    async def create(self, limits: SandboxLimits) -> FakeSandbox:
        if self.failures:
            self.failures -= 1
            raise SandboxError("no more memory")
        self.made.append(FakeSandbox())
        return self.made[-1]

    async def close(self) -> None: ...


def pool_of(backend: FakeBackend, *, most: int = 2, warm: int = 1, lease_s: float = 60.0) -> SandboxPool:
    return SandboxPool(backend, SandboxLimits(), most=most, warm=warm, lease_s=lease_s)


async def test_a_warm_sandbox_is_used_again_after_a_proven_reset():
    backend = FakeBackend()
    pool = pool_of(backend)
    async with pool.lease(timeout_s=1) as first, pool.lease(timeout_s=1) as second:
        assert first is not second
    assert [each.destroyed for each in backend.made] == [True, False]  # one stays warm, not yet reset
    async with pool.lease(timeout_s=1) as third:
        assert third is second
    assert backend.made[1].resets == 1
    found = pool.statistics()
    assert (found.created, found.reused, found.failed, found.leased, found.warm) == (2, 1, 0, 0, 1)
    await pool.close()
    assert all(each.destroyed for each in backend.made)
    with pytest.raises(SandboxError, match="closed"):
        async with pool.lease(timeout_s=1):
            pass


@pytest.mark.parametrize(("dead", "dirty"), [(True, False), (False, True)])
async def test_a_warm_sandbox_without_a_proven_reset_is_destroyed_and_replaced(dead: bool, dirty: bool):
    backend = FakeBackend()
    pool = pool_of(backend)
    async with pool.lease(timeout_s=1):
        pass
    backend.made[0].dead, backend.made[0].dirty = dead, dirty
    async with pool.lease(timeout_s=1) as sandbox:
        assert sandbox is backend.made[1]
    assert backend.made[0].destroyed == (not dead) or backend.made[0].dead
    assert pool.statistics().failed == int(dead)
    await pool.close()


async def test_a_wait_for_a_place_has_a_deadline_and_a_reason():
    pool = pool_of(FakeBackend(), most=1)
    async with pool.lease(timeout_s=1):
        with pytest.raises(SandboxError, match=r"no sandbox was free within 0.01 s: 1 of 1 are leased, 0 others wait"):
            async with pool.lease(timeout_s=0.01):
                pass
    async with pool.lease(timeout_s=0.01):
        assert pool.statistics().waiting == 0
    await pool.close()


async def test_a_lease_ends_at_its_time_to_live():
    backend = FakeBackend()
    pool = pool_of(backend, most=1, lease_s=0.01)

    async def use() -> None:
        async with pool.lease(timeout_s=1) as sandbox:
            while True:
                await sandbox.exec(["true"])
                await asyncio.sleep(0)

    with pytest.raises(SandboxError) as caught:
        await use()
    assert caught.value.__notes__ == ["its lease of 0.01 s had ended"]
    assert backend.made[0].destroyed
    found = pool.statistics()
    assert (found.expired, found.failed, found.leased) == (1, 1, 0)
    async with pool.lease(timeout_s=1):
        assert len(backend.made) == 2
    await pool.close()


@pytest.mark.parametrize(("failures", "works"), [(2, True), (3, False)])
async def test_a_sandbox_that_cannot_be_made_is_tried_again(failures: int, works: bool):
    pool = pool_of(FakeBackend(failures=failures))
    if works:
        async with pool.lease(timeout_s=1):
            pass
    else:
        with pytest.raises(SandboxError, match="no more memory"):
            async with pool.lease(timeout_s=1):
                pass
    assert pool.statistics().failed == failures
    async with pool.lease(timeout_s=1), pool.lease(timeout_s=1):  # no place was lost
        pass
    await pool.close()


async def test_a_block_that_is_cancelled_destroys_its_sandbox():
    backend = FakeBackend()
    pool = pool_of(backend)

    async def use() -> None:
        async with pool.lease(timeout_s=1):
            await asyncio.Event().wait()

    task = asyncio.create_task(use())
    while not backend.made:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert backend.made[0].destroyed
    assert pool.statistics().failed == 0
    await pool.close()


def test_numbers_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="most is 0"):
        SandboxPool(FakeBackend(), SandboxLimits(), most=0)
    with pytest.raises(ConfigError, match="lease_s is 0"):
        SandboxPool(FakeBackend(), SandboxLimits(), most=1, lease_s=0)
