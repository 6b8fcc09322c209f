"""One request while the engine holds it."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.interfaces import FinishReason, GenerationChunk, SamplingParams, TopLogProbs
from engines.rollout.embedded.grammar import Guide
from engines.rollout.embedded.stop_text import StopText

__all__ = ["Row"]


@dataclass(slots=True, eq=False, kw_only=True)
class Row:
    """Written by the stepping side only; the event loop reads.

    The lists only grow, ``versions`` last, and ``finish_reason`` or ``error`` is set after the last token. So a reader
    on another thread that looks at the end marks first and at ``len(versions)`` second sees whole tokens, without a
    lock. What is not read yet is bounded by ``max_new_tokens``.

    Attributes:
        tokens: the prompt, then what was sampled.
        prompt_length: tokens of the prompt.
        continued: tokens after the prompt that were sampled before the engine took the row; they count, but are not
            delivered.
        length_limit: most tokens the row may reach, prompt included.
        guide: says which tokens the row's grammar can go on with; None without a grammar.
        seed: 64 bits; with the index of the token they fix the random number.
        cached: the first ``cached`` tokens have keys and values in the cache.
        slot: place in the cache while running, else -1.
        probe: a health probe: goes first, in a slot of its own, and is counted nowhere.
        order: place in the order of submission.
    """

    request_id: str
    tokens: list[int]
    prompt_length: int
    length_limit: int
    sampling: SamplingParams
    seed: int
    continued: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    stop_text: StopText | None = None
    guide: Guide | None = None
    probe: bool = False
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[TopLogProbs] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    order: int = -1
    slot: int = -1
    cached: int = 0

    @property
    def pending(self) -> int:
        """Tokens that the model has yet to read before it can give the next one."""
        return len(self.tokens) - self.cached

    @property
    def sampled(self) -> int:
        """Tokens sampled so far, here or before."""
        return len(self.tokens) - self.prompt_length

    @property
    def ended(self) -> bool:
        """No token will follow."""
        return self.finish_reason is not None or self.error is not None

    def append(self, token: int, log_prob: float, version: int, top: TopLogProbs | None = None) -> None:
        """Take one sampled token in and decide whether it was the last."""
        if self.guide is not None and token not in self.stop_token_ids:
            self.guide.take(token)
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        if top is not None:
            self.top_log_probs.append(top)
        self.versions.append(version)
        self.look()

    def look(self) -> None:
        """Decide whether the last token sampled was the row's last one."""
        token = self.tokens[-1]
        if token in self.stop_token_ids or (self.stop_text is not None and self.stop_text.found(self.tokens)):
            self.finish_reason = "stop"
        elif self.guide is not None and self.guide.ended and not self.stop_token_ids:
            self.finish_reason = "stop"  # complete, and there is no token to say so
        elif len(self.tokens) >= self.length_limit:
            self.finish_reason = "length"

    def chunk(self, start: int) -> GenerationChunk | None:
        """What was sampled here from the ``start``-th token on; None if there is nothing to say yet."""
        finish_reason = self.finish_reason
        end = len(self.versions)
        if end == start and finish_reason is None:
            return None
        first = self.prompt_length + self.continued
        return GenerationChunk(
            token_ids=tuple(self.tokens[first + start : first + end]),
            log_probs=tuple(self.log_probs[start:end]),
            weight_versions=tuple(self.versions[start:end]),
            finish_reason=finish_reason,
            top_log_probs=tuple(self.top_log_probs[start:end]),
        )
