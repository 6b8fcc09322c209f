"""One request: what vLLM is asked for, and what its outputs mean in the words of our contract."""

# vLLM lives in an environment of its own, where the type checkers do not look.
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

from asyncrl.errors import EngineError, InvalidDataError
from asyncrl.interfaces import FinishReason, GenerationChunk, GenerationRequest, TopLogProbs
from engines.rollout.embedded.stop_text import StopText

__all__ = ["VLLMRequest", "check_request"]

_MIX = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: distinct counts give distinct seeds
_SEED_BITS = 63


def check_request(request: GenerationRequest, *, vocabulary: int, max_model_tokens: int, tokenizer: bool) -> None:
    """Refuse what cannot be generated.

    Args:
        request: as it came.
        vocabulary: V.
        max_model_tokens: context length.
        tokenizer: whether the model has one.

    Raises:
        InvalidDataError: the prompt is empty, too long or holds an id outside the vocabulary; there is no tokenizer for
            stop strings or a grammar; or the request has a grammar and was begun elsewhere, where vLLM begins the
            grammar from its start.
    """
    prompt, name = request.prompt_token_ids, f"request {request.request_id!r}"
    if not prompt:
        raise InvalidDataError(f"{name} has an empty prompt")
    if min(prompt) < 0 or max(prompt) >= vocabulary:
        wrong = next(token for token in prompt if not 0 <= token < vocabulary)
        raise InvalidDataError(f"{name} holds token id {wrong}; the vocabulary is 0..{vocabulary - 1}")
    if len(prompt) - request.continued_tokens >= max_model_tokens:
        raise InvalidDataError(
            f"{name} has a prompt of {len(prompt)} tokens, which leaves no room to generate in a context of "
            f"{max_model_tokens}"
        )
    for wish, value in {"stop strings": request.sampling.stop, "a grammar": request.sampling.grammar}.items():
        if value and not tokenizer:
            raise InvalidDataError(f"{name} asks for {wish}, but the model has no tokenizer")
    if request.sampling.grammar and request.continued_tokens:
        raise InvalidDataError(
            f"{name} was begun under a grammar by a replica that is gone, and vLLM cannot go on in the middle of one: "
            "ask again"
        )


class VLLMRequest:
    """A request and how far it is.

    Log-probs are vLLM's ``processed_logprobs``: of the distribution after temperature, top-k and top-p, and untempered
    for greedy requests, whatever else is in the batch.

    Stop strings are looked for here and not by vLLM, which sees only what was sampled since the request came to it: one
    that was begun elsewhere may stop at a string whose first characters were sampled there.

    Args:
        request: as it came.
        stop_token_ids: the model's own and the request's.
        max_model_tokens: context length.
        decode: token ids to text; None where the model has no tokenizer and the request no stop strings.

    Attributes:
        door: resolved with True when it may begin, with False when it is aborted before.
        collector: where vLLM puts its outputs; None while it has not been submitted.
        state: vLLM's own record of it, where the versions of its tokens are.
        restart: it is to be submitted again, since the weights changed before its first token.
        aborted: somebody asked for its end.
    """

    def __init__(
        self,
        request: GenerationRequest,
        *,
        stop_token_ids: frozenset[int],
        max_model_tokens: int,
        decode: Callable[[Sequence[int]], str] | None,
    ) -> None:
        self.request = request
        self.stop_token_ids = stop_token_ids
        self.door: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.collector: Any = None  # Any: vLLM's RequestOutputCollector
        self.state: Any = None  # Any: vLLM's RequestState
        self.restart = False
        self.aborted = False
        self.number = -1
        self._tokens = list(request.prompt_token_ids)
        self._begun_at = len(self._tokens) - request.continued_tokens
        room = max_model_tokens - len(self._tokens)
        self._left = min(request.sampling.max_new_tokens - request.continued_tokens, room)
        self._stop_text: StopText | None = None
        self._stopped_before = False
        if request.sampling.stop and decode is not None:
            self._stop_text = StopText(request.sampling.stop, decode=decode, prompt=self._tokens[: self._begun_at])
            for end in range(self._begun_at + 1, len(self._tokens) + 1):
                self._stopped_before = self._stopped_before or self._stop_text.found(self._tokens[:end])

    @property
    def sampled(self) -> int:
        """Tokens delivered."""
        return len(self._tokens) - len(self.request.prompt_token_ids)

    @property
    def began(self) -> bool:
        """Whether vLLM has sampled a token of it, delivered or not."""
        return self.sampled > 0 or (self.state is not None and bool(self.state.weight_version_starts))

    def complete(self) -> FinishReason | None:
        """Why there is nothing left to generate for a request that was begun elsewhere; None if there is."""
        continued = self._tokens[self._begun_at :]
        if self._stopped_before or (continued and continued[-1] in self.stop_token_ids):
            return "stop"
        return None if self._left > 0 else "length"

    def sampling_params(self) -> Any:
        """VLLM's parameters. Any: its class is vLLM's own."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        sampling = self.request.sampling
        seed = None
        if sampling.seed is not None and sampling.temperature > 0.0:
            # vLLM counts a seeded request's tokens from where it came to it: one that goes on draws from a stream of
            # its own rather than once more what it has drawn elsewhere.
            seed = (sampling.seed + self.request.continued_tokens * _MIX) & ((1 << _SEED_BITS) - 1)
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=seed,
            max_tokens=self._left,
            stop_token_ids=sorted(self.stop_token_ids),
            ignore_eos=True,  # end-of-sequence ids are among the stop ids
            logprobs=sampling.top_log_probs,  # besides the sampled token's
            structured_outputs=StructuredOutputsParams(grammar=sampling.grammar) if sampling.grammar else None,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

    def chunk(self, output: Any) -> GenerationChunk:
        """What an output of vLLM says. Any: a RequestOutput.

        Raises:
            EngineError: the request failed inside vLLM.
        """
        (completion,) = output.outputs
        token_ids = [int(token) for token in completion.token_ids]
        first = self.sampled
        versions = self._versions(completion, first, first + len(token_ids))
        log_probs = [
            float(each[token].logprob) for each, token in zip(completion.logprobs or (), token_ids, strict=True)
        ]
        top = self._top(completion) if self.request.sampling.top_log_probs else []
        reason: FinishReason | None = None
        if output.finished:
            reason = _reason(completion.finish_reason, self.request.request_id)
        for count, token in enumerate(token_ids, 1):
            self._tokens.append(token)
            if self._stop_text is not None and self._stop_text.found(self._tokens):
                token_ids, log_probs = token_ids[:count], log_probs[:count]
                versions, top = versions[:count], top[:count]
                reason = "stop"
                break
        return GenerationChunk(
            token_ids=tuple(token_ids),
            log_probs=tuple(log_probs),
            weight_versions=tuple(versions),
            finish_reason=reason,
            top_log_probs=tuple(top),
        )

    def _top(self, completion: Any) -> list[TopLogProbs]:
        """The likeliest of those that could be sampled, at each position. Any: a CompletionOutput."""
        asked = self.request.sampling.top_log_probs
        told = [
            sorted((-float(each.logprob), token) for token, each in position.items() if each.logprob > -math.inf)
            for position in completion.logprobs or ()
        ]
        return [tuple((token, -negative) for negative, token in position[:asked]) for position in told]

    def _versions(self, completion: Any, begin: int, end: int) -> list[int]:
        """As vLLM's engine core stamped them: (version, index of its first token), in order."""
        if completion.weight_versions is not None:
            starts = [(span.version, span.start) for span in completion.weight_versions]
        else:
            starts = [] if self.state is None else list(self.state.weight_version_starts)
        versions: list[int] = []
        for index in range(begin, end):
            version = next((version for version, start in reversed(starts) if start <= index), None)
            if version is None:
                raise EngineError(f"vLLM gave token {index} of {self.request.request_id!r} no weight version")
            versions.append(int(version))
        return versions


def _reason(told: str | None, request_id: str) -> FinishReason:
    if told == "stop":
        return "stop"
    if told == "length":
        return "length"
    if told == "abort":
        return "abort"
    raise EngineError(f"request {request_id!r} failed inside vLLM (finish reason {told!r}); see the engine's log")
