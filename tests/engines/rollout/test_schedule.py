"""The schedule: which rows join and leave, and which blocks they have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import EngineError
from asyncrl.interfaces import SamplingParams
from engines.rollout.request import Row
from engines.rollout.transformers import schedule as planning
from engines.rollout.transformers.schedule import Schedule, Step

BLOCK_TOKENS = 4


def row(
    name: str, prompt: int | list[int], *, tokens: int = 8, probe: bool = False, session: str = "", adapter: str = ""
) -> Row:
    ids = [sum(name.encode()) + 2] * prompt if isinstance(prompt, int) else list(prompt)
    return Row(
        request_id=name,
        tokens=ids,
        prompt_length=len(ids),
        length_limit=len(ids) + tokens,
        session=session,
        adapter=adapter,
        sampling=SamplingParams(max_new_tokens=tokens),
        seed=0,
        probe=probe,
    )


def schedule(*, running: int = 4, budget: int = 100, blocks: int = 100) -> Schedule:
    return Schedule(
        max_running_requests=running,
        prefill_tokens_per_step=budget,
        blocks=range(blocks),
        block_tokens=BLOCK_TOKENS,
        on_free=lambda _: None,
    )


def names(rows: Sequence[Row]) -> str:
    return "".join(r.request_id for r in rows)


class Driver:
    """Carries out the plans on a fake cache, and checks the laws.

    ``cache`` has, for (block, offset), what the keys and values there were computed of: the adapter, its version, and
    all tokens up to this one. ``begun`` is the version under which a running row joined.
    """

    def __init__(self, plan: Schedule, *, budget: int, checked: bool = True) -> None:
        self.plan = plan
        self.budget = budget
        self.checked = checked
        self.cache: dict[tuple[int, int], tuple[str, int, tuple[int, ...]]] = {}
        self.versions: Counter[str] = Counter()
        self.begun: dict[Row, int] = {}
        self.read_tokens = 0
        self.blocks = sorted([*plan._free, *plan._tree._blocks])
        self.free, self.freed = set(plan._free), list[int]()
        plan._on_free = self.on_free

    def on_free(self, blocks: Sequence[int]) -> None:
        assert not any(block in self.plan._tree for block in blocks), "a block is freed when its last user lets it go"
        self.freed += blocks

    def commit(self, *, recompute: bool = False, adapters: Sequence[str] | None = None) -> None:
        """New weights, or new adapters: as ``Generation.commit``."""
        self.versions.update(("", "x") if adapters is None else adapters)
        for r in list(self.plan.running):
            if (adapters is None or r.adapter in adapters) and (recompute or not r.versions):
                self.plan.reread(r)
        self.plan.forget_all(adapters)
        self.begun = {r: self.begun[r] if r.versions else self.versions[r.adapter] for r in self.plan.running}

    def step(self) -> Step:
        plan = self.plan
        self.check_blocks()
        paused = plan.asleep or plan.paused
        before = min((r for r in plan.running if not r.probe), key=lambda r: r.order, default=None)
        had = list(before.blocks) if before else []
        step = plan.next()
        self.check_blocks(step.taken)
        if before is not None and not any(r.probe for r in plan.running):
            assert before.blocks[: len(had)] == had, "the oldest row is not preempted"
        for at in [(block, offset) for block in step.taken for offset in range(BLOCK_TOKENS)]:
            self.cache.pop(at, None)
        self.begun = {r: self.begun.get(r, self.versions[r.adapter]) for r in plan.running}
        if not paused:
            self.check_plan(step)
        gets_token = step.rows
        reading = [*((chunk.row, chunk.tokens) for chunk in step.prefills), *((r, 1) for r in step.ready)]
        self.check_pass(reading)
        for r, tokens in reading:
            self.read(r, tokens)
        plan.note_read(step)
        for r in gets_token:
            r.append(sum(r.tokens) % 2 + 7, -1.0, self.versions[r.adapter])
            if r.ended:
                plan.leave(r)
        assert not (paused and reading)
        return step

    def check_plan(self, step: Step) -> None:
        plan, chunks = self.plan, step.prefills
        assert sum(chunk.tokens for chunk in chunks) <= self.budget
        assert sum(len(chunk.scored) for chunk in chunks) <= planning.SCORED_TOKENS
        assert len({chunk.row for chunk in chunks} | set(step.ready)) == len(chunks) + len(step.ready)
        assert {chunk.row for chunk in chunks} | set(step.ready) <= set(plan.running)
        assert [r.cached for r in step.ready] == sorted(r.cached for r in step.ready)
        assert all(0 < chunk.tokens <= chunk.row.pending for chunk in chunks)
        assert all(r.pending == 1 for r in step.ready)
        going_on = [*step.ready, *(chunk.row for chunk in chunks)]
        assert not plan.running or plan.running[0] in going_on, "the first row always goes on"
        spent = sum(chunk.tokens for chunk in chunks) == self.budget
        scored_spent = sum(len(chunk.scored) for chunk in chunks) == planning.SCORED_TOKENS
        for r in plan.running:
            ahead = [chunk.row for chunk in chunks if plan.running.index(chunk.row) < plan.running.index(r)]
            waits = next_block(r) in map(next_block, ahead)
            assert r in going_on or waits or spent or (is_scored(r) and scored_spent), "a row waits for no other row"
        if sum(r.pending for r in plan.running if r.pending > 1 and not is_scored(r)) < self.budget:
            assert not any(map(self.has_room, plan.rows[len(plan.running) :][:1])), (
                "the first one that waits could join"
            )

    def has_room(self, r: Row) -> bool:
        """Return whether a row could join: by counting blocks, one by one."""
        plan = self.plan
        if not r.probe and sum(not other.probe for other in plan.running) >= plan._max_running:
            return False
        shares = plan._max_running > 1 and not is_scored(r)
        own = plan._tree.find(r.adapter, r.tokens[:-1]) if shares else []
        if shares and plan._begun(r, own):
            own.append(plan.kept[r.session].blocks[len(own)])
        stay = {block for other in plan.running if other.probe or not r.probe for block in other.blocks}
        spare = len(plan._free) + len(set(plan._tree._blocks) - stay - set(own))
        return -(-len(r.tokens) // BLOCK_TOKENS) - len(own) <= spare

    def check_pass(self, reading: Sequence[tuple[Row, int]]) -> None:
        written: dict[tuple[int, int], Row] = {}
        for r, tokens in reading:
            for at in range(r.cached, r.cached + tokens):
                assert written.setdefault(place(r, at), r) is r, "one row writes a place"
        for r, _ in reading:
            assert all(place(r, at) not in written for at in range(r.cached)), "what is written is not attended to yet"

    def read(self, r: Row, tokens: int) -> None:
        for at in range(r.cached + tokens):
            prefix = tuple(r.tokens[: at + 1])
            if at >= r.cached:
                self.cache[place(r, at)] = (r.adapter, self.versions[r.adapter], prefix)
            elif self.checked:
                adapter, version, held = self.cache[place(r, at)]
                assert (adapter, held) == (r.adapter, prefix), "the block holds other keys and values"
                assert version >= self.begun[r], "they were computed before the row began"
        self.read_tokens += tokens

    def check_blocks(self, taken: Sequence[int] | None = None) -> None:
        """Check who has which blocks, after an event, or after a plan for which blocks were ``taken``."""
        plan, tree = self.plan, self.plan._tree
        if taken is None:  # within a plan a block may be freed, taken and freed again
            assert len({*self.freed, *self.free}) == len(self.freed) + len(self.free), "a block is freed once"
            taken = ()
        assert set(plan._free) == (self.free | set(self.freed)) - set(taken)
        self.free = set(plan._free)
        self.freed.clear()
        users = Counter(block for r in plan.running for block in r.blocks)
        keepers = Counter(block for kept in plan.kept.values() for block in kept.blocks)
        assert set(taken) <= set(users)
        assert sorted([*plan._free, *(users | keepers)]) == self.blocks, "a block is free or in use"
        assert sorted(tree._blocks) == sorted(users | keepers)
        assert {block: (tree[block].rows, tree[block].sessions) for block in tree._blocks} == {
            block: (users[block], keepers[block]) for block in tree._blocks
        }
        assert tree.idle == len(set(keepers) - set(users))
        assert not any(r.blocks for r in plan.rows if r not in plan.running)
        read = {(block, at) for block in tree._blocks if tree[block].read for at in range(BLOCK_TOKENS)}
        assert not self.checked or read <= self.cache.keys()
        before: dict[int, Sequence[int]] = {}
        for table in [each.blocks for each in (*plan.running, *plan.kept.values())]:
            assert len(set(table)) == len(table)
            for at, block in enumerate(table):
                assert before.setdefault(block, table[:at]) == table[:at], "who uses a block uses those before it"
        for kept in plan.kept.values():
            assert kept.blocks
            assert all(tree[block].read or len(tree[block].tokens) < BLOCK_TOKENS for block in kept.blocks)


def kept_tokens(plan: Schedule) -> dict[str, int]:
    return {name: sum(len(plan._tree[block].tokens) for block in kept.blocks) for name, kept in plan.kept.items()}


def place(r: Row, at: int) -> tuple[int, int]:
    return r.blocks[at // BLOCK_TOKENS], at % BLOCK_TOKENS


def next_block(r: Row) -> int:
    return r.blocks[r.cached // BLOCK_TOKENS]


def is_scored(r: Row) -> bool:
    return r.sampling.prompt_log_probs is not None and not r.versions


def test_rows_join_in_order_and_the_rest_wait() -> None:
    plan = schedule(running=2)
    for name in "abc":
        plan.submit(row(name, 3))
    step = plan.next()
    assert names(plan.running) == "ab"
    assert len(plan.rows) - len(plan.running) == 1
    assert [(c.row.request_id, c.tokens) for c in step.prefills] == [("a", 3), ("b", 3)]
    assert not step.ready


def test_a_prompt_of_one_token_needs_no_prefill() -> None:
    plan = schedule()
    plan.submit(row("a", 1))
    step = plan.next()
    assert not step.prefills
    assert names(step.ready) == "a"


def test_a_long_prompt_is_read_in_chunks_while_others_decode() -> None:
    plan = schedule(budget=4)
    plan.submit(row("a", 1))
    plan.submit(row("b", 10))
    for expected in (4, 4, 2):
        step = plan.next()
        assert names(step.ready) == "a"
        (chunk,) = step.prefills
        assert (chunk.row.request_id, chunk.tokens) == ("b", expected)
        assert chunk.completes == (expected == 2)
        plan.note_read(step)
        step.ready[0].append(1, 0.0, 0)
    chunk.row.append(1, 0.0, 0)
    assert names(plan.next().ready) == "ab"


def test_a_row_whose_cache_is_discarded_is_read_again() -> None:
    plan = schedule(budget=3)
    driver = Driver(plan, budget=3)
    a, b = row("a", 1), row("b", 1)
    plan.submit(a)
    plan.submit(b)
    for _ in range(4):
        driver.step()
    plan.reread(a)
    step = plan.next()
    assert names(step.ready) == "b"
    (chunk,) = step.prefills
    assert (chunk.row, chunk.tokens) == (a, 3)


def test_the_last_row_gives_way_when_no_block_is_free() -> None:
    plan = schedule(blocks=4)
    driver = Driver(plan, budget=100)
    a, b, c = row("a", 4, tokens=12), row("b", 4, tokens=12), row("c", 4, tokens=1)
    for r in (a, b, c):
        plan.submit(r)
    driver.step()
    assert names(plan.running) == "ab", "c ended"
    while plan.preemptions == 0:
        driver.step()
    assert names(plan.running) == "a"
    assert (b.cached, b.blocks) == (0, [])
    late = row("d", 1)
    plan.submit(late)
    driver.step()
    assert names(plan.running) == "a", "none overtakes b"
    while plan.has_work:
        driver.step()
    assert [r.finish_reason for r in (a, b, c, late)] == ["length"] * 4


def test_a_probe_has_the_room_of_a_row() -> None:
    plan = schedule(blocks=5, running=2)
    driver = Driver(plan, budget=100)
    a, b = row("a", 8), row("b", 8)
    plan.submit(a)
    plan.submit(b)
    driver.step()
    plan.submit(row("p", 1, tokens=1, probe=True))
    plan.submit(row("q", 1, tokens=1, probe=True))
    driver.step()
    assert names(plan.running) == "a"
    while plan.has_work:
        driver.step()


def test_a_probe_goes_first_and_on_top() -> None:
    plan = schedule(running=1)
    plan.submit(row("a", 1))
    plan.next()
    plan.submit(row("b", 1))
    plan.submit(row("p", 1, probe=True))
    assert sorted(names(plan.next().ready)) == ["a", "p"]
    assert len(plan.rows) - len(plan.running) == 1


def test_a_pause_keeps_rows_and_plans_nothing() -> None:
    plan = schedule()
    plan.submit(row("a", 1))
    plan.next()
    plan.pause()
    plan.submit(row("b", 1))
    assert not plan.has_work
    assert plan.next().ready == ()
    plan.resume()
    assert names(plan.next().ready) == "ab"


def finish(plan: Schedule, *rows: Row) -> None:
    """Submit rows, and carry the plans out until all have ended."""
    driver = Driver(plan, budget=100, checked=False)
    for each in rows:
        plan.submit(each)
    while plan.has_work:
        driver.step()


def test_the_next_row_of_a_session_reads_what_is_new() -> None:
    plan = schedule()
    first = row("a", 6, tokens=3, session="s")
    finish(plan, first)
    assert kept_tokens(plan) == {"s": 8}, "the last token was never read"
    plan.submit(row("b", [*first.tokens, 5, 5], session="s"))
    (chunk,) = plan.next().prefills
    assert (chunk.row.cached, chunk.tokens, plan.reused_tokens) == (8, 3, 8)


def test_a_session_that_goes_another_way_reuses_what_is_the_same() -> None:
    plan = schedule()
    finish(plan, row("a", [1, 2, 3, 4, 5, 6, 7], tokens=3, session="s"))
    plan.submit(row("b", [1, 2, 3, 4, 5, 9, 9, 9], session="s"))
    (chunk,) = plan.next().prefills
    assert (chunk.row.cached, chunk.tokens) == (5, 3)


def test_the_same_prompt_again_is_one_token_to_read() -> None:
    plan = schedule()
    finish(plan, row("a", [1, 2, 3], tokens=2, session="s"))
    plan.submit(row("b", [1, 2, 3], session="s"))
    step = plan.next()
    assert (names(step.ready), step.ready[0].cached, step.prefills) == ("b", 2, [])


def test_nothing_is_taken_over_from_another_adapter_or_when_the_prompt_is_scored() -> None:
    plan = schedule()
    finish(plan, row("a", [1, 2, 3], tokens=2, session="s", adapter="x"), row("b", [1, 2, 3], tokens=2, session="t"))
    other, scored = row("c", [1, 2, 3, 4], session="s"), row("d", [1, 2, 3, 4], session="t")
    scored.sampling = SamplingParams(max_new_tokens=8, prompt_log_probs=0)
    for each in (other, scored):
        plan.submit(each)
    assert [(chunk.row.cached, chunk.tokens) for chunk in plan.next().prefills] == [(0, 4), (0, 4)]


def test_rows_get_the_blocks_of_the_session_that_was_used_least_recently() -> None:
    plan = schedule(blocks=4)
    finish(plan, row("a", 4, tokens=1, session="old"), row("b", 4, tokens=1, session="new"))
    finish(plan, row("c", 8, tokens=1))
    assert kept_tokens(plan) == {"old": 4, "new": 4}, "two blocks are free"
    finish(plan, row("d", 12, tokens=1))
    assert kept_tokens(plan) == {"new": 4}
    plan.submit(row("e", [*row("b", 4).tokens, 7], session="new"))
    assert plan.next().ready[0].cached == 4


def test_what_two_versions_have_computed_is_not_kept() -> None:
    plan = schedule()
    a = row("a", 4, tokens=2, session="s")
    plan.submit(a)
    driver = Driver(plan, budget=100)
    driver.step()
    a.versions[0] = -1
    driver.step()
    assert a.finish_reason == "length"
    assert plan.used_tokens == 0


def test_nothing_is_kept_where_rows_run_one_by_one() -> None:
    plan = schedule(running=1)
    finish(plan, row("a", 4, tokens=2, session="s"))
    assert plan.used_tokens == 0


def test_what_is_kept_of_a_session_can_be_freed() -> None:
    plan = schedule(blocks=4)
    ways: list[Callable[[], object]] = [lambda: plan.forget("s"), lambda: plan.forget_all({"x"})]
    ways += [plan.forget_all, plan.sleep]
    for forget in ways:
        finish(plan, row("a", 9, tokens=2, session="s", adapter="x"))
        plan.forget_all({"another"})
        assert (kept_tokens(plan), plan.used_tokens) == ({"s": 10}, 12)
        forget()
        plan.wake()
        assert plan.used_tokens == 0
        finish(plan, row("b", 14, tokens=2))


def group(name: str, prompt: list[int], rows: int, **options: Any) -> list[Row]:
    return [row(f"{name}{number}", prompt, **options) for number in range(rows)]


SYSTEM = [1, 2, 3, 4, 5, 6, 7, 8]


def submitted(plan: Schedule, *rows: Row) -> Schedule:
    for each in rows:
        plan.submit(each)
    return plan


def carry_out(plan: Schedule, *, budget: int = 100) -> Driver:
    """Carry the plans out until all rows have ended."""
    driver = Driver(plan, budget=budget)
    while plan.has_work:
        driver.step()
    return driver


@pytest.mark.parametrize("budget", [3, 4, 100])
def test_rows_of_a_group_read_their_prompt_once(budget: int) -> None:
    plan = submitted(schedule(budget=budget), *group("a", [*SYSTEM, 9, 9], 4, tokens=5))
    assert carry_out(plan, budget=budget).read_tokens == 10 + 3 * 2 + 4 * 4, "and all sampled tokens but the last"
    assert plan.reused_tokens == 3 * 8


def test_the_last_token_of_a_prompt_is_read_by_each_row() -> None:
    plan = submitted(schedule(), *group("a", SYSTEM, 4, tokens=1))
    assert carry_out(plan).read_tokens == 8 + 3 * 4


def test_two_groups_with_one_system_prompt() -> None:
    prompts = [[*SYSTEM, *[token] * 5] for token in (9, 10)]
    plan = submitted(schedule(), *group("a", prompts[0], 2, tokens=1), *group("b", prompts[1], 2, tokens=1))
    assert carry_out(plan).read_tokens == 13 + 1 + 5 + 1


def test_a_row_like_one_that_runs_reads_what_that_one_has_not() -> None:
    plan = submitted(schedule(), *group("a", [*SYSTEM, 9], 1))
    driver = Driver(plan, budget=100)
    driver.step()
    plan.submit(row("b", [*SYSTEM, 9]))
    step = driver.step()
    assert (names(step.ready), step.prefills, plan.reused_tokens) == ("ba0", [], 8)
    assert plan.used_tokens == 8 + 4 + 4, "eight are shared"


@pytest.mark.parametrize("how", ["abort", "reread"])
def test_a_row_goes_on_by_itself_when_the_one_that_read_for_it_is_gone(how: str) -> None:
    plan = schedule(budget=14)
    scored = row("s", 8, tokens=1)
    scored.sampling = SamplingParams(max_new_tokens=1, prompt_log_probs=0)
    first, second = group("a", [*SYSTEM, 9, 9, 9, 9], 2, tokens=1)
    submitted(plan, scored, first, second)
    driver = Driver(plan, budget=14)
    driver.step()
    assert [(r.request_id, r.cached) for r in plan.running] == [("a0", 6), ("a1", 0)]
    if how == "abort":
        first.finish_reason = "abort"
        plan.leave(first)
    else:
        plan.reread(first)
    (chunk,) = plan.next().prefills
    assert (chunk.row, chunk.row.cached, chunk.tokens) == (second if how == "abort" else first, 4, 8)
    driver = Driver(plan, budget=14, checked=False)
    while plan.has_work:
        driver.step()
    assert second.finish_reason == "length"


def test_an_ended_row_has_read_for_the_others() -> None:
    plan = submitted(schedule(), *group("a", [*SYSTEM, 9], 3, tokens=1))
    driver = Driver(plan, budget=100)
    assert [chunk.row.request_id for chunk in driver.step().prefills] == ["a0"]
    assert names(plan.running) == "a1a2"
    driver.step()
    assert (driver.read_tokens, plan.rows) == (9 + 2, [])


def test_a_probe_reads_by_itself_what_a_row_after_it_reads_slowly() -> None:
    plan = submitted(schedule(budget=3), row("a", [*SYSTEM, 9, 9], tokens=1))
    driver = Driver(plan, budget=3)
    driver.step()
    plan.submit(row("p", [*SYSTEM, 9, 9], tokens=1, probe=True))
    assert [chunk.row.request_id for chunk in driver.step().prefills] == ["p"]
    while plan.has_work:
        driver.step()
    assert driver.read_tokens == 3 + 10 + 2


def test_preemption_frees_what_no_other_row_uses() -> None:
    plan = submitted(schedule(blocks=6), *group("a", [*SYSTEM, 9], 4, tokens=7))
    driver = Driver(plan, budget=100)
    driver.step()
    assert len(plan.running) == 4, "two blocks are shared, and each has one of its own"
    while plan.preemptions == 0:
        driver.step()
    assert (len(plan.running), len(plan._free)) == (3, 0)
    while plan.has_work:
        driver.step()


def test_a_probe_does_not_count_on_blocks_that_others_share_with_it_or_with_another_probe() -> None:
    plan = submitted(schedule(blocks=6), row("a", [*SYSTEM, 9, 9, 9, 9, 9]))
    driver = Driver(plan, budget=100)
    driver.step()
    submitted(plan, row("p", [*SYSTEM, 7], probe=True), row("q", [*SYSTEM, *[6] * 13], tokens=1, probe=True))
    driver.step()
    assert names(plan.running) == "pa", "of four blocks that q needs, two are a's alone and one is free"
    while plan.has_work:
        driver.step()


def test_a_scored_prompt_is_read_by_its_row_alone_and_holds_none_up() -> None:
    plan = schedule(budget=2048, blocks=2000)
    scored = row("scored", list(range(3000)))
    plain, late = (row(name, list(range(1000))) for name in ("plain", "late"))
    scored.sampling = SamplingParams(max_new_tokens=8, prompt_log_probs=0)
    submitted(plan, scored, plain)
    driver = Driver(plan, budget=2048)
    chunks = [(chunk.row.request_id, chunk.tokens) for chunk in driver.step().prefills]
    assert chunks == [("scored", 256), ("plain", 1000)]
    submitted(plan, late, row("probe", 1, probe=True))
    step = driver.step()
    assert {r.request_id for r in step.ready} == {"plain", "probe"}
    chunks = [(chunk.row.request_id, chunk.tokens) for chunk in step.prefills]
    assert chunks == [("scored", 256), ("late", 4)]


def test_a_probe_does_not_wait_for_a_long_prompt() -> None:
    plan = submitted(schedule(budget=4), row("a", 40))
    plan.next()
    submitted(plan, row("b", 40), row("p", 3, probe=True))
    assert [(chunk.row.request_id, chunk.tokens) for chunk in plan.next().prefills] == [("p", 3), ("a", 1)]
    assert names(plan.running) == "pa", "there is enough to read without b"


@pytest.mark.parametrize(("recompute", "read"), [(False, 14 + 1 + 32), (True, 12 + 3 + 7 + 2 + 1 + 29)])
def test_rows_that_begin_after_an_update_share_nothing_with_those_before(recompute: bool, read: int) -> None:
    """Three rows have 3, 2 and 1 tokens then, and one has none. ``read`` are prompts, then sampled tokens."""
    plan = submitted(schedule(running=8, budget=9), *group("a", [*SYSTEM, 9], 2))
    driver = Driver(plan, budget=9)
    for _ in range(2):
        driver.step()
    submitted(plan, *group("b", [*SYSTEM, *[9] * 6], 2))
    driver.step()
    assert [len(r.versions) for r in plan.running] == [3, 2, 1, 0]
    driver.commit(recompute=recompute)
    before = driver.read_tokens
    submitted(plan, row("c", [*SYSTEM, 9]))
    while plan.has_work:
        driver.step()
    assert driver.read_tokens - before == read
    assert (plan.used_tokens, len(plan._free)) == (0, 100)


def test_adapters_are_updated_apart() -> None:
    plan = submitted(schedule(), row("a", [*SYSTEM, 9], adapter="x"), row("b", [*SYSTEM, 9]))
    driver = Driver(plan, budget=100)
    driver.step()
    assert driver.read_tokens == 18
    driver.commit(adapters=["x"])
    submitted(plan, row("c", [*SYSTEM, 9], adapter="x"), row("d", [*SYSTEM, 9]))
    step = driver.step()
    assert [(chunk.row.request_id, chunk.tokens) for chunk in step.prefills] == [("c", 9)]
    assert {r.request_id for r in step.ready} == {"a", "b", "d"}


def test_a_branch_shares_with_the_turn_that_runs_and_with_what_is_kept() -> None:
    plan = schedule()
    first = row("a", [*SYSTEM, 9], tokens=4, session="s")
    finish(plan, first)
    turn = row("b", [*first.tokens, 5, 5], session="s")
    plan.submit(turn)
    plan.next()
    assert (turn.cached, plan.kept) == (12, {}), "all but the last sampled token"
    plan.submit(row("c", [*SYSTEM, 9, 6, 6, 6], session="s"))
    (chunk,) = [chunk for chunk in plan.next().prefills if chunk.row is not turn]
    assert (chunk.row.cached, chunk.tokens) == (8, 4)


def test_sessions_with_the_same_tokens_keep_them_once() -> None:
    plan = schedule(blocks=10)
    finish(plan, *(row(name, [*SYSTEM, 9], tokens=8, session=name) for name in "st"))
    assert kept_tokens(plan) == {"s": 16, "t": 16}
    assert (plan.used_tokens, len(plan._free)) == (16, 6)
    plan.forget("s")
    assert (plan.used_tokens, len(plan._free)) == (16, 6)
    plan.forget("t")
    assert (plan.used_tokens, len(plan._free)) == (0, 10)


def test_what_is_kept_is_freed_from_its_end() -> None:
    plan = schedule(blocks=6)
    finish(plan, row("a", 11, tokens=1, session="old"), row("b", 7, tokens=1, session="new"))
    assert kept_tokens(plan) == {"old": 11, "new": 7}
    finish(plan, row("c", 8, tokens=1))
    assert kept_tokens(plan) == {"old": 8, "new": 7}
    finish(plan, row("d", 20, tokens=1))
    assert kept_tokens(plan) == {"new": 4}


def test_what_a_row_uses_is_kept_while_that_frees_nothing() -> None:
    plan = schedule(blocks=6)
    finish(plan, row("a", SYSTEM, tokens=1, session="old"), row("b", 7, tokens=1, session="new"))
    submitted(plan, row("c", [*SYSTEM, 9]), row("d", 5))
    plan.next()
    assert kept_tokens(plan) == {"old": 8, "new": 4}


def test_what_is_taken_over_is_of_the_session_alone_and_after_the_same_tokens() -> None:
    plan = schedule()
    driver = Driver(plan, budget=100)
    submitted(plan, row("a", [*SYSTEM, 9], tokens=1, session="s"), row("b", [1, 1, 1, 1, 2], tokens=9))
    driver.step()
    assert kept_tokens(plan) == {"s": 9}
    plan.submit(row("c", [*SYSTEM, 9], tokens=9))
    driver.step()
    submitted(plan, row("d", [*SYSTEM[:6], 2, 2], tokens=1, session="s"))
    driver.step()
    assert driver.read_tokens == 9 + 5 + 2 * 1 + 1 + 4 + 1, "the second block is used by c as well"
    submitted(plan, row("e", [*SYSTEM, 9], tokens=1, session="t"))
    driver.step()
    submitted(plan, row("f", [1, 1, 1, 1, *SYSTEM[4:], 9], tokens=1, session="t"))
    driver.step()
    assert driver.plan.reused_tokens == 8 + 4 + 8 + 4, "of the last only what it shares with b"


def test_a_session_does_not_keep_what_another_row_is_reading() -> None:
    plan = schedule(budget=12)
    driver = Driver(plan, budget=12)
    first, second = row("a", [*SYSTEM, 9], tokens=1, session="s"), row("b", [*SYSTEM, 9], tokens=1)
    first.sampling = SamplingParams(max_new_tokens=1, prompt_log_probs=0)
    submitted(plan, first, second)
    driver.step()
    assert (first.finish_reason, second.cached, plan.kept) == ("length", 3, {})
    driver.step()
    assert second.finish_reason == "length"


def test_a_row_that_waits_at_an_update_does_not_go_on_with_what_is_read_under_two_versions() -> None:
    plan = schedule(budget=12)
    driver = Driver(plan, budget=12)
    first = row("a", [*SYSTEM, 9])
    plan.submit(first)
    driver.step()
    plan.reread(first)
    scored = row("s", 9, probe=True)
    scored.sampling = SamplingParams(max_new_tokens=1, prompt_log_probs=0)
    submitted(plan, scored, row("b", [*SYSTEM, 9]))
    driver.step()
    assert [(r.request_id, r.cached) for r in plan.running] == [("s", 9), ("a", 3), ("b", 0)]
    driver.commit()
    while plan.has_work:
        driver.step()


def test_sessions_of_which_rows_use_all_that_is_left_are_forgotten_but_for_one() -> None:
    plan = schedule(blocks=12)
    driver = Driver(plan, budget=100)
    plan.submit(row("a", [*SYSTEM, 9], tokens=30))
    driver.step()
    for number in range(8):
        plan.submit(row(str(number), [*SYSTEM, *[9 + number] * 11], tokens=1, session=str(number)))
        driver.step()
    assert kept_tokens(plan)["7"] == 19
    assert len(plan.kept) <= 4


def test_no_more_rows_join_than_can_be_read_behind_what_they_wait_for() -> None:
    long = [row(name, [*SYSTEM, *[token] * 9]) for name, token in (("b", 9), ("c", 10))]
    plan = submitted(schedule(budget=10), row("a", [*SYSTEM, 7]), *long)
    step = plan.next()
    assert [(chunk.row.request_id, chunk.tokens) for chunk in step.prefills] == [("a", 9)]
    assert names(plan.running) == "ab", "b has nine tokens of its own, behind those of a"


def test_a_row_that_waits_for_what_another_reads_keeps_none_from_joining() -> None:
    plan = schedule(budget=14)
    scored = row("s", 8, tokens=1)
    scored.sampling = SamplingParams(max_new_tokens=1, prompt_log_probs=0)
    submitted(plan, scored, *group("a", [*SYSTEM, 9, 9, 9, 9], 2))
    Driver(plan, budget=14).step()
    assert [(r.request_id, r.cached) for r in plan.running] == [("a0", 6), ("a1", 0)]
    plan.submit(row("b", 8))
    assert [(chunk.row.request_id, chunk.tokens) for chunk in plan.next().prefills] == [("a0", 6), ("b", 8)]


def test_a_row_does_not_count_on_the_blocks_that_it_takes_over_itself() -> None:
    plan = schedule(blocks=4)
    first = row("a", 10, tokens=2, session="s")
    finish(plan, first)
    other = row("b", 4, tokens=1)
    submitted(plan, other)
    plan.next()
    plan.submit(row("c", [*first.tokens, 5], session="s"))
    plan.next()
    assert names(plan.running) == "b", "three blocks would be its own, and none is free"
    other.finish_reason = "stop"
    plan.leave(other)
    step = plan.next()
    assert [(chunk.row.cached, chunk.tokens) for chunk in step.prefills] == [(11, 2)]


def test_a_row_without_room_is_not_looked_up_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = submitted(schedule(blocks=4), row("a", 8, tokens=4), row("b", 12, tokens=1))
    find, found = plan._tree.find, list[list[int]]()
    monkeypatch.setattr(plan._tree, "find", lambda *of: found.append(find(*of)) or found[-1])
    driver = Driver(plan, budget=100)
    for _ in range(3):
        driver.step()
    monkeypatch.undo()
    # Once to join, for a; once for b; the driver asks as often as it steps.
    assert len(found) == 2 + 3


def test_a_cache_that_holds_no_row_is_an_error_and_no_hang() -> None:
    plan = submitted(schedule(blocks=2), row("a", 12))
    with pytest.raises(EngineError, match=r"1 requests are there and none can go on, the first with 12 tokens"):
        plan.next()


def event(kind: str, most: int = 0, *, tokens: int = 0) -> st.SearchStrategy[tuple[str, int, int]]:
    return st.tuples(st.just(kind), st.integers(0, most), st.integers(1, tokens) if tokens else st.just(0))


OFTEN = [event("submit", 95, tokens=5), event("turn", 63, tokens=5), event("step", 3)]
SELDOM = [event("probe", 31, tokens=4), event("scored", 95, tokens=5), event("abort", 9), event("commit", 2)]
SELDOM += [event("forget", 1), event("reread", 9), event("pause"), event("sleep")]
EVENTS = st.lists(st.one_of(*OFTEN * 4, *SELDOM), min_size=20, max_size=80)


def alike(number: int) -> list[int]:
    """One of 32 prompts, of 1 to 11 tokens, many of which begin with the same ones."""
    begin = [[], [1] * 4, [1] * 4, [2] * 4][number % 4]
    return [*begin, *[[], [7] * 4, [7, 8, 7, 7], [7]][number // 4 % 4], *[7, 7][: number % 3], 8 + number // 16 % 2]


@settings(max_examples=200, deadline=None)
@given(events=EVENTS, running=st.integers(1, 4), budget=st.integers(1, 12), blocks=st.integers(4, 16))
@mock.patch.object(planning, "SCORED_TOKENS", 4)
def test_blocks_hold_their_rows_and_every_row_ends(
    events: list[tuple[str, int, int]], running: int, budget: int, blocks: int
) -> None:
    plan = schedule(running=running, budget=budget, blocks=blocks)
    driver = Driver(plan, budget=budget)
    rows: list[Row] = []
    aborted: set[Row] = set()

    def submit(prompt: list[int], tokens: int, **options: Any) -> None:
        rows.append(row(str(len(rows)), prompt, tokens=tokens, **options))
        plan.submit(rows[-1])

    for kind, number, tokens in events:
        if kind in ("submit", "probe", "scored"):
            session = ["", "0", "1"][number // 32]
            submit(alike(number), tokens, probe=kind == "probe", session=session, adapter="x" * (number % 7 == 0))
            if kind == "scored":
                rows[-1].sampling = SamplingParams(max_new_tokens=tokens, prompt_log_probs=0)
        elif kind == "turn" and rows:
            past = rows[-1 - number % min(len(rows), 8)]
            begun = past.tokens[: 10 - number // 8 % 4]
            session = past.session if number < 48 else ""
            submit([*begun, 7 + number % 2], tokens, session=session, adapter=past.adapter)
        elif kind == "forget":
            plan.forget(str(number))
        elif kind == "step":
            if number:
                plan.resume()
                plan.wake()
            for _ in range(number + 1):
                driver.step()
        elif kind == "commit":
            driver.commit(recompute=number == 1, adapters=["x"] if number == 2 else None)
        elif kind == "pause":
            plan.pause()
        elif kind == "sleep":
            plan.sleep()
            driver.cache.clear()
        elif rows:
            victim = rows[number % len(rows)]
            if kind == "reread" and victim in plan.running:
                plan.reread(victim)
            elif kind == "abort" and not victim.ended:
                victim.finish_reason = "abort"
                aborted.add(victim)
                plan.leave(victim)
        driver.check_blocks()
        assert running > 1 or not (plan.reused_tokens or plan.kept)
        assert sum(not r.probe for r in plan.running) <= running
    plan.resume()
    plan.wake()
    for _ in range(2000):
        if not plan.has_work:
            break
        driver.step()
    assert not plan.rows
    for r in rows:
        assert r.finish_reason == ("abort" if r in aborted else "length")
        assert r in aborted or r.sampled == r.length_limit - r.prompt_length
    plan.forget_all()
    assert (sorted(plan._free), plan.used_tokens) == (list(range(blocks)), 0)
