"""The commands that work on a configuration or on the folder of a run. Each imports what it needs when it is called.

For every command: a function that adds its options to a parser, and one that carries it out and returns its exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.cli.output import FAILED, show, show_json, show_status
from asyncrl.cli.page import page_beside
from asyncrl.errors import ConfigError
from asyncrl.storage import local_model, path_or_url

if TYPE_CHECKING:
    from asyncrl.config import Config
    from asyncrl.config.config import Document
    from asyncrl.simulation.world import Forecast
    from asyncrl.tasks.rerun import Recording, Replayed
    from asyncrl.trainer.report import RunStatus


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def _whole_number(text: str, low: int = 1, high: int = 1_000_000) -> int:
    value = int(text) if text.isdecimal() and len(text) < 20 else -1
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
    return value


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 100.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 100")
    return value


def _add_run_argument(parser: argparse.ArgumentParser, help_text: str = "folder of a run") -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help=help_text)


# -------------------------------------------------------------------------------------------------------- train a model


def add_train_options(parser: argparse.ArgumentParser) -> None:
    help_text = "folder or URL of a run to continue; FILE.toml defaults to its own"
    parser.add_argument("--resume", type=path_or_url, metavar="RUN", help=help_text)
    parser.add_argument("--page", action="store_true", help="show the runs in the browser meanwhile; prints an address")
    add_json_option(parser)


def train_command(namespace: argparse.Namespace, settings: Sequence[str]) -> int:
    file, resume = namespace.file, namespace.resume
    if isinstance(resume, str):
        from asyncrl.config.file import parse_overrides
        from asyncrl.trainer.stored_run import restore

        settings = ["--runs", "runs", *settings]
        resume = restore(resume, Path({each.path: each.text for each in parse_overrides(settings)}["runs",]))
    if file is None and resume is not None:
        file = resume / "config.toml"
    config = _configuration(file, settings)
    if namespace.dry_run:
        return _dry_run(config)
    from asyncrl.tasks.run import train

    with contextlib.ExitStack() as stack:
        if namespace.page:
            folder = resume.resolve().parent if resume is not None else Path(config.runs)
            show_status(f"page: {stack.enter_context(page_beside(folder))}")
        summary = train(config, resume=resume)
    if namespace.json:
        show_json(summary)
    else:
        from asyncrl.telemetry import report_text

        show(report_text(summary))
    return 0


def sft_command(namespace: argparse.Namespace, settings: Sequence[str]) -> int:
    config = _configuration(namespace.file, settings)
    if namespace.dry_run:
        return _dry_run(config)
    from asyncrl.tasks.run import sft

    _show_summary(sft(config), as_json=namespace.json)
    return 0


def train_reward_model_command(namespace: argparse.Namespace, settings: Sequence[str]) -> int:
    from asyncrl.config import RewardTrainingConfig, load_document

    _check_given(namespace.file, settings)
    config = load_document(RewardTrainingConfig, namespace.file, settings)
    if namespace.dry_run:
        from asyncrl.tasks.checks import check_reward_training

        check_reward_training(config)
        return _show_resolved(config)
    from asyncrl.tasks.run import train_reward_model

    _show_summary(train_reward_model(config), as_json=namespace.json)
    return 0


# ----------------------------------------------------------------------------------------------------- answer questions


def _add_answer_options(parser: argparse.ArgumentParser, *, tasks: str) -> None:
    parser.add_argument("--data", action="append", metavar="FILE", help="rows of these files instead")
    parser.add_argument("--tasks", type=_whole_number, metavar="N", help=tasks)
    parser.add_argument("--samples", type=_whole_number, default=1, metavar="K", help="answers to each task (1)")
    parser.add_argument(
        "--temperature", type=_temperature, metavar="T", help="0 is greedy (greedy for one sample, else the file's)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="file for the answers, .jsonl or .parquet; an unfinished one is resumed",
    )
    parser.add_argument("--checkpoint", type=path_or_url, metavar="DIR", help="weights to use; else the model's own")


def add_eval_options(parser: argparse.ArgumentParser) -> None:
    _add_answer_options(parser, tasks="held-out tasks (eval.tasks, or all rows of --data)")
    help_text = "score the answers in a file, without a model; of the configuration only eval.success_reward counts"
    parser.add_argument("--answers", type=Path, metavar="FILE", help=help_text)
    add_json_option(parser)


_NO_RUN = ("--name=answers", "--steps=0", "--model.source=scratch", "--env.name=dataset")
"""Settings that make eval's own a whole configuration, where answers are scored without a file."""


def eval_command(namespace: argparse.Namespace, settings: Sequence[str]) -> int:
    if namespace.answers is not None:
        from asyncrl.config import load_config
        from asyncrl.tasks.generate import read_answers
        from asyncrl.trainer.evaluation import summarise_answers

        config = load_config(namespace.file, settings if namespace.file is not None else [*_NO_RUN, *settings])
        answers = read_answers(namespace.answers)
        _show_scores(summarise_answers(answers, success_reward=config.eval.success_reward), as_json=namespace.json)
        return 0
    config = _configuration(namespace.file, settings)
    _check_data(namespace.data)
    if namespace.dry_run:
        return _dry_run(config, loads_model=namespace.checkpoint is None, trains=False)
    from asyncrl.tasks.run import evaluate

    _show_scores(evaluate(config, **_answer_arguments(namespace)), as_json=namespace.json)
    return 0


def add_generate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", metavar="TEXT", help="answer this instead of tasks of the environment")
    _add_answer_options(parser, tasks="held-out tasks to answer (4, or all rows of --data)")


def generate_command(namespace: argparse.Namespace, settings: Sequence[str]) -> int:
    config = _configuration(namespace.file, settings)
    _check_data(namespace.data)
    if namespace.dry_run:
        return _dry_run(config, loads_model=namespace.checkpoint is None, trains=False)
    from asyncrl.tasks.run import generate

    for answer in generate(config, prompt=namespace.prompt, **_answer_arguments(namespace)):
        if namespace.out is None:
            show_json(answer, indent=None)
    return 0


def _answer_arguments(namespace: argparse.Namespace) -> dict[str, Any]:
    """Any: arguments that ``evaluate`` and ``generate`` share."""
    _check_path(namespace.checkpoint, "--checkpoint")
    return {name: getattr(namespace, name) for name in ("checkpoint", "data", "tasks", "samples", "temperature", "out")}


# ------------------------------------------------------------------------------------------------------ look at a run


SILENT_S = 15.0
"""Time without a status after which the event loop of a live driver is considered blocked."""


def add_why_options(parser: argparse.ArgumentParser) -> None:
    _add_run_argument(parser)
    add_json_option(parser)


def why_command(namespace: argparse.Namespace, settings: Sequence[str]) -> int:
    """Print what a live run waits for, from the status in its folder."""
    from asyncrl.telemetry.run_directory import is_locked
    from asyncrl.trainer.report import read_advice, read_status

    run: Path = namespace.run
    summary, locked = run / "summary.json", is_locked(run)
    try:
        status = read_status(run / "status.json")
    except OSError as error:
        what = f"{run} has no status.json: it is not the folder of a run, or the run has not started anything"
        found = what if isinstance(error, FileNotFoundError) else f"{run / 'status.json'}: {error.strerror}"
        raise ConfigError(found, remedy="give the folder of a run that trains") from None
    if namespace.json:
        show_json(status)
    elif summary.exists() and not locked:
        show("\n".join([f"the run has ended; {summary} has its results", *read_advice(summary)]))
    else:
        show("\n".join([*_liveness(status, locked=locked), *status.sentences()]))
    return 0


def _liveness(status: RunStatus, *, locked: bool) -> list[str]:
    """Return what to say first if the run has failed, or its driver has ended or does not respond."""
    silent_s = time.time() - status.at
    if status.failed:
        return [f"the run failed: {status.failed}", f"its last status, {silent_s:.0f} s ago:"]
    if not locked and not _is_alive(status.pid):  # the process may be of another machine, or of a container
        ended = f"the driver (process {status.pid}) has ended and left no summary.json: it was stopped or killed"
        return [f"{ended}; its last status, {silent_s:.0f} s ago:"]
    if silent_s > SILENT_S:
        return [f"the driver (process {status.pid}) lives, but its event loop has not run for {silent_s:.0f} s:"]
    return []


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # a process of another user
        return True
    return True


def add_plot_options(parser: argparse.ArgumentParser) -> None:
    _add_run_argument(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="picture to write, .png, .svg or .pdf (RUN/plot.png)")


def plot_command(namespace: argparse.Namespace, settings: Sequence[str]) -> int:
    from asyncrl.telemetry.plot import plot_run

    show(str(plot_run(namespace.run, namespace.out or namespace.run / "plot.png")))
    return 0


def add_trajectories_options(parser: argparse.ArgumentParser) -> None:
    _add_run_argument(parser)
    parser.add_argument("--step", type=_whole_number, metavar="N", help="only those for training step N")
    parser.add_argument("--last", type=_whole_number, metavar="K", help="only the last K")


def trajectories_command(namespace: argparse.Namespace, settings: Sequence[str]) -> int:
    from asyncrl.telemetry.report import trajectories_of

    for text in trajectories_of(namespace.run, step=namespace.step, last=namespace.last):
        show(f"{'-' * 80}\n{text}")
    return 0


def add_export_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", type=path_or_url, metavar="RUN", help="folder or URL of a run, or folder of a checkpoint"
    )
    out = parser.add_mutually_exclusive_group(required=True)
    out.add_argument("--out", type=path_or_url, metavar="FOLDER", help="folder or URL to write")
    out.add_argument("--push", metavar="OWNER/NAME", help="repository of the Hugging Face hub; private, if it is new")
    parser.add_argument(
        "--step", type=_whole_number, metavar="N", help="version of the weights (the newest checkpoint)"
    )
    parser.add_argument(
        "--part", choices=("model", "adapter"), default="model", help="with LoRA: merged, or the adapters apart (model)"
    )
    add_json_option(parser)


def export_command(namespace: argparse.Namespace, settings: Sequence[str]) -> int:
    from asyncrl.tasks.export import export

    out = namespace.out if namespace.push is None else f"hf://{namespace.push.removeprefix('hf://')}"
    summary = export(namespace.run, out, step=namespace.step, part=namespace.part)
    _show_summary({name: value for name, value in summary.items() if value is not None}, as_json=namespace.json)
    return 0


# ------------------------------------------------------------------------------------------------------- replay a run


REPLAY_EXAMPLES = """
examples:
  asyncrl replay runs/calculator-20260102-030405                        the same weights, bit for bit, or exit 1
  asyncrl replay RUN --from-step 40 --set algorithm.loss=gspo           another loss, from a checkpoint on
  asyncrl replay RUN --set staleness.policy=correct                     train on the tokens that were too old, too
"""


def add_replay_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = REPLAY_EXAMPLES
    _add_run_argument(parser, "folder of a run that kept its ledger")
    parser.add_argument("--from-step", type=int, default=0, metavar="N", help="start at its checkpoint of step N (0)")
    parser.add_argument("--to-step", type=int, metavar="N", help="last step to train (all that are recorded)")
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="train with another setting of [algorithm], [trainer], [staleness] or max_staleness",
    )
    parser.add_argument("--runs", type=Path, metavar="DIR", help="folder for the replay's own folder (that of RUN)")
    parser.add_argument(
        "--dry-run", action="store_true", help="print what is recorded and what is missing, train nothing"
    )
    add_json_option(parser)


def replay_command(namespace: argparse.Namespace, settings: Sequence[str]) -> int:
    """Replay a run; return 1 if a replay without changes ends in other weights."""
    from asyncrl.tasks.rerun import Recording

    changes: dict[str, str] = {}
    for setting in namespace.settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            remedy = "write --set algorithm.loss=gspo"
            raise ConfigError(f"--set {setting!r} is not a setting", path="--set", remedy=remedy)
        changes[key.replace("-", "_")] = value
    with Recording(namespace.run) as recording:
        if namespace.dry_run:
            return _show_recording(recording, namespace)
        replayed = recording.replay(
            changes,
            from_step=namespace.from_step,
            to_step=namespace.to_step,
            runs=namespace.runs,
            progress="none" if namespace.json else recording.config.telemetry.progress,
        )
    if namespace.json:
        names = ("run", "from_step", "to_step", "forked", "compared", "equal", "first_difference", "weights")
        show_json({name: getattr(replayed, name) for name in names})
    else:
        show(f"{_outcome(replayed)}\nweights {replayed.weights} in {replayed.run}")
    return 0 if replayed.forked or replayed.equal else FAILED


def _show_recording(recording: Recording, namespace: argparse.Namespace) -> int:
    lacks = recording.lacks(namespace.from_step, namespace.to_step)
    if namespace.json:
        names = ("first_step", "last_step", "checkpoints")
        show_json({**{name: getattr(recording, name) for name in names}, "lacks": lacks})
    else:
        checkpoints = ", ".join(map(str, recording.checkpoints)) or "none"
        show(f"steps {recording.first_step + 1}..{recording.last_step} are recorded; checkpoints: {checkpoints}")
        show("\n".join(f"missing: {sentence}" for sentence in lacks) or "nothing is missing")
    return FAILED if lacks else 0


def _outcome(replayed: Replayed) -> str:
    steps = f"steps {replayed.from_step + 1}..{replayed.to_step}"
    if replayed.forked:
        where = "never" if replayed.first_difference is None else f"at step {replayed.first_difference}"
        return f"{steps} with another {', '.join(replayed.forked)}: left the recorded weights {where}"
    if replayed.equal:
        return f"{steps}: the recorded weights, bit for bit, after each of them"
    if replayed.first_difference is not None:
        return f"{steps}: other weights than recorded, from step {replayed.first_difference} on"
    return f"{steps}: only {replayed.compared} of them have recorded weights to compare with"


# --------------------------------------------------------------------------------------------------- simulate and plan


PLANNED_STEPS = 60
"""Steps that are simulated of each candidate: a plan compares, it need not be exact."""


def simulate_command(namespace: argparse.Namespace, settings: Sequence[str]) -> int:
    from asyncrl.simulation.world import forecast, scenario_of

    config = _simulated_configuration(namespace, settings)
    if namespace.dry_run:
        return _show_resolved(config)
    outlook = forecast(scenario_of(config))
    if namespace.json:
        show_json(_forecast_record(outlook))
    else:
        show(_forecast_text(outlook))
    return 0


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--devices",
        type=lambda text: _whole_number(text, 2, 4096),
        metavar="N",
        help="devices to split (as many as the configuration uses)",
    )
    parser.add_argument(
        "--memory-gb",
        type=lambda text: _whole_number(text, 1, 1 << 20),
        metavar="GB",
        help="say what an update needs of memory instead; refuse what needs more on a rank of the trainer",
    )
    add_json_option(parser)


def plan_command(namespace: argparse.Namespace, settings: Sequence[str]) -> int:
    from asyncrl.simulation.world import best_of, scenario_of, search

    config = _simulated_configuration(namespace, settings)
    if namespace.dry_run:
        return _show_resolved(config)
    if namespace.memory_gb is not None:
        return _plan_memory(config, namespace.memory_gb * 10**9, as_json=namespace.json)
    scenario = scenario_of(config)
    ranks = config.trainer.world_size
    devices = namespace.devices or config.rollout.replicas + ranks
    scenario = replace(scenario, steps=min(scenario.steps, PLANNED_STEPS))
    forecasts = search(scenario, devices=devices, trainer_devices=ranks)
    best = best_of(forecasts)
    if namespace.json:
        show_json({"best": _forecast_record(best), "candidates": [_forecast_record(each) for each in forecasts]})
        return 0
    lines = ["replicas  trainer  max_staleness  tokens/s    step  trainer waits  replicas idle  masked  not trained on"]
    for each in forecasts:
        certificate = each.certificate
        lines.append(
            f"{each.scenario.replicas:8d}  {devices - each.scenario.replicas:7d}  {each.scenario.max_staleness:13d}  "
            f"{each.tokens_per_s:8.0f}  {_seconds(each.step_s):>6}  {sum(each.trainer_idle.values()):13.1%}  "
            f"{each.replicas_idle:13.1%}  {certificate.masked_share:6.1%}  {certificate.waste:14.1%}"
            + ("  <-- least stale within 3 % of the fastest" if each is best else "")
        )
    show("\n".join(lines))
    return 0


def _plan_memory(config: Config, most: int, *, as_json: bool) -> int:
    """Print what each rank of the trainer needs; raise ConfigError, with a mesh that fits, if that is too much."""
    from asyncrl.interfaces import MemoryTrainingEngine
    from asyncrl.mesh import MemoryPlan, MeshShape
    from asyncrl.model_folder import check_model
    from asyncrl.plugins import load_part, part_text
    from asyncrl.trainer.assembly import quiet_vendors, trainer_options

    quiet_vendors(config.model)
    trainer, rollout, path = config.trainer, config.rollout, config.model.path
    engine: Any = load_part("asyncrl.training_engines", trainer.engine, path="trainer.engine")
    if not isinstance(engine, MemoryTrainingEngine):
        text = f"the engine {part_text(trainer.engine)} does not plan its memory"
        raise ConfigError(text, path="trainer.engine", remedy="use fsdp, or leave --memory-gb out")
    if path is None:
        remedy = "name a model folder, or one on the hub: nothing but its config.json is read"
        raise ConfigError("a model that is made for the run has no memory to plan", path="model.path", remedy=remedy)
    options = {"device": "cuda" if trainer.num_gpus else "cpu", **trainer_options(config), **trainer.options}
    tokens = rollout.max_seq_len
    rows: dict[str, Any] = {"row_tokens": tokens, "scored": min(1.0, rollout.max_new_tokens / tokens)}

    check_model(path, key="model.path", weights=False)
    folder = local_model(path, weights=False)

    def planned(shape: MeshShape) -> MemoryPlan:
        plan: MemoryPlan = engine.plan_memory(folder, world_size=shape.ranks, mesh=shape, **rows, **options)
        return plan

    plan = planned(trainer.mesh_shape() or MeshShape.of(None, world_size=trainer.world_size))
    if plan.total > most:
        fits = plan.fitting(most, planned, most_ranks=8 * trainer.world_size)
        remedy = "gradient_checkpointing = true, a smaller max_tokens_per_microbatch, or lora need less"
        if fits is not None:
            mesh = ", ".join(f"{name} = {size}" for name, size in asdict(fits.shape).items() if size > 1)
            remedy = f"world_size = {fits.shape.ranks} with mesh = {{{mesh}}} needs {fits.total / 1e9:.1f} GB; {remedy}"
        needs = f"an update needs {plan.total / 1e9:.1f} GB of memory on a rank, {most / 1e9:g} GB are given"
        raise ConfigError(needs, path="trainer.mesh", remedy=remedy)
    sizes = {key: value for key, value in asdict(plan).items() if key != "shape"}
    if as_json:
        show_json({"mesh": asdict(plan.shape), **sizes, "total": plan.total, "host": plan.host})
    else:
        rows_of_table = {**sizes, "together": plan.total, "on the host": plan.host}
        show("\n".join(f"{name:<12}{size / 1e9:10.2f} GB" for name, size in rows_of_table.items()))
    return 0


def _simulated_configuration(namespace: argparse.Namespace, settings: Sequence[str]) -> Config:
    from asyncrl.config import load_config

    # torch warns its own developers of a deprecated call inside torch.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    _check_given(namespace.file, ())
    config = load_config(namespace.file, settings)
    if config.steps < 3:
        raise ConfigError(f"steps = {config.steps}: a simulation needs at least 3", path="steps", remedy="at least 3")
    return config


def _forecast_text(outlook: Forecast) -> str:
    scenario, certificate = outlook.scenario, outlook.certificate
    rows = [
        ("step", _seconds(outlook.step_s)),
        ("tokens trained on", f"{outlook.tokens_per_s:,.0f} a second"),
        *((f"trainer waits for {cause}", f"{share:.1%} of the time") for cause, share in outlook.trainer_idle.items()),
        ("replicas idle", f"{outlook.replicas_idle:.1%} of their speed"),
        ("groups rolling out", f"{outlook.in_flight:.1f} of {scenario.groups_per_step} a step"),
        ("staleness policy", f"{scenario.staleness.name}, bound {scenario.max_staleness}"),
        *(
            (
                f"  {versions} behind",
                f"{tokens / certificate.tokens:6.1%}  {'#' * round(24 * tokens / certificate.tokens)}",
            )
            for versions, tokens in certificate.histogram.items()
        ),
        ("masked", f"{certificate.masked_share:.1%} of the tokens of trained rollouts"),
        ("not trained on", f"{certificate.waste:.1%} of all tokens"),
        ("length, trained / issued", f"{certificate.length_ratio:.3f}"),
        ("simulated", f"{scenario.steps} steps; a model of durations, not of learning"),
    ]
    width = max(len(name) for name, _text in rows)
    return "\n".join(f"{name:<{width}}  {text}".rstrip() for name, text in rows)


def _forecast_record(outlook: Forecast) -> dict[str, Any]:
    scenario, certificate = outlook.scenario, outlook.certificate
    return {
        "replicas": scenario.replicas,
        "max_staleness": scenario.max_staleness,
        "policy": scenario.staleness.name,
        "step_s": outlook.step_s,
        "tokens_per_s": outlook.tokens_per_s,
        "trainer_idle": dict(outlook.trainer_idle),
        "replicas_idle": outlook.replicas_idle,
        "groups_in_flight": outlook.in_flight,
        "staleness": dict(certificate.histogram),
        "masked_share": certificate.masked_share,
        "waste": certificate.waste,
        "length_ratio": certificate.length_ratio,
    }


def _seconds(time_s: float) -> str:
    return f"{time_s:.3g} s"


# ---------------------------------------------------------------------------------------------------- a configuration


def _configuration(file: Path | None, settings: Sequence[str]) -> Config:
    from asyncrl.config import load_config

    _check_given(file, settings)
    return load_config(file, settings)


def _check_given(file: Path | None, settings: Sequence[str]) -> None:
    if file is None and not settings:
        raise ConfigError("no configuration given; write asyncrl COMMAND FILE.toml", remedy="give a FILE.toml")


def _check_data(data: Sequence[str] | None) -> None:
    if data is not None:
        from asyncrl.datasets.source import check_files

        check_files(data, key="--data")


def _check_path(path: Path | str | None, key: str) -> None:
    if not isinstance(path, Path):
        return
    try:
        exists = path.exists()
    except OSError as error:  # a name too long, a folder that may not be entered
        raise ConfigError(f"{key} = {str(path)!r}: {error.strerror}", path=key, remedy="check the path") from error
    if not exists:
        raise ConfigError(f"{key} = {str(path)!r}: no such file or folder", path=key, remedy="check the path")


def _dry_run(config: Config, *, loads_model: bool = True, trains: bool = True) -> int:
    from asyncrl.tasks.checks import check_start

    check_start(config, loads_model=loads_model, trains=trains)
    return _show_resolved(config)


def _show_resolved(config: Document) -> int:
    show(config.to_toml().rstrip("\n"))
    return 0


# ----------------------------------------------------------------------------------------------------------- summaries


def _show_summary(summary: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        show_json(summary)
        return
    from asyncrl.telemetry.progress import format_value

    width = max(map(len, summary), default=0)
    show("\n".join(f"{name:<{width}}  {format_value(name, value)}" for name, value in summary.items()))


def _show_scores(summary: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        show_json(summary)
        return
    plain = {name: value for name, value in summary.items() if not isinstance(value, Mapping)}
    lines = {**plain, **{f"reward/{name}": value for name, value in summary["reward_parts"].items()}}
    tables = {"": summary["scores"], **{f"{source}  ": scores for source, scores in summary["by_data_source"].items()}}
    scores = {prefix + name: str(value) for prefix, table in tables.items() for name, value in table.items()}
    _show_summary({**lines, **scores}, as_json=False)
