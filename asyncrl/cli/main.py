"""The command ``asyncrl``: reads the command line, starts a command, turns failures into messages and exit codes."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from asyncrl import __version__

from .arguments import split_arguments
from .engine import add_engine_options, engine_command
from .failure import BAD_USAGE, INTERRUPTED, TERMINATED, tell_failure
from .output import quiet_pipe, tolerate_any_encoding
from .pool import add_pool_options, pool_command
from .replay import add_replay_options, replay_command
from .serving import add_serve_options, serve_command
from .simulation import add_plan_options

__all__ = ["main"]

SETTINGS_HELP = """
settings of the configuration override the file's, the last one wins:
  --trainer.lr 1e-4   --max-staleness=0   --env.options.digits 3   --rollout.stop '["\\n"]'
"""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The parser, and for each command that takes settings its own options."""

    parser: argparse.ArgumentParser
    options: dict[str, list[argparse.Action]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (see :mod:`asyncrl.cli.failure`).

    Args:
        arguments: the words behind the program's name; those of the process by default.
    """
    tolerate_any_encoding()
    words = list(sys.argv[1:] if arguments is None else arguments)
    line = command_line()
    settings: list[str] = []
    command = next((word for word in words if not word.startswith("-")), "")
    if command in line.options:
        at = words.index(command) + 1
        try:
            split = split_arguments(words[at:], line.options[command])
        except ValueError as error:
            line.parser.exit(BAD_USAGE, f"asyncrl {command}: {error}\n")
        words, settings = words[:at] + split.own, split.settings
    try:
        namespace = line.parser.parse_args(words)
    except SystemExit:
        with quiet_pipe():
            raise
    if namespace.command is None:
        with quiet_pipe():
            line.parser.print_help()
        return 0
    return run(namespace, settings)


def run(namespace: argparse.Namespace, settings: Sequence[str]) -> int:
    """Start the command and see it end."""
    with_traceback = namespace.traceback or os.environ.get("ASYNCRL_TRACEBACK", "0") not in {"", "0"}
    with sigterm_ends_the_program():
        try:
            if namespace.command == "doctor":
                from .doctor import doctor

                return doctor(as_json=namespace.json)
            if namespace.command == "engine":
                return engine_command(namespace, settings)
            if namespace.command == "serve":
                return serve_command(namespace, settings)
            if namespace.command == "pool":
                return pool_command(namespace, settings)
            if namespace.command in {"simulate", "plan"}:
                from . import simulation

                planned = simulation.plan_command if namespace.command == "plan" else simulation.simulate_command
                return planned(namespace, settings)
            if namespace.command == "replay":
                return replay_command(namespace)
            if namespace.command == "why":
                from .why import why_command

                return why_command(namespace)
            from . import commands

            command = getattr(commands, f"{namespace.command.replace('-', '_')}_command")
            return int(command(namespace, settings))
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return INTERRUPTED
        except Exception as error:  # noqa: BLE001  the last one to see it: told, with its traceback if it is a bug
            return tell_failure(error, with_traceback=with_traceback)


def command_line() -> CommandLine:
    """Everything ``asyncrl --help`` knows. Imports nothing that the commands need."""
    parser = argparse.ArgumentParser(
        prog="asyncrl",
        description="Asynchronous streaming reinforcement learning of language models.",
        epilog="exit codes: 0 done, 1 failed, 2 bad configuration or usage, 130 interrupted, 143 terminated",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"asyncrl {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    options: dict[str, list[argparse.Action]] = {}

    def add(name: str, summary: str, *, settings: bool) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=SETTINGS_HELP if settings else None,
            usage=f"asyncrl {name} FILE.toml [options] [--setting value ...]" if settings else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=False,
        )
        own = [
            command.add_argument("-h", "--help", action="help", help="show this help"),
            command.add_argument("--traceback", action="store_true", help="show the traceback of a failure"),
        ]
        if settings:
            command.add_argument("file", nargs="?", type=Path, metavar="FILE.toml", help="configuration")
            own.append(
                command.add_argument(
                    "--dry-run", action="store_true", help="check, print what is resolved, run nothing"
                )
            )
            options[name] = own
        return command

    train = add("train", "train with reinforcement learning", settings=True)
    options["train"] += [
        train.add_argument(
            "--resume", type=Path, metavar="RUN", help="go on with a run; FILE.toml defaults to its own"
        ),
        train.add_argument("--json", action="store_true", help="print the summary as JSON"),
    ]
    sft = add("sft", "only the supervised warm start", settings=True)
    options["sft"] += [sft.add_argument("--json", action="store_true", help="print the summary as JSON")]

    compare = add("train-reward-model", "train a reward model on comparisons", settings=True)
    options["train-reward-model"] += [
        compare.add_argument("--json", action="store_true", help="print the summary as JSON")
    ]

    evaluate = add("eval", "measure the held-out score: avg@k and pass@k with intervals", settings=True)
    options["eval"] += [
        *add_answer_options(evaluate, tasks="held-out tasks (eval.tasks, or all rows of --data)"),
        evaluate.add_argument(
            "--answers", type=Path, metavar="FILE", help="score the answers in a file, without a model"
        ),
        evaluate.add_argument(
            "--checkpoint", type=Path, metavar="DIR", help="weights to measure; else the model's own"
        ),
        evaluate.add_argument("--json", action="store_true", help="print the summary as JSON"),
    ]
    generate = add("generate", "generate answers and print them as JSON lines", settings=True)
    options["generate"] += [
        generate.add_argument("--prompt", metavar="TEXT", help="answer this instead of tasks of the environment"),
        *add_answer_options(generate, tasks="held-out tasks to answer (4, or all rows of --data)"),
        generate.add_argument("--checkpoint", type=Path, metavar="DIR", help="weights to use; else the model's own"),
    ]
    simulate = add("simulate", "simulate a planned run: step time, idle time, staleness, waste", settings=True)
    options["simulate"] += [simulate.add_argument("--json", action="store_true", help="print the forecast as JSON")]
    plan = add("plan", "search split and max_staleness for a planned run", settings=True)
    options["plan"] += add_plan_options(plan)

    replay = add("replay", "train again on what a recorded run was trained on, without rollouts", settings=False)
    add_replay_options(replay)

    why = add("why", "say what a live run waits for", settings=False)
    why.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    why.add_argument("--json", action="store_true", help="print the status as JSON")

    plot = add("plot", "draw a run: scores, timeline, staleness, queue", settings=False)
    plot.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    plot.add_argument("--out", type=Path, metavar="FILE", help="picture to write, .png, .svg or .pdf (RUN/plot.png)")

    shown = add("trajectories", "print the trajectories that a run wrote down", settings=False)
    shown.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    shown.add_argument("--step", type=_count, metavar="N", help="only those for training step N")
    shown.add_argument("--last", type=_count, metavar="K", help="only the last K")

    exported = add("export", "write a run's weights as a plain model folder", settings=False)
    exported.add_argument("run", type=Path, metavar="RUN", help="folder of a run, or of one of its checkpoints")
    exported.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="folder to write")
    exported.add_argument("--step", type=_count, metavar="N", help="version of the weights (the newest checkpoint)")
    exported.add_argument(
        "--part", choices=("model", "adapter"), default="model", help="with LoRA: merged, or the adapters apart (model)"
    )
    exported.add_argument("--json", action="store_true", help="print the summary as JSON")

    add_serve_options(add("serve", "serve a model: OpenAI, Anthropic, tokens, sessions", settings=False))
    add_pool_options(add("pool", "look at a served pool, or change it", settings=False))
    add_engine_options(add("engine", "make or check the environment of vLLM or SGLang", settings=False))

    doctor = add("doctor", "check what this machine has and what is missing", settings=False)
    doctor.add_argument("--json", action="store_true", help="print the checks as JSON")
    return CommandLine(parser, options)


def add_answer_options(command: argparse.ArgumentParser, *, tasks: str) -> list[argparse.Action]:
    """What ``eval`` and ``generate`` share."""
    return [
        command.add_argument("--data", action="append", metavar="FILE", help="rows of these files instead"),
        command.add_argument("--tasks", type=_count, metavar="N", help=tasks),
        command.add_argument("--samples", type=_count, default=1, metavar="K", help="answers to each task (1)"),
        command.add_argument(
            "--temperature", type=_temperature, metavar="T", help="0 is greedy (greedy for one sample, else the file's)"
        ),
        command.add_argument(
            "--out",
            type=Path,
            metavar="FILE",
            help="file for the answers, .jsonl or .parquet; one that was begun is gone on with",
        ),
    ]


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 100.0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 100")
    return value


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to 1000000")
    return value


@contextmanager
def sigterm_ends_the_program() -> Iterator[None]:
    """SIGTERM unwinds the program like an exit, so that what is open gets closed, and gives exit code 143."""
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
