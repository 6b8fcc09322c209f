"""One request in vLLM: the parameters that vLLM gets, and the tokens that its outputs bring."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any, cast

from asyncrl.errors import EngineError
from asyncrl.interfaces import FinishReason, GenerationChunk, TopLogProbs
from engines.rollout.request import Row

# vLLM lives in an environment of its own, where the type checkers do not look.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

_MIX = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: distinct counts give distinct seeds
_SEED_BITS = 63


class VLLMRequest:
    """A row and vLLM's records of it.

    ``version_at`` gives the version of what the row is sampled with (an adapter) while vLLM's own is another.

    Log-probs are vLLM's ``processed_logprobs``: of the distribution sampled from, and untempered for greedy requests,
    whatever else is in the batch.

    Stop strings are found here and not by vLLM, which has only what was sampled since the request came to it: one that
    was begun elsewhere may stop at a string whose first characters were sampled there.

    Attributes:
        admission: resolved with True when it may begin, with False when it is aborted before.
        collector: where vLLM puts its outputs; None while it has not been submitted.
        state: vLLM's own record of it, with the versions of its tokens.
        restart: whether it is to be submitted again, since the weights changed before its first token.
    """

    def __init__(self, row: Row, *, version_at: Callable[[int], int] = int) -> None:
        self.row = row
        self._version_at = version_at
        self.admission: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.collector: Any = None  # Any: vLLM's RequestOutputCollector
        self.state: Any = None  # Any: vLLM's RequestState
        self.restart = False
        self.aborted = False

    @property
    def began(self) -> bool:
        """Return whether vLLM has sampled a token of it, delivered or not."""
        return bool(self.row.versions) or (self.state is not None and bool(self.state.weight_version_starts))

    def sampling_params(self) -> Any:
        """Return vLLM's parameters. Any: its class is vLLM's own."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        row, sampling = self.row, self.row.sampling
        seed = None
        if sampling.seed is not None and sampling.temperature > 0.0:
            # vLLM counts a seeded request's tokens from where it came to it: one that was begun elsewhere draws from a
            # stream of its own rather than once more what it has drawn there.
            seed = (sampling.seed + row.continued * _MIX) & ((1 << _SEED_BITS) - 1)
        left = row.length_limit - len(row.tokens)
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=dict(sampling.logit_bias) or None,
            allowed_token_ids=list(sampling.allowed_token_ids) or None,
            bad_words=list(sampling.bad_words),
            min_tokens=min(max(sampling.min_tokens - row.continued, 0), left),
            seed=seed,
            max_tokens=left,
            stop_token_ids=sorted(row.stop_token_ids),
            ignore_eos=True,  # end-of-sequence ids that end it are among the stop ids
            logprobs=sampling.top_log_probs,  # besides the sampled token's
            prompt_logprobs=sampling.prompt_log_probs,
            structured_outputs=StructuredOutputsParams(grammar=sampling.grammar) if sampling.grammar else None,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

    def take(self, output: Any) -> GenerationChunk | None:
        """Append the tokens of an output to the row, and return them; None if there are none. Any: a RequestOutput.

        Raises:
            EngineError: the request failed inside vLLM, or its log-probs are not finite.
            InvalidDataError: its parameters forbid every token, or can, and its log-probs are not finite.
        """
        (completion,) = output.outputs
        row = self.row
        start = len(row.versions)
        if output.prompt_logprobs:
            scored = list(zip(row.tokens[1 : row.prompt_length], output.prompt_logprobs[1:], strict=False))
            row.prompt_log_probs[:] = [float(log_probs[token].logprob) for token, log_probs in scored]
            row.prompt_tops[:] = [_top(log_probs, row.sampling.prompt_log_probs or 0) for _, log_probs in scored]
        versions = self._versions(completion, start, start + len(completion.token_ids))
        for token, version, log_probs in zip(completion.token_ids, versions, completion.logprobs or (), strict=True):
            log_prob = float(log_probs[token].logprob)
            if not math.isfinite(log_prob):
                sampling = row.sampling
                ruled = sampling.allowed_token_ids or sampling.bad_words or sampling.grammar
                if ruled or row.sampled < sampling.min_tokens:
                    raise row.no_token_error()  # vLLM's log-probs of no token left are those of a broken model: NaN
                raise EngineError(f"the model's log-probs are not finite under weight version {version}")
            top = _top(log_probs, row.sampling.top_log_probs) if row.sampling.top_log_probs else None
            row.append(int(token), log_prob, version, top)
            if row.ended:
                break
        if output.finished and not row.ended:
            if completion.finish_reason not in ("stop", "length", "abort"):
                raise EngineError(
                    f"request {row.request_id!r} failed inside vLLM (finish reason {completion.finish_reason!r}); "
                    "see the engine's log"
                )
            row.finish_reason = cast(FinishReason, completion.finish_reason)
        return row.chunk(start)

    def _versions(self, completion: Any, begin: int, end: int) -> list[int]:
        """Return the versions that vLLM's engine core stamped, from (version, index of its first token) in order."""
        if completion.weight_versions is not None:
            starts = [(span.version, span.start) for span in completion.weight_versions]
        else:
            starts = [] if self.state is None else list(self.state.weight_version_starts)
        versions: list[int] = []
        for index in range(begin, end):
            version = next((version for version, start in reversed(starts) if start <= index), None)
            if version is None:
                raise EngineError(f"vLLM gave token {index} of {self.row.request_id!r} no weight version")
            versions.append(self._version_at(int(version)))
        return versions


def _top(log_probs: Any, count: int) -> TopLogProbs:
    """Return the ``count`` likeliest tokens that could be sampled. Any: token -> vLLM's Logprob."""
    falling = sorted((-float(each.logprob), token) for token, each in log_probs.items() if each.logprob > -math.inf)
    return tuple((token, -negative) for negative, token in falling[:count])
