import random

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.rollout.router import LengthEstimate, ReplicaLoad, affinity_key, choose, rendezvous


def test_the_least_loaded_serving_replica_gets_the_work():
    loads = [
        ReplicaLoad(name="a", work=8),
        ReplicaLoad(name="b", work=2, serving=False),
        ReplicaLoad(name="c", work=6),
    ]
    assert choose(loads) == "c"


def test_equals_are_taken_in_the_order_of_their_names():
    assert choose([ReplicaLoad(name="b", work=1), ReplicaLoad(name="a", work=1)]) == "a"


def test_without_a_serving_replica_none_is_chosen():
    assert choose([ReplicaLoad(name="a", work=0, serving=False)]) is None


def test_a_session_stays_where_it_is_until_that_costs_too_much():
    loads = dict.fromkeys("abcd", 0.0)

    def chosen(margin: float) -> str | None:
        return choose((ReplicaLoad(name=n, work=w) for n, w in loads.items()), key="session 7", margin=margin)

    home = chosen(100.0)
    assert home is not None
    loads[home] = 100.0
    assert chosen(100.0) == home
    loads[home] = 101.0
    second = chosen(100.0)
    assert second != home
    loads[home] = 0.0
    assert chosen(100.0) == home


def test_without_a_reason_the_newest_weights_win_among_equals():
    loads = [ReplicaLoad(name="a", work=1, weight_version=3), ReplicaLoad(name="b", work=1, weight_version=4)]
    assert choose(loads) == "b"
    assert choose(loads, min_version=5) is None


def test_keys():
    assert affinity_key([1, 2, 3], session="s", prefix_tokens=2) == "session s"
    assert affinity_key([1, 2, 3], prefix_tokens=2) == affinity_key([1, 2, 9, 9], prefix_tokens=2)
    assert affinity_key([1], prefix_tokens=2) is None
    assert affinity_key([1, 2, 3]) is None


def test_expected_lengths():
    lengths = LengthEstimate(memory=2.0)
    assert lengths.work(prompt=10, sampled=0, limit=100) == 101.0
    for tokens in (20, 40, 40):
        lengths.observe(tokens)  # 20, 30, 35 on average, of a memory of two
    assert lengths.work(prompt=0, sampled=5, limit=100) == 30.0
    assert lengths.work(prompt=0, sampled=60, limit=100) == 17.5
    assert lengths.work(prompt=0, sampled=95, limit=100) == 5.0
    assert lengths.work(prompt=0, sampled=100, limit=100) == 0.0


REPLICAS = st.lists(
    st.builds(
        ReplicaLoad,
        name=st.sampled_from("abcdefgh"),
        work=st.integers(0, 20).map(float),
        serving=st.booleans(),
        weight_version=st.integers(0, 3),
    ),
    max_size=8,
    unique_by=lambda load: load.name,
)


@given(REPLICAS, st.one_of(st.none(), st.text(max_size=5)), st.integers(0, 10), st.integers(0, 3), st.randoms())
def test_laws_of_the_choice(
    loads: list[ReplicaLoad], key: str | None, margin: int, min_version: int, dice: random.Random
):
    chosen = choose(loads, key=key, margin=margin, min_version=min_version)
    able = {load.name: load for load in loads if load.serving and load.weight_version >= min_version}
    assert (chosen is None) == (not able)
    shuffled = [*loads]
    dice.shuffle(shuffled)
    assert choose(shuffled, key=key, margin=margin, min_version=min_version) == chosen
    if chosen is None:
        return
    least = min(load.work for load in able.values())
    assert able[chosen].work <= least + (margin if key is not None else 0)
    # One that was not chosen, and was not the least busy one, may leave without a change of the choice.
    for load in loads:
        if load.name != chosen and load.work > least:
            rest = [other for other in loads if other is not load]
            assert choose(rest, key=key, margin=margin, min_version=min_version) == chosen


def test_a_change_of_members_moves_only_the_keys_it_must():
    keys = [f"session {number}" for number in range(2000)]
    before = {key: rendezvous(key, "abcd")[0] for key in keys}
    joined = {key: rendezvous(key, "abcde")[0] for key in keys}
    moved = [key for key in keys if joined[key] != before[key]]
    assert {joined[key] for key in moved} == {"e"}
    assert 0.15 < len(moved) / len(keys) < 0.25
    gone = {key: rendezvous(key, "abd")[0] for key in keys}
    assert all(gone[key] == before[key] for key in keys if before[key] != "c")
