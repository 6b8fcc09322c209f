"""Schedule, decoder, sampler and weights together: :class:`Generation` makes steps, :class:`Stepping` calls them."""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, TypeAlias

import torch

from asyncrl.errors import EngineError, InvalidDataError
from asyncrl.interfaces import KVCachePolicy
from engines.rollout.request import Row
from engines.rollout.transformers.sampling import Sampled, Sampler
from engines.rollout.transformers.schedule import Schedule, Step
from engines.rollout.transformers.weights import ShadowWeights

if TYPE_CHECKING:
    from engines.rollout.transformers.decoder import Decoder


@dataclass(slots=True)
class Counters:
    tokens_generated: int = 0
    prompt_tokens: int = 0
    requests_finished: int = 0
    requests_aborted: int = 0
    decode_steps: int = 0
    busy_s: float = 0.0


class Generation:
    """Appends tokens to rows, step by step. Synchronous: all methods are called from one thread, between two steps.

    Every method that may change a row appends it to :attr:`touched`, to be delivered, and sets :attr:`ended` if it
    ended the row.
    """

    def __init__(self, decoder: Decoder, schedule: Schedule, weights: ShadowWeights) -> None:
        self.decoder = decoder
        self.schedule = schedule
        self.weights = weights
        self.counters = Counters()
        self.touched: list[Row] = []
        self.ended = False
        self.failure: Exception | None = None
        self.commit_pause_s = 0.0
        self._sampler: Sampler | None = None

    @property
    def version(self) -> int:
        """Return the newest version of weights and adapters."""
        return max(self.weights.version, self.decoder.adapters.version)

    @property
    def has_work(self) -> bool:
        return self.failure is None and self.schedule.has_work

    def submit(self, row: Row) -> None:
        if self.failure is not None:
            row.error = self.failure
            self.touched.append(row)
            return
        row.end_if_complete()
        if row.ended:
            self.counters.requests_finished += 1
            self.touched.append(row)
            return
        self.schedule.submit(row)

    def abort(self, row: Row) -> bool:
        if row.ended:
            return False
        row.finish_reason = "abort"
        self._leave(row)
        return True

    def sleep(self) -> None:
        self.schedule.sleep()
        self.decoder.cache.free_memory()
        self.weights.sleep()
        self.decoder.adapters.move(torch.device("cpu"))
        if self.decoder.device.type == "cuda":
            torch.cuda.empty_cache()  # otherwise torch keeps the freed memory for this process

    def wake(self) -> None:
        if self.schedule.asleep:
            self.decoder.cache.allocate()
        self.weights.wake()
        self.decoder.adapters.move(self.decoder.device)
        self.schedule.wake()

    def commit(self, version: int, *, kv_cache: KVCachePolicy) -> None:
        """Swap the prepared weights in. Rows without a token sampled here are read again, under the new version.

        Adapters that are swapped in concern their own rows alone.
        """
        begin = time.perf_counter()
        adapters = self.decoder.adapters
        changed = adapters.swap(version) if version == adapters.prepared else None
        if changed is None:
            self.weights.swap(version)
        for row in list(self.schedule.running):
            if (changed is None or row.adapter in changed) and (kv_cache == "recompute" or not row.versions):
                self.schedule.reread(row)
        self.schedule.forget_all(changed)
        self.commit_pause_s = time.perf_counter() - begin

    def fail(self, error: Exception) -> None:
        """End every row with ``error``, now and in future."""
        self.failure = error
        for row in self.schedule.rows:
            row.error = error
            self.schedule.leave(row)
            self.touched.append(row)

    def step(self) -> None:
        """Read prompts, decode one token of each ready row. A row gets at most one token per step."""
        begin = time.perf_counter()
        with torch.inference_mode():
            self._carry_out(self.schedule.next())
        self.counters.decode_steps += 1
        self.counters.busy_s += time.perf_counter() - begin

    def _carry_out(self, step: Step) -> None:
        self.decoder.cache.clear(step.taken)
        if not (step.ready or step.prefills):
            return
        rows = step.rows
        logits, scored = self.decoder.read(step).tensor_split([len(rows)])
        _score(step, scored)
        self.schedule.note_read(step)
        if not rows:
            return
        if step.changed or self._sampler is None:
            self._sampler = self._sampler_of(rows)
        logits = _processed(rows, logits)
        self._append(rows, self._sampler.sample(logits), logits)

    def _append(self, rows: Sequence[Row], sampled: Sampled, logits: torch.Tensor) -> None:
        counted = 0
        tops = sampled.top_log_probs or repeat(None)
        for at, (row, token, log_prob, top) in enumerate(
            zip(rows, sampled.token_list, sampled.log_probs, tops, strict=False)
        ):
            version = self.decoder.adapters.version_of(row.adapter, weights=self.weights.version)
            if not math.isfinite(log_prob):
                row.error = _no_token_error(row, logits[at], version)
                self._leave(row)
                continue
            row.append(token, log_prob, version, top)
            if not row.probe:
                counted += 1
                if len(row.versions) == 1:
                    self.counters.prompt_tokens += row.prompt_length + row.continued
            if row.finish_reason is None:
                self.touched.append(row)
            else:
                self._leave(row)
        self.counters.tokens_generated += counted

    def _leave(self, row: Row) -> None:
        if not row.probe:
            if row.finish_reason == "abort":
                self.counters.requests_aborted += 1
            elif row.finish_reason is not None:
                self.counters.requests_finished += 1
        self.schedule.leave(row)
        self.touched.append(row)
        self.ended = True

    def _sampler_of(self, rows: Sequence[Row]) -> Sampler:
        return Sampler(
            [row.sampling for row in rows],
            seeds=[row.seed for row in rows],
            counters=[row.sampled for row in rows],
            vocabulary=self.decoder.vocabulary,
            device=self.decoder.device,
        )


def _processed(rows: Sequence[Row], logits: torch.Tensor) -> torch.Tensor:
    """Return the logits [B, V] after the grammars and rules of the rows."""
    for index, row in enumerate(rows):
        if row.guide is not None:
            forbidden = ~row.guide.allowed(row.stop_token_ids)
            logits[index].masked_fill_(forbidden.to(logits.device), -math.inf)
        if row.logits is not None:
            logits = logits.float()  # all of them, once
            row.logits.apply(logits[index], row.tokens)
    return logits


def _score(step: Step, logits: torch.Tensor) -> None:
    """Note the log-probs of the prompt's tokens that follow the places of ``logits`` [N, V]."""
    for chunk, own in zip(step.prefills, logits.split([len(chunk.scored) for chunk in step.prefills]), strict=True):
        row, places = chunk.row, chunk.scored
        if not places:
            continue
        log_probs = own.float().log_softmax(-1)
        following = torch.tensor(row.tokens[places.start + 1 : places.stop + 1], device=own.device)
        # What was noted from here on, when the row was read before, does not count any more.
        row.prompt_log_probs[places.start :] = log_probs.gather(1, following[:, None])[:, 0].tolist()
        values, tokens = log_probs.topk(min(row.sampling.prompt_log_probs or 0, own.shape[1]), dim=-1)
        tops = zip(tokens.tolist(), values.tolist(), strict=True)
        row.prompt_tops[places.start :] = [tuple(zip(*top, strict=True)) for top in tops]


def _no_token_error(row: Row, logits: torch.Tensor, version: int) -> Exception:
    if row.guide is not None and row.guide.problem:  # another replica would fail as well
        return InvalidDataError(f"the text of request {row.request_id!r} cannot go on: {row.guide.problem[:500]}")
    if row.logits is not None and logits.max() == -math.inf:
        return row.no_token_error()
    return EngineError(f"the model's logits are not finite under weight version {version}")


_GATHER_S = 0.01
"""A thread whose steps are faster than this gathers tokens before it wakes the event loop: a wake-up costs both threads
the interpreter lock. The last token of a request is never held back."""

Event: TypeAlias = Callable[[], object]
Deliver: TypeAlias = Callable[[Sequence[Row]], None]


def _guarded(generation: Generation, action: Event) -> None:
    """Call ``action``; an error in it ends every request, so that none waits for a token that cannot come."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - whatever a model raises is handed to every request
        failure = EngineError(f"the engine failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        generation.fail(failure)


class Stepping:
    """Steps while there is work, in a thread, so the event loop never waits for the model; ``deliver``s touched rows.

    One call into the event loop serves all rows of a step, and of several steps if these are short or the loop is late,
    so a slow reader costs the thread nothing. ``setup`` is called first in the thread: thread counts are per thread.
    """

    def __init__(
        self, generation: Generation, *, loop: asyncio.AbstractEventLoop, deliver: Deliver, setup: Event
    ) -> None:
        self._generation = generation
        self._loop = loop
        self._deliver = deliver
        self._setup = setup
        self._inbox: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._outbox: deque[list[Row]] = deque()
        self._announced = False
        self._ended = loop.create_future()
        self._thread = threading.Thread(target=self._run, name="asyncrl-decode", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, event: Event) -> None:
        """Call ``event`` between two steps, in the order of posting. An error in it ends every request."""
        self._inbox.put(event)

    async def close(self) -> None:
        """Call the events posted so far, finish the present step, stop. Idempotent."""
        self._inbox.put(None)
        await asyncio.shield(self._ended)
        self._collect()

    def _run(self) -> None:
        self._setup()
        generation = self._generation
        announced = 0.0
        try:
            while True:
                while not (generation.has_work and self._inbox.empty()):
                    event = self._inbox.get()
                    if event is None:
                        return
                    _guarded(generation, event)
                    self._announce()
                _guarded(generation, generation.step)
                now = time.perf_counter()
                if generation.ended or now - announced >= _GATHER_S or not generation.has_work:
                    announced = now
                    self._announce()
        finally:
            self._call_loop(self._end)

    def _announce(self) -> None:
        generation = self._generation
        if generation.touched:
            self._outbox.append(generation.touched)
            generation.touched = []
            generation.ended = False
            if not self._announced:
                self._announced = True
                self._call_loop(self._collect)

    def _call_loop(self, callback: Event) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            self._inbox.put(None)  # the loop was closed before the engine

    def _collect(self) -> None:
        self._announced = False
        while self._outbox:
            self._deliver(self._outbox.popleft())

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)
