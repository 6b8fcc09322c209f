"""Several roles in the same processes, each called as a group of its own, on both backends."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from asyncrl.data import DataProto
from asyncrl.errors import DispatchError, InfrastructureError, ResourceError, WorkerError
from asyncrl.single_controller import (
    ClassWithInitArgs,
    Dispatch,
    Worker,
    WorkerGroup,
    create_colocated_worker_cls,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from asyncrl.single_controller.local import LocalWorkerGroup

TIMEOUT_S = 30.0
HERE = make_nd_compute_dataproto_dispatch_fn("here")


class Actor(Worker):
    def __init__(self, weight: int) -> None:
        super().__init__()
        self.weight = weight
        self._register_dispatch_collect_info("here", dp_rank=0, is_collect=self.rank == 0)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update(self, batch: DataProto) -> DataProto:
        assert batch.batch is not None
        self.weight += 1
        return DataProto.from_dict(tensors={"x": batch.batch["x"] * self.weight})

    @register(dispatch_mode=HERE)
    def whole(self, batch: DataProto) -> DataProto:
        return batch if self.rank == 0 else batch.slice(0, 0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def place(self) -> tuple[int, int, int]:
        return os.getpid(), self.rank, self.world_size

    def secret(self, word: str) -> str:
        return f"{word} {self.rank}"


class Critic(Worker):
    def __init__(self) -> None:
        super().__init__()
        self._register_dispatch_collect_info("here", dp_rank=self.rank, is_collect=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update(self) -> str:
        raise ValueError(f"critic {self.rank} has no gradients")

    @register(dispatch_mode=HERE)
    async def whole(self, batch: DataProto) -> DataProto:
        return batch.slice(0, 1)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weight_of_actor(self) -> int:
        return int(self.colocated["actor"].weight)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def place(self) -> tuple[int, int, int]:
        return os.getpid(), self.rank, self.world_size


@pytest.fixture(scope="module", autouse=True)
def by_value(backend: str) -> None:
    if backend == "ray":
        import ray.cloudpickle

        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def group(make_group: Callable[..., WorkerGroup]) -> WorkerGroup:
    made = create_colocated_worker_cls({"actor": ClassWithInitArgs(Actor, 1), "critic": ClassWithInitArgs(Critic)})
    return make_group(made.cls, world_size=2, name="trainer")


def batch(count: int) -> DataProto:
    return DataProto.from_dict(tensors={"x": torch.arange(count)})


def x(data: DataProto) -> list[int]:
    assert data.batch is not None
    return list(data.batch["x"].tolist())


def test_roles_share_processes_and_keep_their_own_methods(group: WorkerGroup) -> None:
    roles = group.spawn({"actor", "critic"})
    actor, critic = roles["actor"], roles["critic"]
    assert actor.place().result(TIMEOUT_S) == critic.place().result(TIMEOUT_S)
    assert [place[1:] for place in actor.place().result(TIMEOUT_S)] == [(0, 2), (1, 2)]
    # Actors start with weight 1, and each update adds 1 before it multiplies.
    assert x(actor.update(batch(3)).result(TIMEOUT_S)) == [0, 2, 4]
    assert x(group.actor_update(actor.update(batch(3))).result(TIMEOUT_S)) == [0, 12, 24]
    assert critic.weight_of_actor().result(TIMEOUT_S) == [4, 4]
    assert not hasattr(critic, "actor_update")


def test_each_role_has_meshes_of_its_own(group: WorkerGroup) -> None:
    roles = group.spawn(["actor", "critic"])
    assert x(roles["actor"].whole(batch(4)).result(TIMEOUT_S)) == [0, 1, 2, 3]
    assert x(roles["critic"].whole(batch(4)).result(TIMEOUT_S)) == [0, 2]
    assert x(group.critic_whole(batch(4)).result(TIMEOUT_S)) == [0, 2]


def test_errors_name_the_role(group: WorkerGroup) -> None:
    critic = group.spawn({"critic"})["critic"]
    with pytest.raises(
        WorkerError, match=r"trainer\.critic\.update raised ValueError on rank \d: critic \d has"
    ) as caught:
        critic.update().result(TIMEOUT_S)
    assert (caught.value.group, caught.value.method) == ("trainer", "critic.update")


def test_methods_that_are_not_registered(group: WorkerGroup) -> None:
    actor = group.spawn({"actor"})["actor"]
    assert actor.execute_all("secret", "rank").result(TIMEOUT_S) == ["rank 0", "rank 1"]
    with pytest.raises(WorkerError, match="AttributeError"):
        actor.execute_rank_zero("unknown").result(TIMEOUT_S)


def test_a_role_that_is_shut_down_leaves_the_others_going(group: WorkerGroup) -> None:
    first, second = group.spawn({"actor"})["actor"], group.spawn({"actor"})["actor"]
    first.shutdown()
    with pytest.raises(InfrastructureError, match=r"trainer\.actor is closed"):
        first.place()
    assert len(second.place().result(TIMEOUT_S)) == 2


def test_roles_that_are_not_there_are_named(group: WorkerGroup) -> None:
    with pytest.raises(DispatchError, match=r"trainer has no roles \['ref'\], only \['actor', 'critic'\]"):
        group.spawn({"ref"})
    with pytest.raises(DispatchError, match="has no roles"):
        LocalWorkerGroup(ClassWithInitArgs(Critic)).spawn({"critic"})


# ------------------------------------------------------------------------------------------------ only in this process


class Closing(Worker):
    def __init__(self, journal: list[Any], *, fails: bool = False) -> None:
        super().__init__()
        self.journal = journal
        self.fails = fails
        journal.append(threading.get_ident())

    def close(self) -> None:
        self.journal.append(threading.get_ident())
        if self.fails:
            raise ValueError("stuck")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def wait(self) -> None:
        await asyncio.Event().wait()


class ClosingAsync(Closing):
    async def aclose(self) -> None:
        self.journal.append("aclose")


def test_every_role_is_closed_in_the_thread_it_was_made_in() -> None:
    journal: list[Any] = []
    made = create_colocated_worker_cls({name: ClassWithInitArgs(Closing, journal) for name in ("a", "b")})
    group = LocalWorkerGroup(made)
    role = group.spawn({"a"})["a"]
    waiting = role.wait()
    role.ready().result(TIMEOUT_S)
    group.shutdown()
    assert len(journal) == 4
    assert len(set(journal)) == 1
    with pytest.raises(InfrastructureError, match="was shut down"):
        waiting.result(TIMEOUT_S)
    with pytest.raises(InfrastructureError, match="closed"):
        role.wait()


def test_one_role_that_cannot_be_closed_keeps_no_other_open() -> None:
    journal: list[Any] = []
    made = create_colocated_worker_cls(
        {"a": ClassWithInitArgs(ClosingAsync, journal), "b": ClassWithInitArgs(Closing, journal, fails=True)}
    )
    group = LocalWorkerGroup(made)
    group.ready().result(TIMEOUT_S)
    with pytest.raises(WorkerError, match="stuck"):
        group.shutdown()
    assert "aclose" in journal


class Busy(Closing):
    def __init__(self, journal: list[Any], free: threading.Event) -> None:
        super().__init__(journal)
        self.free = free

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def work(self) -> None:
        self.journal.append("begins")
        assert self.free.wait(TIMEOUT_S)
        self.journal.append("ends")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def begun(self) -> bool:
        return "begins" in self.journal


def test_a_role_is_not_closed_while_a_synchronous_method_of_another_runs() -> None:
    journal, free = list[Any](), threading.Event()
    made = create_colocated_worker_cls(
        {"a": ClassWithInitArgs(ClosingAsync, []), "b": ClassWithInitArgs(Busy, journal, free)}
    )
    group = LocalWorkerGroup(made)
    group.b_work()
    while not group.b_begun().result(TIMEOUT_S)[0]:
        pass
    threading.Timer(0.05, free.set).start()
    group.shutdown()
    assert journal == [journal[0], "begins", "ends", journal[0]]


def test_a_role_that_is_closed_in_the_loop_does_not_wait_for_a_method_of_another() -> None:
    free = threading.Event()

    class Frees(Closing):
        async def aclose(self) -> None:
            free.set()

    made = create_colocated_worker_cls(
        {"a": ClassWithInitArgs(Frees, []), "b": ClassWithInitArgs(Busy, list[Any](), free)}
    )
    group = LocalWorkerGroup(made)
    group.b_work()
    while not group.b_begun().result(TIMEOUT_S)[0]:
        pass
    group.shutdown()


def test_what_cannot_be_colocated_is_refused() -> None:
    with pytest.raises(DispatchError, match="at least one role"):
        create_colocated_worker_cls({})
    with pytest.raises(DispatchError, match="got '_a'"):
        create_colocated_worker_cls({"_a": ClassWithInitArgs(Critic)})

    class Named(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def b_place(self) -> None: ...

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def place(self) -> None: ...

    with pytest.raises(
        DispatchError, match=r"method place of role 'a_b' would be a_b_place in the group, which exists"
    ):
        create_colocated_worker_cls({"a": ClassWithInitArgs(Named), "a_b": ClassWithInitArgs(Named)})


@pytest.mark.ray
def test_options_of_actors_are_put_together() -> None:
    from asyncrl.single_controller.ray import RayClassWithInitArgs

    actor = RayClassWithInitArgs(Actor, 1).options(num_cpus=1, env_vars={"A": 1})
    critic = RayClassWithInitArgs(Critic).options(env_vars={"B": 2})
    together = create_colocated_worker_cls({"actor": actor, "critic": critic})
    assert together.actor_options == {"num_cpus": 1, "env_vars": {"A": 1, "B": 2}}
    assert (actor.actor_options["env_vars"], critic.actor_options) == ({"A": 1}, {"env_vars": {"B": 2}})
    plain = ClassWithInitArgs(Critic)  # the class that is made is as plain as the first role's
    mixed = create_colocated_worker_cls({"critic": plain, "actor": actor})
    assert RayClassWithInitArgs.of(mixed).actor_options == {"num_cpus": 1, "env_vars": {"A": 1}}
    with pytest.raises(ResourceError, match="role 'critic' has A=2 and another role"):
        create_colocated_worker_cls({"actor": actor, "critic": critic.options(env_vars={"A": 2})})
