"""Whether a cluster has room, decided without one."""

from __future__ import annotations

import pytest

from asyncrl.errors import ResourceError
from asyncrl.single_controller import ResourcePool
from asyncrl.single_controller.resource_pool import NodeResources, PlacementStrategy, check_capacity

NODES = [
    NodeResources("a", {"CPU": 4, "GPU": 2}, {"CPU": 1, "GPU": 2}),
    NodeResources("b", {"CPU": 4}, {"CPU": 4}),
]
CPU = {"CPU": 1.0}
GPU = {"CPU": 1.0, "GPU": 1.0}


@pytest.mark.parametrize(
    ("groups", "strategy"),
    [
        ([[CPU] * 8], "PACK"),
        ([[GPU] * 2, [CPU] * 4], "PACK"),
        ([[CPU] * 4, [CPU] * 4], "STRICT_PACK"),
        ([[CPU] * 2], "STRICT_SPREAD"),
    ],
)
def test_groups_that_fit(groups: list[list[dict[str, float]]], strategy: PlacementStrategy) -> None:
    check_capacity(groups, strategy, NODES)


@pytest.mark.parametrize(
    ("groups", "strategy", "cpus"),
    [
        ([[CPU] * 4, [CPU] * 8], "STRICT_PACK", [8, 4]),
        ([[CPU], [CPU] * 3], "STRICT_SPREAD", [1, 1, 2]),
    ],
)
def test_groups_that_fit_in_another_order(
    groups: list[list[dict[str, float]]], strategy: PlacementStrategy, cpus: list[int]
) -> None:
    check_capacity(groups, strategy, [NodeResources("", {"CPU": count}, {}) for count in cpus])


def test_bundles_without_a_gpu_leave_the_node_with_gpus_to_those_that_need_it() -> None:
    check_capacity([[CPU] * 4, [GPU] * 2], "PACK", NODES)


@pytest.mark.parametrize(
    ("groups", "strategy"),
    [
        ([[CPU] * 9], "PACK"),
        ([[GPU] * 3], "PACK"),
        ([[{"CPU": 5.0}]], "PACK"),
        ([[CPU] * 5], "STRICT_PACK"),
        ([[CPU] * 3], "STRICT_SPREAD"),
        ([[CPU] * 4, [CPU] * 4, [CPU]], "STRICT_PACK"),
        ([[CPU], [CPU] * 3], "STRICT_SPREAD"),
        ([[GPU] * 2], "STRICT_SPREAD"),
        ([[{"CPU": 2.5}]] * 3, "PACK"),
        ([[{"CPU": 2.0, "GPU": 1.0}, {"CPU": 3.0, "GPU": 1.0}]], "PACK"),  # one node has GPUs, and 4 CPUs
        ([[{"CPU": 2.5}, {"CPU": 3.0}, {"CPU": 2.6}]], "PACK"),  # one on a node
    ],
)
def test_groups_that_do_not_fit(groups: list[list[dict[str, float]]], strategy: PlacementStrategy) -> None:
    with pytest.raises(ResourceError):
        check_capacity(groups, strategy, NODES)


def test_the_message_shows_requested_and_existing_resources() -> None:
    with pytest.raises(ResourceError) as caught:
        check_capacity([[GPU], [GPU] * 2], "PACK", NODES)
    assert str(caught.value).splitlines() == [
        "placement group 1 does not fit (PACK, 2 bundles, 2 CPU, 2 GPU)",
        "requested: 3 CPU, 3 GPU",
        "in total:  8 CPU, 2 GPU, available now: 5 CPU, 2 GPU",
        "node a: 4 CPU, 2 GPU, available now: 1 CPU, 2 GPU",
        "node b: 4 CPU, available now: 4 CPU",
    ]


def test_every_node_of_a_pool_has_workers() -> None:
    assert ResourcePool([2, 3]).world_size == 5
    assert ResourcePool([2, 3]).store == [2, 3]
    with pytest.raises(ResourceError, match=r"got \[2, 0\]"):
        ResourcePool([2, 0])
    pool = ResourcePool([2])
    pool.add_node(3)
    assert pool() == [2, 3]
    assert pool.local_world_size_list() == [2, 2, 3, 3, 3]
    assert pool.local_rank_list() == [0, 1, 0, 1, 2]
    with pytest.raises(ResourceError, match="at least one worker, got 0"):
        pool.add_node(0)
