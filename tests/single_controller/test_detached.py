"""Groups that outlive the program that made them, and programs that attach to them."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from typing import Literal

import pytest
import torch

from asyncrl.data import DataProto
from asyncrl.errors import DeadlineError, GroupClosedError, InfrastructureError, ResourceError, WorkerDiedError
from asyncrl.single_controller import Dispatch, Restart, Worker, register

ray = pytest.importorskip("ray")

from asyncrl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup  # noqa: E402
from asyncrl.single_controller.ray import detached as detached_groups  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

TIMEOUT_S = 60.0


class Counter(Worker):
    """Counts from where it was told to."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.count = start

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, amount: int = 1) -> int:
        self.count += amount
        return self.count

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, idempotent=True)
    async def pause(self) -> None:
        await asyncio.sleep(600)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def shifted(self, batch: DataProto) -> DataProto:
        assert batch.batch is not None
        return DataProto.from_dict(tensors={"x": batch.batch["x"] + self.count})


@pytest.fixture(autouse=True)
def by_value() -> Iterator[None]:
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    RayWorkerGroup.end_detached("counters")


def made(name: str = "counters", restart: Restart | None = None) -> RayWorkerGroup:
    pool = RayResourcePool([2], detached=True)
    return RayWorkerGroup(pool, RayClassWithInitArgs(Counter, 10), name=name, restart=restart, detached=True)


def check_that_all_bundles_are_free() -> None:
    whole = RayResourcePool([1], cpus_per_worker=ray.cluster_resources()["CPU"], placement_timeout_s=TIMEOUT_S)
    with RayWorkerGroup(whole, RayClassWithInitArgs(Counter, 0)) as group:
        group.ready().result(TIMEOUT_S)


PROGRAM = """
    import os, ray
    ray.init(address="{address}", logging_level="ERROR", log_to_driver=False)
    from asyncrl import Dispatch, Worker, register
    from asyncrl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    class Counter(Worker):
        def __init__(self, start):
            super().__init__()
            self.count = start

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def add(self, amount=1):
            self.count += amount
            return self.count

    made = RayClassWithInitArgs(Counter, 10)
    group = RayWorkerGroup(RayResourcePool([2], detached=True), made, name="counters", detached=True)
    print(group.add(5).result(), flush=True)  # what is buffered is lost with the process
    group.add(1)
    os._exit(0)  # without a word to anybody
"""


def test_another_program_goes_on_where_the_first_one_died() -> None:
    program = textwrap.dedent(PROGRAM).format(address=ray.get_runtime_context().gcs_address)
    first = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert first.stdout.strip() == "[15, 15]", first.stderr
    group = RayWorkerGroup.attach("counters")
    assert group.world_size == 2
    # Whether the last call had left the dying program, each rank knows.
    assert set(group.add().result(TIMEOUT_S)) <= {16, 17}
    group.shutdown()
    with pytest.raises(ResourceError, match="no detached worker group 'counters'"):
        RayWorkerGroup.attach("counters")
    check_that_all_bundles_are_free()


def test_the_program_that_attached_last_is_the_one_that_calls() -> None:
    first = made()
    assert first.add(5).result(TIMEOUT_S) == [15, 15]
    second = RayWorkerGroup.attach("counters")
    two = DataProto.from_dict(tensors={"x": torch.arange(4)})
    assert second.add(1).result(TIMEOUT_S) == [16, 16]
    with pytest.raises(GroupClosedError, match="another program has attached"):
        first.add().result(TIMEOUT_S)
    batch = second.shifted(second.shifted(two)).result(TIMEOUT_S).batch
    assert batch is not None
    assert batch["x"].tolist() == [32, 33, 34, 35]
    # Letting go twice, then a third.
    second.detach()
    with pytest.raises(GroupClosedError):
        second.add()
    first.detach()
    assert RayWorkerGroup.attach("counters").add().result(TIMEOUT_S) == [17, 17]


def test_a_group_that_was_attached_to_is_made_again_like_any_other() -> None:
    made(restart=Restart(scope="worker")).add(5).result(TIMEOUT_S)
    group = RayWorkerGroup.attach("counters", restart=Restart(scope="worker"))
    group.ready().result(TIMEOUT_S)
    ray.kill(group._actors.handles[1])
    other, again = 16, 16
    while again >= 16:  # Ray kills soon, not at once
        with contextlib.suppress(WorkerDiedError):
            other, again = group.add().result(TIMEOUT_S)
    assert other >= 16  # the one that lived on counts with every call that reached it
    assert again == 11  # the new one begins where the class says
    # The next program finds the process that there is now.
    assert RayWorkerGroup.attach("counters").add().result(TIMEOUT_S) == [other + 1, 12]


def names_of(group: str) -> list[str]:
    """Names of its actors, also of those that wait for resources."""
    return [each["name"] for each in ray.util.list_named_actors(all_namespaces=True) if each["name"].startswith(group)]


def ending_of(group: RayWorkerGroup) -> InfrastructureError:
    """What calls fail with in the end: a few may still reach a dying worker, or find it dead."""
    until = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until:
        try:
            group.add().result(TIMEOUT_S)
        except WorkerDiedError:
            continue
        except GroupClosedError as error:
            return error
    raise AssertionError(f"calls of {group.name} do not end")


@pytest.mark.parametrize("scope", ["worker", "group"])
def test_a_group_that_was_ended_is_not_made_again(scope: Literal["worker", "group"]) -> None:
    group = made(restart=Restart(scope=scope, max_restarts=1000, backoff_s=0.0))
    group.add().result(TIMEOUT_S)
    waiting = group.pause()
    assert RayWorkerGroup.end_detached("counters") == 2
    assert "it was ended by RayWorkerGroup.end_detached" in str(ending_of(group))
    with pytest.raises(WorkerDiedError):
        waiting.result(TIMEOUT_S)  # that it may be sent again does not make it wait for ever
    assert names_of("counters") == []
    assert group.statistics().restarts == 0
    group.shutdown()
    check_that_all_bundles_are_free()


def test_a_group_that_was_ended_is_not_restarted_in_bundles_that_another_one_keeps() -> None:
    pool = RayResourcePool([2], max_colocate_count=2, detached=True)
    restart = Restart(scope="worker", max_restarts=1000, backoff_s=0.0)
    made = RayClassWithInitArgs(Counter, 10)
    group = RayWorkerGroup(pool, made, name="counters", restart=restart, detached=True)
    neighbour = RayWorkerGroup(pool, made, name="neighbour", detached=True)
    assert (group.add().result(TIMEOUT_S), neighbour.add().result(TIMEOUT_S)) == ([11, 11], [11, 11])
    assert RayWorkerGroup.end_detached("counters") == 2
    assert "it was ended by RayWorkerGroup.end_detached" in str(ending_of(group))
    assert names_of("counters") == []
    assert neighbour.add().result(TIMEOUT_S) == [12, 12]
    assert RayWorkerGroup.end_detached("neighbour") == 2
    check_that_all_bundles_are_free()


def test_a_group_is_not_restarted_in_a_placement_group_that_was_removed() -> None:
    pool = RayResourcePool([2])
    restart = Restart(scope="worker", max_restarts=1000, backoff_s=0.0)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Counter, 10), name="unplaced", restart=restart)
    group.add().result(TIMEOUT_S)
    ray.util.remove_placement_group(pool.placements()[0].group)  # its workers die of it
    assert "its placement group was removed" in str(ending_of(group))
    group.shutdown()
    check_that_all_bundles_are_free()


def test_workers_that_are_just_being_restarted_are_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    made().add().result(TIMEOUT_S)
    (place,) = {name.rpartition("@")[2] for name in names_of("counters")}
    free = detached_groups.free

    def overtaken(places: Iterable[str], *, group: str) -> None:
        free(places, group=group)
        late = ray.remote(num_cpus=1_000_000)(Unplaced)  # of a program that has not noticed yet
        late.options(name=f"counters:0.f@{place}", namespace="asyncrl", lifetime="detached").remote()
        late.options(name="counters:0.f@ab", namespace="asyncrl", lifetime="detached").remote()

    with monkeypatch.context() as patch:
        patch.setattr(detached_groups, "free", overtaken)
        assert RayWorkerGroup.end_detached("counters") == 2
    assert names_of("counters") == ["counters:0.f@ab"]  # a new group of this name, elsewhere
    ray.kill(ray.get_actor("counters:0.f@ab", namespace="asyncrl"))
    check_that_all_bundles_are_free()


class Unplaced:
    def detached_state(self) -> None:
        raise AssertionError("never called: the actor is never placed")

    def dismiss(self, why: str) -> None:
        raise AssertionError("never called: the actor is never placed")


def test_attaching_does_not_wait_forever_for_a_worker_without_resources() -> None:
    gone = ray.util.placement_group([{"CPU": 1}])
    ray.util.remove_placement_group(gone)
    # As a restart leaves it that is overtaken by the end of its group: it has a name, and never gets a bundle.
    waiting = ray.remote(num_cpus=1_000_000)(Unplaced)
    waiting.options(name=f"stuck:0.1@{gone.id.hex()}", namespace="asyncrl", lifetime="detached").remote()
    with pytest.raises(DeadlineError, match=r"rank 0 of .* 'stuck' has not replied within 0\.5 s"):
        RayWorkerGroup.attach("stuck", timeout_s=0.5)
    assert RayWorkerGroup.end_detached("stuck") == 1
    with pytest.raises(ResourceError, match="no detached worker group 'stuck'"):
        RayWorkerGroup.attach("stuck")


def test_attaching_to_a_group_whose_last_worker_has_died_leaves_the_others_running() -> None:
    group = made()
    assert group.add().result(TIMEOUT_S) == [11, 11]
    ray.kill(group._actors.handles[1])
    while len(names_of("counters")) > 1:  # Ray kills soon, not at once
        time.sleep(0.05)
    with pytest.raises(ResourceError, match=r"rank 1 of the detached group 'counters' has died"):
        RayWorkerGroup.attach("counters")
    assert len(names_of("counters")) == 1
    assert RayWorkerGroup.end_detached("counters") == 1


class Slow(Worker):
    """Is constructed for longer than anything here waits."""

    def __init__(self) -> None:
        super().__init__()
        time.sleep(600)


def test_attaching_to_a_group_that_is_still_being_created_is_refused() -> None:
    RayWorkerGroup(RayResourcePool([2], detached=True), RayClassWithInitArgs(Slow), name="counters", detached=True)
    while len(names_of("counters")) < 2:
        time.sleep(0.05)
    with pytest.raises(ResourceError, match="'counters' is incomplete: its workers are still being created"):
        RayWorkerGroup.attach("counters")
    assert RayWorkerGroup.end_detached("counters") == 2


def add_for_ever(group: RayWorkerGroup) -> None:
    while True:
        group.add().result(TIMEOUT_S)


def test_what_is_no_detached_group_is_said() -> None:
    with pytest.raises(ResourceError, match="needs a name"):
        made(name="")
    worker = RayClassWithInitArgs(Counter, 10)
    with pytest.raises(ResourceError, match=r"needs detached=True"):
        RayWorkerGroup(RayResourcePool([2]), worker, name="counters", detached=True)
    with made() as group:
        with pytest.raises(ResourceError, match="already: attach to it"):
            made()
        with pytest.raises(ResourceError, match="existing ones: counters"):
            RayWorkerGroup.attach("countess")
        ray.kill(group._actors.handles[0])
        with pytest.raises(WorkerDiedError):
            add_for_ever(group)  # Ray kills soon, not at once
        with pytest.raises(ResourceError, match=r"rank 0 .* has died"):
            RayWorkerGroup.attach("counters")
        assert RayWorkerGroup.end_detached("counters") == 1
    with RayWorkerGroup(RayResourcePool([1]), worker) as ordinary, pytest.raises(ResourceError, match="detached=True"):
        ordinary.detach()
