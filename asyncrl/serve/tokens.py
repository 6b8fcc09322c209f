"""The token-native face: ids in; ids, log-probs and weight versions out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Annotated, Literal

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from asyncrl.interfaces import Generation, GenerationRequest, TopLogProbs
from asyncrl.serve.call import Call, GatheredChunks, Version, version_spans
from asyncrl.serve.openai_schema import Count, LikeliestCount, Probability, Seed, Temperature, Text, TokenId
from asyncrl.serve.sampling import sampling_params

__all__ = ["GenerateAnswer", "GenerateRequest", "generate"]


class GenerateRequest(Struct, kw_only=True):
    """POST /generate. ``stop`` strings and a ``grammar`` (llguidance's Lark) need a model with a tokenizer."""

    prompt_token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    max_new_tokens: Count | None = None
    temperature: Temperature = 1.0
    top_p: Probability = 1.0
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    stop: list[Text] = []
    stop_token_ids: list[TokenId] = []
    seed: Seed | None = None
    top_log_probs: LikeliestCount = 0
    grammar: str = ""
    stream: bool = False


class GenerateAnswer(Struct, kw_only=True):
    """All of the answer, or as an event the next part of it; ``weight_versions`` count from its first token.

    ``log_probs`` are of the distribution sampled from: after grammar, temperature, top-p and top-k. ``top_log_probs``
    are there where they were asked for: for each token the likeliest ids, each with its log-prob.
    """

    request_id: str
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    weight_versions: list[Version]
    finish_reason: Literal["stop", "length", "abort"] | None
    top_log_probs: Sequence[TopLogProbs] | msgspec.UnsetType = msgspec.UNSET


async def generate(call: Call) -> web.StreamResponse:
    """Sample a continuation of the prompt, whole or as a stream."""
    body = call.body_as(GenerateRequest)
    sampling = sampling_params(
        call.face.limits,
        max_tokens=body.max_new_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        seed=body.seed,
        top_log_probs=body.top_log_probs,
        grammar=body.grammar,
    )
    session = call.session()
    prompt = tuple(body.prompt_token_ids)
    place = session.token_prompt(prompt) if session is not None else None
    (request,) = call.requests(prompt, sampling, choices=1)

    def keep(generation: Generation) -> None:
        if session is not None and place is not None and generation.finish_reason != "abort" and generation.token_ids:
            text = call.face.text.decode(generation.token_ids) if call.face.text is not None else ""
            call.face.sessions.add(session, place, generation, {"role": "assistant", "content": text})

    if body.stream:
        return await _stream(call, request, keep)
    generation = await call.collect(request)
    keep(generation)
    return call.answer(
        GenerateAnswer(
            request_id=call.id,
            token_ids=generation.token_ids,
            log_probs=generation.log_probs,
            weight_versions=version_spans(generation.weight_versions),
            finish_reason=generation.finish_reason,
            top_log_probs=generation.top_log_probs or msgspec.UNSET,
        )
    )


async def _stream(call: Call, request: GenerationRequest, keep: Callable[[Generation], None]) -> web.StreamResponse:
    """Whoever has read the last event finds the turn in the session, and the session at rest."""
    events = call.events()
    whole = GatheredChunks()
    last: GenerateAnswer | None = None
    async with aclosing(call.stream(request)) as chunks:
        async for chunk in chunks:
            begin = len(whole.token_ids)
            whole.add(chunk)
            event = GenerateAnswer(
                request_id=call.id,
                token_ids=chunk.token_ids,
                log_probs=chunk.log_probs,
                weight_versions=version_spans(chunk.weight_versions, offset=begin),
                finish_reason=chunk.finish_reason,
                top_log_probs=chunk.top_log_probs or msgspec.UNSET,
            )
            if chunk.finish_reason is None:
                await events.send(event)
            else:
                last = event
    keep(whole.generation(request))
    await events.send(last)
    return await events.end()
