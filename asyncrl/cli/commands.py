"""The commands that need a configuration, and ``plot``. Each imports what it needs when it is called."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.errors import ConfigError

from .output import quiet_pipe, show

if TYPE_CHECKING:
    from asyncrl.config import Config
    from asyncrl.config.document import Document

__all__ = [
    "check_outside",
    "eval_command",
    "export_command",
    "generate_command",
    "plot_command",
    "sft_command",
    "train_command",
    "train_reward_model_command",
    "trajectories_command",
]


def train_command(namespace: argparse.Namespace, settings: Sequence[str]) -> int:
    """``asyncrl train``."""
    file = namespace.file
    if file is None and namespace.resume is not None:
        file = namespace.resume / "config.toml"
    config = _configuration(file, settings)
    if namespace.dry_run:
        return _dry_run(config)
    from asyncrl.pipeline.run import train

    summary = train(config, resume=namespace.resume)
    if namespace.json:
        _show_json(summary)
    else:
        from asyncrl.telemetry import print_report

        with quiet_pipe():
            print_report(summary)
    return 0


def sft_command(namespace: argparse.Namespace, settings: Sequence[str]) -> int:
    """``asyncrl sft``."""
    config = _configuration(namespace.file, settings)
    if namespace.dry_run:
        return _dry_run(config)
    from asyncrl.pipeline.run import sft

    summary = sft(config)
    _show_summary(summary, as_json=namespace.json)
    return 0


def train_reward_model_command(namespace: argparse.Namespace, settings: Sequence[str]) -> int:
    """``asyncrl train-reward-model``."""
    from asyncrl.config import RewardTrainingConfig, load_document
    from asyncrl.datasets.source import check_files
    from asyncrl.parts import check_part

    if namespace.file is None and not settings:
        raise ConfigError("no configuration given; write asyncrl COMMAND FILE.toml", remedy="give a FILE.toml")
    config = load_document(RewardTrainingConfig, namespace.file, settings)
    check_part("asyncrl.value_engines", config.trainer.engine, path="trainer.engine")
    if config.model.source is not None:
        check_part("asyncrl.model_sources", config.model.source, path="model.source")
    for name in config.telemetry.trackers:
        check_part("asyncrl.trackers", name, path="telemetry.trackers")
    check_files(config.preferences.files, key="preferences.files")
    _check_model_path(config.model.path)
    if namespace.dry_run:
        return _dry_run(config)
    from asyncrl.pipeline.run import train_reward_model

    _show_summary(train_reward_model(config), as_json=namespace.json)
    return 0


def eval_command(namespace: argparse.Namespace, settings: Sequence[str]) -> int:
    """``asyncrl eval``."""
    if namespace.answers is not None:
        from asyncrl.pipeline.answers_file import read_answers
        from asyncrl.pipeline.scores import summarise_answers

        _show_scores(summarise_answers(read_answers(namespace.answers)), as_json=namespace.json)
        return 0
    config = _configuration(namespace.file, settings)
    _check_data(namespace.data)
    if namespace.dry_run:
        return _dry_run(config)
    from asyncrl.pipeline.run import evaluate

    summary = evaluate(
        config,
        checkpoint=_existing(namespace.checkpoint, "--checkpoint"),
        data=namespace.data,
        tasks=namespace.tasks,
        samples=namespace.samples,
        temperature=namespace.temperature,
        out=namespace.out,
    )
    _show_scores(summary, as_json=namespace.json)
    return 0


def generate_command(namespace: argparse.Namespace, settings: Sequence[str]) -> int:
    """``asyncrl generate``."""
    config = _configuration(namespace.file, settings)
    _check_data(namespace.data)
    if namespace.dry_run:
        return _dry_run(config)
    from asyncrl.pipeline.run import generate

    answers = generate(
        config,
        prompt=namespace.prompt,
        data=namespace.data,
        tasks=namespace.tasks,
        samples=namespace.samples,
        temperature=namespace.temperature,
        checkpoint=_existing(namespace.checkpoint, "--checkpoint"),
        out=namespace.out,
    )
    for answer in answers:
        if namespace.out is None:
            show(_json(answer))
    return 0


def export_command(namespace: argparse.Namespace, settings: Sequence[str]) -> int:
    """``asyncrl export``."""
    del settings
    from asyncrl.pipeline.export import export

    summary = export(namespace.run, namespace.out, step=namespace.step, part=namespace.part)
    _show_summary({name: value for name, value in summary.items() if value is not None}, as_json=namespace.json)
    return 0


def trajectories_command(namespace: argparse.Namespace, settings: Sequence[str]) -> int:
    """``asyncrl trajectories``."""
    del settings
    from asyncrl.telemetry.trajectory_text import trajectories_of

    for text in trajectories_of(namespace.run, step=namespace.step, last=namespace.last):
        show(f"{'-' * 80}\n{text}")
    return 0


def plot_command(namespace: argparse.Namespace, settings: Sequence[str]) -> int:
    """``asyncrl plot``."""
    from asyncrl.telemetry.plot import plot_run

    show(str(plot_run(namespace.run, namespace.out or namespace.run / "plot.png")))
    return 0


def check_outside(config: Config) -> None:
    """Check what a configuration names outside of itself: parts that are installed, files that are there.

    Raises:
        ConfigError: the first that is missing.
    """
    from asyncrl.config import check_algorithm
    from asyncrl.parts import check_part

    wanted = [
        ("asyncrl.environments", config.env.name, "env.name"),
        ("asyncrl.rollout_engines", config.rollout.engine, "rollout.engine"),
        ("asyncrl.training_engines", config.trainer.engine, "trainer.engine"),
        ("asyncrl.value_engines", config.critic.engine, "critic.engine"),
        ("asyncrl.weight_transports", config.weights.transport, "weights.transport"),
        ("asyncrl.replay_buffers", config.buffer.kind, "buffer.kind"),
    ]
    if config.reward.source != "environment":
        wanted.append(("asyncrl.reward_models", config.reward.source, "reward.source"))
    if config.model.source is not None:
        wanted.append(("asyncrl.model_sources", config.model.source, "model.source"))
    wanted += [("asyncrl.trackers", name, "telemetry.trackers") for name in config.telemetry.trackers]
    for group, name, path in wanted:
        check_part(group, name, path=path)
    check_algorithm(config)
    if config.rollout.python is not None:
        _existing(config.rollout.python, "rollout.python")
    if config.sft.data is not None:
        from asyncrl.datasets.source import check_files

        check_files(config.sft.data, key="sft.data")
    _check_model_path(config.model.path)
    if config.critic.path is not None:
        _check_model_path(config.critic.path, "critic.path")


def _configuration(file: Path | None, settings: Sequence[str]) -> Config:
    from asyncrl.config import load_config

    if file is None and not settings:
        raise ConfigError("no configuration given; write asyncrl COMMAND FILE.toml", remedy="give a FILE.toml")
    config = load_config(file, settings)
    check_outside(config)
    return config


def _check_model_path(model: str | None, name: str = "model.path") -> None:
    if model is not None and model.startswith(("/", "./", "../", "~")):  # else it may be a name on the hub
        _existing(Path(model).expanduser(), name)


def _dry_run(config: Document) -> int:
    show(config.to_toml().rstrip("\n"))
    return 0


def _existing(path: Path | None, name: str) -> Path | None:
    if path is None:
        return None
    try:
        exists = path.exists()
    except OSError as error:  # a name too long, a folder that may not be entered
        raise ConfigError(f"{name} = {str(path)!r}: {error.strerror}", path=name, remedy="check the path") from error
    if not exists:
        raise ConfigError(f"{name} = {str(path)!r}: no such file or folder", path=name, remedy="check the path")
    return path


def _show_summary(summary: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        _show_json(summary)
        return
    from asyncrl.telemetry.progress import format_value

    width = max(map(len, summary), default=0)
    show("\n".join(f"{name:<{width}}  {format_value(name, value)}" for name, value in summary.items()))


def _show_scores(summary: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        _show_json(summary)
        return
    plain = {name: value for name, value in summary.items() if not isinstance(value, Mapping)}
    lines = {**plain, **{f"reward/{name}": value for name, value in summary["reward_parts"].items()}}
    tables = {"": summary["scores"], **{f"{source}  ": scores for source, scores in summary["by_data_source"].items()}}
    scores = {prefix + name: str(value) for prefix, table in tables.items() for name, value in table.items()}
    _show_summary({**lines, **scores}, as_json=False)


def _check_data(data: Sequence[str] | None) -> None:
    if data is not None:
        from asyncrl.datasets.source import check_files

        check_files(data, key="--data")


def _show_json(summary: Mapping[str, Any]) -> None:
    show(_json(summary, indent=2))


def _json(record: Mapping[str, Any], *, indent: int | None = None) -> str:
    from asyncrl.telemetry.json_form import to_json

    return json.dumps(to_json(record), indent=indent, ensure_ascii=False)
