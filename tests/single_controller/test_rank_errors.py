"""What a call fails with: one rank's error is itself; those of several ranks are a group, caught as they are."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.data import DataProto
from asyncrl.errors import (
    AsyncRLError,
    CheckpointError,
    ConfigError,
    DeadlineError,
    EngineError,
    InfrastructureError,
    RankErrors,
    SchemaError,
    WeightError,
    WorkerDiedError,
    WorkerError,
)
from asyncrl.single_controller import Dispatch, Worker, WorkerGroup, invocation, register
from asyncrl.single_controller.call import Arguments, Failed, shapes_of

TIMEOUT_S = 30.0


class Faulty(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def fail(self, kinds: list[type[Exception] | None], *, weight: Any = None) -> int:
        kind = kinds[self.rank]
        if kind is not None:
            raise kind(f"of {self.rank}")
        return self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def train(self, batch: DataProto, rate: float) -> DataProto:
        raise KeyError(f"no such thing on {self.rank}")


@pytest.fixture(scope="module", autouse=True)
def by_value() -> None:
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine, what fails is told together; here every rank replies."""
    monkeypatch.setattr(invocation, "SIBLING_GRACE_S", TIMEOUT_S)


@pytest.fixture(scope="module")
def group(make_group: Callable[..., WorkerGroup]) -> WorkerGroup:
    return make_group(Faulty, name="faulty", world_size=3)


def test_one_rank_that_fails_is_that_error(group: WorkerGroup) -> None:
    with pytest.raises(CheckpointError) as caught:
        group.fail([None, CheckpointError, None]).result(TIMEOUT_S)
    assert type(caught.value) is CheckpointError
    origin = caught.value.origin
    assert origin is not None
    assert (origin.group, origin.rank, origin.method) == ("faulty", 1, "fail")
    assert "process" in origin.node
    assert "in fail" in origin.remote_traceback


def test_several_ranks_are_a_group_that_is_caught_as_its_members_are(group: WorkerGroup) -> None:
    with pytest.raises(SchemaError, match=r"3 of 3 ranks failed in faulty\.fail; first: of") as caught:
        group.fail([SchemaError, SchemaError, SchemaError]).result(TIMEOUT_S)
    found = caught.value
    assert isinstance(found, RankErrors)
    assert isinstance(found, ValueError)
    assert {type(each) for each in found.exceptions} == {SchemaError}
    ranks = {each.origin.rank for each in found.exceptions if isinstance(each, AsyncRLError) and each.origin}
    assert ranks == {0, 1, 2}
    # Of different classes: the nearest that both are of, and no nearer one.
    with pytest.raises(InfrastructureError) as mixed:
        group.fail([EngineError, None, WeightError]).result(TIMEOUT_S)
    assert isinstance(mixed.value, RankErrors)
    assert type(mixed.value).__mro__[1:].count(EngineError) == 0


def test_except_star_takes_it_apart(group: WorkerGroup) -> None:
    engines: list[str] = []

    def call() -> None:
        try:
            group.fail([EngineError, ConfigError, EngineError]).result(TIMEOUT_S)
        except* EngineError as found:
            engines.extend(str(each) for each in found.exceptions)

    with pytest.raises(ConfigError) as rest:
        call()
    assert sorted(engines) == ["of 0", "of 2"]
    assert isinstance(rest.value, RankErrors)
    assert [str(each) for each in rest.value.exceptions] == ["of 1"]


def test_errors_of_users_know_rank_node_method_traceback_and_shapes(group: WorkerGroup) -> None:
    data = DataProto.from_dict(
        tensors={"x": torch.zeros(6, 5, dtype=torch.int64)}, non_tensors={"name": np.array(["a"] * 6)}
    )
    with pytest.raises(WorkerError) as caught:
        group.train(data, rate=0.5).result(TIMEOUT_S)
    found = caught.value
    assert isinstance(found, RankErrors)
    assert len(found.exceptions) == 3
    for each in found.exceptions:
        assert isinstance(each, WorkerError)
        assert each.arguments == "(2 rows: x int64[5], name str; rate=0.5)"
        assert f"no such thing on {each.rank}" in each.remote_traceback
        assert f"called with {each.arguments} on {each.node}" in str(each)
    # The group itself answers as its first member.
    first = found.exceptions[0]
    assert isinstance(first, WorkerError)
    assert (found.rank, found.method, found.remote_traceback) == (first.rank, "train", first.remote_traceback)
    assert isinstance(found.__cause__, KeyError)


def test_shapes_of_what_is_no_batch(group: WorkerGroup) -> None:
    weight = {"layer": torch.zeros(2, 3), "names": ["a" * 500], "array": np.zeros(4)}
    with pytest.raises(CheckpointError) as caught:
        group.fail([CheckpointError, None, None], weight=weight).result(TIMEOUT_S)
    assert caught.value.origin is not None
    told = caught.value.origin.arguments
    assert "'layer': Tensor float32[2, 3]" in told
    assert "'array': ndarray float64[4]" in told
    assert len(told) < 400


def test_groups_travel_with_futures_and_through_pickle(group: WorkerGroup) -> None:
    data = DataProto.from_dict(tensors={"x": torch.zeros(3)})
    second = group.train(group.train(data, 0.1), 0.2)
    with pytest.raises(WorkerError) as caught:
        second.result(TIMEOUT_S)
    again = pickle.loads(pickle.dumps(caught.value))
    assert [type(again)] == [type(caught.value)]
    found = caught.value
    assert [str(each) for each in again.exceptions] == [str(each) for each in getattr(found, "exceptions", ())]
    assert (again.rank, again.__notes__) == (found.rank, found.__notes__)
    assert again.__notes__[-1] == "it was an argument of faulty.train, which was not called"


def test_a_death_explains_its_siblings() -> None:
    died, lost = WorkerDiedError("rank 1 died", rank=1), EngineError("connection reset")
    failure = RankErrors.of([lost, died], call="g.m", ranks=2)
    assert failure is died
    assert failure.__notes__ == ["also EngineError: connection reset"]
    both = RankErrors.of([died, lost, WorkerDiedError("rank 2 died", rank=2)], call="g.m", ranks=3)
    assert isinstance(both, WorkerDiedError)
    assert isinstance(both, RankErrors)
    assert (both.rank, len(both.exceptions)) == (1, 2)


def test_a_class_that_no_group_can_be_of_stays_itself() -> None:
    first, second = DeadlineError("slow"), DeadlineError("slower")
    failure = RankErrors.of([first, second], call="g.m", ranks=2)
    assert failure is first
    assert isinstance(failure, TimeoutError)
    assert failure.__notes__ == ["also DeadlineError: slower"]


def test_a_failure_that_cannot_be_described_is_reported_all_the_same() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    class Shapeless:
        @property
        def shape(self) -> None:
            raise ValueError("no shape")

        def __repr__(self) -> str:
            raise ValueError("no words")

    assert Failed.of(Mute()).message == "(its message cannot be made)"
    assert shapes_of(Arguments((Shapeless(), {Shapeless(): 1}), {"times": 2})) == "(Shapeless; dict; times=2)"
