"""Workers and calls as verl has them, in one process: what each mode gives to which rank, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from asyncrl.compat.verl import (
    ClassWithInitArgs,
    DataProto,
    DataProtoFuture,
    Dispatch,
    Execute,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    ResourcePool,
    ResourcePoolManager,
    SubRayResourcePool,
    Worker,
    collect_all_to_all,
    collect_dp_compute,
    collect_nd_compute,
    create_colocated_worker_cls,
    create_colocated_worker_raw_cls,
    dispatch_all_to_all,
    dispatch_dp_compute,
    dispatch_nd_compute,
    dispatch_one_to_all,
    get_predefined_dispatch_fn,
    make_nd_compute_dataproto_dispatch_fn,
    merge_resource_pool,
    register,
    register_dispatch_mode,
    split_resource_pool,
)
from asyncrl.errors import DispatchError, ResourceError
from asyncrl.single_controller.local import LocalWorkerGroup


def dealt_twice(worker_group: Any, *args: Any, **kwargs: Any) -> Any:
    """Lists of two: the first to even ranks, the second to odd ones."""
    ranks = range(worker_group.world_size)
    return (
        tuple([each[rank % 2] for rank in ranks] for each in args),
        {name: [each[rank % 2] for rank in ranks] for name, each in kwargs.items()},
    )


class Member(Worker):
    """Four ranks: two dp ranks of two tp ranks each."""

    def __init__(self, start: int = 0) -> None:
        super().__init__()
        self.start = start
        self._register_dispatch_collect_info("mesh", dp_rank=self.rank // 2, is_collect=self.rank % 2 == 0)

    @register()
    def plain(self, x: int, y: int = 0) -> int:
        return self.start + x + y + self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def one_to_all(self, x: Any) -> Any:
        return (self.rank, x)

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def later(self, x: int) -> int:
        return x + self.rank

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def rank_zero(self, x: Any, y: int) -> Any:
        return (self.rank, x, y)

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def own(self, x: int) -> int:
        return 10 * x

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def add(self, data: DataProto) -> DataProto:
        data.batch["x"] += self.rank  # type: ignore[index]
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def add_later(self, data: DataProto, other: DataProto) -> DataProto:
        return DataProto.from_dict({"x": data.batch["x"] + other.batch["x"]})  # type: ignore[index]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def count(self, data: DataProto) -> int:
        return len(data)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="mesh"))
    def in_mesh(self, data: DataProto) -> DataProto:
        data.batch["x"] += 10 * (self.rank // 2) + 100 * (self.rank % 2)  # type: ignore[index]
        return data

    @register(dispatch_mode={"dispatch_fn": dealt_twice, "collect_fn": collect_all_to_all})
    def dealt(self, x: int, y: int) -> int:
        return x + y + self.rank

    def hidden(self, x: int) -> int:
        return x - self.rank


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    with LocalWorkerGroup(ClassWithInitArgs(Member, start=100), world_size=4) as made:
        yield made


def x(*values: int) -> DataProto:
    return DataProto.from_dict({"x": torch.tensor(values)})


def values(data: DataProto) -> list[int]:
    assert data.batch is not None
    found: list[int] = data.batch["x"].tolist()
    return found


def ranked(worker: Any, data: DataProto) -> DataProto:
    """Sent to the workers."""
    return DataProto.from_dict({"x": data.batch["x"] + 100 * worker.rank})  # type: ignore[index]


CALLS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "all to all, lists": (lambda g: g.plain([1, 2, 3, 4]), [101, 103, 105, 107]),
    "all to all, lists by name": (lambda g: g.plain(x=[1, 2, 3, 4], y=[1] * 4), [102, 104, 106, 108]),
    "all to all, the same for all": (lambda g: g.plain(1, y=2), [103, 104, 105, 106]),
    "one to all": (lambda g: g.one_to_all("a"), [(0, "a"), (1, "a"), (2, "a"), (3, "a")]),
    "one to all, a list is one value": (lambda g: g.one_to_all([1, 2])[3], (3, [1, 2])),
    "one to all, a list of four is one value": (lambda g: g.one_to_all([1, 2, 3, 4])[3], (3, [1, 2, 3, 4])),
    "rank zero": (lambda g: g.rank_zero([1, 2], y=3), (0, [1, 2], 3)),
    "dp compute": (lambda g: g.own([1, 2, 3, 4]), [10, 20, 30, 40]),
    "custom": (lambda g: g.dealt([1, 2], y=[10, 20]), [11, 23, 13, 25]),
    "later": (lambda g: g.later(5).get(), [5, 6, 7, 8]),
    "batch": (lambda g: values(g.add(x(0, 0, 0, 0))), [0, 1, 2, 3]),
    "batch by name": (lambda g: values(g.add(data=x(0, 0, 0, 0, 0, 0, 0, 0))), [0, 0, 1, 1, 2, 2, 3, 3]),
    "batch of fewer rows than ranks": (lambda g: values(g.add(x(5))), [5]),
    "batch whose rows do not divide": (lambda g: values(g.add(x(0, 0, 0, 0, 0))), [0, 0, 1, 2, 3]),
    "two batches, later": (lambda g: values(g.add_later(x(1, 2, 3, 4), other=x(1, 1, 1, 1)).get()), [2, 3, 4, 5]),
    "a future as argument": (lambda g: values(g.add(g.add_later(x(1, 2, 3, 4), x(0, 0, 0, 0)))), [1, 3, 5, 7]),
    "metrics": (lambda g: g.count(x(1, 2, 3, 4, 5, 6, 7, 8)), [2, 2, 2, 2]),
    "mesh": (lambda g: values(g.in_mesh(x(1, 2, 3, 4))), [1, 2, 13, 14]),
    "mesh by name": (lambda g: values(g.in_mesh(data=x(1, 2))), [1, 12]),
    "places in the mesh": (lambda g: g._query_dispatch_info("mesh"), [0, 0, 1, 1]),
    "who collects in the mesh": (lambda g: g._query_collect_info("mesh"), [True, False, True, False]),
    "function with the worker": (lambda g: values(g.execute_with_func_generator(ranked, x(1, 2, 3))), [1, 102, 203]),
    "function on rank zero": (lambda g: g.execute_func_rank_zero(max, 1, 2), 2),
    "any method on all": (lambda g: g.execute_all_sync("hidden", x=5), [5, 4, 3, 2]),
    "any method on all, later": (lambda g: g.execute_all_async("hidden", 5).get(), [5, 4, 3, 2]),
    "any method on rank zero": (lambda g: g.execute_rank_zero_sync("hidden", 5), 5),
    "any method on rank zero, later": (lambda g: g.execute_rank_zero_async("hidden", x=5).get(), 5),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(group: Any, name: str) -> None:
    call, expected = CALLS[name]
    assert call(group) == expected


def test_what_is_not_blocking_is_a_future(group: Any) -> None:
    assert isinstance(group.add_later(x(1), x(2)), DataProtoFuture)
    assert isinstance(group.add(x(1)), DataProto)
    batch = x(1, 2, 3)
    group.add(batch)
    assert values(batch) == [1, 2, 3]  # a call never changes the caller's batch


def test_methods_are_methods() -> None:
    worker = Member(start=1)
    assert worker.plain(1) == 2
    assert worker.one_to_all("a") == (0, "a")


def test_a_workers_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "8"), ("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "1234")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    worker = Worker()
    assert (worker.rank, worker.world_size, worker._rank, worker._world_size) == (3, 8, 3, 8)
    assert worker.get_master_addr_port() == ("10.0.0.1", "1234")
    assert (worker._master_addr, worker._master_port) == ("10.0.0.1", "1234")
    assert worker.get_cuda_visible_devices() == "5"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert worker.get_cuda_visible_devices() == "not set"
    assert set(Worker.env_keys()) >= {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    assert Worker.fused_worker_attr_name == "fused_worker_dict"
    assert worker.fused_worker_dict == {}
    assert worker.get_fused_worker_by_name("actor") is None


def test_meshes_of_workers_inside() -> None:
    reference, actor, both = Worker(), Worker(), Worker()
    reference._register_dispatch_collect_info(mesh_name="actor", dp_rank=0, is_collect=True)
    actor._register_dispatch_collect_info(mesh_name="actor", dp_rank=1, is_collect=False)
    assert actor.get_dispatch_collect() == {"dispatch_dp_rank": {"actor": 1}, "collect_dp_rank": {"actor": False}}
    both.set_dispatch_collect(mesh_name="ref", **reference.get_dispatch_collect())
    both.set_dispatch_collect(mesh_name="actor", **actor.get_dispatch_collect())
    assert (both._query_dispatch_info("ref"), both._query_collect_info("ref")) == (0, True)
    assert (both._query_dispatch_info("actor"), both.query_collect_info("actor")) == (1, False)
    with pytest.raises(DispatchError):
        both.set_dispatch_collect(mesh_name="actor", **actor.get_dispatch_collect())
    with pytest.raises(ValueError, match="registered"):
        actor._register_dispatch_collect_info("actor", dp_rank=0, is_collect=True)


def test_roles_in_one_process() -> None:
    made = {"actor": ClassWithInitArgs(Member, start=0), "critic": ClassWithInitArgs(Member, start=50)}
    with LocalWorkerGroup(create_colocated_worker_cls(made), world_size=2) as group:
        roles: Any = group.spawn(prefix_set={"actor", "critic"})
        assert roles["critic"].plain(1) == [51, 52]
        assert group.actor_plain(1) == [1, 2]

    class Hybrid(create_colocated_worker_raw_cls(made)):  # type: ignore[misc]
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def both(self, x: int) -> int:
            found: int = self.critic.plain(self.actor.plain(x))
            return found

    with LocalWorkerGroup(ClassWithInitArgs(Hybrid), world_size=2) as group:
        assert group.both(1) == [51, 53]
        assert group.critic_plain(1) == [51, 52]


def test_functions_of_the_modes(group: Any) -> None:
    assert dispatch_one_to_all(group, 7, flag=1) == (([7] * 4,), {"flag": [1] * 4})
    assert dispatch_all_to_all(group, [1], y=2) == (([1],), {"y": 2})
    assert dispatch_dp_compute(group, (1, 2, 3, 4)) == (((1, 2, 3, 4),), {})
    assert collect_dp_compute(group, [1, 2, 3, 4]) == [1, 2, 3, 4]
    assert dispatch_nd_compute([0, 0, 1, 1], 2, group, [5, 6], y=[7, 8]) == (([5, 5, 6, 6],), {"y": [7, 7, 8, 8]})
    assert collect_nd_compute([True, False, True, False], group, [1, 2, 3, 4]) == [1, 3]
    for wrong in ([1, 2], 3):
        with pytest.raises(DispatchError):
            dispatch_dp_compute(group, wrong)


def test_modes_by_name() -> None:
    def dispatch(worker_group: Any, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    register_dispatch_mode("as_they_are", dispatch, collect_all_to_all)
    mode: Any = Dispatch.AS_THEY_ARE  # type: ignore[attr-defined]  # capitals, as in verl
    assert get_predefined_dispatch_fn(mode) == {"dispatch_fn": dispatch, "collect_fn": collect_all_to_all}
    with pytest.raises(ValueError, match="it exists"):
        register_dispatch_mode("AS_THEY_ARE", dispatch, collect_all_to_all)
    del Dispatch.AS_THEY_ARE  # type: ignore[attr-defined]


def test_pools() -> None:
    pool = ResourcePool([2, 3])
    assert (pool.world_size, pool(), pool.store) == (5, [2, 3], [2, 3])
    assert pool.local_world_size_list() == [2, 2, 3, 3, 3]
    assert pool.local_rank_list() == [0, 1, 0, 1, 2]
    pool.add_node(1)
    assert pool.world_size == 6
    assert ResourcePool(None).store == ResourcePool().store == RayResourcePool().store == []
    gpus = ResourcePoolManager({"training": [8, 8], "generation": [4]}, {"actor": "training"}).get_n_gpus()
    assert (gpus, type(gpus)) == (20, int)
    whole = RayResourcePool([4, 4])
    assert (whole.use_gpu, whole.max_colocate_count, whole.pgs) == (True, 10, None)
    halves = split_resource_pool(resource_pool=whole, split_size=4)
    assert [(type(half), half.world_size) for half in halves] == [(SubRayResourcePool, 4)] * 2
    assert [part.world_size for part in split_resource_pool(halves[1], [1, 3])] == [1, 3]
    assert merge_resource_pool(RayResourcePool([2]), RayResourcePool([3])).store == [2, 3]
    with pytest.raises(ResourceError, match="device_name"):
        whole.get_placement_groups(device_name="npu")


REFUSED: dict[str, dict[str, Any]] = {
    "no pool": {"resource_pool": None},
    "detached": {"detached": True},
    "names of workers": {"worker_names": ["a"]},
    "a device": {"device_name": "npu"},
    "profiling": {"profile_steps": [1]},
    "unheard of": {"unheard_of": 1},
    "a worker's place": {"worker_env": {"WORLD_SIZE": "100"}},
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_are_refused(name: str) -> None:
    given = {"resource_pool": RayResourcePool([1], use_gpu=False), **REFUSED[name]}
    with pytest.raises(ResourceError):
        RayWorkerGroup(ray_cls_with_init=RayClassWithInitArgs(Member), **given)
