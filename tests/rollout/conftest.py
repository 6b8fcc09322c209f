"""Two tokenizers with different chat templates, and an engine that can fail in every way an engine process can."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, ClassVar

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asyncrl.envs.calculator import CalculatorFactory
from asyncrl.errors import EngineClosedError, EngineError, InvalidDataError, WeightMismatchError, WeightVersionError
from asyncrl.interfaces import (
    EngineHealth,
    GenerationChunk,
    GenerationRequest,
    KVCachePolicy,
    RolloutEngineStatistics,
)
from asyncrl.rollout.chat import ChatRenderer
from asyncrl.weights import WeightManifest
from engines.training.scratch import make_scratch_tokenizer

# ChatML as Qwen models write it: a default system turn, declared tools, answers of tools gathered in one user turn.
CHATML = """
{%- if tools -%}
{{ '<|im_start|>system\nTools: ' + (tools | map(attribute='function.name') | join(', ')) + '<|im_end|>\n' }}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif -%}
{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif -%}
{%- else -%}
{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] -%}
{{ '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""


@pytest.fixture(scope="session")
def factory() -> CalculatorFactory:
    return CalculatorFactory()


@pytest.fixture(scope="session")
def scratch(factory: CalculatorFactory) -> ChatRenderer:
    return ChatRenderer(make_scratch_tokenizer([factory.demonstration(index) for index in range(200)]))


@pytest.fixture(scope="session")
def chatml() -> ChatRenderer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    tokenizer.chat_template = CHATML
    return ChatRenderer(tokenizer)


class FaultyEngine:
    """A :class:`~asyncrl.interfaces.OutOfProcessEngine`.

    Token n of a request is the version that makes it, and its log-prob is -n: a wrong label, a token left out and one
    that comes twice all show. Chunks hold one to three tokens, and the finish reason comes with the last of them or
    alone.
    """

    pulls_weights: ClassVar[bool] = True

    def __init__(self, *, token_s: float = 0.01, weight_version: int = 0, seed: int = 0, start_s: float = 0.5) -> None:
        self._token_s = token_s
        self._version = weight_version
        self._start_s = start_s
        self._dice = random.Random(seed)
        self._prepared: int | None = None
        self._running: dict[str, bool] = {}
        self._paused = False
        self._closed = False
        self._gone = asyncio.Event()
        self._change = asyncio.Event()
        self._death = ""
        self.requests: list[GenerationRequest] = []
        self.frozen = False
        self.sends_invalid_chunks = False
        self.refuses_weights = False
        self.tokens = 0

    @property
    def weight_version(self) -> int:
        return self._version

    @property
    def open(self) -> bool:
        """Whether it was started, and neither closed nor killed."""
        return not self._closed and not self._gone.is_set()

    async def start(self) -> None:
        await asyncio.sleep(self._start_s)
        self._check()

    async def close(self) -> None:
        self._closed = True
        self._tell()

    def die(self, reason: str = "killed by SIGKILL") -> None:
        self._death = reason
        self._gone.set()
        self._tell()

    def freeze(self) -> None:
        """Deliver nothing more, without an error."""
        self.frozen = True

    async def wait_ended(self) -> str:
        await self._gone.wait()
        return self._death

    def _check(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine is closed")
        if self._gone.is_set():
            raise EngineError(f"the process is gone: {self._death}")

    def _tell(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def _step(self, name: str) -> None:
        await asyncio.sleep(self._token_s * (0.5 + self._dice.random()))
        while (
            (self._paused or self.frozen) and not self._running[name] and not self._gone.is_set() and not self._closed
        ):
            await self._change.wait()
        self._check()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        self._check()
        name, limit = request.request_id, request.sampling.max_new_tokens
        if name in self._running:
            raise InvalidDataError(f"{name} is in use")
        self.requests.append(request)
        self._running[name] = False
        at = request.continued_tokens
        try:
            while True:
                if at < limit:
                    await self._step(name)
                if self._running[name]:
                    yield GenerationChunk(token_ids=(), log_probs=(), weight_versions=(), finish_reason="abort")
                    return
                count = min(self._dice.randint(1, 3), limit - at)
                self.tokens += count
                tokens = (self._version,) * count
                alone = count > 0 and self._dice.random() < 0.5
                done = at + count == limit and not alone
                versions = () if self.sends_invalid_chunks else tokens
                log_probs = tuple(-float(at + n) for n in range(count))
                at += count
                yield GenerationChunk(
                    token_ids=tokens,
                    log_probs=log_probs,
                    weight_versions=versions,
                    finish_reason="length" if done else None,
                )
                if done:
                    return
        finally:
            del self._running[name]

    async def abort(self, request_id: str) -> bool:
        self._check()
        if request_id not in self._running:
            return False
        self._running[request_id] = True
        self._tell()
        return True

    async def pause(self) -> None:
        self._check()
        self._paused = True

    async def resume(self) -> None:
        self._check()
        self._paused = False
        self._tell()

    async def prepare_weights(self, tensors: Mapping[str, Any], *, version: int) -> None:
        raise AssertionError("this engine fetches for itself")

    async def fetch_weights(self, manifest: WeightManifest) -> None:
        await asyncio.sleep(0.2 * self._dice.random())
        if self.frozen:
            await asyncio.Event().wait()
        self._check()
        if self.refuses_weights:
            raise WeightMismatchError("checksum differs")
        if manifest.version <= self._version:
            raise WeightVersionError(f"{manifest.version} after {self._version}")
        self._prepared = manifest.version

    async def commit_weights(self, version: int, *, kv_cache: KVCachePolicy = "keep") -> None:
        await asyncio.sleep(0.05 * self._dice.random())
        self._check()
        if version != self._prepared:
            raise WeightVersionError(f"{version} was not prepared")
        self._version, self._prepared = version, None

    async def health(self, deadline_s: float) -> EngineHealth:
        error = "" if self.open else "gone"
        if self.frozen:
            await asyncio.sleep(deadline_s)
            error = f"no token within {deadline_s:g} s"
        return EngineHealth(healthy=not error, latency_s=0.0, weight_version=self._version, error=error)

    def statistics(self) -> RolloutEngineStatistics:
        return RolloutEngineStatistics(
            running=len(self._running),
            waiting=0,
            paused=self._paused,
            weight_version=self._version,
            tokens_generated=self.tokens,
            prompt_tokens=0,
            requests_finished=0,
            requests_aborted=0,
            kv_cache_tokens=0,
            kv_cache_capacity_tokens=0,
            decode_steps=0,
            busy_s=0.0,
        )


class FaultyFleet:
    """Makes faulty engines; ``fleet[name]`` is the newest under a name."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._made = 0
        self.engines: dict[str, list[FaultyEngine]] = {}

    def factory(self, name: str, **options: Any) -> Callable[[], FaultyEngine]:
        def make() -> FaultyEngine:
            self._made += 1
            engine = FaultyEngine(**{"seed": self._made, **self._options, **options})
            self.engines.setdefault(name, []).append(engine)
            return engine

        return make

    def __getitem__(self, name: str) -> FaultyEngine:
        return self.engines[name][-1]

    @property
    def tokens(self) -> int:
        """Tokens that all engines there ever were have generated."""
        return sum(engine.tokens for engines in self.engines.values() for engine in engines)


@pytest.fixture
def faulty_fleet() -> type[FaultyFleet]:
    return FaultyFleet
