"""A group: the rollouts of one prompt, from its issue until a step trains on them.

:class:`Group` is the driver's one record of a group; buffer, ledger and admission law refer to it by its
``group_id``. Whether it is pending, ready or selected is known to the buffer alone (``buffers/state.py``).
:class:`GroupStages` takes a group from its issue into the buffer::

    rollouts -----------> reward ---------------.
    greedy baseline       reference log-probs ---+--> the buffer hands it out when all columns are there
    (ReMax, beside them)  values of the critic --'
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from asyncrl.curriculum import Candidate, Curriculum, Outcome
from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.errors import EnvironmentFailure, InvalidDataError, RolloutsLostError
from asyncrl.interfaces import EnvironmentFactory, GroupSummary, ReplayBuffer, TaskDifficulty
from asyncrl.ledger import Rewarded
from asyncrl.rollout.pool import RolloutPool
from asyncrl.rollout.recheck import CheckBudget, check_reward, chosen_rows
from asyncrl.rollout.trajectory import derive_seed, prompt_rows
from asyncrl.runtime import run_all
from asyncrl.staleness import check_summary
from asyncrl.telemetry.timeline import Timeline
from asyncrl.trainer.invariants import check_stamps
from asyncrl.trainer.journal import Journal

Score: TypeAlias = Callable[[DataProtoFuture], DataProtoFuture]
"""A stage between rollout and buffer: rows in, further columns of the same rows out."""

Failure: TypeAlias = EnvironmentFailure | RolloutsLostError
"""What costs a group and not the run."""


@dataclass(slots=True, kw_only=True)
class Group:
    """What is known of one group.

    Attributes:
        group_id: its number in issue order.
        task: the number of its task, where a curriculum has chosen another than ``group_id``.
        summary: rewards, lengths and versions of its rows; None until it is sampled.
        rows: of its trajectories; they stay where they were made. None until it is sampled.
        uses: steps that trained on it before the one it is selected for.
        rewarded: whether ``summary`` has the reward model's scores of an interrupted process already.
        reserved_uses: how many recorded batches a resumed run trains on again have this group.
        baseline_reward: reward of the greedy answer to its prompt, where the advantage needs one (ReMax).
        divergences: KL from the reference of each row, its sampled tokens summed, in nats; where something needs them.
    """

    group_id: int
    task: int | None = None
    summary: GroupSummary | None = None
    rows: DataProtoFuture | None = None
    uses: int = 0
    rewarded: bool = False
    reserved_uses: int = 0
    baseline_reward: float | None = None
    divergences: tuple[float, ...] | None = None

    @property
    def task_number(self) -> int:
        return self.group_id if self.task is None else self.task

    @property
    def known(self) -> GroupSummary:
        """The summary of a group that is sampled."""
        if self.summary is None:
            raise InvalidDataError(f"group {self.group_id} has no rows yet: it is not sampled")
        return self.summary

    @property
    def sampled_rows(self) -> DataProtoFuture:
        """The rows of a group that is sampled."""
        if self.rows is None:
            raise InvalidDataError(f"group {self.group_id} has no rows yet: it is not sampled")
        return self.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskChoice:
    """Chooses the task of each group among ``candidates`` that no other group has, and seen ones, by a curriculum.

    ``chosen`` are those that an earlier process chose for groups that are issued again.
    """

    curriculum: Curriculum
    environments: EnvironmentFactory
    candidates: int
    chosen: Mapping[int, int] = field(default_factory=dict[int, int])

    def choose(self, group_id: int, *, horizon: int) -> int:
        """Return the number of a task; ``horizon`` as in :meth:`Curriculum.choose`."""
        if group_id in self.chosen:
            return self.chosen[group_id]
        candidates = [self._candidate(task) for task in self._own(group_id)]
        return self.curriculum.choose(group_id, candidates, horizon=horizon).task

    def learned(self, step: int, groups: Sequence[Group]) -> None:
        """Record the groups that a step was trained on."""
        self.curriculum.learned(
            step,
            [
                Outcome(
                    candidate=self._candidate(each.task_number, seen=each.task_number not in self._own(each.group_id)),
                    rewards=tuple(each.known.rewards),
                )
                for each in groups
            ],
        )

    def _own(self, group_id: int) -> range:
        """Return the numbers of tasks that no other group has as new ones."""
        return range(group_id * self.candidates, (group_id + 1) * self.candidates)

    def _candidate(self, number: int, *, seen: bool = False) -> Candidate:
        task = self.environments.task(number, split="train")
        if isinstance(self.environments, TaskDifficulty):
            difficulty = self.environments.difficulty(task)
        else:
            difficulty = str(task.get("environment", ""))
        return Candidate(task=number, difficulty=difficulty, seen=seen)


@dataclass(slots=True, kw_only=True)
class GroupStages:
    """Samples groups, and adds what training needs beside the rows. Stages that a run does not have are None.

    Attributes:
        seed: of the run; every row's seed derives from it, its group and its number.
        version: returns the newest version that every serving engine holds.
        reward: adds ``scores`` [B]; None where the environment's reward counts.
        reference: adds ``reference_log_probs``, and ``divergences`` [B] if ``needs_divergences``.
        values: adds ``values`` of the critic.
        needs_baseline: whether each prompt is also answered greedily.
        needs_divergences: whether the KL from the reference is kept by row.
        checks: how many rows are scored again, to compare; None for none.
    """

    group_size: int
    seed: int
    pool: RolloutPool
    environments: EnvironmentFactory
    buffer: ReplayBuffer
    journal: Journal
    timeline: Timeline
    version: Callable[[], int]
    reward: Score | None = None
    reference: Score | None = None
    values: Score | None = None
    needs_baseline: bool = False
    needs_divergences: bool = False
    checks: CheckBudget | None = None
    _begun_s: float | None = field(default=None, init=False)

    async def sample(self, group: Group, *, show: bool = False) -> tuple[Failure | None, dict[str, Any] | None]:
        """Roll a group out, with the greedy baseline beside it. A group whose rows were recorded has them already.

        Return the failure of the rollouts or the baseline, if any; and with ``show`` one trajectory as a record.
        """
        if not self.needs_baseline:
            return await self._roll_out(group, show=show)
        async with asyncio.TaskGroup() as tasks:
            baseline = tasks.create_task(self._sample_baseline(group))
            failure, shown = await self._roll_out(group, show=show)
            if failure is not None:
                baseline.cancel()
                return failure, None
            with self.timeline.span("baseline", f"group {group.group_id}"):
                return await baseline, shown

    async def complete(self, group: Group) -> None:
        """Put a sampled group into the buffer, and add the columns of all stages, each as soon as it is made."""
        self.buffer.put(group.known, group.sampled_rows, uses=group.uses, reserved_uses=group.reserved_uses)
        async with asyncio.TaskGroup() as stages:
            if self.reward is not None:
                stages.create_task(self._add_scores(group))
            if self.reference is not None:
                stages.create_task(self._add_reference(group))
            if self.values is not None:
                stages.create_task(self._add_values(group))

    async def score(self, rows: DataProtoFuture, *, name: str) -> tuple[DataProtoFuture, tuple[float, ...]]:
        """Return the reward model's ``scores`` of rows, as a column and as numbers."""
        assert self.reward is not None
        with self.timeline.span("reward", name):
            scores = self.reward(rows)
            return scores, tuple(await fetch_numbers(scores, "scores"))

    # ------------------------------------------------------------------------------------------------------ sampling

    async def _roll_out(self, group: Group, *, show: bool) -> tuple[Failure | None, dict[str, Any] | None]:
        if group.rows is not None:  # an interrupted process has recorded them
            return None, None
        group_id = group.group_id
        attempt: int | None = None
        served = 0

        async def prompts() -> DataProto:
            nonlocal attempt, served
            served = self.version()
            attempt = await self.journal.dispatched(group_id, version=served)
            return prompt_rows(
                [self.environments.task(group.task_number, split="train")] * self.group_size,
                group_id=group_id,
                seeds=[derive_seed(self.seed, "train", group_id, row) for row in range(self.group_size)],
                purpose="train",
                sample=show,
                record=attempt is not None,
                attempt=attempt,
                turns=self.journal.recorded_turns(group_id),
            )

        try:
            with self.timeline.span("prompts", f"group {group_id}"):
                first = await prompts()
            with self.timeline.span("rollout", f"group {group_id}"):
                rows = await self.pool.rollout(first, again=prompts)
                meta = (await rows.header()).meta_info
        except (EnvironmentFailure, RolloutsLostError) as failure:
            return failure, None
        summary = GroupSummary(**meta["summary"])
        check_summary(summary, group_id=group_id, rows=self.group_size)
        if not meta.get("continued", {}).get("rows"):  # turns of an interrupted process are of older versions
            check_stamps(summary, served=served)
        self.journal.completed(summary, meta, attempt=attempt or 0)
        group.summary, group.rows = summary, rows.select(meta_info_keys=["summary"])
        return None, meta["sample"] if show else None

    async def _sample_baseline(self, group: Group) -> Failure | None:
        """Set ``baseline_reward`` to the reward of the greedy answer. Its tokens do not count among the samples."""
        group_id = group.group_id
        prompts = prompt_rows(
            [self.environments.task(group.task_number, split="train")],
            group_id=group_id,
            seeds=[derive_seed(self.seed, "baseline", group_id)],
            purpose="baseline",
        )
        try:
            rows = await self.pool.rollout(prompts)
        except (EnvironmentFailure, RolloutsLostError) as failure:
            return failure
        if self.reward is not None:
            _, (group.baseline_reward,) = await self.score(rows, name=f"baseline {group_id}")
        else:
            (group.baseline_reward,) = (await rows.header()).meta_info["summary"]["rewards"]
        return None

    # ------------------------------------------------------------------------------------------------------- columns

    async def _add_scores(self, group: Group) -> None:
        rewards: tuple[float, ...]
        if group.rewarded:
            rewards = group.known.rewards
            scores = DataProtoFuture.of(DataProto.from_dict({"scores": torch.tensor(rewards)}))
        else:
            scores, rewards = await self.score(group.sampled_rows, name=f"group {group.group_id}")
            self.journal.record(Rewarded(group_id=group.group_id, rewards=rewards))
        self.buffer.extend(group.group_id, ("scores",), scores, rewards=rewards)
        if not group.rewarded and self.checks is not None:
            await self._check_scores(group, scores, rewards, self.checks)

    async def _check_scores(
        self, group: Group, scores: DataProtoFuture, rewards: Sequence[float], budget: CheckBudget
    ) -> None:
        """Score some rows again, each alone, if the reward model declares itself deterministic.

        Raises:
            InvariantError: a row gets another score.
        """
        now_s = asyncio.get_running_loop().time()
        self._begun_s = now_s if self._begun_s is None else self._begun_s
        elapsed_s = now_s - self._begun_s
        rows = chosen_rows(len(rewards), budget.rows(len(rewards), elapsed_s=elapsed_s), group_id=group.group_id)
        if not rows or not (await scores.meta_info()).get("deterministic", False):
            return
        with budget.checking(rows=len(rows)):
            again = await run_all(
                self.score(group.sampled_rows.slice(row, row + 1), name=f"check {group.group_id}") for row in rows
            )
        for row, (_, (score,)) in zip(rows, again, strict=True):
            check_reward(f"row {row} of group {group.group_id}", given=rewards[row], again=score)
        self.journal.count_checks({"rows": len(rows)})

    async def _add_reference(self, group: Group) -> None:
        assert self.reference is not None
        with self.timeline.span("reference", f"group {group.group_id}"):
            reference = self.reference(group.sampled_rows)
            await reference.header()
            if self.needs_divergences:
                group.divergences = tuple(await fetch_numbers(reference, "divergences"))
        self.buffer.extend(group.group_id, ("reference_log_probs",), reference.select(["reference_log_probs"], [], []))

    async def _add_values(self, group: Group) -> None:
        assert self.values is not None
        with self.timeline.span("values", f"group {group.group_id}"):
            values = self.values(group.sampled_rows.select(["input_ids", "loss_mask", "branches"], [], []))
            await values.header()
        self.buffer.extend(group.group_id, ("values",), values)


async def fetch_numbers(rows: DataProtoFuture, column: str) -> list[float]:
    """Fetch a column [B], one number a row, in the order of the rows, without rows that only filled up a share."""
    fetched = await rows.select([column], [], [])
    assert fetched.batch is not None
    numbers: list[float] = fetched.batch[column].tolist()
    return numbers
