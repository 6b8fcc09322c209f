"""Metrics for trackio, which keeps them on this machine."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

__all__ = ["TrackioTracker"]


class TrackioTracker:
    """A run of the project that our run is named after: ``trackio show --project NAME``.

    A resumed run goes on with its own. Where it keeps its files, and whether it sends them anywhere, is of its
    environment (``TRACKIO_DIR``, ``TRACKIO_SPACE_ID``, ``TRACKIO_SERVER_URL``).
    """

    package = "trackio"

    def __init__(self, folder: Path, *, name: str, config: Mapping[str, Any]) -> None:
        with redirect_stdout(sys.stderr):  # it greets on standard output, where only results belong
            self._trackio: Any = importlib.import_module("trackio")
            self._run: Any = self._trackio.init(
                project=name, name=folder.name, config=dict(config), resume="allow", embed=False
            )

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_text(self, name: str, text: str, *, step: int) -> None:
        self._run.log({name: self._trackio.Markdown(f"```\n{text}\n```")}, step=step)

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            self._run.finish()
