"""Batches through Ray's object store: the real one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.data import DataProto
from asyncrl.data.ragged import values_of

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    import ray

    if ray.is_initialized():
        yield ray
        return
    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=200 << 20, logging_level=logging.ERROR)
    yield ray
    ray.shutdown()


def made() -> DataProto:
    return DataProto.from_dict(
        tensors={"x": torch.ones(1 << 10, 1 << 10), "ids": [torch.full((row % 5,), row) for row in range(1 << 10)]},
        non_tensors={"o": [[row, None] for row in range(1 << 10)], "n": np.arange(1 << 10)},
        meta_info={"step": 1},
    )


def test_a_batch_put_into_the_store_comes_back(ray: Any) -> None:
    data = made()
    received = ray.get(ray.put(data))
    assert received == data
    assert received.read_only
    assert not received.writable().read_only


def test_two_readers_read_the_same_memory(ray: Any) -> None:
    reference = ray.put(made())
    first, second = ray.get(reference), ray.get(reference)
    assert first.batch["x"].data_ptr() == second.batch["x"].data_ptr()
    assert values_of(first.batch["ids"]).data_ptr() == values_of(second.batch["ids"]).data_ptr()
    del reference
    assert second.batch["x"].sum() == 1 << 20, "the batch keeps the memory alive"


def test_a_worker_computes_on_a_batch_from_the_store(ray: Any) -> None:
    @ray.remote
    def backoff(batch: DataProto) -> DataProto:
        assert batch.batch is not None
        return batch[:2].select(["ids"], ["o"]).with_columns(y=batch.batch["x"][:2, 0] * 2)

    received = ray.get(backoff.remote(ray.put(made())))
    assert received.schema.names == ("ids", "y", "o")
    assert received.batch["y"].tolist() == [2.0, 2.0]
