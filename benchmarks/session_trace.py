"""A trace of many-turn sessions, the modelled engine that it is played on in virtual time, and a bound of its time.

The trace: each of ``clients`` plays one session after another. In a turn the prompt, or the answer of a tool, is added
to the context, an answer is sampled, and a tool runs. Lengths and times of tools are log-normal.

The modelled engine is the embedded engine's own schedule, with its blocks and its cache of sessions; a step takes
``step_s``, and more for each row that decodes, each token that is read, and each cached token that is attended to.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from asyncrl.interfaces import GenerationChunk, GenerationRequest, SamplingParams, TokenGenerator
from asyncrl.rollout.sessions import SessionCache
from asyncrl.testing import EchoEngine
from asyncrl.testing.clock import run_virtually
from engines.rollout.request import Row
from engines.rollout.transformers.schedule import Schedule

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Turn:
    added: int
    sampled: int
    think_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    sessions: Sequence[Sequence[Turn]]
    clients: int
    capacity_tokens: int

    @property
    def sampled_tokens(self) -> int:
        return sum(turn.sampled for turns in self.sessions for turn in turns)


def make_trace(
    *, cached_sessions: int, rounds: int, prompt: int, answer: int, sampled: int, think_s: float, seed: int = 0
) -> Trace:
    """Return a trace with twice as many clients as the cache holds sessions at the end of their mean length.

    ``prompt``, ``answer``, ``sampled`` and ``think_s`` are medians; sessions have 6 to 14 turns.
    """
    dice = random.Random(seed)
    clients = 2 * cached_sessions

    def drawn(median: float, sigma: float = 0.6) -> float:
        return median * dice.lognormvariate(0.0, sigma)

    def session() -> list[Turn]:
        return [
            Turn(max(1, round(drawn(answer if number else prompt))), max(1, round(drawn(sampled))), drawn(think_s, 0.8))
            for number in range(dice.randint(6, 14))
        ]

    sessions = [session() for _ in range(rounds * clients)]
    mean_length = sum(turn.added + turn.sampled for turns in sessions for turn in turns) / len(sessions)
    return Trace(sessions=sessions, clients=clients, capacity_tokens=round(cached_sessions * mean_length))


async def play(trace: Trace, engine: TokenGenerator, *, vocabulary: int, forget: Callable[[str], object]) -> None:
    """Play a trace; ``forget`` is called with the name of each session that has ended."""
    waiting = list(enumerate(trace.sessions))[::-1]  # the first one is taken first

    async def client() -> None:
        while waiting:
            number, turns = waiting.pop()
            dice, context = random.Random(number), list[int]()
            for place, turn in enumerate(turns):
                context += [dice.randrange(3, vocabulary) for _ in range(turn.added)]
                request = GenerationRequest(
                    request_id=f"{number}-{place}",
                    prompt_token_ids=tuple(context),
                    sampling=SamplingParams(max_new_tokens=turn.sampled, ignore_eos=True),
                    session=str(number),
                )
                before = len(context)
                async for chunk in engine.generate(request):
                    context += chunk.token_ids
                assert len(context) == before + turn.sampled
                if place + 1 < len(turns):
                    await asyncio.sleep(turn.think_s)
            forget(str(number))

    await asyncio.gather(*(client() for _ in range(trace.clients)))


# ------------------------------------------------------------------------------------------------------ simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Seconds of a step: for itself, each decoding row, each token read, each cached token of decoding rows."""

    step_s: float
    row_s: float
    read_s: float
    cached_s: float = 0.0


class ModelledEngine(EchoEngine):
    """A :class:`~asyncrl.interfaces.SessionEngine` whose time is modelled. ``read_tokens`` counts what it has read."""

    def __init__(self, costs: StepCosts, *, capacity_tokens: int, max_running_requests: int) -> None:
        super().__init__(context_tokens=capacity_tokens)
        self._costs = costs
        self._row_ends: dict[Row, asyncio.Queue[GenerationChunk]] = {}
        self._submitted = asyncio.Event()
        self.read_tokens = 0
        self.schedule = Schedule(
            max_running_requests=max_running_requests,
            prefill_tokens_per_step=2048,
            blocks=range(capacity_tokens // BLOCK_TOKENS),
            block_tokens=BLOCK_TOKENS,
            on_free=lambda _: None,
        )

    def forget_session(self, session: str) -> None:
        self.schedule.forget(session)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        prompt = list(request.prompt_token_ids)
        row = Row(
            request_id=request.request_id,
            tokens=prompt,
            prompt_length=len(prompt),
            length_limit=len(prompt) + request.sampling.max_new_tokens,
            sampling=request.sampling,
            seed=0,
            session=request.session,
        )
        inbox = self._row_ends[row] = asyncio.Queue[GenerationChunk]()
        self.schedule.submit(row)
        self._submitted.set()
        read = 0
        while True:
            chunk = await inbox.get()
            read += len(chunk.token_ids)
            yield chunk
            if chunk.finish_reason is not None:
                del self._row_ends[row]
                return

    async def run(self) -> None:
        costs = self._costs
        while True:
            while not self.schedule.has_work:
                self._submitted.clear()
                await self._submitted.wait()
            step = self.schedule.next()
            rows = step.rows  # those that complete, before they do
            read = sum(chunk.tokens for chunk in step.prefills)
            cached = sum(row.cached for row in step.ready)
            self.read_tokens += read
            await asyncio.sleep(
                costs.step_s + costs.row_s * len(step.ready) + costs.read_s * read + costs.cached_s * cached
            )
            self.schedule.note_read(step)
            for row in rows:
                row.append(3, -1.0, 0)
                if row.ended:
                    self.schedule.leave(row)
                if row.ended or len(row.versions) == 1:
                    # Only the first token and the last matter to a reader of this model.
                    chunk = row.chunk(0 if len(row.versions) == 1 else 1)
                    assert chunk is not None
                    self._row_ends[row].put_nowait(chunk)


def simulate(trace: Trace, costs: StepCosts, *, kv_aware: bool) -> float:
    """Return the seconds of the trace on one modelled engine."""

    async def run() -> float:
        engine = ModelledEngine(
            costs, capacity_tokens=trace.capacity_tokens, max_running_requests=max(64, trace.clients)
        )
        await engine.start()
        running = asyncio.create_task(engine.run())
        if kv_aware:
            sessions = SessionCache(engine, capacity_tokens=trace.capacity_tokens)
            await play(trace, sessions, vocabulary=1000, forget=sessions.leave)
        else:
            await play(trace, engine, vocabulary=1000, forget=engine.forget_session)
        running.cancel()
        return asyncio.get_running_loop().time()

    return run_virtually(run())


def least_time_s(trace: Trace, costs: StepCosts) -> float:
    """Return a lower bound of the time that any schedule, even one that knows the future, needs for a trace.

    The largest of three:

    - The work, which steps do one after another: each token of a prompt is read once, each sampled one but the first of
      a turn is decoded, and the rows that decode in one step are all in the cache, so there are at least as many steps
      as the sum of the lengths at all sampled tokens over the capacity. To this the work is added that one of two costs
      forces: through each run of a tool a session is kept, which takes its tokens times that time of the memory, or it
      is read again. Each may be done in part; the least maximum of work and of memory over capacity is the bound.
    - The longest session, alone on the engine.
    - The sum of all sessions, each alone on the engine, over the number of clients.
    """
    work = memory = longest = alone = 0.0
    kept: list[tuple[float, int]] = []
    for turns in trace.sessions:
        tokens, own = 0, 0.0
        for place, turn in enumerate(turns):
            last = place + 1 == len(turns)
            tokens += turn.added
            reading = costs.read_s * (turn.added + (1 if place else 0))
            steps = turn.sampled - 1
            lengths = steps * tokens + steps * (steps + 1) / 2
            decoding = costs.row_s * steps + costs.cached_s * (lengths - steps)
            work += reading + decoding + costs.step_s * lengths / trace.capacity_tokens
            memory += lengths * (costs.step_s + costs.row_s)
            own += reading + decoding + costs.step_s * (steps + 1) + (0.0 if last else turn.think_s)
            tokens += turn.sampled
            if not last:
                kept.append((turn.think_s, tokens - 1))  # the last one was not read
        longest, alone = max(longest, own), alone + own
    work += sum(costs.read_s * tokens for _, tokens in kept)
    least = max(work, memory / trace.capacity_tokens)
    for think_s, tokens in sorted(kept):  # the shortest runs of tools save the most reading for the memory
        read, held = costs.read_s * tokens, think_s * tokens / trace.capacity_tokens
        gap = work - memory / trace.capacity_tokens
        share = min(1.0, max(0.0, gap / (read + held)))
        work, memory = work - share * read, memory + share * held * trace.capacity_tokens
        least = max(work, memory / trace.capacity_tokens)
        if share < 1.0:
            break
    return max(least, longest, alone / trace.clients)
