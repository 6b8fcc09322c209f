"""Weights in two phases: what is refused leaves everything as it was; tied tensors stay one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.errors import WeightMismatchError, WeightVersionError
from engines.rollout.transformers.weights import ShadowWeights

ModelOf = Callable[..., Any]


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.named_parameters()}


class Lender:
    """Lends tensors, and records whether they were given back."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.lent = False

    @contextmanager
    def lend(self) -> Iterator[dict[str, torch.Tensor]]:
        self.lent = True
        yield self.tensors
        self.lent = False


def adopt(weights: ShadowWeights, lender: Lender, *, version: int) -> None:
    lease = ExitStack()
    tensors = lease.enter_context(lender.lend())
    weights.write(tensors, version=version, stop=threading.Event(), lease=lease)


class Watched(dict[str, torch.Tensor]):
    """Tensors that call ``between`` when ``after`` of them have been checked, and when as many have been written."""

    def __init__(self, tensors: dict[str, torch.Tensor], between: Callable[[], object], *, after: int) -> None:
        super().__init__(tensors)
        self._between = between
        self._after = after

    def items(self) -> Any:
        for n, item in enumerate(super().items()):
            if n == self._after:
                self._between()
            yield item


def second_call(action: Callable[[], object]) -> Callable[[], None]:
    calls = count(1)

    def call() -> None:
        if next(calls) == 2:
            action()

    return call


def update(weights: ShadowWeights, tensors: dict[str, torch.Tensor], *, version: int) -> None:
    weights.write(tensors, version=version, stop=threading.Event())
    weights.swap(version)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=torch.tensor([[1, 2, 3, 4]])).logits
    return result


@pytest.mark.parametrize("tied", [False, True])
def test_the_model_becomes_the_other_one(model_of: ModelOf, tied: bool) -> None:
    serving, other = model_of("llama", seed=1, tied=tied), model_of("llama", seed=2, tied=tied)
    weights = ShadowWeights(serving, version=0)
    for version, source in ((1, other), (2, model_of("llama", seed=3, tied=tied)), (5, other)):
        update(weights, tensors_of(source), version=version)
        assert torch.equal(logits(serving), logits(source))
        assert weights.version == version
    assert (serving.lm_head.weight is serving.model.embed_tokens.weight) == tied


def test_nothing_changes_before_the_swap(model_of: ModelOf) -> None:
    serving, other = model_of("llama", seed=1), model_of("llama", seed=2)
    before = logits(serving)
    weights = ShadowWeights(serving, version=0)
    source = tensors_of(other)
    seen: list[torch.Tensor] = []
    watched = Watched(source, lambda: seen.append(logits(serving)), after=len(source) - 1)
    weights.write(watched, version=1, stop=threading.Event())
    seen.append(logits(serving))
    assert [torch.equal(each, before) for each in seen] == [True] * 3
    source["lm_head.weight"].zero_()  # the shadow is a copy
    weights.swap(1)
    assert torch.equal(logits(serving), logits(other))


@pytest.mark.parametrize(
    "names", [{"lm_head.weight"}, {"model.embed_tokens.weight"}, {"lm_head.weight", "model.embed_tokens.weight"}]
)
def test_tied_embeddings_come_under_either_name(model_of: ModelOf, names: set[str]) -> None:
    serving, other = model_of("qwen2", seed=1, tied=True), model_of("qwen2", seed=2, tied=True)
    tensors = tensors_of(other)
    shared = tensors.pop("model.embed_tokens.weight")
    update(ShadowWeights(serving, version=0), tensors | dict.fromkeys(names, shared), version=1)
    assert torch.equal(logits(serving), logits(other))


def test_tied_names_must_agree(model_of: ModelOf) -> None:
    serving = model_of("llama", seed=1, tied=True)
    tensors = tensors_of(serving)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    with pytest.raises(WeightMismatchError, match="are one tensor in the model"):
        ShadowWeights(serving, version=0).write(tensors, version=1, stop=threading.Event())


def test_other_floating_dtypes_are_cast(model_of: ModelOf) -> None:
    serving, other = model_of("llama", seed=1), model_of("llama", seed=2)
    half = {name: tensor.to(torch.bfloat16) for name, tensor in tensors_of(other).items()}
    update(ShadowWeights(serving, version=0), half, version=1)
    assert torch.equal(serving.lm_head.weight, half["lm_head.weight"].float())
    assert serving.lm_head.weight.dtype == torch.float32


def broken(tensors: dict[str, torch.Tensor], how: str) -> dict[str, torch.Tensor]:
    if how == "missing":
        del tensors["model.norm.weight"]
    elif how == "unknown":
        tensors["model.extra"] = torch.zeros(1)
    elif how == "shape":
        tensors["model.norm.weight"] = torch.zeros(33)
    else:
        tensors["model.norm.weight"] = torch.zeros(32, dtype=torch.int64)
    return tensors


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("missing", "missing names model.norm.weight"),
        ("unknown", "unknown names model.extra"),
        ("shape", r"model.norm.weight of version 1 has shape \(33,\), the model's is \(32,\)"),
        ("dtype", "has dtype torch.int64"),
    ],
)
def test_what_is_not_the_models_is_refused(model_of: ModelOf, how: str, words: str) -> None:
    serving = model_of("llama", seed=1)
    before = logits(serving)
    weights = ShadowWeights(serving, version=0)
    with pytest.raises(WeightMismatchError, match=words):
        weights.write(broken(tensors_of(model_of("llama", seed=2)), how), version=1, stop=threading.Event())
    assert torch.equal(logits(serving), before)
    with pytest.raises(WeightVersionError, match="none is prepared"):
        weights.swap(1)


def test_versions_only_grow(model_of: ModelOf) -> None:
    serving = model_of("llama", seed=1)
    weights = ShadowWeights(serving, version=4)
    for version in (3, 4):
        with pytest.raises(WeightVersionError, match=f"version {version} does not follow version 4"):
            weights.write(tensors_of(serving), version=version, stop=threading.Event())
    update(weights, tensors_of(serving), version=7)
    with pytest.raises(WeightVersionError, match="none is prepared"):
        weights.swap(7)


def test_an_interrupted_write_prepares_nothing(model_of: ModelOf) -> None:
    serving, other = model_of("llama", seed=1), model_of("llama", seed=2)
    weights = ShadowWeights(serving, version=0)
    update(weights, tensors_of(other), version=1)
    stop = threading.Event()
    weights.write(Watched(tensors_of(serving), second_call(stop.set), after=3), version=2, stop=stop)
    with pytest.raises(WeightVersionError):
        weights.swap(2)
    assert torch.equal(logits(serving), logits(other))


def test_memory_is_used_again(model_of: ModelOf) -> None:
    serving = model_of("llama", seed=1)
    weights = ShadowWeights(serving, version=0)
    places = set()
    for version in range(1, 6):
        update(weights, tensors_of(serving), version=version)
        places.add(serving.lm_head.weight.data_ptr())
    assert len(places) == 2


def test_lent_tensors_are_served_in_place_until_the_next_version(model_of: ModelOf) -> None:
    serving = model_of("llama", seed=1)
    weights = ShadowWeights(serving, version=0)
    lenders = [Lender(tensors_of(model_of("llama", seed=seed))) for seed in range(2, 5)]
    for version, lender in enumerate(lenders, start=1):
        adopt(weights, lender, version=version)
        weights.swap(version)
        assert serving.lm_head.weight.data_ptr() == lender.tensors["lm_head.weight"].data_ptr()
        assert [each.lent for each in lenders] == [each is lender for each in lenders]
    update(weights, tensors_of(model_of("llama", seed=9)), version=8)
    assert not any(lender.lent for lender in lenders)
    assert torch.equal(logits(serving), logits(model_of("llama", seed=9)))
    weights.close()


def test_lent_tensors_are_given_back_when_they_will_not_be_served(model_of: ModelOf) -> None:
    weights = ShadowWeights(model_of("llama", seed=1), version=0)
    first, second, third = (Lender(tensors_of(model_of("llama", seed=seed))) for seed in (2, 3, 4))
    adopt(weights, first, version=1)
    adopt(weights, second, version=2)
    assert (first.lent, second.lent) == (False, True)
    weights.swap(2)
    stop = threading.Event()
    lease = ExitStack()
    tensors = Watched(lease.enter_context(third.lend()), second_call(stop.set), after=1)
    weights.write(tensors, version=3, stop=stop, lease=lease)
    assert (second.lent, third.lent) == (True, False)
    weights.close()
    assert not second.lent


def test_another_dtype_is_copied_and_given_back_at_once(model_of: ModelOf) -> None:
    serving, other = model_of("llama", seed=1), model_of("llama", seed=2)
    weights = ShadowWeights(serving, version=0)
    lender = Lender({name: tensor.double() for name, tensor in tensors_of(other).items()})
    adopt(weights, lender, version=1)
    assert not lender.lent
    weights.swap(1)
    assert torch.equal(logits(serving), logits(other))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.sampled_from(["copy", "lend", "lend double", "swap", "stop"]), max_size=14))
def test_it_serves_the_committed_version_and_holds_no_other_lease(model_of: ModelOf, steps: list[str]) -> None:
    serving = model_of("llama", seed=0)
    weights = ShadowWeights(serving, version=0)
    name = "model.norm.weight"
    held, prepared, lenders = 1.0, None, {}
    for version, step in enumerate(steps, start=2):
        tensors = {each: torch.full_like(tensor, version) for each, tensor in tensors_of(serving).items()}
        if step == "swap":
            if weights.prepared is None:
                continue
            assert prepared is not None
            held, prepared = prepared, None
            weights.swap(weights.prepared)
        elif step == "copy":
            weights.write(tensors, version=version, stop=threading.Event())
            prepared = version
        else:
            if step == "lend double":
                tensors |= {each: tensor.double() for each, tensor in tensors.items()}
            lender = lenders[version] = Lender(tensors)
            stop, lease = threading.Event(), ExitStack()
            lent = lease.enter_context(lender.lend())
            if step == "stop":
                lent = Watched(lent, second_call(stop.set), after=1)
            weights.write(lent, version=version, stop=stop, lease=lease)
            prepared = None if step == "stop" else version
        assert weights.prepared == prepared
        live = dict(serving.named_parameters())
        assert all(float(live[each].flatten()[0].detach()) == held for each in (name, "lm_head.weight") if held > 1)
        for version_lent, lender in lenders.items():
            needed = version_lent in (held, prepared) and lender.tensors[name].dtype == torch.float32
            assert lender.lent == needed
    weights.close()
    assert not any(lender.lent for lender in lenders.values())
