"""Errors of foreign code (environments, tools, reward functions, modules of a user): where in that code they come from.

A frame is the user's if its file is not asyncrl's own and no installed package's.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.errors import EnvironmentFailure

MOST_CAUSES = 100
_LONGEST_EXAMPLE = 4000
_ROOT = Path(__file__).resolve().parents[1]
_NOT_THE_USERS = (
    *(f"{_ROOT / package}/" for package in ("asyncrl", "engines", "buffers")),
    *(
        f"{path}/"
        for name, path in sysconfig.get_paths().items()
        if name in ("stdlib", "platstdlib", "purelib", "platlib")
    ),
    "<frozen",
)


class Failures(dict[str, dict[str, Any]]):
    """Failures by cause (:func:`cause_of`): ``{"count": 3, "example": "Traceback ..."}``, the example of the first."""

    def add(self, error: BaseException) -> None:
        self.merge({cause_of(error): {"count": 1, "example": example_of(error)}})

    def merge(self, others: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Add counts, and return the causes that are new; past :data:`MOST_CAUSES` they are counted as one."""
        new: list[str] = []
        for cause, found in others.items():
            name = cause if cause in self or len(self) < MOST_CAUSES else "other causes"
            if name not in self:
                self[name] = {"count": 0, "example": found["example"]}
                new.append(name)
            self[name]["count"] += found["count"]
        return new


def cause_of(error: BaseException) -> str:
    """Return ``KeyError in my_env.py:12 step``, which is the same for every failure of one cause.

    An EnvironmentFailure is named by what it was raised from; the place is the last one in the user's code.
    """
    return type(_origin(error)[0]).__name__ + place_of(error)


def place_of(error: BaseException) -> str:
    """Return `` in my_env.py:12 step``, the last place in the user's code, or an empty text."""
    frames = _origin(error)[1]
    return f" in {frames[-1].filename}:{frames[-1].lineno} {frames[-1].name}" if frames else ""


def example_of(error: BaseException) -> str:
    """Return the traceback of the user's frames."""
    error, frames = _origin(error)
    lines = ["Traceback (frames of asyncrl and of packages are left out):\n", *traceback.format_list(frames)]
    return "".join([*lines, *traceback.format_exception_only(error)])[-_LONGEST_EXAMPLE:].rstrip()


def _origin(error: BaseException) -> tuple[BaseException, list[traceback.FrameSummary]]:
    while type(error) is EnvironmentFailure and error.__cause__ is not None:
        error = error.__cause__
    each: BaseException | None = error
    while each is not None:
        frames = traceback.extract_tb(each.__traceback__)
        if users := [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]:
            return error, users
        each = each.__cause__
    return error, list(traceback.extract_tb(error.__traceback__))[-1:]
