"""``asyncrl why``: what a live run waits for, from the status that it keeps in its folder."""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.errors import ConfigError

from .output import show

if TYPE_CHECKING:
    from asyncrl.pipeline.watch import RunStatus

__all__ = ["why_command"]

SILENT_S = 15.0
"""A driver that has not written for so long does not run its event loop."""


def why_command(namespace: argparse.Namespace) -> int:
    """``asyncrl why RUN``."""
    from asyncrl.pipeline.watch import read_status

    run: Path = namespace.run
    try:
        status = read_status(run / "status.json")
    except FileNotFoundError:
        raise ConfigError(
            f"{run} says nothing of itself: it is no run, or has not begun to train",
            remedy="give the folder of a run that trains",
        ) from None
    if namespace.json:
        show(json.dumps(asdict(status), indent=2))
    else:
        show("\n".join([*_state(run, status), *status.sentences()]))
    return 0


def _state(run: Path, status: RunStatus) -> list[str]:
    """Whether the run is alive, if it is not."""
    silent_s = time.time() - status.at
    if (run / "summary.json").exists():
        return ["the run is over; this was its last word:"]
    if not _alive(status.pid):
        return [f"the driver (process {status.pid}) is gone; this was its last word, {silent_s:.0f} s ago:"]
    if silent_s > SILENT_S:
        return [f"the driver (process {status.pid}) lives, but its event loop has not run for {silent_s:.0f} s:"]
    return []


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        return True
    return True
