"""One run from its configuration to its summary: the phases around the loop.

    model -> workers -> warm start -> serve -> score -> train -> score -> summary

A phase's seconds stand in the summary; whatever happens in one, workers, transports and files are closed.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asyncrl.agents.chat import load_renderer
from asyncrl.config import Config, check_algorithm
from asyncrl.interfaces import EnvironmentFactory
from asyncrl.parts import make_part
from asyncrl.pipeline.accounts import TokenBalance
from asyncrl.pipeline.assembly import (
    ROLES,
    Assembly,
    Role,
    chat_options,
    critic_options,
    fit_prompts,
    import_once,
    needs_reference,
    trainer_options,
    warm_start_options,
)
from asyncrl.pipeline.canary import MISMATCH_LIMITS
from asyncrl.pipeline.checkpoint import Checkpoints, read_driver_state
from asyncrl.pipeline.driver import Driver
from asyncrl.pipeline.journal import Journal
from asyncrl.pipeline.recorder import Recorder
from asyncrl.pipeline.reference import make_penalty, make_reference
from asyncrl.pipeline.resumption import (
    admission_law,
    check_batches,
    driver_state,
    ledger_base,
    resumed_accounts,
    still_outstanding,
)
from asyncrl.pipeline.training_plan import TrainingPlan
from asyncrl.pipeline.warm_start import demonstrations, file_conversations, supervise
from asyncrl.pipeline.watch import Watch
from asyncrl.rollout.metering import metered_tokens
from asyncrl.telemetry.progress import Progress
from asyncrl.telemetry.run_directory import RunDirectory
from asyncrl.telemetry.timeline import Timeline
from asyncrl.telemetry.trackers import open_trackers

__all__ = ["TrainingRun", "load_renderer", "model_folder"]

TRAINING_STAGES = ("rollout", "baseline", "reward", "reference", "values", "train", "publish")
"""Stages whose overlap is reported: those a batch passes through."""


class TrainingRun:
    """Everything one ``asyncrl train`` (or ``sft``) owns."""

    def __init__(
        self,
        config: Config,
        run: RunDirectory,
        progress: Progress,
        *,
        timeline: Timeline,
        checkpoint: Path | None = None,
    ) -> None:
        self._config = config
        self._run = run
        self._progress = progress
        self._checkpoint = checkpoint
        self._resumed = read_driver_state(checkpoint) if checkpoint is not None else None
        self._checkpoints = Checkpoints(run.checkpoints, keep=config.checkpoint.keep, in_use=checkpoint)
        self._timeline = timeline
        self._phases_s: dict[str, float] = {}
        self._assembly = Assembly(config, log_folder=run.logs, meter_folder=run.meters)
        self._buffer = self._assembly.make_buffer()  # here, so that a wrong option is told before minutes of work
        self._trackers = open_trackers(  # the last that can fail: what is opened here is closed with the run
            config.telemetry.trackers, run.path, name=config.name, config=config.model_dump(mode="json")
        )
        self._journal = Journal()
        self._generated_before = 0
        self._left_over_tokens = 0
        self._lost_with_replicas = 0
        self._recorder: Recorder  # made when the lines of what is done again are gone

    async def train(self) -> dict[str, Any]:
        """Run every phase; returns the summary that was written to ``summary.json``."""
        config = self._config
        for objection in check_algorithm(config):
            self._progress.note(f"unsound, and run as asked: {objection.key}: {objection.reason}")
        try:
            await asyncio.to_thread(self._take_up)
            origin = await self._start()
            if note := await asyncio.to_thread(fit_prompts, config, self._assembly.environments, origin):
                self._progress.note(note)
            if config.sft.steps:
                resumed = self._checkpoint is not None
                origin = str(self._warm_start_folder) if resumed else await self.warm_start(origin)
            model = str(self._checkpoint / "model") if self._checkpoint is not None else origin
            driver = await self._serve(model, origin=origin)
            await self._begin(origin, step=driver.law.version)
            if config.steps and config.checkpoint.every != 0 and self._resumed is None:
                await self._save(driver, 0)  # from here on, whatever is killed can be resumed
            if config.eval.tasks and config.eval.first and driver.law.version == 0 and 0 not in self._scored:
                with self._phase("score before"):
                    self._recorder.evaluated(await driver.evaluate(), step=0)
            with self._phase("train"):
                self._progress.stage("train", config.steps - driver.law.version)
                async with self._watch(driver).watching():
                    await driver.run()
            if config.eval.tasks and config.steps not in self._scored:  # a run may have been killed on its last metre
                with self._phase("score after"):
                    self._recorder.evaluated(await driver.evaluate(), step=config.steps)
            with self._phase("save"):
                await self._save(driver, config.steps)
                self._journal.committed(config.steps)
            summary = await self._summary(driver)
            self._run.write_summary(summary)
            return summary
        finally:
            await self._close()

    def _take_up(self, *, training: bool = True) -> None:
        """Open the ledger, and go back to the checkpoint where there is one."""
        run, resumed = self._run, self._resumed
        base = ledger_base(resumed) if resumed is not None else None
        if training:
            self._journal = Journal(self._assembly.make_ledger(run.ledger_path, resume=base))
        found = self._journal.recovered
        for note in found.notes:
            self._progress.note(note)
        check_batches(found, steps=self._config.steps, groups_per_step=self._config.trainer.groups_per_step)
        history = None
        if resumed is not None:
            history = resumed.history
            kept = range(found.next_slot) if found.next_slot else None
            scored = {record["step"] for record in history["evaluations"]}
            run.rewind(resumed.step, kept=None if kept is None else {*kept} - found.waiting.keys(), scored=scored)
            self._checkpoints.rewind(resumed.step)
            # Counts that did not reach this machine's disk are those of the checkpoint, at least.
            self._generated_before = max(resumed.generated, metered_tokens(run.meters, "train"))
        self._recorder = Recorder(run, self._progress, self._trackers, history=history)

    async def _start(self, roles: Sequence[Role] = ROLES) -> str:
        """Start the workers of ``roles``, and make the model meanwhile; returns where it is."""
        with self._phase("start"):
            await asyncio.to_thread(import_once, self._config)
            async with asyncio.TaskGroup() as starting:
                model = starting.create_task(
                    asyncio.to_thread(model_folder, self._config, self._run, self._assembly.environments)
                )
                starting.create_task(self._assembly.start(roles))
        return model.result()

    async def warm_start(self, model: str) -> str:
        """Supervised steps on the configured conversations; returns the folder of the model they end in."""
        config, sft, folder = self._config, self._config.sft, self._warm_start_folder
        with self._phase("warm start"), self._timeline.span("sft", "warm start"):
            self._progress.stage("warm start", sft.steps)
            renderer = await asyncio.to_thread(load_renderer, model, **chat_options(config))
            conversations, tools = demonstrations(self._assembly.environments)
            if sft.data is not None:
                conversations = await asyncio.to_thread(file_conversations, sft.data, seed=config.seed)
            await self._assembly.trainer.build(model, warm_start_options(config))
            await supervise(
                self._assembly.trainer,
                conversations,
                renderer=renderer,
                tools=tools,
                steps=sft.steps,
                batch_size=sft.batch_size,
                on_step=self._recorder.supervised,
            )
            await self._assembly.trainer.export(folder)
        return str(folder)

    async def supervise_only(self) -> dict[str, Any]:
        """The warm start alone (``asyncrl sft``); returns where the model is and how the last step went."""
        try:
            self._take_up(training=False)
            model = await self._start(roles=("trainer",))
            folder = await self.warm_start(model)
            summary = {"model": folder, "steps": self._config.sft.steps, "phases_s": self._phases_s}
            self._run.write_summary(summary)
            return summary
        finally:
            await self._close()

    @property
    def _scored(self) -> set[int]:
        """Steps whose held-out score is known."""
        return {record["step"] for record in self._recorder.history["evaluations"]}

    @property
    def _warm_start_folder(self) -> Path:
        return self._run.checkpoints / "warm_start"

    async def _serve(self, model: str, *, origin: str) -> Driver:
        """Bring policy and replicas up on ``model``, the reference on ``origin``, and put the loop together."""
        config, assembly = self._config, self._assembly
        step = self._resumed.step if self._resumed is not None else 0
        if self._journal.ledger is not None:
            assembly.pool.on_turns(self._journal.turns)
        with self._phase("serve"):
            await asyncio.gather(
                self._build_trainer(origin, weight_version=step),
                assembly.pool.start(model, weight_version=step),
                *([assembly.reference.build(origin, trainer_options(config))] if assembly.reference else []),
                *([assembly.reward.start(origin)] if assembly.reward else []),
                *([self._build_critic(origin)] if assembly.critic else []),
            )
        reward, reference = assembly.reward, assembly.reference
        if config.trainer.lora is not None and needs_reference(config):
            reference = assembly.trainer  # without its adapters it is the policy of version 0
        plan, found = _plan(config), self._journal.recovered
        held, again = still_outstanding(
            self._resumed, found, total_groups=(config.steps - step) * config.trainer.groups_per_step
        )
        used = sum(1 for group in found.groups.values() if group.uses)
        self._buffer = assembly.make_buffer(at_least_groups=len(held) + len(again) + used, ledger=self._journal.ledger)
        await assembly.place(self._buffer)
        # Fewer steps than planned before leave recorded groups over: they stay in the ledger, for more steps.
        self._left_over_tokens = sum(
            group.summary.tokens for slot, group in found.groups.items() if slot not in held and not group.uses
        )
        between = plan.eval_every and 0 < step < config.steps and step % plan.eval_every == 0
        return Driver(
            plan=plan,
            trainer=assembly.trainer,
            pool=assembly.pool,
            buffer=self._buffer,
            law=admission_law(
                self._resumed,
                steps=config.steps,
                groups_per_step=config.trainer.groups_per_step,
                max_staleness=config.max_staleness,
                policy=config.staleness_policy,
                found=found,
            ),
            journal=self._journal,
            outstanding={*held, *(again if found.next_slot else ())},
            evaluate_first=bool(between and step not in self._scored),
            environments=assembly.environments,
            timeline=self._timeline,
            observer=self._recorder,
            accounts=resumed_accounts(self._resumed, found=found, generated=self._generated_before),
            staleness=Counter(self._resumed.staleness if self._resumed is not None else {}),
            reward=functools.partial(reward.score, model_path=origin) if reward is not None else None,
            reference=make_reference(config, reference) if reference is not None else None,
            critic=assembly.critic,
            penalty=make_penalty(config, self._resumed.kl_coefficient if self._resumed is not None else None),
            save_checkpoint=self._save,
            policy=config.staleness_policy,
        )

    async def _begin(self, origin: str, *, step: int) -> None:
        """Tell the ledger what the updates to come are a function of, beside the rows."""
        if self._journal.ledger is not None:
            (weights, *_others) = await self._assembly.trainer.fingerprint()
            model = Path(origin)
            inside = model.is_relative_to(self._run.path)
            name = model.relative_to(self._run.path).as_posix() if inside else origin
            self._journal.began(step, config=self._config.to_toml(), model=name, weights=weights)

    def _watch(self, driver: Driver) -> Watch:
        """Says what the run waits for, to ``asyncrl why`` and to itself."""
        return Watch(
            self._run.status_path,
            timeline=self._timeline,
            steps=self._config.steps,
            done=lambda: driver.law.version,
            causes=driver.explain,
            stall_s=self._config.telemetry.stall_s,
        )

    async def _build_trainer(self, origin: str, *, weight_version: int) -> None:
        # From the model it began with, which stays; a checkpoint goes when newer ones are there.
        await self._assembly.trainer.build(origin, trainer_options(self._config), weight_version)
        if self._checkpoint is not None:
            await self._assembly.trainer.load(self._checkpoint / "trainer")

    async def _build_critic(self, origin: str) -> None:
        await self._assembly.critic.build(self._config.critic.path or origin, critic_options(self._config))
        if self._checkpoint is not None:
            await self._assembly.critic.load(self._checkpoint / "critic")

    async def _save(self, driver: Driver, step: int) -> None:
        balance = await self._balance(driver)
        ledger = self._journal.ledger
        position = await ledger.durable() if ledger is not None else None
        state = driver_state(driver, balance, step=step, history=self._recorder.history, position=position)
        await self._checkpoints.save(self._assembly.trainer, state, step=step, critic=self._assembly.critic)

    async def _balance(self, driver: Driver) -> TokenBalance:
        """The token equation now. Exact when nothing is being generated, as at the end of a run."""
        await self._buffer.settled()
        counts = await self._assembly.pool.token_counts()
        driver.accounts.drop("replica_lost", counts.lost - self._lost_with_replicas)
        self._lost_with_replicas = counts.lost
        return driver.balance(
            generated=self._generated_before + counts.delivered, in_flight=counts.in_flight + self._left_over_tokens
        )

    async def _summary(self, driver: Driver) -> dict[str, Any]:
        balance = await self._balance(driver)
        if balance.difference:
            raise AssertionError(f"{balance.difference} tokens are unaccounted for: {balance}")
        history = self._recorder.history
        scores = {record["step"]: record["success"] for record in history["evaluations"]}
        train_s = self._phases_s["train"]
        return {
            "name": self._config.name,
            "seed": self._config.seed,
            "success_before": scores.get(0),
            "success_after": scores.get(self._config.steps),
            "reward_first": history["rewards"][0] if history["rewards"] else None,
            "reward_last": history["rewards"][-1] if history["rewards"] else None,
            "wall_s": sum(self._phases_s.values()),
            "phases_s": self._phases_s,
            "steps": self._config.steps,
            "weight_version": self._assembly.pool.weight_version,
            "overlap_share": self._timeline.overlap_share(TRAINING_STAGES),
            "staleness": {
                "max": max(driver.staleness, default=0),
                "histogram": {str(age): tokens for age, tokens in sorted(driver.staleness.items())},
            },
            "max_staleness": self._config.max_staleness,
            "tokens": balance.as_record(),
            "tokens_per_s": balance.trained / train_s if train_s else 0.0,
            "continued": {**driver.continued, "restarted": dict(driver.restarted)},
            "waits": self._timeline.wait_s(),
        }

    async def _close(self) -> None:
        try:
            await self._assembly.aclose()
        finally:
            self._trackers.close()
            self._timeline.save(self._run.timeline_path)
            self._run.close()
            self._progress.close()

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        self._progress.note(name)
        try:
            yield
        finally:
            self._phases_s[name] = self._phases_s.get(name, 0.0) + time.monotonic() - started


def _plan(config: Config) -> TrainingPlan:
    return TrainingPlan(
        steps=config.steps,
        groups_per_step=config.trainer.groups_per_step,
        group_size=config.trainer.group_size,
        advantage=config.algorithm.estimator(),
        optimizer_steps=config.trainer.minibatches * config.trainer.epochs,
        mismatch_limit=_mismatch_limit(config),
        seed=config.seed,
        eval_tasks=config.eval.tasks,
        eval_every=config.eval.every if config.eval.tasks else 0,
        eval_reward=config.eval.reward,
        success_reward=config.eval.success_reward,
        checkpoint_every=config.checkpoint.every,
        sample_trajectories=config.telemetry.trajectories_per_step,
        trace=config.critic.trace,
        kl_estimator=config.algorithm.kl_estimator,
    )


def _mismatch_limit(config: Config) -> float | None:
    """What the first step is held to; nothing where sampling was truncated, which changes log-probs by intent."""
    if config.algorithm.mismatch_limit is not None:
        return config.algorithm.mismatch_limit
    truncated = config.rollout.top_p < 1 or config.rollout.top_k > 0
    return None if truncated else MISMATCH_LIMITS[config.model.dtype]


def model_folder(config: Config, run: RunDirectory, environments: EnvironmentFactory) -> str:
    """Where the policy's weights come from: the configured path, or the folder its source has just filled."""
    if config.model.path is not None:
        return config.model.path
    assert config.model.source is not None
    folder = run.path / "model"
    if run.resumed and folder.is_dir():
        return str(folder)
    make_part(
        "asyncrl.model_sources",
        config.model.source,
        folder,
        options=config.model.options,
        path="model.source",
        seed=config.seed,
        demonstrations=environments.demonstration,
    )
    return str(folder)
