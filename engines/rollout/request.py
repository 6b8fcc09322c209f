"""What the engines share of a request: the checks it must pass, its growing row of tokens, stop strings and grammars.

ModelTokens.check(request) -> ModelTokens.row(request) -> Row.append(token) ... -> Reader.next_chunk()
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from asyncrl.errors import ContextLengthError, InvalidDataError
from asyncrl.interfaces import FinishReason, GenerationChunk, GenerationRequest, SamplingParams, TopLogProbs
from engines.rollout.logits import LogitRules, RowLogits, logit_parameters

_CONTEXT_TOKENS = 6
_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER_TOKENS = 4  # UTF-8 has at most four bytes; after that the bytes are simply invalid
_LEXER_STATES = 50_000  # of one grammar: about 100 MB


class ModelTokens:
    """The tokens that a model reads and writes, and with them the requests that it can serve.

    Only texts in requests need the ``tokenizer`` (Any: transformers' tokenizers share no typed interface); its end of
    sequence is added to ``eos_token_ids``, which are as configurations write them. ``max_model_tokens`` is the
    context length, prompt included.
    """

    def __init__(
        self,
        model_path: str,
        tokenizer: Any,
        *,
        eos_token_ids: Iterable[int | list[int] | None] = (),
        vocabulary: int,
        max_model_tokens: int,
    ) -> None:
        self.model_path = model_path
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        self.max_model_tokens = max_model_tokens
        stop: set[int] = set()
        for ids in (*eos_token_ids, getattr(tokenizer, "eos_token_id", None)):
            stop.update([ids] if isinstance(ids, int) else ids or ())
        self.stop_token_ids = frozenset(stop)
        self._grammars = None if tokenizer is None else Grammars(tokenizer, vocabulary=vocabulary)

    def check(self, request: GenerationRequest, *, held: Container[str]) -> None:
        """Check that the model can serve a request; ``held`` are the ids of the requests that the engine holds.

        Raises:
            InvalidDataError: the id is held already; the prompt is empty, has an id outside the vocabulary or leaves no
                room to generate; a token id of ``logit_bias`` or ``allowed_token_ids`` is outside; or the model has no
                tokenizer for stop strings, bad words or a grammar.
        """
        sampling, prompt, name = request.sampling, request.prompt_token_ids, f"request {request.request_id!r}"
        if request.request_id in held:
            raise InvalidDataError(f"{name} is already being generated: ids are unique among the requests held")
        if not prompt:
            raise InvalidDataError(f"{name} has an empty prompt")
        if min(prompt) < 0 or max(prompt) >= self.vocabulary:
            wrong = next(token for token in prompt if not 0 <= token < self.vocabulary)
            raise InvalidDataError(f"{name} holds token id {wrong}; the vocabulary is 0..{self.vocabulary - 1}")
        if len(prompt) - request.continued_tokens >= self.max_model_tokens:
            raise ContextLengthError(
                f"{name} has a prompt of {len(prompt)} tokens, which leaves no room to generate in a context of "
                f"{self.max_model_tokens}"
            )
        texts = {"stop strings": sampling.stop, "bad_words": sampling.bad_words, "a grammar": sampling.grammar}
        for option, value in texts.items():
            if value and self.tokenizer is None:
                raise InvalidDataError(f"{name} asks for {option}, but {self.model_path} has no tokenizer")
        named = {"allowed_token_ids": sampling.allowed_token_ids, "logit_bias": dict(sampling.logit_bias)}
        for option, ids in named.items():
            if outside := [token for token in ids if not 0 <= token < self.vocabulary]:
                raise InvalidDataError(
                    f"{option} of {name} names token id {outside[0]}; the vocabulary is 0..{self.vocabulary - 1}"
                )

    async def guide(self, request: GenerationRequest, *, held: Container[str]) -> Guide | None:
        """Return the guide of a checked request's grammar, compiled in a thread; None where it has no grammar.

        Raises:
            InvalidDataError: as :meth:`Grammars.guide`, or a request of the same id has come meanwhile.
        """
        if self._grammars is None or not request.sampling.grammar:
            return None
        begun = request.prompt_token_ids[len(request.prompt_token_ids) - request.continued_tokens :]
        guide = await asyncio.to_thread(
            self._grammars.guide, request.sampling.grammar, begun, stop_token_ids=self._stop_token_ids_of(request)
        )
        self.check(request, held=held)
        return guide

    def row(self, request: GenerationRequest, *, seed: int = 0, guide: Guide | None = None) -> Row:
        """Return the row of a checked request; 64 bits of the seed count."""
        sampling, prompt = request.sampling, request.prompt_token_ids
        prompt_length = len(prompt) - request.continued_tokens
        stop_text, logits = None, None
        spellings = self._spellings(sampling.bad_words)
        if len(spellings) < len(sampling.bad_words):  # vLLM spells them itself, and fails at a word without tokens
            sampling = replace(sampling, bad_words=tuple(spellings))
        if sampling.stop:
            stop_text = StopText(
                sampling.stop, decode=self.decode, prompt=prompt[:prompt_length], passed=sampling.min_tokens
            )
        if logit_parameters(sampling):
            ends = sorted(self._in_vocabulary(self.stop_token_ids.union(sampling.stop_token_ids)))
            rules = LogitRules(sampling, prompt_length, ends, [each for known in spellings.values() for each in known])
            logits = RowLogits(rules)
        return Row(
            request_id=request.request_id,
            tokens=list(prompt),
            prompt_length=prompt_length,
            continued=request.continued_tokens,
            length_limit=min(prompt_length + sampling.max_new_tokens, self.max_model_tokens),
            sampling=sampling,
            seed=seed & (2**64 - 1),
            stop_token_ids=self._stop_token_ids_of(request),
            stop_text=stop_text,
            guide=guide,
            logits=logits,
            probe=request.probe,
            adapter=request.adapter,
            session=request.session,
        )

    def _spellings(self, words: Sequence[str]) -> dict[str, list[list[int]]]:
        """Return the tokens of each word at the beginning of a text, and after a space where these are others.

        As in vLLM, a spelling after a space counts only if it is as long. Words that the model cannot sample are left
        out: the tokenizer has no tokens for them, or ones outside the vocabulary.
        """
        if not words:
            return {}
        bare = [word.lstrip() for word in words]
        written = self.tokenizer([*bare, *(f" {word}" for word in bare)], add_special_tokens=False)["input_ids"]
        spellings: dict[str, list[list[int]]] = {}
        for word, first, spaced in zip(words, written[: len(bare)], written[len(bare) :], strict=True):
            found = [first, spaced] if first and len(spaced) == len(first) and spaced[0] != first[0] else [first]
            if known := [list(each) for each in found if each and max(each) < self.vocabulary]:
                spellings[word] = known
        return spellings

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _stop_token_ids_of(self, request: GenerationRequest) -> frozenset[int]:
        ends = frozenset[int]() if request.sampling.ignore_eos else self.stop_token_ids
        return self._in_vocabulary(ends.union(request.sampling.stop_token_ids))

    def _in_vocabulary(self, tokens: frozenset[int]) -> frozenset[int]:
        """Leave out tokens that are never sampled: masks of the vocabulary have no place for them."""
        return frozenset(token for token in tokens if 0 <= token < self.vocabulary)


@dataclass(slots=True, eq=False, kw_only=True)
class Row:
    """One request while an engine holds it. Only the side that samples writes it; the event loop reads.

    The lists only grow, ``versions`` last, and ``finish_reason`` or ``error`` is set after the last token. So a reader
    on another thread that looks at the end marks first and at ``len(versions)`` second sees whole tokens, without a
    lock. What is not read yet is bounded by ``max_new_tokens``.

    Attributes:
        tokens: ``prompt_length`` tokens of the prompt, then what was sampled.
        continued: tokens after the prompt that were sampled before the engine took the row; they count, but are not
            delivered.
        length_limit: most tokens the row may reach, prompt included.
        seed: 64 bits; with the index of the token they fix the random number.
        logits: applies what the request changes in its logits; None if it changes nothing.
        cached: the first ``cached`` tokens have keys and values in the cache.
        blocks: of the cache, while running.
        prompt_log_probs: of the prompt's tokens from the second on, where they are requested; complete when the first
            token is sampled. ``prompt_tops`` are the likeliest at the same places.
        probe: checks the engine: goes first, beside the most rows that may run, and is not counted.
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
    logits: RowLogits | None = None
    probe: bool = False
    adapter: str = ""
    session: str = ""
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[TopLogProbs] = field(default_factory=list)
    prompt_log_probs: list[float] = field(default_factory=list)
    prompt_tops: list[TopLogProbs] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    order: int = -1
    cached: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def pending(self) -> int:
        """Return the number of tokens that the model has yet to read before it can give the next one."""
        return len(self.tokens) - self.cached

    @property
    def sampled(self) -> int:
        """Return the number of tokens sampled so far, here or before."""
        return len(self.tokens) - self.prompt_length

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def append(self, token: int, log_prob: float, version: int, top: TopLogProbs | None = None) -> None:
        """Append one sampled token, and end the row if it was the last."""
        if self.guide is not None and token not in self.stop_token_ids:
            self.guide.take(token)
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        if top is not None:
            self.top_log_probs.append(top)
        self.versions.append(version)
        self._end_if_last()

    def end_if_complete(self) -> None:
        """End a row that an engine takes over where its last token had been sampled, but its end not delivered."""
        if self.continued:
            self._end_if_last()

    def _end_if_last(self) -> None:
        token = self.tokens[-1]
        if token in self.stop_token_ids or (self.stop_text is not None and self.stop_text.found(self.tokens)):
            self.finish_reason = "stop"
        elif self.guide is not None and self.guide.ended and not self.stop_token_ids:
            self.finish_reason = "stop"  # no token can follow, and the model has none to end with
        elif len(self.tokens) >= self.length_limit:
            self.finish_reason = "length"

    def no_token_error(self) -> InvalidDataError:
        """Return the error of a row in which no token may come next."""
        names = [*logit_parameters(self.sampling), *(["the grammar"] if self.sampling.grammar else [])]
        return InvalidDataError(
            f"request {self.request_id!r} cannot go on: {', '.join(names)} together forbid every token after "
            f"{self.sampled} sampled ones; relax one of them"
        )

    def chunk(self, start: int) -> GenerationChunk | None:
        """Return what was sampled here from the ``start``-th token on; None if nothing is new."""
        finish_reason = self.finish_reason
        end = len(self.versions)
        if end == start and finish_reason is None:
            return None
        first = self.prompt_length + self.continued
        scored = start == 0 < end and self.sampling.prompt_log_probs is not None
        return GenerationChunk(
            token_ids=tuple(self.tokens[first + start : first + end]),
            log_probs=tuple(self.log_probs[start:end]),
            weight_versions=tuple(self.versions[start:end]),
            finish_reason=finish_reason,
            top_log_probs=tuple(self.top_log_probs[start:end]),
            prompt_log_probs=(0.0, *self.prompt_log_probs) if scored else (),
            prompt_top_log_probs=((), *self.prompt_tops) if scored else (),
        )


@dataclass(slots=True, eq=False)
class Reader:
    """Reads a row on the event loop, chunk by chunk; :meth:`wake` is called when the row has changed."""

    row: Row
    _read: int = 0
    _waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next_chunk(self) -> GenerationChunk:
        """Return the tokens since the last call; wait until there are some.

        Raises:
            EngineError: the row ended with an error, and all of its tokens have been read.
        """
        while True:
            error = self.row.error
            chunk = self.row.chunk(self._read)
            if chunk is not None:
                self._read += len(chunk.token_ids)
                return chunk
            if error is not None:
                raise type(error)(str(error)) from error.__cause__
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None


class StopText:
    """Finds stop strings in the text of sampled tokens.

    Only a short tail of tokens is decoded at each step. Two decodings that begin at the same token are compared, so
    what depends on the left neighbour (a word's leading space, a character whose bytes lie in several tokens) comes out
    as in the whole text. Text of the prompt and of the ``passed`` tokens after it never matches, not even in part.
    """

    def __init__(
        self,
        stop: Sequence[str],
        *,
        decode: Callable[[Sequence[int]], str],
        prompt: Sequence[int],
        passed: int = 0,
    ) -> None:
        self._stop = tuple(stop)
        self._decode = decode
        self._keep = max(len(text) for text in self._stop) - 1
        self._tail = ""
        self._window = max(0, len(prompt) - _CONTEXT_TOKENS)
        self._read = len(prompt)
        self._passed = len(prompt) + passed if passed else 0

    def found(self, tokens: Sequence[int]) -> bool:
        """Return whether a stop string ends among the tokens (prompt and sampled) since the last call."""
        if self._read < self._passed:
            self._read = min(len(tokens), self._passed)
            self._window = max(0, self._read - _CONTEXT_TOKENS)
        known = self._decode(tokens[self._window : self._read])
        text = self._decode(tokens[self._window :])
        complete = not text.endswith(_REPLACEMENT) or len(tokens) - self._read >= _LONGEST_CHARACTER_TOKENS
        if not complete:
            text = text.rstrip(_REPLACEMENT)
        seen = self._tail + text[len(known) :]
        if any(stop in seen for stop in self._stop):
            return True
        if complete and self._read < len(tokens):  # the last of the passed tokens stay the context of the next one
            self._tail = seen[-self._keep :] if self._keep else ""
            self._window = self._read
            self._read = len(tokens)
        return False


class Grammars:
    """Compiles grammars for llguidance: an Earley parser over a lexer of derivatives, about 50 us per token."""

    def __init__(self, tokenizer: Any, *, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._trie: Any = None  # Any: llguidance's LLTokenizer
        self._lock = threading.Lock()

    def guide(self, grammar: str, begun: Sequence[int], *, stop_token_ids: Collection[int]) -> Guide:
        """Return a guide for a text that begins with the tokens ``begun``. Blocks; may be called in any thread.

        Raises:
            InvalidDataError: the grammar is invalid or too large, ``begun`` breaks it, or llguidance cannot read the
                model's tokenizer.
        """
        import llguidance

        text = llguidance.LLMatcher.grammar_from_lark(grammar)
        limits = llguidance.LLParserLimits(max_lexer_states=_LEXER_STATES, verbose_errors=False)
        matcher = llguidance.LLMatcher(self._vocabulary_trie(), text, log_level=0, limits=limits)
        if problem := matcher.get_error():
            raise InvalidDataError(f"the grammar cannot be followed: {problem[:500]}")
        guide = Guide(matcher, vocabulary=self._vocabulary)
        for token in begun:
            if token not in stop_token_ids:
                guide.take(token)
        if guide.problem:
            raise InvalidDataError(f"what was sampled so far breaks the grammar: {guide.problem[:500]}")
        return guide

    def _vocabulary_trie(self) -> Any:
        """Return the vocabulary as llguidance walks it; made once, in tenths of a second."""
        import llguidance
        import llguidance.hf

        with self._lock:
            if self._trie is None:
                size = max(self._vocabulary, len(self._tokenizer))
                try:
                    self._trie = llguidance.hf.from_tokenizer(self._tokenizer, n_vocab=size)
                except ValueError as error:
                    raise InvalidDataError(f"this model's tokenizer serves no grammars: {error}") from error
            return self._trie


class Guide:
    def __init__(self, matcher: Any, *, vocabulary: int) -> None:  # Any: llguidance's LLMatcher
        self._matcher = matcher
        self._vocabulary = vocabulary

    @property
    def problem(self) -> str:
        """Return why the text cannot go on; empty while it can."""
        return str(self._matcher.get_error())

    @property
    def ended(self) -> bool:
        """Return whether the text is complete and nothing can follow it."""
        return bool(self._matcher.is_stopped())

    def allowed(self, stop_token_ids: Collection[int]) -> torch.Tensor:
        """Return [V] bool: the tokens that may follow, stop tokens if the text may end; all False on a problem."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        mask = np.unpackbits(bits, count=self._vocabulary, bitorder="little").astype(bool)
        if self.problem:
            mask[:] = False
        elif self._matcher.is_accepting():
            mask[list(stop_token_ids)] = True
        return torch.from_numpy(mask)

    def take(self, token: int) -> None:
        """Add a sampled token that is not the end of the text."""
        self._matcher.consume_token(token)


def load_tokenizer(model_path: str) -> Any:
    """Return the tokenizer of a folder or hub id; None if it has none. Any: tokenizers share no typed interface."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
    except (OSError, ValueError, ImportError, KeyError):
        return None
    # For some families transformers makes an empty tokenizer up; its end-of-sequence id would cut texts short.
    return tokenizer if len(tokenizer) > len(tokenizer.all_special_ids) else None
