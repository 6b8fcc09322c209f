"""What a group is given between its rollouts and the buffer, each stage on its own and all at once.

rollouts ------> reward ----------------.
  (and one       reference log-probs ----+--> buffer: ready when everything is there
  greedy one)    values of the critic ---'
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass

import torch

from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.interfaces import GroupSummary, ReplayBuffer
from asyncrl.pipeline.journal import Journal
from asyncrl.pipeline.judge import Judge
from asyncrl.pipeline.reference import Score
from asyncrl.telemetry.timeline import Timeline

__all__ = ["Greedy", "GroupStages", "numbers_of"]

Greedy = Awaitable[float | None]
"""Reward of the greedy answer to a prompt; None where its environment failed."""


@dataclass(slots=True, kw_only=True)
class GroupStages:
    """The stages of a run; those that it does not have are None.

    Attributes:
        buffer: where groups go, and wait for what these stages add.
        journal: is told of rewards.
        timeline: where each stage's time is written down.
        judge: keeps what is told of a group for the moment it is trained on.
        reward: adds ``scores`` [B].
        reference: adds ``reference_log_probs``, and ``divergences`` [B] where the judge wants them.
        values: adds ``values``.
    """

    buffer: ReplayBuffer
    journal: Journal
    timeline: Timeline
    judge: Judge
    reward: Score | None = None
    reference: Score | None = None
    values: Score | None = None

    async def enter(
        self,
        summary: GroupSummary,
        rows: DataProtoFuture,
        *,
        greedy: Greedy | None = None,
        rewarded: bool = False,
        uses: int = 0,
        promised: int = 0,
    ) -> None:
        """Put a group into the buffer, and what the stages add to it as it comes.

        ``rewarded`` groups have the rewards of an earlier life. ``uses`` is how many steps trained on them then, and
        ``promised`` how many of those are done again. A group without a greedy answer to compare with is dropped
        (reason ``baseline_failed``).
        """
        slot = summary.slot
        if greedy is not None:
            with self.timeline.span("baseline", f"group {slot}"):
                reward = await greedy
            if reward is None:
                self.buffer.drop(slot, "baseline_failed", tokens=summary.tokens)
                return
            self.judge.greedy[slot] = reward
        self.buffer.put(summary, rows, uses=uses, promised=promised)
        async with asyncio.TaskGroup() as stages:
            if self.reward is not None:
                stages.create_task(self._rewarded(summary, rows, rewarded=rewarded))
            if self.reference is not None:
                stages.create_task(self._referred(slot, rows))
            if self.values is not None:
                stages.create_task(self._valued(slot, rows))

    async def score(self, rows: DataProtoFuture, *, name: str) -> tuple[DataProtoFuture, tuple[float, ...]]:
        """``scores`` of rows, and the same as numbers."""
        assert self.reward is not None
        with self.timeline.span("reward", name):
            scores = self.reward(rows)
            return scores, tuple(await numbers_of(scores, "scores"))

    async def _rewarded(self, summary: GroupSummary, rows: DataProtoFuture, *, rewarded: bool) -> None:
        if rewarded:  # in an earlier life, and recorded
            scores = DataProtoFuture.of(DataProto.from_dict({"scores": torch.tensor(summary.rewards)}))
            rewards = summary.rewards
        else:
            scores, rewards = await self.score(rows, name=f"group {summary.slot}")
            self.journal.rewarded(summary.slot, rewards)
        self.buffer.extend(summary.slot, ("scores",), scores, rewards=rewards)

    async def _referred(self, slot: int, rows: DataProtoFuture) -> None:
        assert self.reference is not None
        with self.timeline.span("reference", f"group {slot}"):
            reference = self.reference(rows)
            await reference.header()
            if self.judge.wants_divergences:
                self.judge.told(slot, await numbers_of(reference, "divergences"))
        self.buffer.extend(slot, ("reference_log_probs",), reference.select(["reference_log_probs"], [], []))

    async def _valued(self, slot: int, rows: DataProtoFuture) -> None:
        assert self.values is not None
        with self.timeline.span("values", f"group {slot}"):
            values = self.values(rows.select(["input_ids", "loss_mask"], [], []))
            await values.header()
        self.buffer.extend(slot, ("values",), values)


async def numbers_of(rows: DataProtoFuture, column: str) -> list[float]:
    """A column [B], fetched: one number a row, of all ranks in the rows' order, without what filled up a share."""
    fetched = await rows.select([column], [], [])
    assert fetched.batch is not None
    numbers: list[float] = fetched.batch[column].tolist()
    return numbers
