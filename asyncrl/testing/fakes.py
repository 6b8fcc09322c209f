"""Fakes for tests of programs built on asyncrl: deterministic, without a model, keeping the contracts.

    engine = ScriptedEngine(lambda prompt: [7, 8, 9])
    await engine.start()
    async for chunk in engine.generate(request): ...

Nothing here loads torch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from asyncrl.errors import EngineClosedError, InvalidDataError, WeightMismatchError, WeightVersionError
from asyncrl.interfaces import (
    EngineHealth,
    FinishReason,
    GenerationChunk,
    GenerationRequest,
    KVCachePolicy,
    Message,
    RolloutEngineStatistics,
    Step,
    Task,
    Tool,
    TopLogProbs,
)

if TYPE_CHECKING:
    import torch

    from asyncrl.weights import WeightManifest


@dataclass(slots=True)
class _Running:
    held_tokens: int
    aborted: bool = False


class ScriptedEngine:
    """A :class:`~asyncrl.interfaces.RolloutEngine` whose replies are a function of the prompt.

    One token is one decode step, and other tasks run between two steps; so weights committed, a pause or an abort in
    the middle of a request take effect at the next token, as in a real engine.

    Args:
        reply: the tokens to answer a prompt with. They end early at a stop token or at ``max_new_tokens``.
        token_s: seconds of the event loop's time per token; 0 only yields to other tasks.
        parameters: names that :meth:`prepare_weights` requires; None takes any.
        context_tokens: longest prompt and reply together.
        grammars: whether it takes requests with a grammar, which its script has to keep to then.
        healthy: what :meth:`health` reports; may be set at any time.
    """

    pulls_weights: ClassVar[bool] = False

    def __init__(
        self,
        reply: Callable[[tuple[int, ...]], Sequence[int]],
        *,
        weight_version: int = 0,
        log_prob: float = -0.5,
        token_s: float = 0.0,
        parameters: frozenset[str] | None = None,
        context_tokens: int = 1 << 20,
        grammars: bool = True,
    ) -> None:
        self._reply = reply
        self._version = weight_version
        self._log_prob = log_prob
        self._token_s = token_s
        self._parameters = parameters
        self._context_tokens = context_tokens
        self._grammars = grammars
        self._prepared: int | None = None
        self._running: dict[str, _Running] = {}
        self._waiting = 0
        self._started = self._closed = self._paused = False
        self._changed = asyncio.Condition()
        self._tokens = self._prompt_tokens = self._finished = self._aborted = 0
        self.healthy = True
        self.requests: list[GenerationRequest] = []
        """Every request taken, in order, for assertions of tests."""

    @property
    def weight_version(self) -> int:
        return self._version

    async def start(self) -> None:
        self._open()
        self._started = True

    async def close(self) -> None:
        self._closed = True
        await self._notify()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        self._admit(request)
        self.requests.append(request)
        self._waiting += 1
        try:
            await self._until(lambda: not self._paused)
        finally:
            self._waiting -= 1
        self._open()
        running = self._running[request.request_id] = _Running(held_tokens=len(request.prompt_token_ids))
        self._prompt_tokens += len(request.prompt_token_ids)
        try:
            async for chunk in self._decode(request, running):
                yield chunk
            self._finished += not running.aborted
        finally:
            del self._running[request.request_id]
            self._aborted += running.aborted
            await self._notify()

    async def _decode(self, request: GenerationRequest, running: _Running) -> AsyncIterator[GenerationChunk]:
        sampling = request.sampling
        reason: FinishReason | None
        begun = len(request.prompt_token_ids) - request.continued_tokens
        script = list(self._reply(request.prompt_token_ids[:begun]))[: sampling.max_new_tokens]
        if not script:
            raise InvalidDataError("the script of a ScriptedEngine gave no token; a reply has at least one")
        stopped = request.continued_tokens > 0 and request.prompt_token_ids[-1] in sampling.stop_token_ids
        if stopped or request.continued_tokens >= len(script):
            reason = "length" if not stopped and len(script) == sampling.max_new_tokens else "stop"
            yield GenerationChunk(token_ids=(), log_probs=(), weight_versions=(), finish_reason=reason)
            return
        for number, token in enumerate(script):
            if number < request.continued_tokens:
                continue
            await asyncio.sleep(self._token_s)
            await self._until(lambda: not self._paused or running.aborted)
            self._open()
            if running.aborted:
                break
            self._tokens += 1
            running.held_tokens += 1
            reason = None
            if token in sampling.stop_token_ids:
                reason = "stop"
            elif number + 1 == len(script):
                reason = "length" if number + 1 == sampling.max_new_tokens else "stop"
            yield GenerationChunk(
                token_ids=(self.token(token),),
                log_probs=(self._log_prob,),
                weight_versions=(self._version,),
                finish_reason=reason,
                top_log_probs=(self._top_log_probs(token, sampling.top_log_probs),) if sampling.top_log_probs else (),
                **(self._scores(request) if number == request.continued_tokens else {}),
            )
            if reason is not None:
                return
        yield GenerationChunk(token_ids=(), log_probs=(), weight_versions=(), finish_reason="abort")

    def _scores(self, request: GenerationRequest) -> dict[str, Any]:
        """Return what a chunk has of the prompt. Any: its fields."""
        count = request.sampling.prompt_log_probs
        if count is None:
            return {}
        following = request.prompt_token_ids[1 : len(request.prompt_token_ids) - request.continued_tokens]
        tops = tuple(tuple((token + step, self._log_prob - step) for step in range(count)) for token in following)
        return {
            "prompt_log_probs": (0.0, *[self._log_prob] * len(following)),
            "prompt_top_log_probs": ((), *tops),
        }

    def _top_log_probs(self, scripted: int, count: int) -> TopLogProbs:
        """Return the token sampled, and the ids after it, each one nat less likely."""
        token = self.token(scripted)
        return tuple((token + step, self._log_prob - step) for step in range(count))

    def token(self, scripted: int) -> int:
        """Return the token that is sampled where the script has ``scripted``."""
        return scripted

    async def abort(self, request_id: str) -> bool:
        self._open()
        if request_id not in self._running:
            return False
        self._running[request_id].aborted = True
        await self._notify()
        return True

    async def pause(self) -> None:
        self._open()
        self._paused = True
        await self._notify()

    async def resume(self) -> None:
        self._open()
        self._paused = False
        await self._notify()

    async def prepare_weights(self, tensors: Mapping[str, torch.Tensor], *, version: int) -> None:
        self._open()
        if version <= self._version:
            raise WeightVersionError(f"version {version} is not newer than {self._version}, which is held")
        if self._parameters is not None and frozenset(tensors) != self._parameters:
            raise WeightMismatchError(f"names {sorted(frozenset(tensors) ^ self._parameters)} are not on both sides")
        self._prepared = version

    async def commit_weights(self, version: int, *, kv_cache: KVCachePolicy = "keep") -> None:
        self._open()
        if version != self._prepared:
            raise WeightVersionError(f"version {version} cannot be committed: version {self._prepared} is prepared")
        self._version, self._prepared = version, None

    async def health(self, deadline_s: float) -> EngineHealth:
        started = time.monotonic()
        error = "closed" if self._closed else "" if self._started else "not started"
        if not error and not self.healthy:
            error = "set to be unhealthy"
        try:
            async with asyncio.timeout(deadline_s):
                if not error:
                    await self._until(lambda: not self._paused)
        except TimeoutError:
            error = f"no token within {deadline_s:g} s"
        return EngineHealth(
            healthy=not error, latency_s=time.monotonic() - started, weight_version=self._version, error=error
        )

    def statistics(self) -> RolloutEngineStatistics:
        return RolloutEngineStatistics(
            running=len(self._running),
            waiting=self._waiting,
            paused=self._paused,
            weight_version=self._version,
            tokens_generated=self._tokens,
            prompt_tokens=self._prompt_tokens,
            requests_finished=self._finished,
            requests_aborted=self._aborted,
            kv_cache_tokens=sum(running.held_tokens for running in self._running.values()),
            kv_cache_capacity_tokens=self._context_tokens,
            decode_steps=self._tokens,
            busy_s=0.0,
        )

    def _open(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine is closed; make a new one")

    def _admit(self, request: GenerationRequest) -> None:
        self._open()
        if not self._started:
            raise EngineClosedError("the engine was not started: await start() first")
        if not request.prompt_token_ids:
            raise InvalidDataError(f"request {request.request_id!r} has an empty prompt; give at least one token")
        if len(request.prompt_token_ids) >= self._context_tokens:
            raise InvalidDataError(
                f"a prompt of {len(request.prompt_token_ids)} tokens leaves no room in {self._context_tokens}"
            )
        if request.sampling.grammar and not self._grammars:
            raise InvalidDataError("this engine serves no grammars")
        if request.request_id in self._running:
            raise InvalidDataError(f"request id {request.request_id!r} is in use; ids are unique")

    async def _until(self, condition: Callable[[], bool]) -> None:
        if not condition():
            async with self._changed:
                await self._changed.wait_for(lambda: condition() or self._closed)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class EchoEngine(ScriptedEngine):
    """Repeats its prompt until ``max_new_tokens``; a process can host it by name, with a model path that it ignores."""

    def __init__(
        self, model_path: str = "", *, weight_version: int = 0, token_s: float = 0.0, context_tokens: int = 4096
    ) -> None:
        super().__init__(
            lambda prompt: (prompt * (context_tokens // len(prompt)))[: context_tokens - len(prompt)],
            weight_version=weight_version,
            token_s=token_s,
            context_tokens=context_tokens,
        )


class VersionEchoEngine(EchoEngine):
    """Every token is the weight version that sampled it, which shows a wrong label."""

    def token(self, scripted: int) -> int:
        return self.weight_version


class EmptyTransport:
    """A :class:`~asyncrl.weights.WeightTransport` of versions without tensors."""

    def __init__(self, *, namespace: str = "") -> None:
        self._namespace = namespace

    def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], *, version: int) -> WeightManifest:
        from asyncrl.weights import WeightManifest

        return WeightManifest(version=version, transport="empty", location=self._namespace, tensors=())

    @contextmanager
    def pull(self, manifest: WeightManifest) -> Iterator[Mapping[str, torch.Tensor]]:
        yield {}

    def release(self, version: int) -> None: ...

    def close(self) -> None: ...


class EchoEnvironment:
    """Poses a word and rewards the reply that repeats it; over several turns if the task has ``turns``."""

    def __init__(self) -> None:
        self._word = ""
        self._turns_left = 0

    @property
    def tools(self) -> Sequence[Tool]:
        return ()

    async def reset(self, task: Task) -> Sequence[Message]:
        self._word, self._turns_left = task["word"], task.get("turns", 1)
        return [{"role": "user", "content": self._word}]

    async def step(self, reply: Message) -> Step:
        self._turns_left -= 1
        reward = float(reply["content"] == self._word)
        if self._turns_left <= 0:
            return Step(reward=reward, done=True)
        return Step(reward=reward, messages=({"role": "user", "content": self._word},))

    async def close(self) -> None:
        self._word = ""


class EchoFactory:
    """Words by number: even numbers train, odd ones are held out."""

    def __init__(self, *, turns: int = 1) -> None:
        self._turns = turns

    def task(self, index: int, *, split: Literal["train", "held_out"]) -> Task:
        return {"word": f"word{2 * index + (split == 'held_out')}", "turns": self._turns}

    def make(self) -> EchoEnvironment:
        return EchoEnvironment()

    def demonstration(self, index: int) -> list[Message]:
        word = self.task(index, split="train")["word"]
        return [{"role": "user", "content": word}, {"role": "assistant", "content": word}]
