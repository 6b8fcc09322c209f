"""Stop strings over a growing token sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["StopText"]

_CONTEXT_TOKENS = 6
_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER_TOKENS = 4  # UTF-8 has at most four bytes; after that the bytes are simply invalid


class StopText:
    """Says when the text of the sampled tokens contains one of ``stop``.

    Only a short tail of tokens is decoded at each step. Two decodings that begin at the same token are compared, so
    what depends on the left neighbour (a word's leading space, a character whose bytes lie in several tokens) comes
    out as in the whole text. Text of the prompt never matches, not even in part.

    Args:
        stop: strings, none empty.
        decode: token ids to text, special tokens included.
        prompt: the prompt's token ids (context of the first sampled token).
    """

    def __init__(self, stop: Sequence[str], *, decode: Callable[[Sequence[int]], str], prompt: Sequence[int]) -> None:
        self._stop = tuple(stop)
        self._decode = decode
        self._keep = max(len(text) for text in self._stop) - 1
        self._tail = ""
        self._window = max(0, len(prompt) - _CONTEXT_TOKENS)
        self._read = len(prompt)

    def found(self, tokens: Sequence[int]) -> bool:
        """Look at the tokens (prompt and sampled) that came since the last call."""
        known = self._decode(tokens[self._window : self._read])
        text = self._decode(tokens[self._window :])
        complete = not text.endswith(_REPLACEMENT) or len(tokens) - self._read >= _LONGEST_CHARACTER_TOKENS
        if not complete:
            text = text.rstrip(_REPLACEMENT)
        seen = self._tail + text[len(known) :]
        if any(stop in seen for stop in self._stop):
            return True
        if complete:
            self._tail = seen[-self._keep :] if self._keep else ""
            self._window = self._read
            self._read = len(tokens)
        return False
