"""Which pools a run has, and whether the cluster (of 8 CPUs) can hold them together."""

from __future__ import annotations

import pytest

from asyncrl.errors import ConfigError, ResourceError
from asyncrl.single_controller import ResourcePoolManager, Role

MAPPING = {Role.Actor: "training", Role.Critic: "training", Role.Rollout: "generation"}


def test_roles_have_short_names() -> None:
    assert str(Role.RefPolicy) == "ref"
    assert Role.from_string("RM") is Role.RewardModel
    with pytest.raises(ConfigError, match="no role is named 'judge'") as caught:
        Role.from_string("judge")
    assert "actor_rollout" in caught.value.remedy


def test_a_role_has_a_pool_that_is_specified() -> None:
    with pytest.raises(ResourceError, match=r"role rollout is mapped to pool 'generation', and .* has \['training'\]"):
        ResourcePoolManager({"training": [1]}, MAPPING)
    manager = ResourcePoolManager({"training": [1, 2], "generation": [1]}, MAPPING, use_gpu=True)
    assert manager.get_n_gpus() == 4
    with pytest.raises(ResourceError, match=r"call create_resource_pool\(\) first"):
        manager.get_resource_pool(Role.Actor)
    with pytest.raises(ResourceError, match=r"role ref has no pool: mapping has \['actor', 'critic', 'rollout'\]"):
        manager.get_resource_pool(Role.RefPolicy)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
class TestOnACluster:
    def test_roles_of_one_pool_share_its_bundles(self) -> None:
        manager = ResourcePoolManager({"training": [1, 2], "generation": [2]}, MAPPING)
        manager.create_resource_pool()
        training = manager.get_resource_pool(Role.Actor)
        assert manager.get_resource_pool(Role.Critic) is training
        assert (training.store, training.max_colocate_count, training.bundle()) == ([1, 2], 2, {"CPU": 2})
        assert manager.get_resource_pool(Role.Rollout).bundle() == {"CPU": 1}

    def test_pools_that_do_not_fit_together_are_refused(self) -> None:
        manager = ResourcePoolManager({"training": [2, 1], "generation": [3]}, MAPPING)
        with pytest.raises(ResourceError) as caught:
            manager.create_resource_pool()
        lines = str(caught.value).splitlines()
        assert lines[0].startswith("the cluster cannot hold the 2 pools together: placement group 2 does not fit")
        assert lines[1] == "requested: 9 CPU"
        assert lines[2].startswith("in total:  8 CPU")
        assert lines[3].startswith("node ")
        assert lines[-2:] == [
            "pool training: [2, 1] bundles of 2 CPU, for 2 groups",
            "pool generation: [3] bundles of 1 CPU",
        ]
        with pytest.raises(ResourceError, match="not created yet"):
            manager.get_resource_pool(Role.Actor)

    def test_a_bundle_that_fits_no_node_is_refused(self) -> None:
        manager = ResourcePoolManager({"training": [1]}, {Role.Actor: "training"}, use_gpu=True)
        with pytest.raises(ResourceError, match=r"pool training: \[1\] bundles of 1 CPU, 1 GPU"):
            manager.create_resource_pool()
        manager = ResourcePoolManager({"a": [1]}, {"mine": "a"}, resources_per_worker={"TPU": 1})
        with pytest.raises(ResourceError, match="requested: 1 CPU, 1 TPU"):
            manager.create_resource_pool()
