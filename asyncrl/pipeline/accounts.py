"""Where every sampled token went.

    generated = trained + dropped + in flight

``generated`` is counted at the engines, ``trained`` by the trainer, ``dropped`` where something is given up, and what
is in flight lies in running episodes and in the buffer. The four come from four places, so the equation can fail; it
is checked at the end of every run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["TokenAccounts", "TokenBalance"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBalance:
    """The token equation of a run at one moment."""

    generated: int
    trained: int
    dropped: Mapping[str, int]
    in_flight: int

    @property
    def difference(self) -> int:
        """Tokens nobody can account for: 0 unless something was lost or counted twice."""
        return self.generated - self.trained - sum(self.dropped.values()) - self.in_flight

    def as_record(self) -> dict[str, object]:
        """The ``tokens`` entry of ``summary.json``."""
        return {
            "generated": self.generated,
            "trained": self.trained,
            "dropped": dict(self.dropped),
            "in_flight": self.in_flight,
        }


class TokenAccounts:
    """The driver's side of the equation: what was trained on and what was dropped, and why.

    Attributes:
        trained: tokens trained on, each counted once.
        trained_again: how often tokens were trained on after their first time, by this process.
    """

    def __init__(self, *, trained: int = 0, dropped: Mapping[str, int] | None = None) -> None:
        self.trained = trained
        self.trained_again = 0
        self._dropped: Counter[str] = Counter(dropped or {})

    @property
    def dropped(self) -> Mapping[str, int]:
        """Tokens given up, by reason; reasons without tokens are left out."""
        return {reason: tokens for reason, tokens in sorted(self._dropped.items()) if tokens}

    def train(self, tokens: int, *, again: int = 0) -> None:
        """Count tokens a finished step was trained on; those that were trained on ``again`` have their fate already."""
        self.trained += tokens
        self.trained_again += again

    def drop(self, reason: str, tokens: int) -> None:
        """Count tokens that will never be trained on."""
        self._dropped[reason] += tokens

    def balance(self, *, generated: int, in_flight: int) -> TokenBalance:
        """Hold the driver's side against the engines'."""
        return TokenBalance(generated=generated, trained=self.trained, dropped=self.dropped, in_flight=in_flight)
