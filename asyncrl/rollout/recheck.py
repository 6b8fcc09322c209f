"""Rewards are checked against a recomputed sample: some finished rows are scored again, and have to earn the same.

A row is played again: its turns, decoded from its tokens, are passed to a new environment. That needs an environment
that declares itself deterministic (:class:`asyncrl.interfaces.DeterministicEnvironment`); rows of others are not
checked. What is compared is what the rest of the run reads: the columns of the rows and the group's summary.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from asyncrl.data import DataProto
from asyncrl.data.ragged import rows_of
from asyncrl.errors import EnvironmentFailure, InvariantError
from asyncrl.foreign import Failures
from asyncrl.interfaces import EnvironmentFactory
from asyncrl.rollout.chat import ChatRenderer
from asyncrl.rollout.episode import make_environment, replay_episode
from asyncrl.rollout.trajectory import Trajectory
from asyncrl.rollout.work import EpisodeTimes

_REMEDY = (
    "either rewards were given to the wrong rows, a defect of asyncrl or of a part plugged into it: report it; "
    "or what gives them is not deterministic: do not declare it so"
)

_FREE_ROWS = 8


@dataclass(slots=True)
class CheckBudget:
    """Decides how many rows may be checked, so that checks take at most ``share`` of the time.

    The first few, one at a time, are free: most defects show at once.

    >>> budget = CheckBudget(share=0.01)
    >>> budget.rows(16, elapsed_s=0.0)
    1
    >>> budget.spend(0.016, rows=8)
    >>> budget.rows(16, elapsed_s=2.0), budget.rows(16, elapsed_s=1.0)
    (2, 0)
    """

    share: float
    _spent_s: float = 0.0
    _rows: int = 0

    def rows(self, most: int, *, elapsed_s: float) -> int:
        """Return how many of ``most`` rows to check after so many seconds of work."""
        if self.share <= 0 or not most:
            return 0
        if self._rows < _FREE_ROWS:
            return 1
        left_s = self.share * elapsed_s - self._spent_s
        row_s = max(self._spent_s / self._rows, 1e-6)
        return max(0, min(most, int(left_s / row_s)))

    def spend(self, took_s: float, *, rows: int) -> None:
        """Count the seconds that the check of some rows took."""
        self._spent_s += took_s
        self._rows += rows

    @contextmanager
    def checking(self, *, rows: int) -> Iterator[None]:
        """Count the time of the block as a check of ``rows``; needs a running loop."""
        clock = asyncio.get_running_loop().time
        begun_s = clock()
        try:
            yield
        finally:
            self.spend(clock() - begun_s, rows=rows)


def chosen_rows(rows: int, count: int, *, group_id: int) -> list[int]:
    """Return ``count`` of the numbers 0..rows-1, others for each group."""
    return sorted(random.Random(group_id).sample(range(rows), count))  # noqa: S311 (reproducible, not secret)


def check_reward(where: str, *, given: float, again: float) -> None:
    """Check that a row's reward is what it earns again, up to the rounding of float32.

    Raises:
        InvariantError: it is not.
    """
    if not math.isclose(given, again, rel_tol=1e-5, abs_tol=1e-6):
        raise InvariantError(f"{where} has the reward {given:g} and, scored again, {again:g}: {_REMEDY}")


@dataclass(slots=True)
class RewardChecks:
    """What became of checks: ``rows`` that earned the same again; ``failures`` by cause, which checked nothing."""

    rows: int = 0
    failures: Failures = field(default_factory=Failures)

    def as_meta(self) -> dict[str, Any]:
        return {"rows": self.rows, "failures": dict(self.failures)}


class ReplayedRewards:
    """Plays finished rows again, side by side, and compares their rewards.

    Args:
        environments: makes the new environments.
        share: of the time in which at least one episode runs, that checks may take.
        max_seq_len: the longest trajectory: a turn that it cut was not passed to the environment.
        deadline_s: for each call of an environment.
        times: where the time of replays is counted, too.
    """

    def __init__(
        self,
        environments: EnvironmentFactory,
        *,
        share: float,
        max_seq_len: int,
        deadline_s: float,
        times: EpisodeTimes,
    ) -> None:
        self._environments = environments
        self._budget = CheckBudget(share)
        self._declared = True
        self._max_seq_len = max_seq_len
        self._deadline_s = deadline_s
        self._times = times

    async def check(
        self,
        batch: DataProto,
        trajectories: Sequence[Trajectory],
        renderer: ChatRenderer,
        *,
        group_id: int,
        ends_s: float = math.inf,
        closes_s: float = math.inf,
    ) -> RewardChecks:
        """Check some rows of a group's ``batch``, made of these trajectories; none after ``ends_s``.

        ``ends_s`` and ``closes_s`` bound the calls of the environments, as in :func:`replay_episode`.

        Raises:
            InvariantError: a row earns something else, or its episode ends at another turn.
        """
        checks = RewardChecks()
        in_time = asyncio.get_running_loop().time() < ends_s
        most = len(trajectories) if self._declared and in_time else 0
        count = self._budget.rows(most, elapsed_s=self._times.busy_s)
        rows = chosen_rows(len(trajectories), count, group_id=group_id)
        if not rows:
            return checks
        with self._budget.checking(rows=len(rows)):
            try:
                async with asyncio.TaskGroup() as replays:
                    for row in rows:
                        replays.create_task(
                            self._check_row(
                                batch,
                                row,
                                trajectories[row],
                                renderer,
                                checks,
                                group_id,
                                ends_s=ends_s,
                                closes_s=closes_s,
                            )
                        )
            except BaseExceptionGroup as group:
                raise group.exceptions[0] from group.exceptions[0].__cause__
        return checks

    async def _check_row(
        self,
        batch: DataProto,
        row: int,
        trajectory: Trajectory,
        renderer: ChatRenderer,
        checks: RewardChecks,
        group_id: int,
        *,
        ends_s: float,
        closes_s: float,
    ) -> None:
        assert batch.batch is not None
        token_ids, turns = (rows_of(batch.batch[name])[row] for name in ("input_ids", "turns"))
        sampled = [tuple(token_ids[turns == turn].tolist()) for turn in range(len(trajectory.turns))]
        cut = trajectory.finish_reason == "max_seq_len" and trajectory.turns[-1].finish_reason == "length"
        if cut and len(trajectory.token_ids) >= self._max_seq_len:
            del sampled[-1]  # the environment did not see it
        try:
            with self._times.episode():
                replayed = await replay_episode(
                    make_environment(self._environments),
                    trajectory.task,
                    lambda tools: [renderer.parse(each, tools) for each in sampled],
                    deadline_s=self._deadline_s,
                    ends_s=ends_s,
                    closes_s=closes_s,
                    times=self._times,
                )
        except EnvironmentFailure as failure:
            checks.failures.add(failure)
            return
        if replayed is None:
            self._declared = False
            return
        if not replayed.deterministic:
            return
        where = f"row {row} of group {group_id}"
        steps = replayed.steps
        ended = bool(steps) and steps[-1].done
        if len(steps) != len(sampled) or ended != (trajectory.finish_reason == "done"):
            now = f"ends after {len(steps)}" if ended else "does not end"
            raise InvariantError(
                f"the episode of {where} ended with {trajectory.finish_reason!r} after {len(sampled)} answered turns "
                f"and, played again, {now}: {_REMEDY}"
            )
        earned = [step.reward for step in steps]
        summary: Mapping[str, Any] = batch.meta_info["summary"]
        by_turn = rows_of(batch.batch["turn_rewards"])[row].tolist()
        for given in (float(batch.batch["rewards"][row]), summary["rewards"][row]):
            check_reward(where, given=given, again=sum(earned))
        for rewards in (by_turn, summary["turn_rewards"][row]):
            for turn, (given, again) in enumerate(zip(rewards, earned, strict=False)):
                check_reward(f"turn {turn} of {where}", given=given, again=again)
        checks.rows += 1
