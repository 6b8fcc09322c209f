"""The pool over scripted engines: what it promises, without a model."""

from __future__ import annotations

from asyncrl.interfaces import GenerationRequest, SamplingParams
from asyncrl.rollout.replica_pool import ReplicaPool
from asyncrl.testing import ScriptedEngine


def counting() -> ScriptedEngine:
    """Answers n with n+1, n+2, ..."""
    return ScriptedEngine(lambda prompt: range(prompt[-1] + 1, prompt[-1] + 100))


def request(name: str, tokens: int = 5, *, prompt: tuple[int, ...] = (0,)) -> GenerationRequest:
    return GenerationRequest(request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(max_new_tokens=tokens))


async def tokens_of(pool: ReplicaPool, asked: GenerationRequest) -> list[int]:
    return [token async for chunk in pool.generate(asked) for token in chunk.token_ids]


async def test_it_generates_as_one():
    async with ReplicaPool({"a": counting, "b": counting}) as pool:
        assert await tokens_of(pool, request("one")) == [1, 2, 3, 4, 5]
        assert pool.statistics().finished == 1
