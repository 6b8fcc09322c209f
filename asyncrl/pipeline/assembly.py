"""From configuration to running parts: the one place where names become worker groups.

Everything made here is closed by :meth:`Assembly.aclose`, in the reverse order, whatever happened in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from inspect import signature
from pathlib import Path
from typing import Any, Literal, TypeAlias

from asyncrl.agents.chat import load_renderer
from asyncrl.algorithms import PolicyObjective, ValueObjective
from asyncrl.config import Config
from asyncrl.errors import ConfigError, InfrastructureError
from asyncrl.interfaces import (
    CountedTasks,
    EnvironmentFactory,
    Ledger,
    PlacedReplayBuffer,
    PromptFitting,
    ReplayBuffer,
    SamplingParams,
)
from asyncrl.ledger import LedgerBase
from asyncrl.parts import load_part, make_part
from asyncrl.pipeline.critic_worker import CriticSpec, CriticWorker
from asyncrl.pipeline.placement import GroupRequest, MakeGroup, group_maker, local_group, together
from asyncrl.pipeline.reward_worker import RewardWorker
from asyncrl.pipeline.trainer_worker import TrainerSpec, TrainerWorker
from asyncrl.rollout.pool import RolloutPool
from asyncrl.rollout.worker import EpisodeLimits, RolloutSpec, RolloutWorker
from asyncrl.single_controller import Restart, WorkerGroup
from asyncrl.weights.transport import TransportSpec

__all__ = [
    "ROLES",
    "Assembly",
    "Role",
    "chat_options",
    "critic_options",
    "fit_prompts",
    "import_once",
    "make_environments",
    "needs_critic",
    "needs_reference",
    "trainer_options",
    "warm_start_options",
]

Role: TypeAlias = Literal["trainer", "rollout", "reward", "reference", "critic", "buffer"]
ROLES: tuple[Role, ...] = ("trainer", "rollout", "reward", "reference", "critic")


_HOST_ENGINE = "remote"  # keeps another engine in a process of its own


def needs_critic(config: Config) -> bool:
    """Whether the advantage asks for values."""
    return config.steps > 0 and "values" in config.algorithm.estimator().needs


def needs_reference(config: Config) -> bool:
    """Whether something asks for the log-probs of a frozen policy."""
    if config.steps == 0:
        return False
    return config.algorithm.kl_coefficient > 0 or "divergences" in config.algorithm.estimator().needs


def trainer_options(config: Config) -> dict[str, Any]:
    """Keyword arguments of the training engine for policy optimisation."""
    trainer = config.trainer
    return {
        "objective": config.algorithm.objective(longest=config.rollout.max_tokens),
        "lr": trainer.lr,
        "schedule": trainer.schedule if config.steps else "constant",  # without a step there is no last one to fall to
        "warmup_steps": trainer.warmup_steps,
        "total_steps": config.steps * trainer.minibatches * trainer.epochs,
        "minibatches": trainer.minibatches,
        "epochs": trainer.epochs,
        "threads": trainer.threads,
        "temperature": config.rollout.temperature,
        **({"lora": trainer.lora.model_dump()} if trainer.lora is not None else {}),
        **_common_options(config),
    }


def critic_options(config: Config) -> dict[str, Any]:
    """Keyword arguments of the critic's engine."""
    critic = config.critic
    return {
        **_common_options(config),
        "objective": ValueObjective(clip=critic.clip),
        "lr": critic.lr,
        "schedule": critic.schedule if config.steps else "constant",
        "warmup_steps": critic.warmup_steps,
        "total_steps": config.steps * critic.minibatches * critic.epochs,
        "minibatches": critic.minibatches,
        "epochs": critic.epochs,
        "threads": critic.threads,
        "weight_decay": critic.weight_decay,
        "max_grad_norm": critic.max_grad_norm,
    }


def warm_start_options(config: Config) -> dict[str, Any]:
    """Keyword arguments of the training engine for the supervised warm start."""
    return {
        "objective": PolicyObjective(),
        "lr": config.sft.lr,
        "schedule": config.sft.schedule,
        "warmup_steps": config.sft.warmup_steps,
        "total_steps": config.sft.steps,
        "threads": config.sft.threads,
        **_common_options(config),
    }


def _common_options(config: Config) -> dict[str, Any]:
    trainer = config.trainer
    return {
        "dtype": config.model.dtype,
        "weight_decay": trainer.weight_decay,
        "betas": (trainer.beta1, trainer.beta2),
        "max_grad_norm": trainer.max_grad_norm,
        "max_tokens_per_microbatch": trainer.max_tokens_per_microbatch,
        "gradient_checkpointing": trainer.gradient_checkpointing,
        "seed": config.seed,
    }


class Assembly:
    """The worker groups of a run and what connects them.

    Args:
        config: the run.
        log_folder: where worker processes write what they print.
        meter_folder: where rollout workers keep their token counts, so that these outlive them; None for nowhere.

    Attributes:
        environments: tasks and demonstrations, for the driver's own use.
        trainer, pool, reward, reference, critic: worker groups; the last three only where the configuration asks for
            them.
    """

    def __init__(self, config: Config, *, log_folder: Path, meter_folder: Path | None = None) -> None:
        self.config = config
        self._log_folder = log_folder
        self._meter_folder = meter_folder
        self._stack = AsyncExitStack()
        self.environments: EnvironmentFactory = make_environments(config)
        self.trainer: Any  # a worker group: its methods are the worker's, bound at run time
        self.pool: RolloutPool
        self.reward: Any = None
        self.reference: Any = None
        self.critic: Any = None
        self._make_group: MakeGroup = local_group

    async def start(self, roles: Sequence[Role] = ROLES) -> None:
        """Start the cluster, if one is needed, and the worker processes of ``roles`` that the run uses."""
        requests = [request for request in self._requests() if request.role in roles]
        make_group = group_maker(self.config.cluster, requests, log_folder=self._log_folder, stack=self._stack)
        self._make_group = make_group
        groups: list[WorkerGroup] = []
        replicas: dict[str, WorkerGroup] = {}
        of_replica: dict[str, GroupRequest] = {}
        # A stack of their own: those that are made later, too, are closed after the pool that makes them.
        living = await self._stack.enter_async_context(AsyncExitStack())
        for request in requests:
            group = make_group(request)
            groups.append(group)
            living.push_async_callback(group.aclose)
            if request.role == "rollout":
                replicas[request.name], of_replica[request.name] = group, request
            elif request.shared:
                for role, of_role in group.spawn(request.shared).items():
                    setattr(self, role, of_role)
            else:
                setattr(self, request.role, group)
        started = await asyncio.gather(*(group.ready() for group in groups), return_exceptions=True)
        for error in started:
            if error is not None:
                raise error
        if not replicas:
            return

        async def revive(name: str) -> WorkerGroup:
            with contextlib.suppress(InfrastructureError):  # it is dead: closing it only gives its seats back
                await replicas[name].aclose()
            group = replicas[name] = make_group(of_replica[name])
            living.push_async_callback(group.aclose)
            await group.ready()
            return group

        self.pool = RolloutPool(
            replicas,
            kv_cache=self.config.weights.kv_cache,
            rollout_deadline_s=self.config.rollout.deadline_s,
            revive=revive,
        )
        self._stack.push_async_callback(self.pool.aclose)

    def make_ledger(self, path: Path, *, resume: LedgerBase | None) -> Ledger | None:
        """The ledger of this run, in the file ``path``; ``resume`` goes on with it. None where none is kept. Blocks."""
        config = self.config.ledger
        if config.kind is None:
            return None
        ledger: Ledger = make_part(
            "asyncrl.ledgers",
            config.kind,
            path,
            options={},
            path="ledger.kind",
            resume=resume,
            fsync=config.fsync,
            commit_latency_s=config.commit_latency_s,
        )
        self._stack.push_async_callback(ledger.aclose)
        return ledger

    def make_buffer(self, *, at_least_groups: int = 0, ledger: Ledger | None = None) -> ReplayBuffer:
        """A replay buffer for this run, which asks this ledger, with room for what an earlier life has left."""
        config = self.config
        columns = ["scores"] if config.reward.source != "environment" else []
        columns += ["reference_log_probs"] if needs_reference(config) else []
        columns += ["values"] if needs_critic(config) else []
        buffer: ReplayBuffer = make_part(
            "asyncrl.replay_buffers",
            config.buffer.kind,
            options=config.buffer.options,
            path="buffer.kind",
            capacity=max(config.capacity_groups, at_least_groups),
            batch_groups=config.trainer.groups_per_step,
            columns=columns,
            # Where the bound is kept by token, no group is too old: none of a run can be older than its steps.
            max_staleness=config.steps if config.staleness_policy.keeps_groups else config.max_staleness,
            selection=config.buffer.selection or config.staleness_policy.selection,
            ledger=ledger,
        )
        return buffer

    async def place(self, buffer: ReplayBuffer) -> None:
        """Give a buffer that lives in a worker one; the workers must have been started."""
        if not isinstance(buffer, PlacedReplayBuffer):
            return
        worker, options = buffer.worker()
        group = self._make_group(GroupRequest("buffer", "buffer", worker, options, 1, 0.0, 0.0))
        self._stack.push_async_callback(group.aclose)
        await group.ready()
        await buffer.attach(group)
        self._stack.push_async_callback(buffer.aclose)

    async def aclose(self) -> None:
        """Close groups, transports and the cluster. Idempotent."""
        await self._stack.aclose()

    def _requests(self) -> list[GroupRequest]:
        config = self.config
        trainer = config.trainer
        transport = TransportSpec(
            name=config.weights.transport, namespace=f"asyncrl-{os.getpid()}", options=dict(config.weights.options)
        )
        spec = TrainerSpec(engine=trainer.engine, engine_options=dict(trainer.options), transport=transport)
        requests = [
            GroupRequest(
                "trainer", "trainer", TrainerWorker, spec, trainer.world_size, trainer.num_cpus, trainer.num_gpus
            )
        ]
        rollout = config.rollout
        rollout_spec = _rollout_spec(config, transport, self._meter_folder)
        requests += [
            GroupRequest(
                "rollout", f"rollout-{replica}", RolloutWorker, rollout_spec, 1, rollout.num_cpus, rollout.num_gpus
            )
            for replica in range(rollout.replicas)
        ]
        if config.reward.source != "environment":
            reward_spec = (config.reward.source, dict(config.reward.options))
            reward = config.reward
            again = Restart(max_restarts=reward.max_restarts, scope="worker") if reward.max_restarts else None
            requests.append(
                GroupRequest(
                    "reward",
                    "reward",
                    RewardWorker,
                    reward_spec,
                    reward.workers,
                    reward.num_cpus,
                    reward.num_gpus,
                    restart=again,
                )
            )
        if needs_reference(config) and trainer.lora is None:
            frozen = TrainerSpec(engine=trainer.engine, engine_options=dict(trainer.options))
            requests.append(
                GroupRequest("reference", "reference", TrainerWorker, frozen, 1, trainer.num_cpus, trainer.num_gpus)
            )
        if needs_critic(config):
            critic = config.critic
            critic_spec = CriticSpec(engine=critic.engine, engine_options=dict(critic.options))
            requests.append(
                GroupRequest(
                    "critic", "critic", CriticWorker, critic_spec, critic.world_size, critic.num_cpus, critic.num_gpus
                )
            )
        return together(requests, config.cluster.colocate)


def import_once(config: Config) -> None:
    """Import the model library before the workers of the local backend do, each in a thread of its own.

    It resolves its names lazily, through imports in circles: of two threads at it at once, one is told that a name does
    not exist. Workers that are processes import it for themselves.
    """
    if config.cluster.backend == "local":
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: F401


def make_environments(config: Config) -> EnvironmentFactory:
    """The configured environment factory."""
    environments: EnvironmentFactory = make_part(
        "asyncrl.environments", config.env.name, options=_environment_options(config), path="env.name"
    )
    return environments


def chat_options(config: Config) -> dict[str, Any]:
    """Options of :func:`asyncrl.agents.chat.load_renderer`."""
    return {"chat_template": config.model.chat_template, "template_options": dict(config.model.template_options)}


def fit_prompts(config: Config, environments: EnvironmentFactory, model: str) -> str:
    """Let a factory that can leave out prompts that ``model``'s tokenizer makes too long. Blocks.

    Returns a sentence where some were left out.

    Raises:
        ConfigError: none is left, or there is to be an evaluation, and nothing to evaluate on.
    """
    if not isinstance(environments, PromptFitting):
        return ""
    renderer = load_renderer(model, **chat_options(config))
    fitted = environments.fit_prompts(lambda messages: len(renderer.prompt(messages)), below=config.rollout.max_tokens)
    if config.eval.tasks and isinstance(environments, CountedTasks) and not environments.held_out_rows:
        raise ConfigError(
            f"eval.tasks = {config.eval.tasks}, and there is no held-out row to evaluate on",
            path="eval.tasks",
            remedy='give env.options.held_out = "test.parquet", or an env.options.held_out_share, or eval.tasks = 0',
        )
    if not fitted.left_out:
        return ""
    return (
        f"{fitted.left_out} of {fitted.left_out + fitted.kept} prompts have more than {fitted.longest_tokens} tokens "
        "and are left out"
    )


def _environment_options(config: Config) -> dict[str, Any]:
    """The user's options; a factory that takes a ``seed`` gets the run's, unless they name another."""
    factory = load_part("asyncrl.environments", config.env.name, path="env.name")
    seeded = {"seed": config.seed} if "seed" in signature(factory).parameters else {}
    return {**seeded, **config.env.options}


def _rollout_spec(config: Config, transport: TransportSpec, meter_folder: Path | None) -> RolloutSpec:
    rollout = config.rollout
    engine, options = rollout.engine, dict(rollout.options)
    if rollout.python is not None:  # absolute: workers may run elsewhere; not resolved: the link is what makes a venv
        python = os.path.abspath(rollout.python)  # noqa: PTH100 - Path.absolute keeps ".."
        engine, options = _HOST_ENGINE, {"engine": engine, "python": python, "options": options}
    return RolloutSpec(
        engine=engine,
        engine_given={"dtype": config.model.dtype, "threads": rollout.threads, "seed": config.seed},
        engine_options=options,
        environment=config.env.name,
        environment_options=_environment_options(config),
        chat=chat_options(config),
        meter_folder=meter_folder.absolute() if meter_folder is not None else None,
        gather_s=config.ledger.commit_latency_s,
        transport=transport,
        sampling=SamplingParams(
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop=tuple(rollout.stop),
        ),
        limits=EpisodeLimits(
            max_turns=config.env.max_turns,
            max_tokens=rollout.max_tokens,
            deadline_s=config.env.deadline_s,
            latency_s=config.env.latency_s,
            max_attempts=rollout.max_attempts,
        ),
    )
