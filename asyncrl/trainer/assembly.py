"""From configuration to running worker groups: the one place where the names in a configuration become parts.

Worker groups are processes on a Ray cluster, or threads of this process (``cluster.backend``); ``cluster.colocate``
names roles that share processes. :meth:`Assembly.aclose` closes everything made here, in reverse order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast

from asyncrl.algorithms import PolicyObjective, ValueObjective
from asyncrl.config import ClusterConfig, Config, ModelConfig, Section
from asyncrl.errors import ConfigError, DeadlineError, InfrastructureError, ResourceError, WorkerError
from asyncrl.interfaces import (
    EnvironmentFactory,
    FiniteHeldOutTasks,
    OutOfProcessReplayBuffer,
    OverlongPromptFilter,
    ReplayBuffer,
    SamplingParams,
)
from asyncrl.ledger import Ledger, LedgerBase
from asyncrl.plugins import Part, load_part, make_part, offered_options
from asyncrl.rollout.chat import load_renderer
from asyncrl.rollout.pool import RolloutPool
from asyncrl.rollout.worker import EpisodeLimits, RolloutSpec, RolloutWorker
from asyncrl.runtime import failure_of_program, in_abandonable_thread, program_has_failed
from asyncrl.single_controller import ClassWithInitArgs, Restart, Worker, WorkerGroup, create_colocated_worker_cls
from asyncrl.single_controller.children import children
from asyncrl.single_controller.liveness import Liveness
from asyncrl.storage import is_url
from asyncrl.trainer.group import Score
from asyncrl.trainer.learner import Advantages
from asyncrl.trainer.workers import (
    CriticGroup,
    CriticSpec,
    CriticWorker,
    ProofSpec,
    RewardGroup,
    RewardWorker,
    TrainerGroup,
    TrainerSpec,
    TrainerWorker,
)
from asyncrl.weights import ROUNDOFF, TransportSpec

if TYPE_CHECKING:
    from asyncrl.algorithms.kl import KLEstimator
    from asyncrl.single_controller.ray import RayResourcePool
    from asyncrl.trainer.checkpoint import DriverState

_log = logging.getLogger(__name__)

C = TypeVar("C", bound=ClassWithInitArgs)

Role: TypeAlias = Literal["trainer", "rollout", "reward", "reference", "critic", "buffer"]
ROLES: tuple[Role, ...] = ("trainer", "rollout", "reward", "reference", "critic")

_REMOTE_ENGINE = "remote"
"""The rollout engine that runs another one in a process of its own."""


# ------------------------------------------------------------------------------------------------------- worker groups


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGroupRequest:
    """A worker group to be made of ``worker(spec)``; CPUs and GPUs are those reserved for a rank.

    ``restart`` is when a worker whose process died is restarted. ``colocated`` are, by role, the requests that share
    this group's processes; ``restart`` does not count then. ``bundles`` are the places of its ranks among those that
    rollouts and trainer share (``cluster.colocate``); None: places of its own.
    """

    role: Role
    name: str
    worker: type[Worker]
    spec: Any
    world_size: int = 1
    num_cpus: float = 0.0
    num_gpus: float = 0.0
    restart: Restart | None = None
    colocated: Mapping[str, WorkerGroupRequest] = field(default_factory=dict)
    bundles: range | None = None

    def class_with_arguments(self, kind: type[C]) -> C:
        """Return the worker's class with its argument, or a class that holds one worker of every role."""
        if not self.colocated:
            return kind(self.worker, self.spec)
        return create_colocated_worker_cls(
            {role: request.class_with_arguments(kind) for role, request in self.colocated.items()}
        )


MakeGroup: TypeAlias = Callable[[WorkerGroupRequest], WorkerGroup]


def colocate(requests: list[WorkerGroupRequest], roles: Collection[str]) -> list[WorkerGroupRequest]:
    """Put the groups of ``roles`` into the processes of one, which reserves the most that any of them needs.

    Replicas of ``rollout`` keep their processes, and share the places of the trainer's ranks.
    """
    if "rollout" in roles:
        requests = _on_shared_bundles(requests)
    colocated: dict[str, WorkerGroupRequest] = {
        request.role: request for request in requests if request.role in roles and request.role != "rollout"
    }
    if len(colocated) < 2:
        return requests
    first, *others = colocated.values()
    host = WorkerGroupRequest(
        role=first.role,
        name="+".join(colocated),
        worker=first.worker,
        spec=None,
        world_size=first.world_size,
        num_cpus=max(request.num_cpus for request in colocated.values()),
        num_gpus=max(request.num_gpus for request in colocated.values()),
        colocated=colocated,
    )
    return [host if request is first else request for request in requests if request not in others]


def _on_shared_bundles(requests: list[WorkerGroupRequest]) -> list[WorkerGroupRequest]:
    replicas = [request.name for request in requests if request.role == "rollout"]
    places = {name: range(place, place + 1) for place, name in enumerate(replicas)}
    return [
        replace(request, bundles=places.get(request.name, range(request.world_size)))
        if request.role in ("trainer", "rollout")
        else request
        for request in requests
    ]


def group_maker(
    cluster: ClusterConfig, requests: Sequence[WorkerGroupRequest], *, log_folder: Path, stack: AsyncExitStack
) -> MakeGroup:
    """Return the function that makes the groups of ``requests``; ``stack`` closes the cluster started for them."""
    if cluster.backend == "ray":
        return _ray_group_maker(cluster, requests, log_folder, stack)
    children.configure(Liveness.of(cluster.health_check_timeout_s))
    return _local_group


def _ray_group_maker(
    cluster: ClusterConfig, requests: Sequence[WorkerGroupRequest], log_folder: Path, stack: AsyncExitStack
) -> MakeGroup:
    from asyncrl.single_controller.ray.cluster import RayCluster

    sharing = [request for request in requests if request.bundles is not None]
    needed = sum(request.world_size * request.num_cpus for request in requests if request.bundles is None)
    places = max((request.bundles.stop for request in sharing if request.bundles is not None), default=0)
    shared_cpus = max((request.num_cpus for request in sharing), default=0.0)
    needed += places * shared_cpus
    num_cpus = cluster.num_cpus or max(float(os.cpu_count() or 1), needed)
    stack.enter_context(
        RayCluster(address=cluster.address, num_cpus=num_cpus, log_folder=log_folder, on_lost=failure_of_program())
    )
    from asyncrl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, SubRayResourcePool
    from asyncrl.single_controller.ray.resource_pool import cluster_nodes

    shared = RayResourcePool(
        [places] if places else [],
        max_colocate_count=2,
        cpus_per_worker=shared_cpus / 2,
        gpus_per_worker=max((request.num_gpus for request in sharing), default=0.0),
    )

    def own_pool(request: WorkerGroupRequest) -> RayResourcePool:
        return RayResourcePool([request.world_size], cpus_per_worker=request.num_cpus, gpus_per_worker=request.num_gpus)

    pools = {request.name: own_pool(request) for request in requests if request.bundles is None}
    _check_together({"shared by trainer and rollout": shared, **pools} if sharing else pools, cluster)
    reserving = any(request.num_gpus for request in requests)
    if not reserving and any(node.total.get("GPU") for node in cluster_nodes()):
        _log.warning(
            "the cluster has GPUs, and no worker reserves one (trainer.num_gpus, rollout.num_gpus): all compute on CPUs"
        )

    def make(request: WorkerGroupRequest) -> WorkerGroup:
        # Threads that wait for one another must sleep, not spin: other workers compute on these cores.
        variables = {"OMP_WAIT_POLICY": "PASSIVE"}
        if not request.num_gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ""  # Ray leaves a worker that reserves no device all of them
        made = request.class_with_arguments(RayClassWithInitArgs).options(env_vars=variables)
        pool = own_pool(request) if request.bundles is None else SubRayResourcePool([(shared, request.bundles)])
        return RayWorkerGroup(
            resource_pool=pool,
            ray_cls_with_init=made,
            name=request.name,
            restart=request.restart,
            liveness=Liveness.of(cluster.health_check_timeout_s),
        )

    return make


def _check_together(pools: Mapping[str, RayResourcePool], cluster: ClusterConfig) -> None:
    """Raise ResourceError if the cluster cannot hold all pools; only warn of one that was joined: it may grow."""
    from asyncrl.single_controller.ray.resource_pool import check_together

    try:
        check_together(pools)
    except ResourceError as error:
        if (cluster.address or os.environ.get("RAY_ADDRESS", "local")) == "local":
            raise
        _log.warning("%s\nnodes that join may have what is missing", error)


def _local_group(request: WorkerGroupRequest) -> WorkerGroup:
    from asyncrl.single_controller.local import LocalWorkerGroup

    return LocalWorkerGroup(
        request.class_with_arguments(ClassWithInitArgs),
        world_size=request.world_size,
        name=request.name,
        restart=request.restart,
    )


async def _close(group: WorkerGroup) -> None:
    """Close a group; that its workers were killed is no reason for which the run ends."""
    try:
        await group.aclose()
    except DeadlineError as error:
        _log.warning("%s", error)


class Assembly:
    """The worker groups of a run, its buffer and its ledger.

    Worker processes write what they print to ``log_folder``. Rollout workers keep their token counts in
    ``meter_folder``, so that these outlive them; None keeps none.

    Attributes:
        environments: tasks and demonstrations, for the driver's own use.
        reward: worker group of the reward model; None where the environment's reward counts.
        reference: worker group of a frozen policy; None where none is needed, or LoRA's base is one.
        critic: worker group of the value function; None where the advantage needs none.
    """

    trainer: TrainerGroup
    pool: RolloutPool

    def __init__(
        self,
        config: Config,
        *,
        log_folder: Path,
        meter_folder: Path | None = None,
        environments: EnvironmentFactory | None = None,
    ) -> None:
        check_shared_devices(config)
        self.config = config
        self.environments = environments if environments is not None else make_environments(config)
        self.reward: RewardGroup | None = None
        self.reference: TrainerGroup | None = None
        self.critic: CriticGroup | None = None
        self._log_folder = log_folder
        self._meter_folder = meter_folder
        self._stack = AsyncExitStack()
        self._make_group: MakeGroup = _local_group
        self._groups: dict[str, WorkerGroup] = {}

    async def start(self, roles: Sequence[Role] = ROLES) -> None:
        """Start the cluster, if one is needed, and the workers of ``roles`` that the run uses."""
        requests = [request for request in self._requests() if request.role in roles]
        self._make_group = group_maker(self.config.cluster, requests, log_folder=self._log_folder, stack=self._stack)
        # A stack of its own: groups that the pool makes later, too, are closed after the pool.
        groups_stack = await self._stack.enter_async_context(AsyncExitStack())
        made: dict[str, WorkerGroup] = {}
        replicas: dict[str, WorkerGroup] = {}
        publisher: WorkerGroup | None = None
        for request in requests:
            group = await self._make_started_group(request, groups_stack)
            if request.role == "rollout":
                replicas[request.name] = group
            elif request.role == "trainer":  # of roles that share processes, it is the first
                publisher = group
            made |= group.spawn(request.colocated) if request.colocated else {request.name: group}
        started = await asyncio.gather(*(group.ready() for group in made.values()), return_exceptions=True)
        for error in started:
            if error is not None:
                raise error
        if publisher is not None:
            self._check_reach(publisher, replicas)
        # The methods of a worker group are those of its workers, bound at run time.
        if "trainer" in made:
            self.trainer = cast("TrainerGroup", made["trainer"])
        self.reward = cast("RewardGroup | None", made.get("reward"))
        self.reference = cast("TrainerGroup | None", made.get("reference"))
        self.critic = cast("CriticGroup | None", made.get("critic"))
        if replicas:
            self._make_pool(replicas, {request.name: request for request in requests}, groups_stack, publisher)

    async def _make_started_group(self, request: WorkerGroupRequest, groups_stack: AsyncExitStack) -> WorkerGroup:
        def make() -> WorkerGroup:
            group = self._groups[request.name] = self._make_group(request)
            groups_stack.push_async_callback(_close, group)
            return group

        if self.config.cluster.backend == "local":
            return make()
        # Ray asks its head what there is: where that has died, this does not return.
        return await in_abandonable_thread(make, hopeless=program_has_failed)

    def _check_reach(self, publisher: WorkerGroup, replicas: Mapping[str, WorkerGroup]) -> None:
        """Raise ConfigError if weights stay on the node of the trainer's rank 0, and a replica is on another."""
        name = self.config.weights.transport
        transport = load_part("asyncrl.weight_transports", name, path="weights.transport")
        here = {*publisher.node_addresses[:1]}
        away = [each for each, group in replicas.items() if not here >= {*group.node_addresses}]
        if away and getattr(transport, "one_machine", False):
            others = f" and {len(away) - 1} more" if len(away) > 1 else ""
            raise ConfigError(
                f"weights.transport = {name!r} is of one machine, {''.join(here)} with rank 0 of the trainer, and "
                f"{away[0]}{others} would run on others",
                path="weights.transport",
                remedy="object_store, or disk with a directory that all machines have in common",
            )

    def _make_pool(
        self,
        replicas: dict[str, WorkerGroup],
        requests: Mapping[str, WorkerGroupRequest],
        groups_stack: AsyncExitStack,
        publisher: WorkerGroup | None,
    ) -> None:
        async def restart(name: str) -> WorkerGroup:
            # Its workers are dead, or fail once more: closing frees their reservations.
            with contextlib.suppress(InfrastructureError, WorkerError):
                await replicas[name].aclose()
            group = replicas[name] = await self._make_started_group(requests[name], groups_stack)
            await group.ready()
            if publisher is not None:
                try:
                    self._check_reach(publisher, {name: group})
                except ConfigError:
                    await group.aclose()
                    raise
            return group

        self.pool = RolloutPool(
            replicas,
            kv_cache=self.config.weights.kv_cache,
            deadline_s=self.config.weights.deadline_s,
            rollout_deadline_s=self.config.rollout.deadline_s,
            revive=restart,
        )
        self._stack.push_async_callback(self.pool.aclose)

    def make_ledger(self, path: Path, *, resume: LedgerBase | None) -> Ledger | None:
        """Open the ledger of the run in the file ``path``; ``resume`` continues it. None where none is kept. Blocks."""
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
        """Make the replay buffer, with room for at least so many groups; it answers queries from ``ledger``."""
        config, policy = self.config, self.config.staleness_policy
        columns = {
            "scores": config.reward.source != "environment",
            "reference_log_probs": needs_reference(config),
            "values": needs_critic(config),
        }
        group, kind, path = "asyncrl.replay_buffers", config.buffer.kind, "buffer.kind"
        offered = offered_options(group, kind, {"credit": config.algorithm.credit}, path=path)
        buffer: ReplayBuffer = make_part(
            group,
            kind,
            options=offered | config.buffer.options,
            path=path,
            capacity=max(config.capacity_groups, at_least_groups),
            batch_groups=config.trainer.groups_per_step,
            columns=[name for name, needed in columns.items() if needed],
            max_staleness=policy.buffer_bound(config.max_staleness, steps=config.steps),
            selection=config.buffer.selection or policy.selection,
            ledger=ledger,
        )
        return buffer

    async def place(self, buffer: ReplayBuffer) -> None:
        """Start the worker of a buffer that lives in one; the other workers must have been started."""
        if not isinstance(buffer, OutOfProcessReplayBuffer):
            return
        worker, options = buffer.worker()
        request = WorkerGroupRequest(role="buffer", name="buffer", worker=worker, spec=options)
        group = await self._make_started_group(request, self._stack)
        await group.ready()
        await buffer.attach(group)
        self._stack.push_async_callback(buffer.aclose)

    def explain(self) -> list[str]:
        """Name the processes that do not answer."""
        return [line for group in self._groups.values() for line in group.explain_silence()]

    async def aclose(self) -> None:
        """Close groups, transports and the cluster. Idempotent."""
        await self._stack.aclose()

    def _requests(self) -> list[WorkerGroupRequest]:
        config, trainer, rollout, reward = self.config, self.config.trainer, self.config.rollout, self.config.reward
        transport = TransportSpec(
            name=config.weights.transport,
            namespace=f"asyncrl-{os.getpid()}",
            options=dict(config.weights.options),
            delta=config.weights.delta == "auto",
        )
        policy = TrainerSpec(
            engine=trainer.engine,
            engine_options=dict(trainer.options),
            transport=transport,
            proof=proof_spec(config),
            adapters_apart=adapters_apart(config),
            mesh=trainer.mesh_shape(),
        )
        requests = [
            WorkerGroupRequest(role="trainer", name="trainer", worker=TrainerWorker, spec=policy, **_resources(trainer))
        ]
        spec = rollout_spec(config, transport, self._meter_folder)
        requests += [
            WorkerGroupRequest(
                role="rollout",
                name=f"rollout-{replica}",
                worker=RolloutWorker,
                spec=spec,
                num_cpus=rollout.num_cpus,
                num_gpus=rollout.num_gpus,
            )
            for replica in range(rollout.replicas)
        ]
        if reward.source != "environment":
            requests.append(
                WorkerGroupRequest(
                    role="reward",
                    name="reward",
                    worker=RewardWorker,
                    spec=(reward.source, dict(reward.options)),
                    world_size=reward.workers,
                    num_cpus=reward.num_cpus,
                    num_gpus=reward.num_gpus,
                    restart=Restart(max_restarts=reward.max_restarts, scope="worker") if reward.max_restarts else None,
                )
            )
        if needs_reference(config) and trainer.lora is None:
            # One rank, which holds the whole model: no layers are divided.
            options = {name: value for name, value in trainer.options.items() if name != "stages_per_rank"}
            frozen = TrainerSpec(engine=trainer.engine, engine_options=options)
            requests.append(
                WorkerGroupRequest(
                    role="reference",
                    name="reference",
                    worker=TrainerWorker,
                    spec=frozen,
                    num_cpus=trainer.num_cpus,
                    num_gpus=trainer.num_gpus,
                )
            )
        if needs_critic(config):
            critic = CriticSpec(
                engine=config.critic.engine,
                engine_options=dict(config.critic.options),
                mesh=config.critic.mesh_shape(),
            )
            requests.append(
                WorkerGroupRequest(
                    role="critic", name="critic", worker=CriticWorker, spec=critic, **_resources(config.critic)
                )
            )
        return colocate(requests, config.cluster.colocate)


def _resources(section: Section) -> dict[str, Any]:
    return section.model_dump(include={"world_size", "num_cpus", "num_gpus"})


# ------------------------------------------------------------------------------------------------ options of the parts

MISMATCH_LIMITS = {"float32": 1e-5, "bfloat16": 0.02}
"""Mean k3 KL per token, in nats, that rounding may explain, by the type the model computes in.

Two float32 programs of one model were measured to differ by 1e-13 here; a temperature that is off by a tenth gives 3e-4
on a model of random weights, and more on one that is sure of something. In bfloat16 the same two programs differ by
1.5e-5 on a small model; engines of another make, on large ones, by up to some thousandths.
"""


def needs_critic(config: Config) -> bool:
    """Return whether the advantage needs a critic's values."""
    return config.steps > 0 and "values" in config.algorithm.estimator().needs


def needs_reference(config: Config) -> bool:
    """Return whether something needs the log-probs of a frozen policy."""
    if config.steps == 0:
        return False
    return config.algorithm.kl_coef > 0 or "divergences" in config.algorithm.estimator().needs


def check_shared_devices(config: Config) -> None:
    """Check that rollouts can take turns with the trainer, if they are to.

    Raises:
        ConfigError: an engine cannot free its memory for a while, or the trainer's side has to compute something while
            rollouts are sampled.
    """
    if "rollout" not in config.cluster.colocate:
        return
    key, engine = "cluster.colocate", config.rollout.engine
    if _sleep_options(engine) is None:
        remedy = "use the engine transformers, or leave rollout out"
        raise ConfigError(
            f"the engine {engine} has no sleep and wake, with which it frees memory", path=key, remedy=remedy
        )
    needs = {"reference log-probs": needs_reference(config), "a critic's values": needs_critic(config)}
    if any(needs.values()):
        named = " and ".join(name for name, needed in needs.items() if needed)
        raise ConfigError(
            f"{named} are computed while rollouts are sampled: these cannot take turns with the trainer",
            path=key,
            remedy="leave rollout out, or use kl_coef = 0 and an advantage that needs neither",
        )


def _sleep_options(engine: Part) -> Mapping[str, Any] | None:
    """Return the options with which an engine can sleep; None if it cannot."""
    return getattr(load_part("asyncrl.rollout_engines", engine, path="rollout.engine"), "sleep_options", None)


def trainer_options(config: Config) -> dict[str, Any]:
    """Return keyword arguments of the training engine for policy optimisation."""
    trainer, lora = config.trainer, config.trainer.lora
    # What engines would make of float32; of a dtype that only they know (auto), they get all digits.
    publish_dtype = "bfloat16" if _engine_dtype(config) == "bfloat16" else "float32"
    offered = {} if "publish_dtype" in trainer.options else {"publish_dtype": publish_dtype}
    return {
        **offered_options("asyncrl.training_engines", trainer.engine, offered, path="trainer.engine"),
        "objective": config.algorithm.objective(longest=config.rollout.max_seq_len),
        "temperature": config.rollout.temperature,
        "total_steps": config.steps * trainer.num_mini_batches * trainer.epochs,
        **trainer.model_dump(include=_OPTIMIZATION),
        **({} if config.steps else {"lr_scheduler_type": "constant"}),  # without a step none is the last
        **({"lora": {"alpha": 2.0 * lora.rank, **lora.model_dump(exclude_none=True)}} if lora is not None else {}),
        **_model_options(config),
    }


def critic_options(config: Config) -> dict[str, Any]:
    """Return keyword arguments of the critic's engine."""
    critic = config.critic
    return {
        **_model_options(config),
        "objective": ValueObjective(cliprange_value=critic.cliprange_value),
        "total_steps": config.steps * critic.num_mini_batches * critic.epochs,
        **critic.model_dump(include=_OPTIMIZATION),
        **({} if config.steps else {"lr_scheduler_type": "constant"}),
    }


def warm_start_options(config: Config) -> dict[str, Any]:
    """Return keyword arguments of the training engine for the supervised warm start."""
    return {
        "objective": PolicyObjective(),
        "total_steps": config.sft.steps,
        **_model_options(config),
        **config.sft.model_dump(include={"lr", "lr_scheduler_type", "warmup_steps", "threads"}),
    }


_OPTIMIZATION = {
    *("optimizer", "optimizer_options"),
    *("lr", "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm"),
    *("num_mini_batches", "epochs", "threads"),
}
"""Keys of the sections ``trainer`` and ``critic`` that engines take under the same names."""


def _model_options(config: Config) -> dict[str, Any]:
    trainer = config.trainer
    return {
        "dtype": config.model.dtype,
        "betas": (trainer.adam_beta1, trainer.adam_beta2),
        "seed": config.seed,
        **trainer.model_dump(
            include={"weight_decay", "max_grad_norm", "max_tokens_per_microbatch", "gradient_checkpointing"}
        ),
    }


def make_advantages(config: Config, *, after: DriverState | Advantages | None = None) -> Advantages:
    """Return how advantages are computed.

    A controlled KL penalty in the reward goes on where it was ``after`` the last step, if it began at the same
    ``kl_coef``; any other has the coefficient that is configured.
    """
    reached = after.kl_coef if after is not None and after.kl_start == config.algorithm.kl_coef else None
    return Advantages(
        estimator=config.algorithm.estimator(),
        credit=config.algorithm.credit,
        by_turns=config.reward.source == "environment",
        kl_controller=config.algorithm.controller(reached),
        gae_lambda=config.critic.gae_lambda,
        kl_estimator=config.algorithm.divergence_estimator,
    )


def max_mismatch_kl(config: Config) -> float | None:
    """Return the limit for the first step; None where sampling is truncated, which changes log-probs by intent."""
    if config.algorithm.max_mismatch_kl is not None:
        return config.algorithm.max_mismatch_kl
    truncated = config.rollout.top_p < 1 or config.rollout.top_k > 0
    return None if truncated else MISMATCH_LIMITS[config.model.dtype]


def divergence_estimator(config: Config) -> KLEstimator | None:
    """Return the estimator of the KL of each row from the reference; None where no row needs it."""
    algorithm = config.algorithm
    if "divergences" in algorithm.estimator().needs:
        return "k1"
    return algorithm.divergence_estimator if algorithm.kl_in_reward else None


def reference_stage(config: Config, group: TrainerGroup) -> Score:
    """Return the stage that computes ``reference_log_probs`` on ``group``, and ``divergences`` where needed."""
    estimator = divergence_estimator(config)
    return lambda rows: group.reference_log_probs(rows, estimator)


def rollout_spec(config: Config, transport: TransportSpec, meter_folder: Path | None) -> RolloutSpec:
    """Return what the rollout workers are made from."""
    rollout, environment, lora = config.rollout, config.env, config.trainer.lora
    engine, options = rollout.engine, dict(rollout.options)
    if "rollout" in config.cluster.colocate:
        options = {**(_sleep_options(engine) or {}), **options}
    if rollout.python is not None:  # absolute: workers may run elsewhere; not resolved: the link is what makes a venv
        python = os.path.abspath(rollout.python)  # noqa: PTH100 - Path.absolute keeps ".."
        engine, options = _REMOTE_ENGINE, {"engine": engine, "python": python, "options": options}
    return RolloutSpec(
        engine=engine,
        engine_given={
            "dtype": config.model.dtype,
            "threads": rollout.threads,
            "seed": config.seed,
            **({"max_adapter_rank": lora.rank} if lora is not None and adapters_apart(config) else {}),
        },
        engine_options=options,
        environment=environment.name,
        environment_options=_environment_options(config),
        chat=chat_options(config),
        meter_folder=meter_folder.absolute() if meter_folder is not None else None,
        gather_s=config.ledger.commit_latency_s,
        seed=config.seed,
        reward_check_share=rollout.reward_check_share,
        transport=transport,
        sampling=SamplingParams(
            **rollout.model_dump(include={"max_new_tokens", "temperature", "top_p", "top_k", "stop"})
        ),
        limits=EpisodeLimits(
            **rollout.model_dump(include={"max_seq_len", "max_attempts"}),
            **environment.model_dump(include={"max_turns", "deadline_s", "latency_s"}),
        ),
    )


def adapters_apart(config: Config) -> bool:
    """Return whether engines get adapters alone, and not the weights with these merged in.

    Raises:
        ConfigError: they should, and the engine serves none, or has other weights than those beside them.
    """
    trainer, rollout, wanted = config.trainer, config.rollout, config.weights.adapters
    if trainer.lora is None or wanted == "merged":
        return False
    if (base := trainer.lora.base) != "float":
        if wanted == "auto":
            return False
        raise ConfigError(
            f"weights.adapters = 'apart': engines have other weights than the trainer, with lora.base = {base!r}",
            path="weights.adapters",
            remedy="merged, or trainer.lora.base = 'float'",
        )
    engine = rollout.options.get("engine", "transformers") if rollout.engine == _REMOTE_ENGINE else rollout.engine
    able = hasattr(load_part("asyncrl.training_engines", trainer.engine, path="trainer.engine"), "adapter_tensors")
    try:
        able = able and bool(offered_options("asyncrl.rollout_engines", engine, {"max_adapter_rank": 0}))
        if "rollout" in config.cluster.colocate and _sleep_options(engine):
            able = False  # one that has to be started for its sleep does not keep adapters
    except ConfigError:  # it can be loaded in another environment only
        able = wanted == "apart"
    if wanted == "apart" and not able:
        raise ConfigError(
            f"weights.adapters = 'apart', and rollout engine {engine!r} serves no adapters, or keeps none while "
            f"asleep (cluster.colocate), or training engine {trainer.engine!r} publishes none",
            path="weights.adapters",
            remedy="merged",
        )
    return able


def _engine_dtype(config: Config) -> str:
    """Return the dtype that rollout engines are given."""
    options = config.rollout.options
    hosted = options.get("options", {}) if config.rollout.engine == _REMOTE_ENGINE else options
    return str(hosted.get("dtype", config.model.dtype)) if isinstance(hosted, dict) else config.model.dtype


def proof_spec(config: Config) -> ProofSpec:
    """Return what engines have to show for each version. Log-probs at another temperature than 1 are not compared."""
    weights = config.weights
    # "auto" and others that only the engine knows may be as coarse as any.
    asked = (config.model.dtype, _engine_dtype(config))
    dtypes = [each if each in ROUNDOFF else "bfloat16" for each in asked]
    import torch

    if config.rollout.num_gpus or config.trainer.num_gpus or torch.cuda.is_available():
        dtypes.append("tf32")  # kernels of attention multiply float32 like that
    return ProofSpec(
        checked_bytes=weights.checked_bytes,
        canary_tokens=weights.canary_tokens if config.rollout.temperature in (0, 1) else 0,
        dtype=max(dtypes, key=lambda each: ROUNDOFF[each]),
        tolerance=weights.canary_tolerance,
    )


def quiet_vendors(model: ModelConfig) -> None:
    """Switch progress bars off where the hub is not asked; without effect once Hugging Face's libraries are loaded."""
    if model.path is None or is_url(model.path) or Path(model.path).is_dir():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


_IMPORTING = threading.Lock()


def import_model_library(config: Config) -> None:
    """Import transformers before the workers of the local backend do, each in a thread of its own.

    It resolves its names lazily, through circular imports, which fails in two threads at once: those of two runs of one
    program take turns. Workers that are processes import it for themselves.
    """
    if config.cluster.backend != "local":
        return
    with _IMPORTING:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: F401


def make_environments(config: Config) -> EnvironmentFactory:
    """Make the configured environment factory."""
    environments: EnvironmentFactory = make_part(
        "asyncrl.environments", config.env.name, options=_environment_options(config), path="env.name"
    )
    return environments


def _environment_options(config: Config) -> dict[str, Any]:
    """Return the user's options; a factory that takes a ``seed`` gets the run's, unless they name another."""
    offered = offered_options("asyncrl.environments", config.env.name, {"seed": config.seed}, path="env.name")
    return {**offered, **config.env.options}


def chat_options(config: Config) -> dict[str, Any]:
    """Return options of :func:`asyncrl.rollout.chat.load_renderer`."""
    return {
        "chat_template": config.model.chat_template,
        "chat_template_kwargs": dict(config.model.chat_template_kwargs),
        "tool_call_parser": config.model.tool_call_parser,
    }


def filter_overlong_prompts(config: Config, environments: EnvironmentFactory, model: str) -> str:
    """Leave out prompts that the tokenizer of ``model`` makes too long, where the factory can. Blocks.

    Return a sentence where some were left out.

    Raises:
        ConfigError: no prompt is left, or an evaluation is configured and no held-out row exists.
    """
    if not isinstance(environments, OverlongPromptFilter):
        return ""
    renderer = load_renderer(model, **chat_options(config))
    fitted = environments.filter_overlong_prompts(
        lambda messages, tools=(): len(renderer.prompt(messages, tools)), below=config.rollout.max_seq_len
    )
    check_held_out(config, environments)
    if not fitted.left_out:
        return ""
    return (
        f"{fitted.left_out} of {fitted.left_out + fitted.kept} prompts have more than {fitted.longest_tokens} tokens "
        "and are left out"
    )


def check_held_out(config: Config, environments: EnvironmentFactory) -> None:
    """Raise ConfigError if an evaluation is configured, and the environment has no task for it."""
    if config.eval.tasks and isinstance(environments, FiniteHeldOutTasks) and not environments.held_out_rows:
        raise ConfigError(
            f"eval.tasks = {config.eval.tasks}, and there is no held-out row to evaluate on",
            path="eval.tasks",
            remedy='give env.options.held_out = "test.parquet", or an env.options.held_out_share, or eval.tasks = 0',
        )
