"""Whole configuration files, of a run and of ``asyncrl train-reward-model``; one error reports all problems of one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeAlias

from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from asyncrl.config.problem import Problem, dotted, problems_of, raise_problems
from asyncrl.config.sections import (
    DEEPEST_TABLE,
    AlgorithmConfig,
    BufferConfig,
    CheckpointConfig,
    ClusterConfig,
    CriticConfig,
    EnvConfig,
    EvalConfig,
    FilePath,
    Files,
    LedgerConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    Section,
    SftConfig,
    SimulationConfig,
    StalenessConfig,
    TelemetryConfig,
    TrainerConfig,
    TrainingRanksConfig,
    WeightsConfig,
    is_set_by_default,
)
from asyncrl.config.toml import nested_deeper, table_to_toml, value_to_toml
from asyncrl.errors import ConfigError
from asyncrl.interfaces import LEAST_TEMPERATURE
from asyncrl.staleness import StalenessPolicy, staleness_policy
from asyncrl.storage import holds_secret

if TYPE_CHECKING:
    from asyncrl.algorithms.soundness import ConfigIssue

RunName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._\-]*$", max_length=80)]


class Document(Section):
    """A configuration file, and the tables that all of them have."""

    name: RunName
    """Name of the run and of its folder."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Seed of everything random: weights, tasks, sampling, order."""
    runs: FilePath = Path("runs")
    """Folder in which the run creates its own."""
    cluster: ClusterConfig = ClusterConfig()
    """Where the workers run."""
    model: ModelConfig
    """The model to train: the policy, or that from which a reward model starts (its head is replaced)."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """What a run reports while it goes on."""

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any], *, origin: str = "") -> Self:
        """Return the configuration of nested tables, as TOML gives them.

        Raises:
            ConfigError: with every problem found; ``origin`` (a file) is named in front.
        """
        deep = [key for key, value in data.items() if nested_deeper(value, DEEPEST_TABLE)]
        if deep:  # first of all: a message about such a value could not be written
            rule = f"must be nested at most {DEEPEST_TABLE} levels deep"
            raise_problems([Problem(dotted([key]), rule) for key in deep], origin=origin)
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            problems = problems_of(error, cls)
        return raise_problems(problems, origin=origin)  # outside: pydantic's error says no more

    def changes(self, before: Self) -> list[str]:
        """Return what differs from another configuration: ``trainer.lr = 0.1 (was 0.2)``."""
        new, old = (_flat(each.model_dump(mode="python")) for each in (self, before))
        return [
            f"{key} = {_shown(new.get(key))} (was {_shown(old.get(key))})"
            for key in sorted({*new, *old})
            if new.get(key) != old.get(key)
        ]

    def to_toml(self) -> str:
        """Return the resolved configuration with every value, also the defaults. Reading it back gives an equal one."""
        tables = self.model_dump(mode="python", exclude_none=True)
        for name, section in tables.items():
            if isinstance(section, dict):
                values = getattr(self, name)
                for key, field in type(values).model_fields.items() if isinstance(values, Section) else ():
                    if getattr(values, key) is None and is_set_by_default(field):
                        section[key] = "none"
                for key in [key for key, value in section.items() if value == {}]:
                    del section[key]
        text = table_to_toml(tables)
        for name in tables:  # TOML has no null: what is absent is a comment
            values = getattr(self, name)
            absent = (
                [key for key in type(values).model_fields if getattr(values, key) is None]
                if isinstance(values, Section)
                else []
            )
            lines = "".join(f"# {key} = none\n" for key in absent if key not in tables[name])
            text = text.replace(f"\n[{name}]\n", f"\n[{name}]\n{lines}", 1)
        return text

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        problems = [replace(problem, value=_value_at(self, problem.path)) for problem in self._conflicts()]
        problems += [
            Problem(key, "a URL must hold no user, password or signature", remedy="leave them to the environment")
            for key, value in _flat(self.model_dump(mode="python")).items()
            if holds_secret(value)
        ]
        if problems:
            raise PydanticCustomError("conflicts", "values do not fit together", {"problems": problems})
        return self

    def _conflicts(self) -> Iterator[Problem]:
        """Yield combinations of values that exclude each other; the values are filled in from the configuration."""
        yield from ()


class Config(Document):
    """A run. Immutable; made from a file with :func:`asyncrl.config.load_config` or from a mapping.

    >>> config = Config.from_mapping(
    ...     {"name": "first", "steps": 10, "model": {"source": "scratch"}, "env": {"name": "calculator"}}
    ... )
    >>> config.trainer.group_size, config.capacity_groups
    (8, 64)
    """

    steps: Annotated[int, Field(ge=0, le=10_000_000)]
    """Training steps (batches consumed); 0 only warms up and evaluates."""
    max_staleness: Annotated[int, Field(ge=0, le=10_000)] = 1
    """Most versions a trained token may be behind: 0 is synchronous, 1 is one step off, more is fully asynchronous."""
    env: EnvConfig
    """The environment in which tasks are solved."""
    sft: SftConfig = SftConfig()
    """Supervised warm start."""
    rollout: RolloutConfig = RolloutConfig()
    """The engines that generate."""
    trainer: TrainerConfig = TrainerConfig()
    """The ranks that update the policy."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantage, loss, correction, and the terms beside them."""
    critic: CriticConfig = CriticConfig()
    """The value model, for advantages that need `values`."""
    reward: RewardConfig = RewardConfig()
    """Where rewards come from."""
    staleness: StalenessConfig = StalenessConfig()
    """How rollouts are treated that take longer than `max_staleness` allows."""
    buffer: BufferConfig = BufferConfig()
    """Where finished groups wait to be trained on."""
    ledger: LedgerConfig = LedgerConfig()
    """The record from which a killed run is recovered."""
    weights: WeightsConfig = WeightsConfig()
    """How new weights reach the engines."""
    eval: EvalConfig = EvalConfig()
    """The held-out score."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints from which a run resumes."""
    simulation: SimulationConfig = SimulationConfig()
    """Durations for `asyncrl simulate` and `asyncrl plan`."""

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
        text = super().to_toml()
        if self.buffer.capacity_groups is None:
            derived = f"# capacity_groups = {self.capacity_groups}, derived from max_staleness and groups_per_step\n"
            text = text.replace("[buffer]\n", "[buffer]\n" + derived, 1)
        return text

    def _conflicts(self) -> Iterator[Problem]:
        trainer, rollout, critic, algorithm = self.trainer, self.rollout, self.critic, self.algorithm
        yield from self._cluster_conflicts()
        yield from _model_conflicts(self.model)
        if self.steps > 0 and rollout.temperature == 0:
            yield Problem(
                "rollout.temperature",
                "greedy rollouts of one prompt are all the same and cannot be trained on",
                remedy="use a temperature above 0, or steps = 0",
            )
        if 0 < rollout.temperature < LEAST_TEMPERATURE:
            yield Problem(
                "rollout.temperature",
                f"must be 0 (greedy) or at least {LEAST_TEMPERATURE}: below, log-probs overflow",
                remedy="use a temperature near 1",
            )
        for name, num_mini_batches in (("trainer", trainer.num_mini_batches), ("critic", critic.num_mini_batches)):
            if trainer.groups_per_step % num_mini_batches:
                yield Problem(
                    f"{name}.num_mini_batches",
                    f"does not divide groups_per_step = {trainer.groups_per_step}: "
                    "optimizer steps would differ in size",
                    remedy=f"use a divisor of {trainer.groups_per_step}",
                )
        if rollout.max_new_tokens >= rollout.max_seq_len:
            yield Problem(
                "rollout.max_new_tokens",
                f"one turn may be as long as a whole trajectory with its prompt (max_seq_len = {rollout.max_seq_len})",
                remedy="lower it, or raise rollout.max_seq_len",
            )
        yield from _microbatch_conflicts(trainer.max_tokens_per_microbatch, rollout.max_seq_len, "trainer.", "rollout.")
        capacity = self.buffer.capacity_groups
        if capacity is not None and capacity < trainer.groups_per_step:
            yield Problem(
                "buffer.capacity_groups",
                f"a step takes {trainer.groups_per_step} groups at once and would wait for ever",
                remedy=f"use at least {trainer.groups_per_step}, or leave it out",
            )
        if algorithm.target_kl is not None and not algorithm.kl_in_reward:
            yield Problem(
                "algorithm.target_kl",
                "steers the coefficient of a KL penalty in the reward, and the configuration has no such penalty",
                remedy='use kl_placement = "reward" with a kl_coef above 0, or leave it out',
            )
        if self.reward.source == "environment" and self.reward.options:
            yield Problem(
                "reward.options",
                "the environment's own rewards take no options",
                remedy="put them under env.options, or name a reward.source",
            )
        for name, warmup_steps, steps in (
            ("sft", self.sft.warmup_steps, self.sft.steps),
            ("trainer", trainer.warmup_steps, self.steps * trainer.num_mini_batches * trainer.epochs),
            ("critic", critic.warmup_steps, self.steps * critic.num_mini_batches * critic.epochs),
        ):
            if steps and warmup_steps > steps:
                yield Problem(
                    f"{name}.warmup_steps",
                    f"the rate would never reach its peak in {steps} optimizer steps",
                    remedy=f"use at most {steps}",
                )

        if self.eval.tasks and self.eval.every and self.eval.replicas >= rollout.replicas:
            yield Problem(
                "eval.replicas",
                f"an evaluation would leave none of rollout.replicas = {rollout.replicas} to training",
                remedy=f"use rollout.replicas = {self.eval.replicas + 1} or more, or 0 to evaluate on all of them",
            )

    def _cluster_conflicts(self) -> Iterator[Problem]:
        cluster, trainer, rollout = self.cluster, self.trainer, self.rollout
        sizes = {"trainer": trainer.world_size, "critic": self.critic.world_size, "reference": 1}
        shared = "rollout" in cluster.colocate
        if shared and "trainer" not in cluster.colocate:
            yield Problem(
                "cluster.colocate",
                "rollout takes turns with the trainer, which is not named",
                remedy='use ["trainer", "rollout"], or leave rollout out',
            )
        if shared and rollout.num_gpus != trainer.num_gpus:
            yield Problem(
                "cluster.colocate",
                f"a replica shares the devices of one rank: rollout.num_gpus = {rollout.num_gpus:g}, "
                f"trainer.num_gpus = {trainer.num_gpus:g}",
                remedy="give both the same number, or leave rollout out",
            )
        processes = [role for role in cluster.colocate if role in sizes]
        if not shared and len({sizes[role] for role in processes}) > 1:
            yield Problem(
                "cluster.colocate",
                "roles that share processes must have equally many ranks: "
                + ", ".join(f"{role} has {sizes[role]}" for role in processes),
                remedy="give them the same world_size (a reference policy has one rank), or leave one out",
            )
        yield from _local_conflicts(cluster, trainer=trainer.world_size, critic=self.critic.world_size)
        yield from _mesh_conflicts(trainer=trainer, critic=self.critic)
        if cluster.num_cpus is None or cluster.backend == "local":
            return
        if cluster.address is not None:
            yield Problem(
                "cluster.num_cpus",
                "a cluster that is joined has the CPUs it has",
                remedy="remove it, or remove cluster.address",
            )
            return
        needed = rollout.replicas * rollout.num_cpus + trainer.world_size * trainer.num_cpus
        if shared:
            needed = max(rollout.replicas, trainer.world_size) * max(rollout.num_cpus, trainer.num_cpus)
        if needed > cluster.num_cpus:
            yield Problem(
                "cluster.num_cpus",
                f"rollout ({rollout.replicas} x {rollout.num_cpus:g}) and trainer ({trainer.world_size} x "
                f"{trainer.num_cpus:g}) need {needed:g} CPUs",
                remedy=f"use at least {needed:g}, or fewer replicas, ranks or CPUs for each",
            )


class PreferenceConfig(Section):
    """The comparisons that a reward model is trained on."""

    files: Files
    """Preferences, in any form that `docs/data.md` names: `prompt`, `chosen`, `rejected`, and `margin` where one is
    better by more than another."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Columns with other names, as in `{chosen = "better"}`."""
    held_out_share: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the pairs that are held out to measure accuracy, drawn by the seed."""


class RewardTrainingConfig(Document):
    """A reward model from comparisons (Bradley-Terry)."""

    epochs: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Passes over the pairs; reward models overfit soon."""
    batch_size: Annotated[int, Field(ge=1, le=1_000_000)] = 32
    """Pairs of an optimizer step."""
    center_rewards_coefficient: Annotated[float, Field(ge=0, le=100)] = 0.01
    """Weight of the squared sum of a pair's scores, which comparisons alone leave free (arXiv:2312.09244)."""
    max_seq_len: Annotated[int, Field(ge=2, le=10_000_000)] = 4096
    """Tokens of the longest row that is trained on; pairs with a longer one are left out and counted."""
    max_tokens_per_microbatch: Annotated[int, Field(ge=2, le=100_000_000)] = 8192
    """Tokens one forward and backward pass holds on a rank."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    preferences: PreferenceConfig
    """The comparisons it is trained on."""
    trainer: TrainingRanksConfig = TrainingRanksConfig()
    """The ranks that train it."""

    def _conflicts(self) -> Iterator[Problem]:
        yield from _model_conflicts(self.model)
        yield from _local_conflicts(self.cluster, trainer=self.trainer.world_size)
        yield from _mesh_conflicts(trainer=self.trainer)
        yield from _microbatch_conflicts(self.max_tokens_per_microbatch, self.max_seq_len)


def _model_conflicts(model: ModelConfig) -> Iterator[Problem]:
    if (model.path is None) == (model.source is None):
        both = model.path is not None
        yield Problem(
            "model.source" if both else "model",
            "model.path and model.source exclude each other" if both else "needs one of path and source",
            remedy='give one: path = "some/folder", or source = "scratch" (remove one with --model.source none)',
        )


def _local_conflicts(cluster: ClusterConfig, **world_sizes: int) -> Iterator[Problem]:
    if cluster.backend != "local":
        return
    for name, world_size in world_sizes.items():
        if world_size > 1:
            yield Problem(
                f"{name}.world_size",
                "ranks are processes, and the local backend has one process",
                remedy='use 1, or cluster.backend = "ray"',
            )
    for key, value in (("address", cluster.address), ("num_cpus", cluster.num_cpus)):
        if value is not None:
            yield Problem(
                f"cluster.{key}",
                "is an option of Ray, and the backend is local",
                remedy='remove it, or use cluster.backend = "ray"',
            )


def _mesh_conflicts(**roles: TrainingRanksConfig) -> Iterator[Problem]:
    for name, role in roles.items():
        try:
            role.mesh_shape()
        except ConfigError as error:
            yield Problem(f"{name}.{error.path}", str(error), remedy=error.remedy)


def _microbatch_conflicts(tokens: int, max_seq_len: int, prefix: str = "", longest: str = "") -> Iterator[Problem]:
    if tokens < max_seq_len:
        yield Problem(
            f"{prefix}max_tokens_per_microbatch",
            f"the longest row ({longest}max_seq_len = {max_seq_len}) would not fit",
            remedy=f"use at least {max_seq_len}, or lower {longest}max_seq_len",
        )


def check_algorithm(config: Config, *, samples: bool = True) -> tuple[ConfigIssue, ...]:
    """Check a run's algorithm in its setting, importing its parts; return the issues that `allow_unsound` overrides.

    ``samples`` is False where recorded batches are trained on again, from which the buffer drops nothing.

    Raises:
        ConfigError: a part cannot be made, or combinations are refused, each with its reason.
    """
    if config.steps == 0:
        return ()
    from asyncrl.algorithms.soundness import Setting, config_issues

    algorithm, trainer = config.algorithm, config.trainer
    setting = Setting(
        # Where old tokens are corrected instead of left out, none of a run can be older than its steps.
        max_staleness=config.steps if config.staleness_policy.too_old == "correct" else config.max_staleness,
        optimizer_steps=trainer.num_mini_batches * trainer.epochs,
        group_size=trainer.group_size,
        max_uses=config.buffer.options.get("max_uses", 1),
        kl_in_reward=algorithm.kl_in_reward,
        credit=algorithm.credit,
        drops_equal_rewards=samples and config.buffer.options.get("zero_variance") == "drop",
    )
    objective, estimator = algorithm.objective(longest=config.rollout.max_seq_len), algorithm.estimator()
    issues = tuple(config_issues(objective, estimator, setting))
    refused = [issue for issue in issues if not (issue.overridable and algorithm.allow_unsound)]
    if refused:
        override = "; algorithm.allow_unsound = true runs it all the same"
        raise_problems(
            [
                Problem(
                    issue.key, issue.reason, _value_at(config, issue.key), issue.remedy + override * issue.overridable
                )
                for issue in refused
            ]
        )
    return issues


def _value_at(config: Document, key: str) -> str:
    """Return the value at a dotted key as the file would write it; empty for a table and for an option's default."""
    value: Any = config
    for name in key.split("."):
        if isinstance(value, dict) and name not in value:
            return ""
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return "" if isinstance(value, Section) or value == {} else value_to_toml(value)


def _flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested tables by their dotted keys. Any: values of a configuration."""
    values: dict[str, Any] = {}
    for key, value in tables.items():
        values |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return values


def _shown(value: Any) -> str:
    return "none" if value is None else value_to_toml(value)
