"""A whole run on the virtual clock: the production driver, law, buffer, pool and resumption, between modelled parts."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from torch import Tensor

from asyncrl.agents.single_turn import SingleTurnFactory
from asyncrl.algorithms import AdvantageEstimator
from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.errors import AsyncRLError, InvalidDataError
from asyncrl.interfaces import DroppedGroup, GroupSummary, Ledger, ReplayBuffer
from asyncrl.parts import load_part
from asyncrl.pipeline.accounts import TokenBalance
from asyncrl.pipeline.certificate import Certificate
from asyncrl.pipeline.checkpoint import DriverState
from asyncrl.pipeline.driver import Driver
from asyncrl.pipeline.evaluation import EvaluationResult
from asyncrl.pipeline.journal import Journal
from asyncrl.pipeline.resumption import (
    admission_law,
    driver_state,
    ledger_base,
    resumed_accounts,
    still_outstanding,
)
from asyncrl.pipeline.staleness import AdmissionLaw
from asyncrl.pipeline.training_plan import StepRecord, TrainingPlan
from asyncrl.rollout.pool import RolloutPool
from asyncrl.simulation.clock import run_virtually
from asyncrl.simulation.parts import ModelledReplica, ModelledRewards, ModelledTrainer, Trained
from asyncrl.simulation.scenario import Fault, Scenario
from asyncrl.telemetry.timeline import Timeline

__all__ = ["SimulatedStep", "Simulation", "simulate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """A training step: when it was done, its certificate, and how many groups were out, ready and overdue then."""

    step: int
    at_s: float
    certificate: Certificate
    ready: int
    pending: int
    overdue: int


@dataclass(slots=True, kw_only=True)
class Simulation:
    """What happened.

    Attributes:
        steps: the steps that counted, in order: those undone by a restart are not among them.
        trained: what the trainer was really given in them.
        ended_by: what ended each life but the last, in words.
        struck: faults that happened.
        issued: slots issued.
        dropped: slots given up for good, with the reason.
        waits_s: seconds waited in the last life, by stage and reason, until its last step was done; so the next three.
        busy_s: seconds at work, by stage.
        span_s: seconds that passed.
        used_s: seconds that all replicas together would have decoded at full speed.
        rollouts: mean tokens of all rollouts that ended.
        violations: rules that were broken; empty if all is well.
    """

    steps: list[SimulatedStep] = field(default_factory=list)
    trained: list[Trained] = field(default_factory=list)
    ended_by: list[str] = field(default_factory=list)
    struck: list[Fault] = field(default_factory=list)
    issued: int = 0
    dropped: dict[int, str] = field(default_factory=dict)
    waits_s: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    busy_s: Mapping[str, float] = field(default_factory=dict)
    span_s: float = 0.0
    used_s: float = 0.0
    rollouts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


def simulate(scenario: Scenario, *, fetch: bool = False, limit_s: float = 1e9) -> Simulation:
    """Run a scenario to its end, through all its faults; see :class:`Simulation`.

    Args:
        scenario: the run.
        fetch: let the trainer fetch every batch, and count what the real mask leaves of it.
        limit_s: virtual seconds after which a run that goes on is called stuck.

    Raises:
        SimulationDeadlock: nothing could happen any more, or it was not over after ``limit_s``.
        BaseException: a failure that is not one of asyncrl's own, and no fault explains.
    """
    with TemporaryDirectory(prefix="simulation-", dir=_FAST) if scenario.ledger else nullcontext() as folder:
        world = _World(scenario, fetch=fetch, folder=Path(folder) if folder is not None else None)
        return run_virtually(world.run(), seed=scenario.seed, limit_s=limit_s)


_FAST = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108
"""Where a ledger lies that has to survive nothing but its life: in memory, if there is a file system of that kind."""


@functools.cache
def _replay_buffer() -> Callable[..., ReplayBuffer]:
    """The installed replay buffer: this package does not know it by import."""
    buffer: Callable[..., ReplayBuffer] = load_part("asyncrl.replay_buffers", "replay", path="buffer.kind")
    return buffer


@functools.cache
def _ledger() -> Callable[..., Any]:
    """The installed ledger, likewise."""
    ledger: Callable[..., Any] = load_part("asyncrl.ledgers", "sqlite", path="ledger.kind")
    return ledger


def _rewards(rewards: Tensor) -> Tensor:
    """An advantage for a trainer that does not look at it."""
    return rewards


class _World:
    """Lives of one run: each begins where the newest checkpoint was, and ends by a fault or at the last step."""

    def __init__(self, scenario: Scenario, *, fetch: bool, folder: Path | None) -> None:
        self.scenario = scenario
        self.result = Simulation()
        self.generated = 0
        """Tokens that the lives before this one made, where a ledger goes on with them."""
        self._fetch = fetch
        self._folder = folder
        self._faults = list(scenario.faults)
        self._state: DriverState | None = None
        self._dropped_at_checkpoint: dict[int, str] = {}

    async def run(self) -> Simulation:
        while True:
            life = _Life(self, self._state)
            try:
                await life.run()
            except* (AsyncRLError, OSError) as failure:
                self._end(failure)
            finally:
                await life.close()
            if life.over:
                return self.result

    def open_ledger(self) -> Any:
        """The ledger of a life that begins; None where none is kept."""
        if self._folder is None:
            return None
        if self._state is None:  # it died before its first checkpoint, and begins anew
            self.generated = 0
            for file in self._folder.iterdir():
                file.unlink()
        resume = ledger_base(self._state) if self._state is not None else None
        return _ledger()(self._folder / "ledger.sqlite", resume=resume, threaded=False)

    def strike(self, at: int, kind: str) -> Fault | None:
        """The fault of this kind that is due at this slot or step, once."""
        for index, fault in enumerate(self._faults):
            if fault.at == at and fault.kind == kind:
                self.result.struck.append(fault)
                return self._faults.pop(index)
        return None

    def checkpoint(self, state: DriverState) -> None:
        """What a later life begins with."""
        self._state = state
        self._dropped_at_checkpoint = dict(self.result.dropped)

    def _end(self, failure: BaseExceptionGroup[AsyncRLError | OSError]) -> None:
        first: BaseException = failure
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        self.result.ended_by.append(f"{type(first).__name__}: {first}")
        if len(self.result.ended_by) > len(self.result.struck):
            raise first
        done = self._state.step if self._state is not None else 0
        self.result.steps = [step for step in self.result.steps if step.step <= done]
        self.result.trained = [batch for batch in self.result.trained if batch.step <= done]
        if self._folder is None or self._state is None:  # a ledger remembers what was given up after the checkpoint
            self.result.dropped = dict(self._dropped_at_checkpoint)


class _DuplicatingBuffer:
    """The replay buffer, into which some groups are put twice."""

    def __init__(self, buffer: ReplayBuffer, world: _World) -> None:
        self._buffer = buffer
        self._world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._buffer, name)

    def put(self, summary: GroupSummary, rows: DataProto | DataProtoFuture, **options: Any) -> None:
        self._buffer.put(summary, rows, **options)
        if self._world.strike(summary.slot, "duplicate"):
            asyncio.get_running_loop().call_later(0.1, self._put_again, summary, rows)

    def _put_again(self, summary: GroupSummary, rows: DataProto | DataProtoFuture) -> None:
        before = self._buffer.statistics()
        try:
            self._buffer.put(summary, rows)
        except InvalidDataError:
            if self._buffer.statistics() != before:
                self._world.result.violations.append(f"a refused duplicate of slot {summary.slot} changed the buffer")
        else:
            self._world.result.violations.append(f"rows of slot {summary.slot} were taken twice")


class _Life:
    """One process of the driver, from its start to its end. Also the driver's observer."""

    def __init__(self, world: _World, resumed: DriverState | None) -> None:
        self._world = world
        self._scenario = scenario = world.scenario
        self._resumed = resumed
        self._clock = asyncio.get_running_loop().time
        self._begun_s = self._clock()
        self.over = False
        step = resumed.step if resumed is not None else 0
        self._replicas = {
            f"replica-{number}": ModelledReplica(scenario, f"replica-{number}", strike=world.strike)
            for number in range(scenario.replicas)
        }
        self._trainer = ModelledTrainer(scenario, strike=world.strike, weight_version=step, fetch=world._fetch)  # noqa: SLF001
        self._dead: list[ModelledReplica] = []
        self._lost_tokens = 0
        self._pool = RolloutPool(
            self._replicas,
            deadline_s=scenario.weights_deadline_s,
            rollout_deadline_s=scenario.rollout_deadline_s,
            revive=self._revive if scenario.revive_s is not None else None,
            restart_s=scenario.revive_s or 0.0,
        )
        self._rewards = ModelledRewards(scenario)
        self._ledger: Ledger | None = world.open_ledger()
        journal = Journal(self._ledger)
        self._found = found = journal.recovered
        policy = scenario.staleness
        held, again = still_outstanding(resumed, found, total_groups=(scenario.steps - step) * scenario.groups_per_step)
        used = sum(1 for group in found.groups.values() if group.uses)
        buffer: ReplayBuffer = _replay_buffer()(
            capacity=max(scenario.capacity_groups, len(held) + len(again) + used),
            batch_groups=scenario.groups_per_step,
            max_staleness=scenario.steps if policy.keeps_groups else scenario.max_staleness,
            selection=policy.selection,
            columns=("scores",) if scenario.reward_s is not None else (),
            **scenario.buffer,
        )
        self._buffer: ReplayBuffer = cast("ReplayBuffer", _DuplicatingBuffer(buffer, world))
        self._buffer.on_drop(self._dropped)
        law = admission_law(
            resumed,
            steps=scenario.steps,
            groups_per_step=scenario.groups_per_step,
            max_staleness=scenario.max_staleness,
            policy=policy,
            found=found,
        )
        if scenario.endless:
            law = AdmissionLaw(
                scenario.groups_per_step, max_staleness=scenario.max_staleness, overdue_after=law.overdue_after
            )
        self.driver = Driver(
            plan=TrainingPlan(
                steps=scenario.steps,
                groups_per_step=scenario.groups_per_step,
                group_size=scenario.group_size,
                advantage=AdvantageEstimator("rewards", _rewards, {}),
                seed=scenario.seed,
                eval_tasks=0,
                checkpoint_every=scenario.checkpoint_every,
                sample_trajectories=0,
            ),
            trainer=self._trainer,
            pool=self._pool,
            buffer=self._buffer,
            law=law,
            environments=SingleTurnFactory(prompt="?"),
            timeline=Timeline(clock=self._clock, max_events=1),
            observer=self,
            journal=journal,
            outstanding={*held, *(again if found.next_slot else ())},
            accounts=resumed_accounts(
                resumed, found=found, generated=world.generated if self._ledger is not None else None
            ),
            staleness=Counter(resumed.staleness if resumed is not None else {}),
            reward=self._rewards.score if scenario.reward_s is not None else None,
            save_checkpoint=self._save,
            policy=policy,
        )

    async def run(self) -> None:
        await self._pool.start("modelled", weight_version=self.driver.law.version)
        await self.driver.run()
        self.over = True
        await self._settle()

    async def _settle(self) -> None:
        """The books at the end of the run."""
        result, scenario = self._world.result, self._scenario
        balance = await self._balance()
        if balance.difference:
            self._violated(f"{balance.difference} tokens are unaccounted for: {balance}")
        slots = Counter(slot for batch in result.trained for slot in batch.slots)
        if len(result.trained) != scenario.steps:
            self._violated(f"{len(result.trained)} steps of {scenario.steps} were trained")
        if twice := [slot for slot, times in slots.items() if times > 1]:
            self._violated(f"slots {twice} were trained on twice")
        if both := slots.keys() & result.dropped.keys():
            self._violated(f"slots {sorted(both)} were dropped, and trained on")
        lost = set(range(self.driver.law.next_slot)) - slots.keys() - result.dropped.keys()
        if lost and not scenario.endless:
            self._violated(f"slots {sorted(lost)} were issued, and neither trained on nor dropped")
        if self._ledger is not None:
            counts = self._ledger.statistics()
            if counts.unaccounted or counts.live or counts.consumed != scenario.steps * scenario.groups_per_step:
                self._violated(f"the ledger's books do not add up: {counts}")
        result.issued = self.driver.law.next_slot

    async def _revive(self, name: str) -> ModelledReplica:
        """A replica in place of a dead one."""
        self._dead.append(self._replicas[name])
        await self._dead[-1].aclose()
        self._replicas[name] = ModelledReplica(self._scenario, name, strike=self._world.strike)
        return self._replicas[name]

    async def close(self) -> None:
        """Every process ends."""
        if self._ledger is not None:
            self._world.generated += (await self._pool.token_counts()).delivered
            await self._ledger.aclose()
        await self._pool.aclose()
        await self._trainer.aclose()
        await self._rewards.aclose()
        for replica in (*self._replicas.values(), *self._dead):
            await replica.aclose()
            self._world.result.rollouts.update(replica.finished)

    def _read_clocks(self) -> None:
        result, timeline = self._world.result, self.driver.timeline
        result.waits_s = timeline.wait_s()
        result.busy_s = {stage: timeline.busy_s(stage) for stage in timeline.stages}
        result.span_s = self._clock() - self._begun_s
        result.used_s = sum(replica.used_s for replica in (*self._replicas.values(), *self._dead))

    # ---------------------------------------------------------------------------------------------- the observer's face

    def stepped(self, record: StepRecord) -> None:
        """A step is done: what the trainer was really given must be what the driver says, and within the law."""
        result, scenario, driver = self._world.result, self._scenario, self.driver
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
            )
        )
        if record.step == scenario.steps:
            self._read_clocks()
        before = self._found.batches.get(record.step)
        if before is not None and before != truth.slots:
            self._violated(f"step {record.step} trained on slots {truth.slots}, and in an earlier life on {before}")
        oldest = max(truth.staleness, default=0)
        if oldest > scenario.max_staleness and driver.policy.too_old != "correct":
            self._violated(f"step {record.step} trained on tokens {oldest} versions old")
        if (
            dict(truth.staleness) != dict(record.certificate.histogram)
            or truth.masked != record.certificate.masked_tokens
        ):
            self._violated(f"the certificate of step {record.step} is not true: {record.certificate} of {truth}")
        if truth.step != record.step or len(truth.slots) != scenario.groups_per_step:
            self._violated(f"step {record.step} trained on {len(truth.slots)} groups, as step {truth.step}")
        occupied = statistics.pending + statistics.ready + statistics.selected
        if statistics.admitted != occupied + statistics.released + sum(statistics.dropped.values()):
            self._violated(f"the buffer's books do not add up: {statistics}")
        done = (record.step - driver.law.first_version) * scenario.groups_per_step
        if driver.law.live - done != len({*driver.outstanding, *driver.law.again}):
            self._violated(
                f"step {record.step}: {driver.law.live} live groups, {done} trained on, "
                f"{len(driver.outstanding)} outstanding, {len(driver.law.again)} to be issued again"
            )

    def evaluated(self, result: EvaluationResult, *, step: int) -> None:
        """No scenario evaluates."""

    def sampled(self, trajectory: dict[str, Any], *, step: int, slot: int) -> None:
        """No scenario samples."""

    # ------------------------------------------------------------------------------------------------------------ parts

    def _dropped(self, group: DroppedGroup) -> None:
        self._world.result.dropped[group.slot] = group.reason

    async def _save(self, driver: Driver, step: int) -> None:
        if self._world.strike(step, "storage"):
            raise OSError(f"no space left for the checkpoint of step {step}")
        position = await self._ledger.durable() if self._ledger is not None else None
        balance = await self._balance()
        self._world.checkpoint(driver_state(driver, balance, step=step, history={}, position=position))

    async def _balance(self) -> TokenBalance:
        counts = await self._pool.token_counts()
        self.driver.accounts.drop("replica_lost", counts.lost - self._lost_tokens)
        self._lost_tokens = counts.lost
        before = self._resumed.generated if self._resumed is not None else 0
        if self._ledger is not None:
            before = self._world.generated
        return self.driver.balance(generated=before + counts.delivered, in_flight=counts.in_flight)

    def _violated(self, rule: str) -> None:
        self._world.result.violations.append(rule)
