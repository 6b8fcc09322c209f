"""Two-phase publication: which replica serves which version, as examples, then in random orders of events."""

from __future__ import annotations

import doctest
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncrl.rollout.publication
from asyncrl.errors import WeightError, WeightVersionError
from asyncrl.rollout.publication import Commit, Ended, Fence, Phase, Prepare, Publication, Serve


def fleet_of(*names: str, version: int = 0) -> Publication:
    fleet = Publication(version=version)
    for name in names:
        assert fleet.joined(name, holds=version) == (Serve(replica=name, version=version),)
    return fleet


def commands(decisions: tuple) -> dict[str, Prepare | Commit]:
    return {one.replica: one for one in decisions if isinstance(one, Prepare | Commit)}


def holdings(fleet: Publication) -> dict[str, tuple[int | None, bool]]:
    return {one.name: (one.holds, one.serves) for one in fleet.replicas}


def test_no_replica_commits_before_all_have_prepared():
    fleet = fleet_of("a", "b")
    prepare = commands(fleet.begin(1))
    assert {one.version for one in prepare.values()} == {1}
    assert fleet.succeeded(prepare["a"]) == ()
    assert fleet.awaited == ("b",)
    assert fleet.version == 0
    commit = commands(fleet.succeeded(prepare["b"]))
    assert set(commit) == {"a", "b"}
    assert all(isinstance(one, Commit) for one in commit.values())
    assert fleet.succeeded(commit["b"]) == ()
    assert holdings(fleet) == {"a": (0, True), "b": (1, True)}
    assert fleet.succeeded(commit["a"]) == (Ended(version=1, committed=("b", "a"), fenced={}),)
    assert fleet.phase is Phase.IDLE


def test_a_replica_that_fails_to_prepare_is_fenced_and_the_others_go_on():
    fleet = fleet_of("a", "b")
    prepare = commands(fleet.begin(1))
    assert fleet.failed(prepare["a"], "checksum") == (Fence(replica="a", reason="checksum"),)
    (commit,) = fleet.succeeded(prepare["b"])
    assert isinstance(commit, Commit)
    assert commit.replica == "b"
    assert fleet.succeeded(commit) == (Ended(version=1, committed=("b",), fenced={"a": "checksum"}),)
    assert holdings(fleet) == {"a": (0, False), "b": (1, True)}


def test_a_fenced_replica_serves_again_once_it_holds_the_current_version():
    fleet = fleet_of("a")
    prepare = commands(fleet.begin(1))
    assert fleet.failed(prepare["a"], "deadline")[-1] == Ended(version=1, committed=(), fenced={"a": "deadline"})
    (prepare_again,) = fleet.retry("a")
    assert isinstance(prepare_again, Prepare)
    assert fleet.retry("a") == (), "it is busy"
    (commit,) = fleet.succeeded(prepare_again)
    assert isinstance(commit, Commit)
    assert fleet.succeeded(commit) == (Serve(replica="a", version=1),)


def test_a_commit_that_fails_leaves_unknown_weights():
    fleet = fleet_of("a")
    prepare = commands(fleet.begin(1))["a"]
    (commit,) = fleet.succeeded(prepare)
    assert fleet.failed(commit, "died") == (
        Fence(replica="a", reason="died"),
        Ended(version=1, committed=(), fenced={"a": "died"}),
    )
    assert holdings(fleet) == {"a": (None, False)}


def test_who_joins_during_a_publication_is_not_waited_for():
    fleet = fleet_of("a")
    prepare = commands(fleet.begin(1))["a"]
    (late,) = fleet.joined("b")
    assert (late.replica, late.version) == ("b", 1)
    (commit,) = fleet.succeeded(prepare)
    assert fleet.succeeded(commit) == (Ended(version=1, committed=("a",), fenced={}),)
    (late_commit,) = fleet.succeeded(late)
    assert fleet.succeeded(late_commit) == (Serve(replica="b", version=1),)


def test_who_joins_early_and_prepares_in_time_commits_with_the_others():
    fleet = fleet_of("a")
    prepare = commands(fleet.begin(1))["a"]
    (late,) = fleet.joined("b")
    assert fleet.succeeded(late) == ()
    assert set(commands(fleet.succeeded(prepare))) == {"a", "b"}


def test_a_catch_up_that_a_new_version_overtakes_starts_over():
    fleet = fleet_of("a", version=4)
    (late,) = fleet.joined("b")
    assert late.version == 4
    prepare = commands(fleet.begin(5))
    assert set(prepare) == {"a"}, "b is still busy with 4"
    (late,) = fleet.succeeded(late)
    assert (late.replica, late.version) == ("b", 5)
    assert fleet.needed_versions == {4, 5}


def test_a_fenced_replica_that_hangs_keeps_no_old_version():
    fleet = fleet_of("a", "b")
    prepare = commands(fleet.begin(1))
    fleet.failed(prepare["b"], "deadline")
    fleet.succeeded(commands(fleet.succeeded(prepare["a"]))["a"])
    hanging = None
    for version in (2, 3, 4):
        prepare = commands(fleet.begin(version))
        hanging = hanging or prepare["b"]
        assert fleet.needed_versions == {version - 1, version}
        fleet.succeeded(commands(fleet.succeeded(prepare["a"]))["a"])
        assert fleet.needed_versions == {version}
    fenced, again = fleet.failed(hanging, "version 2 is released")
    assert (type(fenced), again.version) == (Fence, 4), "an older version is no reason to wait for the next"
    (commit,) = fleet.succeeded(again)
    assert fleet.succeeded(commit) == (Serve(replica="b", version=4),)


def test_a_tentative_version_that_none_can_prepare_is_withdrawn():
    fleet = fleet_of("a", "b")
    prepare = commands(fleet.begin(1, tentative=True))
    (early,) = fleet.joined("c")
    assert fleet.succeeded(early) == ()
    assert fleet.failed(prepare["a"], "no such tensor") == ()
    again, ended = fleet.failed(prepare["b"], "no such tensor")
    assert ended == Ended(version=1, committed=(), fenced={"a": "no such tensor", "b": "no such tensor"})
    assert (again.replica, again.version) == ("c", 0)
    assert (fleet.version, fleet.phase, fleet.needed_versions) == (0, Phase.IDLE, {0})
    assert holdings(fleet) == {"a": (0, True), "b": (0, True), "c": (None, False)}
    assert set(commands(fleet.begin(1))) == {"a", "b"}, "its number is free"


def test_a_tentative_version_whose_last_replica_is_lost_is_withdrawn():
    for lost in (Publication.left, lambda fleet, name: fleet.fence(name, "probe")):
        fleet = fleet_of("a", "b")
        prepare = commands(fleet.begin(1, tentative=True))
        fleet.failed(prepare["a"], "no such tensor")
        fleet.left("a")
        assert lost(fleet, "b")[-1].committed == ()
        assert (fleet.version, fleet.phase) == (0, Phase.IDLE)
    assert fleet.begin(1, tentative=True)[-1] == Ended(version=1, committed=(), fenced={}), "where none serves"
    assert fleet.version == 1


def test_one_that_cannot_prepare_a_tentative_version_is_fenced_when_another_commits_it():
    fleet = fleet_of("a", "b")
    prepare = commands(fleet.begin(1, tentative=True))
    assert fleet.failed(prepare["a"], "checksum") == ()
    assert holdings(fleet)["a"] == (0, True)
    fenced, commit = fleet.succeeded(prepare["b"])
    assert fenced == Fence(replica="a", reason="checksum")
    assert fleet.succeeded(commit) == (Ended(version=1, committed=("b",), fenced={"a": "checksum"}),)


def test_who_leaves_is_not_waited_for():
    fleet = fleet_of("a", "b")
    prepare = commands(fleet.begin(1))
    assert fleet.succeeded(prepare["a"]) == ()
    (commit,) = fleet.left("b")
    assert fleet.succeeded(commit) == (Ended(version=1, committed=("a",), fenced={"b": "left"}),)
    assert fleet.succeeded(prepare["b"]) == ()


def test_an_answer_of_an_earlier_life_counts_for_nothing():
    fleet = fleet_of("a")
    old = commands(fleet.begin(1))["a"]
    fleet.left("a")
    (new,) = fleet.joined("a")
    assert (new.version, old.version) == (1, 1)
    assert fleet.succeeded(old) == ()
    assert fleet.failed(old, "late") == ()
    assert holdings(fleet) == {"a": (None, False)}


def test_without_replicas_a_publication_ends_at_once():
    assert Publication(version=0).begin(1) == (Ended(version=1, committed=(), fenced={}),)


def test_an_unhealthy_replica_comes_back_with_the_weights_it_has():
    fleet = fleet_of("a", version=7)
    assert fleet.fence("a", "probe") == (Fence(replica="a", reason="probe"),)
    assert fleet.retry("a") == (Serve(replica="a", version=7),)


def test_one_writer_and_growing_versions():
    fleet = fleet_of("a", version=3)
    with pytest.raises(WeightVersionError, match="3 cannot follow 3"):
        fleet.begin(3)
    fleet.begin(4)
    with pytest.raises(WeightError, match="version 5 cannot be published while version 4 is preparing: it waits for a"):
        fleet.begin(5)
    with pytest.raises(WeightError, match="replica a is there already"):
        fleet.joined("a")


def test_publications_pass_a_pinned_replica_by_and_it_catches_up_afterwards():
    fleet = fleet_of("a", "b")
    assert fleet.pin("a") == ()
    assert not fleet.can_pin("a"), "once is enough"
    for version in (1, 2):
        (prepare,) = fleet.begin(version)
        assert prepare.replica == "b"
        (commit,) = fleet.succeeded(prepare)
        assert fleet.succeeded(commit) == (Ended(version=version, committed=("b",), fenced={}),)
    assert holdings(fleet) == {"a": (0, True), "b": (2, True)}
    (late,) = fleet.unpin("a")
    assert (late.replica, late.version) == ("a", 2)
    assert holdings(fleet)["a"] == (0, False), "its weights are older than the others'"
    (late_commit,) = fleet.succeeded(late)
    assert fleet.succeeded(late_commit) == (Serve(replica="a", version=2),)
    assert fleet.unpin("a") == ()


def test_a_pin_that_meets_a_publication_keeps_the_version_before():
    fleet = fleet_of("a", "b", "c")
    prepare = commands(fleet.begin(1))
    fleet.succeeded(prepare["b"])
    fleet.succeeded(prepare["c"])
    (commit,) = fleet.pin("a", "b")  # a was awaited, and b has prepared
    assert commit.replica == "c"
    assert fleet.succeeded(prepare["a"]) == (), "what it fetches is abandoned"
    assert not fleet.can_pin("c"), "it swaps its weights"
    with pytest.raises(WeightError, match="replica c cannot be pinned"):
        fleet.pin("c")
    assert fleet.succeeded(commit) == (Ended(version=1, committed=("c",), fenced={}),)
    assert holdings(fleet) == {"a": (0, True), "b": (0, True), "c": (1, True)}
    assert fleet.can_pin("c")


def test_a_pin_that_ends_before_the_next_commit_has_missed_nothing():
    fleet = fleet_of("a", "b")
    fleet.pin("a")
    assert fleet.unpin("a") == ()
    assert holdings(fleet)["a"] == (0, True)
    fleet.pin("a")
    fleet.begin(1)
    (late,) = fleet.unpin("a")
    assert (late.version, fleet.awaited) == (1, ("b",)), "the publication that passed it by does not wait for it"


def test_a_pinned_replica_that_leaves_comes_back_unpinned():
    fleet = fleet_of("a", "b")
    fleet.pin("a", "b")
    fleet.left("a")
    (late,) = (*fleet.joined("a", holds=None), *fleet.fence("b", "probe")[1:])
    assert isinstance(late, Prepare)
    assert fleet.unpin("b") == (), "nor is one that was fenced"


class Engines:
    """What the replicas really have: verified bytes by version, and the version in use."""

    def __init__(self) -> None:
        self.verified: dict[str, set[int]] = {}
        self.in_use: dict[str, int | None] = {}

    def join(self, name: str, holds: int | None) -> None:
        self.verified[name] = set() if holds is None else {holds}
        self.in_use[name] = holds

    def carry_out(self, command: Prepare | Commit) -> None:
        if isinstance(command, Prepare):
            self.verified[command.replica].add(command.version)
        else:
            self.in_use[command.replica] = command.version


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), steps=st.integers(1, 120))
def test_in_any_order_no_replica_serves_unverified_weights_and_publications_end(seed: int, steps: int):
    draw = random.Random(seed)
    fleet = Publication(version=0)
    engines = Engines()
    outstanding: list[Prepare | Commit] = []
    serving: set[str] = set()
    pinned: dict[str, int] = {}
    ended: list[int] = []
    begun: list[int] = []
    names = ["a", "b", "c", "d"]

    def apply(decisions: tuple) -> None:
        for decision in decisions:
            if isinstance(decision, Prepare | Commit):
                outstanding.append(decision)
            elif isinstance(decision, Serve):
                serving.add(decision.replica)
            elif isinstance(decision, Fence):
                serving.discard(decision.replica)
                pinned.pop(decision.replica, None)
            else:
                ended.append(decision.version)
                withdrawn = decision.version != fleet.version
                assert all(engines.in_use[name] == fleet.version or withdrawn for name in serving - pinned.keys())
                assert set(decision.committed) <= serving

    def check(last: int | None) -> None:
        assert serving == {one.name for one in fleet.replicas if one.serves}
        for name in serving:
            assert engines.in_use[name] in engines.verified[name]
        assert {name: engines.in_use[name] for name in pinned} == pinned
        for one in fleet.replicas:
            if one.serves:
                assert engines.in_use[one.name] == one.holds
        assert last is None or fleet.version >= last

    def answer(*, well: bool) -> None:
        command = outstanding.pop(draw.randrange(len(outstanding)))
        current = {one.name: one.command for one in fleet.replicas}.get(command.replica) == command
        if well:
            if current:
                engines.carry_out(command)
            apply(fleet.succeeded(command))
        else:
            apply(fleet.failed(command, "broken"))

    for _ in range(steps):
        before = fleet.version
        there = [one.name for one in fleet.replicas]
        move = draw.choice(
            ["begin", "answer", "answer", "answer", "fail", "join", "leave", "fence", "retry", "pin", "unpin"]
        )
        name = draw.choice(names)
        if move == "begin" and fleet.phase is Phase.IDLE:
            version = before + draw.randint(1, 3)
            begun.append(version)
            apply(fleet.begin(version, tentative=draw.random() < 0.5))
        elif move == "answer" and outstanding:
            answer(well=True)
        elif move == "fail" and outstanding:
            answer(well=False)
        elif move == "join" and name not in there:
            holds = draw.choice([None, before])
            engines.join(name, holds)
            apply(fleet.joined(name, holds=holds))
        elif move == "leave":
            serving.discard(name)
            pinned.pop(name, None)
            apply(fleet.left(name))
        elif move == "fence":
            apply(fleet.fence(name, "unhealthy"))
        elif move == "retry":
            apply(fleet.retry(name))
        elif move == "pin" and fleet.can_pin(name):
            pinned[name] = fleet.version
            apply(fleet.pin(name))
        elif move == "unpin" and pinned.pop(name, None) is not None:
            decisions = fleet.unpin(name)
            serving.difference_update(each.name for each in fleet.replicas if not each.serves)
            apply(decisions)
        check(before)

    while outstanding:
        before = fleet.version
        answer(well=draw.random() < 0.7)
        check(before)
    assert fleet.phase is Phase.IDLE
    assert ended == begun
    for name in names:  # and every replica can come back
        pinned.pop(name, None)
        decisions = (*fleet.unpin(name), *fleet.retry(name))
        serving.difference_update(each.name for each in fleet.replicas if not each.serves)
        apply(decisions)
    while outstanding:
        answer(well=True)
    check(None)
    assert serving == {one.name for one in fleet.replicas}
    assert all(holds == fleet.version for holds, _ in holdings(fleet).values())


def test_the_example_in_the_docstring_runs():
    results = doctest.testmod(asyncrl.rollout.publication)
    assert (results.failed, results.attempted > 0) == (0, True)
