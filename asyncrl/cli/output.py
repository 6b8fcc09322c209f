"""Results go to standard output; a reader that has gone away (``| head``) is no error."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator

__all__ = ["BROKEN_PIPE", "quiet_pipe", "show", "tolerate_any_encoding"]

BROKEN_PIPE = 141
"""Exit code of a program whose reader closed the pipe: 128 + SIGPIPE."""


@contextlib.contextmanager
def quiet_pipe() -> Iterator[None]:
    """Whatever is printed inside is flushed at the end; a closed pipe ends the program silently.

    Only around printing: a broken pipe to a worker is a failure and must be told.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more at exit; give it something to write to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(BROKEN_PIPE) from None


def show(text: str) -> None:
    """Print a result."""
    with quiet_pipe():
        print(text)


def tolerate_any_encoding() -> None:
    """Make a terminal that lacks a character show its escape instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
