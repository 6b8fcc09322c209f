"""Where metrics go besides the run's own files. Trackers are parts: ``asyncrl.trackers`` lists them by name.

A tracker is made with the folder of the run, its name and its configuration, and then gets :meth:`Tracker.log` calls:

    class MyTracker:
        def __init__(self, folder: Path, *, name: str, config: Mapping[str, Any]) -> None: ...
        def log(self, metrics: Mapping[str, float], *, step: int) -> None: ...
        def close(self) -> None: ...
"""

from __future__ import annotations

import importlib
import logging
import math
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

from asyncrl.errors import ConfigError
from asyncrl.interfaces import Tracker
from asyncrl.parts import install_command, load_part

__all__ = ["TensorBoardTracker", "Trackers", "WandbTracker", "open_trackers"]

logger = logging.getLogger(__name__)

MOST_FAILURES = 3
CLOSE_TIMEOUT_S = 60.0


class Trackers:
    """Several trackers as one, served by a thread: a slow service slows no training step.

    A tracker that raises is logged and counted, and left out after three failures in a row: what a web service does
    must not end a run, and every metric is in ``metrics.jsonl`` anyway.

    Attributes:
        failures: number of failed calls by tracker.
    """

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self.failures: dict[str, int] = dict.fromkeys(trackers, 0)
        self._trackers = dict(trackers)
        self._in_a_row = dict.fromkeys(trackers, 0)
        self._queue: queue.SimpleQueue[tuple[dict[str, float], int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="trackers", daemon=True) if trackers else None
        if self._thread is not None:
            self._thread.start()

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Pass the finite numbers on; returns at once."""
        if self._thread is not None:
            finite = {name: float(value) for name, value in metrics.items() if _is_number(value)}
            self._queue.put((finite, step))

    def close(self) -> None:
        """Deliver what is left, then close every tracker (blocks). Idempotent."""
        if self._thread is None:
            return
        self._queue.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("trackers %s did not finish within %s s", ", ".join(self._trackers), CLOSE_TIMEOUT_S)
        self._thread = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            metrics, step = item
            for name, tracker in list(self._trackers.items()):
                if self._try(name, partial(tracker.log, metrics, step=step)):
                    self._in_a_row[name] = 0
                elif self._in_a_row[name] >= MOST_FAILURES:
                    logger.error("tracker %s failed %d times in a row and is left out from now on", name, MOST_FAILURES)
                    del self._trackers[name]
        for name, tracker in self._trackers.items():
            self._try(name, tracker.close)

    def _try(self, name: str, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception:  # a vendor's or a stranger's code may raise anything: told and counted
            self.failures[name] += 1
            self._in_a_row[name] += 1
            logger.warning("tracker %s failed", name, exc_info=True)
            return False
        return True


def open_trackers(names: Sequence[str], folder: Path, *, name: str, config: Mapping[str, Any]) -> Trackers:
    """Make the trackers ``names``.

    Args:
        names: installed names or ``package.module:Tracker``.
        folder: the run's folder.
        name: the run's name.
        config: nested tables, shown beside the metrics where a tracker can.

    Raises:
        ConfigError: unknown, or its package is missing (with the command that installs it).
    """
    made: dict[str, Tracker] = {}
    for each in names:
        factory = load_part("asyncrl.trackers", each, path="telemetry.trackers")
        made[each] = cast(Tracker, factory(folder, name=name, config=config))
    return Trackers(made)


class TensorBoardTracker:
    """Event files under ``tensorboard/`` of the run's folder, through torch's writer."""

    def __init__(self, folder: Path, *, name: str, config: Mapping[str, Any]) -> None:
        _import("tensorboard", "tensorboard")
        writer = _import("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writer = writer(log_dir=str(folder / "tensorboard"))

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A Weights & Biases run named like ours; its own settings (project, mode, key) come from its environment."""

    def __init__(self, folder: Path, *, name: str, config: Mapping[str, Any]) -> None:
        self._run = _import("wandb", "wandb").init(
            name=folder.name, group=name, dir=str(folder), config=dict(config), resume="allow"
        )

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        remedy = f"install it: {install_command(package)}, or take it out of telemetry.trackers"
        raise ConfigError(
            f"telemetry.trackers: {package} cannot be imported: {error}; {remedy}",
            path="telemetry.trackers",
            remedy=remedy,
        ) from error


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
