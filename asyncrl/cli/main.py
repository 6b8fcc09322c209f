"""The command ``asyncrl``: reads the command line, starts a command, turns failures into messages and exit codes."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeAlias

from asyncrl import __version__
from asyncrl.cli import commands
from asyncrl.cli.doctor import doctor_command
from asyncrl.cli.output import BAD_USAGE, INTERRUPTED, TERMINATED, print_failure, quiet_pipe, tolerate_any_encoding
from asyncrl.cli.page import add_page_options, page_command
from asyncrl.cli.pool import add_pool_options, pool_command
from asyncrl.cli.reference import (
    add_completion_options,
    add_config_options,
    add_init_options,
    completion_command,
    config_command,
    init_command,
)
from asyncrl.cli.serving import add_serve_options, serve_command
from asyncrl.plugins import load_part, part_names

Run: TypeAlias = Callable[[argparse.Namespace, Sequence[str]], int]


@dataclass(frozen=True, slots=True)
class Command:
    """One command of ``asyncrl``.

    ``run`` takes the parsed options and the settings, and returns the exit code. With ``takes_settings`` the command
    reads a configuration, whose keys may follow as ``--section.key value``.
    """

    summary: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Run
    takes_settings: bool = False


COMMANDS = {
    "train": Command(
        "train with reinforcement learning", commands.add_train_options, commands.train_command, takes_settings=True
    ),
    "sft": Command(
        "only the supervised warm start", commands.add_json_option, commands.sft_command, takes_settings=True
    ),
    "train-reward-model": Command(
        "train a reward model on comparisons",
        commands.add_json_option,
        commands.train_reward_model_command,
        takes_settings=True,
    ),
    "eval": Command(
        "measure the held-out score: avg@k and pass@k with intervals",
        commands.add_eval_options,
        commands.eval_command,
        takes_settings=True,
    ),
    "generate": Command(
        "generate answers and print them as JSON lines",
        commands.add_generate_options,
        commands.generate_command,
        takes_settings=True,
    ),
    "simulate": Command(
        "simulate a planned run: step time, idle time, staleness, waste",
        commands.add_json_option,
        commands.simulate_command,
        takes_settings=True,
    ),
    "plan": Command(
        "search split and max_staleness for a planned run",
        commands.add_plan_options,
        commands.plan_command,
        takes_settings=True,
    ),
    "replay": Command(
        "train again on what a recorded run was trained on, without rollouts",
        commands.add_replay_options,
        commands.replay_command,
    ),
    "page": Command("show runs in the browser", add_page_options, page_command),
    "why": Command("print what a live run waits for", commands.add_why_options, commands.why_command),
    "plot": Command("draw a run: scores, timeline, staleness, queue", commands.add_plot_options, commands.plot_command),
    "trajectories": Command(
        "print the trajectories that a run recorded", commands.add_trajectories_options, commands.trajectories_command
    ),
    "export": Command(
        "write a run's weights as a plain model folder", commands.add_export_options, commands.export_command
    ),
    "serve": Command("serve a model: OpenAI, Anthropic, tokens, sessions", add_serve_options, serve_command),
    "pool": Command("look at a served pool, or change it", add_pool_options, pool_command),
    "init": Command("write a commented configuration for a task", add_init_options, init_command),
    "config": Command("list the keys of a configuration, or explain some", add_config_options, config_command),
    "completion": Command(
        "print a script that completes commands and keys in a shell", add_completion_options, completion_command
    ),
    "doctor": Command("check what this machine has and what is missing", commands.add_json_option, doctor_command),
}

PART_COMMANDS = "asyncrl.commands"
"""Entry-point group of commands that belong to a part: modules with SUMMARY, add_options(parser) and run(...)."""

SETTINGS_HELP = """
settings of the configuration override the file's, the last one wins:
  --trainer.lr 1e-4   --max-staleness=0   --env.options.digits 3   --rollout.stop '["\\n"]'
what follows -- is a program that solves the tasks of the environment, with the model as its own:
  asyncrl train FILE.toml -- my-agent --task {task}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, by default of the process's arguments; return its exit code (see :mod:`asyncrl.cli.output`)."""
    tolerate_any_encoding()
    words = list(sys.argv[1:] if arguments is None else arguments)
    table = all_commands()
    parser, parsers = command_line(table)
    for word in words:
        if word.encode(errors="replace").decode() != word:
            parser.exit(BAD_USAGE, f"asyncrl: {word!r} is not UTF-8: rename it, or run in its folder\n")
    name = next((word for word in words if not word.startswith("-")), "")
    settings: list[str] = []
    program: list[str] = []
    if name and name not in table:
        near = f"train {name}" if name.endswith(".toml") else next(iter(get_close_matches(name, table, n=1)), "--help")
        parser.exit(BAD_USAGE, f"asyncrl: no command {name!r}; did you mean `asyncrl {near}`?\n")
    if name and table[name].takes_settings:
        at = words.index(name) + 1
        if "--" in words:
            words, program = words[: words.index("--")], words[words.index("--") + 1 :]
        try:
            split = split_arguments(words[at:], parsers[name].options)
        except ValueError as error:
            parser.exit(BAD_USAGE, f"asyncrl {name}: {error}\n")
        words, settings = words[:at] + split.own, split.settings
    elif name:
        known = [option for action in parsers[name].options for option in action.option_strings]
        for option in (word.partition("=")[0] for word in words if word.startswith("--")):
            if option not in known and (found := get_close_matches(option, known, n=1, cutoff=0.75)):
                parser.exit(BAD_USAGE, f"asyncrl {name}: unknown option {option}; did you mean {found[0]}?\n")
    try:
        namespace = parser.parse_args(words)
    except SystemExit:
        with quiet_pipe():
            raise
    if namespace.command is None:
        with quiet_pipe():
            parser.print_help()
        return 0
    if program:
        settings += ["--env.command", json.dumps(program)]
    return run(table[namespace.command].run, namespace, settings)


def run(command: Run, namespace: argparse.Namespace, settings: Sequence[str]) -> int:
    """Run a command; turn failures into messages and exit codes."""
    if os.getcwd() not in sys.path and not sys.flags.safe_path:  # noqa: PTH109  a user's modules lie where one runs
        sys.path.append(os.getcwd())  # noqa: PTH109
    if not sys.stderr.isatty():  # of transformers' bars a log would keep every state, in one line
        os.environ.setdefault("TQDM_DISABLE", "1")
    with_traceback = namespace.traceback or os.environ.get("ASYNCRL_TRACEBACK", "0") not in {"", "0"}
    with sigterm_ends_the_program():
        try:
            return command(namespace, settings)
        except (KeyboardInterrupt, SystemExit) as error:
            what = ["interrupted"] if isinstance(error, KeyboardInterrupt) else []
            for line in (*what, *getattr(error, "__notes__", ())):
                print(line, file=sys.stderr)
            if isinstance(error, SystemExit):
                raise
            return INTERRUPTED
        except Exception as error:  # noqa: BLE001  nothing above catches it: it is printed, with its traceback if a bug
            return print_failure(error, with_traceback=with_traceback)


def all_commands() -> dict[str, Command]:
    """Return the commands of this package and of installed parts, by name."""
    table = dict(COMMANDS)
    for name in part_names(PART_COMMANDS):
        part = load_part(PART_COMMANDS, name)
        table[name] = Command(part.SUMMARY, part.add_options, part.run)
    return table


class CommandParser(argparse.ArgumentParser):
    @property
    def options(self) -> list[argparse.Action]:
        """Actions that have an option string; arguments by position are left out."""
        return [action for action in self._actions if action.option_strings]


def command_line(table: dict[str, Command]) -> tuple[argparse.ArgumentParser, dict[str, CommandParser]]:
    """Return the parser of ``asyncrl`` and those of its commands. Imports nothing that the commands need."""
    parser = argparse.ArgumentParser(
        prog="asyncrl",
        description="Asynchronous streaming reinforcement learning of language models.",
        epilog="exit codes: 0 done, 1 failed, 2 bad configuration or usage, 130 interrupted, 143 terminated",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"asyncrl {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=CommandParser)
    parsers: dict[str, CommandParser] = {}
    for name, command in table.items():
        own = parsers[name] = subparsers.add_parser(
            name,
            help=command.summary,
            description=command.summary[0].upper() + command.summary[1:] + ".",
            epilog=SETTINGS_HELP if command.takes_settings else None,
            usage=f"asyncrl {name} FILE.toml [options] [--setting value ...]" if command.takes_settings else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=False,
        )
        own.add_argument("-h", "--help", action="help", help="show this help")
        own.add_argument("--traceback", action="store_true", help="show the traceback of a failure")
        if command.takes_settings:
            own.add_argument("file", nargs="?", type=Path, metavar="FILE.toml", help="configuration")
            own.add_argument("--dry-run", action="store_true", help="check, print what is resolved, run nothing")
        command.add_options(own)
    return parser, parsers


@dataclass(frozen=True, slots=True)
class SplitArguments:
    """``own`` goes to argparse, ``settings`` to :func:`asyncrl.config.load_config`."""

    own: list[str]
    settings: list[str]


def split_arguments(arguments: Sequence[str], options: Iterable[argparse.Action]) -> SplitArguments:
    """Split what follows the command's name into its own options and settings of the configuration.

    Every ``--name`` that is not one of ``options`` is a setting, with ``=value`` or the word behind it as its value:
    argparse itself would take that word for the file.

    Raises:
        ValueError: a word without a value that looks like a misspelt option.
    """
    takes_value = {name: action.nargs != 0 for action in options for name in action.option_strings}
    own: list[str] = []
    settings: list[str] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        name, equals, _ = word.partition("=")
        if name in takes_value:
            own.append(word)
            if takes_value[name] and not equals and words:
                own.append(words.pop(0))
        elif word.startswith("--") and len(word) > 2:
            has_value = bool(equals) or (bool(words) and not words[0].startswith("--"))
            before_file = not equals and has_value and words[0].endswith(".toml")  # so the word may be a flag
            near = get_close_matches(name, takes_value, n=1, cutoff=0.75)
            if near and "." not in name and (not has_value or before_file or takes_value[near[0]]):
                raise ValueError(f"unknown option {name}; did you mean {near[0]}?")
            settings.append(word)
            if not equals and has_value:
                settings.append(words.pop(0))
        else:
            own.append(word)
    return SplitArguments(own, settings)


@contextmanager
def sigterm_ends_the_program() -> Iterator[None]:
    """Make SIGTERM unwind the program like an exit, so that open resources are closed, with exit code 143."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
