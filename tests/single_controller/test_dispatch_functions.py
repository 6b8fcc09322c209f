"""Dispatch and collect functions, called as a mode of one's own calls them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.errors import DispatchError
from asyncrl.single_controller import ClassWithInitArgs, Dispatch, Execute, Worker, WorkerGroup, register
from asyncrl.single_controller import dispatch as functions
from asyncrl.single_controller.local import LocalWorkerGroup

GROUP = SimpleNamespace(world_size=4)


def rows(*values: int) -> DataProto:
    return DataProto.from_dict({"x": torch.tensor(values)})


def values(batches: list[Any]) -> list[list[int]]:
    return [batch.batch["x"].tolist() for batch in batches]


def test_rows_are_split_as_evenly_as_can_be() -> None:
    (shares,), named = functions.dispatch_dp_compute_data_proto(GROUP, rows(0, 1, 2, 3, 4, 5), more=rows(7, 8))
    assert values(shares) == [[0, 1], [2, 3], [4], [5]]
    assert values(named["more"]) == [[7], [8], [], []]
    with pytest.raises(DispatchError, match="only batches are split, got int"):
        functions.dispatch_dp_compute_data_proto(GROUP, 1)


def test_ranks_of_one_dp_rank_get_the_same_rows() -> None:
    mapping, mask = [0, 0, 1, 1], [True, False, False, True]
    (shares,), named = functions.dispatch_nd_compute_dataproto(mapping, 2, GROUP, rows(0, 1, 2, 3))
    assert values(shares) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert named == {}
    joined = functions.collect_nd_compute_dataproto(mask, GROUP, shares)
    assert joined == rows(0, 1, 2, 3)
    assert functions.dispatch_nd_compute(mapping, 2, GROUP, ["a", "b"]) == ((["a", "a", "b", "b"],), {})
    with pytest.raises(DispatchError, match="a list of 2 entries"):
        functions.dispatch_nd_compute(mapping, 2, GROUP, [1, 2, 3])


def test_lists_are_checked() -> None:
    assert functions.dispatch_dp_compute(GROUP, [1, 2, 3, 4]) == (([1, 2, 3, 4],), {})
    with pytest.raises(DispatchError, match="must be a list of 4 entries, got 7"):
        functions.dispatch_dp_compute(GROUP, flag=7)
    with pytest.raises(DispatchError, match="4 ranks gave 1 values"):
        functions.collect_dp_compute(GROUP, [1])
    with pytest.raises(DispatchError, match="value 1 must be a batch, got int"):
        functions.collect_dp_compute_data_proto(SimpleNamespace(world_size=2), [rows(1), 2])
    with pytest.raises(DispatchError, match="must be a function"):
        functions.dispatch_dp_compute_data_proto_with_func(GROUP, rows(1))
    listed, _ = functions.dispatch_dp_compute_data_proto_with_func(GROUP, len, rows(1, 2, 3, 4))
    assert listed[0] == [len] * 4
    assert values(listed[1]) == [[1], [2], [3], [4]]


def test_modes_have_names() -> None:
    assert functions.get_predefined_dispatch_fn(Dispatch.ONE_TO_ALL) == {
        "dispatch_fn": functions.dispatch_one_to_all,
        "collect_fn": functions.collect_all_to_all,
    }
    assert functions.get_predefined_execute_fn(Execute.RANK_ZERO) == {"execute_fn_name": "execute_rank_zero"}
    with pytest.raises(DispatchError, match="RANK_ZERO has no dispatch and collect functions"):
        functions.get_predefined_dispatch_fn(Dispatch.RANK_ZERO)
    for name in ("ONE_TO_ALL", "no name"):
        with pytest.raises(DispatchError, match="it exists, or is not an identifier"):
            functions.register_dispatch_mode(name, functions.dispatch_one_to_all, functions.collect_all_to_all)
    with pytest.raises(DispatchError, match="register one of your own"):
        functions.update_dispatch_mode(
            {"dispatch_fn": functions.dispatch_one_to_all, "collect_fn": functions.collect_all_to_all},
            functions.dispatch_one_to_all,
            functions.collect_all_to_all,
        )


PREDEFINED = functions.get_predefined_dispatch_fn(Dispatch.DP_COMPUTE_PROTO)


def doubled_before(group: Any, batch: Any) -> Any:
    """Calls a method of the group itself, and gives its result to each rank."""
    return [[group.double(batch)] * group.world_size], {}


class Copier(Worker):
    @register(dispatch_mode={"dispatch_fn": PREDEFINED["dispatch_fn"], "collect_fn": PREDEFINED["collect_fn"]})
    async def copy(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=PREDEFINED, execute_mode=Execute.RANK_ZERO)
    async def copy_on_rank_zero(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode={"dispatch_fn": doubled_before, "collect_fn": functions.collect_all_to_all})
    def values(self, batch: DataProto) -> list[int]:
        assert batch.batch is not None
        found: list[int] = batch.batch["x"].tolist()
        return found

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double(self, batch: DataProto) -> DataProto:
        assert batch.batch is not None
        return DataProto.from_dict({"x": batch.batch["x"] * 2})

    @register(
        dispatch_mode={
            "dispatch_fn": PREDEFINED["dispatch_fn"],
            "collect_fn": lambda group, output: DataProto.concat(output),
        }
    )
    async def joined(self, batch: DataProto) -> DataProto:
        return batch


@pytest.fixture(scope="module")
def copier() -> Iterator[WorkerGroup]:
    with LocalWorkerGroup(ClassWithInitArgs(Copier), world_size=2) as group:
        yield group


def test_a_mode_made_of_predefined_functions_is_the_predefined_mode(copier: WorkerGroup) -> None:
    future = copier.copy(rows(1, 2, 3, 4))
    assert isinstance(future, DataProtoFuture)
    assert future.result(30) == rows(1, 2, 3, 4)
    # Batches that are still with their workers are joined as futures.
    assert copier.joined(rows(1, 2, 3, 4)).result(30) == rows(1, 2, 3, 4)


def test_a_dispatch_function_may_give_futures(copier: WorkerGroup) -> None:
    future = copier.copy(rows(1, 2, 3, 4))
    assert copier.copy(future).result(30) == rows(1, 2, 3, 4)
    assert copier.joined(future.rename("x", "y").rename("y", "x")).result(30) == rows(1, 2, 3, 4)


def test_a_dispatch_function_may_call_its_own_group(copier: WorkerGroup) -> None:
    assert copier.values(copier.copy(rows(1, 2))).result(30) == [[2, 4], [2, 4]]


def test_predefined_functions_suit_a_method_of_rank_zero(copier: WorkerGroup) -> None:
    assert copier.copy_on_rank_zero(rows(1, 2, 3)).result(30) == rows(1, 2, 3)


def test_futures_are_split_as_batches_are(copier: WorkerGroup) -> None:
    three = copier.copy(rows(1, 2, 3))
    (shares,), _ = functions.dispatch_dp_compute_data_proto(copier, three)
    assert values([share.result(30) for share in shares]) == [[1, 2], [3]]
    assert copier.copy(three).result(30) == rows(1, 2, 3)
