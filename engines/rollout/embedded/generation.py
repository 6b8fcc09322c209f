"""One step of generation: schedule, decoder, sampler and weights put together. Synchronous; called from one thread."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING

import torch

from asyncrl.errors import EngineError, InvalidDataError
from asyncrl.interfaces import KVCachePolicy, PauseMode
from engines.rollout.embedded.row import Row
from engines.rollout.embedded.sampling import Sampled, Sampler
from engines.rollout.embedded.schedule import Chunk, Schedule, Step
from engines.rollout.embedded.shadow_weights import ShadowWeights

if TYPE_CHECKING:
    from engines.rollout.embedded.decoder import Decoder  # loads transformers, which only a started engine does

__all__ = ["Counters", "Generation"]


@dataclass(slots=True)
class Counters:
    """What has been done; only grows. Probes are counted nowhere."""

    tokens_generated: int = 0
    prompt_tokens: int = 0
    requests_finished: int = 0
    requests_aborted: int = 0
    decode_steps: int = 0
    busy_s: float = 0.0


class Generation:
    """Rows in, tokens into the rows. Events between steps, :meth:`step` for the tokens.

    Every method that may change a row appends it to :attr:`touched`, for whoever delivers, and sets :attr:`ended` if
    it was the row's end.
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
    def has_work(self) -> bool:
        return self.failure is None and self.schedule.has_work

    def submit(self, row: Row) -> None:
        """Queue a row."""
        if self.failure is not None:
            row.error = self.failure
            self.touched.append(row)
            return
        if row.continued:
            row.look()
        if row.ended:  # its last token had come before, only the news of it had not
            self.counters.requests_finished += 1
            self.touched.append(row)
            return
        self.schedule.submit(row)

    def abort(self, row: Row) -> bool:
        """End a row; False if it has ended before."""
        if row.ended:
            return False
        row.finish_reason = "abort"
        self._leave(row)
        return True

    def pause(self, mode: PauseMode) -> None:
        self.schedule.pause(mode)
        if mode == "abort":
            for row in self.schedule.rows:
                self.abort(row)

    def resume(self) -> None:
        self.schedule.resume()

    def sleep(self) -> None:
        """Give the memory of caches and weights back."""
        self.schedule.sleep()
        self.decoder.cache.clear()
        self.weights.sleep()
        if self.decoder.device.type == "cuda":
            torch.cuda.empty_cache()  # torch keeps what is freed for this process otherwise

    def wake(self) -> None:
        """Have the weights where they were; caches are computed again as rows are read."""
        self.weights.wake()
        self.schedule.wake()

    def commit(self, version: int, *, kv_cache: KVCachePolicy) -> None:
        """Swap the prepared weights in.

        A row that has not sampled anything here yet is read again in either case: none of its tokens tells a version,
        so it begins under the new one entirely.
        """
        begin = time.perf_counter()
        self.weights.swap(version)
        for row in self.schedule.running:
            if kv_cache == "recompute" or not row.versions:
                self.schedule.reread(row)
        self.commit_pause_s = time.perf_counter() - begin

    def fail(self, error: Exception) -> None:
        """End everything with ``error``; nothing works after this."""
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

    def _carry_out(self, plan: Step) -> None:
        chunks = [chunk for batch in plan.prefills for chunk in batch]
        need = max((chunk.row.cached + chunk.tokens for chunk in chunks), default=0)
        if plan.changed:
            longest = max((row.cached for row in self.schedule.running), default=0)
            self.decoder.reserve(slots=len(self.schedule.running), tokens=max(need, longest + 1))
            self.decoder.move(plan.moves, tokens=longest)
            self.decoder.seat(plan.ready)
            self._sampler = self._sampler_of(plan.ready)
        elif need:
            self.decoder.reserve(slots=0, tokens=need)
        version = self.weights.version
        for batch in plan.prefills:
            self._prefill(batch, version)
        if plan.ready and self._sampler is not None:
            self._decode(plan.ready, self._sampler, version)

    def _prefill(self, batch: tuple[Chunk, ...], version: int) -> None:
        logits = self.decoder.prefill(batch)
        done = [i for i, chunk in enumerate(batch) if chunk.completes]
        for chunk in batch:
            self.schedule.read(chunk.row, chunk.tokens)
        if not done:
            return
        rows = [batch[i].row for i in done]
        sampler = self._sampler_of(rows)
        self._give(rows, _sample(rows, sampler, logits if len(done) == len(batch) else logits[done]), version)

    def _decode(self, rows: Sequence[Row], sampler: Sampler, version: int) -> None:
        self.decoder.reserve(slots=0, tokens=self.decoder.longest + 1)
        sampled = _sample(rows, sampler, self.decoder.decode())
        self.decoder.advance(sampled.tokens)
        for row in rows:
            row.cached += 1
        self._give(rows, sampled, version)

    def _give(self, rows: Sequence[Row], sampled: Sampled, version: int) -> None:
        counted = 0
        tops = sampled.top_log_probs or repeat(None)
        for row, token, log_prob, top in zip(rows, sampled.token_list, sampled.log_probs, tops, strict=False):
            if not math.isfinite(log_prob):
                self.decoder.cache.forget(row.slot)
                row.error = _no_token(row, version)
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


def _sample(rows: Sequence[Row], sampler: Sampler, logits: torch.Tensor) -> Sampled:
    """The next token of each row from ``logits`` [B, V], which are changed: what a row's grammar forbids is -inf."""
    for index, row in enumerate(rows):
        if row.guide is not None:
            forbidden = ~row.guide.allowed(row.stop_token_ids)
            logits[index].masked_fill_(forbidden.to(logits.device), -math.inf)
    return sampler.sample(logits)


def _no_token(row: Row, version: int) -> Exception:
    """Why there was no token to sample."""
    if row.guide is not None and row.guide.problem:  # the request's fault: another replica would fail as well
        return InvalidDataError(f"the text of request {row.request_id!r} cannot go on: {row.guide.problem[:500]}")
    return EngineError(f"the model's logits are not finite under weight version {version}")
