"""Which turns an advantage is given to, where a row is a tree of turns (:mod:`asyncrl.rollout.branches`) or a line.

=========== ============================================= ==========================================================
credit      what is compared in a group                   what a turn gets
=========== ============================================= ==========================================================
outcome     rows, by their rewards                        the advantage of its row
branch      branches, by what their turns earned          the mean advantage of the branches that it is in
turn        turns, by what they and those after earned    its own advantage
=========== ============================================= ==========================================================

What no turn of a row earned (the reward less all ``turn_rewards``) counts for every branch and every turn of it. After
a turn that several continue, what was earned is the mean over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from asyncrl.errors import InvalidDataError

if TYPE_CHECKING:
    from asyncrl.interfaces import GroupSummary

Credit: TypeAlias = Literal["outcome", "branch", "turn"]


@dataclass(frozen=True, slots=True)
class Earned:
    """One branch or one turn of a row: what it earned, and the turns that get its advantage."""

    reward: float
    turns: tuple[int, ...]


def earned_by(
    credit: Literal["branch", "turn"], *, reward: float, turn_rewards: Sequence[float], parents: Sequence[int] = ()
) -> list[Earned]:
    """Return the branches or the turns of a row. ``parents`` are empty for a line.

    Of a reward of 1.5 the first turn earned 0.25, and two that continue it 1 and 0; the rest, 0.25, no turn did:

    >>> row = {"reward": 1.5, "turn_rewards": [0.25, 1.0, 0.0], "parents": [-1, 0, 0]}
    >>> [(each.reward, each.turns) for each in earned_by("branch", **row)]
    [(1.5, (0, 1)), (0.5, (0, 2))]
    >>> [(each.reward, each.turns) for each in earned_by("turn", **row)]
    [(1.0, (0,)), (1.25, (1,)), (0.25, (2,))]
    """
    before = list(parents) or list(range(-1, len(turn_rewards) - 1))
    after: list[list[int]] = [[] for _ in before]
    for turn, parent in enumerate(before):
        if parent >= 0:
            after[parent].append(turn)
    rest = reward - sum(turn_rewards)
    if credit == "branch":
        found: list[Earned] = []
        for leaf in (turn for turn, continued in enumerate(after) if not continued):
            path = [leaf]
            while before[path[-1]] >= 0:
                path.append(before[path[-1]])
            found.append(Earned(rest + sum(turn_rewards[turn] for turn in path), tuple(path[::-1])))
        return found
    values = [0.0] * len(before)
    for turn in reversed(range(len(before))):  # a turn comes after the one that it continues
        later = [values[each] for each in after[turn]]
        values[turn] = turn_rewards[turn] + (sum(later) / len(later) if later else 0.0)
    return [Earned(rest + value, (turn,)) for turn, value in enumerate(values)]


def earned_in_group(
    credit: Literal["branch", "turn"], summary: GroupSummary, *, rewards: Sequence[float], by_turns: bool
) -> list[list[Earned]]:
    """Return :func:`earned_by` of each row, by its ``rewards``; without ``by_turns`` no turn earned any of them.

    Raises:
        InvalidDataError: the group lacks the turns of its rows.
    """
    if len(summary.turn_rewards) != summary.rows:
        raise InvalidDataError(
            f"group {summary.group_id} lacks the turns of its rows: it has {summary.rows} rows and the turn_rewards of "
            f"{len(summary.turn_rewards)}, and credit = {credit!r} compares turns; use credit = 'outcome'"
        )
    found: list[list[Earned]] = []
    for row, turn_rewards in enumerate(summary.turn_rewards):
        parents = summary.turn_parents[row] if summary.turn_parents else ()
        earned = turn_rewards if by_turns else (0.0,) * len(turn_rewards)
        found.append(earned_by(credit, reward=rewards[row], turn_rewards=earned, parents=parents))
    return found
