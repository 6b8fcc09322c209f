"""What the command line prints, and the exit codes of failures.

    0    it worked
    1    the run failed; the error's name and message are on one screen
    2    the configuration or the command line is wrong
    130  interrupted (Ctrl-C)
    141  the reader of the output closed the pipe
    143  terminated (SIGTERM)

One of asyncrl's own errors is printed without a traceback (``--traceback`` shows it); any other error is a bug and is
printed with its traceback. Results go to standard output; a closed pipe (``| head``) is not an error.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any, TextIO

from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.storage import without_secrets

BROKEN_PIPE = 141
"""Exit code: 128 + SIGPIPE."""


@contextlib.contextmanager
def quiet_pipe() -> Iterator[None]:
    """Flush what is printed inside; a closed pipe ends the program silently.

    Use it only around printing: a broken pipe to a worker is a failure and must be reported.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _discard(sys.stdout)
        raise SystemExit(BROKEN_PIPE) from None


def _discard(stream: TextIO) -> None:
    """Send what is written to a stream nowhere; the interpreter flushes once more at exit, and would fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def show(text: str) -> None:
    with quiet_pipe():
        print(text)


def show_status(line: str) -> None:
    """Print a line of progress on standard error at once; one that cannot be written ends no program."""
    try:
        print(line, file=sys.stderr, flush=True)
    except BrokenPipeError:
        _discard(sys.stderr)
    except (OSError, ValueError):  # a full disk; ValueError: it is closed
        pass


def show_json(value: Any, *, indent: int | None = 2) -> None:
    """Print a result as JSON; dataclasses become objects, numbers that are not finite become null."""
    from asyncrl.telemetry.run_directory import to_json

    show(json.dumps(to_json(value), indent=indent, ensure_ascii=False))


def tolerate_any_encoding() -> None:
    """Make output streams that lack a character print its escape instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


FAILED = 1
BAD_USAGE = 2
INTERRUPTED = 130
TERMINATED = 143

MOST_LINES = 24
MOST_CAUSES = 5
REMOTE_LINES = 8
LONGEST_LINE = 400


def print_failure(error: BaseException, *, with_traceback: bool) -> int:
    """Print ``error`` on standard error and return the exit code it means."""
    leaves = list(_leaves(error))
    if not all(isinstance(leaf, AsyncRLError) for leaf in leaves):
        traceback.print_exception(error)
        print("\nThis is not one of asyncrl's own errors: a bug, here or in one of the parts.", file=sys.stderr)
        return FAILED
    if with_traceback:
        traceback.print_exception(error)
    first = leaves[0]
    for line in _lines(first):
        print(line, file=sys.stderr)
    if len(leaves) > 1:
        print(
            f"  and {len(leaves) - 1} more: {', '.join(type(leaf).__name__ for leaf in leaves[1:6])}", file=sys.stderr
        )
    if isinstance(first, ConfigError):
        return BAD_USAGE
    if not with_traceback:
        print("  (--traceback shows where it was raised)", file=sys.stderr)
    return FAILED


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors in an exception group, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _lines(error: BaseException) -> list[str]:
    name = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
    lines = [_cut(line) for line in f"error: {name}{error}".splitlines()[:MOST_LINES]]
    if isinstance(error, ConfigError):
        if error.path and error.path not in str(error):
            lines.append(f"  at {_cut(error.path)}")
        if error.remedy and error.remedy not in str(error):
            lines.append(f"  {_cut(error.remedy)}")
        return lines
    for key, value in vars(error).items():
        if (
            key in {"remote_traceback", "causes", "origin", "__notes__"}
            or value in ("", -1, None, 0)
            or str(value) in str(error)
        ):
            continue
        lines.append(f"  {key}: {_cut(' '.join(str(value).split()))}")
    remote = str(getattr(error, "remote_traceback", "")).rstrip().splitlines()
    if remote and remote[-1] not in str(error):
        lines.append("  in the worker:")
        lines += [f"    {_cut(line)}" for line in remote[-REMOTE_LINES:]]
    for note in getattr(error, "__notes__", ()):
        first, *others = note.rstrip().splitlines() or [""]
        lines.append(f"  {_cut(first)}")
        lines += [f"    {_cut(line)}" for line in others[-REMOTE_LINES:]]
    cause, depth = error.__cause__, 0
    while cause is not None and depth < MOST_CAUSES and not isinstance(cause, BaseExceptionGroup):
        reason = without_secrets(str(cause).split(chr(10))[0])
        lines.append(f"  caused by {type(cause).__name__}: {_cut(reason)}")
        cause, depth = cause.__cause__, depth + 1
    return lines


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_LINE else text[: LONGEST_LINE - 3] + "..."
