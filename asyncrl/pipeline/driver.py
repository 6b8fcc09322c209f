"""The loop: one batch's way from prompt to published weights, as stages that overlap on different batches.

    prompts -> admission -> rollout (-> reward, reference, values) -> buffer -> update -> publish -> engines
       ^                                                                            |
       '------------------------ a new version admits new groups ------------------'

Each stage is a task of one TaskGroup; between them lie futures (rows that stay where they were made) and the buffer.
How far they may drift apart is one number, ``max_staleness``: at 0 they take turns, at 1 they are one step apart, and
so on (:mod:`asyncrl.pipeline.staleness` has the law and its proof). The first error ends every stage.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.errors import EnvironmentFailure, RolloutsLostError
from asyncrl.interfaces import DroppedGroup, EnvironmentFactory, GroupSummary, ReplayBuffer, SelectedGroup
from asyncrl.pipeline.accounts import TokenAccounts, TokenBalance
from asyncrl.pipeline.certificate import check_summary
from asyncrl.pipeline.checkpoint_pace import CheckpointPace
from asyncrl.pipeline.credit import TokenCredit
from asyncrl.pipeline.evaluation import EvaluationResult, evaluate, part_means
from asyncrl.pipeline.group_stages import GroupStages
from asyncrl.pipeline.journal import Journal
from asyncrl.pipeline.judge import Judge
from asyncrl.pipeline.learner import Critic, Learner
from asyncrl.pipeline.reference import Score
from asyncrl.pipeline.reward_penalty import RewardPenalty
from asyncrl.pipeline.staleness import POLICIES, AdmissionLaw, StalenessPolicy
from asyncrl.pipeline.training_plan import StepRecord, TrainingPlan
from asyncrl.rollout.pool import RolloutPool
from asyncrl.rollout.prompts import derive_seed, prompt_rows
from asyncrl.telemetry.timeline import Timeline
from asyncrl.weights.fingerprint import manifest_fingerprint

__all__ = ["Driver", "Observer"]


class Observer(Protocol):
    """Is told what happens. Must not block: it is called on the event loop."""

    def stepped(self, record: StepRecord) -> None: ...

    def evaluated(self, result: EvaluationResult, *, step: int) -> None: ...

    def sampled(self, trajectory: dict[str, Any], *, step: int, slot: int) -> None: ...


class Trainer(Protocol):
    """The calls the loop makes on the trainer's worker group."""

    def update(
        self, batch: DataProtoFuture, oldest_version: int | None = None, credit: TokenCredit | None = None
    ) -> Any: ...

    def publish(self, version: int) -> Any: ...

    def release(self, version: int) -> Any: ...


@dataclass(slots=True, kw_only=True)
class Driver:
    """Runs a plan on parts that were put together elsewhere (:mod:`asyncrl.pipeline.assembly`).

    Attributes:
        reward: adds ``scores`` [B]; None when the environment's reward counts.
        reference: adds ``reference_log_probs``; None where nothing asks for it.
        critic: says values of every group's tokens, and learns beside the trainer; None without one.
        penalty: takes the divergence that the reference tells off the rewards; None where it is no part of them.
        save_checkpoint: awaited between two steps, with this driver and the step that is done.
        journal: keeps the ledger told, and says what a resumed run finds there.
        evaluate_first: whether a resumed run owes the evaluation of the step it goes on from.
        policy: what becomes of groups that take longer than the bound allows.
        staleness: tokens trained on, by staleness.
        outstanding: slots issued, neither trained on nor dropped yet.
        continued: trajectories, and tokens in them, that went on from what an earlier life had recorded.
        restarted: those that were begun again instead, by reason.
    """

    plan: TrainingPlan
    trainer: Trainer
    pool: RolloutPool
    buffer: ReplayBuffer
    law: AdmissionLaw
    environments: EnvironmentFactory
    timeline: Timeline
    observer: Observer
    accounts: TokenAccounts = field(default_factory=TokenAccounts)
    reward: Score | None = None
    reference: Score | None = None
    critic: Critic | None = None
    penalty: RewardPenalty | None = None
    save_checkpoint: Callable[[Driver, int], Awaitable[None]] | None = None
    policy: StalenessPolicy = POLICIES["wait"]
    journal: Journal = field(default_factory=Journal)
    evaluate_first: bool = False
    staleness: Counter[int] = field(default_factory=Counter)
    outstanding: set[int] = field(default_factory=set)
    continued: Counter[str] = field(default_factory=Counter)
    restarted: Counter[str] = field(default_factory=Counter)
    _judge: Judge = field(init=False)
    _stages: GroupStages = field(init=False)
    _learner: Learner = field(init=False)
    _unfinished: dict[int, int] = field(init=False)
    _admission_changed: asyncio.Event = field(default_factory=asyncio.Event)
    _failures_in_a_row: int = 0
    _evaluations: set[asyncio.Task[None]] = field(default_factory=set)
    _published: set[int] = field(default_factory=set)
    _dropped_rows: int = 0
    _dropped_tokens: int = 0

    def __post_init__(self) -> None:
        self._unfinished = {slot: turns.tokens for slot, turns in self.journal.recovered.turns.items()}
        self._judge = Judge(
            estimator=self.plan.advantage,
            by_turns=self.reward is None,
            penalty=self.penalty,
            trace=self.plan.trace,
            kl_estimator=self.plan.kl_estimator,
        )
        self._stages = GroupStages(
            buffer=self.buffer,
            journal=self.journal,
            timeline=self.timeline,
            judge=self._judge,
            reward=self.reward,
            reference=self.reference,
            values=self.critic.values if self.critic is not None else None,
        )
        self._learner = Learner(
            trainer=self.trainer,
            critic=self.critic,
            judge=self._judge,
            policy=self.policy,
            max_staleness=self.law.max_staleness,
            optimizer_steps=self.plan.optimizer_steps,
            referred=self.reference is not None,
            mismatch_limit=self.plan.mismatch_limit,
        )

    async def run(self) -> None:
        """Train until ``plan.steps`` is reached.

        Raises:
            ExceptionGroup: of what ended the stages; the first cause is in it with its name.
        """
        self.buffer.on_drop(self._dropped)
        async with asyncio.TaskGroup() as stages:
            recovery = stages.create_task(self._recover(stages), name="recover")
            if self.evaluate_first:
                self._evaluate_beside(stages, self.law.first_version, after=None)
            issue = stages.create_task(self._issue(stages, after=recovery), name="issue")
            stages.create_task(self._train(stages, after=recovery, issue=issue), name="train")

    def balance(self, *, generated: int, in_flight: int) -> TokenBalance:
        """The token equation: what the engines count against what became of it here.

        ``in_flight`` is what episodes that still run have sampled; groups in the buffer are added to it.
        """
        in_flight += self.buffer.statistics().ready_tokens + sum(self._unfinished.values())
        return self.accounts.balance(generated=generated, in_flight=in_flight)

    def explain(self) -> list[str]:
        """What admission, buffer and pool say of themselves at this moment, in sentences."""
        return [f"admission: {self.law.explain()}", *self.buffer.explain(), *self.pool.explain()]

    async def _recover(self, stages: asyncio.TaskGroup) -> None:
        """Take up what the ledger has kept: recorded groups go into the buffer, and places are held for the others."""
        found = self.journal.recovered
        used = {slot for slot, group in found.groups.items() if group.uses}
        promised = Counter(slot for batch in found.batches.values() for slot in batch)
        for slot in sorted(self.outstanding | used):
            await self.buffer.admit(slot, again=True)
            if (group := found.groups.get(slot)) is not None:
                entering = self._stages.enter(
                    group.summary,
                    DataProtoFuture.of(group.rows),
                    greedy=self._greedy_beside(stages, slot),
                    rewarded=group.rewarded,
                    uses=group.uses,
                    promised=promised[slot],
                )
                self.law.finished_group(slot)
                stages.create_task(entering, name=f"group {slot}")

    # ------------------------------------------------------------------------------------------ prompts and rollouts

    async def _issue(self, stages: asyncio.TaskGroup, *, after: asyncio.Task[None]) -> None:
        """Issue groups as the law admits them and the buffer has room for them, until cancelled."""
        await asyncio.wait([after])  # groups come into the buffer in slot order
        while True:
            while not self.law.may_issue():
                self._admission_changed.clear()
                with self.timeline.wait("issue", "staleness bound"):
                    await self._admission_changed.wait()
            slot = self.law.issue()
            self.outstanding.add(slot)
            self.journal.issued(slot)
            if slot not in self.journal.recovered.waiting:  # their places are held
                with self.timeline.wait("issue", "room in the buffer"):
                    await self.buffer.admit(slot)
            stages.create_task(self._group(stages, slot), name=f"group {slot}")

    async def _group(self, stages: asyncio.TaskGroup, slot: int) -> None:
        """Roll one group out, have it scored, and put it into the buffer."""
        greedy = self._greedy_beside(stages, slot)
        try:
            rows, summary = await self._roll_out(slot)
        except (EnvironmentFailure, RolloutsLostError) as failure:
            if greedy is not None:
                greedy.cancel()
            self._failed(failure)
            self._take_over(slot, {})
            if isinstance(failure, EnvironmentFailure):
                self.buffer.drop(slot, "environment_failed", tokens=failure.tokens_generated)
            else:
                self.buffer.drop(slot, "rollouts_lost")  # its tokens went with the replicas
            return
        self._failures_in_a_row = 0
        self.law.finished_group(slot)
        await self._stages.enter(summary, rows, greedy=greedy)
        self._gauge()

    def _failed(self, failure: EnvironmentFailure | RolloutsLostError) -> None:
        """Raise what fails again and again; one failure costs its group only."""
        self._failures_in_a_row += 1
        if self._failures_in_a_row > 2 * self.plan.groups_per_step:
            raise failure

    def _greedy_beside(self, stages: asyncio.TaskGroup, slot: int) -> asyncio.Task[float | None] | None:
        """The greedy answer to a prompt, if the advantage compares with one, while its samples are rolled out."""
        if "greedy_rewards" not in self.plan.advantage.needs:
            return None
        return stages.create_task(self._greedy(slot), name=f"baseline {slot}")

    async def _greedy(self, slot: int) -> float | None:
        """Reward of the greedy answer; None if it failed. Its tokens are not counted among the samples."""
        prompts = prompt_rows(
            [self.environments.task(slot, split="train")],
            slot=slot,
            seeds=[derive_seed(self.plan.seed, "baseline", slot)],
            purpose="baseline",
        )
        try:
            rows = await self.pool.rollout(prompts)
        except (EnvironmentFailure, RolloutsLostError) as failure:
            self._failed(failure)
            return None
        if self.reward is not None:
            _, (score,) = await self._stages.score(rows, name=f"baseline {slot}")
            return score
        (reward,) = (await rows.header()).meta_info["summary"]["rewards"]
        return float(reward)

    async def _roll_out(self, slot: int) -> tuple[DataProtoFuture, GroupSummary]:
        plan = self.plan
        sample = slot % plan.groups_per_step < plan.sample_trajectories
        recorded = self.journal.recovered.turns.get(slot)
        attempt: int | None = None

        async def prompts() -> DataProto:
            """Each time they are sent, another attempt."""
            nonlocal attempt
            attempt = await self.journal.dispatched(slot, version=self.law.version)
            return prompt_rows(
                [self.environments.task(slot, split="train")] * plan.group_size,
                slot=slot,
                seeds=[derive_seed(plan.seed, "train", slot, row) for row in range(plan.group_size)],
                purpose="train",
                sample=sample,
                record=attempt is not None,
                attempt=attempt,
                turns=recorded.content if recorded is not None else b"",
            )

        first = await prompts()
        with self.timeline.span("rollout", f"group {slot}"):
            rows = await self.pool.rollout(first, again=prompts)
            header = await rows.header()
        meta = header.meta_info
        summary = GroupSummary(**meta["summary"])
        check_summary(summary, slot=slot, rows=plan.group_size)
        self.journal.completed(
            slot, attempt=attempt or 0, tokens=summary.tokens, wasted=meta["wasted_tokens"], rows=meta.get("record")
        )
        rows = rows.select(meta_info_keys=["summary"])
        self._take_over(slot, meta.get("continued", {}))
        self.accounts.drop("environment_failed", meta["wasted_tokens"])
        self._dropped_tokens += meta["wasted_tokens"]
        if sample:
            self.observer.sampled(meta["sample"], step=self.law.version + 1, slot=slot)
        return rows, summary

    def _take_over(self, slot: int, continued: Mapping[str, Any]) -> None:
        """What an earlier life has sampled for this group is part of its rows now, or was in vain."""
        tokens = continued.get("tokens", 0)
        self.accounts.drop("interrupted", self._unfinished.pop(slot, 0) - tokens)
        self.continued.update(trajectories=continued.get("rows", 0), tokens=tokens)
        self.restarted.update(continued.get("restarted", {}))

    def _dropped(self, group: DroppedGroup) -> None:
        """A group was given up, here or by the buffer: a later prompt takes its place."""
        self.journal.dropped(group)
        self.accounts.drop(group.reason, group.tokens)
        self._dropped_rows += self.plan.group_size
        self._dropped_tokens += group.tokens
        self.outstanding.discard(group.slot)
        self._judge.forget(group.slot)
        self.law.dropped(group.slot)
        self._admission_changed.set()

    # ------------------------------------------------------------------------------------------ training and weights

    async def _train(self, stages: asyncio.TaskGroup, *, after: asyncio.Task[None], issue: asyncio.Task[None]) -> None:
        """Train step by step; publishing a version overlaps with the update that follows it. Ends ``issue``."""
        await asyncio.wait([after])  # batches that are taken again name groups that must have their places
        publication: asyncio.Task[None] | None = None
        clock, pace = asyncio.get_running_loop().time, CheckpointPace(self.plan.checkpoint_every)
        pace.begin(now_s=clock())
        for step in range(self.law.version + 1, self.plan.steps + 1):
            with self.timeline.wait("train", "rollouts"):
                groups = await self._select(step)
            with self.timeline.span("train", f"step {step}", groups=len(groups)):
                record = await self._update(step, groups)
            self.observer.stepped(record)
            if publication is not None:
                with self.timeline.wait("train", "publication"):
                    await publication
            # Called here, not in the task: the trainer runs calls in order, and the next update must come after this.
            manifest = self.trainer.publish(step)
            publication = stages.create_task(self._publish(step, manifest), name=f"publish {step}")
            begun_s = clock()
            if self.save_checkpoint and pace.due(step, now_s=begun_s):
                with self.timeline.span("checkpoint", f"step {step}"):
                    await publication
                    if self._evaluations:  # their scores belong into it, and their weights are gone afterwards
                        await asyncio.wait(self._evaluations)
                    await self.save_checkpoint(self, step)
                    self.journal.committed(step)
                pace.written(now_s=clock(), took_s=clock() - begun_s)
            if self.plan.eval_every and step % self.plan.eval_every == 0 and step < self.plan.steps:
                self._evaluate_beside(stages, step, after=publication)
        if publication is not None:
            await publication
        issue.cancel()  # it waits for a version, or for a place that nothing makes free any more

    async def _select(self, step: int) -> Sequence[SelectedGroup]:
        """The next batch; one without a token that is young enough is given up for groups sampled from now on."""
        oldest = self._learner.oldest_version(step)
        if (batch := self.journal.recovered.batches.get(step)) is not None:
            return await self.buffer.select(len(batch), weight_version=step - 1, slots=batch)
        while True:
            groups = await self.buffer.select(self.plan.groups_per_step, weight_version=step - 1)
            counts = [group.summary.version_tokens for group in groups]
            if oldest is None or any(each[version] and version >= oldest for each in counts for version in each):
                return groups
            for group in groups:
                self.buffer.drop(group.summary.slot, "stale")

    async def _update(self, step: int, groups: Sequence[SelectedGroup]) -> StepRecord:
        """One batch: train on it, and settle what became of its groups."""
        thrown_away = {"dropped_rows": self._dropped_rows, "dropped_tokens": self._dropped_tokens}
        self._dropped_rows = self._dropped_tokens = 0
        first = step == self.law.first_version + 1
        learned = await self._learner.learn(step, groups, first=first, **thrown_away)
        certificate, again = learned.certificate, learned.again
        slots = [group.summary.slot for group in groups]
        self.journal.consumed(step, groups)
        self.buffer.release(slots)
        self.accounts.train(int(learned.metrics["tokens_trained"]) - again.tokens, again=again.tokens)
        self.accounts.drop("masked", certificate.masked_tokens - again.masked_tokens)
        self.outstanding.difference_update(slots)
        self.staleness.update(certificate.histogram)
        statistics = self.buffer.statistics()
        self._gauge()
        return StepRecord(
            step=step,
            weight_version=step,
            metrics=learned.metrics,
            certificate=certificate,
            rewards=learned.rewards,
            lengths=learned.lengths,
            buffer_ready=statistics.ready,
            buffer_pending=statistics.pending,
            reward_parts=part_means(group.summary.reward_parts for group in groups),
        )

    async def _publish(self, version: int, manifest: Awaitable[Any]) -> None:
        """Bring the weights of ``version`` into every engine, then let the law admit new groups."""
        with self.timeline.span("publish", f"version {version}"):
            (from_rank_zero, *_others) = await manifest
            self._published.add(version)
            self.journal.published(version, weights=manifest_fingerprint(from_rank_zero))
            await self.pool.publish(from_rank_zero)
            for old in sorted(self._published - self.pool.needed_versions):
                self._published.discard(old)
                await self.trainer.release(old)
        self.law.published(version)
        self._admission_changed.set()

    def _evaluate_beside(self, stages: asyncio.TaskGroup, step: int, *, after: asyncio.Task[None] | None) -> None:
        evaluation = stages.create_task(self._evaluate(step, after=after), name=f"evaluate {step}")
        self._evaluations.add(evaluation)
        evaluation.add_done_callback(self._evaluations.discard)

    async def _evaluate(self, step: int, *, after: asyncio.Task[None] | None) -> None:
        """Score the held-out tasks beside training, from the moment this step's weights serve."""
        if after is not None:
            await asyncio.wait([after])
        self.observer.evaluated(await self.evaluate(), step=step)

    async def evaluate(self) -> EvaluationResult:
        """Score the held-out tasks with the weights the pool serves now."""
        with self.timeline.span("evaluate", f"version {self.pool.weight_version}"):
            return await evaluate(
                self.pool,
                self.environments,
                tasks=self.plan.eval_tasks,
                seed=self.plan.seed,
                success_reward=self.plan.success_reward,
                score=self.reward if self.plan.eval_reward == "configured" else None,
            )

    def _gauge(self) -> None:
        statistics = self.buffer.statistics()
        self.timeline.counter("groups", ready=statistics.ready, pending=statistics.pending)
