"""One training step: groups become a batch with advantages and a certificate, and the trainer is updated on it.

It asks nothing but the groups, their order, and the number of the step. So a recorded run can be trained again from its
ledger, through the very same code (:mod:`asyncrl.pipeline.replay`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from asyncrl.algorithms import AdvantageEstimator
from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.interfaces import GroupSummary, SelectedGroup
from asyncrl.pipeline.canary import check_first_step
from asyncrl.pipeline.certificate import Certificate, certify
from asyncrl.pipeline.reward_penalty import RewardPenalty
from asyncrl.pipeline.staleness import StalenessPolicy

__all__ = ["TRAINED_COLUMNS", "Learned", "Learner"]

TRAINED_COLUMNS = ("input_ids", "loss_mask", "behaviour_log_probs", "weight_versions")
"""What an update reads of a row; nothing else of it is sent to the trainer. Advantages are added here."""


class _Trainer(Protocol):
    def update(self, batch: DataProtoFuture, oldest_version: int | None = None) -> Any: ...


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
        advantage: from rewards, groups and lengths to advantages.
        policy: what becomes of tokens past the bound.
        max_staleness: the bound, in versions.
        optimizer_steps: of one update.
        referred: whether rows carry ``reference_log_probs``.
        penalty: takes the divergence that the reference tells off the rewards; None where it is no part of them.
        mismatch_limit: nats per token by which engine and trainer may differ on the first step; None asks nothing.
    """

    trainer: _Trainer
    advantage: AdvantageEstimator
    policy: StalenessPolicy
    max_staleness: int
    optimizer_steps: int = 1
    referred: bool = False
    penalty: RewardPenalty | None = None
    mismatch_limit: float | None = None

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
        columns = [*TRAINED_COLUMNS, *(["reference_log_probs"] if self.referred else [])]
        batch = DataProtoFuture.concat(
            [_future(group.rows).select(columns, non_tensor_batch_keys=[], meta_info_keys=[]) for group in groups]
        )
        batch = batch.union(DataProto.from_dict(tensors={"advantages": self.advantages(summaries)}))
        (metrics, *_others) = await self.trainer.update(batch, oldest if certificate.masked_tokens else None)
        # After a resume there may be rows that went on over new weights, with keys and values of the old ones.
        fresh = certificate.maximum == 0 and not certificate.masked_tokens
        if first and self.mismatch_limit is not None and fresh:
            check_first_step(metrics, limit=self.mismatch_limit, one_step=self.optimizer_steps == 1)
        if self.penalty is not None:
            metrics = metrics | self.penalty.stepped(summaries)
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

    def advantages(self, summaries: Sequence[GroupSummary]) -> Tensor:
        """[B] or ragged, of the rows of these groups in order."""
        rewards = [reward for summary in summaries for reward in summary.rewards]
        returns = rewards if self.penalty is None else self.penalty.rewards(summaries)
        owners = [summary.slot for summary in summaries for _ in summary.rewards]
        lengths = [length for summary in summaries for length in summary.lengths]
        return self.advantage(
            {"rewards": torch.tensor(returns), "groups": torch.tensor(owners), "lengths": torch.tensor(lengths)}
        )


def _future(rows: DataProto | DataProtoFuture) -> DataProtoFuture:
    return DataProtoFuture.of(rows) if isinstance(rows, DataProto) else rows
