"""Batches split over the dp ranks of a mesh, on both backends."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.errors import DispatchError
from asyncrl.single_controller import (
    ClassWithInitArgs,
    Dispatch,
    Execute,
    Worker,
    WorkerGroup,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from asyncrl.single_controller.local import LocalWorkerGroup
from asyncrl.single_controller.mesh import Mesh, MeshPosition

TIMEOUT_S = 30.0
ACTOR = make_nd_compute_dataproto_dispatch_fn("actor")


class Parallel(Worker):
    """Four ranks: two dp ranks of two tensor parallel ranks each, of which the second one answers."""

    def __init__(self, *, at_once: bool = True) -> None:
        super().__init__()
        self.seen: list[list[int]] = []
        self.gate = threading.Event()
        if at_once:
            self.join()

    def join(self) -> None:
        dp_rank, tp_rank = divmod(self.rank, 2)
        self._register_dispatch_collect_info("actor", dp_rank=dp_rank, is_collect=tp_rank == 1)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, *, waits: bool = False) -> None:
        if waits:
            assert self.gate.wait(TIMEOUT_S)
        self.join()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def hold(self) -> None:
        assert self.gate.wait(TIMEOUT_S)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def open(self) -> None:
        self.gate.set()

    @register(dispatch_mode=ACTOR)
    def update(self, batch: DataProto, scale: int = 1) -> DataProto:
        return self.answer(batch, scale)

    @register(dispatch_mode=ACTOR)
    async def infer(self, batch: DataProto, *, scale: int = 1) -> DataProto | None:
        """Ranks that do not answer have nothing to say."""
        answer = self.answer(batch, scale)
        return answer if self.query_collect_info("actor") else None

    def answer(self, batch: DataProto, scale: int) -> DataProto:
        assert batch.batch is not None
        self.seen.append(batch.batch["x"].tolist())
        rank = torch.full((len(batch),), self.rank)
        return DataProto.from_dict(tensors={"x": batch.batch["x"] * scale, "rank": rank})

    @register(dispatch_mode=ACTOR)
    def nothing(self, batch: DataProto | None = None) -> DataProto | None:
        return None

    @register(dispatch_mode=replace(ACTOR, joins=False), pad=False)
    def measure(self, batch: DataProto) -> dict[str, int]:
        return {"rank": self.rank, "rows": len(batch)}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rows_seen(self) -> list[list[int]]:
        seen, self.seen = self.seen, []
        return seen


@pytest.fixture(scope="module", autouse=True)
def by_value(backend: str) -> None:
    if backend == "ray":
        import ray.cloudpickle

        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def group(make_group: Callable[..., WorkerGroup]) -> WorkerGroup:
    return make_group(Parallel, world_size=4, name="parallel")


def batch(count: int) -> DataProto:
    return DataProto.from_dict(tensors={"x": torch.arange(count)})


def columns(data: DataProto) -> tuple[list[int], list[int]]:
    assert data.batch is not None
    return data.batch["x"].tolist(), data.batch["rank"].tolist()


def test_ranks_of_one_dp_rank_get_the_same_rows_and_one_of_them_answers(group: WorkerGroup) -> None:
    result = group.update(batch(4), scale=10).result(TIMEOUT_S)
    assert columns(result) == ([0, 10, 20, 30], [1, 1, 3, 3])
    assert group.rows_seen().result(TIMEOUT_S) == [[[0, 1]], [[0, 1]], [[2, 3]], [[2, 3]]]


def test_padding_is_for_dp_ranks_and_comes_off(group: WorkerGroup) -> None:
    given = batch(5)
    result = group.infer(batch=given, scale=2).result(TIMEOUT_S)
    assert columns(result) == ([0, 2, 4, 6, 8], [1, 1, 1, 3, 3])
    assert group.rows_seen().result(TIMEOUT_S) == [[[0, 1, 2]], [[0, 1, 2]], [[3, 4, 4]], [[3, 4, 4]]]
    assert len(given) == 5


def test_values_of_ranks_that_answer_are_listed(group: WorkerGroup) -> None:
    assert group.measure(batch(3)).result(TIMEOUT_S) == [{"rank": 1, "rows": 2}, {"rank": 3, "rows": 1}]


def test_futures_are_split_too(group: WorkerGroup) -> None:
    first = group.update(batch(6))
    assert isinstance(first, DataProtoFuture)
    second = group.infer(batch=first.slice(1, 5).select(["x"]), scale=3)
    assert columns(second.result(TIMEOUT_S)) == ([3, 6, 9, 12], [1, 1, 3, 3])
    group.rows_seen().result(TIMEOUT_S)


def test_no_batch_and_no_answer(group: WorkerGroup) -> None:
    for call in (group.nothing(), group.nothing(batch(2))):
        with pytest.raises(DispatchError, match=r"returned NoneType on rank 1, and mesh 'actor' joins batches"):
            call.result(TIMEOUT_S)


def test_the_driver_may_ask_for_places(group: WorkerGroup) -> None:
    assert group.execute_all("query_dispatch_info", "actor").result(TIMEOUT_S) == [0, 0, 1, 1]
    assert group.execute_all("query_collect_info", "actor").result(TIMEOUT_S) == [False, True, False, True]
    with pytest.raises(DispatchError, match=r"rank 0 is not in mesh 'critic', only in \['actor'\]"):
        group.execute_all("query_collect_info", "critic").result(TIMEOUT_S)


def test_the_first_call_waits_for_nothing() -> None:
    with LocalWorkerGroup(ClassWithInitArgs(Parallel), world_size=2) as busy:
        held = busy.hold()
        # Plain methods stand in line behind `hold`; the question for the mesh and the async method do not.
        assert columns(busy.infer(batch(2)).result(TIMEOUT_S)) == ([0, 1], [1, 1])
        assert not held.done()
        busy.open().result(TIMEOUT_S)
        held.result(TIMEOUT_S)


def test_a_method_called_before_may_register_the_mesh() -> None:
    with LocalWorkerGroup(ClassWithInitArgs(LateParallel), world_size=2, name="late") as late:
        with pytest.raises(DispatchError, match=r"ranks \[0, 1\] of late are not in mesh 'actor': call"):
            late.update(batch(2)).result(TIMEOUT_S)
        started = late.init_model(waits=True)
        updated = late.update(batch(2))
        seen = late.rows_seen()
        late.open().result(TIMEOUT_S)  # passes, being async: the plain ones wait for init_model
        assert columns(updated.result(TIMEOUT_S)) == ([0, 1], [1, 1])
        assert seen.result(TIMEOUT_S) == [[[0, 1]], [[0, 1]]]
        started.result(TIMEOUT_S)


def test_calls_keep_their_order_while_the_mesh_is_asked_for() -> None:
    with LocalWorkerGroup(ClassWithInitArgs(Parallel), world_size=2) as fresh:
        calls = [fresh.update(batch(2)), fresh.rows_seen(), fresh.update(batch=batch(1)), fresh.rows_seen()]
        results = [call.result(TIMEOUT_S) for call in calls]
        assert results[1] == [[[0, 1]], [[0, 1]]]
        assert results[3] == [[[0]], [[0]]]


class LateParallel(Parallel):
    def __init__(self) -> None:
        super().__init__(at_once=False)


class Lonely(Worker):
    def __init__(self) -> None:
        super().__init__()
        self._register_dispatch_collect_info("actor", dp_rank=0, is_collect=False)

    @register(dispatch_mode=ACTOR)
    def update(self, batch: DataProto) -> DataProto:
        return batch


class Remembering(Parallel):
    """Its results, as long as any else keeps them."""

    results: ClassVar[list[weakref.ref[DataProto]]] = []

    def answer(self, batch: DataProto, scale: int) -> DataProto:
        result = super().answer(batch, scale)
        self.results.append(weakref.ref(result))
        return result


async def test_a_result_keeps_no_batch_of_ranks_that_do_not_answer() -> None:
    async with LocalWorkerGroup(ClassWithInitArgs(Remembering), world_size=4, loop="current") as group:
        result = group.update(batch(4))
        await result.header()
        gc.collect()
        assert [made() is not None for made in Remembering.results].count(True) == 2
        assert columns(await result) == ([0, 1, 2, 3], [1, 1, 3, 3])


# ---------------------------------------------------------------------------------------------------- without a backend


def places(*each: tuple[int, bool]) -> list[MeshPosition]:
    return [MeshPosition(*place) for place in each]


def test_a_mesh_takes_one_result_for_each_dp_rank_in_their_order() -> None:
    mesh = Mesh.of(places((1, True), (0, False), (1, False), (0, True)), name="m")
    assert (mesh.dp_size, mesh.dp_ranks, mesh.collectors) == (2, (1, 0, 1, 0), (3, 0))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (places((0, True), (2, True)), r"0 to n-1 without gaps, the workers registered \[0, 2\]"),
        (places((0, True), (1, False)), "dp rank 1 of mesh 'm' must have exactly one collecting rank, it has none"),
        (places((0, True), (0, True)), r"it has \[0, 1\]"),
    ],
)
def test_what_is_no_mesh_is_refused(wrong: list[MeshPosition], message: str) -> None:
    with pytest.raises(DispatchError, match=message):
        Mesh.of(wrong, name="m")


def test_a_mesh_without_collecting_ranks_is_refused() -> None:
    expected = pytest.raises(DispatchError, match="dp rank 0 of mesh 'actor' must have")
    with LocalWorkerGroup(ClassWithInitArgs(Lonely)) as lonely, expected:
        lonely.update(batch(2)).result(TIMEOUT_S)


def test_a_worker_has_one_place_in_a_mesh() -> None:
    worker = Lonely()
    with pytest.raises(DispatchError, match=r"mesh 'actor' is already registered on rank 0: MeshPosition\(dp_rank=0"):
        worker._register_dispatch_collect_info("actor", 1, True)
    with pytest.raises(DispatchError, match="at least 0, got -1"):
        worker._register_dispatch_collect_info("critic", -1, True)
    assert Lonely().query_dispatch_info("actor") == 0


def test_a_mesh_needs_all_its_ranks_and_workers() -> None:
    with pytest.raises(DispatchError, match="execute_mode must be"):
        register(dispatch_mode=ACTOR, execute_mode=Execute.RANK_ZERO)

    class Plain:
        @register(dispatch_mode=ACTOR)
        def update(self, batch: DataProto) -> DataProto:
            return batch

    with pytest.raises(DispatchError, match="its class must be a Worker"):
        LocalWorkerGroup(ClassWithInitArgs(Plain))


async def test_cancelling_the_first_call_leaves_the_question_to_the_others() -> None:
    async with LocalWorkerGroup(ClassWithInitArgs(Parallel), world_size=2, loop="current") as group:
        first, second = group.infer(batch(2)), group.infer(batch(2))
        await asyncio.sleep(0)
        assert first.cancel()
        assert columns(await second) == ([0, 1], [1, 1])
