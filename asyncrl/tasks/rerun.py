"""Recordings: a finished run's batches, read from its ledger and trained on again without rollouts.

    recording = asyncrl.Recording("runs/calculator-20260102-030405")
    recording.trajectories("reward > 0.5 AND step <= 10")   # rows by an SQL condition, as a DataProto
    for step, batch in recording.batches():                 # the batches in order, one at a time in memory
        ...
    print(recording.text(recording.batch(1))[0])            # what was said in a row
    fork = recording.replay({"algorithm.loss": "gspo"})     # trained again, under another loss, by name or an object
    fork.first_difference                                   # the first step whose weights differ from the recorded ones
    run = recording.train({"algorithm.loss": MyLoss})       # the same, as a run that goes on in a thread: await run

A step is a function of the weights before it, the rows of its batch in their order, and the configuration. The ledger
has the rows, the order, and the configuration of every process of the run; the first weights are in the run's folder.
So with pinned threads a replay reaches the same weights, bit for bit, whatever overlapped in the recorded run; each
step is compared with the recorded fingerprint.

With other settings for ``algorithm``, ``trainer``, ``staleness`` or ``max_staleness`` it is a fork: the result of these
samples under another loss, correction or law. Batches stay as they were, except that ``staleness.policy = "drop"``
leaves out groups past the bound. Settings that decided what was sampled are refused.
"""

from __future__ import annotations

import asyncio
import shutil
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from asyncrl.config import Config, apply_overrides, check_algorithm, load_config, parse_overrides
from asyncrl.config.file import set_key
from asyncrl.config.problem import Problem, raise_problems
from asyncrl.config.sections import ClusterConfig
from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.data.ragged import rows_of, values_of
from asyncrl.errors import ConfigError, LedgerError, RecordingError, SchemaError
from asyncrl.ledger import LedgerArchive, RecordedGroup, RunStarted
from asyncrl.model_folder import check_model
from asyncrl.plugins import load_part
from asyncrl.rollout.chat import load_renderer
from asyncrl.runtime import BackgroundProgram
from asyncrl.staleness import POLICIES, StalenessPolicy, merge
from asyncrl.tasks.settings import with_moved_rows
from asyncrl.telemetry.progress import Progress, make_progress
from asyncrl.telemetry.run_directory import RunDirectory, open_log
from asyncrl.telemetry.trackers import check_tracker, open_trackers
from asyncrl.trainer.assembly import (
    Assembly,
    import_model_library,
    make_advantages,
    max_mismatch_kl,
    needs_reference,
    quiet_vendors,
    reference_stage,
    trainer_options,
)
from asyncrl.trainer.checkpoint import Checkpoints, DriverState, read_driver_state
from asyncrl.trainer.group import Group, Score, fetch_numbers
from asyncrl.trainer.invariants import check_log_probs
from asyncrl.trainer.learner import Advantages, Learner, StepRecord
from asyncrl.trainer.report import Recorder

if TYPE_CHECKING:
    from torch import Tensor

    from asyncrl.tasks.handle import Run


class Recording:
    """The recording of the run in folder ``run``, which may still be running. Reading blocks.

        >>> with Recording(run) as recording:
        ...     recording.first_step, recording.last_step
        (0, 4)

    Raises:
        ConfigError: it is not the folder of a run, or its configuration cannot be read.
        RecordingError: the run keeps no ledger, or it cannot be read.
    """

    def __init__(self, run: Path | str) -> None:
        self.path = Path(run)
        if not (self.path / "config.toml").is_file():
            raise ConfigError(f"{run} is not the folder of a run: it has no config.toml", remedy="give a run's folder")
        self.config = load_config(self.path / "config.toml")
        if self.config.ledger.kind is None:
            raise RecordingError(f'{run} kept no ledger, so nothing is recorded; ledger.kind = "sqlite" keeps one')
        ledger = load_part("asyncrl.ledgers", self.config.ledger.kind, path="ledger.kind")
        try:
            self._archive: LedgerArchive = ledger.archive(self.path / "ledger.sqlite")
        except LedgerError as error:
            raise RecordingError(f"{run} has no readable ledger: {error}") from error

    def __repr__(self) -> str:
        return f"Recording({str(self.path)!r}, steps {self.first_step + 1}..{self.last_step})"

    # ------------------------------------------------------------------------------------------------- what is recorded

    @property
    def first_step(self) -> int:
        """Step after which the ledger begins: 0, unless an earlier one was lost."""
        return self._archive.first_step

    @property
    def last_step(self) -> int:
        """Newest step of which the batch is known."""
        return max(self._archive.batches, default=self.first_step)

    @property
    def checkpoints(self) -> Mapping[int, Path]:
        """Checkpoints that the run still has, by step, from which a replay can start."""
        found = Checkpoints(self.path / "checkpoints", keep=1).all()
        return {int(path.name.removeprefix("step-")): path for path in found}

    @property
    def weights(self) -> Mapping[int, str]:
        """Fingerprints of the weights it made, by version, with which a replay is compared."""
        return self._archive.weights

    def life(self, step: int) -> RunStarted:
        """Return the start of the process that trained ``step``: its configuration and its model.

        Raises:
            RecordingError: it is not recorded.
        """
        found = [life for life in self._archive.processes if life.step < step]
        if not found:
            raise RecordingError(f"{self.path}: the configuration that step {step} was trained under is not recorded")
        return found[-1]

    def config_of(self, step: int) -> Config:
        """Return the configuration that ``step`` was trained under; a resumed run may have changed it on the way.

        Raises:
            ConfigError: it is of another version of this package, and not valid now.
            RecordingError: it is not recorded.
        """
        config = Config.from_mapping(tomllib.loads(self.life(step).config), origin=f"{self.path}, step {step}")
        return with_moved_rows(config, self.path)

    def model_of(self, step: int) -> str:
        """Return the folder or hub id of the model that the policy of ``step`` was built from.

        Raises:
            RecordingError: it is not known.
        """
        name = self.life(step).model
        inside = self.path / name
        return str(inside) if inside.is_dir() else name

    def lacks(self, from_step: int = 0, to_step: int | None = None) -> tuple[str, ...]:
        """Return what is missing to replay the steps after ``from_step``, up to ``to_step``, in sentences."""
        last = self.last_step if to_step is None else to_step
        return tuple(self._lacks(from_step, last))

    def _lacks(self, from_step: int, last: int) -> Iterator[str]:
        archive = self._archive
        for problem in archive.problems:
            yield f"the ledger is damaged: {problem}"
        if not archive.processes:
            yield "the ledger has no configuration that it was trained under"
        if not 0 <= from_step < last <= self.last_step:
            recorded = f"steps {self.first_step + 1}..{self.last_step} are recorded"
            yield f"steps {from_step + 1}..{last} are not recorded: {recorded}"
            return
        unknown = [step for step in range(from_step + 1, last + 1) if step not in archive.batches]
        if unknown:
            yield f"the batches of {len(unknown)} steps are not recorded, the first of step {unknown[0]}"
        missing = set(archive.missing_rows())
        bare = [
            step for step, group_ids in archive.batches.items() if from_step < step <= last and missing & {*group_ids}
        ]
        if bare:
            yield f"the rows of {len(bare)} steps are missing, the first of step {bare[0]}"
        if from_step and from_step not in self.checkpoints:
            kept = ", ".join(map(str, self.checkpoints)) or "none"
            yield f"no checkpoint of step {from_step} is left (only {kept}); checkpoint.keep_last keeps more"
        if archive.processes and not unknown:
            life = self.life(from_step + 1)
            local = life.model.startswith(("/", ".", "~", "model", "checkpoints/"))
            if local and not Path(self.model_of(from_step + 1)).is_dir():
                yield f"the model it started with is missing: {life.model}"
            elif local:
                try:
                    check_model(self.model_of(from_step + 1), key="model")
                except ConfigError as error:
                    yield f"the model it started with cannot be loaded: {error}"

    # ---------------------------------------------------------------------------------------------------------- rows

    def trajectories(
        self, where: str = "", parameters: Mapping[str, Any] | None = None, *, limit: int | None = None
    ) -> DataProto:
        """Return rows, at most ``limit``, for which an SQL condition on the ledger's view ``rows`` holds.

        ``:name`` in it is a parameter. The rows have the trajectory columns of :mod:`asyncrl.interfaces`.

        Raises:
            LedgerError: the condition is not valid SQL.
        """
        return self._archive.query(where, parameters, limit=limit)

    def groups(self, step: int) -> tuple[RecordedGroup, ...]:
        """Return what ``step`` was trained on, in the order of its batch.

        Raises:
            RecordingError: it is not recorded, or cannot be read.
        """
        group_ids = self._archive.batches.get(step)
        if group_ids is None:
            raise RecordingError(f"{self.path}: the batch of step {step} is not recorded")
        groups = []
        for group_id in group_ids:
            group = self._archive.group(group_id)
            if group is None:
                raise RecordingError(f"{self.path}: the rows of prompt {group_id} of step {step} cannot be read")
            groups.append(group)
        return tuple(groups)

    def batch(self, step: int) -> DataProto:
        """Return the rows that ``step`` was trained on, in order: the trajectory columns of :mod:`asyncrl.interfaces`.

        ``rewards`` are those that were trained on: a reward model's, if one was configured. ``group_id`` and ``row``
        identify rows; ``advantages`` follow from both (:attr:`asyncrl.config.AlgorithmConfig.advantage`). Raises as
        :meth:`groups`.
        """
        import torch

        parts = []
        for group in self.groups(step):
            rows = group.rows.select(meta_info_keys=[])
            rows.pop(["rewards"])
            parts.append(rows.union(DataProto.from_dict({"rewards": torch.tensor(group.summary.rewards)})))
        return DataProto.concat(parts)

    def batches(self, from_step: int | None = None, to_step: int | None = None) -> Iterator[tuple[int, DataProto]]:
        """Yield each step after ``from_step`` up to ``to_step`` with its :meth:`batch`; one is in memory at a time."""
        first = self.first_step if from_step is None else from_step
        for step in range(first + 1, (self.last_step if to_step is None else to_step) + 1):
            yield step, self.batch(step)

    def sampled_under(self, version: int, steps: Iterable[int]) -> DataProto | None:
        """Return the rows of these steps whose tokens were all sampled under ``version``; None if there are none.

        They have ``input_ids``, ``loss_mask`` and ``behaviour_log_probs``. Raises as :meth:`groups`.
        """
        parts = []
        for group in (group for step in steps for group in self.groups(step)):
            assert group.rows.batch is not None
            versions = [{*row.tolist()} - {-1} for row in rows_of(group.rows.batch["weight_versions"])]
            whole = [row for row, found in enumerate(versions) if found == {version}]
            if whole:
                rows = group.rows.select(["input_ids", "loss_mask", "behaviour_log_probs", "branches"], [], [])
                parts.append(rows.select_idxs(whole))
        return DataProto.concat(parts) if parts else None

    def text(self, rows: DataProto) -> list[RowText]:
        """Return what was said in each row, as :meth:`asyncrl.Run.text`."""
        return row_texts(self.path, self.config, rows)

    # -------------------------------------------------------------------------------------------------------- replay

    def replay(self, settings: Mapping[str, Any] | None = None, **options: Any) -> Replayed:
        """Train again on recorded batches, and block until that is done; takes and raises what :meth:`train` does."""
        return self.train(settings, **options).wait()

    def train(
        self,
        settings: Mapping[str, Any] | None = None,
        *,
        from_step: int = 0,
        to_step: int | None = None,
        runs: Path | str | None = None,
        progress: str = "none",
    ) -> Run[Replayed]:
        """Begin to train again on the recorded batches of steps ``from_step + 1`` to ``to_step`` (None: all).

        Returns the new run at once: await it, iterate over its steps, or show it. A trainer of one rank without a GPU
        runs inside this process, any other as it was recorded. ``settings`` are dotted keys of the configuration, set
        otherwise, to objects, too; without any the run is repeated. A function that has no module is given again.
        ``from_step`` is 0, or a step of which the run still has a checkpoint. The folder is made in ``runs``, by
        default beside the recorded run; ``progress`` is as ``telemetry.progress``.

        Raises:
            RecordingError: something needed is not recorded; all of it is listed before anything starts.
            ConfigError: a setting that does not exist, or that decided what was sampled.
        """
        from asyncrl.tasks.handle import Run

        settings = settings or {}
        last = self.last_step if to_step is None else to_step
        if lacks := self.lacks(from_step, last):
            raise RecordingError(f"{self.path} cannot be replayed: {'; '.join(lacks)}", lacks=lacks)
        forks: dict[int, Config] = {}  # by life
        configs: dict[int, Config] = {}
        forked: set[str] = set()
        for step in range(from_step + 1, last + 1):
            life = self.life(step).step
            if life not in forks:
                recorded = self.config_of(step)
                forks[life] = fork_config(recorded, settings)
                if changed := forked_keys(recorded, forks[life]):
                    forked |= {*changed}
                    check_algorithm(forks[life], samples=False)
                _check_advantage(forks[life])
            configs[step] = forks[life]
        trackers = configs[last].telemetry.trackers if "telemetry.trackers" in settings else ()
        for tracker in trackers:
            check_tracker(tracker)
        first = _nearby(configs[from_step + 1], progress=progress, trackers=trackers)
        run = RunDirectory.create(Path(runs or self.path.parent), f"{self.config.name}-replay")
        try:
            run.write_config(configs[last].to_toml())
            replaying = _Replay(self, run, first, configs, forked=tuple(sorted(forked)))
            program = BackgroundProgram(replaying.run(from_step, last)).start()
        except BaseException:
            run.close()
            raise
        return Run(run.path, config=configs[last], program=program, directory=run)

    def close(self) -> None:
        """Close the ledger. Idempotent."""
        self._archive.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class RowText:
    """What was said in a row; ``str()`` of it is all of it.

    Attributes:
        prompt: what came before the first sampled token.
        response: what came after it, the environment's words included.
        turns: the policy's parts of the response.
    """

    prompt: str
    response: str
    turns: tuple[str, ...]

    def __str__(self) -> str:
        return self.prompt + self.response


def row_texts(run: Path, config: Config, rows: DataProto) -> list[RowText]:
    """Decode rows (``input_ids`` and ``turns``) of the run in this folder, special tokens included. Blocks.

    Raises:
        SchemaError: they lack one of these columns.
        ConfigError: the run's tokenizer cannot be loaded.
    """
    if rows.batch is None:  # no row met the condition
        return []
    if lacks := {"input_ids", "turns"} - {*rows.batch.keys()}:
        raise SchemaError(f"text of rows needs the columns input_ids and turns; these lack {', '.join(sorted(lacks))}")
    made = run / "model"
    model = str(made) if made.is_dir() else config.model.path or str(made)
    decode = load_renderer(model, chat_template=config.model.chat_template).tokenizer.decode

    def text(token_ids: Tensor) -> str:
        return str(decode(token_ids.tolist(), skip_special_tokens=False))

    texts = []
    for token_ids, turns in zip(rows_of(rows.batch["input_ids"]), rows_of(rows.batch["turns"]), strict=True):
        before = int((turns >= 0).cumsum(0).eq(0).sum())
        said = tuple(text(token_ids[turns == turn]) for turn in range(int(turns.max()) + 1))
        texts.append(RowText(prompt=text(token_ids[:before]), response=text(token_ids[before:]), turns=said))
    return texts


UPDATE_KEYS = ("algorithm", "trainer", "staleness", "max_staleness")
"""Keys that an update depends on."""
OTHER_KEYS = ("name", "runs", "cluster", "checkpoint", "telemetry")
"""Keys that change neither tokens nor weights."""
BATCH_KEYS = ("trainer.groups_per_step", "trainer.group_size")
"""Keys among the first that decide what a batch consists of, which is recorded."""
_PARTS = (("algorithm", "advantage"), ("algorithm", "loss"), ("algorithm", "correction"), ("trainer", "optimizer"))
"""Tables and keys of parts that have options beside them, in ``..._options``."""


def fork_config(config: Config, settings: Mapping[str, Any]) -> Config:
    """Return ``config`` with ``settings`` (dotted keys; values, objects, or their text) in it.

    A part that is replaced by another (``algorithm.loss``) takes its options with it.

    Raises:
        ConfigError: an unknown key, a bad value, or a key that decided what was sampled.
    """
    tables = config.model_dump(mode="json")  # with each None: a default may be in its place
    changed = _with_settings(tables, settings)
    for table, name in _PARTS:
        now = changed.get(table)
        if isinstance(now, dict) and now.get(name) != tables[table][name]:
            tables[table].pop(f"{name}_options")
    forked = Config.from_mapping(_with_settings(tables, settings), origin="--set")
    refused = [
        key
        for key in _changed(config, forked)
        if key.partition(".")[0] not in UPDATE_KEYS + OTHER_KEYS or key in BATCH_KEYS
    ]
    if refused:
        raise_problems(
            [
                Problem(
                    key,
                    "decided what was sampled, and that is recorded",
                    remedy=f"a recording can be trained again under other {', '.join(UPDATE_KEYS)}",
                )
                for key in refused
            ],
            origin="--set",
        )
    return forked


def _with_settings(tables: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    changed = dict(tables)
    for key, value in settings.items():
        if value is None or isinstance(value, str):
            setting = f"--{key}={'none' if value is None else value}"
            changed = apply_overrides(changed, parse_overrides([setting]), Config)
        else:
            set_key(changed, key, value)
    return changed


def fork_policy(config: Config, forked: Sequence[str]) -> StalenessPolicy:
    """Return the staleness policy of a fork of these keys.

    A run waits at a bound of 0. A fork has its batches, and leaves out what is older than the weights of the step.
    """
    policy = POLICIES[config.staleness.policy]
    return policy if "max_staleness" in forked and policy.too_old in ("mask", "drop") else config.staleness_policy


def forked_keys(config: Config, forked: Config) -> tuple[str, ...]:
    """Return the dotted keys that change what an update does."""
    changed = [key for key in _changed(config, forked) if key != "algorithm.allow_unsound"]
    return tuple(key for key in changed if key.partition(".")[0] in UPDATE_KEYS)


def _changed(config: Config, forked: Config) -> list[str]:
    before, after = dict(_leaves(config.model_dump(mode="json"))), dict(_leaves(forked.model_dump(mode="json")))
    return sorted(key for key in {*before, *after} if before.get(key) != after.get(key))


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


_REBUILT_BY = ("algorithm", "trainer", "seed", "steps", "model", "rollout")
"""Tables of the configuration that a training engine is made from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The result of a replay of the steps ``from_step + 1`` to ``to_step``.

    Attributes:
        run: its own folder: metrics, summary, and a checkpoint of the last step, for `asyncrl eval`.
        forked: dotted keys that differ from the recording.
        compared: steps whose weights were compared with recorded ones.
        first_difference: first step whose weights differed; None if all were equal.
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


def _check_advantage(config: Config) -> None:
    """Refuse advantages that need a critic's values or greedy answers: a ledger has neither."""
    missing = sorted({"values", "greedy_rewards"} & {*config.algorithm.estimator().needs})
    if missing:
        raise ConfigError(
            f"advantage {config.algorithm.advantage!r} needs {', '.join(missing)}, which no recording has",
            path="algorithm.advantage",
            remedy="fork with another advantage, --algorithm.advantage grpo",
        )


def _nearby(config: Config, *, progress: str, trackers: tuple[str, ...]) -> Config:
    trainer = config.trainer
    changes: dict[str, Any] = {
        "telemetry": config.telemetry.model_copy(update={"progress": progress, "trackers": trackers})
    }
    if trainer.world_size == 1 and not trainer.num_gpus:
        changes["cluster"] = ClusterConfig(backend="local")
    return config.model_copy(update=changes)


class _Replay:
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
        algorithms = [each.algorithm for each in configs.values() if needs_reference(each)]  # one reference for all
        workers = config.model_copy(update={"algorithm": algorithms[0]}) if algorithms else config
        self._assembly = Assembly(workers, log_folder=run.logs)
        self._reference: Score | None = None
        self._learner: Learner | None = None

    async def run(self, from_step: int, to_step: int) -> Replayed:
        telemetry, shown = self._config.telemetry, self._config.model_dump(mode="json")
        async with AsyncExitStack() as stack:
            stack.enter_context(self._run)
            stack.enter_context(open_log(self._run.logs / "replay.log"))
            progress = make_progress(telemetry.progress)
            stack.callback(progress.close)
            trackers = stack.enter_context(
                open_trackers(telemetry.trackers, self._run.path, name=self._config.name, config=shown)
            )
            stack.push_async_callback(self._assembly.aclose)
            return await self._train(from_step, to_step, progress, Recorder(self._run, progress, trackers))

    async def _train(self, from_step: int, to_step: int, progress: Progress, recorder: Recorder) -> Replayed:
        started = time.monotonic()
        differs: list[int] = []
        compared = 0
        steps: list[StepRecord] = []
        await self._start(from_step)
        weights = await self._weights()
        progress.stage("replay", to_step - from_step)
        for step in range(from_step + 1, to_step + 1):
            if not differs:
                await self._check_engine(step - 1, to_step)
            await self._reconfigure(step)
            steps.append(await self._step(step))
            weights = await self._weights()
            expected = self._recording.weights.get(step)
            if expected is not None:
                compared += 1
                if weights != expected:
                    differs.append(step)
            recorder.stepped(steps[-1])
        total = merge(step.certificate for step in steps)
        state = DriverState(
            step=to_step,
            next_group_id=total.groups,
            outstanding=(),
            generated=total.tokens + total.masked_tokens,
            trained=total.tokens,
            dropped={"masked": total.masked_tokens} if total.masked_tokens else {},
            staleness=dict(total.histogram),
            history=recorder.history,
            consumed=total.groups,
            kl_coef=self._advantages.kl_coef,
            kl_start=self._advantages.kl_start,
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
            metrics=tuple(step.trainer_metrics for step in steps),
        )
        self._summarise(done, total.histogram, wall_s=time.monotonic() - started)
        return done

    # ------------------------------------------------------------------------------------------------------- trainer

    async def _start(self, from_step: int) -> None:
        """Build the trainer as it was after ``from_step``, and make the learner of the step that follows."""
        recording, assembly, config = self._recording, self._assembly, self._config
        quiet_vendors(config.model)
        await asyncio.to_thread(import_model_library, config)
        await assembly.start(roles=("trainer", "reference"))
        model = recording.model_of(from_step + 1)
        await assembly.trainer.build(model, trainer_options(config), from_step)
        state: DriverState | None = None
        if from_step:
            checkpoint = recording.checkpoints[from_step]
            state = read_driver_state(checkpoint)
            await assembly.trainer.load(checkpoint / "trainer")
        else:
            expected = recording.life(1).weights
            if (found := await self._weights()) != expected:
                raise RecordingError(
                    f"{model} is not the model that the run began with: its weights are {found}, not {expected}"
                )
        await self._make_learner(config, model, after=state)

    async def _make_learner(self, config: Config, model: str, *, after: DriverState | Advantages | None) -> None:
        """Make the learner of ``config``, and the reference that it needs, of the ``model`` that a run began with."""
        reference, self._reference = self._assembly.reference, None
        if needs_reference(config):
            if reference is not None:
                await reference.build(model, trainer_options(config))
            self._reference = reference_stage(config, reference or self._assembly.trainer)
        self._learner = Learner(
            trainer=self._assembly.trainer,
            advantages=make_advantages(config, after=after),
            policy=fork_policy(config, self._forked),
            max_staleness=config.max_staleness,
            optimizer_steps=config.trainer.num_mini_batches * config.trainer.epochs,
            has_reference=self._reference is not None,
        )

    async def _reconfigure(self, step: int) -> None:
        """Change the configuration where the recorded run was resumed with another one."""
        before, now = self._configs.get(step - 1), self._configs[step]
        if before is None or before == now:
            return
        trainer, model = self._assembly.trainer, self._recording.model_of(step)
        if any(getattr(before, name) != getattr(now, name) for name in _REBUILT_BY):
            kept = self._run.path / "between"
            await trainer.save(kept)
            await trainer.build(model, trainer_options(now), step - 1)
            await trainer.load(kept)
            await asyncio.to_thread(shutil.rmtree, kept)
        await self._make_learner(now, model, after=self._advantages)

    @property
    def _advantages(self) -> Advantages:
        assert self._learner is not None
        return self._learner.advantages

    async def _weights(self) -> str:
        (fingerprint, *_others) = await self._assembly.trainer.fingerprint()
        return fingerprint

    # ----------------------------------------------------------------------------------------------------------- steps

    async def _step(self, step: int) -> StepRecord:
        assert self._learner is not None
        recorded = await asyncio.to_thread(self._recording.groups, step)
        groups = []
        for each in self._within_the_law(step, recorded):
            group = Group(group_id=each.summary.group_id, summary=each.summary)
            group.rows = DataProtoFuture.of(each.rows)
            if not self._learner.advantages.by_turns:  # of a reward model: the summary has what it gave
                import torch

                scores = DataProto.from_dict({"scores": torch.tensor(each.summary.rewards)})
                group.rows = group.rows.union(DataProtoFuture.of(scores))
            if (reference_log_probs := self._reference) is not None:  # group by group, as in the recorded run
                reference = reference_log_probs(group.rows)
                if self._learner.advantages.needs_divergences:
                    group.divergences = tuple(await fetch_numbers(reference, "divergences"))
                group.rows = group.rows.union(reference.select(["reference_log_probs"], [], []))
            groups.append(group)
        return await self._learner.learn(step, groups)

    async def _check_engine(self, version: int, to_step: int) -> None:
        """Check the log-probs of recorded rows that engines sampled under ``version`` alone, which the trainer holds.

        Raises:
            InvariantError: the trainer gives others; the engines had other weights, or stamped tokens wrongly.
        """
        limit = max_mismatch_kl(self._config)
        if self._forked or limit is None:
            return
        last = min(to_step, version + 1 + self._config.max_staleness)
        rows = await asyncio.to_thread(self._recording.sampled_under, version, range(version + 1, last + 1))
        if rows is None:
            return
        assert rows.batch is not None
        scored = await self._assembly.trainer.log_probs(rows.select(["input_ids", "branches"]))
        assert scored.batch is not None
        from asyncrl.algorithms.kl import kl_estimate

        mask = values_of(rows.batch["loss_mask"])
        sampled = values_of(rows.batch["behaviour_log_probs"])[mask]
        found = values_of(scored.batch["log_probs"])[mask]
        check_log_probs(kl_estimate(sampled, found, estimator="k3").tolist(), version=version, limit=limit)

    def _within_the_law(self, step: int, groups: Sequence[RecordedGroup]) -> Sequence[RecordedGroup]:
        """Return the groups that the staleness policy trains on; only a fork leaves any out."""
        assert self._learner is not None
        policy, oldest = self._learner.policy, step - 1 - self._learner.max_staleness
        old = [group for group in groups if group.summary.oldest_version < oldest]
        if policy.too_old == "mask" and all(max(group.summary.version_tokens) < oldest for group in groups):
            raise RecordingError(f"no token of step {step} is within max_staleness = {self._learner.max_staleness}")
        if not old or policy.keeps_groups:
            return groups
        if policy.too_old == "none":
            name = self._configs[step].staleness.policy
            rule = f'"{name}" leaves nothing out, and step {step} has tokens past max_staleness'
            raise ConfigError(f"staleness.policy = {rule}", path="staleness.policy", remedy='use "mask" or "drop"')
        young = [group for group in groups if group.summary.oldest_version >= oldest]
        if not young:
            raise RecordingError(f"no group of step {step} is within max_staleness = {self._learner.max_staleness}")
        return young

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
                "staleness": {str(age): tokens for age, tokens in staleness.items()},
                "wall_s": wall_s,
            }
        )
