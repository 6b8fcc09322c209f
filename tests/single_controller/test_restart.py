"""Workers that die and are made again; calls that are sent again, and calls that are not."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.errors import DispatchError, EngineError, WorkerDiedError
from asyncrl.single_controller import ClassWithInitArgs, Dispatch, Restart, Worker, WorkerGroup, register
from asyncrl.single_controller.call import Failed
from asyncrl.single_controller.local import LocalWorkerGroup

TIMEOUT_S = 60.0

MakeGroup = Callable[..., WorkerGroup]


class Stage(Worker):
    """A stage of a chain. Where its processes share nothing else, they count in files what they have done."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.prepared = False

    def count(self, what: str) -> int:
        """How often, with this time."""
        file = self.folder / f"{self.group_name}.{what}.{self.rank}"
        with file.open("a") as lines:
            lines.write("x")
        return file.stat().st_size

    def prepare(self) -> None:
        self.prepared = True

    def prepare_for_long(self) -> None:
        time.sleep(0.5)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, idempotent=True)
    async def step(self, batch: DataProto, name: str) -> DataProto:
        """Adds one. At first, rank 1 never ends the step called slow, and no rank the one called slow on both."""
        assert batch.batch is not None
        times = self.count(name)
        if (name == "slow" and times == 1 and self.rank == 1) or (name == "slow on both" and times == 1):
            (self.folder / f"reached.{self.rank}").touch()
            await asyncio.sleep(TIMEOUT_S)
        return DataProto.from_dict(tensors={"x": batch.batch["x"] + 1})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def step_once(self, batch: DataProto, name: str) -> DataProto:
        return await self.step(batch, name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def about(self) -> tuple[int, int, str, bool]:
        return os.getpid(), self.rank, os.environ.get("GREETING", ""), self.prepared

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, idempotent=True)
    async def flaky(self, failures: int, kind: type[Exception]) -> int:
        times = self.count(kind.__name__)
        if times <= failures and self.rank == 1:
            raise kind("for now")
        return times


@pytest.fixture(scope="module", autouse=True)
def by_value() -> None:
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def make(backend: str, tmp_path: Path) -> Iterator[MakeGroup]:
    groups: list[WorkerGroup] = []

    def make(*, name: str, restart: Restart | None = None) -> WorkerGroup:
        group: WorkerGroup
        if backend == "local":
            made = ClassWithInitArgs(Stage, str(tmp_path))
            group = LocalWorkerGroup(made, world_size=2, name=name, restart=restart)
        else:
            from asyncrl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

            worker = RayClassWithInitArgs(Stage, str(tmp_path)).options(env_vars={"GREETING": "hello"})
            group = RayWorkerGroup(RayResourcePool([2]), worker, name=name, restart=restart)
        groups.append(group)
        return group

    yield make
    for group in groups:
        group.shutdown()


def kill(group: WorkerGroup, rank: int) -> None:
    """The real thing, where there are processes."""
    if isinstance(group, LocalWorkerGroup):
        group.kill(rank)
    else:
        os.kill(group.about().result(TIMEOUT_S)[rank][0], signal.SIGKILL)


def wait_for(file: Path) -> None:
    until = time.monotonic() + TIMEOUT_S
    while not file.exists():
        assert time.monotonic() < until
        time.sleep(0.005)


def chain(first: WorkerGroup, second: WorkerGroup, method: str) -> list[DataProtoFuture]:
    """Five calls, each of the last one's result, the groups in turn; the third is slow."""
    links: list[DataProtoFuture] = []
    made: Any = DataProto.from_dict(tensors={"x": torch.arange(4)})
    for number, name in enumerate(("one", "two", "slow", "four", "five")):
        made = getattr((first, second)[number % 2], method)(made, name)
        links.append(made)
    return links


def test_a_death_in_the_middle_of_a_chain_reaches_every_waiter(
    make: MakeGroup, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    first, second = make(name="first"), make(name="second")
    links = chain(first, second, "step_once")
    wait_for(tmp_path / "reached.1")
    process = None if isinstance(first, LocalWorkerGroup) else first.about().result(TIMEOUT_S)[1][0]
    begun = time.monotonic()
    if process is None:
        kill(first, 1)
    else:
        os.kill(process, signal.SIGKILL)
    errors = [link.exception(TIMEOUT_S) for link in links]
    took_s = time.monotonic() - begun
    record_property("seconds from SIGKILL until every waiter has its error", round(took_s, 3))
    print(f"every waiter had its error {took_s:.3f} s after the death")
    assert errors[:2] == [None, None]
    for error, travelled in zip(errors[2:], range(3), strict=True):
        assert isinstance(error, WorkerDiedError)
        assert (error.group, error.rank, error.method) == ("first", 1, "step_once")
        way = [note for note in getattr(error, "__notes__", ()) if "was an argument of" in note]
        assert len(way) == travelled
    # The others are as they were.
    assert [rank for _, rank, _, _ in second.about().result(TIMEOUT_S)] == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["worker", "group"])
def test_a_chain_is_made_again_from_what_had_finished(
    make: MakeGroup, tmp_path: Path, scope: Any, record_property: Callable[[str, object], None]
) -> None:
    first = make(name="first", restart=Restart(scope=scope, prepare="prepare"))
    second = make(name="second")
    before = first.about().result(TIMEOUT_S)
    links = chain(first, second, "step")
    wait_for(tmp_path / "reached.1")
    begun = time.monotonic()
    kill(first, 1)
    result = links[-1].result(TIMEOUT_S)
    took_s = time.monotonic() - begun
    record_property(f"seconds from SIGKILL until the chain is done again, scope {scope}", round(took_s, 3))
    print(f"the chain was done {took_s:.3f} s after the death, scope {scope}")
    assert result.batch is not None
    assert result.batch["x"].tolist() == [5, 6, 7, 8]
    # What had finished was not done again; what had not was, on all ranks.
    counts = {name: (tmp_path / f"first.{name}.1").stat().st_size for name in ("one", "slow", "five")}
    assert counts == {"one": 1, "slow": 2, "five": 1}
    assert (tmp_path / "second.two.0").stat().st_size == 1
    # The same ranks, with the same environment, in other processes; prepared as told.
    after = first.about().result(TIMEOUT_S)
    assert [(rank, greeting) for _, rank, greeting, _ in after] == [(rank, greeting) for _, rank, greeting, _ in before]
    assert [prepared for _, _, _, prepared in after] == [scope == "group", True]
    if not isinstance(first, LocalWorkerGroup):
        assert (after[0][0] == before[0][0], after[1][0] == before[1][0]) == (scope == "worker", False)


@pytest.mark.slow
def test_a_policy_is_spent_at_some_time(make: MakeGroup) -> None:
    group = make(name="first", restart=Restart(max_restarts=1, scope="worker"))
    group.ready().result(TIMEOUT_S)
    two = DataProto.from_dict(tensors={"x": torch.arange(2)})
    kill(group, 1)
    assert len(group.step(two, "first").result(TIMEOUT_S)) == 2
    kill(group, 1)
    with pytest.raises(WorkerDiedError):
        group.step(two, "second").result(TIMEOUT_S)


def test_a_call_is_sent_again_when_the_new_process_is_there_and_not_before(make: MakeGroup, tmp_path: Path) -> None:
    # The call is told of its failure after the new process has been begun, and before it is prepared.
    group = make(name="first", restart=Restart(scope="worker", backoff_s=0.0, prepare="prepare_for_long"))
    pids = group.about().result(TIMEOUT_S)
    late = group.step(DataProto.from_dict(tensors={"x": torch.arange(2)}), "slow on both")
    wait_for(tmp_path / "reached.0")
    wait_for(tmp_path / "reached.1")
    if isinstance(group, LocalWorkerGroup):
        group.kill(1)
    else:
        os.kill(pids[1][0], signal.SIGKILL)
    assert len(late.result(TIMEOUT_S)) == 2
    assert group.statistics().deaths == 1
    assert (tmp_path / "first.slow on both.1").stat().st_size == 2


@pytest.mark.parametrize("kind", [EngineError, WorkerDiedError])  # such a death is one of another group
def test_other_failures_are_not_repeated(make: MakeGroup, tmp_path: Path, kind: type[Exception]) -> None:
    group = make(name="first", restart=Restart(scope="worker"))
    with pytest.raises(kind, match="for now"):
        group.flaky(1, kind).result(TIMEOUT_S)
    assert (tmp_path / f"first.{kind.__name__}.1").stat().st_size == 1


class Peers(Worker):
    """Rank 1 hangs, and answers nothing any more, when rank 0 has lost the connection to it."""

    calls: ClassVar[Counter[int]] = Counter()
    given_up: ClassVar[asyncio.Event]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, idempotent=True)
    async def reduce(self) -> int:
        Peers.calls[self.rank] += 1
        if Peers.calls[self.rank] > 1:
            return self.rank
        if self.rank == 0:
            raise ConnectionError("closed by peer")
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(TIMEOUT_S)
        Peers.given_up.set()
        await asyncio.sleep(TIMEOUT_S)
        return -1


async def test_a_death_counts_that_is_known_after_the_error_of_a_peer() -> None:
    Peers.calls.clear()
    Peers.given_up = asyncio.Event()
    restart = Restart(backoff_s=0.0)
    async with LocalWorkerGroup(ClassWithInitArgs(Peers), world_size=2, loop="current", restart=restart) as group:
        reduced = group.reduce()
        await Peers.given_up.wait()
        group.kill(1)
        assert await reduced == [0, 1]
        assert group.statistics().restarts == 1


async def test_workers_whose_replacements_die_with_another_are_replaced_again(tmp_path: Path) -> None:
    class Unlucky(LocalWorkerGroup):
        replaced: list[list[int]] = []  # noqa: RUF012  of the one instance

        async def _replace(self, ranks: Sequence[int], prepare: str) -> list[Failed | None]:
            self.replaced.append(list(ranks))
            if len(self.replaced) == 1:
                raise WorkerDiedError("died while it was constructed", rank=2)
            return await super()._replace(ranks, prepare)

    restart = Restart(scope="worker", backoff_s=0.0)
    made = ClassWithInitArgs(Stage, str(tmp_path))
    async with Unlucky(made, world_size=3, loop="current", restart=restart) as group:
        group.kill(0)
        group.kill(2)
        await asyncio.sleep(0)
        assert len(await group.about()) == 3
        assert group.replaced == [[0, 2], [0, 2]]
        assert group.statistics().dead == ()


def test_pauses_are_numbers_that_do_not_overflow() -> None:
    with pytest.raises(DispatchError, match="backoff_s"):
        Restart(backoff_s=math.nan)
    assert Restart(max_restarts=5000, backoff_s=0.0).pause_s(4999) == 0.0
    assert Restart(backoff_s=0.5).pause_s(2) == 2.0
