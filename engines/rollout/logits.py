"""What a request changes in its logits before temperature, in vLLM's order and with vLLM's meaning of each parameter.

    allowed tokens -> bad words -> end kept back -> bias -> repetition -> frequency -> presence -> min_p

All of it is a function of the row's tokens: a row that is preempted, read again or was begun elsewhere goes on alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import torch

from asyncrl.interfaces import SamplingParams

_NAMES = (
    *("allowed_token_ids", "bad_words", "min_tokens", "logit_bias"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty", "min_p"),
)
_NEUTRAL = SamplingParams(max_new_tokens=1)


def logit_parameters(sampling: SamplingParams) -> list[str]:
    """Return the names of the parameters of ``sampling`` that change logits."""
    return [
        name
        for name in _NAMES
        if getattr(sampling, name) != getattr(_NEUTRAL, name) and (name != "min_p" or sampling.temperature > 0.0)
    ]


class LogitRules(msgspec.Struct, array_like=True, frozen=True):
    """The part of a request that changes its logits.

    ``end_token_ids`` are what ``min_tokens`` keeps back, ``bad_words`` are tokens. A row's tokens count as sampled from
    number ``prompt_length`` on.
    """

    sampling: SamplingParams
    prompt_length: int
    end_token_ids: list[int]
    bad_words: list[list[int]]


class RowLogits:
    """Applies the rules of one row, step after step."""

    def __init__(self, rules: LogitRules) -> None:
        self.rules = rules
        self._fixed: torch.Tensor | None = None  # [V]: bias, and -inf where a token is not allowed
        self._counts: torch.Tensor | None = None  # [V]: how often each token was sampled
        self._seen: torch.Tensor | None = None  # the different tokens of prompt and sampled
        self._read = -1  # tokens that are counted; none of the tensors is made before the first step

    def apply(self, logits: torch.Tensor, tokens: Sequence[int]) -> None:
        """Change ``logits`` [V] float32, of the token after ``tokens`` (prompt and sampled), in place.

        What must not be sampled becomes -inf; all of it does where no token is left.
        """
        rules, sampling = self.rules, self.rules.sampling
        if self._read < 0:
            self._prepare(logits)
        self._count(tokens)
        sampled = len(tokens) - rules.prompt_length
        if self._fixed is not None:
            logits += self._fixed
        bad = [word[-1] for word in rules.bad_words if len(word) <= sampled + 1 and _ends_with(tokens, word[:-1])]
        if bad:
            logits[bad] = -math.inf
        if sampled < sampling.min_tokens and rules.end_token_ids:
            ends = logits[rules.end_token_ids]
            logits[rules.end_token_ids] = -math.inf
            if sampling.grammar and logits.max() == -math.inf:
                logits[rules.end_token_ids] = ends  # the text is complete
        if self._seen is not None:
            seen = logits[self._seen]
            penalty = sampling.repetition_penalty
            logits[self._seen] = torch.where(seen > 0.0, seen / penalty, seen * penalty)
        if self._counts is not None:
            logits -= sampling.frequency_penalty * self._counts + sampling.presence_penalty * (self._counts > 0.0)
        if sampling.min_p > 0.0 and sampling.temperature > 0.0:
            least = logits.max() + sampling.temperature * math.log(sampling.min_p)
            logits.masked_fill_(logits < least, -math.inf)

    def _prepare(self, logits: torch.Tensor) -> None:
        sampling = self.rules.sampling
        self._read = 0
        if sampling.presence_penalty or sampling.frequency_penalty:
            self._counts = torch.zeros_like(logits)
        if sampling.repetition_penalty != 1.0:
            self._seen = torch.empty(0, dtype=torch.long, device=logits.device)
        if sampling.allowed_token_ids or sampling.logit_bias:
            self._fixed = torch.zeros_like(logits)
            if sampling.allowed_token_ids:
                self._fixed.fill_(-math.inf)[list(sampling.allowed_token_ids)] = 0.0
            if bias := dict(sampling.logit_bias):
                self._fixed[list(bias)] += torch.tensor(list(bias.values()), device=logits.device)

    def _count(self, tokens: Sequence[int]) -> None:
        first, self._read = self._read, len(tokens)
        if self._seen is not None:
            new = torch.tensor(tokens[first:], dtype=torch.long, device=self._seen.device)
            self._seen = torch.cat([self._seen, new]).unique()
        if self._counts is not None:
            sampled = tokens[max(first, self.rules.prompt_length) :]
            ids = torch.tensor(sampled, dtype=torch.long, device=self._counts.device)
            self._counts.index_add_(0, ids, torch.ones_like(ids, dtype=torch.float32))


def _ends_with(tokens: Sequence[int], end: list[int]) -> bool:
    return list(tokens[len(tokens) - len(end) :]) == end
