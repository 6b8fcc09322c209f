"""The schedule: who joins, who leaves, who sits where."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.interfaces import SamplingParams
from engines.rollout.embedded.row import Row
from engines.rollout.embedded.schedule import Chunk, Move, Schedule, in_batches


def row(name: str, prompt: int, *, tokens: int = 8, probe: bool = False) -> Row:
    return Row(
        request_id=name,
        tokens=[1] * prompt,
        prompt_length=prompt,
        length_limit=prompt + tokens,
        sampling=SamplingParams(max_new_tokens=tokens),
        seed=0,
        probe=probe,
    )


def schedule(*, running: int = 4, budget: int = 100) -> Schedule:
    return Schedule(max_running_requests=running, prefill_tokens_per_step=budget)


def names(rows: Sequence[Row]) -> str:
    return "".join(r.request_id for r in rows)


class Driver:
    """Carries the plans out on a pretend cache: slot -> the tokens' owner, position by position."""

    def __init__(self, plan: Schedule, *, budget: int) -> None:
        self.plan = plan
        self.budget = budget
        self.cache: dict[int, list[Row]] = {}

    def step(self) -> None:
        plan = self.plan
        paused = plan.asleep or plan.state == "paused"
        step = plan.next()
        before = {slot: list(held) for slot, held in self.cache.items()}
        for move in step.moves:
            self.cache[move.target] = before.get(move.source, [])
        chunks = [chunk for batch in step.prefills for chunk in batch]
        assert sum(chunk.tokens for chunk in chunks) <= self.budget
        assert len({chunk.row for chunk in chunks} | set(step.ready)) == len(chunks) + len(step.ready)
        assert [r.slot for r in step.ready] == list(range(len(step.ready)))
        # Nobody is moved while paused: a row that left meanwhile leaves its slot empty until the next plan.
        assert not chunks if paused else sorted(r.slot for r in plan.running) == list(range(len(plan.running)))
        gets_token: list[Row] = []
        for chunk in chunks:
            assert 0 < chunk.tokens <= chunk.row.pending
            if chunk.completes:
                gets_token.append(chunk.row)
            self.read(chunk.row, chunk.tokens)
        for r in step.ready:
            assert r.pending == 1
            self.read(r, 1)
        gets_token += step.ready
        for r in gets_token:
            r.append(1, -1.0, 0)
            if r.ended:
                plan.leave(r)

    def read(self, r: Row, tokens: int) -> None:
        held = self.cache.setdefault(r.slot, [])
        held[r.cached :] = [r] * tokens
        assert held == [r] * (r.cached + tokens), "the slot holds another row's keys and values"
        self.plan.read(r, tokens)


def test_rows_join_in_order_and_the_rest_wait() -> None:
    plan = schedule(running=2)
    for name in "abc":
        plan.submit(row(name, 3))
    step = plan.next()
    assert names(plan.running) == "ab"
    assert plan.waiting == 1
    assert [[(c.row.request_id, c.tokens) for c in batch] for batch in step.prefills] == [[("a", 3), ("b", 3)]]
    assert not step.ready


def test_a_prompt_of_one_token_needs_no_prefill() -> None:
    plan = schedule()
    plan.submit(row("a", 1))
    step = plan.next()
    assert step.prefills == ()
    assert names(step.ready) == "a"


def test_a_long_prompt_is_read_in_chunks_while_others_decode() -> None:
    plan = schedule(budget=4)
    plan.submit(row("a", 1))
    plan.submit(row("b", 10))
    for expected in (4, 4, 2):
        step = plan.next()
        assert names(step.ready) == "a"
        ((chunk,),) = step.prefills
        assert (chunk.row.request_id, chunk.tokens) == ("b", expected)
        assert chunk.completes == (expected == 2)
        plan.read(chunk.row, chunk.tokens)
        plan.read(step.ready[0], 1)
        step.ready[0].append(1, 0.0, 0)
    chunk.row.append(1, 0.0, 0)
    assert names(plan.next().ready) == "ab"


def test_the_last_row_takes_the_place_of_one_that_left() -> None:
    plan = schedule()
    driver = Driver(plan, budget=100)
    a, b, c = row("a", 2), row("b", 2), row("c", 2)
    for r in (a, b, c):
        plan.submit(r)
    driver.step()
    driver.step()
    plan.leave(a)
    step = plan.next()
    assert names(step.ready) == "cb"
    assert step.moves == (Move(source=2, target=0),)


def test_a_row_whose_cache_is_void_makes_way_for_ready_ones() -> None:
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
    assert b.slot == 0
    assert step.moves == (Move(source=1, target=0),)
    ((chunk,),) = step.prefills
    assert (chunk.row, chunk.tokens) == (a, 3)


def test_a_probe_goes_first_and_on_top() -> None:
    plan = schedule(running=1)
    plan.submit(row("a", 1))
    plan.next()
    plan.submit(row("b", 1))
    plan.submit(row("p", 1, probe=True))
    assert names(plan.next().ready) == "ap"
    assert plan.waiting == 1


def test_keep_plans_nothing_and_forgets_nothing() -> None:
    plan = schedule()
    plan.submit(row("a", 1))
    plan.next()
    plan.pause("keep")
    plan.submit(row("b", 1))
    assert not plan.has_work
    assert plan.next().ready == ()
    plan.resume()
    assert names(plan.next().ready) == "ab"


def test_drain_serves_what_was_there_and_holds_the_new() -> None:
    plan = schedule(running=1)
    a, b, c = (row(name, 1) for name in "abc")
    plan.submit(a)
    plan.submit(b)
    plan.pause("drain")
    plan.submit(c)
    assert names(plan.next().ready) == "a"
    plan.leave(a)
    assert plan.state == "draining"
    assert names(plan.next().ready) == "b"
    plan.leave(b)
    assert plan.state == "paused"
    assert not plan.has_work
    plan.resume()
    assert names(plan.next().ready) == "c"


def test_drain_of_nothing_is_a_pause() -> None:
    plan = schedule()
    plan.pause("drain")
    assert plan.state == "paused"


def test_batches_are_sorted_and_waste_little() -> None:
    chunks = [Chunk(row(str(n), n), n) for n in (200, 10, 12, 190, 11)]
    batches = in_batches(chunks)
    assert [[chunk.tokens for chunk in batch] for batch in batches] == [[10, 11, 12], [190, 200]]


def test_a_chunk_that_goes_on_stands_alone() -> None:
    going_on = row("a", 9)
    going_on.cached = 4
    chunks = [Chunk(going_on, 5), Chunk(row("b", 5), 5)]
    assert [[chunk.row.request_id for chunk in batch] for batch in in_batches(chunks)] == [["a"], ["b"]]


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 9), st.integers(1, 5)),
        st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
        st.tuples(st.just("abort"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("reread"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("drain"), st.just(0), st.just(0)),
        st.tuples(st.just("keep"), st.just(0), st.just(0)),
        st.tuples(st.just("resume"), st.just(0), st.just(0)),
        st.tuples(st.just("probe"), st.just(0), st.just(0)),
        st.tuples(st.just("sleep"), st.just(0), st.just(0)),
        st.tuples(st.just("wake"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(events=EVENTS, running=st.integers(1, 4), budget=st.integers(1, 12))
def test_slots_hold_their_rows_and_everyone_ends(events: list[tuple[str, int, int]], running: int, budget: int) -> None:
    plan = schedule(running=running, budget=budget)
    driver = Driver(plan, budget=budget)
    rows: list[Row] = []
    aborted: set[Row] = set()
    for kind, number, tokens in events:
        if kind in ("submit", "probe"):
            rows.append(row(str(len(rows)), max(number, 1), tokens=max(tokens, 1), probe=kind == "probe"))
            plan.submit(rows[-1])
        elif kind == "step":
            for _ in range(number):
                driver.step()
        elif kind in ("keep", "drain"):
            plan.pause(kind)  # type: ignore[arg-type]
        elif kind == "resume":
            plan.resume()
        elif kind == "sleep":
            plan.sleep()
            driver.cache.clear()
        elif kind == "wake":
            plan.wake()
        elif rows:
            victim = rows[number % len(rows)]
            if kind == "reread" and victim.slot >= 0:
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
