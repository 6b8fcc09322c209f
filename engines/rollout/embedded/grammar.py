"""Grammars over tokens: which ones a text that must keep to a grammar can go on with.

The grammar is followed by llguidance (an Earley parser over a lexer of derivatives, walked along the trie of the
vocabulary): about 50 us a token.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch

from asyncrl.errors import InvalidDataError

__all__ = ["Grammars", "Guide"]

_LEXER_STATES = 50_000  # of one grammar: about 100 MB


class Guide:
    """Follows one text through its grammar. Made by :meth:`Grammars.guide`.

    Args:
        matcher: llguidance's; Any: it has no public type of its own name here.
        vocabulary: V of the model.
    """

    def __init__(self, matcher: Any, *, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    @property
    def problem(self) -> str:
        """Why the text cannot go on; empty while it can."""
        return str(self._matcher.get_error())

    @property
    def ended(self) -> bool:
        """The text is complete and nothing can follow it."""
        return bool(self._matcher.is_stopped())

    def allowed(self, stop_token_ids: Collection[int]) -> torch.Tensor:
        """[V] bool: the tokens that may follow; of the stop tokens all, if the text may end here. None on a problem."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        mask = np.unpackbits(bits, count=self._vocabulary, bitorder="little").astype(bool)
        if self.problem:
            mask[:] = False
        elif self._matcher.is_accepting():
            mask[list(stop_token_ids)] = True
        return torch.from_numpy(mask)

    def take(self, token: int) -> None:
        """The token was sampled, and is not the end of the text."""
        self._matcher.consume_token(token)


class Grammars:
    """Makes guides for one tokenizer.

    Args:
        tokenizer: transformers' own. Any: its tokenizers share no typed interface.
        vocabulary: V of the model.
    """

    def __init__(self, tokenizer: Any, *, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._vocabulary_trie: Any = None  # Any: llguidance's LLTokenizer
        self._making = threading.Lock()

    def guide(self, grammar: str, begun: Sequence[int], *, stop_token_ids: Collection[int]) -> Guide:
        """A guide for a text of which the tokens ``begun`` are there already. Blocks; may be called in any thread.

        Raises:
            InvalidDataError: the grammar is none, or too large, or what is begun breaks it; or llguidance cannot read
                the model's tokenizer.
        """
        import llguidance

        text = llguidance.LLMatcher.grammar_from_lark(grammar)
        limits = llguidance.LLParserLimits(max_lexer_states=_LEXER_STATES, verbose_errors=False)
        matcher = llguidance.LLMatcher(self._trie(), text, log_level=0, limits=limits)
        if problem := matcher.get_error():
            raise InvalidDataError(f"the grammar cannot be followed: {problem[:500]}")
        guide = Guide(matcher, vocabulary=self._vocabulary)
        for token in begun:
            if token not in stop_token_ids:
                guide.take(token)
        if guide.problem:
            raise InvalidDataError(f"what was sampled so far breaks the grammar: {guide.problem[:500]}")
        return guide

    def _trie(self) -> Any:
        """The vocabulary as llguidance walks it, made once, in tenths of a second. Any: its LLTokenizer."""
        import llguidance
        import llguidance.hf

        with self._making:
            if self._vocabulary_trie is None:
                size = max(self._vocabulary, len(self._tokenizer))
                try:
                    self._vocabulary_trie = llguidance.hf.from_tokenizer(self._tokenizer, n_vocab=size)
                except ValueError as error:
                    raise InvalidDataError(f"this model's tokenizer serves no grammars: {error}") from error
            return self._vocabulary_trie
