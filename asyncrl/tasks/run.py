"""The commands as functions: train, sft, train_reward_model, evaluate, generate.

Each makes its own event loop, takes Ctrl-C and SIGTERM, and leaves no process, port or shared memory behind; each
raises :class:`AsyncRLError` of the class that names what ended it. The examples have one small ``config`` of one step,
with two held-out tasks.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import shlex
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.config import Config, EnvConfig, RewardTrainingConfig, load_config
from asyncrl.errors import CheckpointError, ConfigError, EnvironmentFailure
from asyncrl.interfaces import EnvironmentFactory, FiniteHeldOutTasks
from asyncrl.io import is_sealed
from asyncrl.rollout.chat import ChatRenderer, load_renderer
from asyncrl.runtime import Terminated, in_thread, run_with_signals
from asyncrl.tasks import reward_model as reward_training
from asyncrl.tasks.checks import check_reward_training, check_start
from asyncrl.tasks.generate import AnswersFile, FailedTask, answer_tasks
from asyncrl.tasks.settings import DATASET_NAMES, with_moved_rows
from asyncrl.telemetry.progress import make_progress
from asyncrl.telemetry.run_directory import RunDirectory, open_log
from asyncrl.telemetry.timeline import Timeline
from asyncrl.trainer.assembly import (
    Assembly,
    chat_options,
    filter_overlong_prompts,
    import_model_library,
    make_environments,
)
from asyncrl.trainer.checkpoint import Checkpoints, read_driver_state
from asyncrl.trainer.evaluation import summarise_answers
from asyncrl.trainer.group import Score
from asyncrl.trainer.run import TrainingRun, model_folder

_T = TypeVar("_T")


def train(config: Config, *, resume: Path | None = None) -> dict[str, Any]:
    """Train to ``config.steps`` and return the summary, which is also in ``summary.json``.

        >>> summary = train(config)
        >>> summary["steps"], summary["weight_version"], summary["staleness"]["max"]
        (1, 1, 0)

    ``resume`` is the folder of a run to resume from its newest checkpoint; its metrics are continued.

    Raises:
        CheckpointError: nothing to resume from, or the run is over already: all steps done, and its summary written.
        StorageError: a store refuses, or cannot be reached.
        ConfigError: ``config`` names another model than the run to be resumed, ``resume`` is no run's folder, or a part
            cannot be used as configured.
    """
    config = with_moved_rows(config, resume) if resume is not None else config
    environments = check_start(config, stores=True)
    run, checkpoint = open_run(config, resume=resume)
    try:
        done = _in_run(config, run, lambda training: training.train(), checkpoint=checkpoint, environments=environments)
    except (KeyboardInterrupt, Terminated) as interruption:
        if Checkpoints(run.checkpoints, keep=1).all():
            interruption.add_note(f"go on with: asyncrl train --resume {shlex.quote(str(run.path))}")
        raise
    return done.as_record()


def open_run(config: Config, *, resume: Path | None = None) -> tuple[RunDirectory, Path | None]:
    """Make the folder of a run, or open that of one to resume; return it with the checkpoint to resume from.

    Raises as :func:`train`.
    """
    if resume is None:
        return RunDirectory.create(config.runs, config.name), None
    run = RunDirectory.open(resume)
    try:
        checkpoint = _checkpoint_to_resume(config, run)
        run.stale_after = read_driver_state(checkpoint).step
        return run, checkpoint
    except BaseException:
        run.close()
        raise


def _checkpoint_to_resume(config: Config, run: RunDirectory) -> Path:
    checkpoint = Checkpoints(run.checkpoints, keep=config.checkpoint.keep_last).latest()
    done, summary = read_driver_state(checkpoint).step, run.summary()
    if done >= config.steps and summary is not None and summary["steps"] >= config.steps:
        raise CheckpointError(f"{run.path} has done all its {done} steps; raise them with --steps to continue")
    if done > config.steps:
        raise ConfigError(
            f"steps = {config.steps}: {run.path} has done {done} steps, and continues after them",
            path="steps",
            remedy=f"at least {done}",
        )
    before, wanted = (each.model.model_dump(mode="json") for each in (load_config(run.config_path), config))
    if before != wanted:  # a function without a module is its path in the file
        raise ConfigError(
            f"{run.path} continues with its own weights; [model] must be unchanged",
            path="model",
            remedy="begin a new run",
        )
    return checkpoint


def sft(config: Config) -> dict[str, Any]:
    """Run the supervised warm start alone; return ``{"model": folder, ...}``.

    >>> trained = sft(config)
    >>> trained["steps"], (Path(trained["model"]) / "config.json").is_file()
    (1, True)

    Raises:
        ConfigError: ``sft.steps`` is 0, or another key cannot be used.
    """
    if not config.sft.steps:
        remedy = "give the optimizer steps, as in --sft.steps 100"
        raise ConfigError("sft.steps = 0: nothing is trained", path="sft.steps", remedy=remedy)
    environments = check_start(config)
    run = RunDirectory.create(config.runs, config.name)
    return _in_run(config, run, lambda training: training.supervise(), checkpoint=None, environments=environments)


def train_reward_model(config: RewardTrainingConfig) -> dict[str, Any]:
    """Train a reward model on comparisons; return the summary: ``{"model": folder, "held_out_accuracy": ...}``."""
    check_reward_training(config)
    with RunDirectory.create(config.runs, config.name) as run:
        run.write_config(config.to_toml())
        progress = make_progress(config.telemetry.progress)
        progress.note(f"run {run.path}")
        try:
            with open_log(run.logs / "driver.log"):
                return run_with_signals(reward_training.train_reward_model(config, run, progress))
        finally:
            progress.close()


def evaluate(
    config: Config,
    *,
    checkpoint: Path | str | None = None,
    data: Sequence[str] | None = None,
    tasks: int | None = None,
    samples: int = 1,
    temperature: float | None = None,
    out: Path | None = None,
) -> dict[str, Any]:
    """Score the held-out tasks with the configured model, or with a checkpoint's.

        >>> result = evaluate(config, samples=3)
        >>> result["tasks"], result["samples"], result["weight_version"]
        (2, 3.0, 0)
        >>> sorted(result["scores"])
        ['avg@3', 'pass@1', 'pass@2', 'pass@3', 'reward']

    Args:
        config: model, environment and sampling.
        checkpoint: weights of a run, a checkpoint or a model folder; or the URL of a model.
        data: files of prompts, in place of the environment's held-out tasks (:mod:`asyncrl.datasets`).
        tasks: how many; by default ``eval.tasks``, or all rows of ``data``.
        samples: answers to each task.
        temperature: greedy by default with one sample, else ``rollout.temperature``.
        out: file for the answers; an unfinished one is continued.

    Returns:
        ``weight_version`` of the checkpoint (0 for a model folder), ``scores`` with intervals
        (:func:`asyncrl.trainer.evaluation.score_tasks`), of each data source too where there are several, and
        :func:`asyncrl.trainer.evaluation.summarise_answers`.

    Raises:
        CheckpointError: ``checkpoint`` is not such a folder.
        ConfigError: no task is configured, or a value cannot be used.
        EnvironmentFailure: some tasks could not be rewarded; the other answers stay in ``out``.
    """
    if tasks is None and data is None and not config.eval.tasks:
        raise ConfigError("eval.tasks = 0: no task to score", path="eval.tasks", remedy="at least 1")
    answers, version = _answer(
        with_data(config, data) if data is not None else config,
        made_with=config,
        checkpoint=checkpoint,
        tasks=tasks if tasks is not None or data is not None else config.eval.tasks,
        samples=samples,
        sampling=_eval_sampling(config, samples=samples, temperature=temperature),
        out=out,
        rewarded=config.reward.source != "environment" and config.eval.reward == "configured",
    )
    return {"weight_version": version, **summarise_answers(answers, success_reward=config.eval.success_reward)}


def generate(
    config: Config,
    *,
    prompt: str | None = None,
    data: Sequence[str] | None = None,
    tasks: int | None = None,
    samples: int = 1,
    temperature: float | None = None,
    checkpoint: Path | str | None = None,
    out: Path | None = None,
) -> list[dict[str, Any]]:
    """Answer held-out tasks, the rows of files, or one user ``prompt`` without tools; return a record per answer.

        >>> (answer,) = generate(config, prompt="hello")
        >>> answer["task"], answer["sampled_tokens"] <= 4
        ({'prompt': 'hello'}, True)

    Arguments are those of :func:`evaluate`; records those of :func:`asyncrl.tasks.generate.answer_record`. Rows of
    files are rewarded where the configured environment is a data set with rules; else rewards are 0, and so is the part
    ``judged``.

    Raises:
        CheckpointError: ``checkpoint`` is not such a folder.
        ConfigError: the environment has no last task and ``tasks`` is not given, or a value cannot be used.
        EnvironmentFailure: some tasks could not be answered; what was answered stays in ``out``.
    """
    made_with = config
    if prompt is not None:
        single = EnvConfig(name="asyncrl.envs.single_turn:SingleTurnFactory", options={"prompt": prompt})
        config, tasks = config.model_copy(update={"env": single}), 1
    elif data is not None:
        config = with_data(config, data, reward="none")
    elif tasks is None:
        tasks = 4
    sampling = _eval_sampling(config, samples=samples, temperature=temperature)
    answers, _ = _answer(
        config, made_with=made_with, checkpoint=checkpoint, tasks=tasks, samples=samples, sampling=sampling, out=out
    )
    return answers


def with_data(config: Config, data: Sequence[str], *, reward: str | None = None) -> Config:
    """Return ``config`` with rows of files as held-out tasks; ``reward`` counts where it has no rules for rows."""
    options: dict[str, Any] = {"reward": reward} if reward is not None else {}
    if config.env.name in DATASET_NAMES:
        options = {key: value for key, value in config.env.options.items() if key not in DATASET_FILES}
    env = config.env.model_copy(update={"name": DATASET_NAMES[1], "options": {**options, "held_out": list(data)}})
    return config.model_copy(update={"env": env})


DATASET_FILES = ("files", "sources", "held_out", "held_out_share", "order", "demonstrations")


def _eval_sampling(config: Config, *, samples: int, temperature: float | None) -> dict[str, Any]:
    if samples < 1:
        raise ConfigError(f"--samples = {samples}", path="--samples", remedy="1 or more")
    if temperature is None and samples == 1:
        return {}  # greedy
    if temperature is None:
        temperature = config.rollout.temperature
    if samples > 1 and temperature == 0:
        raise ConfigError(
            "--samples: greedy answers to one task are all the same", path="--samples", remedy="give a --temperature"
        )
    return {"temperature": temperature}


def _answer(
    config: Config,
    *,
    made_with: Config,
    checkpoint: Path | str | None,
    tasks: int | None,
    samples: int,
    sampling: Mapping[str, Any],
    out: Path | None,
    rewarded: bool = False,
) -> tuple[list[dict[str, Any]], int]:
    """Return answers to the first held-out tasks (of a data set to all, where ``tasks`` is None), and their version.

    Their rewards are the environment's, or with ``rewarded`` those of ``reward.source``.
    """
    if tasks is not None and tasks < 1:
        raise ConfigError(f"--tasks = {tasks}", path="--tasks", remedy="1 or more")
    names = ["max_new_tokens", "max_seq_len", "stop"]
    if sampling.get("temperature"):
        names += ["top_p", "top_k"]
    weights = _weights_of(checkpoint) if checkpoint is not None else None
    settings = {
        "model": config.model.model_dump(mode="json"),
        "env": config.env.model_dump(mode="json"),
        "rollout": {name: getattr(config.rollout, name) for name in names},
        "sampling": dict(sampling),
        "samples": samples,
        "seed": config.seed,
        "checkpoint": weights,  # of a run that trains on, the newest one changes
    }
    if rewarded:
        settings["reward"] = {"source": config.reward.source, "options": dict(config.reward.options)}
    file = AnswersFile(out, settings=settings, samples=samples) if out is not None else None
    failed: list[FailedTask] = []
    answers: list[dict[str, Any]] = []

    async def main() -> tuple[int, int]:
        async with _serving(config, weights, made_with=made_with, rewarded=rewarded) as serving:
            assembly, renderer, score = serving
            environments = assembly.environments
            rows = environments.held_out_rows if isinstance(environments, FiniteHeldOutTasks) else None
            if tasks is None and rows is None:
                raise ConfigError(
                    "the environment has no last task", path="--tasks", remedy="give a number with --tasks"
                )
            wanted = min(count for count in (tasks, rows) if count is not None)
            done = file.done if file is not None else frozenset()
            progress = make_progress(config.telemetry.progress)
            try:
                progress.stage("answer", wanted)
                progress.advance(len(done & set(range(wanted))))
                answering = answer_tasks(
                    assembly.pool,
                    environments,
                    (number for number in range(wanted) if number not in done),
                    renderer=renderer,
                    samples=samples,
                    seed=config.seed,
                    sampling=sampling,
                    score=score,
                )
                async with aclosing(answering):
                    async for answered in answering:
                        if isinstance(answered, FailedTask):
                            failed.append(answered)
                        else:
                            (file.append if file is not None else answers.extend)(answered)
                        progress.advance()
            finally:
                progress.close()
            return wanted, assembly.pool.weight_version

    try:
        wanted, version = run_with_signals(main())
        if failed:
            first = min(failed, key=lambda each: each.number)
            kept = f"; the others are in {out}: the same command tries only these again" if out is not None else ""
            raise EnvironmentFailure(
                f"{len(failed)} tasks could not be answered, first task {first.number}: {first.failure}{kept}"
            ) from first.failure
        if file is not None:
            answers = file.finish(wanted)
    finally:
        if file is not None:
            file.close()
    answers.sort(key=lambda each: (each["task_number"], each["sample"]))
    return answers, version


@asynccontextmanager
async def _serving(
    config: Config, weights: tuple[str, int] | None, *, made_with: Config, rewarded: bool
) -> AsyncIterator[tuple[Assembly, ChatRenderer, Score | None]]:
    """Serve the configured model, or ``weights``; yield the workers, the renderer and the reward model, if any.

    ``weights`` are a model folder and its version. A model that is made on the spot is made from the tasks of
    ``made_with``, whatever it answers.
    """
    await in_thread(check_start, made_with, loads_model=weights is None, trains=False)
    async with AsyncExitStack() as stack:
        run = stack.enter_context(RunDirectory.create(config.runs, f"{config.name}-eval"))
        assembly = Assembly(config, log_folder=run.logs)
        stack.push_async_callback(assembly.aclose)
        await asyncio.to_thread(import_model_library, config)
        if weights is None:
            weights = await in_thread(model_folder, config, run, make_environments(made_with)), 0
        model, version = weights
        renderer = await asyncio.to_thread(load_renderer, model, **chat_options(config))
        if note := await in_thread(filter_overlong_prompts, config, assembly.environments, model):
            logging.getLogger("asyncrl").warning(note)
        await assembly.start(roles=("rollout", "reward") if rewarded else ("rollout",))
        await assembly.pool.start(model, weight_version=version)
        score: Score | None = None
        if assembly.reward is not None:
            await assembly.reward.start(model)
            score = functools.partial(assembly.reward.score, model_path=model)
        yield assembly, renderer, score


def _weights_of(checkpoint: Path | str) -> tuple[str, int]:
    """Return the model folder meant by a run's folder, a checkpoint's, or a model's own or its URL, and its version.

    A model that is not of a checkpoint is version 0.
    """
    if isinstance(checkpoint, str):
        return checkpoint, 0
    if (checkpoint / "checkpoints").is_dir():
        checkpoint = Checkpoints(checkpoint / "checkpoints", keep=1).latest()
    if is_sealed(checkpoint):
        return str(checkpoint / "model"), read_driver_state(checkpoint).step
    if (checkpoint / "config.json").is_file():
        return str(checkpoint), 0
    raise CheckpointError(f"{checkpoint} is neither a run, nor a checkpoint of one, nor a model folder")


def _in_run(
    config: Config,
    run: RunDirectory,
    work: Callable[[TrainingRun], Coroutine[Any, Any, _T]],
    *,
    checkpoint: Path | None,
    environments: EnvironmentFactory,
) -> _T:
    try:
        return run_with_signals(working(config, run, work, checkpoint=checkpoint, environments=environments))
    finally:
        run.close()


async def working(
    config: Config,
    run: RunDirectory,
    work: Callable[[TrainingRun], Coroutine[Any, Any, _T]],
    *,
    checkpoint: Path | None,
    environments: EnvironmentFactory,
) -> _T:
    """Carry out ``work`` on a run in its folder, with its log and its progress; the folder is closed afterwards."""
    with run:
        if not run.resumed:  # else when the resume is accepted: TrainingRun
            run.write_config(config.to_toml())
        timeline = Timeline()
        progress = make_progress(config.telemetry.progress, waits=timeline.current_waits)
        progress.note(f"run {run.path}")
        try:
            with open_log(run.logs / "driver.log", show=progress.note):
                training = TrainingRun(
                    config, run, progress, timeline=timeline, checkpoint=checkpoint, environments=environments
                )
                return await work(training)
        finally:
            progress.close()
