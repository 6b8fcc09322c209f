"""``asyncrl config``, ``init``, ``completion``: what can be configured, a file to begin with, words for the shell."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.cli.output import show
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.config.reference import Key

# ----------------------------------------------------------------------------------------------------------- the keys


def add_config_options(parser: argparse.ArgumentParser) -> None:
    about = "part of a key, its name in verl, TRL or prime-rl, or a word of its text"
    parser.add_argument("word", nargs="?", default="", metavar="WORD", help=about)


def config_command(namespace: argparse.Namespace, settings: Sequence[str]) -> int:
    """List the keys of a configuration; those that contain ``word``, or are called so elsewhere, if one is given."""
    from asyncrl.config.reference import keys_named

    word = namespace.word.strip("[]").removeprefix("--").replace("-", "_").lower()
    keys = _keys()
    elsewhere = keys_named(word)
    found = [key for key in keys if word in key.name.lower() or any(_within(name, key) for name in elsewhere)]
    found = found or [key for key in keys if word in key.text.lower()]
    if not found:
        from difflib import get_close_matches

        leaves = {key.name.rpartition(".")[2]: key.name for key in keys}
        near = [leaves[leaf] for leaf in get_close_matches(word, leaves)]
        remedy = f"did you mean {' or '.join(near)}?" if near else "asyncrl config lists all of them"
        raise ConfigError(f"no key has {namespace.word!r} in its name or text; {remedy}", path="WORD", remedy=remedy)
    width = min(shutil.get_terminal_size().columns, 120)
    lines: list[str] = []
    for table, members in groupby(found, key=lambda key: key.table):
        lines += ["", f"[{table}]"] if table else []
        for key in members:
            facts = ", ".join(filter(None, (key.type.replace("`", ""), key.range)))
            lines.append(f"{key.name} = {key.default}   ({facts})")
            lines += textwrap.wrap(key.text, width, initial_indent="    ", subsequent_indent="    ")
            lines += [f"    {word} of another system is {name}" for name in elsewhere if _within(name, key)]
    show("\n".join(lines).strip("\n"))
    return 0


def _within(name: str, key: Key) -> bool:
    """Return whether the key has this name, or is the table of options that it is in."""
    return name == key.name or (key.name.endswith("options") and name.startswith(f"{key.name}."))


def _keys(command: str = "train") -> list[Key]:
    from asyncrl.config import Config, RewardTrainingConfig
    from asyncrl.config.reference import keys_of

    return list(keys_of(RewardTrainingConfig if command == "train-reward-model" else Config))


# ------------------------------------------------------------------------------------------------- a file to begin with

_MODEL = {"model.path": "HuggingFaceTB/SmolLM2-135M-Instruct"}
_ROWS = {"files": "train.jsonl", "held_out_share": 0.1}
_SMALL = {"rollout.max_new_tokens": 256, "rollout.max_seq_len": 1024, "trainer.groups_per_step": 8, "trainer.lr": 1e-6}

TASKS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "data": (
        "Questions from a file, answers judged by a rule.",
        {**_MODEL, "env.name": "dataset", "env.options": {**_ROWS, "reward": "math"}, **_SMALL},
    ),
    "tools": (
        "Questions from a file, with Python functions that the model may call on the way to its answer.",
        {
            **_MODEL,
            "env.name": "dataset",
            "env.options": {**_ROWS, "reward": "rewards.py:score", "tools": ["tools.py:search"]},
            "env.max_turns": 6,
            **_SMALL,
        },
    ),
    "reasoning-gym": (
        "Puzzles that the package reasoning-gym makes and judges.",
        {**_MODEL, "env.name": "reasoning_gym", "env.options": {"dataset": "chain_sum"}, **_SMALL},
    ),
    "environment": (
        "An environment of your own: docs/environments.md.",
        {**_MODEL, "env.name": "my_environment:Factory", "env.max_turns": 8, **_SMALL},
    ),
    "calculator": (
        "A small model, made on the spot, learns to use a calculator: two cores, a few minutes.",
        {
            "model.source": "scratch",
            "model.options": {"hidden_size": 96, "intermediate_size": 256, "rope_theta": 500.0, "max_position": 128},
            "env.name": "calculator",
            "env.max_turns": 4,
            "env.options": {"max_operand": 49},
            "sft.steps": 800,
            "sft.batch_size": 32,
            "sft.lr": 3e-3,
            "rollout.max_new_tokens": 16,
            "rollout.max_seq_len": 64,
            "trainer.groups_per_step": 16,
            "trainer.lr": 3e-4,
            "eval.tasks": 256,
        },
    ),
    "vllm": (
        "One GPU for vLLM and one for the trainer: asyncrl engine install vllm makes the interpreter.",
        {
            "model.path": "Qwen/Qwen2.5-1.5B-Instruct",
            "model.dtype": "bfloat16",
            "env.name": "dataset",
            "env.options": {
                "files": "hub:openai/gsm8k?name=main&split=train",
                "held_out": "hub:openai/gsm8k?name=main&split=test",
                "columns": {"prompt": "question", "ground_truth": "answer"},
                "system": "Think step by step, and end with the result behind ####, as in: #### 42",
                "reward": "gsm8k",
            },
            "rollout.engine": "vllm",
            "rollout.python": ".venv-vllm/bin/python",
            "rollout.num_gpus": 1.0,
            "rollout.max_new_tokens": 512,
            "rollout.max_seq_len": 2048,
            "trainer.num_gpus": 1.0,
            "trainer.groups_per_step": 32,
            "trainer.lr": 1e-6,
            "trainer.gradient_checkpointing": True,
        },
    ),
}
"""What ``asyncrl init`` writes, by task: a sentence, and the keys that are set."""

_TABLES = ("", "model", "env", "sft", "rollout", "trainer", "algorithm", "eval")
"""Tables of which all keys are shown, those that are not set as comments with their defaults."""


def add_init_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", choices=sorted(TASKS), metavar="TASK", help=f"one of {', '.join(sorted(TASKS))}")
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE.toml", help="file to write (TASK.toml)")


def init_command(namespace: argparse.Namespace, settings: Sequence[str]) -> int:
    """Write a commented configuration for a task."""
    path = namespace.file or Path(f"{namespace.task}.toml")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(commented_file(namespace.task, path=path))
    except FileExistsError:
        raise ConfigError(f"{path} exists", path=str(path), remedy="give another name, or remove it") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", path=str(path)) from error
    show(f"{path}\n\nasyncrl train {path} --dry-run    checks it; asyncrl config WORD explains a key")
    return 0


def commented_file(task: str, *, path: Path) -> str:
    """Return the file of a task: what is set, and beside it what could be."""
    from asyncrl.config.toml import value_to_toml

    about, given = TASKS[task]
    values = {"name": task, "steps": 100, **given}
    lines = [f"# {about}", "#", f"#     asyncrl train {path}"]
    for table, members in groupby((key for key in _keys() if key.table in _TABLES), key=lambda key: key.table):
        lines += ["", f"[{table}]"] if table else [""]
        for key in members:
            lines += textwrap.wrap(key.text, 116, initial_indent="# ", subsequent_indent="# ")
            if key.name in values:
                lines.append(f"{key.name.rpartition('.')[2]} = {value_to_toml(values[key.name])}")
            else:
                text = key.default if key.default != "required" else "..."
                plain = text.removeprefix("-").replace(".", "", 1).replace("e-", "").isalnum() and text[0].isdigit()
                quoted = plain or text in ("true", "false", "none", "...") or text[0] in "[{"
                lines.append(f"# {key.name.rpartition('.')[2]} = {text if quoted else value_to_toml(text)}")
    return "\n".join(lines) + "\n"


# -------------------------------------------------------------------------------------------------- words for the shell

_BASH = """_asyncrl() {
  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="%(commands)s"
  else
    case "$before" in
%(values)s
      *) case "${COMP_WORDS[1]}" in
%(options)s
      esac ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _asyncrl asyncrl
"""


def add_completion_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell that reads the script")


def completion_command(namespace: argparse.Namespace, settings: Sequence[str]) -> int:
    """Print a script: ``eval "$(asyncrl completion bash)"``, or ``asyncrl completion fish | source``."""
    from asyncrl.cli.main import all_commands, command_line

    table = all_commands()
    _, parsers = command_line(table)
    words = {
        name: [
            *(word for action in parsers[name].options for word in action.option_strings if word.startswith("--")),
            *(f"--{key.name}" for key in (_keys(name) if command.takes_settings else ())),
        ]
        for name, command in table.items()
    }
    choices = {f"--{key.name}": key.choices for key in _keys() if key.choices}
    shells: Mapping[str, Callable[[], str]] = {
        "bash": lambda: _bash(words, choices),
        "zsh": lambda: "autoload -U compinit bashcompinit && compinit && bashcompinit\n" + _bash(words, choices),
        "fish": lambda: "\n".join(_fish(words, choices, {name: each.summary for name, each in table.items()})) + "\n",
    }
    sys.stdout.write(shells[namespace.shell]())
    return 0


def _bash(words: Mapping[str, Iterable[str]], choices: Mapping[str, Iterable[str]]) -> str:
    return _BASH % {
        "commands": " ".join(words),
        "values": "\n".join(f'      {key}) words="{" ".join(values)}" ;;' for key, values in choices.items()),
        "options": "\n".join(f'        {name}) words="{" ".join(options)}" ;;' for name, options in words.items()),
    }


def _fish(
    words: Mapping[str, Iterable[str]], choices: Mapping[str, Iterable[str]], about: Mapping[str, str]
) -> Iterator[str]:
    for name, options in words.items():
        yield f'complete -c asyncrl -n __fish_use_subcommand -a {name} -d "{about[name]}"'
        for option in options:
            values = f" -x -a '{' '.join(choices[option])}'" if option in choices else ""
            yield f"complete -c asyncrl -n '__fish_seen_subcommand_from {name}' -l {option.removeprefix('--')}{values}"
