"""A program as one writes it for verl's single controller: only its imports are ours.

It takes everything from ``asyncrl.compat.verl``, calls and waits as verl does, and is checked with hand-worked numbers.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import ray
import torch
from tensordict import TensorDict

from asyncrl.compat.verl import (
    ClassWithInitArgs,
    DataProto,
    DataProtoFuture,
    DataProtoItem,
    Dispatch,
    Execute,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    ResourcePoolManager,
    Role,
    Worker,
    all_gather_data_proto,
    collect_all_to_all,
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
    get_predefined_dispatch_fn,
    get_predefined_execute_fn,
    make_nd_compute_dataproto_dispatch_fn,
    pad_dataproto_to_divisor,
    register,
    register_dispatch_mode,
    split_resource_pool,
    unpad_dataproto,
    update_dispatch_mode,
)
from asyncrl.errors import ResourceError
from asyncrl.single_controller.local import LocalWorkerGroup

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300), pytest.mark.usefixtures("ray_cluster", "by_value")]


@pytest.fixture(scope="module")
def by_value() -> None:
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def two_to_all(worker_group: Any, *args: Any, **kwargs: Any) -> Any:
    """Lists of two, repeated until there is an entry for each rank."""
    for value in [*args, *kwargs.values()]:
        assert len(value) == 2
        for number in range(worker_group.world_size - 2):
            value.append(value[number % 2])
    return args, kwargs


def dealt(worker_group: Any, data: DataProto) -> Any:
    """Every other row to every other rank."""
    return ([data[rank :: worker_group.world_size] for rank in range(worker_group.world_size)],), {}


# A policy that "generates" by counting on, a critic whose value is a mean, a reference that is half of the policy.


class ActorRolloutWorker(Worker):
    def __init__(self, config: dict[str, Any], role: str) -> None:
        super().__init__()
        self.config = config
        self.role = role
        self.weight = 0.0
        self._register_dispatch_collect_info("actor", dp_rank=self.rank // 2, is_collect=self.rank % 2 == 0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        self.weight = float(self.config["weight"])

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        first = prompts.batch["input_ids"][:, -1:]
        length = prompts.meta_info["response_length"]
        responses = first + torch.arange(1, length + 1)
        batch = TensorDict({"responses": responses, "prompts": prompts.batch["input_ids"]}, batch_size=len(prompts))
        return DataProto(batch=batch, meta_info={"timing": 1.0})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"), blocking=False)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        log_probs = -self.weight * data.batch["responses"].float()
        return DataProto.from_dict(tensors={"old_log_probs": log_probs}, meta_info={"temperature": 1.0})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def update_actor(self, data: DataProto) -> DataProto:
        loss = 0.0
        for mini in data.make_iterator(3, epochs=1, seed=1, dataloader_kwargs={"shuffle": True}):
            loss += float(mini.batch["advantages"].sum())
        self.weight += 1.0
        return DataProto(meta_info={"metrics": {"actor/loss": loss}})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def get_weight(self) -> float:
        return self.weight

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def save_checkpoint(self, path: str, step: int) -> str:
        return f"{path}/{step}/{self.role} by {self.rank} of {self.world_size}"

    @register(dispatch_mode={"dispatch_fn": two_to_all, "collect_fn": collect_all_to_all})
    def add(self, x: int, y: int) -> int:
        return x + y

    @register()
    def all_to_all(self, x: int) -> int:
        return x + self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def rows(self, data: DataProto) -> int:
        return len(data)

    def hidden(self, y: int) -> int:
        return y + self.rank


@ray.remote
class CriticWorker(Worker):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"values": data.batch["responses"].float().mean(dim=1, keepdim=True)})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weight_of_the_actor(self) -> float:
        actor = self.get_fused_worker_by_name("actor")
        assert actor is self.fused_worker_dict["actor"]
        return float(actor.weight)


def count_columns(self: Any, data: DataProto) -> DataProto:
    """Sent to the workers."""
    return DataProto.from_dict(tensors={"width": torch.full((len(data),), data.batch["responses"].shape[1])})


def prompts(rows: int) -> DataProto:
    return DataProto.from_single_dict(
        {
            "input_ids": torch.arange(2 * rows).reshape(rows, 2),
            "uid": np.array([f"prompt {row // 2}" for row in range(rows)], dtype=object),
        },
        meta_info={"response_length": 3},
    )


@pytest.mark.slow
def test_ppo_in_two_roles_of_one_process() -> None:
    manager = ResourcePoolManager({"global": [4]}, {Role.ActorRollout: "global", Role.Critic: "global"})
    with pytest.raises(ResourceError, match="GPU"):
        manager.create_resource_pool()  # this machine has none
    pool = RayResourcePool([4], use_gpu=False, max_colocate_count=1, name_prefix="ppo")
    classes = {
        "actor": RayClassWithInitArgs(cls=ray.remote(ActorRolloutWorker), config={"weight": 2}, role="actor_rollout"),
        "critic": RayClassWithInitArgs(cls=CriticWorker, config={}),
    }
    group = RayWorkerGroup(
        resource_pool=pool, ray_cls_with_init=create_colocated_worker_cls(class_dict=classes), device_name="cpu"
    )
    roles = group.spawn(prefix_set=classes.keys())
    actor, critic = roles["actor"], roles["critic"]
    assert actor.world_size == critic.world_size == 4
    assert actor.init_model() == [None] * 4

    batch = prompts(6)  # four ranks: the last two get one row and one of padding
    generation = batch.select(batch_keys=["input_ids"], non_tensor_batch_keys=[])
    padded, pad_size = pad_dataproto_to_divisor(generation, actor.world_size)
    assert (len(padded), pad_size) == (8, 2)
    output = unpad_dataproto(actor.generate_sequences(padded), pad_size=pad_size)
    assert output.batch["responses"][5].tolist() == [12, 13, 14]
    assert len(actor.generate_sequences(generation)) == 6
    assert len(batch) == len(generation) == 6
    timing = output.meta_info.pop("timing")
    assert timing == 1.0

    batch = batch.repeat(repeat_times=1, interleave=True)
    batch = batch.union(output)
    batch.non_tensor_batch["group"] = np.arange(6)
    batch.reorder(torch.tensor([5, 4, 3, 2, 1, 0]))
    assert batch.non_tensor_batch["uid"][0] == "prompt 2"

    future = actor.compute_log_prob(batch)  # registered with blocking=False, over a mesh of two dp ranks
    assert isinstance(future, DataProtoFuture)
    values = critic.compute_values(batch)
    batch = batch.union(future.get()).union(values)
    assert batch.batch["old_log_probs"][0].tolist() == [-24, -26, -28]
    assert batch.batch["values"][:, 0].tolist() == [13, 11, 9, 7, 5, 3]
    assert batch.meta_info == {"response_length": 3, "temperature": 1.0}

    batch.batch["advantages"] = batch.batch["values"] - 8.0
    update = actor.update_actor(batch)
    # Rows 0-2 on dp rank 0: 5 + 3 + 1, rows 3-5 on dp rank 1: -1 - 3 - 5; ranks 1 and 3 did the same, and do not tell.
    assert update.meta_info["metrics"] == {"actor/loss": [9.0, -9.0]}
    assert actor._dispatch_info == {"actor": [0, 0, 1, 1]}
    assert actor.get_weight().result() == [3.0] * 4
    assert critic.weight_of_the_actor() == [3.0] * 4
    assert actor.save_checkpoint("/there", step=7) == "/there/7/actor_rollout by 0 of 4"
    assert actor.rows(batch) == [2, 2, 2, 2]
    group.shutdown()


@pytest.mark.slow
def test_calls_in_every_way() -> None:
    pool = RayResourcePool([2], use_gpu=False)
    made = RayClassWithInitArgs(cls=ActorRolloutWorker, config={"weight": 1}, role="actor")
    group = RayWorkerGroup(pool, made, name_prefix="basic", worker_env={"MINE": "1"})
    assert group.worker_names == ["basic[0]", "basic[1]"]
    assert group.execute_all_sync("hidden", y=3) == [3, 4]
    assert group.execute_all_sync("env_keys")[0][:2] == ["WORLD_SIZE", "RANK"]
    assert group.execute_all_async("hidden", y=4).result() == [4, 5]
    assert group.execute_all_sync("hidden", [10, 20]) == [10, 21]
    assert group.execute_rank_zero_sync("hidden", 5) == 5
    assert group.all_to_all([1, 2]) == [1, 3]
    assert group.all_to_all(x=1) == [1, 2]
    assert group.all_to_all(ray.put(1)) == [1, 2]
    assert group.all_to_all([ray.put(1), ray.put(2)]) == [1, 3]
    assert group.add(x=[1, 2], y=[5, 6]) == [6, 8]
    assert group.execute_func_rank_zero(lambda data: data + 1, torch.ones(2)).tolist() == [2, 2]
    batch = DataProto.from_dict({"responses": torch.zeros(8, 5)})
    assert group.execute_with_func_generator(count_columns, batch).batch["width"].tolist() == [5] * 8
    group.start_worker_aliveness_check()

    # Parts of the pool share its bundles.
    parts = [RayWorkerGroup(part, made) for part in split_resource_pool(pool, split_size=1)]
    assert [part.world_size for part in parts] == [1, 1]
    assert [part.all_to_all(7) for part in parts] == [[7], [7]]
    for each in [group, *parts]:
        each.shutdown()


class Gatherer(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def gather(self) -> Any:
        torch.distributed.init_process_group("gloo")
        mine = self.rank + 1
        data = DataProto.from_dict(
            {"x": torch.arange(mine), "ids": [torch.arange(row + 1) for row in range(mine)]},
            {"who": [f"rank {self.rank}"] * mine},
            meta_info={"rank": self.rank},
        )
        assert all_gather_data_proto(data, torch.distributed.group.WORLD) is None  # type: ignore[func-returns-value]
        assert data.batch is not None
        lengths = [len(row) for row in data.batch["ids"].unbind()]
        return data.batch["x"].tolist(), lengths, data.non_tensor_batch["who"].tolist(), data.meta_info["rank"]


@pytest.mark.slow
def test_rows_of_all_ranks() -> None:
    group = RayWorkerGroup(RayResourcePool([2], use_gpu=False), RayClassWithInitArgs(Gatherer))
    rows = ([0, 0, 1], [1, 1, 2], ["rank 0", "rank 1", "rank 1"])  # one of rank 0, two of rank 1
    assert group.gather() == [(*rows, 0), (*rows, 1)]
    group.shutdown()


@pytest.mark.slow
def test_fused_roles() -> None:
    classes = {
        "actor": RayClassWithInitArgs(cls=ActorRolloutWorker, config={"weight": 1}, role="actor"),
        "critic": RayClassWithInitArgs(cls=CriticWorker, config={}),
    }
    pool = RayResourcePool(process_on_nodes=[1], use_gpu=False)
    group = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=create_colocated_worker_cls_fused(classes))
    group.fuse(classes.keys())
    assert group.critic.compute_values(DataProto.from_dict({"responses": torch.ones(2, 2)})).batch["values"].sum() == 2
    assert group.actor.all_to_all(1) == [1]
    with pytest.raises(ResourceError, match=r"needs detached=True"):
        RayWorkerGroup(pool, classes["actor"], name_prefix="actor", detached=True)
    with pytest.raises(ResourceError, match="not supported"):
        RayWorkerGroup(pool, classes["actor"], unheard_of=1)
    group.shutdown()


@pytest.mark.slow
def test_detached_workers() -> None:
    pool = RayResourcePool(process_on_nodes=[2], use_gpu=False, name_prefix="kept", detached=True)
    made = RayClassWithInitArgs(cls=ActorRolloutWorker, config={"weight": 1}, role="actor")
    first = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, name_prefix="kept", detached=True)
    assert first.all_to_all(7) == [7, 8]
    again = RayWorkerGroup.from_detached(worker_names=first.worker_names, ray_cls_with_init=made)
    assert again.all_to_all(8) == [8, 9]
    in_verl = ["keptActorRolloutWorker_0:0", "keptActorRolloutWorker_0:1"]
    again = RayWorkerGroup.from_detached(worker_names=in_verl, ray_cls_with_init=made)
    assert again.all_to_all(8) == [8, 9]
    with pytest.raises(ResourceError, match="needs the name of one group"):
        RayWorkerGroup.from_detached(worker_names=in_verl)
    third = RayWorkerGroup.from_detached(name_prefix="kept")
    assert third.all_to_all(9) == [9, 10]
    third.shutdown()
    with pytest.raises(ResourceError, match="no detached worker group"):
        RayWorkerGroup.from_detached(name_prefix="kept")
    with pytest.raises(ResourceError, match="needs the name of one group"):
        RayWorkerGroup.from_detached()


@pytest.mark.slow
def test_modes_of_ones_own() -> None:
    one_to_all = get_predefined_dispatch_fn(Dispatch.ONE_TO_ALL)
    mode = register_dispatch_mode("TO_ALL_FOR_ONE", one_to_all["dispatch_fn"], lambda group, output: output[-1])
    assert get_predefined_dispatch_fn(Dispatch.TO_ALL_FOR_ONE)["dispatch_fn"] is one_to_all["dispatch_fn"]
    assert get_predefined_execute_fn(Execute.ALL) == {"execute_fn_name": "execute_all"}

    class Member(Worker):
        @register(dispatch_mode=Dispatch.TO_ALL_FOR_ONE)
        def who(self, greeting: str) -> str:
            return f"{greeting}, {self.rank}"

        @register(dispatch_mode={"dispatch_fn": dealt, "collect_fn": lambda group, output: DataProto.concat(output)})
        def mark(self, data: DataProto) -> DataProto:
            return data.union(DataProto.from_dict({"rank": torch.full((len(data),), self.rank)}))

        @register(dispatch_mode=Dispatch.ALL_TO_ALL)
        def own(self, data: DataProto) -> DataProto:
            return data

    group = LocalWorkerGroup(ClassWithInitArgs(Member), world_size=2)
    data = DataProto.from_dict({"x": torch.arange(4)})
    marked = group.mark(data)
    assert marked.batch["x"].tolist() == [0, 2, 1, 3]
    assert marked.batch["rank"].tolist() == [0, 0, 1, 1]
    assert [len(each) for each in group.own(data.split(3))] == [3, 1]
    assert group.who("hello") == "hello, 1"
    update_dispatch_mode(mode, one_to_all["dispatch_fn"], lambda group, output: output[0])
    assert group.who("hello") == "hello, 0"
    group.shutdown()


def test_batches_as_verl_uses_them() -> None:
    data = DataProto.from_dict(
        tensors={"obs": torch.arange(12.0).reshape(6, 2), "act": torch.arange(6)},
        non_tensors={"labels": ["a", "b", "c", "d", "e", "f"]},
        meta_info={"metric": [1, 2]},
    )
    assert isinstance(data[0], DataProtoItem)
    assert data[1].non_tensor_batch == {"labels": "b"}
    assert data[torch.tensor([True, False] * 3)].non_tensor_batch["labels"].tolist() == ["a", "c", "e"]
    assert [len(part) for part in data.split(4)] == [4, 2]
    assert [part.meta_info for part in data.chunk(3)] == [{"metric": [1, 2]}] * 3
    popped = data.pop(batch_keys=["act"], meta_info_keys=["metric"])
    assert popped.batch["act"].tolist() == list(range(6))
    assert "act" not in data.batch
    assert data.meta_info == {}
    data.rename(old_keys="obs", new_keys="state")
    joined = DataProto.concat([data, data])
    assert len(joined) == 12
    assert joined.sample_level_repeat([1] * 11 + [2]).non_tensor_batch["labels"][-1] == "f"
    unfolded = data.unfold_column_chunks(2, split_keys=["state"])
    assert unfolded.batch["state"].shape == (12, 1)
    assert "state: (6, 2) (torch.float32) cpu" in data.get_data_info()
    assert list(data.to_tensordict().keys()) == ["state", "labels"]
