import pytest

from asyncrl.errors import ResourceError
from asyncrl.rollout.routing import ReplicaLoad, least_expected_work


def test_the_least_loaded_serving_replica_gets_the_work():
    loads = [
        ReplicaLoad(name="a", rows=8),
        ReplicaLoad(name="b", rows=2, serving=False),
        ReplicaLoad(name="c", rows=6),
    ]
    assert least_expected_work(loads) == "c"


def test_a_faster_replica_counts_its_rows_for_less():
    assert least_expected_work([ReplicaLoad(name="a", rows=4), ReplicaLoad(name="b", rows=6, weight=2.0)]) == "b"


def test_equals_are_taken_in_the_order_of_their_names():
    assert least_expected_work([ReplicaLoad(name="b", rows=1), ReplicaLoad(name="a", rows=1)]) == "a"


def test_nobody_serving_is_an_error_with_a_name():
    with pytest.raises(ResourceError, match="no rollout replica serves"):
        least_expected_work([ReplicaLoad(name="a", rows=0, serving=False)])
