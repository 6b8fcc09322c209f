"""What the commands do, as functions: train, supervise, evaluate, generate.

Each makes its own event loop, takes Ctrl-C and SIGTERM, and leaves no process, port or shared memory behind.

The examples have one ``config``, that of :func:`train`, and a ``folder`` for their files.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.agents.chat import ChatRenderer, load_renderer
from asyncrl.config import Config, EnvConfig, ModelConfig, RewardTrainingConfig, load_config
from asyncrl.errors import CheckpointError, ConfigError, EnvironmentFailure
from asyncrl.interfaces import CountedTasks
from asyncrl.pipeline import reward_training
from asyncrl.pipeline.answers import FailedTask, answer_tasks
from asyncrl.pipeline.answers_file import AnswersFile
from asyncrl.pipeline.assembly import Assembly, chat_options, fit_prompts, import_once, make_environments
from asyncrl.pipeline.checkpoint import Checkpoints, is_checkpoint, read_driver_state
from asyncrl.pipeline.interruption import run_to_end
from asyncrl.pipeline.reference import Score
from asyncrl.pipeline.scores import summarise_answers
from asyncrl.pipeline.training_run import TrainingRun, model_folder
from asyncrl.telemetry.log import open_log
from asyncrl.telemetry.progress import make_progress
from asyncrl.telemetry.run_directory import RunDirectory
from asyncrl.telemetry.timeline import Timeline

__all__ = ["evaluate", "generate", "sft", "train", "train_reward_model"]

_T = TypeVar("_T")


def train(config: Config, *, resume: Path | None = None) -> dict[str, Any]:
    """Train to ``config.steps`` and return the summary, which also stands in ``summary.json``.

        >>> config = Config.from_mapping(
        ...     {
        ...         "name": "small",
        ...         "steps": 1,
        ...         "runs": str(folder / "runs"),
        ...         "cluster": {"backend": "local"},
        ...         "model": {"source": "scratch", "options": {"layers": 1, "tokenizer_conversations": 8}},
        ...         "env": {"name": "asyncrl.testing:EchoFactory"},
        ...         "rollout": {"max_new_tokens": 4, "max_tokens": 64},
        ...         "trainer": {"groups_per_step": 2, "group_size": 2},
        ...         "sft": {"steps": 1},
        ...         "eval": {"tasks": 2},
        ...         "telemetry": {"progress": "none"},
        ...     }
        ... )
        >>> summary = train(config)
        >>> summary["steps"], summary["weight_version"], summary["staleness"]["max"]
        (1, 1, 0)
        >>> (run,) = config.runs.glob("small-*")
        >>> train(config, resume=run)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        asyncrl.errors.CheckpointError: ... has done all its 1 steps; raise them with --steps to go on
        >>> train(config.model_copy(update={"steps": 2}), resume=run)["steps"]
        2

    Args:
        config: the run.
        resume: folder of a run to go on with, from its newest checkpoint; its metrics are continued.

    Raises:
        AsyncRLError: what ended the run, by name.
        CheckpointError: nothing to resume from, or the run is over already: all steps done, and its summary written.
        ConfigError: ``config`` names another model than the run to be resumed, ``resume`` is no run's folder, or a
            part cannot be used as configured.
    """
    if resume is None:
        run, checkpoint = RunDirectory.create(config.runs, config.name), None
    else:
        run = RunDirectory.open(resume)
        checkpoint = Checkpoints(run.checkpoints, keep=config.checkpoint.keep).latest()
        done, summary = read_driver_state(checkpoint).step, run.summary()
        if done >= config.steps and summary is not None and summary["steps"] >= config.steps:
            raise CheckpointError(f"{resume} has done all its {done} steps; raise them with --steps to go on")
        if load_config(run.config_path).model != config.model:
            raise ConfigError(
                f"{resume} goes on with its own weights; [model] must be as it was",
                path="model",
                remedy="begin a new run",
            )
    return _in_run(config, run, lambda training: training.train(), checkpoint=checkpoint)


def sft(config: Config) -> dict[str, Any]:
    """Only the supervised warm start; returns ``{"model": folder, ...}``.

        >>> trained = sft(config)
        >>> trained["steps"], (Path(trained["model"]) / "config.json").is_file()
        (1, True)

    Raises:
        AsyncRLError: what ended the run, by name.
    """
    run = RunDirectory.create(config.runs, config.name)
    return _in_run(config, run, lambda training: training.supervise_only(), checkpoint=None)


def train_reward_model(config: RewardTrainingConfig) -> dict[str, Any]:
    """Learn to score answers from comparisons; returns the summary: ``{"model": folder, "held_out_accuracy": ...}``.

        >>> import json
        >>> asked = {"role": "user", "content": "2+2?"}
        >>> right, wrong = ({"role": "assistant", "content": said} for said in ("4", "a lot"))
        >>> pair = {"prompt": [asked], "chosen": [right], "rejected": [wrong]}
        >>> with (folder / "pairs.jsonl").open("w") as lines:
        ...     for _ in range(10):
        ...         print(json.dumps(pair), file=lines)
        >>> comparing = RewardTrainingConfig.from_mapping(
        ...     {
        ...         "name": "judge",
        ...         "runs": str(folder / "judges"),
        ...         "cluster": {"backend": "local"},
        ...         "batch_size": 4,
        ...         "model": {"path": sft(config)["model"]},
        ...         "preferences": {"files": str(folder / "pairs.jsonl"), "held_out_share": 0.2},
        ...         "telemetry": {"progress": "none"},
        ...     }
        ... )
        >>> learned = train_reward_model(comparing)
        >>> (Path(learned["model"]) / "config.json").is_file(), learned["steps"]  # eight pairs, four a step
        (True, 2)

    Raises:
        AsyncRLError: what ended the run, by name.
    """
    run = RunDirectory.create(config.runs, config.name)
    run.write_config(config.to_toml())
    _quiet_vendors(config.model)
    progress = make_progress(config.telemetry.progress)
    progress.note(f"run {run.path}")
    try:
        with open_log(run.logs / "driver.log"):
            return run_to_end(reward_training.train_reward_model(config, run, progress))
    finally:
        progress.close()
        run.close()


def evaluate(
    config: Config,
    *,
    checkpoint: Path | None = None,
    data: Sequence[str] | None = None,
    tasks: int | None = None,
    samples: int = 1,
    temperature: float | None = None,
    out: Path | None = None,
) -> dict[str, Any]:
    """Score the held-out tasks with the configured model, or with a checkpoint's.

        >>> told = evaluate(config, samples=3)
        >>> told["tasks"], told["samples"], told["weight_version"]
        (2, 3.0, 0)
        >>> sorted(told["scores"])
        ['avg@3', 'pass@1', 'pass@2', 'pass@3', 'reward']
        >>> evaluate(config, samples=3, temperature=0.0)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        asyncrl.errors.ConfigError: --samples: greedy answers to one task are all the same...

    Args:
        config: model, environment and sampling.
        checkpoint: weights of a run, a checkpoint or a model folder.
        data: files of prompts, in place of the environment's held-out tasks (:mod:`asyncrl.datasets`).
        tasks: how many; by default ``eval.tasks``, or all rows of ``data``.
        samples: answers to each task.
        temperature: greedy by default with one sample, else ``rollout.temperature``.
        out: file that the answers go to; an unfinished one is gone on with.

    Returns:
        ``scores`` with intervals (:func:`asyncrl.pipeline.scores.score_tasks`), of each data source too where there are
        several, and what else is worth knowing of the answers.

    Raises:
        CheckpointError: ``checkpoint`` is none of these folders.
        ConfigError: there is no task to score, or a value cannot be used.
        EnvironmentFailure: some tasks could not be judged; what was answered stays in ``out``.
    """
    if tasks is None and data is None and not config.eval.tasks:
        raise ConfigError("eval.tasks = 0: there is nothing to score", path="eval.tasks", remedy="at least 1")
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
    checkpoint: Path | None = None,
    out: Path | None = None,
) -> list[dict[str, Any]]:
    """Answer held-out tasks, the rows of files, or one user ``prompt`` without tools; returns a record per answer.

        >>> (answer,) = generate(config, prompt="hello")
        >>> answer["task"], answer["sampled_tokens"] <= 4
        ({'prompt': 'hello'}, True)
        >>> [(each["task_number"], each["sample"]) for each in generate(config, tasks=2, samples=2)]
        [(0, 0), (0, 1), (1, 0), (1, 1)]

    Arguments are those of :func:`evaluate`; records those of :func:`asyncrl.pipeline.answers.answer_record`.
    Rows of files are judged where the configured environment is a data set with rules; else rewards are 0, and the part
    ``judged`` says so.

    Raises:
        CheckpointError: ``checkpoint`` is none of the folders it can be.
        ConfigError: there is no end of tasks and ``tasks`` does not say how many, or a value cannot be used.
        EnvironmentFailure: some tasks could not be answered; what was answered stays in ``out``.
    """
    made_with = config
    if prompt is not None:
        single = EnvConfig(name="asyncrl.agents.single_turn:SingleTurnFactory", options={"prompt": prompt})
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
    """The same with the rows of files as held-out tasks; ``reward`` where the configuration has no rules for rows."""
    options: dict[str, Any] = {"reward": reward} if reward is not None else {}
    if config.env.name in DATASET_NAMES:
        options = {key: value for key, value in config.env.options.items() if key not in DATASET_FILES}
    env = config.env.model_copy(
        update={"name": DATASET_NAMES[1], "options": {**options, "held_out": list(data)}, "max_turns": 1}
    )
    return config.model_copy(update={"env": env})


DATASET_NAMES = ("dataset", "asyncrl.agents.dataset:DatasetFactory")
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
    checkpoint: Path | None,
    tasks: int | None,
    samples: int,
    sampling: Mapping[str, Any],
    out: Path | None,
    rewarded: bool = False,
) -> tuple[list[dict[str, Any]], int]:
    """Answers to the first held-out tasks (of a data set to all, where ``tasks`` is None), and their version.

    Their rewards are the environment's, or with ``rewarded`` those of ``reward.source``.
    """
    settings = {
        "model": config.model.model_dump(mode="json"),
        "env": config.env.model_dump(mode="json"),
        "rollout": {name: getattr(config.rollout, name) for name in ("max_new_tokens", "max_tokens", "stop")},
        "sampling": dict(sampling),
        "samples": samples,
        "seed": config.seed,
        "checkpoint": str(checkpoint) if checkpoint is not None else None,
    }
    if rewarded:
        settings["reward"] = {"source": config.reward.source, "options": dict(config.reward.options)}
    file = AnswersFile(out, settings=settings, samples=samples) if out is not None else None
    failed: list[FailedTask] = []
    answers: list[dict[str, Any]] = []

    async def main() -> int:
        async with _serving(config, checkpoint, made_with=made_with, rewarded=rewarded) as serving:
            assembly, renderer, score = serving
            environments = assembly.environments
            rows = environments.held_out_rows if isinstance(environments, CountedTasks) else None
            if tasks is None and rows is None:
                raise ConfigError("there is no end of tasks here", path="--tasks", remedy="say how many with --tasks")
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
            return assembly.pool.weight_version

    try:
        version = run_to_end(main())
        if failed:
            first = min(failed, key=lambda each: each.number)
            kept = f"; the others are in {out}: the same command tries only these again" if out is not None else ""
            raise EnvironmentFailure(
                f"{len(failed)} tasks could not be answered, first task {first.number}: {first.failure}{kept}"
            ) from first.failure
        if file is not None:
            answers = file.finish()
    finally:
        if file is not None:
            file.close()
    answers.sort(key=lambda each: (each["task_number"], each["sample"]))
    return answers, version


@asynccontextmanager
async def _serving(
    config: Config, checkpoint: Path | None, *, made_with: Config, rewarded: bool
) -> AsyncIterator[tuple[Assembly, ChatRenderer, Score | None]]:
    """Rollout replicas serving the configured model or a checkpoint's, its renderer, and who rewards answers if asked.

    A model that is made on the spot is made of what ``made_with`` poses, whatever it is asked about.
    """
    run = RunDirectory.create(config.runs, f"{config.name}-eval")
    _quiet_vendors(config.model)
    assembly = Assembly(config, log_folder=run.logs)
    try:
        await asyncio.to_thread(import_once, config)
        if checkpoint is None:
            model = await asyncio.to_thread(model_folder, config, run, make_environments(made_with))
        else:
            model = str(_weights_of(checkpoint))
        renderer = await asyncio.to_thread(load_renderer, model, **chat_options(config))
        if note := await asyncio.to_thread(fit_prompts, config, assembly.environments, model):
            logging.getLogger("asyncrl").warning(note)
        await assembly.start(roles=("rollout", "reward") if rewarded else ("rollout",))
        await assembly.pool.start(model, weight_version=0)
        if rewarded:
            await assembly.reward.start(model)
        yield assembly, renderer, functools.partial(assembly.reward.score, model_path=model) if rewarded else None
    finally:
        await assembly.aclose()
        run.close()


def _weights_of(checkpoint: Path) -> Path:
    """The model folder meant by a run's folder, a checkpoint's, or a model's own."""
    if is_checkpoint(checkpoint):
        return checkpoint / "model"
    if (checkpoint / "checkpoints").is_dir():
        return Checkpoints(checkpoint / "checkpoints", keep=1).latest() / "model"
    if (checkpoint / "config.json").is_file():
        return checkpoint
    raise CheckpointError(f"{checkpoint} is neither a run, nor a checkpoint of one, nor a model folder")


def _in_run(
    config: Config,
    run: RunDirectory,
    work: Callable[[TrainingRun], Coroutine[Any, Any, _T]],
    *,
    checkpoint: Path | None,
) -> _T:
    run.write_config(config.to_toml())
    _quiet_vendors(config.model)
    timeline = Timeline()
    progress = make_progress(config.telemetry.progress, waits=timeline.current_waits)
    progress.note(f"run {run.path}")

    async def main() -> _T:
        training = TrainingRun(config, run, progress, timeline=timeline, checkpoint=checkpoint)
        return await work(training)

    try:
        with open_log(run.logs / "driver.log"):
            return run_to_end(main())
    finally:
        progress.close()
        run.close()


def _quiet_vendors(model: ModelConfig) -> None:
    """Keep what says nothing to a user off the display."""
    if model.path is None or Path(model.path).is_dir():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # nothing is downloaded
    # torch tells its own developers of a deprecated call inside torch.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
