"""DataProto as verl has it: names, arguments, defaults, values, what changes in place and what is shared.

Facts of verl's ``protocol.py``, as tables. Where asyncrl means something else, ``docs/migrating-from-verl.md`` says so,
and the last table here has it.
"""

from __future__ import annotations

import dataclasses
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

import asyncrl.compat.verl
from asyncrl.compat.verl import (
    DataProto,
    DataProtoConfig,
    DataProtoFuture,
    DataProtoItem,
    collate_fn,
    fold_batch_dim,
    list_of_dict_to_dict_of_list,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    union_numpy_dict,
    union_tensor_dict,
    unpad_dataproto,
)
from asyncrl.errors import SchemaError

PAGE = (Path(__file__).parents[3] / "docs" / "migrating-from-verl.md").read_text()

NONE = object()
"""No default."""

SIGNATURES: dict[str, dict[str, Any]] = {
    "__init__": {"batch": None, "non_tensor_batch": None, "meta_info": None},
    "save_to_disk": {"filepath": NONE},
    "load_from_disk": {"filepath": NONE},
    "print_size": {"prefix": ""},
    "check_consistency": {},
    "from_single_dict": {"data": NONE, "meta_info": None, "auto_padding": False},
    "from_dict": {
        "tensors": None,
        "non_tensors": None,
        "meta_info": None,
        "num_batch_dims": 1,
        "auto_padding": False,
    },
    "from_tensordict": {"tensor_dict": NONE, "meta_info": None, "num_batch_dims": 1},
    "to": {"device": NONE},
    "select": {"batch_keys": None, "non_tensor_batch_keys": None, "meta_info_keys": None, "deepcopy": False},
    "select_idxs": {"idxs": NONE},
    "slice": {"start": None, "end": None, "step": None},
    "pop": {"batch_keys": None, "non_tensor_batch_keys": None, "meta_info_keys": None},
    "rename": {"old_keys": NONE, "new_keys": NONE},
    "union": {"other": NONE},
    "make_iterator": {"mini_batch_size": NONE, "epochs": NONE, "seed": None, "dataloader_kwargs": None},
    "is_padding_enabled": {},
    "padding": {"padding_size": NONE, "padding_candidate": ""},
    "chunk": {"chunks": NONE},
    "split": {"split_size": NONE},
    "concat": {"data": NONE},
    "reorder": {"indices": NONE},
    "repeat": {"repeat_times": 2, "interleave": True},
    "unfold_column_chunks": {"n_split": NONE, "split_keys": None},
    "sample_level_repeat": {"repeat_times": NONE},
    "to_tensordict": {},
    "get_data_info": {},
}

FUNCTIONS: dict[str, dict[str, Any]] = {
    "pad_dataproto_to_divisor": {"data": NONE, "size_divisor": NONE},
    "unpad_dataproto": {"data": NONE, "pad_size": NONE},
    "union_tensor_dict": {"tensor_dict1": NONE, "tensor_dict2": NONE},
    "union_numpy_dict": {"tensor_dict1": NONE, "tensor_dict2": NONE},
    "list_of_dict_to_dict_of_list": {"list_of_dict": NONE},
    "fold_batch_dim": {"data": NONE, "new_batch_size": NONE},
    "unfold_batch_dim": {"data": NONE, "batch_dims": 2},
    "collate_fn": {"x": NONE},
    "all_gather_data_proto": {"data": NONE, "process_group": NONE},
}


def arguments(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    return {
        name: NONE if each.default is inspect.Parameter.empty else each.default
        for name, each in parameters.items()
        if name != "self"
    }


@pytest.mark.parametrize("name", SIGNATURES)
def test_methods_take_verls_arguments(name: str) -> None:
    ours = arguments(getattr(DataProto, name))
    theirs = SIGNATURES[name]
    assert list(ours)[: len(theirs)] == list(theirs)
    assert {key: ours[key] for key in theirs} == theirs
    assert NONE not in list(ours.values())[len(theirs) :]  # what we add has a default


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_take_verls_arguments(name: str) -> None:
    ours = arguments(getattr(asyncrl.compat.verl, name))
    theirs = FUNCTIONS[name]
    assert list(ours) == list(theirs)
    assert all(theirs[key] in (NONE, ours[key]) for key in theirs)


NAMES = {
    "protocol": (
        "DataProto DataProtoConfig DataProtoFuture DataProtoItem all_gather_data_proto collate_fn "
        "deserialize_single_tensor deserialize_tensordict fold_batch_dim list_of_dict_to_dict_of_list "
        "pad_dataproto_to_divisor serialize_single_tensor serialize_tensordict unfold_batch_dim union_numpy_dict "
        "union_tensor_dict unpad_dataproto"
    ),
    "single_controller.base.decorator": (
        "DISPATCH_MODE_FN_REGISTRY Dispatch Execute MAGIC_ATTR collect_all_to_all collect_dp_compute "
        "collect_dp_compute_data_proto collect_lazy_compute_data_proto collect_nd_compute collect_nd_compute_dataproto "
        "dispatch_all_to_all dispatch_dp_compute dispatch_dp_compute_data_proto "
        "dispatch_dp_compute_data_proto_with_func dispatch_lazy_compute_data_proto dispatch_nd_compute "
        "dispatch_nd_compute_dataproto dispatch_one_to_all dummy_direct_rollout_call get_predefined_dispatch_fn "
        "get_predefined_execute_fn init_predefined_dispatch_mode init_predefined_execute_mode "
        "make_nd_compute_dataproto_dispatch_fn register register_dispatch_mode update_dispatch_mode"
    ),
    "single_controller.base.worker": "DistGlobalInfo DistRankInfo Worker WorkerHelper",
    "single_controller.base.worker_group": "ClassWithInitArgs ResourcePool WorkerGroup check_workers_alive",
    "single_controller.ray.base": (
        "RayClassWithInitArgs RayResourcePool RayWorkerGroup ResourcePoolManager SubRayResourcePool "
        "create_colocated_worker_cls create_colocated_worker_cls_fused create_colocated_worker_raw_cls "
        "extract_pg_from_exist func_generator get_master_addr_port get_random_string merge_resource_pool "
        "sort_placement_group_by_node_ip split_resource_pool"
    ),
    "Worker": (
        "_query_collect_info _query_dispatch_info _register_dispatch_collect_info create_transferqueue_client env_keys "
        "execute_func_rank_zero execute_with_func_generator fused_worker_attr_name get_available_master_addr_port "
        "get_availale_master_addr_port get_cuda_visible_devices get_dispatch_collect get_fused_worker_by_name "
        "get_master_addr_port query_collect_info rank set_dispatch_collect world_size"
    ),
    "RayWorkerGroup": (
        "execute_all execute_all_async execute_all_sync execute_rank_zero execute_rank_zero_async "
        "execute_rank_zero_sync from_detached fuse fused_worker_execute_fn_name master_address master_port spawn "
        "spawn_fused start_worker_aliveness_check worker_names workers world_size"
    ),
    "RayResourcePool": (
        "accelerator_type add_node detached get_placement_groups local_rank_list local_world_size_list "
        "max_colocate_count n_gpus_per_node name_prefix pgs store use_gpu world_size"
    ),
    "RayClassWithInitArgs": "args cls fused_worker_used kwargs set_additional_resource update_options",
    "ResourcePoolManager": (
        "create_resource_pool get_n_gpus get_resource_pool mapping resource_pool_dict resource_pool_spec"
    ),
    "Dispatch": (
        "ALL_TO_ALL DIRECT_ROLLOUT_METHOD DP_COMPUTE DP_COMPUTE_METRIC DP_COMPUTE_PROTO DP_COMPUTE_PROTO_WITH_FUNC "
        "ONE_TO_ALL RANK_ZERO from_name register remove"
    ),
    "Execute": "ALL RANK_ZERO from_name register remove",
}


@pytest.mark.parametrize("place", NAMES)
def test_every_name_is_here_or_on_the_page(place: str) -> None:
    named: Any = getattr(asyncrl.compat.verl, place, None)
    home: Any = named if inspect.isclass(named) else asyncrl.compat.verl
    instances: dict[str, Callable[[], Any]] = {
        "Worker": asyncrl.compat.verl.Worker,
        "RayResourcePool": lambda: asyncrl.compat.verl.RayResourcePool([1]),
        "RayClassWithInitArgs": lambda: asyncrl.compat.verl.RayClassWithInitArgs(dict),
        "ResourcePoolManager": lambda: asyncrl.compat.verl.ResourcePoolManager({"all": [1]}, {"actor": "all"}),
    }
    homes = [home, instances[place]()] if place in instances else [home]
    attributes = {"RayWorkerGroup": {"world_size"}}.get(place, set())  # set by the constructor, which needs a cluster
    missing = {
        name for name in NAMES[place].split() if name not in attributes and not any(hasattr(h, name) for h in homes)
    }
    assert {name for name in missing if f"{name}" not in PAGE} == set()


# ------------------------------------------------------------------------------------------------------ what they give


def rows(number: int = 4, **options: Any) -> DataProto:
    """Rows 0, 1, ...: ``x`` is ``[B]``, ``ids`` is ``[B, 4]``, ``uid`` are objects."""
    return DataProto.from_dict(
        tensors={"x": torch.arange(number), "ids": torch.arange(4 * number).reshape(number, 4)},
        non_tensors={"uid": [f"u{row}" for row in range(number)]},
        meta_info={"step": 7},
        **options,
    )


def xs(data: DataProto) -> list[int]:
    assert data.batch is not None
    # Every column went the same way.
    assert data.batch["ids"][:, 0].tolist() == [4 * each for each in data.batch["x"].tolist()]
    assert data.non_tensor_batch["uid"].tolist() == [f"u{each}" for each in data.batch["x"].tolist()]
    assert data.meta_info == {"step": 7}
    assert data.batch.batch_size == torch.Size([len(data)])
    values: list[int] = data.batch["x"].tolist()
    return values


NEW_ROWS: dict[str, tuple[Callable[[DataProto], DataProto], list[int]]] = {
    "slice": (lambda d: d.slice(1, 3), [1, 2]),
    "slice by steps": (lambda d: d[::2], [0, 2]),
    "slice from the end": (lambda d: d[-2:], [2, 3]),
    "slice beyond the end": (lambda d: d[2:9], [2, 3]),
    "slice of nothing": (lambda d: d[3:1], []),
    "index list": (lambda d: d[[3, 0, 0]], [3, 0, 0]),
    "index array": (lambda d: d[np.array([1, -1])], [1, 3]),
    "index tensor": (lambda d: d[torch.tensor([2, 1])], [2, 1]),
    "mask list": (lambda d: d[[True, False, False, True]], [0, 3]),
    "mask array": (lambda d: d[np.array([False, True, True, False])], [1, 2]),
    "mask tensor": (lambda d: d[torch.tensor([False, False, False, True])], [3]),
    "select_idxs": (lambda d: d.select_idxs([1, 1]), [1, 1]),
    "repeat": (lambda d: d[:2].repeat(), [0, 0, 1, 1]),
    "repeat in turn": (lambda d: d[:2].repeat(2, interleave=False), [0, 1, 0, 1]),
    "repeat never": (lambda d: d.repeat(0), []),
    "repeat by row, list": (lambda d: d.sample_level_repeat([0, 2, 1, 0]), [1, 1, 2]),
    "repeat by row, tuple": (lambda d: d.sample_level_repeat((1, 0, 0, 2)), [0, 3, 3]),
    "repeat by row, tensor": (lambda d: d.sample_level_repeat(torch.tensor([0, 0, 3, 0])), [2, 2, 2]),
    "repeat by row, array": (lambda d: d.sample_level_repeat(np.array([1, 1, 0, 0])), [0, 1]),
    "concat": (lambda d: DataProto.concat([d[2:], d[:1]]), [2, 3, 0]),
    "concat of one": (lambda d: DataProto.concat([d[1:2]]), [1]),
    "concat of a generator": (lambda d: DataProto.concat(d[[row]] for row in (3, 1)), [3, 1]),
    "concat of a tuple": (lambda d: DataProto.concat((d[3:], d[:1])), [3, 0]),
    "chunk, last": (lambda d: d.chunk(2)[-1], [2, 3]),
    "split, last": (lambda d: d.split(3)[-1], [3]),
    "pad": (lambda d: pad_dataproto_to_divisor(d, 3)[0], [0, 1, 2, 3, 0, 1]),
    "pad by more than there is": (lambda d: pad_dataproto_to_divisor(d[:2], 7)[0], [0, 1, 0, 1, 0, 1, 0]),
    "pad what fits": (lambda d: pad_dataproto_to_divisor(d, 2)[0], [0, 1, 2, 3]),
    "unpad": (lambda d: unpad_dataproto(d, 3), [0]),
    "unpad nothing": (lambda d: unpad_dataproto(d, 0), [0, 1, 2, 3]),
    "fold and unfold": (lambda d: unfold_batch_dim(fold_batch_dim(d, 2)), [0, 1, 2, 3]),
    "to and from a TensorDict": (lambda d: DataProto.from_tensordict(d.to_tensordict()), [0, 1, 2, 3]),
    "pickle": (lambda d: pickle.loads(pickle.dumps(d)), [0, 1, 2, 3]),
    "select all": (lambda d: d.select(), [0, 1, 2, 3]),
    "deep copy": (lambda d: d.select(deepcopy=True), [0, 1, 2, 3]),
}


@pytest.mark.parametrize("name", NEW_ROWS)
def test_what_gives_new_batches_leaves_the_old(name: str) -> None:
    operation, expected = NEW_ROWS[name]
    data = rows()
    assert xs(operation(data)) == expected
    assert xs(data) == [0, 1, 2, 3]


def reordered(data: DataProto) -> None:
    assert data.reorder(torch.tensor([3, 1, 0, 2])) is None  # type: ignore[func-returns-value]


IN_PLACE: dict[str, tuple[Callable[[DataProto], object], list[int]]] = {
    "reorder": (reordered, [3, 1, 0, 2]),
    "padding": (lambda d: d.padding(2), [0, 1, 2, 3, 3, 3]),
    "padding with the first": (lambda d: d.padding(1, "first"), [0, 1, 2, 3, 0]),
    "padding with the last": (lambda d: d.padding(1, padding_candidate="last"), [0, 1, 2, 3, 3]),
    "padding with nothing": (lambda d: d.padding(0), [0, 1, 2, 3]),
    "to": (lambda d: d.to("cpu"), [0, 1, 2, 3]),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_changes_a_batch(name: str) -> None:
    operation, expected = IN_PLACE[name]
    data = rows()
    operation(data)
    assert xs(data) == expected


def test_what_changes_a_batch_and_returns_it() -> None:
    data = rows()
    assert data.to("cpu") is data
    assert data.rename("x", "y") is data
    assert data.rename(["y", "ids"], ["x", "tokens"]) is data
    assert data.batch is not None
    assert set(data.batch.keys()) == {"x", "tokens"}
    more = DataProto.from_dict({"score": torch.ones(4)}, meta_info={"step": 7, "temperature": 1.0})
    assert data.union(more) is data
    assert set(data.batch.keys()) == {"x", "tokens", "score"}
    assert data.meta_info == {"step": 7, "temperature": 1.0}


def test_a_batch_stays_where_it_was_moved_to() -> None:
    data = rows()
    assert data.batch is not None
    assert data.batch.device is None
    data.to("meta")
    for each in (data, data[:2], data[[3, 1]], data.chunk(2)[1], data.select(["x"]), data.repeat(2)):
        assert each.batch is not None
        assert each.batch.device == each.batch["x"].device == torch.device("meta")
    assert data[0].batch is not None
    assert data[0].batch.device == torch.device("meta")
    data.batch["later"] = torch.zeros(4)
    assert data.batch["later"].device == torch.device("meta")
    data.union(DataProto.from_dict({"score": torch.zeros(4)}))
    assert data.batch["score"].device == torch.device("meta")
    nothing = DataProto.from_dict(non_tensors={"uid": ["a"]})
    assert nothing.to("cpu") is nothing
    assert nothing.batch is None


def test_pop_takes_out_what_it_returns() -> None:
    data = rows()
    popped = data.pop(batch_keys=["ids"], non_tensor_batch_keys=["uid"], meta_info_keys=["step"])
    assert popped.batch is not None
    assert data.batch is not None
    assert (list(popped.batch.keys()), list(popped.non_tensor_batch), popped.meta_info) == (
        ["ids"],
        ["uid"],
        {"step": 7},
    )
    assert (list(data.batch.keys()), data.non_tensor_batch, data.meta_info) == (["x"], {}, {})
    assert data.pop(["x"]).batch is not None
    assert len(data) == 4  # an empty TensorDict has rows
    assert rows().pop(non_tensor_batch_keys=["uid"]).batch is None


def test_select_takes_columns_and_entries() -> None:
    data = rows().select(batch_keys=["x"], non_tensor_batch_keys=[], meta_info_keys=[])
    assert data.batch is not None
    assert (list(data.batch.keys()), data.non_tensor_batch, data.meta_info) == (["x"], {}, {})
    some = rows().select(batch_keys=["x"])
    assert list(some.non_tensor_batch) == ["uid"]
    assert some.meta_info == {"step": 7}


def test_a_row() -> None:
    row = rows()[-1]
    assert isinstance(row, DataProtoItem)
    assert row.batch is not None
    assert row.batch["x"].item() == 3
    assert row.batch.batch_size == torch.Size([])
    assert (row.non_tensor_batch, row.meta_info) == ({"uid": "u3"}, {"step": 7})
    assert rows()[np.int64(2)].non_tensor_batch["uid"] == "u2"
    with pytest.raises(IndexError):
        rows()[4]
    with pytest.raises(TypeError):
        rows()["x"]  # type: ignore[call-overload]


def test_lengths() -> None:
    uid = np.array(["a", "b", "c"], dtype=object)
    assert len(DataProto(batch=None, non_tensor_batch={"uid": uid})) == 3
    assert len(DataProto(batch=None, non_tensor_batch=None, meta_info={"step": 7})) == 0
    assert len(DataProto(TensorDict({}, batch_size=[10]))) == 10
    assert len(pickle.loads(pickle.dumps(DataProto(TensorDict({}, batch_size=[10]))))) == 10


def test_chunk_and_split() -> None:
    assert [xs(part) for part in rows().chunk(4)] == [[0], [1], [2], [3]]
    assert [xs(part) for part in rows().split(3)] == [[0, 1, 2], [3]]
    assert [xs(part) for part in rows().split(split_size=9)] == [[0, 1, 2, 3]]
    with pytest.raises(SchemaError):
        rows(5).chunk(2)
    only_objects = DataProto.from_dict(non_tensors={"uid": ["a", "b", "c", "d"]})
    assert [part.non_tensor_batch["uid"].tolist() for part in only_objects.chunk(chunks=2)] == [["a", "b"], ["c", "d"]]


def test_auto_padding_of_one_batch_and_of_all() -> None:
    padded = rows(5, auto_padding=True)
    assert padded.is_padding_enabled()
    assert [len(part) for part in padded.chunk(2)] == [3, 2]
    assert not rows(5).is_padding_enabled()
    DataProtoConfig.auto_padding = True
    try:
        assert rows(5).is_padding_enabled()
        assert [len(part) for part in rows(5).chunk(2)] == [3, 2]
        assert [len(part) for part in DataProtoFuture.of(rows(5)).chunk(2)] == [3, 2]
    finally:
        DataProtoConfig.auto_padding = False
    assert not rows(5).is_padding_enabled()
    with pytest.raises(SchemaError, match="True or False"):
        DataProtoConfig.auto_padding = 1  # type: ignore[assignment]


def test_auto_padding_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, on in (("true", True), ("1", True), ("TRUE", True), ("false", False), ("", False)):
        monkeypatch.setenv("VERL_AUTO_PADDING", value)
        assert DataProtoConfig.auto_padding is on


METRICS: dict[str, tuple[list[Any], Any]] = {
    "dicts": ([{"loss": 1}, {"loss": 2}], {"loss": [1, 2]}),
    "lists of dicts": ([[{"loss": 1}, {"loss": 2}], [{"loss": 3}]], {"loss": [1, 2, 3]}),
    "some have none": ([None, {"loss": 2}], {"loss": [2]}),
    "records without entries": ([{}, {}], {}),
    "one": ([{"loss": 1, "kl": 3}], {"loss": [1], "kl": [3]}),
    "lists as values": ([{"loss": [1, 2]}, {"loss": [3]}], {"loss": [[1, 2], [3]]}),
}


@pytest.mark.parametrize("name", METRICS)
def test_concat_joins_metrics(name: str) -> None:
    given, expected = METRICS[name]
    parts = [DataProto.from_dict({"x": torch.zeros(1)}, meta_info={"metrics": each, "flag": True}) for each in given]
    assert DataProto.concat(parts).meta_info == {"flag": True, "metrics": expected}


def test_concat_joins_meta_info() -> None:
    parts = [
        DataProto.from_dict({"x": torch.zeros(1)}, meta_info={"shared": "X", **more}) for more in ({"a": 1}, {"b": 2})
    ]
    assert DataProto.concat(parts).meta_info == {"shared": "X", "a": 1, "b": 2}
    parts[1].meta_info["shared"] = "Y"
    with pytest.raises(SchemaError, match="shared"):
        DataProto.concat(parts)
    assert DataProto.concat([DataProto(meta_info={"metrics": {"loss": 1}})] * 2).meta_info == {
        "metrics": {"loss": [1, 1]}
    }


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("seed", [None, 11])
def test_mini_batches_are_those_of_a_data_loader(shuffle: bool, seed: int | None) -> None:
    data = rows(6)
    loader: Any = DataLoader(
        data,  # type: ignore[arg-type]
        batch_size=2,
        collate_fn=collate_fn,
        generator=None if seed is None else torch.Generator().manual_seed(seed),
        shuffle=shuffle,
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        expected = [part.batch["x"].tolist() for _ in range(2) for part in loader], torch.rand(1)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        given = data.make_iterator(2, 2, seed=seed, dataloader_kwargs={"shuffle": shuffle})
        assert iter(given) is given
        assert ([xs(part) for part in given], torch.rand(1)) == expected


def test_rows_collated() -> None:
    batch = collate_fn([rows()[2], rows()[0]])
    assert batch.batch is not None
    assert batch.batch["ids"].tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
    assert batch.non_tensor_batch["uid"].tolist() == ["u2", "u0"]
    assert batch.non_tensor_batch["uid"].dtype == object
    assert batch.meta_info == {}
    ragged = DataProto.from_dict({"ids": [torch.tensor([1, 2]), torch.tensor([3])]})
    again = collate_fn([ragged[1], ragged[0]])
    assert again.batch is not None
    assert [each.tolist() for each in again.batch["ids"].unbind()] == [[3], [1, 2]]
    with pytest.raises(SchemaError, match="at least one row"):
        collate_fn([])
    with pytest.raises(SchemaError, match="dictionary 1 has"):
        collate_fn([rows()[0], ragged[0]])


def test_the_second_dimension_as_rows() -> None:
    data = DataProto.from_dict(
        {"pairs": torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), "x": torch.tensor([[1, 2], [5, 6]])},
        {"label": ["a", "b"], "names": [["a1", "a2"], ["b1", "b2"]]},
    )
    cut = data.unfold_column_chunks(2, split_keys=["pairs", "names"])
    assert cut.batch is not None
    assert cut.batch["pairs"].tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert cut.batch["x"].tolist() == [[1, 2], [1, 2], [5, 6], [5, 6]]
    assert cut.non_tensor_batch["label"].tolist() == ["a", "a", "b", "b"]
    assert cut.non_tensor_batch["names"].tolist() == [["a1"], ["a2"], ["b1"], ["b2"]]
    uneven = DataProto.from_dict(non_tensors={"names": [["a1", "a2"], ["b1"]]})
    with pytest.raises(SchemaError, match="cannot be cut into 2"):
        uneven.unfold_column_chunks(2, ["names"])


def test_folding() -> None:
    folded = fold_batch_dim(rows(), new_batch_size=2)
    assert folded.batch is not None
    assert folded.batch["x"].tolist() == [[0, 1], [2, 3]]
    assert folded.non_tensor_batch["uid"].tolist() == [["u0", "u1"], ["u2", "u3"]]
    folded.reorder(indices=torch.tensor([1, 0]))
    assert xs(unfold_batch_dim(folded, batch_dims=2)) == [2, 3, 0, 1]


def test_tensordicts() -> None:
    data = DataProto.from_dict(
        {"x": torch.tensor([1, 2])},
        {"label": ["a", "b"], "scores": [[], [0.5]], "prompt": [[{"role": "user"}], [{"role": "user"}]]},
        meta_info={"step": 42},
    )
    packed = data.to_tensordict()
    assert packed["label"] == ["a", "b"]
    assert packed["step"] == 42
    assert [list(each) for each in packed["scores"]] == [[], [0.5]]
    again = DataProto.from_tensordict(packed)
    assert again == data
    assert again.non_tensor_batch["prompt"][1] == [{"role": "user"}]


def test_unions_of_dictionaries() -> None:
    left = TensorDict({"x": torch.tensor([1, 2])}, batch_size=[2])
    right = TensorDict({"x": torch.tensor([1, 2]), "y": torch.tensor([3, 4])}, batch_size=[2])
    assert union_tensor_dict(left, right) is left
    assert left["y"].tolist() == [3, 4]
    with pytest.raises(SchemaError, match=r"\['x'\]"):
        union_tensor_dict(left, TensorDict({"x": torch.tensor([1, 3])}, batch_size=[2]))
    with pytest.raises(SchemaError, match="batch size"):
        union_tensor_dict(left, TensorDict({"z": torch.tensor([1])}, batch_size=[1]))

    mine = {"x": np.array([1.0, np.nan])}
    assert union_numpy_dict(mine, {"x": np.array([1.0, np.nan]), "y": np.array([1, 2])}) is mine
    assert mine["y"].tolist() == [1, 2]
    deep, other = (np.array([[np.array([1, 2]), text], [np.array([3.0]), None]], dtype=object) for text in ("a", "b"))
    union_numpy_dict({"x": deep}, {"x": deep.copy()})
    with pytest.raises(SchemaError, match=r"\['x'\]"):
        union_numpy_dict({"x": deep}, {"x": other})
    assert list_of_dict_to_dict_of_list([]) == {}


def test_arrays_that_contain_themselves() -> None:
    round_one, round_other, straight = (np.array([None], dtype=object) for _ in range(3))
    round_one[0], round_other[0] = round_one, round_other
    union_numpy_dict({"x": round_one}, {"x": round_other})
    with pytest.raises(SchemaError):
        union_numpy_dict({"x": round_one}, {"x": straight})


def test_types_of_what_a_batch_holds() -> None:
    data = DataProto.from_dict(
        {"x": torch.zeros(2, 3)},
        {"uid": ["a", "b"]},
        meta_info={
            "list": [1, 2.0],
            "tuple": (1, "a"),
            "dict": {"k": [1]},
            "array": np.zeros(2),
            "none": None,
            "e": [],
        },
    )
    lines = data.get_data_info().splitlines()
    assert lines[:5] == [
        "batch",
        "  x: (2, 3) (torch.float32) cpu",
        "non_tensor_batch",
        "  uid: ndarray(2,) (object)",
        "meta_info",
    ]
    assert lines[6:] == [
        "  tuple: tuple(int, str)",
        "  dict: dict[str: list[int]]",
        "  array: ndarray(2,) (float64)",
        "  none: NoneType",
        "  e: list[...]",
    ]
    assert lines[5] in ("  list: list[int|float]", "  list: list[float|int]")


def test_subclasses_stay_what_they_are() -> None:
    class Mine(DataProto):
        pass

    data = Mine.from_single_dict({"x": torch.arange(4), "uid": np.array(["a", "b", "c", "d"])})
    made = [
        data,
        data[:2],
        data[[1]],
        data.repeat(),
        data.select(),
        data.chunk(2)[0],
        data.sample_level_repeat([1] * 4),
    ]
    assert {type(each) for each in made} == {Mine}


# ----------------------------------------------------------------------------------- what is not as in verl, on purpose


def test_nothing_of_the_callers_is_changed_or_shared() -> None:
    tensors, arrays, info = {"x": torch.zeros(2)}, {"uid": ["a", "b"]}, {"step": 7}
    data = DataProto.from_dict(tensors, arrays, info, auto_padding=True)
    assert arrays == {"uid": ["a", "b"]}
    assert info == {"step": 7}
    data.chunk(2)[0].meta_info["step"] = 8
    assert data.meta_info == info == {"step": 7}


def test_a_batch_is_no_dataclass() -> None:
    assert not dataclasses.is_dataclass(DataProto)
    data = rows()
    with pytest.raises(TypeError):
        dataclasses.replace(data, meta_info={"step": 8})  # type: ignore[type-var]
    replaced = DataProto(data.batch, data.non_tensor_batch, {"step": 8})
    assert (replaced.meta_info, data.meta_info) == ({"step": 8}, {"step": 7})
    assert replaced.columns().equal(data.columns())


def test_a_future_is_made_by_a_call_or_of_other_futures() -> None:
    with pytest.raises(TypeError, match="collect_fn"):
        DataProtoFuture(collect_fn=DataProto.concat, futures=[], dispatch_fn=None)  # type: ignore[call-arg]
    first = DataProtoFuture.of(rows()[:1])
    joined = DataProtoFuture.concat([first, DataProtoFuture.of(rows()[3:])])
    assert xs(joined.get()) == [0, 3]
    noted = joined.then(with_a_note).get()
    assert xs(noted) == [0, 3]
    assert noted.non_tensor_batch["note"].tolist() == ["row 0", "row 3"]


def with_a_note(data: DataProto) -> DataProto:
    assert data.batch is not None
    return data.with_columns(note=[f"row {each}" for each in data.batch["x"].tolist()])


@pytest.mark.parametrize("method", ["numpy", "anything"])
def test_how_batches_travel_is_not_read_from_the_environment(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VERL_DATAPROTO_SERIALIZATION_METHOD", raising=False)
    expected = pickle.dumps(rows())
    monkeypatch.setenv("VERL_DATAPROTO_SERIALIZATION_METHOD", method)
    assert pickle.dumps(rows()) == expected
    view = rows(1000)[:4]  # verl's pickles bring the whole storage of a view
    assert len(pickle.dumps(view)) <= len(expected) + 8
    assert xs(pickle.loads(pickle.dumps(view))) == [0, 1, 2, 3]


def test_a_dictionary_of_columns_of_every_kind() -> None:
    data = DataProto.from_single_dict(
        {
            "x": torch.arange(2),
            "ids": [torch.tensor([1, 2]), torch.tensor([3])],
            "uid": np.array(["a", "b"]),
            "messages": [[{"role": "user"}], [{"role": "user"}]],
        },
        meta_info={"step": 7},
        auto_padding=True,
    )
    assert data.batch is not None
    assert [each.tolist() for each in data.batch["ids"].unbind()] == [[1, 2], [3]]
    assert data.non_tensor_batch["messages"].shape == (2,)
    assert data.non_tensor_batch["messages"].tolist() == [[{"role": "user"}], [{"role": "user"}]]
    assert (data.meta_info, data.auto_padding) == ({"step": 7}, True)
    for value in (1, "ab", None, {"a": 1}, np.array(1)):
        with pytest.raises(SchemaError, match="'x'"):
            DataProto.from_single_dict({"x": value, "y": torch.zeros(2)})
    assert len(DataProto.from_single_dict({})) == 0


REFUSED: dict[str, Callable[[], object]] = {
    "columns of different length": lambda: DataProto.from_dict({"x": torch.zeros(2), "y": torch.zeros(3)}),
    "arrays of different length": lambda: DataProto.from_dict({"x": torch.zeros(2)}, {"uid": ["a"]}),
    "several batch dimensions": lambda: DataProto.from_dict({"x": torch.zeros(2, 2)}, num_batch_dims=2),
    "a column that is none": lambda: DataProto.from_single_dict({"x": 1}),
    "select what is not there": lambda: rows().select(["nothing"]),
    "pop what is not there": lambda: rows().pop(["nothing"]),
    "rename to too few": lambda: rows().rename(["x", "ids"], ["y"]),
    "union of different rows": lambda: rows().union(rows(3)),
    "union of different values": lambda: rows().union(DataProto.from_dict({"x": torch.ones(4)})),
    "union of different entries": lambda: rows().union(DataProto(meta_info={"step": 8})),
    "mini-batches that do not divide": lambda: rows().make_iterator(3, 1),
    "concat of nothing": lambda: DataProto.concat([]),
    "padding with another row": lambda: rows().padding(1, "middle"),  # type: ignore[arg-type]
    "select entries that are not there": lambda: rows().select(meta_info_keys=["nothing"]),
    "select arrays that are not there": lambda: rows().select(non_tensor_batch_keys=["nothing"]),
    "dictionaries that lack keys": lambda: list_of_dict_to_dict_of_list([{"a": 1, "b": 2}, {"a": 1}]),
    "fold what does not divide": lambda: fold_batch_dim(rows(), 3),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_leaves_everything_as_it_was(name: str) -> None:
    with pytest.raises(ValueError, match=r"\w") as caught:  # so is a SchemaError
        REFUSED[name]()
    assert isinstance(caught.value, SchemaError)
