"""What the commands do, as functions: train, supervise, evaluate, generate.

Each makes its own event loop, takes Ctrl-C and SIGTERM, and leaves no process, port or shared memory behind.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.config import Config, EnvConfig, load_config
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.pipeline.assembly import Assembly, import_once
from asyncrl.pipeline.checkpoint import Checkpoints, is_checkpoint, read_driver_state
from asyncrl.pipeline.evaluation import evaluate as evaluate_pool
from asyncrl.pipeline.interruption import run_to_end
from asyncrl.pipeline.training_run import TrainingRun, model_folder
from asyncrl.rollout.prompts import derive_seed, prompt_rows
from asyncrl.telemetry.log import open_log
from asyncrl.telemetry.progress import make_progress
from asyncrl.telemetry.run_directory import RunDirectory
from asyncrl.telemetry.timeline import Timeline

__all__ = ["evaluate", "generate", "sft", "train"]

_T = TypeVar("_T")


def train(config: Config, *, resume: Path | None = None) -> dict[str, Any]:
    """Train to ``config.steps`` and return the summary, which also stands in ``summary.json``.

    Args:
        config: the run.
        resume: folder of a run to go on with, from its newest checkpoint; its metrics are continued.

    Raises:
        AsyncRLError: what ended the run, by name.
        CheckpointError: nothing to resume from, or the run is over already: all steps done, and its summary written.
        ConfigError: ``config`` names another model than the run to be resumed.
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
    """Only the supervised warm start; returns ``{"model": folder, ...}``."""
    run = RunDirectory.create(config.runs, config.name)
    return _in_run(config, run, lambda training: training.supervise_only(), checkpoint=None)


def evaluate(config: Config, *, checkpoint: Path | None = None) -> dict[str, Any]:
    """Score the held-out tasks greedily with the configured model, or with a checkpoint's.

    Returns the fields of :class:`asyncrl.pipeline.evaluation.EvaluationResult`.

    Raises:
        ConfigError: there is no task to score.
    """
    if not config.eval.tasks:
        raise ConfigError("eval.tasks = 0: there is nothing to score", path="eval.tasks", remedy="at least 1")

    async def main() -> dict[str, Any]:
        async with _serving(config, checkpoint) as assembly:
            result = await evaluate_pool(
                assembly.pool,
                assembly.environments,
                tasks=config.eval.tasks,
                seed=config.seed,
                success_reward=config.eval.success_reward,
            )
            return asdict(result)

    return run_to_end(main())


def generate(
    config: Config,
    *,
    prompt: str | None = None,
    tasks: int = 1,
    checkpoint: Path | None = None,
    out: Path | None = None,
) -> list[dict[str, Any]]:
    """Roll out and show whole conversations: of ``tasks`` held-out tasks, or of one user ``prompt`` without tools.

    Returns one record per conversation (``task``, ``text``, ``reward``, ...), also written to ``out`` as JSON lines.

    Raises:
        ConfigError: ``out`` lies in no folder.
    """
    if out is not None and not out.absolute().parent.is_dir():
        raise ConfigError(f"--out = {str(out)!r}: its folder does not exist", path="--out", remedy="make the folder")
    if prompt is not None:
        single = EnvConfig(name="asyncrl.agents.single_turn:SingleTurnFactory", options={"prompt": prompt})
        config, tasks = config.model_copy(update={"env": single}), 1

    async def main() -> list[dict[str, Any]]:
        async with _serving(config, checkpoint) as assembly:
            return list(await asyncio.gather(*(_show(assembly, number) for number in range(tasks))))

    records = run_to_end(main())
    if out is not None:
        out.write_text("".join(json.dumps(record, default=str) + "\n" for record in records), encoding="utf-8")
    return records


async def _show(assembly: Assembly, number: int) -> dict[str, Any]:
    task = assembly.environments.task(number, split="held_out")
    seed = derive_seed(assembly.config.seed, "eval", number)
    rows = prompt_rows([task], slot=number, seeds=[seed], purpose="eval", sample=True)
    header = await (await assembly.pool.rollout(rows)).header()
    record: dict[str, Any] = header.meta_info["sample"]
    return record


@asynccontextmanager
async def _serving(config: Config, checkpoint: Path | None) -> AsyncIterator[Assembly]:
    """Rollout replicas alone, serving the configured model or a checkpoint's."""
    run = RunDirectory.create(config.runs, f"{config.name}-eval")
    _quiet_vendors(config)
    assembly = Assembly(config, log_folder=run.logs)
    try:
        await asyncio.to_thread(import_once, config)
        if checkpoint is None:
            model = await asyncio.to_thread(model_folder, config, run, assembly.environments)
        else:
            model = str(_weights_of(checkpoint))
        await assembly.start(roles=("rollout",))
        await assembly.pool.start(model, weight_version=0)
        yield assembly
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
    _quiet_vendors(config)
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


def _quiet_vendors(config: Config) -> None:
    """Keep what says nothing to a user off the display."""
    if config.model.path is None or Path(config.model.path).is_dir():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # nothing is downloaded
    # torch tells its own developers of a deprecated call inside torch.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
