"""The schedule: which rows join and leave, and which blocks they have."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.interfaces import SamplingParams
from engines.rollout.request import Row
from engines.rollout.transformers.schedule import Schedule

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
    """Carries out the plans on a fake cache: (block, offset) -> the tokens up to the one that it holds."""

    def __init__(self, plan: Schedule, *, budget: int, checked: bool = True) -> None:
        self.plan = plan
        self.budget = budget
        self.checked = checked
        self.cache: dict[tuple[int, int], tuple[int, ...]] = {}

    def step(self) -> None:
        plan = self.plan
        paused = plan.asleep or plan.paused
        before = min((r for r in plan.running if not r.probe), key=lambda r: r.order, default=None)
        had = before.cached if before else 0
        step = plan.next()
        if before is not None and not any(r.probe for r in plan.running):
            assert before.cached == had, "the oldest row is not preempted"
        for at in [(block, offset) for block in step.taken for offset in range(BLOCK_TOKENS)]:
            self.cache.pop(at, None)
        owned = [block for r in plan.running for block in r.blocks]
        owned += [block for kept in plan.kept.values() for block in kept.blocks]
        assert len(owned) == len(set(owned)), "a block belongs to one row"
        assert not any(r.blocks for r in plan.rows if r not in plan.running)
        chunks = step.prefills
        assert sum(chunk.tokens for chunk in chunks) <= self.budget
        assert len({chunk.row for chunk in chunks} | set(step.ready)) == len(chunks) + len(step.ready)
        assert {chunk.row for chunk in chunks} | set(step.ready) <= set(plan.running)
        assert [r.cached for r in step.ready] == sorted(r.cached for r in step.ready)
        assert not (paused and (chunks or step.ready))
        gets_token = step.rows
        for chunk in chunks:
            assert 0 < chunk.tokens <= chunk.row.pending
            self.read(chunk.row, chunk.tokens)
        for r in step.ready:
            assert r.pending == 1
            self.read(r, 1)
        for r in gets_token:
            r.append(1, -1.0, 0)
            if r.ended:
                plan.leave(r)

    def read(self, r: Row, tokens: int) -> None:
        places = [(r.blocks[at // BLOCK_TOKENS], at % BLOCK_TOKENS) for at in range(r.cached + tokens)]
        for at, place in enumerate(places):
            prefix = tuple(r.tokens[: at + 1])
            if at < r.cached and self.checked:
                assert self.cache[place] == prefix, "the block holds other keys and values"
            else:
                self.cache[place] = prefix
        r.cached += tokens


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
        chunk.row.cached += chunk.tokens
        step.ready[0].cached += 1
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
    assert plan.kept_tokens == 8, "the last token was never read"
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
    assert plan.kept_tokens == 8, "two blocks are free"
    finish(plan, row("d", 12, tokens=1))
    assert plan.kept_tokens == 4
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
    assert plan.kept_tokens == 0


def test_nothing_is_kept_where_rows_run_one_by_one() -> None:
    plan = schedule(running=1)
    finish(plan, row("a", 4, tokens=2, session="s"))
    assert plan.kept_tokens == 0


def test_what_is_kept_of_a_session_can_be_freed() -> None:
    plan = schedule(blocks=4)
    ways: list[Callable[[], object]] = [lambda: plan.forget("s"), lambda: plan.forget_all({"x"})]
    ways += [plan.forget_all, plan.sleep]
    for forget in ways:
        finish(plan, row("a", 9, tokens=2, session="s", adapter="x"))
        plan.forget_all({"another"})
        assert plan.kept_tokens == 10
        forget()
        plan.wake()
        assert plan.kept_tokens == 0
        finish(plan, row("b", 14, tokens=2))


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 9), st.integers(1, 5)),
        st.tuples(st.just("turn"), st.integers(0, 9), st.integers(1, 5)),
        st.tuples(st.just("forget"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
        st.tuples(st.just("abort"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("reread"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("pause"), st.just(0), st.just(0)),
        st.tuples(st.just("resume"), st.just(0), st.just(0)),
        st.tuples(st.just("probe"), st.just(0), st.just(0)),
        st.tuples(st.just("sleep"), st.just(0), st.just(0)),
        st.tuples(st.just("wake"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(events=EVENTS, running=st.integers(1, 4), budget=st.integers(1, 12), blocks=st.integers(4, 16))
def test_blocks_hold_their_rows_and_every_row_ends(
    events: list[tuple[str, int, int]], running: int, budget: int, blocks: int
) -> None:
    plan = schedule(running=running, budget=budget, blocks=blocks)
    driver = Driver(plan, budget=budget)
    rows: list[Row] = []
    aborted: set[Row] = set()
    for kind, number, tokens in events:
        if kind in ("submit", "probe"):
            rows.append(row(str(len(rows)), max(number, 1), tokens=max(tokens, 1), probe=kind == "probe"))
            plan.submit(rows[-1])
        elif kind == "turn":
            session = str(number % 3)
            past = [r for r in rows if r.session == session and len(r.tokens) < 10]
            begun = past[-1].tokens[: len(past[-1].tokens) - number // 8] if past else [int(session) + 2]
            rows.append(row(str(len(rows)), [*begun, number], tokens=tokens, session=session))
            plan.submit(rows[-1])
        elif kind == "forget":
            plan.forget(str(number))
        elif kind == "step":
            for _ in range(number):
                driver.step()
        elif kind == "pause":
            plan.pause()
        elif kind == "resume":
            plan.resume()
        elif kind == "sleep":
            plan.sleep()
            driver.cache.clear()
        elif kind == "wake":
            plan.wake()
        elif rows:
            victim = rows[number % len(rows)]
            if kind == "reread" and victim in plan.running:
                plan.reread(victim)
            elif kind == "abort" and not victim.ended:
                victim.finish_reason = "abort"
                aborted.add(victim)
                plan.leave(victim)
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
