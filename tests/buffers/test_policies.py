"""Selections, evictions, quotas and rates: hand-worked cases, and laws over random ones."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.credit import Credit
from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.errors import ConfigError, DeadlineError, InvalidDataError
from asyncrl.interfaces import GroupSummary
from asyncrl.staleness import AdmissionLaw
from buffers.policies import RateLimit, Reservoir, ZeroVariance, apportion
from buffers.replay import AsyncReplayBuffer
from buffers.selection import PrioritizedOrder, UniformOrder, make_selection, windowed_staleness

ROWS = object()


def summary(
    group_id: int, version: int = 0, *, rewards: tuple[float, ...] = (0.0, 1.0), environment: str = ""
) -> GroupSummary:
    return GroupSummary(
        group_id=group_id,
        rows=len(rewards),
        oldest_version=version,
        tokens=10,
        version_tokens={version: 10},
        rewards=rewards,
        lengths=(5,) * len(rewards),
        environment=environment,
    )


async def filled(buffer: AsyncReplayBuffer, *groups: GroupSummary) -> AsyncReplayBuffer:
    for group in groups:
        await buffer.admit(group.group_id)
        buffer.put(group, ROWS)
    return buffer


def group_ids_of(groups: tuple) -> list[int]:
    return [group.summary.group_id for group in groups]


# ---------------------------------------------------------------------------------------------------------- selections


async def test_a_window_lets_some_groups_pass_and_then_waits():
    buffer = AsyncReplayBuffer(capacity=8, max_staleness=9, selection="windowed_fifo", window=3)
    for group_id in range(6):
        await buffer.admit(group_id)
    for group_id in (4, 2, 1, 3):  # 0 is slow
        buffer.put(summary(group_id), ROWS)
    assert group_ids_of(await buffer.select(2, weight_version=0)) == [1, 2]
    with pytest.raises(DeadlineError, match="group_id 0 is not finished"):
        await buffer.select(1, weight_version=0, timeout_s=0.0)
    buffer.put(summary(0), ROWS)
    assert group_ids_of(await buffer.select(3, weight_version=0)) == [0, 3, 4]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    groups_per_step=st.integers(1, 4),
    window=st.integers(1, 9),
    lead=st.integers(0, 3),
)
def test_the_bound_of_a_window_holds_and_nothing_is_dropped(seed: int, groups_per_step: int, window: int, lead: int):
    """The proof in ``buffers/selection.py``, tested: any finishing order, tokens sampled from issue to finish."""
    dice = random.Random(seed)
    steps = 12
    law = AdmissionLaw(groups_per_step, max_staleness=lead, total_groups=steps * groups_per_step)
    order = make_selection("windowed_fifo", window=window)
    issued_at: dict[int, int] = {}
    running: list[int] = []
    worst = 0
    for version in range(steps):
        law.published(version)
        while True:
            while law.may_issue():
                group_id = law.issue()
                issued_at[group_id] = version
                running.append(group_id)
                order.admitted(group_id)
            chosen = order.choose(groups_per_step, weight_version=version)
            if chosen is not None:
                break
            group_id = running.pop(dice.randrange(len(running)))
            order.ready(summary(group_id, issued_at[group_id]))
        for group_id in chosen:
            order.forget(group_id)
            worst = max(worst, version - issued_at[group_id])
    assert worst <= windowed_staleness(lead, window=window, groups_per_step=groups_per_step)


def test_a_window_holds_for_each_group_that_is_admitted_late():
    order = make_selection("windowed_fifo", window=3)
    for group_id in (6, 7, 8):
        order.admitted(group_id)
        order.ready(summary(group_id))
    order.admitted(5)
    assert order.choose(2, weight_version=0) == (6, 7)
    order.admitted(4)
    assert order.choose(1, weight_version=0) == (6,)
    assert order.choose(2, weight_version=0) is None  # 7 is not below 4 + 3


async def test_freshest_takes_the_newest_versions_first():
    buffer = AsyncReplayBuffer(capacity=8, max_staleness=9, selection="freshest")
    await filled(buffer, summary(0, 3), summary(1, 5), summary(2, 5), summary(3, 4))
    assert group_ids_of(await buffer.select(3, weight_version=5)) == [1, 2, 3]


def test_uniform_draws_are_uniform_and_repeatable():
    counts: Counter[int] = Counter()
    order = UniformOrder(seed=1)
    for group_id in range(5):
        order.ready(summary(group_id))
    order.forget(2)
    for _ in range(4000):
        counts.update(order.choose(2, weight_version=0) or ())
    assert set(counts) == {0, 1, 3, 4}
    assert all(abs(count - 2000) < 150 for count in counts.values())  # five standard deviations
    again = UniformOrder(seed=1)
    for group_id in range(5):
        again.ready(summary(group_id))
    again.forget(2)
    first = UniformOrder(seed=1)
    for group_id in range(5):
        first.ready(summary(group_id))
    first.forget(2)
    assert [again.choose(2, weight_version=0) for _ in range(9)] == [
        first.choose(2, weight_version=0) for _ in range(9)
    ]


def test_groups_are_drawn_in_proportion_to_their_advantage():
    order = PrioritizedOrder(priority="advantage", exponent=1.0)
    order.ready(summary(0, rewards=(0.0, 1.0)))  # mean distance 0.5
    order.ready(summary(1, rewards=(0.0, 0.0, 0.0, 1.0)))  # 0.375
    order.ready(summary(2, rewards=(1.0, 1.0)))  # 0
    counts: Counter[int] = Counter()
    for _ in range(6000):
        counts.update(order.choose(1, weight_version=0) or ())
    total = 0.51 + 0.385 + 0.01
    for group_id, weight in ((0, 0.51), (1, 0.385), (2, 0.01)):
        assert abs(counts[group_id] - 6000 * weight / total) < 200


def test_the_weight_of_stale_groups_grows_by_the_same_factor_each_version():
    order = PrioritizedOrder(priority="staleness", exponent=1.0, seed=3)
    for group_id, version in enumerate((0, 2, 1000, 998)):  # far apart: the weights are put on another scale
        order.ready(summary(group_id, version))
    order.forget(0)
    order.forget(1)
    counts: Counter[int] = Counter()
    for _ in range(6000):
        counts.update(order.choose(1, weight_version=1001) or ())
    share = 1 / (1 + 2.718281828**2)
    assert abs(counts[2] - 6000 * share) < 200


@pytest.mark.parametrize(
    ("options", "path", "why"),
    [
        ({"selection": "fifa"}, "buffer.selection", "no selection is called"),
        ({"selection": "fifo", "window": 3}, "buffer.options.window", "has no window"),
        ({"selection": "windowed_fifo"}, "buffer.options.window", "needs its window"),
        ({"selection": "uniform", "priority": "staleness"}, "buffer.options.priority", "has no priority"),
        ({"selection": "fifo", "quotas": {"a": 1.0}}, "buffer.options.quotas", "quotas cannot hold"),
        ({"selection": "uniform", "quotas": {"a": 0.5}}, "buffer.options.quotas", "add up to 1"),
        ({"selection": "uniform", "quotas": {"a": 0.8, "b": 0.2}}, "buffer.options.quotas", "'b' would never be used"),
        ({"eviction": "newest", "keep_groups": 4}, "buffer.options.eviction", "no eviction is called"),
        ({"eviction": "oldest"}, "buffer.options.keep_groups", "takes 2 at once"),
        ({"keep_groups": 4}, "buffer.options.keep_groups", "belongs to an eviction"),
        ({"eviction": "oldest", "keep_groups": 4}, "buffer.options.eviction", "might never be complete"),
        (
            {"selection": "windowed_fifo", "window": 2, "eviction": "reservoir", "keep_groups": 4},
            "buffer.options.eviction",
            "might never be complete",
        ),
        ({"eviction": Reservoir(4), "keep_groups": 4}, "buffer.options.keep_groups", "that is an object"),
        ({"selection": UniformOrder(), "quotas": {"a": 1.0}}, "buffer.options.quotas", "that is an object"),
        ({"selection": UniformOrder(), "window": 3}, "buffer.options.window", "that is an object"),
        ({"insert_tolerance": 4.0}, "buffer.options.insert_tolerance", "belongs to samples_per_insert"),
        ({"samples_per_insert": 2.0}, "buffer.options.samples_per_insert", "released after 1 uses"),
        ({"samples_per_insert": 0.5}, "buffer.options.samples_per_insert", "never used fill the places"),
        (
            {"samples_per_insert": 1.0, "insert_tolerance": 1.0},
            "buffer.options.insert_tolerance",
            "would deadlock",
        ),
    ],
)
def test_invalid_options_are_refused_with_their_path(options: dict, path: str, why: str):
    with pytest.raises(ConfigError, match=why) as caught:
        AsyncReplayBuffer(**{"capacity": 8, "max_staleness": 1, "batch_groups": 2, **options})
    assert caught.value.path == path
    assert caught.value.remedy


# ----------------------------------------------------------------------------------------------------------- evictions


@pytest.mark.parametrize(("eviction", "kept"), [("oldest", [1, 2]), ("lowest_advantage", [0, 2])])
async def test_an_overflow_drops_the_oldest_or_the_lowest_advantage(eviction: str, kept: list[int]):
    buffer = AsyncReplayBuffer(
        capacity=8, max_staleness=9, selection="fifo_ready", eviction=eviction, keep_groups=2, batch_groups=2
    )
    await filled(buffer, summary(0, 0), summary(1, 1, rewards=(1.0, 1.0)), summary(2, 2))
    assert buffer.statistics().dropped == {"overflow": 1}
    assert group_ids_of(await buffer.select(2, weight_version=2)) == kept


def test_a_reservoir_keeps_every_group_with_the_same_probability():
    counts: Counter[int] = Counter()
    for seed in range(1500):
        reservoir, kept = Reservoir(4, seed=seed), set()
        for group_id in range(12):
            reservoir.ready(summary(group_id))
            kept.add(group_id)
            if evicted := reservoir.evict(weight_version=None):
                reservoir.forget(evicted.group_id)
                kept.discard(evicted.group_id)
            assert reservoir.evict(weight_version=None) is None
        assert len(kept) == 4
        counts.update(kept)
    assert all(abs(counts[group_id] - 500) < 100 for group_id in range(12))  # five standard deviations


def test_a_reservoir_keeps_no_more_groups_when_several_are_ready_again():
    reservoir = Reservoir(2)
    for group_id in (0, 1):
        reservoir.ready(summary(group_id))
    for group_id in (0, 1):
        reservoir.forget(group_id)  # a step trains on them, and may again
    ready = {2, 3, 0, 1}
    for group_id in (2, 3, 0, 1):
        reservoir.ready(summary(group_id))
    while evicted := reservoir.evict(weight_version=None):
        reservoir.forget(evicted.group_id)
        ready.remove(evicted.group_id)
    assert len(ready) == 2


async def test_groups_without_variance_are_replaced_one_for_one():
    buffer = AsyncReplayBuffer(capacity=4, max_staleness=0, zero_variance="drop", zero_variance_limit=3)
    law = AdmissionLaw(2, max_staleness=0, total_groups=2)
    dropped: list[int] = []
    buffer.on_drop(lambda group: (law.dropped(group.group_id), dropped.append(group.group_id)))
    issued = 0
    while law.may_issue():
        group_id = law.issue()
        issued += 1
        await buffer.admit(group_id)
        buffer.put(summary(group_id, rewards=(1.0, 1.0) if group_id in (0, 1, 3) else (0.0, 1.0)), ROWS)
    assert group_ids_of(await buffer.select(2, weight_version=0)) == [2, 4]
    assert (dropped, issued, law.finished) == ([0, 1, 3], 5, True)


@pytest.mark.parametrize(
    ("credit", "scored", "turns", "parents", "dropped"),
    [
        ("outcome", False, ((0.0, 1.0), (1.0, 0.0)), (), True),
        ("branch", False, ((0.0, 1.0), (1.0, 0.0)), (), True),
        ("turn", False, ((0.0, 1.0), (1.0, 0.0)), (), False),  # turns: 1 and 1; 1 and 0
        ("turn", False, ((0.0, 1.0), (0.0, 1.0)), (), True),
        ("outcome", False, ((0.0, 1.0, 0.0), (1.0,)), ((-1, 0, 0), ()), True),
        ("branch", False, ((0.0, 1.0, 0.0), (1.0,)), ((-1, 0, 0), ()), False),  # branches: 1 and 0; 1
        ("branch", True, ((0.0, 1.0, 0.0), (1.0,)), ((-1, 0, 0), ()), True),  # a score of the whole row
        ("branch", False, ((0.1, 0.2, 0.3),) * 2, ((-1, 0, -1),) * 2, True),  # 0.1 + 0.2 and 0.3, as float32
    ],
)
def test_variance_is_that_of_what_advantages_compare(
    credit: Credit,
    scored: bool,
    turns: tuple[tuple[float, ...], ...],
    parents: tuple[tuple[int, ...], ...],
    dropped: bool,
):
    rewards = (sum(turns[0]), sum(turns[0]))
    group = replace(summary(0, rewards=rewards), turn_rewards=turns, turn_parents=parents)
    refuse = ZeroVariance(9, credit=credit, by_turns=not scored)
    assert (refuse(group) == "zero_variance") is dropped


def test_a_group_without_its_turns_cannot_be_compared_by_them():
    with pytest.raises(InvalidDataError, match=r"group 0 lacks the turns of its rows: .* credit = 'turn'"):
        ZeroVariance(9, credit="turn")(replace(summary(0, rewards=(0.0, 1.0)), turn_rewards=()))


def test_the_limit_names_what_was_compared():
    group = replace(summary(0, rewards=(2.0, 1.0)), turn_rewards=((1.0, 1.0), (1.0,)), turn_parents=((-1, -1), (-1,)))
    with pytest.raises(InvalidDataError, match=r"the same reward for every branch \(the last: 1\)"):
        ZeroVariance(1, credit="branch")(group)


async def test_too_many_groups_without_variance_in_a_row_are_an_error():
    buffer = AsyncReplayBuffer(capacity=4, max_staleness=0, zero_variance="drop", zero_variance_limit=3)
    await filled(buffer, *[summary(group_id, rewards=(0.0, 0.0)) for group_id in range(2)])
    with pytest.raises(InvalidDataError, match="3 groups in a row got the same reward"):
        await filled(buffer, summary(2, rewards=(0.0, 0.0)))


# -------------------------------------------------------------------------------------------------------------- quotas


def test_places_are_apportioned_by_largest_remainder():
    assert apportion(10, {"a": 0.75, "b": 0.25}) == {"a": 8, "b": 2}
    assert apportion(1, {"a": 0.5, "b": 0.5}) == {"a": 1, "b": 0}
    assert sum(apportion(7, {"a": 0.1, "b": 0.2, "c": 0.7}).values()) == 7


async def test_each_environment_gets_its_share_and_blocks_no_other():
    buffer = AsyncReplayBuffer(
        capacity=4, max_staleness=9, selection="fifo_ready", batch_groups=2, quotas={"a": 0.5, "b": 0.5}
    )
    await filled(buffer, *[summary(group_id, environment="a") for group_id in range(4)])
    assert buffer.statistics().dropped == {"over_quota": 1}  # a place is kept for the other one
    with pytest.raises(DeadlineError, match="b: 0 of 1 groups are ready"):
        await buffer.select(2, weight_version=0, timeout_s=0.0)
    await filled(buffer, summary(4, environment="b"))
    assert group_ids_of(await buffer.select(2, weight_version=0)) == [1, 4]
    buffer.release([1, 4])
    with pytest.raises(InvalidDataError, match="'c', which has no quota"):
        await filled(buffer, summary(5, environment="c"))


async def test_explaining_a_wait_changes_no_draw():
    """A choice within an environment may be random, and an explanation must not draw."""
    stories = []
    for asked in (0, 3):
        buffer = AsyncReplayBuffer(
            capacity=12, max_staleness=9, selection="uniform", batch_groups=2, quotas={"a": 0.5, "b": 0.5}, seed=1
        )
        await filled(buffer, *[summary(group_id, environment="a") for group_id in range(8)])
        waiting = asyncio.ensure_future(buffer.select(2, weight_version=0))
        await asyncio.sleep(0)
        for _ in range(asked):
            (why,) = buffer.explain()
            assert why.endswith(": b: 0 of 1 groups are ready")
        await filled(buffer, summary(8, environment="b"))
        stories.append(group_ids_of(await waiting))
    assert stories[0] == stories[1]


# --------------------------------------------------------------------------------------------------------- uses, rates


async def test_a_group_is_used_up_to_max_uses():
    buffer = AsyncReplayBuffer(capacity=4, max_staleness=1, selection="fifo_ready", max_uses=2)
    await filled(buffer, summary(0), summary(1))
    first = await buffer.select(2, weight_version=0)
    assert [group.uses for group in first] == [0, 0]
    assert buffer.statistics().ready_tokens == 0
    buffer.release([0, 1])
    assert buffer.statistics().ready == 2
    assert buffer.statistics().ready_tokens == 0  # trained on: these tokens wait for nothing
    (second,) = await buffer.select(1, weight_version=1)
    assert (second.summary.group_id, second.uses) == (0, 1)
    buffer.release([0])
    with pytest.raises(DeadlineError):
        await buffer.select(1, weight_version=2, timeout_s=0.0)  # the other one passed the bound
    counts = buffer.statistics()
    assert (counts.released, counts.dropped, counts.ready) == (2, {}, 0)  # used once: it is released, not lost


async def test_an_admission_wakes_a_select_that_it_allows():
    buffer = AsyncReplayBuffer(
        capacity=4, max_staleness=9, selection="fifo_ready", max_uses=4, samples_per_insert=1.0, insert_tolerance=1.0
    )
    await filled(buffer, summary(0))
    for _ in range(2):
        buffer.release(group_ids_of(await buffer.select(1, weight_version=0)))
    waiting = asyncio.ensure_future(buffer.select(1, weight_version=0, timeout_s=1.0))
    await asyncio.sleep(0)
    assert "new groups must be admitted first" in buffer.explain()[0]
    await buffer.admit(1)
    assert group_ids_of(await waiting) == [0]


class ProducersAndTrainer:
    """Producers that admit and finish, a trainer that selects, drops and releases; a deadlock is one_move False."""

    def __init__(self, buffer: AsyncReplayBuffer, batch: int, seed: int, *, first_group_id: int = 0) -> None:
        self.buffer, self.batch, self.dice = buffer, batch, random.Random(seed)
        self.group_id = first_group_id
        self.running: list[int] = []

    async def one_move(self) -> bool:
        moves = [self.admit, self.finish, self.train]
        self.dice.shuffle(moves)
        for move in moves:
            if await move():
                return True
        return False

    async def admit(self) -> bool:
        try:
            await self.buffer.admit(self.group_id, timeout_s=0.0)
        except DeadlineError:
            return False
        self.running.append(self.group_id)
        self.group_id += 1
        return True

    async def finish(self) -> bool:
        if not self.running:
            return False
        group_id = self.running.pop(self.dice.randrange(len(self.running)))
        self.buffer.put(summary(group_id), ROWS)
        return True

    async def train(self) -> bool:
        try:
            groups = await self.buffer.select(self.batch, weight_version=0, timeout_s=0.0)
        except DeadlineError:
            return False
        group_ids = group_ids_of(groups)
        # A trainer drops what it finds too old, even after it has selected it.
        dropped = [group_id for group_id in group_ids if self.dice.random() < 0.2]
        for group_id in dropped:
            self.buffer.drop(group_id, "stale")
        self.buffer.release([group_id for group_id in group_ids if group_id not in dropped])
        return True


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 4),
    extra=st.integers(0, 8),
    max_uses=st.integers(1, 4),
    ratio=st.floats(1.0, 4.0),
    tolerance=st.none() | st.floats(0.5, 10.0),
    selection=st.sampled_from(["fifo", "fifo_ready", "uniform", "freshest", "prioritized"]),
)
@example(
    seed=1503, batch=1, extra=0, max_uses=3, ratio=2.8942626047961935, tolerance=2.8942626047961935, selection="fifo"
)
def test_an_accepted_rate_never_deadlocks(
    seed: int, batch: int, extra: int, max_uses: int, ratio: float, tolerance: float | None, selection: str
):
    try:
        buffer = AsyncReplayBuffer(
            capacity=batch + extra,
            max_staleness=0,
            selection=selection,
            batch_groups=batch,
            max_uses=max_uses,
            samples_per_insert=ratio,
            insert_tolerance=tolerance,
        )
    except ConfigError:
        assume(False)
        raise

    async def story() -> None:
        ends = ProducersAndTrainer(buffer, batch, seed)
        for _ in range(100):
            assert await ends.one_move(), buffer.explain()

    asyncio.run(story())


def test_a_rate_bounds_both_sides():
    rate = RateLimit(1.0, tolerance=3.0)
    assert not rate.may_sample(4)
    for _ in range(3):
        assert rate.may_insert()
        rate.inserted()
    assert not rate.may_insert()
    rate.sampled(2)
    assert rate.may_insert()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 3),
    behind=st.integers(0, 4),
    ahead=st.integers(0, 6),
    max_uses=st.integers(1, 3),
    ratio=st.floats(1.0, 3.0),
    eviction=st.sampled_from([None, "oldest", "lowest_advantage", "reservoir"]),
)
def test_a_resumed_run_admits_its_groups_under_any_policy(
    seed: int, batch: int, behind: int, ahead: int, max_uses: int, ratio: float, eviction: str | None
):
    """All are admitted before it trains; ``behind`` batches are repeated as they were; then it never deadlocks."""
    assume(ratio <= max_uses)
    held = behind * batch + ahead
    buffer = AsyncReplayBuffer(
        capacity=max(2 * batch, held),
        max_staleness=0,
        selection="fifo_ready",
        eviction=eviction,
        keep_groups=batch if eviction else None,
        zero_variance="drop",
        batch_groups=batch,
        max_uses=max_uses,
        samples_per_insert=ratio,
        seed=seed,
    )
    batches = [range(step * batch, (step + 1) * batch) for step in range(behind)]

    async def story() -> None:
        for group_id in range(held):
            await buffer.admit(group_id, again=True, timeout_s=0.0)
            reserved = int(group_id < behind * batch)
            buffer.put(summary(group_id, rewards=(1.0, 1.0) if reserved else (0.0, 1.0)), ROWS, reserved_uses=reserved)
        for group_ids in batches:
            taken = await buffer.select(batch, weight_version=9, group_ids=group_ids, timeout_s=0.0)
            assert group_ids_of(taken) == list(group_ids)
            buffer.release(group_ids)
        ends = ProducersAndTrainer(buffer, batch, seed, first_group_id=held)
        for _ in range(60):
            assert await ends.one_move(), buffer.explain()

    asyncio.run(story())


# ------------------------------------------------------------------------------------------------------------- columns


@pytest.mark.parametrize("first", ["rows", "scores"])
async def test_a_group_is_ready_when_all_its_columns_have_arrived_in_any_order(first: str):
    buffer = AsyncReplayBuffer(capacity=2, max_staleness=0, columns=["scores", "reference"], zero_variance="drop")
    await buffer.admit(0)
    rows = DataProtoFuture.of(DataProto.from_dict({"x": torch.arange(2)}))
    scores = DataProto.from_dict({"scores": torch.tensor([1.0, 0.5])})
    reference = DataProtoFuture.of(DataProto.from_dict({"reference": torch.zeros(2)}))
    put = summary(0, rewards=(0.0, 0.0))  # of the environment: they do not count
    if first == "rows":
        buffer.put(put, rows)
        buffer.extend(0, ["scores"], scores, rewards=(1.0, 0.5))
    else:
        buffer.extend(0, ["scores"], scores, rewards=(1.0, 0.5))
        buffer.put(put, rows)
    assert buffer.statistics().ready == 0
    with pytest.raises(InvalidDataError, match="came twice"):
        buffer.extend(0, ["scores"], scores)
    buffer.extend(0, ["reference"], reference)
    (group,) = await buffer.select(1, weight_version=0)
    assert group.summary.rewards == (1.0, 0.5)
    whole = await group.rows
    assert sorted(whole.batch.keys()) == ["reference", "scores", "x"]
    with pytest.raises(InvalidDataError, match="must be pending"):
        buffer.extend(0, ["reference"], reference)


async def test_select_by_group_ids_takes_exactly_these():
    buffer = AsyncReplayBuffer(capacity=4, max_staleness=0)
    for group_id in range(4):
        await buffer.admit(group_id)
    for group_id in (3, 1):
        buffer.put(summary(group_id, 0), ROWS, uses=int(group_id == 3))
    taken = await buffer.select(2, weight_version=5, group_ids=(3, 1))
    assert group_ids_of(taken) == [3, 1]
    assert [group.uses for group in taken] == [1, 0]
    with pytest.raises(DeadlineError, match="group_ids 0, 2 are not all ready"):
        await buffer.select(2, weight_version=5, group_ids=(0, 2), timeout_s=0.0)
