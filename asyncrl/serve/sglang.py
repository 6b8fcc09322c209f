"""SGLang's body of /generate: ids or text in, ids and log-probs out. ``native`` has our own body of that route."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Annotated, Literal, TypeAlias

from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType, structs

from asyncrl.interfaces import Generation, GenerationChunk, SamplingParams, TopLogProbs
from asyncrl.serve import native
from asyncrl.serve.call import Call, Version, version_spans
from asyncrl.serve.chat import json_grammar, json_schema, lark_grammar, regex_grammar, text_grammar
from asyncrl.serve.errors import APIError
from asyncrl.serve.limits import (
    Count,
    CountOrNone,
    SamplingFields,
    Seed,
    Text,
    TokenId,
    TopLogProbCount,
    check_choices,
    check_neutral,
    sampling_params,
)
from asyncrl.serve.text import Choice, log_prob_entries, prompt_only


class SGLangSampling(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """``max_new_tokens`` may be 0, for the log-probs of the prompt."""

    max_new_tokens: CountOrNone | None = None
    min_new_tokens: CountOrNone | None = None
    sampling_seed: Seed | None = None
    json_schema: Text | None = None
    regex: Text | None = None
    ebnf: Text | None = None
    n: Count | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    stream_interval: Count | None = None


class GenerateBody(native.GenerateRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /generate: ``prompt_token_ids`` and the fields of our body, or ``input_ids`` or ``text`` and SGLang's."""

    input_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    text: Text | None = None
    sampling_params: SGLangSampling | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: TopLogProbCount | None = None
    return_text_in_logprobs: bool | None = None
    rid: Annotated[str, Meta(max_length=128)] | None = None


TokenEntry: TypeAlias = tuple[float | None, int, str | None]
"""Log-prob, id and, if it was requested, text of a token."""


class EndReason(Struct, kw_only=True, omit_defaults=True):
    """``matched`` is the stop string or token, ``length`` the most tokens that were requested."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    length: int | None = None


class MetaInfo(Struct, kw_only=True):
    """``weight_version`` is the last token's."""

    id: str
    finish_reason: EndReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    weight_version: str
    weight_versions: list[Version]
    input_token_logprobs: list[TokenEntry] | UnsetType = UNSET
    output_token_logprobs: list[TokenEntry] | UnsetType = UNSET
    output_token_logprobs_length: int | UnsetType = UNSET
    input_top_logprobs: list[list[TokenEntry] | None] | UnsetType = UNSET
    output_top_logprobs: list[list[TokenEntry] | None] | UnsetType = UNSET


class SGLangAnswer(Struct, kw_only=True):
    """All of one sample; of a stream all of it until now. ``text`` needs a tokenizer.

    The more tokens there are, the more are new in the next event: each has all of them again.
    """

    output_ids: Sequence[int]
    meta_info: MetaInfo
    text: str | UnsetType = UNSET


_EVENTS = 128
"""An event adds at least this part to a stream that has grown: all events are so many times as long as the last one.
It adds a larger part where all of them together could have more log-probs than one answer may."""
_NATIVE = native.GenerateRequest()
_OWN_FIELDS = tuple(name for name in GenerateBody.__struct_fields__ if not hasattr(_NATIVE, name))


async def generate(call: Call) -> web.StreamResponse:
    """Sample a continuation of the prompt, whole or as a stream; in our body or in SGLang's."""
    body = call.body_as(GenerateBody)
    theirs = [name for name in _OWN_FIELDS if getattr(body, name) is not None]
    if not theirs:
        return await native.generate(call)
    names = (name for name in _NATIVE.__struct_fields__ if name != "stream")
    if ours := [name for name in names if getattr(body, name) != getattr(_NATIVE, name)]:
        raise APIError(400, f"{theirs[0]} is of SGLang's body, {ours[0]} of asyncrl's: give the fields of one of them")
    if (body.input_ids is None) == (body.text is None):
        raise APIError(400, "give input_ids or text")
    return await _generate(call, body)


async def _generate(call: Call, body: GenerateBody) -> web.StreamResponse:
    text, given = call.state.text, body.sampling_params or SGLangSampling()
    sampling = await _sampling(call, body, given)
    ids = tuple(body.input_ids or ())
    if body.text is not None:
        whole = call.state.model_text().within(call.state.context_tokens)
        ids = tuple(await call.off_loop(partial(whole.encode, body.text)))
    several = check_choices(call.state.limits, given.n)
    if body.stream:
        check_neutral(n=(several, 1))
    requests, record = native.token_turn(call, ids, sampling, choices=several)
    sampling = requests[0].sampling  # as the server has decided
    special = given.skip_special_tokens is False
    choices = [
        Choice(
            partial(text.decode, skip_special_tokens=not special) if text is not None else lambda ids: "",
            request.sampling,
            special_ids=text.special_ids if text is not None else frozenset(),
            include_stop=bool(given.no_stop_trim),
            show_special=special,
        )
        for request in requests
    ]

    def shown(part: Generation | GenerationChunk) -> Generation | GenerationChunk:
        return part if given.max_new_tokens != 0 else prompt_only(part)

    def answer(choice: Choice) -> SGLangAnswer:
        return SGLangAnswer(
            output_ids=choice.token_ids,
            meta_info=_meta_info(call, body, ids, choice, sampling),
            text=choice.text if text is not None else UNSET,
        )

    if not body.stream:
        await call.feed(choices, [shown(each) for each in await call.collect_all(requests)])
        for choice in choices:
            await record(choice.generation())
        return await call.answer_made(
            lambda: answer(choices[0]) if several == 1 else [answer(choice) for choice in choices],
            entries=log_prob_entries(choices),
        )
    events, (choice,), sent, places = call.events(), choices, 0, 1 + sampling.top_log_probs
    scored = len(ids) if sampling.prompt_log_probs is not None else 0
    context = call.state.context_tokens
    room = sampling.max_new_tokens if context is None else min(sampling.max_new_tokens, context - len(ids))
    most = (scored + room) * places if body.return_logprob else 1
    parts = max(min(_EVENTS, call.state.limits.likeliest_tokens // most), 1)
    async with aclosing(call.stream(requests[0])) as chunks:
        async for chunk in chunks:
            choice.feed(shown(chunk))
            if chunk.finish_reason is not None:
                await record(choice.generation())
            count = len(choice.token_ids)
            enough = max(given.stream_interval or 1, (scored + count) // parts) if events.begun else 0
            if count - sent >= enough or chunk.finish_reason is not None:
                sent = count
                entries = (scored + count) * places
                made = await call.off_loop(partial(answer, choice), entries=entries, of_request=False)
                await events.send(made, entries=entries)
    call.leave_session()
    await events.send_bytes(b"data: [DONE]\n\n")
    return await events.end()


async def _sampling(call: Call, body: GenerateBody, given: SGLangSampling) -> SamplingParams:
    limits = call.state.limits
    check_neutral(spaces_between_special_tokens=(given.spaces_between_special_tokens, True))
    made: dict[str, tuple[Callable[[str], str], str | None]] = {
        "json_schema": (lambda schema: json_grammar(json_schema(limits, "json_schema", schema)), given.json_schema),
        "regex": (regex_grammar, given.regex),
        "ebnf": (lark_grammar, given.ebnf),
    }
    forms = [name for name, (_, form) in made.items() if form is not None]
    if len(forms) > 1:
        raise APIError(400, f"{' and '.join(forms)} both restrict the text: give one of them")
    grammar = "".join([await text_grammar(call, make, form) for make, form in made.values() if form is not None])
    with_prompt = body.return_logprob and body.logprob_start_len is not None and body.logprob_start_len >= 0
    top = (body.top_logprobs_num or 0) if body.return_logprob else 0
    return sampling_params(
        limits,
        structs.replace(
            given,
            min_tokens=given.min_new_tokens or given.min_tokens,
            seed=given.seed if given.sampling_seed is None else given.sampling_seed,
        ),
        max_tokens=128 if given.max_new_tokens is None else max(given.max_new_tokens, 1),
        top_log_probs=top,
        prompt_log_probs=top if with_prompt else None,
        grammar=grammar,
    )


def _meta_info(
    call: Call,
    body: GenerateBody,
    prompt: tuple[int, ...],
    choice: Choice,
    sampling: SamplingParams,
) -> MetaInfo:
    version = choice.versions[-1] if choice.versions else call.state.pool.weight_version
    reason: EndReason | None = None
    if choice.finish_reason == "stop":
        reason = EndReason(type="stop", matched=choice.stop_string or next(reversed(choice.token_ids), None))
    elif choice.finish_reason is not None:
        length = len(choice.token_ids) if choice.finish_reason == "length" else None  # whatever bound it was
        reason = EndReason(type=choice.finish_reason, length=length)
    info = MetaInfo(
        id=body.rid or call.id,
        finish_reason=reason,
        prompt_tokens=len(prompt),
        completion_tokens=len(choice.token_ids),
        weight_version=str(version),
        weight_versions=version_spans(choice.versions),
    )
    if not body.return_logprob:
        return info
    text = call.state.model_text() if body.return_text_in_logprobs else None

    def entries(values: Iterator[tuple[int, float | None]]) -> list[TokenEntry]:
        return [(value, token, text.spelling(token) if text is not None else None) for token, value in values]

    def tops(places: Sequence[TopLogProbs]) -> list[list[TokenEntry] | None]:
        return [entries(iter(place)) for place in places]

    begin = body.logprob_start_len or 0
    before: list[float | None] = [None, *choice.prompt_log_probs[begin + 1 :]]  # the first has no prediction
    asked = prompt[begin:] if choice.prompt_log_probs else ()
    info.input_token_logprobs = entries(zip(asked, before, strict=False))
    info.output_token_logprobs = entries(zip(choice.token_ids, choice.log_probs, strict=True))
    info.output_token_logprobs_length = len(choice.token_ids)
    if sampling.top_log_probs:
        info.input_top_logprobs = [None, *tops(choice.prompt_top_log_probs[begin + 1 :])] if asked else []
        info.output_top_logprobs = tops(choice.top_log_probs)
    return info
