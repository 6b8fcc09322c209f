"""Online difficulty: which of several tasks the next group gets.

A group whose rows all earn the same reward teaches nothing. The law foresees that from what the groups of its kind of
task have shown, and prefers kinds whose groups differ and whose mean reward moves (learning progress)::

    score(kind) = (varied + 2 * prior) / (groups + 2) * (1 + PROGRESS * |recent mean - earlier mean|)
    prior       = (varied' + 1) / (groups' + 1)

with counts that decay from step to step, those of the prior slowly, so that a kind which is solved, or too hard now, is
tried again now and then: its score returns to that of a kind that was never seen. Tasks of one kind differ, too: one
whose rows were right and wrong by turns is likely to show that again. So such a task is a candidate once more, for one
of the groups that the weights of that step may sample first, and for those that take its place if it is dropped. Tasks
that were seen are kinds of their own. Of the candidates of a group, one is drawn in proportion to ``score **
SHARPNESS``, by a generator that the group's number seeds.

The law: the choice depends on the seed, the group's number, its candidates, and the outcomes of the steps up to its
*horizon*, the version at which the admission law admits it at the earliest. All of them are known by then, however the
rollouts finish, so the choice does not depend on time, and a resumed run makes it again.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import pvariance
from typing import Any

PROGRESS = 4.0
SHARPNESS = 4.0
DECAY, SLOW_DECAY, FAST_DECAY = 0.9, 0.98, 0.5
"""Weight of a step's outcomes, per step since: in the score, in its prior, and in the recent mean."""
_MIXED = 0.11
"""Least variance of the rewards of a group whose task is tried again, over their squared range: of eight rows that
are right or wrong, two are of each."""
_FORGOTTEN = 200
"""Steps after which an outcome counts no more."""
_FAR_BACK = 64
"""Steps by which no horizon goes back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A task that a group may get: its number, its difficulty, and whether a group has had it before."""

    task: int
    difficulty: str
    seen: bool = False

    @property
    def kind(self) -> str:
        return f"{self.difficulty}, seen" if self.seen else self.difficulty


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A group that was trained on: its task, and the rewards of its rows."""

    candidate: Candidate
    rewards: tuple[float, ...]


@dataclass(slots=True, kw_only=True)
class _Step:
    """What a step was trained on.

    Attributes:
        kinds: groups, those whose rewards varied, and the sum of their mean rewards, by kind.
        mixed: by group, the number and the difficulty of a task that is tried again, or None.
    """

    kinds: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    mixed: list[tuple[int, str] | None] = field(default_factory=list[tuple[int, str] | None])


class Curriculum:
    """Chooses tasks. A pure state machine; the driver records its choices in the ledger.

        >>> easy, hard = Candidate(task=0, difficulty="easy"), Candidate(task=1, difficulty="hard")
        >>> curriculum = Curriculum(seed=0)
        >>> outcomes = [Outcome(candidate=easy, rewards=(1.0, 1.0)), Outcome(candidate=hard, rewards=(0.0, 1.0))]
        >>> for step in range(1, 9):
        ...     curriculum.learned(step, outcomes)
        >>> [curriculum.choose(group, [easy, hard], horizon=8).task for group in range(8)]
        [1, 1, 1, 1, 1, 1, 1, 1]

    Args:
        seed: of the run.
        state: what :meth:`state` returned, of a run that is resumed.
    """

    def __init__(self, *, seed: int, state: Mapping[str, Any] | None = None) -> None:
        self._seed = seed
        self._steps: dict[int, _Step] = {
            int(step): _Step(
                kinds={kind: list(counts) for kind, counts in kept["kinds"].items()},
                mixed=[None if each is None else (each[0], each[1]) for each in kept["mixed"]],
            )
            for step, kept in (state or {}).items()
        }

    def learned(self, step: int, outcomes: Iterable[Outcome]) -> None:
        """Record what ``step`` was trained on; a step that is trained again replaces its record."""
        kinds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        mixed: list[tuple[int, str] | None] = []
        for each in outcomes:
            counts = kinds[each.candidate.kind]
            counts[0] += 1
            counts[1] += max(each.rewards) > min(each.rewards)
            counts[2] += math.fsum(each.rewards) / len(each.rewards)
            mixed.append((each.candidate.task, each.candidate.difficulty) if _is_mixed(each.rewards) else None)
        self._steps[step] = _Step(kinds=dict(kinds), mixed=mixed)

    def choose(self, group_id: int, candidates: Sequence[Candidate], *, horizon: int) -> Candidate:
        """Return the task that the group gets: one of the candidates, or one that was seen."""
        # Twice as long as they count: the horizon goes back by some steps where groups are dropped.
        for old in [each for each in self._steps if each <= horizon - 2 * _FORGOTTEN]:
            del self._steps[old]
        for old in [each for each in self._steps if each <= horizon - _FAR_BACK]:
            self._steps[old].mixed = []
        draw = random.Random(f"{self._seed}/curriculum/{group_id}")  # noqa: S311 (reproducible, not secret)
        offered = [*candidates, *self._seen(group_id, horizon)]
        scores = {kind: self.score(kind, horizon=horizon) for kind in {each.kind for each in offered}}
        return draw.choices(offered, [scores[each.kind] ** SHARPNESS for each in offered])[0]

    def _seen(self, group_id: int, horizon: int) -> list[Candidate]:
        """Return the task of the horizon's step that this group may try again, if there is one."""
        mixed = self._steps[horizon].mixed if horizon in self._steps else []
        found = mixed[group_id % len(mixed)] if mixed else None
        return [] if found is None else [Candidate(task=found[0], difficulty=found[1], seen=True)]

    def score(self, kind: str, *, horizon: int) -> float:
        """Return how much a group of this kind is expected to teach: above 0, 1 for what was never seen."""
        decays = (DECAY, SLOW_DECAY, FAST_DECAY)
        groups, varied, means = ([0.0] * len(decays) for _ in range(3))
        for step, kept in self._steps.items():
            age = horizon - step
            if not 0 <= age < _FORGOTTEN or kind not in kept.kinds:
                continue
            count, differed, total = kept.kinds[kind]
            for place, decay in enumerate(decays):
                weight = decay**age
                groups[place] += count * weight
                varied[place] += differed * weight
                means[place] += total * weight
        moved = abs(means[2] / groups[2] - means[0] / groups[0]) if groups[2] > 0 else 0.0
        prior = (varied[1] + 1) / (groups[1] + 1)
        return (varied[0] + 2 * prior) / (groups[0] + 2) * (1 + PROGRESS * min(moved, 1.0))

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {str(step): {"kinds": kept.kinds, "mixed": kept.mixed} for step, kept in sorted(self._steps.items())}


def _is_mixed(rewards: Sequence[float]) -> bool:
    width = max(rewards) - min(rewards)
    return width > 0 and pvariance(rewards) > _MIXED * width * width
