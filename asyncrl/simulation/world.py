"""Runs on the virtual clock: the production driver, law, buffer, pool and resumption with modelled parts; forecasts."""

from __future__ import annotations

import asyncio
import functools
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from torch import Tensor

from asyncrl.algorithms import AdvantageEstimator
from asyncrl.config import Config
from asyncrl.config.sections import BufferConfig
from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.envs.single_turn import SingleTurnFactory
from asyncrl.errors import AsyncRLError, ConfigError, InvalidDataError
from asyncrl.interfaces import DroppedGroup, GroupSummary, ReplayBuffer
from asyncrl.ledger import Ledger
from asyncrl.plugins import load_part, part_text
from asyncrl.rollout.pool import RolloutPool
from asyncrl.rollout.work import sum_totals
from asyncrl.runtime import first_cause
from asyncrl.simulation.model import Distribution, Fault, Scenario
from asyncrl.simulation.parts import ModelledReplica, ModelledRewards, ModelledTrainer, Trained
from asyncrl.staleness import Certificate, merge
from asyncrl.telemetry.idle import idle_shares
from asyncrl.telemetry.timeline import Timeline
from asyncrl.testing.clock import run_virtually
from asyncrl.trainer.checkpoint import DriverState
from asyncrl.trainer.colocation import SeparateDevices, SharedDevices, Side
from asyncrl.trainer.driver import Driver, TrainingPlan
from asyncrl.trainer.evaluation import EvaluationPlan, EvaluationResult
from asyncrl.trainer.group import GroupStages
from asyncrl.trainer.journal import TokenBalance
from asyncrl.trainer.learner import Advantages, Learner, StepRecord
from asyncrl.trainer.recovery import driver_state, ledger_base, lost_scores, starting_point
from asyncrl.trainer.workers import TrainerGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """A training step: its end, its certificate, and the numbers of ready, pending and overdue groups at its end.

    ``waits_s`` are the seconds that the trainer had waited by then, by reason, and ``used_s`` the decoding time of all
    replicas in seconds of full speed: those of the driver process.
    """

    step: int
    at_s: float
    certificate: Certificate
    ready: int
    pending: int
    overdue: int
    waits_s: Mapping[str, float]
    used_s: float


@dataclass(slots=True, kw_only=True)
class Simulation:
    """The result of a simulated run.

    Attributes:
        steps, trained: the training steps and the batches that the trainer received, without those undone by a restart.
        ended_by: the failure that ended each driver process except for the last.
        injected: faults that happened.
        dropped: reasons of dropped group_ids.
        scores: oldest and newest version of the tokens of an evaluation, by step; ``unscored`` why a step has none.
        unsaved: why the checkpoint of a step was not written.
        busy_s: seconds of work by stage; of the last driver process, as are the next three.
        idle, episodes, work_s, tokens: as in :class:`asyncrl.trainer.report.RunSummary`, the tokens of all processes.
        span_s: seconds from its start to its last step.
        violations: broken laws; empty for a correct run.
    """

    steps: list[SimulatedStep] = field(default_factory=list)
    trained: list[Trained] = field(default_factory=list)
    ended_by: list[str] = field(default_factory=list)
    injected: list[Fault] = field(default_factory=list)
    dropped: dict[int, str] = field(default_factory=dict)
    scores: dict[int, tuple[int, int]] = field(default_factory=dict)
    unscored: dict[int, str] = field(default_factory=dict)
    unsaved: dict[int, str] = field(default_factory=dict)
    busy_s: Mapping[str, float] = field(default_factory=dict)
    idle: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    episodes: Mapping[str, float] = field(default_factory=dict)
    work_s: Mapping[str, float] = field(default_factory=dict)
    tokens: Mapping[str, Any] = field(default_factory=dict)
    span_s: float = 0.0
    violations: list[str] = field(default_factory=list)


def simulate(scenario: Scenario, *, fetch: bool = False, limit_s: float = 1e9) -> Simulation:
    """Run a scenario with all its faults to its end.

    With ``fetch``, the trainer fetches every batch and checks the real loss mask.

    Raises:
        SimulationDeadlock: all tasks wait for each other, or the run took more than ``limit_s`` of virtual time.
        BaseException: a failure that is not one of asyncrl's own, or that no fault explains.
    """
    with TemporaryDirectory(prefix="simulation-", dir=_FAST) if scenario.ledger else nullcontext() as folder:
        run = _SimulatedRun(scenario, fetch=fetch, folder=Path(folder) if folder is not None else None)
        return run_virtually(run.run(), seed=scenario.seed, limit_s=limit_s)


_FAST = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108
"""Parent of the ledger's folder: in memory if possible, because the ledger need not survive this process."""


_part = functools.cache(load_part)
"""Buffer and ledger are installed parts, which this package must not import."""


def _rewards(rewards: Tensor) -> Tensor:
    """Return the rewards as advantages, which the modelled trainer ignores."""
    return rewards


class _SimulatedRun:
    """The driver processes of one run: each resumes the newest checkpoint and ends by a fault or at the last step."""

    def __init__(self, scenario: Scenario, *, fetch: bool, folder: Path | None) -> None:
        self.scenario = scenario
        self.result = Simulation()
        self.generated = 0
        """Tokens of earlier driver processes, if a ledger keeps their rollouts."""
        self.fetch = fetch
        self._folder = folder
        self._faults = list(scenario.faults)
        self._state: DriverState | None = None
        self._dropped_at_checkpoint: dict[int, str] = {}

    async def run(self) -> Simulation:
        while True:
            process = _DriverProcess(self, self._state)
            try:
                await process.run()
            except* (AsyncRLError, OSError) as failure:
                self._record_failure(failure)
            finally:
                await process.close()
            if process.finished:
                return self.result

    def open_ledger(self) -> Any:
        """Open the ledger for a new driver process; return None if the run keeps none."""
        if self._folder is None:
            return None
        if self._state is None:  # without a checkpoint, the run starts again
            self.generated = 0
            for file in self._folder.iterdir():
                file.unlink()
        resume = ledger_base(self._state) if self._state is not None else None
        return _part("asyncrl.ledgers", "sqlite")(self._folder / "ledger.sqlite", resume=resume, threaded=False)

    def take_fault(self, at: int, kind: str) -> Fault | None:
        """Remove and return the fault of this kind that is due at this group_id or step."""
        for index, fault in enumerate(self._faults):
            if fault.at == at and fault.kind == kind:
                self.result.injected.append(fault)
                return self._faults.pop(index)
        return None

    def checkpoint(self, state: DriverState, *, dropped: dict[int, str]) -> None:
        """Store the state that the next driver process resumes, and what had been ``dropped`` then."""
        self._state = state
        self._dropped_at_checkpoint = dropped

    def _record_failure(self, failure: BaseExceptionGroup[AsyncRLError | OSError]) -> None:
        first = first_cause(failure)
        self.result.ended_by.append(f"{type(first).__name__}: {first}")
        if len(self.result.ended_by) > len(self.result.injected):  # no fault explains it
            raise first
        done = self._state.step if self._state is not None else 0
        self.result.scores = {step: versions for step, versions in self.result.scores.items() if step <= done}
        self.result.unscored = {step: reason for step, reason in self.result.unscored.items() if step <= done}
        self.result.steps = [step for step in self.result.steps if step.step <= done]
        self.result.trained = [batch for batch in self.result.trained if batch.step <= done]
        if self._folder is None or self._state is None:  # a ledger also has the drops after the checkpoint
            self.result.dropped = dict(self._dropped_at_checkpoint)


class _DuplicatingBuffer:
    """The replay buffer, which receives some groups twice."""

    def __init__(self, buffer: ReplayBuffer, run: _SimulatedRun) -> None:
        self._buffer = buffer
        self._run = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._buffer, name)

    def put(self, summary: GroupSummary, rows: DataProto | DataProtoFuture, **options: Any) -> None:
        self._buffer.put(summary, rows, **options)
        if self._run.take_fault(summary.group_id, "duplicate"):
            asyncio.get_running_loop().call_later(0.1, self._put_again, summary, rows)

    def _put_again(self, summary: GroupSummary, rows: DataProto | DataProtoFuture) -> None:
        before = self._buffer.statistics()
        try:
            self._buffer.put(summary, rows)
        except InvalidDataError:
            if self._buffer.statistics() != before:
                self._run.result.violations.append(
                    f"a refused duplicate of group_id {summary.group_id} changed the buffer"
                )
        else:
            self._run.result.violations.append(f"rows of group_id {summary.group_id} were taken twice")


class _DriverProcess:
    """A simulated process of the driver with all of its parts; it is also the driver's observer."""

    def __init__(self, run: _SimulatedRun, resumed: DriverState | None) -> None:
        self._run = run
        self._scenario = scenario = run.scenario
        self._clock = asyncio.get_running_loop().time
        self._started_s = self._clock()
        self.finished = False
        step = resumed.step if resumed is not None else 0
        self._replicas = {
            f"replica-{number}": ModelledReplica(scenario, f"replica-{number}", take_fault=run.take_fault)
            for number in range(scenario.replicas)
        }
        self._trainer = ModelledTrainer(scenario, take_fault=run.take_fault, weight_version=step, fetch=run.fetch)
        self._dead: list[ModelledReplica] = []
        self._lost_tokens = 0
        self._pool = RolloutPool(
            self._replicas,
            deadline_s=scenario.weights_deadline_s,
            rollout_deadline_s=scenario.rollout_deadline_s,
            revive=self._revive if scenario.revive_s is not None else None,
            restart_s=scenario.revive_s or 0.0,
        )
        timeline = Timeline(clock=self._clock, max_events=1)
        self._pool.on_state(timeline.replica_state)
        self._rewards = ModelledRewards(scenario)
        self._ledger: Ledger | None = run.open_ledger()
        policy = scenario.staleness
        start = starting_point(
            resumed,
            self._ledger,
            steps=scenario.steps,
            groups_per_step=scenario.groups_per_step,
            max_staleness=scenario.max_staleness,
            policy=policy,
            generated=run.generated if self._ledger is not None else 0,
            endless=scenario.endless,
        )
        self._generated_before = start.generated
        self._recovered = start.journal.recovered
        evaluate_first = step in self._due and step not in run.result.scores
        if resumed is not None:
            for lost in lost_scores(resumed, scored=run.result.scores, again=step if evaluate_first else None):
                self.unscored(lost, "the run stopped while it was evaluated")
        buffer: ReplayBuffer = _part("asyncrl.replay_buffers", "replay")(
            **{
                "capacity": max(scenario.capacity_groups, start.places),
                "batch_groups": scenario.groups_per_step,
                "max_staleness": policy.buffer_bound(scenario.max_staleness, steps=scenario.steps),
                "selection": policy.selection,
                "columns": ("scores",) if scenario.reward_s is not None else (),
                **scenario.buffer,
            }
        )
        self._buffer: ReplayBuffer = cast("ReplayBuffer", _DuplicatingBuffer(buffer, run))
        self._buffer.on_drop(self._dropped)
        self.driver = Driver(
            plan=TrainingPlan(
                steps=scenario.steps,
                groups_per_step=scenario.groups_per_step,
                group_size=scenario.group_size,
                seed=scenario.seed,
                evaluation=EvaluationPlan(
                    tasks=scenario.eval_tasks,
                    every=scenario.eval_every,
                    replicas=scenario.eval_replicas,
                    reward="environment",
                ),
                checkpoint_every=scenario.checkpoint_every,
            ),
            law=start.law,
            groups=start.groups,
            reused=start.reused,
            stages=GroupStages(
                group_size=scenario.group_size,
                seed=scenario.seed,
                pool=self._pool,
                environments=SingleTurnFactory(prompt="?"),
                buffer=self._buffer,
                journal=start.journal,
                timeline=timeline,
                version=lambda: start.law.version,
                reward=self._rewards.score if scenario.reward_s is not None else None,
            ),
            learner=Learner(
                trainer=cast("TrainerGroup", self._trainer),
                advantages=Advantages(
                    estimator=AdvantageEstimator("rewards", _rewards, {}), by_turns=scenario.reward_s is None
                ),
                policy=policy,
                max_staleness=scenario.max_staleness,
            ),
            observer=self,
            save_checkpoint=self._save,
            evaluate_first=evaluate_first,
            devices=self._shared_devices() if scenario.shared_devices else SeparateDevices(),
        )

    def _shared_devices(self) -> SharedDevices:
        async def wake_trainer() -> None:
            self._check_memory(trainer=False)
            await self._trainer.wake()

        async def wake_replicas() -> None:
            self._check_memory(trainer=True)
            await self._pool.wake()

        return SharedDevices(
            rollouts=Side(sleep=self._pool.sleep, wake=wake_replicas),
            trainer=Side(sleep=self._trainer.sleep, wake=wake_trainer),
            waiting=lambda: self.driver.timeline.wait("train", "hand-over"),
        )

    def _check_memory(self, *, trainer: bool) -> None:
        """Check before one side wakes that the other one has given its memory back; replicas that died have."""
        asleep = (
            not self._trainer.awake if trainer else not any(self._replicas[each].awake for each in self._pool.serving)
        )
        if not asleep:
            self._violated("trainer and replicas hold the memory of the devices at once")

    @property
    def _due(self) -> set[int]:
        """Steps that are evaluated beside training."""
        every = self._scenario.eval_every
        return set(range(every, self._scenario.steps, every)) if every else set()

    async def run(self) -> None:
        await self._pool.start("modelled", weight_version=self.driver.law.version)
        await self.driver.run()
        self.finished = True
        await self._check_totals()

    async def _check_totals(self) -> None:
        """Check at the end of the run that every token and every group is accounted for."""
        result, scenario = self._run.result, self._scenario
        balance = await self._balance()
        if balance.difference:
            self._violated(f"{balance.difference} tokens are unaccounted for: {balance}")
        group_ids = Counter(group_id for batch in result.trained for group_id in batch.group_ids)
        if len(result.trained) != scenario.steps:
            self._violated(f"{len(result.trained)} steps of {scenario.steps} were trained")
        if twice := [group_id for group_id, times in group_ids.items() if times > 1]:
            self._violated(f"group_ids {twice} were trained on twice")
        if both := group_ids.keys() & result.dropped.keys():
            self._violated(f"group_ids {sorted(both)} were dropped, and trained on")
        lost = set(range(self.driver.law.next_group_id)) - group_ids.keys() - result.dropped.keys()
        if lost and not scenario.endless:
            self._violated(f"group_ids {sorted(lost)} were issued, and neither trained on nor dropped")
        if silent := self._due - result.scores.keys() - result.unscored.keys():
            self._violated(f"steps {sorted(silent)} were to be evaluated, and have neither a score nor a reason")
        if self._ledger is not None:
            counts = self._ledger.statistics()
            if counts.unaccounted or counts.live or counts.consumed != scenario.steps * scenario.groups_per_step:
                self._violated(f"the ledger's counts do not add up: {counts}")

    async def _revive(self, name: str) -> ModelledReplica:
        """Replace a dead replica."""
        if self._scenario.shared_devices and self._trainer.awake:
            self._violated(f"{name} starts while the trainer holds the memory of the devices")
        self._dead.append(self._replicas[name])
        await self._dead[-1].aclose()
        self._replicas[name] = ModelledReplica(self._scenario, name, take_fault=self._run.take_fault)
        return self._replicas[name]

    async def close(self) -> None:
        """End all parts."""
        if self._ledger is not None:
            self._run.generated += (await self._pool.token_counts()).delivered
            await self._ledger.aclose()
        await self._pool.aclose()
        await self._trainer.aclose()
        await self._rewards.aclose()
        for replica in (*self._replicas.values(), *self._dead):
            await replica.aclose()

    def _read_clocks(self) -> None:
        result, timeline = self._run.result, self.driver.timeline
        result.busy_s = {stage: timeline.busy_s(stage) for stage in timeline.stages}
        result.idle = idle_shares(timeline.process_s(), self._pool.times())
        result.episodes = sum_totals(self._pool.times().values())
        result.work_s = timeline.spans_s()
        journal = self.driver.journal
        result.tokens = {"trained": journal.trained_tokens, "dropped": journal.dropped_tokens}
        result.span_s = self._clock() - self._started_s

    def stepped(self, record: StepRecord) -> None:
        """Check that the batch that the trainer received is the one in the driver's record, and obeys the laws."""
        result, scenario, driver = self._run.result, self._scenario, self.driver
        truth = self._trainer.trained[-1]
        result.trained.append(truth)
        statistics = self._buffer.statistics()
        result.steps.append(
            SimulatedStep(
                step=record.step,
                at_s=self._clock(),
                certificate=record.certificate,
                ready=statistics.ready,
                pending=statistics.pending,
                overdue=driver.law.overdue,
                waits_s=driver.timeline.wait_s().get("train", {}),
                used_s=sum(replica.used_s for replica in (*self._replicas.values(), *self._dead)),
            )
        )
        if record.step == scenario.steps:
            self._read_clocks()
        before = self._recovered.batches.get(record.step)
        if before is not None and before != truth.group_ids:
            self._violated(
                f"step {record.step} trained on group_ids {truth.group_ids}, and before a restart on {before}"
            )
        oldest = max(truth.staleness, default=0)
        if oldest > scenario.max_staleness and driver.learner.policy.too_old != "correct":
            self._violated(f"step {record.step} trained on tokens {oldest} versions old")
        if (
            dict(truth.staleness) != dict(record.certificate.histogram)
            or truth.masked != record.certificate.masked_tokens
        ):
            self._violated(f"the certificate of step {record.step} is not true: {record.certificate} of {truth}")
        if truth.step != record.step or len(truth.group_ids) != scenario.groups_per_step:
            self._violated(f"step {record.step} trained on {len(truth.group_ids)} groups, as step {truth.step}")
        occupied = statistics.pending + statistics.ready + statistics.selected
        if statistics.admitted != occupied + statistics.released + sum(statistics.dropped.values()):
            self._violated(f"the buffer's counts do not add up: {statistics}")
        done = (record.step - driver.law.first_version) * scenario.groups_per_step
        if driver.law.live - done != len({*driver.groups, *driver.law.again}):
            self._violated(
                f"step {record.step}: {driver.law.live} live groups, {done} trained on, "
                f"{len(driver.groups)} outstanding, {len(driver.law.again)} to be issued again"
            )

    def evaluated(self, result: EvaluationResult, *, step: int) -> None:
        """Check that a score with pinned replicas is of one version."""
        versions = (result.weight_version, result.newest_version)
        self._run.result.scores[step] = versions
        if self._scenario.eval_replicas and versions != (step, step):
            self._violated(f"the score of step {step} is of versions {versions}")

    def unscored(self, step: int, reason: str) -> None:
        self._run.result.unscored[step] = reason

    def unsaved(self, step: int, reason: str) -> None:
        self._run.result.unsaved[step] = reason

    def sampled(self, trajectory: dict[str, Any], *, step: int, group_id: int) -> None:
        """Do nothing: no scenario logs trajectories."""

    def _dropped(self, group: DroppedGroup) -> None:
        self._run.result.dropped[group.group_id] = group.reason

    async def _save(self, driver: Driver, step: int) -> Callable[[], Awaitable[None]]:
        async with driver.devices.trainer_turn():
            if self._scenario.checkpoint_s:
                await asyncio.sleep(self._scenario.checkpoint_s)
            if self._run.take_fault(step, "snapshot"):
                raise OSError(f"no room for the snapshot of step {step}")
            position = await self._ledger.durable() if self._ledger is not None else None
            balance = await self._balance()
            state = driver_state(driver, balance, step=step, history={}, position=position)
            dropped = dict(self._run.result.dropped)

        async def write() -> None:
            if self._scenario.checkpoint_write_s:
                await asyncio.sleep(self._scenario.checkpoint_write_s)
            if self._run.take_fault(step, "storage"):
                raise OSError(f"no space left for the checkpoint of step {step}")
            self._run.checkpoint(state, dropped=dropped)

        return write

    async def _balance(self) -> TokenBalance:
        counts = await self._pool.token_counts()
        self.driver.journal.drop_tokens("replica_lost", counts.lost - self._lost_tokens)
        self._lost_tokens = counts.lost
        generated = self._generated_before + counts.delivered
        return self.driver.balance(generated=generated, in_flight=counts.in_flight)

    def _violated(self, rule: str) -> None:
        self._run.result.violations.append(rule)


MOST_STEPS = 300
BOUNDS = (0, 1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The steady state of a simulated run.

    Attributes:
        tokens_per_s: tokens in the loss per second.
        trainer_idle: share of the time that the trainer waits, by reason.
        replicas_idle: unused share of the replicas' decoding speed.
        in_flight: mean number of groups that are rolling out.
        certificate: of all steps together.
    """

    scenario: Scenario
    step_s: float
    tokens_per_s: float
    trainer_idle: Mapping[str, float]
    replicas_idle: float
    in_flight: float
    certificate: Certificate


def scenario_of(config: Config) -> Scenario:
    """Return the run of ``config`` with the durations of its ``[simulation]`` table; at most 300 steps of it.

    On shared devices, memory is handed over in no time.

    Raises:
        ConfigError: what waits for training is another buffer's, or depends on rewards, which no simulation has.
    """
    model, trainer = config.simulation, config.trainer
    return Scenario(
        steps=min(config.steps, MOST_STEPS),
        groups_per_step=trainer.groups_per_step,
        group_size=trainer.group_size,
        max_staleness=config.max_staleness,
        policy=config.staleness.policy,
        tokens=Distribution.parse(model.tokens or f"uniform(1, {config.rollout.max_new_tokens})"),
        token_s=model.token_s,
        turns=model.turns,
        turn_s=Distribution.parse(model.turn_s),
        replicas=config.rollout.replicas,
        saturation=model.saturation or math.inf,
        reward_s=Distribution.parse(model.reward_s) if model.reward_s is not None else None,
        update_s=Distribution.parse(model.update_s),
        publish_s=model.publish_s,
        prepare_s=model.prepare_s,
        endless=True,
        eval_every=config.eval.every if config.eval.tasks else 0,
        eval_tasks=config.eval.tasks,
        eval_replicas=config.eval.replicas,
        shared_devices="rollout" in config.cluster.colocate,
        buffer=_simulated_buffer(config.buffer),
        seed=config.seed,
    )


_SIMULATED = (
    "window",
    "priority",
    "exponent",
    "seed",
    "eviction",
    "keep_groups",
    "samples_per_insert",
    "insert_tolerance",
)


def _simulated_buffer(buffer: BufferConfig) -> dict[str, Any]:
    """Return the options of the replay buffer that ``buffer`` sets; raise ConfigError for what cannot be simulated."""
    if buffer.kind not in ("replay", "remote"):
        text = f"buffer.kind = {part_text(buffer.kind)!r} cannot be simulated"
        raise ConfigError(text, path="buffer.kind", remedy="simulate replay in its place")
    given: dict[str, Any] = {"capacity": buffer.capacity_groups, "selection": buffer.selection}
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in buffer.options.items():
        if (name, value) in (("zero_variance", "keep"), ("max_uses", 1)) or name == "zero_variance_limit":
            continue  # as without it; the last one is of groups that are not kept
        if name not in _SIMULATED or value in ("advantage", "lowest_advantage"):
            what = f"buffer.options.{name} = {value!r}"
            text = f"{what} cannot be simulated: rewards, environments and further uses of groups are not"
            raise ConfigError(text, path=f"buffer.options.{name}", remedy="leave it out of what is simulated")
        given[name] = value
    return given


def forecast(scenario: Scenario) -> Forecast:
    """Simulate a scenario and average over all but its first third, when the run is in its steady state.

    Raises:
        AssertionError: the simulation violated one of the laws.
    """
    result = simulate(scenario)
    if result.violations:
        raise AssertionError("; ".join(result.violations[:3]))
    steps = result.steps[len(result.steps) // 3 :]
    span_s = steps[-1].at_s - steps[0].at_s
    certificate = merge(step.certificate for step in steps[1:]) if len(steps) > 1 else steps[0].certificate
    per_s = 1 / span_s if span_s else 0.0
    first, last = steps[0], steps[-1]
    return Forecast(
        scenario=scenario,
        step_s=span_s / max(len(steps) - 1, 1),
        tokens_per_s=certificate.tokens * per_s,
        trainer_idle={
            reason: (waited_s - first.waits_s.get(reason, 0.0)) * per_s for reason, waited_s in last.waits_s.items()
        },
        replicas_idle=1 - (last.used_s - first.used_s) * per_s / scenario.replicas,
        in_flight=sum(step.pending for step in steps) / len(steps),
        certificate=certificate,
    )


def search(scenario: Scenario, *, devices: int, trainer_devices: int, bounds: Sequence[int] = BOUNDS) -> list[Forecast]:
    """Forecast every split of ``devices`` into rollout replicas and trainer ranks, and every staleness bound.

    A replica takes one device. The time of an update is ``update_s`` on ``trainer_devices`` ranks, and inversely
    proportional to the number of ranks.

    Raises:
        ConfigError: replicas and trainer share their devices.
    """
    if scenario.shared_devices:
        text = "rollouts and trainer take turns on the same devices: there is no split to search"
        raise ConfigError(text, path="cluster.colocate", remedy="leave rollout out of it, or use asyncrl simulate")
    forecasts = []
    pinned = scenario.eval_replicas if scenario.eval_every else 0  # which leave one to training
    for ranks in range(1, devices - pinned):
        faster = trainer_devices / ranks
        update_s = Distribution(scenario.update_s.kind, _scaled(scenario.update_s, faster))
        split = replace(scenario, replicas=devices - ranks, update_s=update_s)
        forecasts += [forecast(replace(split, max_staleness=bound)) for bound in bounds]
    return forecasts


def best_of(forecasts: Sequence[Forecast], *, slack: float = 0.03) -> Forecast:
    """Return the forecast with the smallest staleness bound within ``slack`` of the fastest one's tokens per second."""
    fastest = max(each.tokens_per_s for each in forecasts)
    near = [each for each in forecasts if each.tokens_per_s >= (1 - slack) * fastest]
    return min(near, key=lambda each: (each.scenario.max_staleness, -each.tokens_per_s))


def _scaled(distribution: Distribution, factor: float) -> tuple[float, ...]:
    """Return the parameters of the distribution multiplied by ``factor``."""
    if distribution.kind == "lognormal":
        mu, sigma = distribution.parameters
        return (mu + math.log(factor), sigma)
    return tuple(parameter * factor for parameter in distribution.parameters)
