"""What only the Ray backend has: processes that die, placement, payloads that stay with the workers."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.exceptions
import torch

from asyncrl.data import DataProto, codec
from asyncrl.errors import DispatchError, ResourceError, WorkerDiedError, WorkerError
from asyncrl.single_controller import Dispatch, Execute, Worker, register
from asyncrl.single_controller.call import Arguments, Call, Failed
from asyncrl.single_controller.invocation import SIBLING_GRACE_S
from asyncrl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from asyncrl.single_controller.ray import host as host_module
from asyncrl.single_controller.ray.backend import RayReply

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

TIMEOUT_S = 30.0


class Member(Worker):
    def __init__(self, greeting: str = "") -> None:
        super().__init__()
        self.greeting = greeting

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def echo(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def sums(self, batch: DataProto) -> float:
        assert batch.batch is not None
        return float(batch.batch["x"].sum())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def process(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def environment(self, *names: str) -> list[str]:
        return [os.environ.get(name, "") for name in names]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def hang(self) -> None:
        time.sleep(60)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def end(self) -> None:
        os._exit(7)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def take(self, value: Any) -> str:
        return type(value).__name__

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def add_one(self, batch: DataProto) -> list[int]:
        assert batch.batch is not None
        batch.batch["x"] += 1
        added: list[int] = batch.batch["x"].tolist()
        return added

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    async def take_own(self, value: Any) -> str:
        return type(value).__name__

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def give(self) -> Any:
        return (each for each in ())


@pytest.fixture(scope="module", autouse=True)
def by_value() -> None:
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def group() -> Iterator[RayWorkerGroup]:
    worker = RayClassWithInitArgs(ray.remote(num_cpus=1)(Member), "hello").options(env_vars={"GREETING": 5})
    with RayWorkerGroup(RayResourcePool([1, 1]), worker, name="members") as group:
        yield group


def large(rows: int = 4) -> DataProto:
    """Rows of one megabyte: numbers far above what travels inside a call."""
    return DataProto.from_dict(tensors={"x": torch.arange(rows)[:, None].expand(rows, 131_072).contiguous()})


def test_workers_get_the_variables_of_spmd_programs(group: RayWorkerGroup) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GREETING")
    first, second = group.environment(*names).result(TIMEOUT_S)
    assert (first, second) == (["0", "2", "0", "2", "5"], ["1", "2", "1", "2", "5"])
    addresses = group.environment("MASTER_ADDR", "MASTER_PORT").result(TIMEOUT_S)
    assert addresses[0] == addresses[1]
    assert int(addresses[0][1]) > 0


def test_a_reference_of_rays_own_stands_for_its_value(group: RayWorkerGroup) -> None:
    assert group.take(ray.put(7)).result(TIMEOUT_S) == ["int", "int"]
    assert group.take(value=ray.put(DataProto.from_dict({"x": torch.arange(2)}))).result(TIMEOUT_S) == ["DataProto"] * 2
    assert group.take([ray.put(7)]).result(TIMEOUT_S) == ["list", "list"]
    batch = ray.put(DataProto.from_dict({"x": torch.arange(2)}))
    for _ in range(2):  # each receiver has its own
        assert group.add_one(batch).result(TIMEOUT_S) == [[1, 2], [1, 2]]
    assert group.take_own([ray.put("one"), 2]).result(TIMEOUT_S) == ["str", "int"]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "kept"), [({}, False), ({"enable_task_events": True}, True)])
def test_ray_keeps_no_record_of_each_call_unless_it_is_asked_to(options: dict[str, bool], kept: bool) -> None:
    worker = RayClassWithInitArgs(Member, "hello").options(**options)
    with RayWorkerGroup(RayResourcePool([1]), worker) as group:
        group.ready().result(TIMEOUT_S)
        (handle,) = group._actors.handles
        assert handle.call._enable_task_events is kept


def test_processes_are_named_after_their_group_and_rank(group: RayWorkerGroup) -> None:
    titles = [Path(f"/proc/{process}/cmdline").read_text() for process in group.process().result(TIMEOUT_S)]
    assert [title.rstrip(" \0") for title in titles] == ["ray::members[0]", "ray::members[1]"]


def test_a_future_handed_on_moves_no_payload_through_the_driver(
    group: RayWorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[int] = []
    original = codec.decode

    @functools.wraps(original)
    def counting(header: bytes, buffers: list[Any]) -> DataProto:
        received.append(sum(memoryview(buffer).nbytes for buffer in buffers))
        return original(header, buffers)

    monkeypatch.setattr(codec, "decode", counting)
    future = group.echo(group.echo(large()).slice(1, 3))
    assert group.sums(future).result(TIMEOUT_S) == [131_072.0, 262_144.0]
    assert received == []
    # The count counts: asking for the rows does bring them here.
    assert len(future.result(TIMEOUT_S)) == 2
    assert sum(received) >= 2 << 20


def test_what_cannot_be_pickled_is_named_and_the_group_goes_on(group: RayWorkerGroup) -> None:
    with pytest.raises(DispatchError, match=r"an argument of members\.take cannot be pickled"):
        group.take(each for each in ()).result(TIMEOUT_S)
    with pytest.raises(WorkerError, match=r"members\.give failed on rank"):
        group.give().result(TIMEOUT_S)
    assert group.take(3).result(TIMEOUT_S) == ["int", "int"]


def test_a_reply_that_an_interrupted_thread_gets_again_is_counted_once() -> None:
    counted, handled = [], []
    group: Any = SimpleNamespace(_count_reply=lambda rank, keeping, *, small: counted.append(rank))
    invocation: Any = SimpleNamespace(handle_reply=lambda rank, *reply: handled.append(rank))
    reply = RayReply(group, 1, None, None, ray.put(None), None, invocation)
    for _ in range(2):
        reply(None)
    assert (counted, handled) == ([1], [1, 1])  # the invocation drops the second one itself


def test_a_reply_that_is_no_batch_fails_its_call() -> None:
    batch = DataProto.from_dict(tensors={"x": torch.arange(2)})
    batch.non_tensor_batch["y"] = [1]  # type: ignore[assignment]
    reply, kept = host_module._encoded(batch, Call(method="give", arguments=Arguments((), {}), to_fetch=False))
    assert isinstance(reply, Failed)
    assert (reply.kind, kept) == ("SchemaError", None)


class Lost:
    """A value that cannot be loaded, which is found out after a while."""

    def __init__(self, after_s: float) -> None:
        self.after_s = after_s

    def __reduce__(self) -> Any:
        return fail_late, (self.after_s,)


def fail_late(after_s: float) -> None:
    time.sleep(after_s)
    raise ValueError("it cannot be loaded")


def test_arguments_that_are_lost_one_after_the_other_hold_up_no_later_call(group: RayWorkerGroup) -> None:
    late_s = 4 * SIBLING_GRACE_S
    with pytest.raises(WorkerError, match=r"members\.take_own failed on rank 0 in transit"):
        group.take_own([Lost(0.0), Lost(late_s)]).result(TIMEOUT_S)
    assert group.take_own([1, 2]).result(TIMEOUT_S) == ["int", "int"]


def test_an_object_of_an_actor_that_died_is_no_death_of_a_worker(group: RayWorkerGroup) -> None:
    @ray.remote(num_cpus=0)
    class Mortal:
        def end(self) -> None:
            os._exit(7)

    with pytest.raises(WorkerError, match=r"members\.take failed on rank 0 in transit"):
        group.take(Mortal.remote().end.remote()).result(TIMEOUT_S)
    assert group.take(3).result(TIMEOUT_S) == ["int", "int"]


def test_a_process_that_rays_memory_monitor_killed_has_died(group: RayWorkerGroup) -> None:
    killed = ray.exceptions.OutOfMemoryError("1 worker(s) were killed due to the node running low on memory.\nDetails")
    error = group._explain(1, "take", killed)
    assert isinstance(error, WorkerDiedError)
    assert str(error) == (
        "the process of rank 1 of members died during take: "
        "1 worker(s) were killed due to the node running low on memory."
    )
    of_an_argument = ray.exceptions.RayTaskError("take", "its traceback", killed)
    for each in (of_an_argument, of_an_argument.as_instanceof_cause()):
        assert not isinstance(group._explain(1, "take", each), WorkerDiedError)


def test_a_process_that_was_out_of_reach_is_killed(group: RayWorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    watched, killed = list[Any](), list[object]()
    monkeypatch.setattr(ray, "kill", killed.append)
    monkeypatch.setattr(group._restarts, "died", lambda *_: killed.append("died"))
    pending = SimpleNamespace(_on_completed=watched.append)
    handle = SimpleNamespace(wait_released=SimpleNamespace(remote=lambda: pending))
    group._watch_actor(1, handle)
    watched[0](ray.exceptions.ActorUnavailableError("its connection broke", None))
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), group._loop.loop).result(TIMEOUT_S)
    assert killed == [handle, "died"]


def test_a_bundle_is_used_by_one_group_only(group: RayWorkerGroup) -> None:
    second = RayWorkerGroup(group.resource_pool, RayClassWithInitArgs(Member))
    with pytest.raises(ResourceError, match="shared by 1 worker groups already"):
        second.ready().result(TIMEOUT_S)


def test_what_the_cluster_never_has_is_refused_at_once() -> None:
    with pytest.raises(ResourceError, match=r"(?s)requested: 9 CPU.*in total:  8 CPU.*node .*: 8 CPU"):
        RayWorkerGroup(RayResourcePool([9]), RayClassWithInitArgs(Member))
    with pytest.raises(ResourceError, match="requested: 1 CPU, 1 GPU"):
        RayWorkerGroup(RayResourcePool([1], use_gpu=True), RayClassWithInitArgs(Member))
    with pytest.raises(ResourceError, match=r"needs 2 CPU, and its bundle .* has 1"):
        RayWorkerGroup(RayResourcePool([1]), RayClassWithInitArgs(Member).options(num_cpus=2))


def test_options_that_would_not_be_used_are_refused() -> None:
    with pytest.raises(ResourceError, match=r"options \['max_restarts'\] cannot be used"):
        RayClassWithInitArgs(ray.remote(max_restarts=3)(Member))


def test_what_others_hold_is_waited_for_with_a_deadline(group: RayWorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = RayResourcePool([8], placement_timeout_s=0.2)
    release, on_loops = pool.release, list[object]()
    monkeypatch.setattr(pool, "release", lambda: (on_loops.append(asyncio._get_running_loop()), release()))
    with pytest.raises(ResourceError, match=r"(?s)within 0\.2 s.*requested: 8 CPU.*available now: 6 CPU"):
        RayWorkerGroup(pool, RayClassWithInitArgs(Member)).ready().result(TIMEOUT_S)
    assert on_loops == [None], "it blocks while a placement group is pending"


def test_a_process_that_dies_fails_its_calls_at_once_and_frees_its_bundles(group: RayWorkerGroup) -> None:
    assert group.world_size == 2
    mortal = RayWorkerGroup(RayResourcePool([2]), RayClassWithInitArgs(Member), name="mortal")
    processes = mortal.process().result(TIMEOUT_S)
    call = mortal.hang()
    mortal.process().result(TIMEOUT_S)
    os.kill(processes[1], signal.SIGKILL)
    with pytest.raises(WorkerDiedError) as caught:
        call.result(timeout=2.0)
    assert (caught.value.group, caught.value.rank, caught.value.method) == ("mortal", 1, "hang")
    assert caught.value.cause
    with pytest.raises(WorkerDiedError):
        mortal.process().result(timeout=2.0)
    # Rank 0 still hangs in its synchronous method, which keeps neither it nor the bundles.
    mortal.shutdown(timeout_s=0.2)
    everything_else = RayResourcePool([6])
    groups = everything_else.acquire()
    try:
        assert groups[0].wait(TIMEOUT_S)
    finally:
        everything_else.release()


def test_a_batch_that_was_returned_outlives_its_worker_also_when_the_last_one_was_small() -> None:
    group = RayWorkerGroup(RayResourcePool([1]), RayClassWithInitArgs(Member), name="leaving")
    assert len(group.echo(DataProto.from_dict({"x": torch.arange(2)})).result(TIMEOUT_S)) == 2
    returned = group.echo(large())
    assert group.sums(returned).result(TIMEOUT_S) == [131_072.0 * 6]
    with pytest.raises(WorkerDiedError):
        group.end().result(TIMEOUT_S)
    time.sleep(2.5)  # Ray frees what a dead process owned a second later
    assert len(returned.result(TIMEOUT_S)) == 4
    group.shutdown()


def test_leaving_the_process_is_a_death() -> None:
    group = RayWorkerGroup(RayResourcePool([1]), RayClassWithInitArgs(Member), name="leaving")
    group.ready().result(TIMEOUT_S)
    with pytest.raises(WorkerDiedError, match="the process of rank 0 of leaving died during end"):
        group.end().result(timeout=2.0)
    group.shutdown()
