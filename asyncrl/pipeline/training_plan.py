"""The numbers of a run, as the loop needs them, and what it tells of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from asyncrl.algorithms import AdvantageEstimator, KLEstimator
    from asyncrl.pipeline.certificate import Certificate

__all__ = ["StepRecord", "TrainingPlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """The numbers of a run.

    Attributes:
        steps: training steps in all, those before a resume included.
        groups_per_step: groups (prompts) in a batch.
        group_size: rollouts of each prompt (G).
        advantage: from rewards, groups and lengths to advantages.
        optimizer_steps: of one update.
        mismatch_limit: nats per token by which engine and trainer may differ on the first step; None asks nothing.
        seed: every prompt's, rollout's and turn's seed derives from it.
        eval_tasks: held-out tasks of an evaluation.
        eval_every: steps between evaluations beside training; 0 for none.
        eval_reward: whose rewards an evaluation counts; ``configured`` is the reward stage, where there is one.
        success_reward: reward from which an episode counts as a success.
        checkpoint_every: steps between checkpoints; 0 for none, None for :class:`CheckpointPace` to say.
        sample_trajectories: groups per step whose first trajectory is written down as text.
        trace: lambda of a critic's returns.
        kl_estimator: of the penalty in the reward, where it is taken off the rewards of tokens.
    """

    steps: int
    groups_per_step: int
    group_size: int
    advantage: AdvantageEstimator
    seed: int
    eval_tasks: int
    optimizer_steps: int = 1
    mismatch_limit: float | None = None
    eval_every: int = 0
    eval_reward: Literal["configured", "environment"] = "configured"
    success_reward: float = 1.0
    checkpoint_every: int | None = 0
    sample_trajectories: int = 1
    trace: float = 1.0
    kl_estimator: KLEstimator = "k1"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What is known after a training step."""

    step: int
    weight_version: int
    metrics: dict[str, float]
    certificate: Certificate
    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    buffer_ready: int
    buffer_pending: int
    reward_parts: dict[str, float] = field(default_factory=dict)
