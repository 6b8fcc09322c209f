"""OpenAI's dialect of plain continuations: /v1/completions."""

from __future__ import annotations

import time
from contextlib import aclosing

from aiohttp import web

from asyncrl.interfaces import GenerationChunk, Message
from asyncrl.serve.call import Call, version_spans
from asyncrl.serve.choice import Choice
from asyncrl.serve.failure import Refusal
from asyncrl.serve.model_text import ModelText
from asyncrl.serve.openai_sampling import asked_sampling, penalties, token_counts
from asyncrl.serve.openai_schema import Completion, CompletionChoice, CompletionLogProbs, CompletionRequest, Usage
from asyncrl.serve.sampling import check_choices, neutral

__all__ = ["completions"]


async def completions(call: Call) -> web.StreamResponse:
    """Continuations of plain prompts, whole or as a stream."""
    body = call.body_as(CompletionRequest)
    face = call.face
    face.check_model(body.model)
    neutral(
        **penalties(body),
        echo=(body.echo, (False,)),
        best_of=(body.best_of, (body.n or 1,)),
        suffix=(body.suffix, ("",)),
    )
    text = face.model_text()
    prompts = _prompts(text, body.prompt)
    choices = check_choices(face.limits, body.n or 1)
    if len(prompts) > face.limits.prompts or len(prompts) * choices > face.limits.concurrent_requests_per_key:
        raise Refusal(400, f"at most {face.limits.prompts} prompts are taken at a time")
    sampling = asked_sampling(
        call,
        body,
        max_tokens=16 if body.max_tokens is None else body.max_tokens,
        top_log_probs=body.logprobs or 0,
    )
    requests = [
        request
        for at, prompt in enumerate(prompts)
        for request in call.requests(prompt, sampling, choices=choices, first=at * choices)
    ]
    session = call.session()
    places = [session.token_prompt(prompt) for prompt in prompts] if session is not None else []
    readers = [Choice(text.decode, special_ids=text.special_ids, stop=sampling.stop) for _ in requests]
    created = int(time.time())
    prompt_tokens = sum(map(len, prompts))

    def told(number: int, begin: int, shown: str, offset: int) -> CompletionChoice:
        reader = readers[number]
        choice = CompletionChoice(index=number, text=shown, finish_reason=reader.finish_reason)
        if body.logprobs is not None:
            choice.logprobs = _log_probs(text, reader, begin, offset)
        if body.return_token_ids:
            choice.prompt_token_ids = list(prompts[number // choices]) if begin == 0 else None
            choice.token_ids = reader.token_ids[begin:]
            choice.weight_versions = version_spans(reader.versions[begin:], offset=begin)
        return choice

    def answer(told: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        return Completion(id=f"cmpl-{call.id}", created=created, model=body.model, choices=told, usage=usage)

    def keep() -> None:
        """Write what was sampled down in the session."""
        for number, reader in enumerate(readers if session is not None else ()):
            if session is not None and reader.finish_reason != "abort" and reader.token_ids:
                message: Message = {"role": "assistant", "content": reader.text}
                face.sessions.add(session, places[number // choices], reader.generation, message)

    if not body.stream:
        generations = await call.collect_all(requests)
        answers = [
            told(number, 0, reader.feed_all(generation), 0)
            for number, (reader, generation) in enumerate(zip(readers, generations, strict=True))
        ]
        keep()
        usage = token_counts(prompt_tokens, sum(len(reader.token_ids) for reader in readers))
        return call.answer(answer(answers, usage))
    events = call.events()
    async with aclosing(call.stream_all(requests)) as stream:
        async for number, piece in stream:
            begin, offset = len(readers[number].token_ids), len(readers[number].text)
            shown = readers[number].feed(piece)
            if _worth_telling(body, piece, shown):
                await events.send(answer([told(number, begin, shown, offset)]))
    keep()
    if body.stream_options is not None and body.stream_options.include_usage:
        usage = token_counts(prompt_tokens, sum(len(reader.token_ids) for reader in readers))
        await events.send(answer([], usage))
    await events.send_bytes(b"data: [DONE]\n\n")
    return await events.end()


def _worth_telling(body: CompletionRequest, piece: GenerationChunk, shown: str) -> bool:
    return bool(shown or piece.finish_reason or body.return_token_ids or body.logprobs is not None)


def _prompts(text: ModelText, prompt: str | list[str | int | list[int]]) -> list[tuple[int, ...]]:
    """Each prompt as ids: a list of ids is one prompt, a list of texts or of lists several."""
    if isinstance(prompt, str):
        return [tuple(text.encode(prompt))]
    ids = tuple(each for each in prompt if isinstance(each, int))
    if ids:
        if len(ids) != len(prompt):
            raise Refusal(400, "a prompt holds token ids, or texts, or lists of ids; not a mixture")
        return [ids]
    if not prompt:
        raise Refusal(400, "the prompt is empty")
    return [
        tuple(text.encode(each)) if isinstance(each, str) else tuple(each)
        for each in prompt
        if not isinstance(each, int)
    ]


def _log_probs(text: ModelText, reader: Choice, begin: int, offset: int) -> CompletionLogProbs:
    tokens = [text.spelling(token) for token in reader.token_ids[begin:]]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    told = CompletionLogProbs(tokens=tokens, token_logprobs=reader.log_probs[begin:], text_offset=offsets)
    if reader.top_log_probs:
        told.top_logprobs = []
        for top in reader.top_log_probs[begin:]:
            # Tokens that are spelt alike (parts of characters are) share an entry: the likeliest one's.
            spelt: dict[str, float] = {}
            for token_id, log_prob in top:
                spelt.setdefault(text.spelling(token_id), log_prob)
            told.top_logprobs.append(spelt)
    return told
