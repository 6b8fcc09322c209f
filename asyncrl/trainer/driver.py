"""The training loop: groups are issued, sampled, trained on and published, and all of it overlaps.

    prompts --> admission --> rollout --> (reward, reference, values) --> buffer --> update --> publish --> engines
       ^                                                                                           |
       '---------------------------- a new version admits new groups -------------------------------'

One loop for all degrees of asynchrony. ``max_staleness`` alone decides how far sampling may run ahead of training
(:mod:`asyncrl.staleness` has the law and its proof): at 0 the two take turns, which is the synchronous loop; at 1 the
groups of the next step are sampled while this one trains, which is one-step-off; above it is fully asynchronous.

:class:`Driver` has the loop alone: :mod:`asyncrl.trainer.group` has the groups, :mod:`asyncrl.trainer.journal` the
record, :mod:`asyncrl.trainer.learner` the step, :mod:`asyncrl.trainer.recovery` what a resumed run starts from.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.errors import AsyncRLError, EnvironmentFailure, ResourceError, RolloutsLostError, VersionLostError
from asyncrl.interfaces import DroppedGroup, OutOfProcessReplayBuffer, ReplayBuffer, SelectedGroup
from asyncrl.ledger import Committed, Published
from asyncrl.runtime import shield_until_done
from asyncrl.staleness import AdmissionLaw
from asyncrl.telemetry.timeline import PAUSED, Timeline
from asyncrl.trainer.checkpoint import NOT_WRITTEN, CheckpointPace
from asyncrl.trainer.colocation import Devices, SeparateDevices
from asyncrl.trainer.evaluation import EvaluationPlan, EvaluationResult, evaluate, part_means
from asyncrl.trainer.group import Failure, Group, GroupStages, TaskChoice
from asyncrl.trainer.invariants import GroupBook, check_bound, check_served
from asyncrl.trainer.journal import Journal, TokenBalance
from asyncrl.trainer.learner import Learner, StepRecord
from asyncrl.weights import WeightManifest, joined, manifest_fingerprint

_log = logging.getLogger(__name__)

LEAST_PATIENCE_S = 2.0
"""Time for which an interrupted run finishes its step in any case: short steps take several times as long by chance."""

MOST_PATIENCE_S = 10.0
"""Longest time for which an interrupted run finishes its step; a checkpoint that takes longer is not saved then."""

_MOST_REUSED = 10_000
"""Groups that were trained on, and whose task and baseline are kept for another use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """The numbers of a run.

    Attributes:
        steps: training steps in all, those before a resume included.
        groups_per_step: groups that one step trains on, of ``group_size`` rows each.
        max_uses: steps that may train on one group; None where only the buffer knows.
        in_order: whether every step takes the lowest numbers among the groups that it may take.
        checkpoint_every: steps between two checkpoints; None: as often as they cost little; 0: none between steps.
        trajectories_per_step: groups of each step of which one trajectory is shown to the observer.
    """

    steps: int
    groups_per_step: int
    group_size: int
    seed: int = 0
    max_uses: int | None = None
    in_order: bool = False
    evaluation: EvaluationPlan = field(default_factory=EvaluationPlan)
    checkpoint_every: int | None = 0
    trajectories_per_step: int = 0
    announces: bool = False
    """Whether each version is announced, once it serves, to pools that belong to no run."""


class Observer(Protocol):
    """Gets what happens in a run. Called on the event loop, so it must not block."""

    def stepped(self, record: StepRecord) -> None: ...

    def evaluated(self, result: EvaluationResult, *, step: int) -> None: ...

    def unscored(self, step: int, reason: str) -> None: ...

    def unsaved(self, step: int, reason: str) -> None: ...

    def sampled(self, trajectory: dict[str, Any], *, step: int, group_id: int) -> None: ...


@dataclass(slots=True, kw_only=True)
class Driver:
    """Runs a plan on parts that were put together elsewhere (:mod:`asyncrl.trainer.run`).

    Attributes:
        stages: samples groups and completes them; it has the buffer, the pool and the journal.
        groups: issued and neither trained on nor dropped, by id; a resumed run starts with those of the runs before.
        reused: groups that were trained on and may be again, as far as the buffer does not have them; a resumed run
            starts with those that recorded batches train on once more.
        save_checkpoint: awaited between two steps, with this driver and the number of the step that is done; returns
            what writes the checkpoint, while training goes on.
        before_step: called before each step, with its number; returns what has to be awaited, if anything, once the
            last version is published.
        tasks: chooses the tasks of groups; None: each group gets the task of its number.
        evaluate_first: whether a resumed run still has to evaluate the step it starts from.
        evaluating: steps whose evaluation beside training has begun, and which have no score yet.
        devices: of rollouts and trainer, which may take turns on the same ones.
        published: versions whose bytes the trainer holds.
        whole_step: the step whose weights the trainer holds; None while an update runs, and after one was cut off.
    """

    plan: TrainingPlan
    law: AdmissionLaw
    stages: GroupStages
    learner: Learner
    observer: Observer
    groups: dict[int, Group] = field(default_factory=dict)
    reused: dict[int, Group] = field(default_factory=dict)
    save_checkpoint: Callable[[Driver, int], Awaitable[Callable[[], Awaitable[object]]]] | None = None
    before_step: Callable[[Driver, int], Awaitable[None] | None] | None = None
    evaluate_first: bool = False
    tasks: TaskChoice | None = None
    devices: Devices = field(default_factory=SeparateDevices)
    published: set[int] = field(default_factory=set[int])
    evaluating: set[int] = field(default_factory=set[int], init=False)
    whole_step: int | None = field(default=None, init=False)
    _step_s: float = 0.0
    _admission_changed: asyncio.Event = field(default_factory=asyncio.Event)
    _resumed: asyncio.Event = field(default_factory=asyncio.Event)
    _failures_in_a_row: int = 0
    _evaluations: set[asyncio.Task[None]] = field(default_factory=set)
    write_cut_off: bool = field(default=False, init=False)
    """Whether a checkpoint is being written still, which an interrupted run has waited for long enough."""
    _writing: asyncio.Task[None] | None = None
    _rebase: bool = False
    _recovered: list[Group] = field(default_factory=list)
    """Groups of the runs before, with rows, that wait for the version which sampled the newest of them."""
    _releasing: asyncio.Task[None] | None = None
    _unannounced: WeightManifest | None = None
    _announcing: asyncio.Task[None] | None = None
    _book: GroupBook = field(init=False)

    def __post_init__(self) -> None:
        self._book = GroupBook(
            groups_per_step=self.law.groups_per_step,
            max_staleness=self.law.max_staleness,
            overdue_after=self.law.overdue_after,
            first_version=self.law.first_version,
            max_uses=self.plan.max_uses,
            in_order=self.plan.in_order,
            live={*self.groups, *self.law.again},
            pending={*self.groups, *self.reused, *self.law.again},
        )

    @property
    def buffer(self) -> ReplayBuffer:
        return self.stages.buffer

    @property
    def journal(self) -> Journal:
        return self.stages.journal

    @property
    def timeline(self) -> Timeline:
        return self.stages.timeline

    async def run(self) -> None:
        """Train until ``plan.steps`` is reached.

        Raises:
            ExceptionGroup: of what ended the stages; the first cause is in it with its name.
        """
        self.buffer.on_drop(self._dropped)
        self._resumed.set()
        with self.timeline.processes():
            async with asyncio.TaskGroup() as tasks:
                if self.evaluate_first:
                    self._evaluate_beside(tasks, self.law.first_version, after=None)
                await self._enter_recovered(tasks)
                issuing = tasks.create_task(self._issue(tasks), name="issue")
                await self._train(tasks)
                issuing.cancel()  # it waits for a version, or for a place that nothing frees any more
                await self._evaluated()

    @property
    def paused(self) -> bool:
        """Whether it waits for :meth:`resume`, or will after this step."""
        return not self._resumed.is_set() and self.law.version < self.plan.steps

    def pause(self) -> None:
        """Issue no group and begin no step until :meth:`resume`; those that are begun are finished."""
        self._resumed.clear()

    def resume(self) -> None:
        self._resumed.set()

    # ---------------------------------------------------------------------------------------------------- the loop

    async def _issue(self, tasks: asyncio.TaskGroup) -> None:
        """Issue groups as the law admits them and the buffer has room for them, until cancelled."""
        while True:
            await self._not_paused("issue")
            if not self.law.may_issue():
                self._admission_changed.clear()
                with self.timeline.wait("issue", "end of the run" if self.law.finished else "staleness bound"):
                    await self._admission_changed.wait()
                continue
            horizon, group_id = self.law.horizon, self.law.issue()
            # While replicas commit a version it is the pool's already, and the law's once all of them serve it.
            self._book.issued(group_id, served=min(self.law.version, self.stages.pool.weight_version))
            group = self.groups.setdefault(group_id, Group(group_id=group_id))
            if self.tasks is not None and group.task is None:
                group.task = self.tasks.choose(group_id, horizon=horizon)
            self.journal.issued(group_id, task=group.task)
            if group_id not in self.journal.recovered.waiting:  # those have their places
                with self.timeline.wait("issue", "room in the buffer"):
                    await self.buffer.admit(group_id)
            tasks.create_task(self._sample(group), name=f"group {group_id}")

    async def _sample(self, group: Group) -> None:
        show = group.group_id % self.plan.groups_per_step < self.plan.trajectories_per_step
        failure, trajectory = await self.stages.sample(group, show=show)
        if failure is not None:
            self._failed(group, failure)
            return
        self._failures_in_a_row = 0
        self.law.finished_group(group.group_id)
        self._book.sampled(group.group_id)
        if trajectory is not None:
            self.observer.sampled(trajectory, step=self.law.version + 1, group_id=group.group_id)
        await self.stages.complete(group)
        self._book.completed(group.group_id)
        self._count_groups()

    async def _train(self, tasks: asyncio.TaskGroup) -> None:
        """Train step by step; the publication of a version overlaps with the update that follows it."""
        publication: asyncio.Task[None] | None = None
        pace = CheckpointPace(self.plan.checkpoint_every)
        pace.begin(now_s=asyncio.get_running_loop().time())
        for step in range(self.law.version + 1, self.plan.steps + 1):
            await self._not_paused("train")
            if self.before_step is not None and (change := self.before_step(self, step)) is not None:
                if publication is not None:
                    await publication
                await change
            with self.timeline.wait("train", "rollouts"):
                selected = await self._select(step)
            await self.buffer.settled()  # it may have dropped groups before it selected these
            if publication is not None and self.devices.shared:
                await self._published_by(publication)  # an engine that sleeps serves no version
            async with self.devices.trainer_turn():
                with self.timeline.span("train", f"step {step}", groups=len(selected)):
                    await self._finish_if_interrupted(self._step(step, selected))
                if publication is not None:
                    await self._published_by(publication)
                check_served(step - 1, law=self.law.version, pool=self.stages.pool.weight_version)
                if self._releasing is not None and not self._releasing.done():
                    with self.timeline.wait("train", "release"):
                        await self._releasing  # the trainer holds so many versions, and no more
                # Called here, not in the task: the trainer runs calls in order, and the next update comes after this.
                manifest = self.learner.trainer.publish(step, *([True] if self._rebase else []))
                if self.devices.shared:
                    await manifest
            publication = tasks.create_task(self._publish(tasks, step, manifest), name=f"publish {step}")
            await self._checkpoint(tasks, step, pace, after=publication)
            evaluation = self.plan.evaluation
            if evaluation.tasks and evaluation.every and step % evaluation.every == 0 and step < self.plan.steps:
                self._evaluate_beside(tasks, step, after=publication)
        if publication is not None:
            await self._published_by(publication)
        await self.checkpoint_written()

    async def _not_paused(self, owner: str) -> None:
        while not self._resumed.is_set():
            with self.timeline.wait(owner, PAUSED):
                await self._resumed.wait()

    async def _published_by(self, publication: asyncio.Task[None]) -> None:
        with self.timeline.wait("train", "publication"):
            await publication

    async def _select(self, step: int) -> Sequence[SelectedGroup]:
        """Take the next batch; one without a token within the bound is dropped for groups sampled from now on."""
        oldest = self.learner.oldest_version(step)
        if (recorded := self.journal.recovered.batches.get(step)) is not None:
            return await self.buffer.select(len(recorded), weight_version=step - 1, group_ids=recorded)
        while True:
            selected = await self.buffer.select(self.plan.groups_per_step, weight_version=step - 1)
            counts = [group.summary.version_tokens for group in selected]
            if oldest is None or any(each[version] and version >= oldest for each in counts for version in each):
                return selected
            for group in selected:
                self.buffer.drop(group.summary.group_id, "stale")

    async def _step(self, step: int, selected: Sequence[SelectedGroup]) -> None:
        begun_s, self.whole_step = asyncio.get_running_loop().time(), None
        self.observer.stepped(await self._update(step, selected))
        self.whole_step, self._step_s = step, asyncio.get_running_loop().time() - begun_s

    async def _finish_if_interrupted(self, step: Coroutine[Any, Any, None]) -> None:
        """Finish a step that is interrupted, if it takes about as long as the one before, and that is not long."""
        running = asyncio.ensure_future(step)
        loop = asyncio.get_running_loop()

        def interrupted() -> None:
            patience_s = min(max(2 * self._step_s, LEAST_PATIENCE_S), MOST_PATIENCE_S)
            loop.call_later(patience_s, running.cancel)

        await shield_until_done(running, on_cancel=interrupted)

    async def _update(self, step: int, selected: Sequence[SelectedGroup]) -> StepRecord:
        recorded = step in self.journal.recovered.batches
        self._book.trained(step, selected, recorded=recorded)
        groups = [self._group_of(each) for each in selected]
        first = step == self.law.first_version + 1
        record = await self.learner.learn(step, groups, first=first, drops=self.journal.take_drops())
        if self.learner.policy.too_old != "correct" and not recorded:  # the bound may have changed since
            check_bound(record.certificate, step=step, max_staleness=self.law.max_staleness)
        self.journal.trained(
            step, selected, tokens=record.tokens_trained, certificate=record.certificate, reused=record.reused
        )
        if self.tasks is not None:
            self.tasks.learned(step, groups)
        self.buffer.release([group.group_id for group in groups])
        for group in groups:
            self._used(group)
        ready, pending = self._count_groups()
        if not isinstance(self.buffer, OutOfProcessReplayBuffer):  # its counts are those of a moment ago
            self._book.check_pending(pending)
        return dataclasses.replace(
            record,
            groups_ready=ready,
            groups_pending=pending,
            reward_parts=part_means(group.known.reward_parts for group in groups),
            checks=self.journal.take_checks(),
        )

    async def _publish(
        self, tasks: asyncio.TaskGroup, version: int, manifest: Awaitable[Sequence[WeightManifest | None]]
    ) -> None:
        """Bring the weights of ``version`` into every engine, then let the law admit new groups."""
        with self.timeline.span("publish", f"version {version}"):
            with self.timeline.wait("publish", "trainer"):
                weights = joined(await manifest)
            self.published.add(version)
            self.journal.record(Published(version=version, weights=manifest_fingerprint(weights)))
            ended = await self.stages.pool.publish(weights)
            self._rebase = bool(ended.fenced)
            self.journal.count_proofs(self.stages.pool.take_proofs())
        self.law.published(version)
        self._admission_changed.set()
        self._releasing = tasks.create_task(self._release(), name=f"release before {version}")
        self._go_on(tasks)
        if self.plan.announces and ended.committed:
            self._unannounced = weights
            if self._announcing is None or self._announcing.done():
                self._announcing = tasks.create_task(self._announce(), name="announce")

    async def _release(self) -> None:
        """Release versions that no replica needs any more. One that cannot be released is tried again with the next."""
        for old in sorted(self.published - self.stages.pool.needed_versions):
            with self.timeline.span("release", f"version {old}"):
                try:
                    await self.learner.trainer.release(old)
                except AsyncRLError as error:  # a worker that has died fails at its next call
                    _log.warning("version %d is not released: %s", old, error)
                else:
                    self.published.discard(old)

    async def _announce(self) -> None:
        while (weights := self._unannounced) is not None:
            self._unannounced = None
            await self.learner.trainer.announce(weights)

    # ------------------------------------------------------------------------------------------------------- groups

    async def _enter_recovered(self, tasks: asyncio.TaskGroup) -> None:
        """Admit the groups of the runs before; those whose rows were recorded go on from there, beside the loop."""
        recovered = sorted((self.groups | self.reused).items())
        self._recovered = [group for _, group in recovered if group.rows is not None]
        self.journal.recovered.groups.clear()  # their rows are freed with the steps that train on them
        for group_id, _ in recovered:
            await self.buffer.admit(group_id, again=True)
        self._go_on(tasks)

    def _go_on(self, tasks: asyncio.TaskGroup) -> None:
        """Go on with recovered groups that the weights of now, or older ones, have sampled.

        So its values and its baseline are of no older weights than its rows, and of the same where the bound is 0.
        """
        waiting: list[Group] = []
        for group in self._recovered:
            if min(max(group.known.version_tokens), self.plan.steps) > self.law.version:
                waiting.append(group)
            else:
                tasks.create_task(self._sample(group), name=f"group {group.group_id}")
        self._recovered = waiting

    def _group_of(self, selected: SelectedGroup) -> Group:
        """Return the record of a group that the buffer hands out; one that is trained on again has left ``groups``."""
        group_id = selected.summary.group_id
        group = self.groups.get(group_id) or self.reused.get(group_id) or Group(group_id=group_id)
        group.summary, group.uses = selected.summary, selected.uses
        group.rows = DataProtoFuture.of(selected.rows) if isinstance(selected.rows, DataProto) else selected.rows
        return group

    def _used(self, group: Group) -> None:
        """Remove a group that was trained on; keep what the buffer does not have if it may be trained on again."""
        self.groups.pop(group.group_id, None)
        self.reused.pop(group.group_id, None)
        last = self.plan.max_uses is not None and group.uses + 1 >= self.plan.max_uses
        if not last and (group.task, group.baseline_reward, group.divergences) != (None, None, None):
            self.reused[group.group_id] = dataclasses.replace(group, summary=None, rows=None)
        if len(self.reused) > _MOST_REUSED:  # the buffer does not report groups that it drops after a use
            del self.reused[next(iter(self.reused))]

    def _failed(self, group: Group, failure: Failure) -> None:
        """Drop a group whose rollouts or baseline failed; raise after many in a row, or if a recorded batch has it."""
        self._failures_in_a_row += 1
        self.journal.count_failures(getattr(failure, "causes", {}))
        if self._failures_in_a_row > 2 * self.plan.groups_per_step:
            raise failure
        if group.rows is not None:
            if group.reserved_uses:
                if group.uses:
                    failure.add_note(
                        f"group {group.group_id} is of a recorded batch, and was trained on before: resume with fewer "
                        "steps, or with an algorithm.advantage that needs no greedy answer"
                    )
                elif isinstance(
                    failure, EnvironmentFailure
                ):  # the ledger has its drop: a resumed run counts without it
                    tokens = group.known.tokens
                    self._dropped(DroppedGroup(group_id=group.group_id, reason="baseline_failed", tokens=tokens))
                    failure.add_note(f"group {group.group_id} is of a recorded batch; resumed, the run makes another")
                raise failure
            self.buffer.drop(group.group_id, "baseline_failed", tokens=group.known.tokens)
            return
        self.journal.failed(group.group_id)
        if isinstance(failure, EnvironmentFailure):
            self.buffer.drop(group.group_id, "environment_failed", tokens=failure.tokens_generated)
        else:
            self.buffer.drop(group.group_id, "rollouts_lost")  # its tokens are counted with the replicas

    def _dropped(self, dropped: DroppedGroup) -> None:
        """Remove a group that was dropped, here or by the buffer; the law gives its place to a later prompt."""
        self.journal.dropped(dropped, rows=self.plan.group_size)
        self.groups.pop(dropped.group_id, None)
        self._book.dropped(dropped.group_id)
        self.law.dropped(dropped.group_id)
        self._admission_changed.set()

    def _count_groups(self) -> tuple[int, int]:
        """Return the ready and pending groups of the buffer, which the timeline gets as counters."""
        statistics = self.buffer.statistics()
        self.timeline.counter("groups", ready=statistics.ready, pending=statistics.pending)
        return statistics.ready, statistics.pending

    # ------------------------------------------------------------------------------------ checkpoints and evaluation

    async def _checkpoint(
        self, tasks: asyncio.TaskGroup, step: int, pace: CheckpointPace, *, after: asyncio.Task[None]
    ) -> None:
        """Take a checkpoint if one is due, and write it beside the steps that follow, one at a time."""
        clock = asyncio.get_running_loop().time
        if self.save_checkpoint is None or not pace.due(step, now_s=clock()):
            return
        if self.devices.shared:
            await self._published_by(after)  # an engine that sleeps serves no version
        if not self.plan.evaluation.replicas:
            await self._evaluated()  # their scores belong into it, and their weights are gone afterwards
        begun_s = clock()
        await self.checkpoint_written()
        pace.taken()
        try:
            with self.timeline.span("checkpoint", f"step {step}"):
                write = await self.save_checkpoint(self, step)
        except NOT_WRITTEN as error:
            self._unsaved(step, error)
            async with self.devices.trainer_turn():
                pass  # the turn that failed has kept the devices from the rollouts
            pace.written(now_s=clock(), took_s=clock() - begun_s)
            return
        took_s = clock() - begun_s

        async def written() -> None:
            await asyncio.wait([after])
            if after.cancelled() or after.exception() is not None:
                return  # weights that no engine serves are in no checkpoint
            await self._finish_write(step, write)
            pace.written(now_s=clock(), took_s=took_s)

        self._writing = tasks.create_task(written(), name=f"checkpoint {step}")

    async def _finish_write(self, step: int, write: Callable[[], Awaitable[object]]) -> None:
        """Write a checkpoint, which counts once it is sealed; an interrupted run waits a while for that."""
        loop = asyncio.get_running_loop()

        async def sealed() -> None:
            await write()
            self.journal.record(Committed(step))

        running = asyncio.ensure_future(sealed())
        try:
            with self.timeline.span("checkpoint write", f"step {step}"):
                await shield_until_done(running, on_cancel=lambda: loop.call_later(MOST_PATIENCE_S, running.cancel))
        except NOT_WRITTEN as error:
            self._unsaved(step, error)
        finally:
            self.write_cut_off = running.cancelled()

    def _unsaved(self, step: int, error: Exception) -> None:
        self.observer.unsaved(step, f"{type(error).__name__}: {error}")

    async def checkpoint_written(self) -> None:
        """Wait until no checkpoint is being written."""
        if self._writing is not None and not self._writing.done():
            with self.timeline.wait("train", "checkpoint"):
                await asyncio.wait([self._writing])

    async def _evaluated(self) -> None:
        """Wait for the evaluations beside training."""
        if self._evaluations:
            with self.timeline.wait("train", "evaluation"):
                await asyncio.wait(self._evaluations)

    def _evaluate_beside(self, tasks: asyncio.TaskGroup, step: int, *, after: asyncio.Task[None] | None) -> None:
        """Evaluate beside training, from the moment on at which the weights of ``step`` serve."""
        if self.plan.evaluation.replicas and self.evaluating:
            before = ", ".join(map(str, sorted(self.evaluating)))
            self.observer.unscored(step, f"the evaluation of step {before} was still under way")
            return
        self.evaluating.add(step)

        async def evaluated() -> None:
            if after is not None:
                await asyncio.wait([after])
            await self.score(step, replicas=self.plan.evaluation.replicas)
            self.evaluating.discard(step)

        evaluation = tasks.create_task(evaluated(), name=f"evaluate {step}")
        self._evaluations.add(evaluation)
        evaluation.add_done_callback(self._evaluations.discard)

    async def score(self, step: int, *, replicas: int = 0) -> None:
        """Evaluate as :meth:`evaluate`, and report; a run goes on without the score of a step that cannot have one."""
        try:
            result = await self.evaluate(replicas=replicas)
        except (EnvironmentFailure, RolloutsLostError) as failure:
            self.observer.unscored(step, f"no held-out task was answered: {failure}")
        except (ResourceError, VersionLostError) as failure:
            if not replicas:
                raise
            self.observer.unscored(step, str(failure))
        else:
            if replicas and result.weight_version != step:
                instead = f"version {result.weight_version} was scored instead"
                self.observer.unscored(step, f"no replica was free before newer weights came: {instead}")
                step = result.weight_version
            self.observer.evaluated(result, step=step)

    async def evaluate(self, *, replicas: int = 0) -> EvaluationResult:
        """Score the held-out tasks with the weights that the pool serves now; with ``replicas``, those are pinned."""
        evaluation = self.plan.evaluation
        with self.timeline.span("evaluate", f"version {self.stages.pool.weight_version}"):
            return await evaluate(
                self.stages.pool,
                self.stages.environments,
                tasks=evaluation.tasks,
                seed=self.plan.seed,
                success_reward=evaluation.success_reward,
                score=self.stages.reward if evaluation.reward == "configured" else None,
                replicas=replicas,
            )

    # ------------------------------------------------------------------------------------------------------- status

    def balance(self, *, generated: int, in_flight: int) -> TokenBalance:
        """Return the token equation: what the engines counted against what the journal counted.

        ``in_flight`` is what running episodes have sampled; groups in the buffer are added to it.
        """
        return self.journal.balance(generated=generated, in_flight=in_flight + self.buffer.statistics().ready_tokens)

    def explain(self) -> list[str]:
        """Explain in sentences what admission, buffer and pool are waiting for."""
        return [f"admission: {self.law.explain()}", *self.buffer.explain(), *self.stages.pool.explain()]
