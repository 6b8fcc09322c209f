"""One training step: the groups of a batch get advantages, and the trainer is updated on their rows.

    groups --> certificate (staleness of every token)
           --> advantages: in the driver from numbers in the headers, or a specification for the workers
           --> rows, concatenated where they are, joined with the advantages --> trainer.update, critic.update

A step needs nothing but the groups, their order and its number. So a recorded run is trained again from its ledger by
the same code (:mod:`asyncrl.tasks.rerun`).
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, cast

import torch

from asyncrl.algorithms.advantages import AdvantageEstimator
from asyncrl.algorithms.credit import Credit, Earned, earned_in_group
from asyncrl.algorithms.kl import AdaptiveKL, KLController, penalised_rewards
from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.data.ragged import ragged_from_list
from asyncrl.errors import EngineError, InvalidDataError, SchemaError
from asyncrl.interfaces import GroupSummary
from asyncrl.staleness import Certificate, StalenessPolicy, certify
from asyncrl.trainer.group import Group
from asyncrl.trainer.invariants import broken, check_certificate
from asyncrl.trainer.journal import Drops
from asyncrl.trainer.workers import CriticGroup, TokenAdvantages, TrainerGroup

if TYPE_CHECKING:
    from asyncrl.algorithms.kl import KLEstimator

_NO_DROPS = Drops()

_ORDER_TOLERANCE = 0.05
"""Part of the largest advantage by which the order of groups may change one: sums are rounded otherwise."""

TRAINED_COLUMNS = ("input_ids", "loss_mask", "behaviour_log_probs", "weight_versions", "branches")
"""Columns of a row that every update reads; advantages may need more, and nothing else is sent to the trainer."""

# ----------------------------------------------------------------------------------------------------------- advantages


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAdvantages:
    """The advantages of a batch.

    Attributes:
        columns: to be joined to the rows: ``advantages`` [B], ``turn_advantages`` (ragged, one for each turn), or
            ``rewards`` [B] where the workers make advantages of them; and :attr:`Advantages.own_columns`.
        by_token: how the workers make advantages of tokens; None where ``columns`` has the advantages.
    """

    columns: DataProto
    by_token: TokenAdvantages | None = None


@dataclass(slots=True, kw_only=True)
class Advantages:
    """Computes the advantages of a batch's groups.

    ========================  ============================  ==================================================
    the estimator needs       advantages are computed       joined to the rows
    ========================  ============================  ==================================================
    rewards, groups, lengths  here, one for a row           ``advantages`` [B]
    ``greedy_rewards``,       here, one for a row           ``advantages`` [B]
    ``divergences``
    ``turn_...``; or any of   here, one for a turn          ``turn_advantages``, one for each turn of a row
    rows with ``credit``
    ``token_rewards``,        where the rows are trained    ``rewards`` [B], and :class:`TokenAdvantages` beside
    ``values``                                              the batch
    ========================  ============================  ==================================================

    Attributes:
        credit: which turns the advantages of rows are given to (:mod:`asyncrl.algorithms.credit`).
        by_turns: the environment's rewards count, each for its turn; else one score for the whole row.
        kl_controller: coefficient of the KL penalty in the reward (arXiv:2203.02155 eq. 2); None without one. Replaced
            by its successor after every step.
        gae_lambda: of the critic's returns.
        kl_estimator: of the penalty, where it is subtracted from the rewards of tokens.
    """

    estimator: AdvantageEstimator
    credit: Credit = "outcome"
    by_turns: bool = True
    kl_controller: KLController | None = None
    gae_lambda: float = 1.0
    kl_estimator: KLEstimator = "k1"

    @property
    def needs_baseline(self) -> bool:
        """Whether every prompt needs a greedy answer to compare with."""
        return "greedy_rewards" in self.estimator.needs

    @property
    def needs_divergences(self) -> bool:
        """Whether the KL of each row from the reference is needed."""
        return self.kl_controller is not None or "divergences" in self.estimator.needs

    @property
    def row_columns(self) -> tuple[str, ...]:
        """Columns of the rows that an update reads for its advantages."""
        level = self.estimator.level
        if level == "row" and self.credit == "outcome":
            return ()
        if level in ("row", "turn"):
            return ("turns",)
        turns = ("turns", "turn_rewards") if self.by_turns else ()
        return (*turns, *(["values"] if "values" in self.estimator.needs else []))

    @property
    def own_columns(self) -> tuple[str, str]:
        """Columns of rows and advantages alike: where they are joined, each row must find its own group and reward."""
        return "group_id", "rewards" if self.by_turns else "scores"

    @property
    def kl_coef(self) -> float | None:
        """The coefficient of the KL penalty now; None without a penalty."""
        return self.kl_controller.coefficient if self.kl_controller is not None else None

    @property
    def kl_start(self) -> float | None:
        """The coefficient that a controlled one began at; None without a controlled one."""
        return self.kl_controller.start if isinstance(self.kl_controller, AdaptiveKL) else None

    def of(self, groups: Sequence[Group]) -> BatchAdvantages:
        """Compute the advantages of these groups' rows, in this order.

        Raises:
            InvalidDataError: a group lacks its greedy reward, its divergences or the rewards of its turns.
        """
        summaries = [group.known for group in groups]
        rewards = [reward for summary in summaries for reward in summary.rewards]
        group_ids = torch.tensor([summary.group_id for summary in summaries for _ in summary.rewards])
        earned = torch.tensor(rewards, dtype=torch.float32)
        own = dict(zip(self.own_columns, (group_ids, earned), strict=True))
        if self.estimator.level == "token":
            return BatchAdvantages(
                columns=DataProto.from_dict(tensors={"rewards": earned, **own}),
                by_token=TokenAdvantages(
                    estimator=self.estimator.part,
                    options=dict(self.estimator.options),
                    by_turns=self.by_turns,
                    gae_lambda=self.gae_lambda,
                    kl_coef=self.kl_coef or 0.0,
                    kl_estimator=self.kl_estimator,
                ),
            )
        if self.kl_controller is not None:
            rewards = penalised_rewards(
                torch.tensor(rewards), _divergences(groups), coefficient=self.kl_controller.coefficient
            ).tolist()
        if self.credit != "outcome":
            by_turn = ragged_from_list(self._credited(summaries, rewards))
            return BatchAdvantages(columns=DataProto.from_dict(tensors={"turn_advantages": by_turn, **own}))
        columns = {
            "rewards": torch.tensor(rewards, dtype=torch.float32),
            "groups": group_ids,
            "lengths": torch.tensor([length for summary in summaries for length in summary.lengths]),
        }
        if self.needs_baseline:
            columns["greedy_rewards"] = _greedy_rewards(groups)
        if "divergences" in self.estimator.needs:
            columns["divergences"] = _divergences(groups)
        if self.estimator.level == "row":
            return BatchAdvantages(columns=DataProto.from_dict(tensors={"advantages": self.estimator(columns), **own}))
        turns = _turns(groups, by_turns=self.by_turns)
        advantages = self.estimator(columns | turns)
        counts = torch.bincount(turns["turn_rows"], minlength=len(rewards)).tolist()
        by_turn = ragged_from_list(list(advantages.split(counts)))
        return BatchAdvantages(columns=DataProto.from_dict(tensors={"turn_advantages": by_turn, **own}))

    def _credited(self, summaries: Sequence[GroupSummary], rewards: Sequence[float]) -> list[torch.Tensor]:
        """Return the advantages of the turns of each row."""
        assert self.credit != "outcome"
        earned: list[list[Earned]] = []
        group_ids: list[int] = []
        for summary in summaries:
            rows = earned_in_group(self.credit, summary, rewards=rewards[len(earned) :], by_turns=self.by_turns)
            earned += rows
            group_ids += [summary.group_id] * sum(map(len, rows))
        compared = torch.tensor([each.reward for row in earned for each in row], dtype=torch.float32)
        advantages = iter(self.estimator({"rewards": compared, "groups": torch.tensor(group_ids)}).tolist())
        found: list[torch.Tensor] = []
        for units in earned:
            sums = torch.zeros(1 + max((turn for each in units for turn in each.turns), default=-1))
            counts = torch.zeros_like(sums)
            for each in units:
                sums[list(each.turns)] += next(advantages)
                counts[list(each.turns)] += 1
            found.append(sums / counts)
        return found

    def check_order(self, groups: Sequence[Group], computed: BatchAdvantages) -> None:
        """Check that rows have the same advantages, up to rounding, if their groups come in the opposite order.

        Only advantages of rows are checked.

        Raises:
            InvariantError: they have not.
        """
        if self.estimator.level != "row" or self.credit != "outcome" or computed.columns.batch is None:
            return
        backwards = self.of(groups[::-1]).columns.batch
        assert backwards is not None
        parts = backwards["advantages"].split([group.known.rows for group in groups[::-1]])
        advantages, again = computed.columns.batch["advantages"], torch.cat(parts[::-1])
        off = (advantages - again).abs()
        if bool((off > _ORDER_TOLERANCE * (advantages.abs().max() + 0.2)).any()):
            row = int(off.argmax())
            raise broken(
                "the advantage of a row depends on the batch and not on the order of its groups",
                f"row {row} of {len(off)} has {advantages[row]:.3g}, and {again[row]:.3g} in the opposite order",
            )

    def finish_step(self, groups: Sequence[Group]) -> dict[str, float]:
        """Update the KL controller after a step on these groups; return its metrics.

        ``greedy_reward`` is the mean reward of the baselines, ``divergence`` and ``reward_kl`` the mean KL from the
        reference in nats per token, ``reward_kl_coefficient`` the coefficient that the penalty had.
        """
        metrics: dict[str, float] = {}
        if self.needs_baseline:
            metrics["greedy_reward"] = float(_greedy_rewards(groups).mean())
        if self.needs_divergences:
            tokens = sum(group.known.tokens for group in groups)
            divergence = sum(sum(group.divergences or ()) for group in groups) / max(tokens, 1)
            if "divergences" in self.estimator.needs:
                metrics["divergence"] = divergence
            if self.kl_controller is not None:
                metrics |= {"reward_kl": divergence, "reward_kl_coefficient": self.kl_controller.coefficient}
                rows = sum(group.known.rows for group in groups)
                self.kl_controller = self.kl_controller.updated(divergence, rows=rows)
        return metrics


def _divergences(groups: Sequence[Group]) -> torch.Tensor:
    for group in groups:
        if len(group.divergences or ()) != group.known.rows:
            raise InvalidDataError(f"group {group.group_id} has no divergence for each of its rows")
    return torch.tensor([each for group in groups for each in group.divergences or ()])


def _greedy_rewards(groups: Sequence[Group]) -> torch.Tensor:
    for group in groups:
        if group.baseline_reward is None:
            raise InvalidDataError(f"group {group.group_id} has no reward of a greedy answer to its prompt")
    return torch.tensor([cast("float", group.baseline_reward) for group in groups for _ in group.known.rewards])


def _turns(groups: Sequence[Group], *, by_turns: bool) -> dict[str, torch.Tensor]:
    """Return the turns of all rows, [K] each; what no turn earned, or all without ``by_turns``, is at the last ones."""
    rewards: list[float] = []
    rows: list[int] = []
    anchors: list[int] = []
    parents: list[int] = []
    row = 0
    for group in groups:
        summary = group.known
        if not summary.rows == len(summary.turn_rewards) == len(summary.turn_anchors):
            raise InvalidDataError(f"group {summary.group_id} lacks the turns of its rows")
        trees = summary.turn_parents or ((),) * summary.rows
        for reward, earned, states, tree in zip(
            summary.rewards, summary.turn_rewards, summary.turn_anchors, trees, strict=True
        ):
            by_turn = [*earned] if by_turns else [0.0] * len(earned)
            before = tree or tuple(range(-1, len(earned) - 1))
            rest = reward - sum(by_turn)  # what no single turn earned: all of a reward model's score
            for last in {*range(len(earned))}.difference(before):
                by_turn[last] += rest
            parents += [turn + len(rewards) if turn >= 0 else turn for turn in before]
            rewards += by_turn
            rows += [row] * len(earned)
            anchors += states
            row += 1
    return {
        "turn_rewards": torch.tensor(rewards, dtype=torch.float32),
        "turn_rows": torch.tensor(rows, dtype=torch.int64),
        "turn_anchors": torch.tensor(anchors, dtype=torch.int64),
        "turn_parents": torch.tensor(parents, dtype=torch.int64),
    }


# ------------------------------------------------------------------------------------------------------------- the step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One training step.

    Attributes:
        step: its number, from 1; also the version of the weights it made.
        trainer_metrics: of the trainer, the critic (``critic_...``) and the KL penalty.
        certificate: staleness of the batch's tokens, and what was masked and dropped.
        reused: the same of those groups in it that an earlier step had trained on.
        rewards: of all rows, group by group; ``lengths`` are their sampled tokens.
        rows: of each group.
        reward_parts: mean of each part of the rewards.
        groups_ready: groups in the buffer that could be trained on, after the step.
        groups_pending: groups admitted whose rows or columns were not finished.
        checks: of rewards and weights, since the step before (:meth:`asyncrl.trainer.journal.Journal.take_checks`).
    """

    step: int
    trainer_metrics: Mapping[str, float]
    certificate: Certificate
    reused: Certificate
    rewards: Sequence[float]
    lengths: Sequence[int]
    rows: Sequence[int]
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    groups_ready: int = 0
    groups_pending: int = 0
    checks: Mapping[str, float] = field(default_factory=dict)

    @property
    def reward_mean(self) -> float:
        return sum(self.rewards) / len(self.rewards)

    @property
    def tokens_trained(self) -> int:
        """Tokens the trainer counted in the loss."""
        return int(self.trainer_metrics["tokens_trained"])

    def metrics(self) -> dict[str, float]:
        """Return everything that is logged of a step, by name: the one place for a metric of the driver."""
        return {
            "reward_mean": self.reward_mean,
            "reward_std": statistics.pstdev(self.rewards),
            "length_mean": sum(self.lengths) / len(self.lengths),
            **self.certificate.as_metrics(),
            "groups_ready": self.groups_ready,
            "groups_pending": self.groups_pending,
            "groups_without_signal": self._groups_without_signal(),
            **self.checks,
            **{f"reward/{name}": value for name, value in self.reward_parts.items()},
            **{f"train/{name}": value for name, value in self.trainer_metrics.items()},
        }

    def _groups_without_signal(self) -> float:
        """Return the share of groups whose rows all got the same reward: their advantages are 0."""
        rewards = iter(self.rewards)
        return sum(len(set(islice(rewards, rows))) == 1 for rows in self.rows) / max(len(self.rows), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """Trains steps on a trainer's worker group, and on a critic's (None without one) beside it.

    Attributes:
        policy: what happens to tokens past the staleness bound, ``max_staleness`` in versions.
        optimizer_steps: optimizer steps of one update.
        has_reference: whether rows carry ``reference_log_probs``.
        max_mismatch_kl: k3 KL in nats per token by which engine and trainer may differ on the first step; None checks
            nothing.
    """

    trainer: TrainerGroup
    advantages: Advantages
    policy: StalenessPolicy
    max_staleness: int
    optimizer_steps: int = 1
    has_reference: bool = False
    critic: CriticGroup | None = None
    max_mismatch_kl: float | None = None

    def oldest_version(self, step: int) -> int | None:
        """Return the lowest version whose tokens ``step`` trains on; None if every token may be."""
        return self.policy.oldest_version(step - 1, max_staleness=self.max_staleness)

    async def learn(
        self, step: int, groups: Sequence[Group], *, first: bool = False, drops: Drops = _NO_DROPS
    ) -> StepRecord:
        """Train ``step`` (from 1) on ``groups``, all sampled, in this order.

        ``first`` is True for the first step of the run, whose outcome is known if its samples are fresh. ``drops`` were
        dropped since the step before and go into the certificate.
        """
        summaries = [group.known for group in groups]
        oldest = self.oldest_version(step)
        certificate = certify(
            summaries,
            trainer_version=step - 1,
            oldest_version=oldest,
            dropped_rows=drops.rows,
            dropped_tokens=drops.tokens,
        )
        advantages = self.advantages.of(groups)
        self.advantages.check_order(groups, advantages)
        columns = list(dict.fromkeys([*TRAINED_COLUMNS, *self.advantages.own_columns, *self.advantages.row_columns]))
        columns += ["reference_log_probs"] if self.has_reference else []
        batch = DataProtoFuture.concat(
            [group.sampled_rows.select(columns, non_tensor_batch_keys=[], meta_info_keys=[]) for group in groups]
        )
        batch = batch.union(advantages.columns)
        try:
            metrics = await self._update(batch, oldest if certificate.masked_tokens else None, advantages.by_token)
        except SchemaError as error:
            group, reward = self.advantages.own_columns
            error.add_note(f"a row is trained with the advantage of its own {group} and {reward}: both must be equal")
            raise
        check_certificate(certificate, metrics)
        # After a resume there may be rows that went on over new weights, with keys and values of the old ones.
        fresh = certificate.maximum == 0 and not certificate.masked_tokens
        if first and self.max_mismatch_kl is not None and fresh:
            check_first_step(metrics, limit=self.max_mismatch_kl, one_step=self.optimizer_steps == 1)
        return StepRecord(
            step=step,
            trainer_metrics=metrics | self.advantages.finish_step(groups),
            certificate=certificate,
            reused=certify(
                [group.known for group in groups if group.uses], trainer_version=step - 1, oldest_version=oldest
            ),
            rewards=tuple(reward for summary in summaries for reward in summary.rewards),
            lengths=tuple(length for summary in summaries for length in summary.lengths),
            rows=tuple(summary.rows for summary in summaries),
        )

    async def _update(
        self, batch: DataProtoFuture, oldest: int | None, by_token: TokenAdvantages | None
    ) -> dict[str, float]:
        """Update policy and critic on the same batch at the same time; the critic's metrics begin with ``critic_``."""
        if self.critic is None:
            (metrics, *_ranks) = await self.trainer.update(batch, oldest, by_token)
            return dict(metrics)
        if by_token is None:
            estimator = self.advantages.estimator.name
            raise InvalidDataError(f"advantage {estimator!r} gives a critic nothing to learn from")
        (metrics, *_ranks), (of_critic, *_more) = await asyncio.gather(
            self.trainer.update(batch, oldest, by_token), self.critic.update(batch, by_token, oldest)
        )
        return {**metrics, **{f"critic_{name}": value for name, value in of_critic.items()}}


def check_first_step(metrics: Mapping[str, float], *, limit: float, one_step: bool) -> None:
    """Check that trainer and engine compute the same on the first step, where the outcome is known.

    Before the first update both hold the same weights: the log-probs that the engine reported are those the trainer
    computes, up to rounding, and the ratio is 1. If they are not, one of the two computes something else (another
    temperature, another template, a token shifted, weights that did not arrive), and no later metric shows it as
    clearly. Only tokens that the current weights sampled are compared.

    ``limit`` bounds the mean k3 estimate of KL(engine || trainer), in nats per token. ``one_step`` is True if the
    update was one optimizer step, so that no weight had changed when the ratio was taken.

    Raises:
        EngineError: they differ; the message lists what to check.
    """
    mismatch = metrics.get("behaviour_kl_staleness_0")
    if mismatch is not None and not mismatch <= limit:
        raise EngineError(
            f"trainer and rollout engine disagree about tokens of the very same weights: k3 KL {mismatch:.3g} nats per "
            f"token, at most {limit:g} can be rounding. Check rollout.temperature, top_p and top_k, the engine's dtype "
            "and quantisation, and the chat template; algorithm.max_mismatch_kl sets another limit"
        )
    drift = metrics.get("policy_kl", 0.0)
    if one_step and not abs(drift) <= limit:
        raise EngineError(
            f"the first optimizer step did not start from the proximal weights: KL {drift:.3g} nats per token instead "
            "of 0"
        )
