"""Online difficulty: which of several tasks the next group gets.

A group whose rows all earn the same reward teaches nothing. The law foresees that from what the groups of its kind of
task have shown, and prefers kinds whose groups differ and whose mean reward moves (learning progress)::

    score(kind) = (varied + 1) / (groups + 1) * (1 + PROGRESS * |recent mean - earlier mean|)

with counts that decay from step to step, so that a kind which is solved, or too hard now, is tried again later: its
score returns to that of a kind that was never seen. Of the candidates of a group, one is drawn in proportion to
``score ** SHARPNESS``, by a generator that the group's number seeds.

The law: the choice depends on the seed, the group's number, its candidates, and the outcomes of the steps up to its
*horizon*, the version at which the admission law admits it at the earliest. All of them are known by then, however the
rollouts finish, so the choice does not depend on time, and a resumed run makes it again.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PROGRESS = 4.0
SHARPNESS = 4.0
DECAY = 0.9
"""Weight of a step's outcomes, per step since."""
FAST_DECAY = 0.5
"""The same for the recent mean."""
_FORGOTTEN = 60
"""Steps after which an outcome weighs less than 0.2 %, and counts no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A group that was trained on: the difficulty of its task, and the rewards of its rows."""

    difficulty: str
    rewards: tuple[float, ...]


class Curriculum:
    """Chooses tasks. A pure state machine; the driver records its choices in the ledger.

        >>> curriculum = Curriculum(seed=0)
        >>> outcomes = [Outcome(difficulty="easy", rewards=(1.0, 1.0)), Outcome(difficulty="hard", rewards=(0.0, 1.0))]
        >>> for step in range(1, 9):
        ...     curriculum.learned(step, outcomes)
        >>> [curriculum.choose(group, ["easy", "hard"], horizon=8) for group in range(8)]
        [1, 1, 1, 1, 1, 1, 1, 1]

    Args:
        seed: of the run.
        state: what :meth:`state` returned, of a run that is resumed.
    """

    def __init__(self, *, seed: int, state: Mapping[str, Any] | None = None) -> None:
        self._seed = seed
        self._steps: dict[int, dict[str, list[float]]] = {
            int(step): {kind: list(counts) for kind, counts in kinds.items()} for step, kinds in (state or {}).items()
        }
        """By step and difficulty: groups, those whose rewards varied, and the sum of their mean rewards."""

    def learned(self, step: int, outcomes: Iterable[Outcome]) -> None:
        """Record what ``step`` was trained on; a step that is trained again replaces its record."""
        kinds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        for each in outcomes:
            counts = kinds[each.difficulty]
            counts[0] += 1
            counts[1] += max(each.rewards) > min(each.rewards)
            counts[2] += math.fsum(each.rewards) / len(each.rewards)
        self._steps[step] = dict(kinds)

    def choose(self, group_id: int, difficulties: Sequence[str], *, horizon: int) -> int:
        """Return the place of the candidate that the group gets."""
        # Twice as long as they count: the horizon goes back by some steps where groups are dropped.
        for old in [each for each in self._steps if each <= horizon - 2 * _FORGOTTEN]:
            del self._steps[old]
        draw = random.Random(f"{self._seed}/curriculum/{group_id}")  # noqa: S311 (reproducible, not secret)
        scores = {kind: self.score(kind, horizon=horizon) for kind in set(difficulties)}
        weights = [scores[kind] ** SHARPNESS for kind in difficulties]
        return draw.choices(range(len(weights)), weights)[0]

    def score(self, difficulty: str, *, horizon: int) -> float:
        """Return how much a group of this difficulty is expected to teach: above 0, 1 for what was never seen."""
        groups = varied = 0.0
        means, weights = [0.0, 0.0], [0.0, 0.0]
        for step, kinds in self._steps.items():
            age = horizon - step
            if not 0 <= age < _FORGOTTEN or difficulty not in kinds:
                continue
            count, differed, total = kinds[difficulty]
            groups += count * DECAY**age
            varied += differed * DECAY**age
            for place, decay in enumerate((DECAY, FAST_DECAY)):
                means[place] += total * decay**age
                weights[place] += count * decay**age
        moved = abs(means[1] / weights[1] - means[0] / weights[0]) if min(weights) > 0 else 0.0
        return (varied + 1) / (groups + 1) * (1 + PROGRESS * min(moved, 1.0))

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {str(step): kinds for step, kinds in sorted(self._steps.items())}
