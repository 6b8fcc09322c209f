"""Training again on what a run was trained on: the same batches, in the same order, and no rollouts.

A step is a function of the weights before it, the rows of its batch in their order, and the configuration. The ledger
keeps the rows, the order, and the configuration of every process that took part; the first weights lie in the run's
folder. So with pinned threads a replay reaches the same weights, bit for bit, whatever overlapped while they were made;
each step is held to the fingerprint that the run recorded.

With other settings for ``algorithm``, ``trainer``, ``staleness`` or ``max_staleness`` it is a fork: what these samples
would have taught under another loss, correction or law. Batches stay as they were, except that ``staleness.policy =
"drop"`` leaves out groups past the bound.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from asyncrl.config import Config, check_algorithm
from asyncrl.config.sections import ClusterConfig
from asyncrl.data import DataProtoFuture
from asyncrl.errors import ConfigError, RecordingError
from asyncrl.interfaces import SelectedGroup
from asyncrl.ledger import RecordedGroup
from asyncrl.pipeline.assembly import Assembly, import_once, needs_reference, trainer_options
from asyncrl.pipeline.checkpoint import Checkpoints, DriverState, read_driver_state
from asyncrl.pipeline.fork import fork_config, forked_keys
from asyncrl.pipeline.group_stages import numbers_of
from asyncrl.pipeline.interruption import run_to_end
from asyncrl.pipeline.learner import Learned, Learner
from asyncrl.pipeline.recorder import Recorder
from asyncrl.pipeline.recording import Recording
from asyncrl.pipeline.reference import Score, make_judge, make_reference
from asyncrl.pipeline.training_plan import StepRecord
from asyncrl.telemetry.log import open_log
from asyncrl.telemetry.progress import make_progress
from asyncrl.telemetry.run_directory import RunDirectory
from asyncrl.telemetry.trackers import open_trackers

__all__ = ["Replayed", "replay"]

_REBUILT_BY = ("algorithm", "trainer", "seed", "steps", "model", "rollout")
"""Tables of the configuration that a training engine is made from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What a replay came to.

    Attributes:
        run: its own folder: metrics, summary, and a checkpoint of the last step, for `asyncrl eval`.
        from_step: step it went on from.
        to_step: last step it trained.
        forked: dotted keys that were set otherwise than recorded.
        compared: steps whose weights could be held against the recorded ones.
        first_difference: first step whose weights were others; None if all were equal.
        weights: fingerprint of the last weights.
        metrics: of each step, as trackers get them.
    """

    run: Path
    from_step: int
    to_step: int
    forked: tuple[str, ...]
    compared: int
    first_difference: int | None
    weights: str
    metrics: Sequence[Mapping[str, float]]

    @property
    def equal(self) -> bool:
        """True if every step ended in the recorded weights, and there were such."""
        return self.compared == self.to_step - self.from_step and self.first_difference is None


def replay(
    recording: Recording,
    settings: Mapping[str, Any],
    *,
    from_step: int = 0,
    to_step: int | None = None,
    runs: Path | None = None,
    progress: str = "none",
) -> Replayed:
    """Train again on the recorded batches of steps ``from_step + 1`` to ``to_step`` (None: all).

    A trainer of one rank without a GPU runs inside this process, any other as it was recorded.

    Args:
        recording: the run.
        settings: dotted keys of the configuration, set otherwise; empty repeats the run.
        from_step: 0, or a step of which the run still has a checkpoint.
        to_step: last step to train.
        runs: folder in which the replay makes its own; None: beside the recorded run.
        progress: as ``telemetry.progress``.

    Raises:
        RecordingError: the run lacks something, all of which is told before anything starts.
        ConfigError: a setting that does not exist, or that decided what was sampled.
    """
    last = recording.last_step if to_step is None else to_step
    lacks = recording.lacks(from_step, last)
    if lacks:
        raise RecordingError(f"{recording.path} cannot be replayed: {'; '.join(lacks)}", lacks=lacks)
    forks: dict[int, Config] = {}  # by life
    configs: dict[int, Config] = {}
    forked: set[str] = set()
    for step in range(from_step + 1, last + 1):
        life = recording.life(step).step
        if life not in forks:
            recorded = recording.config_of(step)
            forks[life] = fork_config(recorded, settings)
            forked |= {*forked_keys(recorded, forks[life])}
            check_algorithm(forks[life])
            _check_advantage(forks[life])
        configs[step] = forks[life]
    trackers = configs[last].telemetry.trackers if "telemetry.trackers" in settings else ()
    first = _nearby(configs[from_step + 1], progress=progress, trackers=trackers)
    run = RunDirectory.create(runs or recording.path.parent, f"{recording.config.name}-replay")
    run.write_config(configs[last].to_toml())
    replaying = _Replay(recording, run, first, configs, forked=tuple(sorted(forked)))
    with open_log(run.logs / "replay.log"):
        return run_to_end(replaying.run(from_step, last))


def _check_advantage(config: Config) -> None:
    """A ledger keeps what was sampled, not what a critic thought of it or what a greedy answer would have earned."""
    missing = sorted({"values", "greedy_rewards"} & {*config.algorithm.estimator().needs})
    if missing:
        raise ConfigError(
            f"advantage {config.algorithm.advantage!r} needs {', '.join(missing)}, which no recording has",
            path="algorithm.advantage",
            remedy="fork with another advantage, --algorithm.advantage grpo",
        )


def _nearby(config: Config, *, progress: str, trackers: tuple[str, ...]) -> Config:
    """The configuration of the workers: in this process where a rank needs no other."""
    trainer = config.trainer
    changes: dict[str, Any] = {
        "telemetry": config.telemetry.model_copy(update={"progress": progress, "trackers": trackers})
    }
    if trainer.world_size == 1 and not trainer.num_gpus:
        changes["cluster"] = ClusterConfig(backend="local")
    return config.model_copy(update=changes)


class _Replay:
    """One replay and all it owns."""

    def __init__(
        self,
        recording: Recording,
        run: RunDirectory,
        config: Config,
        configs: Mapping[int, Config],
        *,
        forked: tuple[str, ...],
    ) -> None:
        self._recording = recording
        self._run = run
        self._config = config
        self._configs = configs
        self._forked = forked
        self._assembly = Assembly(config, log_folder=run.logs)
        self._progress = make_progress(config.telemetry.progress)
        self._trackers = open_trackers(
            config.telemetry.trackers, run.path, name=config.name, config=config.model_dump(mode="json")
        )
        self._recorder = Recorder(run, self._progress, self._trackers)
        self._reference: Score | None = None
        self._learner: Learner | None = None

    async def run(self, from_step: int, to_step: int) -> Replayed:
        """Train all steps, then write the checkpoint and the summary."""
        started = time.monotonic()
        differs: list[int] = []
        compared = 0
        staleness: Counter[int] = Counter()
        metrics: list[Mapping[str, float]] = []
        masked = slots = 0
        try:
            await self._start(from_step)
            weights = await self._weights()
            self._progress.stage("replay", to_step - from_step)
            for step in range(from_step + 1, to_step + 1):
                await self._follow(step)
                learned, groups = await self._step(step)
                staleness.update(learned.certificate.histogram)
                masked += learned.certificate.masked_tokens
                slots += groups
                weights = await self._weights()
                expected = self._recording.weights.get(step)
                if expected is not None:
                    compared += 1
                    if weights != expected:
                        differs.append(step)
                self._tell(step, learned)
                metrics.append(learned.metrics)
            trained = sum(staleness.values())
            state = DriverState(
                step=to_step,
                next_slot=slots,
                outstanding=(),
                generated=trained + masked,
                trained=trained,
                dropped={"masked": masked} if masked else {},
                staleness=dict(staleness),
                history=self._recorder.history,
                consumed=slots,
                kl_coefficient=self._coefficient,
            )
            await Checkpoints(self._run.checkpoints, keep=1).save(self._assembly.trainer, state, step=to_step)
            done = Replayed(
                run=self._run.path,
                from_step=from_step,
                to_step=to_step,
                forked=self._forked,
                compared=compared,
                first_difference=min(differs, default=None),
                weights=weights,
                metrics=tuple(metrics),
            )
            self._summarise(done, staleness, wall_s=time.monotonic() - started)
            return done
        finally:
            await self._assembly.aclose()
            self._trackers.close()
            self._run.close()
            self._progress.close()

    # ------------------------------------------------------------------------------------------------------- trainer

    async def _start(self, from_step: int) -> None:
        """The trainer as it was after ``from_step``, and the reference beside it."""
        recording, assembly, config = self._recording, self._assembly, self._config
        await asyncio.to_thread(import_once, config)
        await assembly.start(roles=("trainer", "reference"))
        model = recording.model_of(from_step + 1)
        options = trainer_options(config)
        await assembly.trainer.build(model, options, from_step)
        coefficient: float | None = None
        if from_step:
            checkpoint = recording.checkpoints[from_step]
            coefficient = read_driver_state(checkpoint).kl_coefficient
            await assembly.trainer.load(checkpoint / "trainer")
        else:
            expected = recording.life(1).weights
            if (found := await self._weights()) != expected:
                raise RecordingError(
                    f"{model} is not the model that the run began with: its weights are {found}, not {expected}"
                )
        if needs_reference(config):
            group = assembly.trainer
            if config.trainer.lora is None:
                group = assembly.reference
                await group.build(model, options)
            self._reference = make_reference(config, group)
        self._learner = self._make_learner(config, coefficient)

    def _make_learner(self, config: Config, coefficient: float | None) -> Learner:
        return Learner(
            trainer=self._assembly.trainer,
            judge=make_judge(config, coefficient),
            policy=config.staleness_policy,
            max_staleness=config.max_staleness,
            optimizer_steps=config.trainer.minibatches * config.trainer.epochs,
            referred=self._reference is not None,
        )

    async def _follow(self, step: int) -> None:
        """Where another process went on with the run, under another configuration, so does this."""
        before, now = self._configs.get(step - 1), self._configs[step]
        if before is None or before == now:
            return
        trainer = self._assembly.trainer
        if any(getattr(before, name) != getattr(now, name) for name in _REBUILT_BY):
            kept = self._run.path / "between"
            await trainer.save(kept)
            await trainer.build(self._recording.model_of(step), trainer_options(now), step - 1)
            await trainer.load(kept)
            await asyncio.to_thread(shutil.rmtree, kept)
        self._learner = self._make_learner(now, self._coefficient)

    @property
    def _coefficient(self) -> float | None:
        penalty = self._learner.penalty if self._learner is not None else None
        return penalty.controller.coefficient if penalty is not None else None

    async def _weights(self) -> str:
        (fingerprint, *_others) = await self._assembly.trainer.fingerprint()
        return cast("str", fingerprint)

    # ----------------------------------------------------------------------------------------------------------- steps

    async def _step(self, step: int) -> tuple[Learned, int]:
        """Train one step; also how many groups were in it."""
        assert self._learner is not None
        recorded = await asyncio.to_thread(self._recording.groups, step)
        groups = []
        for each in self._within_the_law(step, recorded):
            rows = DataProtoFuture.of(each.rows)
            if self._reference is not None:  # group by group, as it was asked then
                reference = self._reference(rows)
                if self._learner.judge.wants_divergences:
                    self._learner.judge.told(each.summary.slot, await numbers_of(reference, "divergences"))
                rows = rows.union(reference.select(["reference_log_probs"], [], []))
            groups.append(SelectedGroup(summary=each.summary, rows=rows))
        return await self._learner.learn(step, groups), len(groups)

    def _within_the_law(self, step: int, groups: Sequence[RecordedGroup]) -> Sequence[RecordedGroup]:
        """Those that the staleness policy trains on; only a fork leaves any out.

        Raises:
            RecordingError: none is left.
            ConfigError: the policy waits for slow groups, and here is nobody to wait for.
        """
        assert self._learner is not None
        policy, oldest = self._learner.policy, step - 1 - self._learner.max_staleness
        old = [group for group in groups if group.summary.oldest_version < oldest]
        if policy.too_old == "mask" and all(max(group.summary.version_tokens) < oldest for group in groups):
            raise RecordingError(f"no token of step {step} is within max_staleness = {self._learner.max_staleness}")
        if not old or policy.keeps_groups:
            return groups
        if policy.too_old == "none":
            rule = f'"{policy.name}" leaves nothing out, and step {step} has tokens past max_staleness'
            raise ConfigError(f"staleness.policy = {rule}", path="staleness.policy", remedy='use "mask" or "drop"')
        young = [group for group in groups if group.summary.oldest_version >= oldest]
        if not young:
            raise RecordingError(f"no group of step {step} is within max_staleness = {self._learner.max_staleness}")
        return young

    def _tell(self, step: int, learned: Learned) -> None:
        self._recorder.stepped(
            StepRecord(
                step=step,
                weight_version=step,
                metrics=learned.metrics,
                certificate=learned.certificate,
                rewards=learned.rewards,
                lengths=learned.lengths,
                buffer_ready=0,
                buffer_pending=0,
            )
        )

    def _summarise(self, done: Replayed, staleness: Mapping[int, int], *, wall_s: float) -> None:
        self._run.write_summary(
            {
                "recording": str(self._recording.path.absolute()),
                "from_step": done.from_step,
                "steps": done.to_step,
                "forked": list(done.forked),
                "compared": done.compared,
                "first_difference": done.first_difference,
                "weights": done.weights,
                "staleness": {str(age): tokens for age, tokens in sorted(staleness.items())},
                "wall_s": wall_s,
            }
        )
