"""What OpenAI's two kinds of generation have in common: sampling, what is refused, and counts of tokens."""

from __future__ import annotations

from asyncrl.interfaces import SamplingParams
from asyncrl.serve.call import Call
from asyncrl.serve.openai_schema import ChatCompletionRequest, CompletionRequest, Usage
from asyncrl.serve.sampling import sampling_params

__all__ = ["asked_sampling", "penalties", "token_counts"]


def penalties(body: ChatCompletionRequest | CompletionRequest) -> dict[str, tuple[object, tuple[object, ...]]]:
    """What would change the distribution, with the values that do not."""
    return {
        "frequency_penalty": (body.frequency_penalty, (0,)),
        "presence_penalty": (body.presence_penalty, (0,)),
        "repetition_penalty": (body.repetition_penalty, (1,)),
        "min_p": (body.min_p, (0,)),
        "logit_bias": (body.logit_bias, ({},)),
        "min_tokens": (body.min_tokens, (0,)),
        "ignore_eos": (body.ignore_eos, (False,)),
    }


def asked_sampling(
    call: Call,
    body: ChatCompletionRequest | CompletionRequest,
    *,
    max_tokens: int | None,
    top_log_probs: int,
) -> SamplingParams:
    """The sampling parameters of ``body``."""
    return sampling_params(
        call.face.limits,
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        seed=body.seed,
        top_log_probs=top_log_probs,
    )


def token_counts(prompt_tokens: int, completion_tokens: int) -> Usage:
    """Tokens as OpenAI counts them."""
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
    )
