"""SGLang as a rollout engine, in a process of its own that starts no server.

    engine = RemoteEngine("path/to/model", engine="sglang", python=".venv-sglang/bin/python", transport=spec)

Token ids go in and come out; SGLang neither tokenises nor detokenises here. What it samples is taken over piece by
piece into rows (:mod:`engines.rollout.embedded.row`), where stop strings and lengths are watched as everywhere else.

Versions are stamped by SGLang's scheduler (:mod:`engines.rollout.sglang_adapter.scheduler`). Its prefix cache does not
know them, so each request carries the version it begins under as its cache's salt: an entry of older weights is never
found. Requests that have not sampled anything when weights are committed begin again under the new ones.

Log-probs are SGLang's own of the distribution sampled from: after temperature; under top-p or top-k, of the truncated
and renormalised one. Greedy ones are those of the untempered distribution.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from itertools import count
from typing import Any, Literal

import torch

from asyncrl.errors import AsyncRLError, EngineClosedError, EngineError, InvalidDataError, WeightError
from asyncrl.interfaces import (
    EngineHealth,
    GenerationChunk,
    GenerationRequest,
    KVCachePolicy,
    PauseMode,
    RolloutEngineStatistics,
)
from engines.rollout.embedded.grammar import Grammars
from engines.rollout.embedded.row import Row
from engines.rollout.sglang_adapter.control import SGLangControl
from engines.rollout.sglang_adapter.intake import RowIntake
from engines.rollout.sglang_adapter.launching import SGLangOptions
from engines.rollout.sglang_adapter.request import SGLangRequest
from engines.rollout.sglang_adapter.staged_weights import StagedWeights

__all__ = ["SGLangEngine"]

_log = logging.getLogger(__name__)


class SGLangEngine:
    """A :class:`~asyncrl.interfaces.RolloutEngine` over SGLang (0.5.23 is what it was tested with).

    Args:
        model_path: Hugging Face folder or hub id.
        dtype: ``float32``, ``bfloat16`` or ``float16``.
        device: ``auto`` (CUDA where there is one), ``cuda`` or ``cpu``.
        max_running_requests: most rows in a decode step; others wait.
        max_model_tokens: context length, prompt included; the model's own by default. SGLang keeps two of them back.
        kv_cache_tokens: room for keys and values; by default what memory allows, on CPU 16,384.
        tensor_parallel: devices that the model is spread over.
        deterministic: SGLang's deterministic inference, which not every device has. Without it seeds are not followed.
        truncation_tokens: most tokens that top-p leaves: it takes the likeliest ones among so many.
        weight_version: version of the weights in ``model_path``.
        threads: compute threads on CPU.
        seed: SGLang's own.
        sglang: further arguments of SGLang's server, by their own names.
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str = "float32",
        device: str = "auto",
        max_running_requests: int = 64,
        max_model_tokens: int | None = None,
        kv_cache_tokens: int | None = None,
        tensor_parallel: int = 1,
        deterministic: bool = False,
        truncation_tokens: int = 4096,
        weight_version: int = 0,
        threads: int | None = None,
        seed: int = 0,
        sglang: Mapping[str, Any] | None = None,
    ) -> None:
        self._options = SGLangOptions(
            model_path=model_path,
            dtype=dtype,
            device=device,
            weight_version=weight_version,
            max_running_requests=max_running_requests,
            max_model_tokens=max_model_tokens,
            kv_cache_tokens=kv_cache_tokens,
            tensor_parallel=tensor_parallel,
            deterministic=deterministic,
            truncation_tokens=truncation_tokens,
            threads=threads,
            seed=seed,
            more=sglang or {},
        )
        self._version = weight_version
        self._sglang: SGLangControl | None = None
        self._intake: RowIntake | None = None
        self._grammars: Grammars | None = None
        self._staged: StagedWeights | None = None
        self._held: dict[str, SGLangRequest] = {}
        self._numbers = count()
        self._state: Literal["running", "draining", "paused"] = "running"
        self._committing = False
        self._changed = asyncio.Event()
        self._starting = asyncio.Lock()
        self._updating = asyncio.Lock()
        self._ordering = asyncio.Lock()
        self._fenced = ""
        self._closed = False
        self._warned_of_seeds = False
        self._tokens = self._prompt_tokens = self._finished = self._aborted = 0
        self._busy_s = 0.0
        self._busy_since: float | None = None

    # ------------------------------------------------------------------------------------------------------- life

    @property
    def weight_version(self) -> int:
        return self._version

    async def start(self) -> None:
        """Start SGLang; returns when it has generated a token.

        Raises:
            ConfigError: SGLang is not installed here.
            EngineError: it does not start.
        """
        async with self._starting:
            if self._closed:
                raise EngineClosedError("the engine is closed")
            if self._sglang is not None:
                return
            # Not in a thread: see launch(). Nothing else goes on in this process yet.
            self._sglang = SGLangControl(self._options)
            config = self._sglang.manager.model_config
            self._intake = RowIntake.of_model(
                self._options.model_path, vocabulary=int(config.vocab_size), context_tokens=int(config.context_len)
            )
            if self._intake.tokenizer is not None:
                self._grammars = Grammars(self._intake.tokenizer, vocabulary=self._intake.vocabulary)
            await self._sglang.probe(next(self._numbers))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for held in self._held.values():
            held.fail(EngineClosedError("the engine is closed"))
        self._tell()
        if self._sglang is not None:
            await self._sglang.close()

    def _serving(self) -> SGLangControl:
        if self._closed:
            raise EngineClosedError("the engine is closed")
        if self._sglang is None:
            raise EngineError("the engine has not been started: await engine.start() first")
        return self._sglang

    def _tell(self) -> None:
        """Wake whoever waits for requests to end, for a pause to, or for SGLang to be free."""
        self._changed.set()
        self._changed = asyncio.Event()

    # --------------------------------------------------------------------------------------------------- requests

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        self._serving()
        if self._fenced:
            raise EngineError(self._fenced)
        assert self._intake is not None, "it serves"
        if request.sampling.grammar and self._grammars is not None:  # within limits, which SGLang does not set
            begun = request.prompt_token_ids[len(request.prompt_token_ids) - request.continued_tokens :]
            stop = self._intake.stop_token_ids
            await asyncio.to_thread(self._grammars.guide, request.sampling.grammar, begun, stop_token_ids=stop)
        row = self._row_of(request)
        held = self._held[row.request_id] = SGLangRequest(row, vocabulary=self._intake.vocabulary)
        self._prompt_tokens += row.prompt_length + row.continued
        self._count_busy()
        if row.continued:
            row.look()  # its last token may have come before, and only the news of it not
        if not row.ended:
            held.begin(self._read(held))
        try:
            while True:
                chunk = await held.reader.next_chunk()
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            del self._held[row.request_id]
            if row.finish_reason in ("stop", "length"):
                self._finished += 1
            else:
                self._aborted += 1
            self._count_busy()
            self._tell()
            await held.stop()

    def _row_of(self, request: GenerationRequest) -> Row:
        assert self._intake is not None, "it serves"
        sampling = request.sampling
        row = self._intake.row_of(request, held=self._held, seed=sampling.seed or 0)
        if self._options.truncation_tokens < sampling.top_k < self._intake.vocabulary:
            raise InvalidDataError(
                f"request {request.request_id!r} asks for top_k={sampling.top_k}; the engine was started with "
                f"truncation_tokens={self._options.truncation_tokens}"
            )
        if sampling.seed is not None and not self._options.deterministic and not self._warned_of_seeds:
            self._warned_of_seeds = True
            _log.warning("seeds are not followed: SGLang does so only with deterministic=True")
        return row

    async def _read(self, held: SGLangRequest) -> None:
        """Take over what SGLang samples for a request, until it ends."""
        row = held.row
        try:
            await self._let_in(held)
            asked = held.ask(next(self._numbers), salt=str(self._version), options=self._options)
            async with aclosing(self._serving().manager.generate_request(asked, None)) as pieces:
                async for piece in pieces:
                    self._tokens += held.take(piece)
                    if row.ended:
                        break  # leaving the stream makes SGLang drop the request, if it would go on
            if not row.ended:
                raise EngineError("SGLang's stream ended before the request did")
        except AsyncRLError as error:
            held.fail(error)
        except ValueError as error:  # SGLang's word for a request that it does not take
            held.fail(InvalidDataError(f"request {row.request_id!r}: {error}"))
        except Exception as error:  # noqa: BLE001 - told to the reader
            held.fail(EngineError(f"{type(error).__name__}: {error}"))
        finally:
            self._count_busy()
            self._tell()

    async def _let_in(self, held: SGLangRequest) -> None:
        """Wait until SGLang may be asked for it."""
        while self._committing or not (self._state == "running" or (self._drains() and held.drains)):
            self._serving()
            if self._fenced:
                break
            await self._changed.wait()
        if self._fenced:
            raise EngineError(self._fenced)

    async def abort(self, request_id: str) -> bool:
        manager = self._serving().manager
        held = self._held.get(request_id)
        if held is None or held.row.ended:
            return False
        if held.asked_as is None or self._state == "paused":  # SGLang has nothing to say about it now
            held.end_here()
        else:
            held.aborted = True
            manager.abort_request(held.asked_as)
        self._tell()
        return True

    # ------------------------------------------------------------------------------------------------------ pause

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop decoding; when this returns no step is running.

        ``drain`` waits until the requests that have come by now have finished; :meth:`resume`, another pause or
        :meth:`close` meanwhile end the wait.
        """
        sglang = self._serving()
        if mode == "drain" or (mode == "abort" and self._state == "running"):
            await self._drain(sglang)
        if mode == "abort":
            for held in list(self._held.values()):
                await self.abort(held.row.request_id)
        while mode != "keep" and self._drains() and self._draining():
            await self._changed.wait()
            self._serving()
        async with self._ordering:
            if mode != "keep" and not self._drains():
                return
            self._state = "paused"
            self._count_busy()
            await sglang.freeze("in_place")
            await sglang.heard()
        self._tell()

    async def _drain(self, sglang: SGLangControl) -> None:
        """Go on with what has come, and with nothing that comes from now on."""
        async with self._ordering:
            if self._drains():
                return
            if self._state == "paused" and not self._fenced:
                await sglang.thaw()
            for held in self._held.values():
                held.drains = True
            self._state = "draining"
            self._count_busy()
        self._tell()

    def _drains(self) -> bool:
        return self._state == "draining"

    def _draining(self) -> bool:
        """Whether a drain has something to wait for."""
        return any(held.drains and not held.row.ended for held in self._held.values())

    async def resume(self) -> None:
        sglang = self._serving()
        async with self._ordering:
            if not self._fenced:
                await sglang.thaw()
            self._state = "running"
            self._count_busy()
        self._tell()

    # ---------------------------------------------------------------------------------------------------- weights

    async def prepare_weights(self, tensors: Mapping[str, torch.Tensor], *, version: int) -> None:
        """Copy verified tensors into shared memory, while decoding goes on; see the contract.

        Another prepare before the commit replaces the first. A cancelled prepare leaves nothing prepared, and returns
        only when ``tensors`` are not read any more.
        """
        self._serving()
        stop = threading.Event()

        def write() -> None:
            staged = self._staged or StagedWeights.of_model(
                self._options.model_path, dtype=self._options.torch_dtype, version=self._version
            )
            self._staged = staged
            staged.verify(tensors, version=version)
            for _ in staged.write(tensors, version=version, stop=stop):
                pass

        async with self._updating:
            writing = asyncio.get_running_loop().run_in_executor(None, write)
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                stop.set()
                while not writing.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([writing])
                raise

    async def commit_weights(self, version: int, *, kv_cache: KVCachePolicy = "keep") -> None:
        """Have SGLang load the prepared tensors between two steps.

        With ``recompute`` its whole cache is emptied. A commit that fails half-way leaves weights that nobody knows:
        the engine is fenced then, and serves again after one that succeeds.

        Raises:
            WeightVersionError: ``version`` is not the prepared one.
            WeightError: SGLang did not take them.
        """
        sglang = self._serving()
        async with self._updating, self._ordering:
            staged = self._staged
            if staged is None:
                raise WeightError(f"cannot commit weight version {version}: none is prepared")
            named = staged.staged(version)
            self._committing = True
            try:
                try:
                    await sglang.freeze("in_place" if kv_cache == "keep" else "retract")
                    await sglang.load(named, version=version, flush=kv_cache == "recompute")
                except BaseException as error:
                    self._fence(f"version {version} was loaded only in part: {error or type(error).__name__}")
                    raise
                self._fenced = ""
                self._version = version
                staged.committed(version)
                self._begin_again()
                if self._state != "paused":
                    await sglang.thaw()
            finally:
                self._committing = False
                self._tell()

    def _begin_again(self) -> None:
        """Requests that have sampled nothing, under the new weights; those that are being aborted end."""
        for held in self._held.values():
            if held.asked_as is not None and not held.row.versions and not held.row.ended:
                if held.aborted:
                    held.end_here()
                else:
                    held.begin(self._read(held))

    def _fence(self, reason: str) -> None:
        """Nobody knows what weights there are: nothing is generated until a commit succeeds."""
        self._fenced = reason
        for held in self._held.values():
            held.fail(EngineError(reason))
        self._tell()

    # ----------------------------------------------------------------------------------------------- observation

    async def health(self, deadline_s: float) -> EngineHealth:
        """Generate one real token. A paused engine decodes nothing by order, and answers unhealthy at once."""
        loop = asyncio.get_running_loop()
        begin = loop.time()
        error = ""
        try:
            sglang = self._serving()
            if self._fenced:
                raise EngineError(self._fenced)
            if self._state == "paused":
                raise EngineError("the engine is paused: it decodes nothing until resume()")
            async with asyncio.timeout(deadline_s):
                await sglang.probe(next(self._numbers))
        except TimeoutError:
            error = f"no token within {deadline_s} s"
        except EngineError as failure:
            error = str(failure)
        return EngineHealth(healthy=not error, latency_s=loop.time() - begin, weight_version=self._version, error=error)

    def _count_busy(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._busy_since is not None:
            self._busy_s += now - self._busy_since
        busy = self._state != "paused" and any(not held.row.ended for held in self._held.values())
        self._busy_since = now if busy else None

    def statistics(self) -> RolloutEngineStatistics:
        sglang = self._serving()
        live = [held.row for held in self._held.values() if not held.row.ended]
        running = [row for row in live if row.versions]
        return RolloutEngineStatistics(
            running=len(running),
            waiting=len(live) - len(running),
            paused=self._state != "running",
            weight_version=self._version,
            tokens_generated=self._tokens,
            prompt_tokens=self._prompt_tokens,
            requests_finished=self._finished,
            requests_aborted=self._aborted,
            kv_cache_tokens=sum(len(row.tokens) for row in running),
            kv_cache_capacity_tokens=sglang.capacity_tokens,
            decode_steps=sglang.decode_steps,
            busy_s=self._busy_s,
        )
