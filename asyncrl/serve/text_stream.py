"""Tokens in, text out as soon as it is certain."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["TextStream"]

_UNFINISHED = "\ufffd"


class TextStream:
    """The text of a generation, piece by piece; the pieces joined are the text of all of its tokens.

    A piece is held back while it may be half a character, the beginning of a stop string, or the beginning of
    ``hold``: from there on nothing is given out (:attr:`held` has it), because it is read as a whole at the end.

    Args:
        decode: the text of some tokens.
        stop: strings that end the text before them.
        hold: string from which on the text is kept; empty for none.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], *, stop: Sequence[str] = (), hold: str = "") -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._hold = hold
        self._ids: list[int] = []
        self._shown = 0  # ids whose text was taken into `_pending`
        self._begin = 0  # first id of the window that is decoded: some context for the tokenizer
        self._pending = ""
        self._held = ""
        self._holding = False
        self.stopped: str | None = None
        """The stop string that was met."""

    @property
    def held(self) -> str:
        """The text from ``hold`` on, stop strings cut off."""
        return self._held

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take further tokens; returns what is certain now."""
        if self.stopped is not None:
            return ""
        self._ids += token_ids
        before = self._decode(self._ids[self._begin : self._shown])
        window = self._decode(self._ids[self._begin :])
        if window.endswith(_UNFINISHED) or len(window) <= len(before):
            return ""
        self._begin, self._shown = self._shown, len(self._ids)
        return self._take(window[len(before) :], last=False)

    def finish(self) -> str:
        """No token follows: give out what was held back."""
        if self.stopped is not None:
            return ""
        before = self._decode(self._ids[self._begin : self._shown])
        window = self._decode(self._ids[self._begin :])
        self._begin = self._shown = len(self._ids)
        return self._take(window[len(before) :], last=True)

    def _take(self, text: str, *, last: bool) -> str:
        self._pending += text
        found = [(at, stop) for stop in self._stop if (at := self._pending.find(stop)) >= 0]
        if found:
            at, self.stopped = min(found)
            self._pending, last = self._pending[:at], True
        if not self._holding and self._hold and (at := self._pending.find(self._hold)) >= 0:
            certain, self._pending, self._holding = self._pending[:at], self._pending[at:], True
        elif self._holding:
            certain = ""
        else:
            keep = 0 if last else self._uncertain()
            cut = len(self._pending) - keep
            certain, self._pending = self._pending[:cut], self._pending[cut:]
        if self._holding and last:
            self._held, self._pending = self._pending, ""
        return certain

    def _uncertain(self) -> int:
        """Characters at the end that may be the beginning of a stop string or of ``hold``."""
        longest = 0
        for mark in (*self._stop, self._hold):
            for length in range(min(len(mark) - 1, len(self._pending)), longest, -1):
                if self._pending.endswith(mark[:length]):
                    longest = length
                    break
        return longest
