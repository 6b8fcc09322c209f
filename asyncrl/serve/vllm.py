"""vLLM's /inference/v1/generate: token ids in, ids and log-probs out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from aiohttp import web
from msgspec import Meta, Struct

from asyncrl.interfaces import FinishReason, SamplingParams
from asyncrl.serve import native
from asyncrl.serve.call import Call, Version, version_spans
from asyncrl.serve.limits import (
    Count,
    Ignored,
    SamplingFields,
    TokenId,
    TopLogProbCount,
    check_choices,
    check_neutral,
    sampling_params,
)
from asyncrl.serve.openai import PromptLogProbs, Usage, prompt_log_probs, token_usage
from asyncrl.serve.text import Choice, log_prob_entries


class VLLMSampling(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """What concerns text only has no effect, since the answer has none."""

    max_tokens: Count | None = None
    logprobs: TopLogProbCount | None = None
    prompt_logprobs: TopLogProbCount | None = None
    n: Count | None = None
    detokenize: Ignored = None
    flat_logprobs: Ignored = None
    skip_special_tokens: Ignored = None
    spaces_between_special_tokens: Ignored = None
    include_stop_str_in_output: Ignored = None


class TokensRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /inference/v1/generate."""

    token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    sampling_params: VLLMSampling
    model: str | None = None
    return_token_ids: bool | None = None
    output_mode: Literal["tokens"] | None = None
    stream: bool | None = None
    request_id: Ignored = None
    cache_salt: Ignored = None
    priority: Ignored = None


class IdLogProb(Struct, kw_only=True):
    """``token`` is ``token_id:`` and the id, as older versions of vLLM have it."""

    token_id: int
    token: str
    logprob: float


class TokenIdLogProb(IdLogProb, kw_only=True):
    """``top_logprobs`` begin with the token itself."""

    top_logprobs: list[IdLogProb]


class TokensLogProbs(Struct):
    content: list[TokenIdLogProb]


class TokensChoice(Struct, kw_only=True):
    """``stop_reason`` is the stop string or the token of ``stop_token_ids`` that ended the choice."""

    index: int = 0
    token_ids: Sequence[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    logprobs: TokensLogProbs | None
    weight_versions: list[Version]


class TokensAnswer(Struct, kw_only=True):
    request_id: str
    choices: list[TokensChoice]
    usage: Usage
    prompt_logprobs: PromptLogProbs | None = None
    prompt_token_ids: Sequence[int] | None = None


async def generate(call: Call) -> web.StreamResponse:
    """Sample a continuation of token ids, in vLLM's schema."""
    body, state = call.body_as(TokensRequest), call.state
    given, ids = body.sampling_params, tuple(body.token_ids)
    call.choose_model(body.model)
    check_neutral(stream=(body.stream, False))
    sampling = sampling_params(
        state.limits,
        given,
        max_tokens=given.max_tokens,
        top_log_probs=given.logprobs or 0,
        prompt_log_probs=given.prompt_logprobs,
    )
    text = state.model_text()
    several = check_choices(state.limits, given.n)
    requests, record = native.token_turn(call, ids, sampling, choices=several, scored_once=True)
    choices = [Choice(text.decode, each.sampling, special_ids=text.special_ids) for each in requests]
    await call.feed(choices, await call.collect_all(requests))
    for choice in choices:
        await record(choice.generation())

    def answer() -> TokensAnswer:
        return TokensAnswer(
            request_id=call.id,
            choices=[
                TokensChoice(
                    index=index,
                    token_ids=choice.token_ids,
                    finish_reason=choice.finish_reason,
                    stop_reason=_stop_reason(choice, requests[0].sampling),
                    logprobs=_log_probs(choice) if given.logprobs is not None else None,
                    weight_versions=version_spans(choice.versions),
                )
                for index, choice in enumerate(choices)
            ],
            usage=token_usage(len(ids), sum(len(choice.token_ids) for choice in choices)),
            prompt_logprobs=prompt_log_probs(text, ids, choices[0]),
            prompt_token_ids=ids if body.return_token_ids else None,
        )

    return await call.answer_made(answer, entries=log_prob_entries(choices))


def _stop_reason(choice: Choice, sampling: SamplingParams) -> int | str | None:
    last = choice.token_ids[-1] if choice.token_ids and choice.finish_reason == "stop" else None
    return choice.stop_string or (last if last in sampling.stop_token_ids else None)


def _log_probs(choice: Choice) -> TokensLogProbs:
    tops = choice.top_log_probs or [()] * len(choice.token_ids)
    content = []
    for token, log_prob, top in zip(choice.token_ids, choice.log_probs, tops, strict=True):
        likely = [(token, log_prob), *(each for each in top if each[0] != token)]
        places = [IdLogProb(token_id=each, token=f"token_id:{each}", logprob=value) for each, value in likely]
        content.append(TokenIdLogProb(token_id=token, token=f"token_id:{token}", logprob=log_prob, top_logprobs=places))
    return TokensLogProbs(content)
