"""When the next checkpoint is due. Pure: steps and times in, answers out."""

from __future__ import annotations

__all__ = ["LEAST_S", "SHARE", "CheckpointPace"]

SHARE = 0.02
"""Of the time, what checkpoints may take where no number of steps is asked for."""

LEAST_S = 60.0
"""Seconds between two of them then, at least: what is trained on in between can be trained again from the ledger."""


class CheckpointPace:
    """Every ``every`` steps; None: as often as costs at most :data:`SHARE` of the time; 0: never.

    >>> pace = CheckpointPace(None)
    >>> pace.begin(now_s=0.0)
    >>> pace.due(1, now_s=59.0), pace.due(2, now_s=60.0)
    (False, True)
    >>> pace.written(now_s=62.0, took_s=2.0)  # 2 % of 100 s
    >>> pace.due(3, now_s=161.0), pace.due(4, now_s=162.0)
    (False, True)
    """

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._due_s = 0.0

    def begin(self, *, now_s: float) -> None:
        """Training begins, from a checkpoint or from the beginning."""
        self._due_s = now_s + LEAST_S

    def due(self, step: int, *, now_s: float) -> bool:
        """True if one is to be written now that ``step`` is done."""
        if self._every is None:
            return now_s >= self._due_s
        return self._every > 0 and step % self._every == 0

    def written(self, *, now_s: float, took_s: float) -> None:
        """One was; training stood still for ``took_s``."""
        self._due_s = now_s + max(LEAST_S, took_s / SHARE)
