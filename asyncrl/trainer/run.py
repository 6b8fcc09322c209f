"""One run from its configuration to its summary: the phases around the loop.

    model -> workers -> warm start -> serve -> evaluate -> train -> evaluate -> save -> summary

The seconds of each phase are in the summary. Whatever happens in one, workers, transports and files are closed.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from asyncrl.config import Config, check_algorithm, load_config
from asyncrl.config.file import set_key, tables_of
from asyncrl.curriculum import Curriculum
from asyncrl.errors import AsyncRLError, ConfigError, RunStoppedError
from asyncrl.interfaces import EnvironmentFactory, ReplayBuffer, TrainerUsage
from asyncrl.io import is_sealed
from asyncrl.ledger import Committed, Ledger, Recovered, RunStarted
from asyncrl.model_folder import check_model
from asyncrl.plugins import make_part
from asyncrl.rollout.chat import load_renderer
from asyncrl.rollout.engine_worker import resolve_model
from asyncrl.rollout.recheck import CheckBudget
from asyncrl.rollout.work import sum_totals
from asyncrl.rollout.worker import metered_tokens
from asyncrl.runtime import in_abandonable_thread, in_thread, shield_until_done
from asyncrl.telemetry.adviser import LEAST_STEPS, advise
from asyncrl.telemetry.idle import idle_shares
from asyncrl.telemetry.progress import Progress
from asyncrl.telemetry.run_directory import RunDirectory
from asyncrl.telemetry.timeline import Timeline
from asyncrl.telemetry.trackers import open_trackers
from asyncrl.trainer.assembly import (
    ROLES,
    Assembly,
    Role,
    adapters_apart,
    chat_options,
    critic_options,
    divergence_estimator,
    filter_overlong_prompts,
    import_model_library,
    make_advantages,
    max_mismatch_kl,
    needs_critic,
    needs_reference,
    reference_stage,
    trainer_options,
    warm_start_options,
)
from asyncrl.trainer.checkpoint import MAX_SHARE, MIN_INTERVAL_S, NOT_WRITTEN, Checkpoints, read_driver_state, step_of
from asyncrl.trainer.colocation import Devices, SeparateDevices, SharedDevices, Side
from asyncrl.trainer.control import Orders, listening
from asyncrl.trainer.driver import MOST_PATIENCE_S, Driver, TrainingPlan
from asyncrl.trainer.evaluation import EvaluationPlan
from asyncrl.trainer.group import GroupStages, TaskChoice
from asyncrl.trainer.journal import TokenBalance
from asyncrl.trainer.learner import Advantages, Learner
from asyncrl.trainer.recovery import check_batches, driver_state, ledger_base, lost_scores, starting_point
from asyncrl.trainer.report import Recorder, RunSummary, StalenessSummary, Watch
from asyncrl.trainer.sft import demonstrations, file_conversations, supervise
from asyncrl.trainer.stored_run import StoredRun
from asyncrl.trainer.workers import CriticGroup, EngineGroup
from asyncrl.weights import WeightManifest, joined

_log = logging.getLogger(__name__)

_FIXED = {"algorithm.credit"} | {
    f"trainer.{key}"
    for key in (
        *("engine", "options", "world_size", "mesh", "num_cpus", "num_gpus", "groups_per_step", "group_size"),
        *("lora", "optimizer", "optimizer_options"),
    )
}
"""Keys that the worker groups and the batches of a run were made from."""

_SAVED = ("trainer.lora", "trainer.optimizer", "critic.optimizer")
"""Keys on which depends what a checkpoint has for each weight."""

TRAINING_STAGES = ("rollout", "baseline", "reward", "reference", "values", "train", "publish")
"""Stages whose overlap is reported: those that a batch passes through."""


class TrainingRun:
    """Everything that one ``asyncrl train`` (or ``sft``) owns; a ``checkpoint`` is one to resume from."""

    def __init__(
        self,
        config: Config,
        run: RunDirectory,
        progress: Progress,
        *,
        timeline: Timeline,
        checkpoint: Path | None = None,
        environments: EnvironmentFactory | None = None,
    ) -> None:
        self._config = config
        self._run = run
        self._progress = progress
        self._timeline = timeline
        self._checkpoint = checkpoint
        self._resumed = read_driver_state(checkpoint) if checkpoint is not None else None
        self._same_updates = True
        if checkpoint is not None and self._resumed is not None:
            before = load_config(run.config_path)
            _check_state_fits(config, before, has_critic=(checkpoint / "critic").is_dir())
            try:
                used = [before, *map(load_config, run.configs_until_after(self._resumed.step))]
                self._same_updates = all(_same_updates(config, each) for each in used)
            except ConfigError as error:  # of an older release, or damaged
                _log.warning("what steps after %d were trained with cannot be read: %s", self._resumed.step, error)
                self._same_updates = False
        self._checkpoints = Checkpoints(run.checkpoints, keep=config.checkpoint.keep_last, in_use=checkpoint)
        self._phases_s: dict[str, float] = {}
        self._phase_now = ("", time.monotonic())
        self._assembly = Assembly(config, log_folder=run.logs, meter_folder=run.meters, environments=environments)
        self._buffer: ReplayBuffer = self._assembly.make_buffer()  # here, so that a wrong option is found at once
        self._trackers = open_trackers(  # the last that can fail: what is opened here is closed with the run
            config.telemetry.trackers, run.path, name=config.name, config=config.model_dump(mode="json")
        )
        self._ledger: Ledger | None = None
        self._recorder: Recorder  # made when a resumed run has removed the lines of steps that it trains again
        self._wanted: Config | None = None
        self._set_again_s = float("-inf")
        self._step_begun = 0
        self._last_step_begun = False
        self._driver: Driver | None = None
        self._devices: Devices = SeparateDevices()
        self._stopped = False
        self._generated_before = 0
        self._left_over: tuple[int, ...] = ()
        self._left_over_tokens = 0
        self._lost_with_replicas = 0
        self._save_s = 0.0

    # --------------------------------------------------------------------------------------------------------- phases

    async def train(self) -> RunSummary:
        """Run all phases; return the summary, which is also in ``summary.json``."""
        config = self._config
        for issue in check_algorithm(config):
            self._progress.note(f"unsound, and run as configured: {issue.key}: {issue.reason}")
        try:
            if config.checkpoint.url is not None:  # first of all: a store that refuses changes nothing
                self._checkpoints.stored = await in_abandonable_thread(self._stored_run)
            await shield_until_done(asyncio.to_thread(self._open_records))
            async with self._watch().watching():
                driver = await self._begin()
            with self._phase("train"):
                self._progress.stage("train", config.steps)
                if driver.law.version:
                    self._progress.advance(driver.law.version)
                try:
                    async with listening(self._run.path, self._orders(driver)), self._watch(driver).watching():
                        await driver.run()
                except asyncio.CancelledError:
                    await self._save_interrupted(driver)
                    raise
            async with self._watch(driver).watching():
                with self._phase("save"):
                    saved = self._checkpoints.folder(config.steps)
                    if await asyncio.to_thread(is_sealed, saved):  # it may be on its way to a URL
                        await self._checkpoints.sent()
                    await (await self._save(driver, config.steps))()
                    driver.journal.record(Committed(config.steps))
                    await self._checkpoints.sent()
                if config.eval.tasks and config.steps not in self._evaluated:  # a resumed run may have done it
                    with self._phase("score after"):
                        await driver.score(config.steps)
            summary = await self._summary(driver)
            self._run.write_summary(summary.as_record())
            for cause, found in summary.failures.items():
                _log.warning("environments failed %d times: %s", found["count"], cause)
            return summary
        except asyncio.CancelledError:
            if self._stopped:
                raise RunStoppedError(f"{self._run.path} was stopped by an order; it can be resumed") from None
            raise
        finally:
            await self._close()

    async def _begin(self) -> Driver:
        """Do what comes before the first step; return the driver."""
        config = self._config
        origin = await self._start()
        if note := await in_thread(filter_overlong_prompts, config, self._assembly.environments, origin):
            self._progress.note(note)
        if config.sft.steps:
            resumed = self._checkpoint is not None
            origin = str(self._warm_start_folder) if resumed else await self._warm_start(origin)
        elif config.model.source == "scratch" and config.steps and self._resumed is None:
            self._progress.note("the model has random weights: sft.steps = 0, so it does not learn its demonstrations")
        if self._resumed is not None and Path(origin).is_relative_to(self._run.path):
            await asyncio.to_thread(check_model, origin, key="model")
        driver = self._driver = await self._serve(origin)
        async with self._devices.trainer_turn():
            await self._record_start(driver, origin)
            if self._resumed is not None:
                self._accept_changes(self._resumed.step)
            if config.steps and config.checkpoint.every != 0 and self._resumed is None:
                await (await self._save(driver, 0))()  # a run that is killed from here on can be resumed
        if config.eval.tasks and config.eval.on_start and driver.law.version == 0 and 0 not in self._evaluated:
            with self._phase("score before"):
                self._recorder.evaluated(await driver.evaluate(), step=0)
        return driver

    async def supervise(self) -> dict[str, Any]:
        """Run the warm start alone (``asyncrl sft``); return the folder of its model and the time of the phases."""
        try:
            self._recorder = Recorder(self._run, self._progress, self._trackers)
            model = await self._start(roles=("trainer",))
            folder = await self._warm_start(model)
            summary = {"model": folder, "steps": self._config.sft.steps, "phases_s": self._phases_s}
            self._run.write_summary(summary)
            return summary
        finally:
            await self._close()

    def _stored_run(self) -> StoredRun:
        checkpoint = self._config.checkpoint
        assert checkpoint.url is not None
        return StoredRun(
            checkpoint.url,
            self._run.path,
            keep=checkpoint.keep_last,
            resumed=self._run.resumed,
            failed=lambda *why: self._recorder.unsaved(*why),  # noqa: PLW0108  it is made later
        )

    def _open_records(self) -> None:
        """Open the ledger; a resumed run also removes what was written after its checkpoint."""
        run, resumed = self._run, self._resumed
        base = ledger_base(resumed, same_updates=self._same_updates) if resumed is not None else None
        self._ledger = self._assembly.make_ledger(run.ledger_path, resume=base)
        if self._checkpoints.stored is not None:
            self._checkpoints.stored.ledger = self._ledger
        found = self._ledger.recovered if self._ledger is not None else None
        if found is not None:
            for note in found.notes:
                self._progress.note(note)
            check_batches(
                found,
                steps=self._config.steps,
                groups_per_step=self._config.trainer.groups_per_step,
                max_uses=_buffer_rules(self._config).get("max_uses"),
                max_staleness=self._config.max_staleness,
                policy=self._config.staleness_policy,
            )
        if resumed is not None:
            kept = None
            if found is not None and found.next_group_id:
                kept = {*range(found.next_group_id)} - found.waiting.keys()
            run.rewind(resumed.step, kept=kept)
            self._checkpoints.rewind(resumed.step)
            self._progress.note(_where(resumed.step, found, steps=self._config.steps))
            self._generated_before = metered_tokens(run.meters, "train")
        history = resumed.history if resumed is not None else None
        self._recorder = Recorder(run, self._progress, self._trackers, history=history)

    async def _start(self, roles: Sequence[Role] = ROLES) -> str:
        """Start the workers of ``roles`` and make the model beside them; return the model's folder."""
        with self._phase("start"):
            await asyncio.to_thread(import_model_library, self._config)
            async with asyncio.TaskGroup() as starting:
                model = starting.create_task(
                    in_thread(model_folder, self._config, self._run, self._assembly.environments)
                )
                starting.create_task(self._assembly.start(roles))
        return model.result()

    async def _warm_start(self, model: str) -> str:
        """Train on the configured conversations; return the folder of the model."""
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

    async def _serve(self, origin: str) -> Driver:
        """Load the policy into trainer and replicas and ``origin`` into the others, and put the driver together."""
        config, assembly, resumed = self._config, self._assembly, self._resumed
        step = resumed.step if resumed is not None else 0
        start = starting_point(
            resumed,
            self._ledger,
            steps=config.steps,
            groups_per_step=config.trainer.groups_per_step,
            max_staleness=config.max_staleness,
            policy=config.staleness_policy,
            generated=self._generated_before,
        )
        self._left_over, self._left_over_tokens = start.left_over, start.left_over_tokens
        if start.generated > self._generated_before:
            text = "the files in %s count %d tokens, and at least %d were sampled: these count"
            _log.warning(text, self._run.meters, self._generated_before, start.generated)
        self._generated_before = start.generated
        assembly.pool.on_state(self._timeline.replica_state)
        if self._ledger is not None:
            assembly.pool.on_turns(start.journal.turns)
        with self._phase("serve"):
            # Adapters go on beside the weights they were trained beside: engines start with these, a version earlier.
            apart = self._checkpoint is not None and adapters_apart(config)
            serving = str(self._checkpoint / "model") if self._checkpoint is not None and not apart else origin
            first: list[WeightManifest] = []
            loading = [self._load_trainer(origin, weight_version=step, published=first if apart else None)]
            if "rollout" in config.cluster.colocate:
                await loading.pop()
                await assembly.trainer.sleep()
                self._devices = SharedDevices(
                    rollouts=Side(
                        sleep=assembly.pool.sleep, wake=assembly.pool.wake, ready=assembly.pool.ready_to_sleep
                    ),
                    trainer=Side(sleep=assembly.trainer.sleep, wake=assembly.trainer.wake),
                    waiting=lambda: self._timeline.wait("train", "hand-over"),
                )
            await asyncio.gather(
                *loading,
                self._start_replicas(serving, weight_version=step - 1 if apart else step),
                *([assembly.reference.build(origin, trainer_options(config))] if assembly.reference else []),
                *([assembly.reward.start(origin)] if assembly.reward else []),
                *([self._load_critic(assembly.critic, origin)] if assembly.critic else []),
            )
            for manifest in first:
                await assembly.pool.publish(manifest)
        reference = assembly.reference
        if config.trainer.lora is not None and needs_reference(config):
            reference = assembly.trainer  # without its adapters it is the policy of version 0
        self._buffer = assembly.make_buffer(at_least_groups=start.places, ledger=self._ledger)
        await assembly.place(self._buffer)
        advantages = make_advantages(config, after=resumed)
        every = config.eval.every if config.eval.tasks else 0
        evaluate_first = bool(every and 0 < step < config.steps and not step % every and step not in self._evaluated)
        if resumed is not None:
            again = step if evaluate_first or step == config.steps else None
            for lost in lost_scores(resumed, scored=self._evaluated, again=again):
                self._recorder.unscored(lost, "the run stopped while it was evaluated")

        def before_step(driver: Driver, step: int) -> Awaitable[None] | None:
            self._step_begun, self._last_step_begun = step, step == config.steps
            due = self._last_step_begun or time.monotonic() >= self._set_again_s
            return self._reconfigure(driver, step - 1, origin) if self._wanted and due else None

        return Driver(
            plan=TrainingPlan(
                steps=config.steps,
                groups_per_step=config.trainer.groups_per_step,
                group_size=config.trainer.group_size,
                seed=config.seed,
                **_buffer_rules(config),
                evaluation=EvaluationPlan(
                    **config.eval.model_dump(include={"tasks", "every", "replicas", "reward", "success_reward"})
                ),
                checkpoint_every=config.checkpoint.every,
                trajectories_per_step=config.telemetry.trajectories_per_step,
                announces=bool(config.weights.options.get("kept_versions")),
            ),
            law=start.law,
            groups=start.groups,
            reused=start.reused,
            stages=GroupStages(
                group_size=config.trainer.group_size,
                seed=config.seed,
                pool=assembly.pool,
                environments=assembly.environments,
                buffer=self._buffer,
                journal=start.journal,
                timeline=self._timeline,
                version=lambda: start.law.version,
                reward=functools.partial(assembly.reward.score, model_path=origin) if assembly.reward else None,
                reference=reference_stage(config, reference) if reference is not None else None,
                values=assembly.critic.values if assembly.critic is not None else None,
                needs_baseline=advantages.needs_baseline,
                needs_divergences=advantages.needs_divergences,
                checks=CheckBudget(config.rollout.reward_check_share),
            ),
            learner=self._learner(advantages),
            observer=self._recorder,
            save_checkpoint=self._save,
            before_step=before_step,
            evaluate_first=evaluate_first,
            devices=self._devices,
            tasks=self._tasks(start.tasks),
            published={manifest.version for manifest in first},
        )

    def _tasks(self, chosen: Mapping[int, int]) -> TaskChoice | None:
        config, resumed = self._config, self._resumed
        if not config.env.candidates:
            return None
        curriculum = Curriculum(seed=config.seed, state=resumed.history.get("curriculum") if resumed else None)
        return TaskChoice(
            curriculum=curriculum,
            environments=self._assembly.environments,
            candidates=config.env.candidates,
            chosen=chosen,
        )

    def _learner(self, advantages: Advantages) -> Learner:
        config = self._config
        return Learner(
            trainer=self._assembly.trainer,
            critic=self._assembly.critic,
            advantages=advantages,
            policy=config.staleness_policy,
            max_staleness=config.max_staleness,
            optimizer_steps=config.trainer.num_mini_batches * config.trainer.epochs,
            has_reference=needs_reference(config),
            max_mismatch_kl=max_mismatch_kl(config),
        )

    async def _load_trainer(
        self, origin: str, *, weight_version: int, published: list[WeightManifest] | None = None
    ) -> None:
        """Load the trainer; append the manifest of the version that it holds to ``published``, if that is given."""
        # From the model it began with, which stays; a checkpoint is removed when newer ones are there.
        await self._assembly.trainer.build(origin, trainer_options(self._config), weight_version)
        if self._checkpoint is not None:
            await self._assembly.trainer.load(self._checkpoint / "trainer")
        await _prepare_snapshots(self._assembly.trainer, self._config)
        if published is not None:
            published.append(joined(await self._assembly.trainer.publish(weight_version)))
        self._progress.note("the trainer is loaded")

    async def _start_replicas(self, model: str, *, weight_version: int) -> None:
        await self._assembly.pool.start(model, weight_version=weight_version)
        self._progress.note("replicas serve")

    async def _load_critic(self, critic: CriticGroup, origin: str) -> None:
        path = self._config.critic.path
        if path is not None:
            path = await asyncio.to_thread(resolve_model, path, self._run.path / "critic")
        await critic.build(path or origin, critic_options(self._config))
        if self._checkpoint is not None:
            if await asyncio.to_thread((self._checkpoint / "critic").is_dir):
                await critic.load(self._checkpoint / "critic")
            else:
                self._progress.note("the critic starts anew: the run had none until here")
        await _prepare_snapshots(critic, self._config)

    # ---------------------------------------------------------------------------------------------------------- orders

    def _orders(self, driver: Driver) -> Orders:
        training = asyncio.current_task()
        assert training is not None
        return {"pause": driver.pause, "resume": driver.resume, "set": self._set, "stop": lambda: self._stop(training)}

    def _stop(self, training: asyncio.Task[Any]) -> None:
        self._stopped = True
        training.cancel()

    def _set(self, key: str, value: Any) -> None:
        """Train from the next step on with another value of a key.

        Raises:
            ConfigError: the value is not allowed, only a new process can use it, no step is left to use it, or the
                next step is one of those that are trained again as they were.
        """
        if self._last_step_begun:
            text, remedy = f"{key}: the last step has begun, so no step is left", f"resume the run with --{key}"
            raise ConfigError(f"{text}; {remedy}", path=key, remedy=remedy)
        batches = self._driver.journal.recovered.batches if self._driver is not None else ()
        again = max((step for step in batches if step <= self._config.steps), default=0)
        if self._step_begun < again:
            text = f"{key}: steps until {again} are trained again from the ledger, as they were trained"
            remedy = f"set it after step {again}, or stop the run and resume it with --{key}: they are sampled anew"
            raise ConfigError(f"{text}; {remedy}", path=key, remedy=remedy)
        now = self._wanted or self._config
        tables = tables_of(now)
        set_key(tables, key, value)
        wanted = Config.from_mapping(tables, origin="set")
        check_algorithm(wanted)
        fixed = ".".join(key.split(".")[:2]) in _FIXED
        if key.partition(".")[0] not in ("algorithm", "trainer") or fixed or _stages(now) != _stages(wanted):
            remedy = f"stop the run, and resume it with --{key}"
            raise ConfigError(f"{key} cannot be set while a run trains; {remedy}", path=key, remedy=remedy)
        self._wanted = wanted

    async def _reconfigure(self, driver: Driver, step: int, origin: str) -> None:
        """Train the steps after ``step`` as was wanted; a checkpoint lets a resume begin with them."""
        assert self._wanted is not None
        begun_s = time.monotonic()
        # Both at once: a key that is set during the waits below is added to these.
        before, wanted = self._config, self._wanted
        self._config, self._wanted = wanted, None
        async with self._devices.trainer_turn():
            await driver.checkpoint_written()
            saved = self._checkpoints.folder(step)
            # One that is there holds these weights, and may be on its way to a URL.
            if not await asyncio.to_thread(is_sealed, saved):
                try:
                    await (await self._save(driver, step))()
                except NOT_WRITTEN as error:  # tried again, as seldom as CheckpointPace, and before the last step
                    last, now_s = self._last_step_begun, time.monotonic()
                    fate = "is not used: no step is left" if last else "waits for a checkpoint"
                    self._recorder.unsaved(step, f"{type(error).__name__}: {error}; what was set {fate}")
                    self._config, self._wanted = before, None if last else self._wanted or wanted
                    self._set_again_s = now_s + max(MIN_INTERVAL_S, (now_s - begun_s) / MAX_SHARE)
                    return
                driver.journal.record(Committed(step))
            await self._assembly.trainer.build(origin, trainer_options(wanted), step)
            await self._assembly.trainer.load(saved / "trainer")
            await _prepare_snapshots(self._assembly.trainer, wanted)
            driver.learner = self._learner(make_advantages(wanted, after=driver.learner.advantages))
            self._accept_changes(step, "set")
            await self._record_start(driver, origin)

    # --------------------------------------------------------------------------------------------------------- records

    @property
    def _evaluated(self) -> set[int]:
        return {record["step"] for record in self._recorder.history["evaluations"]}

    @property
    def _warm_start_folder(self) -> Path:
        return self._run.checkpoints / "warm_start"

    async def _record_start(self, driver: Driver, origin: str) -> None:
        """Record in the ledger what the updates to come depend on beside the rows."""
        if self._ledger is not None:
            (weights, *_others) = await self._assembly.trainer.fingerprint()
            model = Path(origin)
            inside = model.is_relative_to(self._run.path)
            name = model.relative_to(self._run.path).as_posix() if inside else origin
            config = self._config.to_toml()
            driver.journal.record(RunStarted(step=driver.law.version, config=config, model=name, weights=weights))

    def _accept_changes(self, step: int, how: str = "resumed") -> None:
        """Make the configuration that a run was resumed with the run's own, and name what it changes."""
        for change in self._config.changes(load_config(self._run.config_path)):
            self._progress.note(f"{how} after step {step} with {change}")
            _log.info("%s after step %d with %s", how, step, change)
        self._run.write_config(self._config.to_toml(), step=step)
        self._run.summary_path.unlink(missing_ok=True)  # of its earlier end

    def _watch(self, driver: Driver | None = None) -> Watch:
        def causes() -> list[str]:
            name, since_s = self._phase_now
            phase = [f"{name}: for {time.monotonic() - since_s:.0f} s"] if name != "train" else []
            return [*phase, *self._assembly.explain(), *(self._driver.explain() if self._driver is not None else ())]

        async def ask() -> None:
            if self._driver is not None:  # also while it scores before the first step
                await self._assembly.pool.ask_slow()

        begun = self._resumed.step if self._resumed is not None else 0
        return Watch(
            self._run.status_path,
            timeline=self._timeline,
            timeline_path=self._run.timeline_path,
            steps=self._config.steps,
            done=lambda: driver.law.version if driver is not None else begun,
            causes=causes,
            stall_timeout_s=self._config.telemetry.stall_timeout_s,
            measured=lambda: self._measured(driver) if driver is not None else {},
            score=lambda: self._recorder.last_score,
            ask=ask,
            paused=lambda: driver is not None and driver.paused,
        )

    async def _save_interrupted(self, driver: Driver) -> None:
        """Save the last step that is done, if a checkpoint takes little time and there is none of it."""
        step = driver.whole_step
        if step is None or self._config.checkpoint.every == 0:
            return
        if step > max((step_of(path) for path in self._checkpoints.all()), default=0):
            if driver.write_cut_off or self._save_s > MOST_PATIENCE_S:
                self._progress.note(f"interrupted: step {step} is not saved, since that takes too long")
                return
            self._progress.note(f"interrupted: saving step {step}")
            try:
                async with asyncio.timeout(2 * MOST_PATIENCE_S):
                    await (await self._save(driver, step))()
                    driver.journal.record(Committed(step))
            except Exception as error:  # noqa: BLE001  what interrupted the run may have ended its workers as well
                _log.warning("step %d could not be saved: %s: %s", step, type(error).__name__, error)

    async def _save(self, driver: Driver, step: int) -> Callable[[], Awaitable[None]]:
        """Take a checkpoint of ``step``, which is done; return what writes it."""
        begun_s = time.monotonic()
        balance = await self._balance(driver)
        position = await self._ledger.durable() if self._ledger is not None else None
        state = driver_state(
            driver,
            balance,
            step=step,
            history=self._recorder.history,
            position=position,
            left_over=self._left_over,
        )
        async with self._devices.trainer_turn():
            write = await self._checkpoints.take(self._assembly.trainer, state, step=step, critic=self._assembly.critic)
        take_s = time.monotonic() - begun_s

        async def written() -> None:
            begun_s = time.monotonic()  # it may have waited for its version to serve
            if self._ledger is not None:
                await self._ledger.durable()  # what its weights were published as is there before it counts
            await write()
            self._save_s = take_s + time.monotonic() - begun_s

        return written

    async def _balance(self, driver: Driver) -> TokenBalance:
        """Return the token equation now; it is exact when nothing is being generated, as at the end of a run."""
        await self._buffer.settled()
        counts = await self._assembly.pool.token_counts()
        driver.journal.drop_tokens("replica_lost", counts.lost - self._lost_with_replicas)
        self._lost_with_replicas = counts.lost
        return driver.balance(
            generated=self._generated_before + counts.delivered, in_flight=counts.in_flight + self._left_over_tokens
        )

    async def _summary(self, driver: Driver) -> RunSummary:
        config, journal, history = self._config, driver.journal, self._recorder.history
        balance = await self._balance(driver)
        balance.check()
        scores = {record["step"]: record["success"] for record in history["evaluations"]}
        train_s = self._phases_s["train"]
        trained_before = self._resumed.trained if self._resumed is not None else 0
        return RunSummary(
            name=config.name,
            seed=config.seed,
            scores=list(history["evaluations"]),
            unscored={str(step): reason for step, reason in history.get("unscored", ())},
            unsaved={str(step): reason for step, reason in history.get("unsaved", ())},
            success_before=scores.get(0),
            success_after=scores.get(config.steps),
            reward_first=history["rewards"][0] if history["rewards"] else None,
            reward_last=history["rewards"][-1] if history["rewards"] else None,
            wall_s=sum(self._phases_s.values()),
            phases_s=self._phases_s,
            steps=config.steps,
            weight_version=self._assembly.pool.weight_version,
            overlap_share=self._timeline.overlap_share(TRAINING_STAGES),
            staleness=StalenessSummary(
                max=max(journal.staleness, default=0),
                histogram={str(age): tokens for age, tokens in sorted(journal.staleness.items())},
            ),
            max_staleness=config.max_staleness,
            tokens=balance,
            tokens_per_s=(balance.trained - trained_before) / train_s if train_s else 0.0,
            trainer=await self._trainer_usage(),
            continued={**journal.continued, "restarted": dict(journal.restarted)},
            waits=self._timeline.wait_s(),
            failures=dict(journal.failures),
            **self._measured(driver),
        )

    async def _trainer_usage(self) -> dict[str, Any]:
        """Return ``trainer`` of the summary: of the first rank, but for the memory."""
        found: list[TrainerUsage] = []
        try:
            found = [each for each in await self._assembly.trainer.usage() if each is not None and each.update_s]
        except AsyncRLError as error:  # the run is done, whatever becomes of its trainer
            _log.warning("the summary lacks what the trainer used: %s", error)
        if not found:
            return {}
        first = {**found[0].metrics(), "update_s": found[0].update_s}
        return first | {"memory_peak_gb": [each.memory_peak_gb for each in found]}

    def _measured(self, driver: Driver) -> dict[str, Any]:
        """Return ``idle``, ``episodes``, ``work_s`` and ``advice`` of a summary until now."""
        times, journal = self._assembly.pool.times(), driver.journal
        measured = {
            "idle": idle_shares(self._timeline.process_s(), times),
            "episodes": sum_totals(times.values()),
            "work_s": self._timeline.spans_s(),
        }
        tokens = {"trained": journal.trained_tokens, "dropped": journal.dropped_tokens}
        known = driver.law.version - driver.law.first_version >= LEAST_STEPS
        advice = advise({**measured, "tokens": tokens}, self._config.model_dump()) if known else None
        return {**measured, "advice": asdict(advice) if advice is not None else None}

    async def _close(self) -> None:
        try:
            try:
                await self._checkpoints.sent(patience_s=MOST_PATIENCE_S)
            finally:
                await self._assembly.aclose()
        finally:
            self._trackers.close()
            try:
                self._timeline.save(self._run.timeline_path)
            except OSError as error:  # the run is over, whatever becomes of the picture of its waits
                _log.warning("%s is not written: %s", self._run.timeline_path, error)
            self._run.close()
            self._progress.close()

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        self._phase_now = (name, started)
        self._progress.note(name)
        try:
            yield
        finally:
            self._phases_s[name] = self._phases_s.get(name, 0.0) + time.monotonic() - started


def _stages(config: Config) -> tuple[object, ...]:
    """Return what the stages of a run were made from, of what an algorithm needs."""
    baseline = make_advantages(config).needs_baseline
    critic = critic_options(config) if needs_critic(config) else None  # some of them are keys of the trainer
    return needs_reference(config), critic, baseline, divergence_estimator(config)


def _check_state_fits(config: Config, before: Config, *, has_critic: bool) -> None:
    """Check that what ``config`` trains can go on from a checkpoint of a run; ``before`` is the run's own.

    Parts that ``before`` names are not loaded: a program may have given the objects.
    """
    for key in _SAVED:
        role, name = key.split(".")
        if role == "critic" and not has_critic:
            continue
        value, saved = (getattr(getattr(each, role), name) for each in (config, before))
        if value != saved:
            raise ConfigError(
                f"{key} = {value}: the checkpoints of the run were written with {saved}",
                path=key,
                remedy="resume with that, or start another run from an exported model",
            )
    anew = "or start another run from an exported model"
    if bool(config.sft.steps) != bool(before.sft.steps):
        how = "with" if before.sft.steps else "without"
        raise ConfigError(
            f"sft.steps = {config.sft.steps}: the run began {how} a warm start",
            path="sft.steps",
            remedy=f"resume with {before.sft.steps}, {anew}",
        )
    source, was = config.reward.source, before.reward.source
    used_again = was == "environment" and _buffer_rules(before).get("max_uses") != 1
    kept = before.ledger.kind is not None and config.ledger.kind is not None
    if source != was and (source == "environment" or used_again) and kept:
        raise ConfigError(
            f"reward.source = {source}: the run has recorded groups with rewards of {was}",
            path="reward.source",
            remedy=f"resume with {was}, with ledger.kind = none (they are sampled again), {anew}",
        )


_UPDATES: dict[str, Any] = {
    **dict.fromkeys(("algorithm", "trainer", "critic", "seed"), True),
    "rollout": {"temperature", "max_seq_len"},
}
"""Keys that decide the weights which a step makes of recorded rows."""

_NO_UPDATES = {
    *("world_size", "mesh", "threads", "num_cpus", "num_gpus", "groups_per_step", "group_size"),
    *("max_tokens_per_microbatch", "gradient_checkpointing"),
}
"""Keys of trainer and critic among them that change rounding alone, or what a batch has, which is recorded."""


def _same_updates(config: Config, before: Config) -> bool:
    """Return whether steps with ``config`` make the weights that they made of the same rows with ``before``."""
    ignored: dict[str, Any] = {"algorithm": {"allow_unsound", "max_mismatch_kl"}, "trainer": _NO_UPDATES}
    ignored["critic"] = _NO_UPDATES if needs_critic(config) else True
    now, then = (each.model_dump(mode="json", include=_UPDATES, exclude=ignored) for each in (config, before))
    for values, each in ((now, config), (then, before)):
        values["masked_beyond"] = each.max_staleness if each.staleness_policy.too_old == "mask" else None
    constant = {config.trainer.lr_scheduler_type, config.critic.lr_scheduler_type} == {"constant"}
    return now == then and (constant or config.steps == before.steps)


async def _prepare_snapshots(group: EngineGroup, config: Config) -> None:
    """Get the memory of snapshots here, not in a step, if any will be taken between steps."""
    if config.steps and config.checkpoint.every != 0:
        await group.prepare_snapshots()


def _where(step: int, found: Recovered | None, *, steps: int) -> str:
    """Return where a resumed run is: ``step 40 of 60; 38-39 are trained again from the ledger``."""
    again = sorted(each for each in (found.batches if found is not None else ()) if step < each <= steps)
    where = f"step {min((again or [step])[-1] + 1, steps)} of {steps}"
    if not again:
        return where
    span = f"{again[0]}-{again[-1]} are" if len(again) > 1 else f"{again[0]} is"
    return f"{where}; {span} trained again from the ledger"


def _buffer_rules(config: Config) -> dict[str, Any]:
    """Return what a :class:`TrainingPlan` says of the buffer, where it is one of ours."""
    if config.buffer.kind not in ("replay", "remote"):
        return {}
    max_uses = config.buffer.options.get("max_uses", 1)
    selection = config.buffer.selection or config.staleness_policy.selection
    plain = config.buffer.options.keys() <= {"max_uses", "zero_variance", "zero_variance_limit"}
    return {"max_uses": max_uses, "in_order": selection == "fifo" and max_uses == 1 and plain}


def model_folder(config: Config, run: RunDirectory, environments: EnvironmentFactory) -> str:
    """Return where the policy's weights are: the configured path, or a folder that the configured source fills now."""
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
