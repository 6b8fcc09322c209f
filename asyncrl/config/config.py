"""The whole configuration of a run, checked across its sections."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from asyncrl.interfaces import LEAST_TEMPERATURE
from asyncrl.pipeline.staleness import StalenessPolicy, staleness_policy

from .algorithm import AlgorithmConfig
from .document import Document, RunName, Seed
from .problem import Problem
from .section import FilePath
from .sections import (
    BufferConfig,
    CheckpointConfig,
    ClusterConfig,
    CriticConfig,
    EnvConfig,
    EvalConfig,
    LedgerConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    SftConfig,
    SimulationConfig,
    StalenessConfig,
    TelemetryConfig,
    TrainerConfig,
    WeightsConfig,
)
from .toml import value_to_toml

__all__ = ["Config"]


class Config(Document):
    """A run. Immutable; made from a file with :func:`asyncrl.config.load_config` or from a mapping.

    Example:
        >>> config = Config.from_mapping(
        ...     {"name": "first", "steps": 10, "model": {"source": "scratch"}, "env": {"name": "calculator"}}
        ... )
        >>> config.trainer.group_size, config.capacity_groups
        (8, 64)
    """

    name: RunName
    """Name of the run and of its folder."""
    seed: Seed = 0
    """Seed of everything random: weights, tasks, sampling."""
    steps: Annotated[int, Field(ge=0, le=10_000_000)]
    """Training steps (batches consumed); 0 only warms up and evaluates."""
    max_staleness: Annotated[int, Field(ge=0, le=10_000)] = 1
    """Most versions a trained token may be behind: 0 is synchronous, 1 is one step off, more is fully asynchronous."""
    runs: FilePath = Path("runs")
    """Folder in which the run makes its own."""
    cluster: ClusterConfig = ClusterConfig()
    """Where the workers run."""
    model: ModelConfig
    """The policy."""
    env: EnvConfig
    """The world the tasks are solved in."""
    sft: SftConfig = SftConfig()
    """Supervised warm start."""
    rollout: RolloutConfig = RolloutConfig()
    """The servers that generate."""
    trainer: TrainerConfig = TrainerConfig()
    """The ranks that update the policy."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """The maths of an update."""
    critic: CriticConfig = CriticConfig()
    """What to expect, where the advantage asks for it."""
    reward: RewardConfig = RewardConfig()
    """Who says how good a trajectory was."""
    staleness: StalenessConfig = StalenessConfig()
    """What becomes of rollouts that take longer than `max_staleness` allows."""
    buffer: BufferConfig = BufferConfig()
    """Where finished groups wait."""
    ledger: LedgerConfig = LedgerConfig()
    """What a killed run finds again."""
    weights: WeightsConfig = WeightsConfig()
    """How new weights reach the servers."""
    eval: EvalConfig = EvalConfig()
    """The held-out score."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What a run can be resumed from."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """What is told about a run."""
    simulation: SimulationConfig = SimulationConfig()
    """Durations for `asyncrl simulate` and `asyncrl plan`."""

    @property
    def rows_per_step(self) -> int:
        """Trajectories one training step consumes."""
        return self.trainer.groups_per_step * self.trainer.group_size

    @property
    def capacity_groups(self) -> int:
        """Groups between admission and use: ``buffer.capacity_groups``, or what the staleness bound allows."""
        if self.buffer.capacity_groups is not None:
            return self.buffer.capacity_groups
        lead = (self.max_staleness + 1) * self.trainer.groups_per_step
        return 2 * lead if self.staleness_policy.overdue else lead

    @property
    def staleness_policy(self) -> StalenessPolicy:
        """``staleness.policy``, or ``wait`` where ``max_staleness`` is 0."""
        return staleness_policy(self.staleness.policy, max_staleness=self.max_staleness)

    def to_toml(self) -> str:
        """As of every document, with what is derived as comments."""
        text = super().to_toml()
        if self.buffer.capacity_groups is None:
            derived = f"# capacity_groups = {self.capacity_groups}, derived from max_staleness and groups_per_step\n"
            text = text.replace("[buffer]\n", "[buffer]\n" + derived, 1)
        return text

    def _conflicts(self) -> Iterator[Problem]:
        yield from self._resource_conflicts()
        trainer, rollout = self.trainer, self.rollout
        if (self.model.path is None) == (self.model.source is None):
            both = self.model.path is not None
            yield Problem(
                "model.source" if both else "model",
                "model.path and model.source exclude each other" if both else "needs one of path and source",
                remedy='give one: path = "some/folder", or source = "scratch" (take one away with --model.source none)',
            )
        if self.steps > 0 and rollout.temperature == 0:
            yield Problem(
                "rollout.temperature",
                "greedy rollouts of one prompt are all the same and cannot be trained on",
                value="0",
                remedy="use a temperature above 0, or steps = 0",
            )
        if 0 < rollout.temperature < LEAST_TEMPERATURE:
            yield Problem(
                "rollout.temperature",
                f"must be 0 (greedy) or at least {LEAST_TEMPERATURE}",
                value=str(rollout.temperature),
                remedy="use a temperature that log-probs can be told of",
            )
        for name, minibatches in (("trainer", trainer.minibatches), ("critic", self.critic.minibatches)):
            if trainer.groups_per_step % minibatches:
                yield Problem(
                    f"{name}.minibatches",
                    f"does not divide groups_per_step = {trainer.groups_per_step}: "
                    "optimizer steps would differ in size",
                    value=str(minibatches),
                    remedy=f"use a divisor of {trainer.groups_per_step}",
                )
        if rollout.max_new_tokens >= rollout.max_tokens:
            yield Problem(
                "rollout.max_new_tokens",
                f"one turn may be as long as a whole trajectory with its prompt (max_tokens = {rollout.max_tokens})",
                value=str(rollout.max_new_tokens),
                remedy="lower it, or raise rollout.max_tokens",
            )
        if trainer.max_tokens_per_microbatch < rollout.max_tokens:
            yield Problem(
                "trainer.max_tokens_per_microbatch",
                f"the longest trajectory (rollout.max_tokens = {rollout.max_tokens}) would not fit",
                value=str(trainer.max_tokens_per_microbatch),
                remedy=f"use at least {rollout.max_tokens}, or lower rollout.max_tokens",
            )
        capacity = self.buffer.capacity_groups
        if capacity is not None and capacity < trainer.groups_per_step:
            yield Problem(
                "buffer.capacity_groups",
                f"a step takes {trainer.groups_per_step} groups at once and would wait for ever",
                value=str(capacity),
                remedy=f"use at least {trainer.groups_per_step}, or leave it out",
            )
        algorithm = self.algorithm
        if algorithm.kl_target is not None and (algorithm.kl_placement == "loss" or not algorithm.kl_coefficient):
            yield Problem(
                "algorithm.kl_target",
                "steers the coefficient of a penalty in the reward, and there is none",
                value=f"{algorithm.kl_target:g}",
                remedy='use kl_placement = "reward" with a kl_coefficient above 0, or leave it out',
            )
        if self.reward.source == "environment" and self.reward.options:
            yield Problem(
                "reward.options",
                "the environment's own rewards take no options",
                remedy="put them under env.options, or name a reward.source",
            )
        for name, warmup_steps, steps in (
            ("sft", self.sft.warmup_steps, self.sft.steps),
            ("trainer", trainer.warmup_steps, self.steps * trainer.minibatches * trainer.epochs),
            ("critic", self.critic.warmup_steps, self.steps * self.critic.minibatches * self.critic.epochs),
        ):
            if steps and warmup_steps > steps:
                yield Problem(
                    f"{name}.warmup_steps",
                    f"the rate would never reach its peak in {steps} optimizer steps",
                    value=str(warmup_steps),
                    remedy=f"use at most {steps}",
                )

    def _resource_conflicts(self) -> Iterator[Problem]:
        cluster, trainer, rollout = self.cluster, self.trainer, self.rollout
        sizes = {"trainer": trainer.world_size, "critic": self.critic.world_size, "reference": 1}
        if len({sizes[role] for role in cluster.colocate}) > 1:
            yield Problem(
                "cluster.colocate",
                "roles that share processes have as many ranks: "
                + ", ".join(f"{role} has {sizes[role]}" for role in cluster.colocate),
                value=value_to_toml(list(cluster.colocate)),
                remedy="give them the same world_size (a reference policy has one rank), or leave one out",
            )
        if cluster.backend == "local":
            for name, world_size in (("trainer", trainer.world_size), ("critic", self.critic.world_size)):
                if world_size > 1:
                    yield Problem(
                        f"{name}.world_size",
                        "ranks are processes, and the local backend has one process",
                        value=str(world_size),
                        remedy='use 1, or cluster.backend = "ray"',
                    )
            for key, value in (("address", cluster.address), ("num_cpus", cluster.num_cpus)):
                if value is not None:
                    yield Problem(
                        f"cluster.{key}",
                        "belongs to Ray, and the backend is local",
                        value=str(value),
                        remedy='take it away, or use cluster.backend = "ray"',
                    )
            return
        if cluster.num_cpus is not None and cluster.address is not None:
            yield Problem(
                "cluster.num_cpus",
                "a cluster that is joined has the CPUs it has",
                value=f"{cluster.num_cpus:g}",
                remedy="take it away, or take cluster.address away",
            )
        elif cluster.num_cpus is not None:
            asked = rollout.replicas * rollout.num_cpus + trainer.world_size * trainer.num_cpus
            if asked > cluster.num_cpus:
                yield Problem(
                    "cluster.num_cpus",
                    f"rollout ({rollout.replicas} x {rollout.num_cpus:g}) and trainer ({trainer.world_size} x "
                    f"{trainer.num_cpus:g}) ask for {asked:g} CPUs",
                    value=f"{cluster.num_cpus:g}",
                    remedy=f"use at least {asked:g}, or fewer replicas, ranks or CPUs for each",
                )
