"""One training step: groups become a batch with advantages and a certificate, and the trainer is updated on it.

It asks nothing but the groups, their order, and the number of the step. So a recorded run can be trained again from its
ledger, through the very same code (:mod:`asyncrl.pipeline.replay`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.errors import InvalidDataError
from asyncrl.interfaces import SelectedGroup
from asyncrl.pipeline.canary import check_first_step
from asyncrl.pipeline.certificate import Certificate, certify
from asyncrl.pipeline.credit import TokenCredit
from asyncrl.pipeline.judge import Judge
from asyncrl.pipeline.reward_penalty import RewardPenalty
from asyncrl.pipeline.staleness import StalenessPolicy

__all__ = ["TRAINED_COLUMNS", "Critic", "Learned", "Learner"]

TRAINED_COLUMNS = ("input_ids", "loss_mask", "behaviour_log_probs", "weight_versions")
"""What an update reads of a row; nothing else of it is sent to the trainer, but for what advantages need."""


class _Trainer(Protocol):
    def update(
        self, batch: DataProtoFuture, oldest_version: int | None = None, credit: TokenCredit | None = None
    ) -> Any: ...


class Critic(Protocol):
    """The calls a run makes on the critic's worker group."""

    def values(self, batch: DataProtoFuture) -> DataProtoFuture: ...

    def update(self, batch: DataProtoFuture, credit: TokenCredit, oldest_version: int | None = None) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What is known of a step when it is done.

    Attributes:
        metrics: the trainer's, and the penalty's.
        certificate: of the whole batch.
        again: of those groups in it that an earlier step had trained on.
        rewards: of all rows, group by group.
        lengths: their sampled tokens.
    """

    metrics: dict[str, float]
    certificate: Certificate
    again: Certificate
    rewards: tuple[float, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """The trainer's worker group and what a step is made with.

    Attributes:
        trainer: updated on every batch.
        judge: what rows are trained with: advantages, or how they are made.
        critic: learns beside the trainer, from the same batch; None without one.
        policy: what becomes of tokens past the bound.
        max_staleness: the bound, in versions.
        optimizer_steps: of one update.
        referred: whether rows carry ``reference_log_probs``.
        mismatch_limit: nats per token by which engine and trainer may differ on the first step; None asks nothing.
    """

    trainer: _Trainer
    judge: Judge
    policy: StalenessPolicy
    max_staleness: int
    optimizer_steps: int = 1
    referred: bool = False
    critic: Critic | None = None
    mismatch_limit: float | None = None

    @property
    def penalty(self) -> RewardPenalty | None:
        """Takes the divergence that the reference tells off the rewards; None where it is no part of them."""
        return self.judge.penalty

    def oldest_version(self, step: int) -> int | None:
        """Lowest version whose tokens ``step`` trains on; None if every token may be."""
        return self.policy.oldest_version(step - 1, max_staleness=self.max_staleness)

    async def learn(
        self,
        step: int,
        groups: Sequence[SelectedGroup],
        *,
        first: bool = False,
        dropped_rows: int = 0,
        dropped_tokens: int = 0,
    ) -> Learned:
        """Train ``step`` on ``groups``: concatenate their rows where they lie, add advantages, update.

        Args:
            step: its number, from 1.
            groups: the batch, in order.
            first: whether it is the first of its run, which is held to a known outcome if its samples are fresh.
            dropped_rows: rows given up since the step before, for the certificate.
            dropped_tokens: sampled tokens of those.
        """
        summaries = [group.summary for group in groups]
        oldest = self.oldest_version(step)
        certificate = certify(
            summaries,
            trainer_version=step - 1,
            oldest_version=oldest,
            dropped_rows=dropped_rows,
            dropped_tokens=dropped_tokens,
        )
        judgement = self.judge.judge(summaries)
        columns = [*TRAINED_COLUMNS, *self.judge.row_columns]
        columns += ["reference_log_probs"] if self.referred else []
        batch = DataProtoFuture.concat(
            [_future(group.rows).select(columns, non_tensor_batch_keys=[], meta_info_keys=[]) for group in groups]
        )
        batch = batch.union(judgement.columns)
        metrics = await self._update(batch, oldest if certificate.masked_tokens else None, judgement.credit)
        # After a resume there may be rows that went on over new weights, with keys and values of the old ones.
        fresh = certificate.maximum == 0 and not certificate.masked_tokens
        if first and self.mismatch_limit is not None and fresh:
            check_first_step(metrics, limit=self.mismatch_limit, one_step=self.optimizer_steps == 1)
        metrics = metrics | self.judge.stepped(summaries)
        again = certify(
            [group.summary for group in groups if group.uses], trainer_version=step - 1, oldest_version=oldest
        )
        return Learned(
            metrics=metrics,
            certificate=certificate,
            again=again,
            rewards=tuple(reward for summary in summaries for reward in summary.rewards),
            lengths=tuple(length for summary in summaries for length in summary.lengths),
        )

    async def _update(self, batch: DataProtoFuture, oldest: int | None, credit: TokenCredit | None) -> dict[str, float]:
        """Policy and critic learn from the same batch at the same time; the critic's metrics begin with ``critic_``."""
        if self.critic is None:
            (alone, *_ranks) = await self.trainer.update(batch, oldest, credit)
            return dict(alone)
        if credit is None:
            raise InvalidDataError(f"advantage {self.judge.estimator.name!r} leaves a critic nothing to learn from")
        updates = asyncio.gather(self.trainer.update(batch, oldest, credit), self.critic.update(batch, credit, oldest))
        (metrics, *_others), (told, *_more) = await updates
        return {**metrics, **{f"critic_{name}": value for name, value in told.items()}}


def _future(rows: DataProto | DataProtoFuture) -> DataProtoFuture:
    return DataProtoFuture.of(rows) if isinstance(rows, DataProto) else rows
