"""The embedded rollout engine: continuous batching over a transformers model in this process, on CPU or GPU.

    async with contextlib.AsyncExitStack() as stack:
        engine = TransformersEngine("path/to/model")
        stack.push_async_callback(engine.close)
        await engine.start()
        async for chunk in engine.generate(request):
            ...

Requests join and leave between decode steps. Weights are exchanged between two steps; requests in flight go on, with
their keys and values kept or computed again. Nothing is shared between requests (there is no prefix cache), so a
request that begins after a commit never meets an entry of older weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from typing import Any, TypeVar

import torch

from asyncrl.errors import ConfigError, EngineClosedError, EngineError, InvalidDataError
from asyncrl.interfaces import (
    EngineHealth,
    GenerationChunk,
    GenerationRequest,
    KVCachePolicy,
    PauseMode,
    RolloutEngineStatistics,
    SamplingParams,
)
from engines.rollout.embedded.generation import Generation
from engines.rollout.embedded.grammar import Grammars, Guide
from engines.rollout.embedded.reader import Reader
from engines.rollout.embedded.row import Row
from engines.rollout.embedded.schedule import Schedule
from engines.rollout.embedded.shadow_weights import ShadowWeights
from engines.rollout.embedded.stepping import InlineStepping, Stepping, ThreadStepping
from engines.rollout.embedded.stop_text import StopText

__all__ = ["TransformersEngine"]

_T = TypeVar("_T")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_COPY_SLICE_BYTES = 32 << 20  # without a thread, a weight update gives way to a decode step this often


class TransformersEngine:
    """A :class:`~asyncrl.interfaces.RolloutEngine` over any transformers causal language model with full attention.

    Args:
        model_path: Hugging Face folder or hub id.
        dtype: ``float32``, ``bfloat16`` or ``float16``: of weights and KV cache. Sampling is in float32 or better.
        device: ``auto`` (CUDA where there is one), or torch's name of a device.
        max_running_requests: most rows in a decode step; others wait.
        max_model_tokens: context length, prompt included; the model's own by default.
        prefill_tokens_per_step: most prompt tokens read between two decode steps. Small values keep the others'
            tokens flowing while a long prompt is read, large ones read it sooner.
        weight_version: version of the weights in ``model_path``.
        threads: torch threads of the forward pass; torch's default when None.
        step_in_thread: run the model in a thread of its own. False runs it on the event loop, which makes a
            single-threaded program deterministic.
        seed: of the numbers from which requests without a seed of their own get one.
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str = "float32",
        device: str = "auto",
        max_running_requests: int = 64,
        max_model_tokens: int | None = None,
        prefill_tokens_per_step: int = 2048,
        weight_version: int = 0,
        threads: int | None = None,
        step_in_thread: bool = True,
        seed: int = 0,
    ) -> None:
        if dtype not in _DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}", path="dtype")
        for name, value in (
            ("max_running_requests", max_running_requests),
            ("prefill_tokens_per_step", prefill_tokens_per_step),
            ("threads", 1 if threads is None else threads),
        ):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}", path=name)
        self._model_path = model_path
        self._dtype = _DTYPES[dtype]
        self._device = device
        self._max_running_requests = max_running_requests
        self._max_model_tokens = max_model_tokens
        self._prefill_tokens_per_step = prefill_tokens_per_step
        self._first_version = weight_version
        self._threads = threads
        self._step_in_thread = step_in_thread
        self._seeds = random.Random(seed)  # noqa: S311 - sampling, not secrets
        self._generation: Generation | None = None
        self._stepping: Stepping | None = None
        self._tokenizer: Any = None  # Any: transformers' tokenizers share no typed interface
        self._grammars: Grammars | None = None
        self._stop_token_ids: frozenset[int] = frozenset()
        self._readers: dict[str, Reader] = {}
        self._reading: dict[Row, Reader] = {}
        self._drained: list[asyncio.Future[None]] = []
        self._starting = asyncio.Lock()
        self._updating = asyncio.Lock()
        self._closed = False

    @staticmethod
    def import_for_fork(model_path: str) -> None:
        """Import what a process of this engine needs, and start no thread; see engines.rollout.process_spawner."""
        from engines.rollout.embedded.loading import import_model_code

        import_model_code(model_path)

    # ------------------------------------------------------------------------------------------------------- life

    @property
    def weight_version(self) -> int:
        return self._first_version if self._generation is None else self._generation.weights.version

    @property
    def commit_pause_s(self) -> float:
        """How long the last commit kept decoding from going on (without computing caches again)."""
        return self._running().commit_pause_s

    async def start(self) -> None:
        """Load the model and begin to serve.

        Raises:
            EngineError: the model cannot be loaded, or is of a kind that this engine does not serve.
        """
        async with self._starting:
            if self._closed:
                raise EngineClosedError("the engine is closed")
            if self._generation is None:
                await self._start()

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        generation = await asyncio.to_thread(self._load)
        if self._closed:
            raise EngineClosedError("the engine was closed while it started")
        self._generation = generation
        if self._step_in_thread:
            self._stepping = ThreadStepping(generation, loop=loop, deliver=self._deliver, setup=self._limit_threads)
        else:
            self._limit_threads()
            self._stepping = InlineStepping(generation, deliver=self._deliver)
        self._stepping.start()

    def _limit_threads(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)

    def _load(self) -> Generation:
        from engines.rollout.embedded.loading import load

        self._limit_threads()
        loaded = load(self._model_path, dtype=self._dtype, device=self._device, max_model_tokens=self._max_model_tokens)
        self._tokenizer = loaded.tokenizer
        if loaded.tokenizer is not None:
            self._grammars = Grammars(loaded.tokenizer, vocabulary=loaded.decoder.vocabulary)
        self._stop_token_ids = loaded.stop_token_ids
        schedule = Schedule(
            max_running_requests=self._max_running_requests, prefill_tokens_per_step=self._prefill_tokens_per_step
        )
        weights = ShadowWeights(loaded.decoder.model, version=self._first_version)
        return Generation(loaded.decoder, schedule, weights)

    async def close(self) -> None:
        self._closed = True
        generation, stepping = self._generation, self._stepping
        if generation is None or stepping is None:
            return
        closed = EngineClosedError("the engine is closed")
        stepping.post(lambda: generation.fail(closed))
        await stepping.close()
        self._finish_drains()
        generation.decoder.cache.clear()
        async with self._updating:
            generation.weights.close()

    def _running(self) -> Generation:
        if self._closed:
            raise EngineClosedError("the engine is closed")
        if self._generation is None:
            raise EngineError("the engine has not been started: await engine.start() first")
        return self._generation

    def _post(self, event: Callable[[], object]) -> None:
        assert self._stepping is not None
        self._stepping.post(lambda: (event(), None)[1])

    async def _call(self, event: Callable[[], _T]) -> _T:
        """Run ``event`` between two steps and wait for what it answers.

        A caller that is cancelled takes it back if it has not begun, and else waits for its end.
        """
        self._running()
        stepping = self._stepping
        assert stepping is not None
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[_T] = loop.create_future()
        order = [event]  # taken out by one of two threads: the one that carries it out, or this one to take it back

        def settle(result: _T | None, error: Exception | None) -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            try:
                taken = order.pop()
            except IndexError:
                return
            try:
                result, error = taken(), None
            except Exception as raised:  # noqa: BLE001 - handed to the caller
                result, error = None, raised
            loop.call_soon_threadsafe(settle, result, error)

        stepping.post(run)
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            with contextlib.suppress(IndexError):
                order.pop()
                raise
            while not answer.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([answer])
            answer.exception()
            raise

    # --------------------------------------------------------------------------------------------------- requests

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        generation = self._running()
        if generation.failure is not None:
            raise EngineError(str(generation.failure)) from generation.failure.__cause__
        row = self._row_of(request, generation)
        if request.sampling.grammar:
            row.guide = await asyncio.to_thread(self._guide, request, row)
            self._running()
            self._must_be_new(request)
        reader = self._readers[row.request_id] = self._submit(row, generation)
        try:
            while True:
                chunk = await reader.next_chunk()
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            del self._readers[row.request_id]
            self._withdraw(row, generation)

    def _must_be_new(self, request: GenerationRequest) -> None:
        if request.request_id in self._readers:
            raise InvalidDataError(
                f"request {request.request_id!r} is already being generated: ids are unique among the requests held"
            )

    def _guide(self, request: GenerationRequest, row: Row) -> Guide:
        if self._grammars is None:
            raise InvalidDataError(f"request {request.request_id!r} has a grammar, but {self._model_path} no tokenizer")
        begun = request.prompt_token_ids[row.prompt_length :]
        return self._grammars.guide(request.sampling.grammar, begun, stop_token_ids=row.stop_token_ids)

    def _submit(self, row: Row, generation: Generation) -> Reader:
        reader = self._reading[row] = Reader(row)
        self._post(lambda: generation.submit(row))
        return reader

    def _withdraw(self, row: Row, generation: Generation) -> None:
        """Nobody reads the row any more: free its slot before the next step."""
        del self._reading[row]
        if not row.ended and not self._closed:
            self._post(lambda: generation.abort(row))

    def _row_of(self, request: GenerationRequest, generation: Generation) -> Row:
        sampling, prompt = request.sampling, request.prompt_token_ids
        decoder = generation.decoder
        name = f"request {request.request_id!r}"
        self._must_be_new(request)
        if not prompt:
            raise InvalidDataError(f"{name} has an empty prompt")
        if min(prompt) < 0 or max(prompt) >= decoder.vocabulary:
            wrong = next(token for token in prompt if not 0 <= token < decoder.vocabulary)
            raise InvalidDataError(f"{name} holds token id {wrong}; the vocabulary is 0..{decoder.vocabulary - 1}")
        if len(prompt) - request.continued_tokens >= decoder.max_model_tokens:
            raise InvalidDataError(
                f"{name} has a prompt of {len(prompt)} tokens, which leaves no room to generate in a context of "
                f"{decoder.max_model_tokens}"
            )
        if sampling.stop and self._tokenizer is None:
            raise InvalidDataError(f"{name} asks for stop strings, but {self._model_path} has no tokenizer")
        begun = len(prompt) - request.continued_tokens
        seed = self._seeds.getrandbits(64) if sampling.seed is None else sampling.seed & (2**64 - 1)
        return Row(
            request_id=request.request_id,
            tokens=list(prompt),
            prompt_length=begun,
            continued=request.continued_tokens,
            length_limit=min(begun + sampling.max_new_tokens, decoder.max_model_tokens),
            sampling=sampling,
            seed=seed,
            stop_token_ids=self._stop_token_ids.union(sampling.stop_token_ids),
            stop_text=StopText(sampling.stop, decode=self._decode, prompt=prompt[:begun]) if sampling.stop else None,
        )

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _deliver(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if (reader := self._reading.get(row)) is not None:
                reader.wake()
        if self._drained and self._generation is not None and self._generation.schedule.state != "draining":
            self._finish_drains()

    async def abort(self, request_id: str) -> bool:
        generation = self._running()
        reader = self._readers.get(request_id)
        if reader is None:
            return False
        return await self._call(lambda: generation.abort(reader.row))

    # ------------------------------------------------------------------------------------------------------ pause

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop decoding; when this returns no step is running.

        ``drain`` waits until the requests submitted so far have finished; :meth:`resume`, another pause or
        :meth:`close` meanwhile end the wait.
        """
        generation = self._running()
        await self._call(lambda: generation.pause(mode))
        if generation.schedule.state != "draining":
            self._finish_drains()
            return
        drained = asyncio.get_running_loop().create_future()
        self._drained.append(drained)
        await drained

    async def resume(self) -> None:
        generation = self._running()
        await self._call(generation.resume)
        self._finish_drains()

    def _finish_drains(self) -> None:
        for drained in self._drained:
            if not drained.done():
                drained.set_result(None)
        self._drained.clear()

    async def sleep(self) -> None:
        """Give the memory of the KV cache back, and on an accelerator that of the weights: they wait on the host.

        Requests in flight stay where they are, and new ones wait; see :class:`asyncrl.interfaces.SleepingEngine`.
        """
        async with self._updating:  # what is being prepared would end up half here and half there
            await self._call(self._running().sleep)

    async def wake(self) -> None:
        async with self._updating:
            await self._call(self._running().wake)

    # ---------------------------------------------------------------------------------------------------- weights

    async def prepare_weights(self, tensors: Mapping[str, torch.Tensor], *, version: int) -> None:
        """Copy verified tensors into a shadow while decoding goes on; see the contract.

        Another prepare before the commit replaces the first. A cancelled prepare leaves nothing prepared, and returns
        only when ``tensors`` are not read any more.
        """
        weights = self._running().weights

        def write(stop: threading.Event) -> Generator[int]:
            weights.verify(tensors, version=version)
            yield from weights.write(tensors, version=version, stop=stop)

        await self._prepare(write)

    async def adopt_weights(self, lent: AbstractContextManager[Mapping[str, torch.Tensor]], *, version: int) -> None:
        """As :meth:`prepare_weights`, without a copy where the tensors are just as the model has them."""
        weights = self._running().weights

        def write(stop: threading.Event) -> Generator[int]:
            with ExitStack() as lease:
                tensors = lease.enter_context(lent)
                weights.verify(tensors, version=version)
                writing = weights.write(tensors, version=version, stop=stop, lease=lease.pop_all())
            yield from writing

        await self._prepare(write)

    async def _prepare(self, write: Callable[[threading.Event], Generator[int]]) -> None:
        """Fill the shadow: in a thread, or where there is to be none, slice by slice between the steps."""
        stop = threading.Event()
        async with self._updating:
            if not self._step_in_thread:
                copied = 0
                with closing(write(stop)) as writing:
                    for size_bytes in writing:
                        copied += size_bytes
                        if copied >= _COPY_SLICE_BYTES:
                            copied = 0
                            await asyncio.sleep(0)
                return
            filling = asyncio.get_running_loop().run_in_executor(None, lambda: deque(write(stop), maxlen=0))
            try:
                await asyncio.shield(filling)
            except asyncio.CancelledError:
                stop.set()
                while not filling.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([filling])
                raise

    async def commit_weights(self, version: int, *, kv_cache: KVCachePolicy = "keep") -> None:
        generation = self._running()
        async with self._updating:
            await self._call(lambda: generation.commit(version, kv_cache=kv_cache))

    # ----------------------------------------------------------------------------------------------- observation

    async def health(self, deadline_s: float) -> EngineHealth:
        """Generate one real token, before all requests that wait and in a slot of its own.

        A paused engine decodes nothing by order, which a probe does not override: it answers unhealthy at once, with
        the reason.
        """
        loop = asyncio.get_running_loop()
        begin = loop.time()
        error = ""
        try:
            generation = self._running()
            if generation.failure is not None:
                raise generation.failure
            if generation.schedule.asleep:
                error = "the engine is asleep: it decodes nothing until wake()"
            elif generation.schedule.state == "paused":
                error = "the engine is paused: it decodes nothing until resume()"
            else:
                async with asyncio.timeout(deadline_s):
                    await self._probe(generation)
        except TimeoutError:
            error = f"no token within {deadline_s} s"
        except EngineError as failure:
            error = str(failure)
        return EngineHealth(
            healthy=not error, latency_s=loop.time() - begin, weight_version=self.weight_version, error=error
        )

    async def _probe(self, generation: Generation) -> None:
        row = Row(
            request_id="probe",
            tokens=[0],
            prompt_length=1,
            length_limit=2,
            sampling=SamplingParams(max_new_tokens=1, temperature=0.0),
            seed=0,
            probe=True,
        )
        reader = self._submit(row, generation)
        try:
            chunk = await reader.next_chunk()
        finally:
            self._withdraw(row, generation)
        if not chunk.token_ids:
            raise EngineError("the probe was aborted by a pause")

    def statistics(self) -> RolloutEngineStatistics:
        generation = self._generation
        if generation is None:
            raise EngineError("the engine has not been started: await engine.start() first")
        schedule, counters, cache = generation.schedule, generation.counters, generation.decoder.cache
        running = [row for row in list(schedule.running) if not row.probe]
        return RolloutEngineStatistics(
            running=len(running),
            waiting=max(sum(not reader.row.ended for reader in self._readers.values()) - len(running), 0),
            paused=schedule.state != "running",
            weight_version=generation.weights.version,
            tokens_generated=counters.tokens_generated,
            prompt_tokens=counters.prompt_tokens,
            requests_finished=counters.requests_finished,
            requests_aborted=counters.requests_aborted,
            kv_cache_tokens=sum(row.cached for row in running),
            kv_cache_capacity_tokens=cache.slots * cache.capacity,
            decode_steps=counters.decode_steps,
            busy_s=counters.busy_s,
        )
