"""Trackers: where metrics go besides the run's own files. Entry points of ``asyncrl.trackers`` name them.

A tracker is made with the folder of the run, its name and its configuration, and then gets :meth:`Tracker.log` calls:

    class MyTracker:
        def __init__(self, folder: Path, *, name: str, config: Mapping[str, Any]) -> None: ...
        def log(self, metrics: Mapping[str, float], *, step: int) -> None: ...
        def close(self) -> None: ...

One with ``log_text(name, text, *, step)`` also gets trajectories. The package named by a class attribute ``package``
must be installed before the run begins. Nothing else of a tracker can affect the run: it is made, called and closed in
a thread of its own.

Ours are TensorBoard (event files), trackio (local) and Weights & Biases.
"""

from __future__ import annotations

import html
import importlib
import json
import logging
import math
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, Self, TextIO

from asyncrl.interfaces import TextTracker, Tracker
from asyncrl.plugins import check_part

logger = logging.getLogger(__name__)

MOST_FAILURES = 3
MOST_WAITING = 10_000
CLOSE_TIMEOUT_S = 60.0


class Trackers:
    """Several trackers as one, each served by a thread of its own: a slow or dead service slows nothing but itself.

    A tracker that raises is logged and counted in ``failures``, and left out after three failures in a row, or when it
    cannot even be made: what a web service does must not end a run, and every metric is in ``metrics.jsonl`` anyway. Of
    one that is too slow the oldest entries go, counted in ``lost``, when ``MOST_WAITING`` of them wait. ``makers`` make
    the trackers, in their threads.
    """

    def __init__(self, makers: Mapping[str, Callable[[], Tracker]]) -> None:
        self._served = {name: _Served(name, make) for name, make in makers.items()}

    @property
    def failures(self) -> dict[str, int]:
        return {name: served.failures for name, served in self._served.items()}

    @property
    def lost(self) -> dict[str, int]:
        return {name: served.lost for name, served in self._served.items()}

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Pass the finite numbers on; returns at once."""
        finite = {name: float(value) for name, value in metrics.items() if _is_number(value)}
        for served in self._served.values():
            served.put(lambda tracker: tracker.log(finite, step=step))

    def log_text(self, name: str, text: str, *, step: int) -> None:
        """Pass a text on to trackers that take texts; returns at once."""

        def log_text(tracker: Tracker) -> None:
            if isinstance(tracker, TextTracker):
                tracker.log_text(name, text, step=step)

        for served in self._served.values():
            served.put(log_text)

    def close(self) -> None:
        """Deliver what is left, then close every tracker: within a minute for all of them (blocks). Idempotent."""
        for served in self._served.values():
            served.end()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for served in self._served.values():
            served.join(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Served:
    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self.failures = self.lost = 0
        self._name, self._make = name, make
        self._waiting: deque[Callable[[Tracker], None]] = deque()
        self._in_a_row = 0
        self._ended = self._dead = False
        self._changed = threading.Condition()
        # A daemon: a service that never answers must not keep the program from ending.
        self._thread = threading.Thread(target=self._serve, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[Tracker], None]) -> None:
        with self._changed:
            if self._dead or self._ended:
                self.lost += 1
                return
            if len(self._waiting) == MOST_WAITING:
                self._waiting.popleft()
                self.lost += 1
                if self.lost == 1:
                    logger.warning("tracker %s is too slow: its oldest entries are dropped", self._name)
            self._waiting.append(call)
            self._changed.notify()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            with self._changed:
                waiting = len(self._waiting)
                self.lost += waiting
                self._waiting.clear()
            logger.error("tracker %s did not finish in time; %d entries did not reach it", self._name, waiting)

    def _serve(self) -> None:
        made: list[Tracker] = []
        if not self._try(lambda: made.append(self._make())):
            self._give_up("could not be made")
            return
        (tracker,) = made
        while (call := self._next()) is not None:
            if self._try(partial(call, tracker)):
                self._in_a_row = 0
            elif self._in_a_row >= MOST_FAILURES:
                self._give_up(f"failed {MOST_FAILURES} times in a row")
                break
        self._try(tracker.close)

    def _next(self) -> Callable[[Tracker], None] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended)
            return self._waiting.popleft() if self._waiting else None

    def _give_up(self, reason: str) -> None:
        with self._changed:
            self._dead = True
            self.lost += len(self._waiting)
            self._waiting.clear()
        logger.error("tracker %s %s and is left out from now on", self._name, reason)

    def _try(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception:  # code of others may raise anything: it is logged and counted
            self.failures += 1
            self._in_a_row += 1
            logger.warning("tracker %s failed", self._name, exc_info=True)
            return False
        return True


def open_trackers(names: Sequence[str], folder: Path, *, name: str, config: Mapping[str, Any]) -> Trackers:
    """Find the trackers ``names`` (installed names or ``package.module:Tracker``), and make them in their threads.

    ``folder`` and ``name`` are the run's; ``config`` (nested tables) is shown beside the metrics where a tracker can.

    Raises:
        ConfigError: unknown, or its package is missing (with the command that installs it).
    """
    makers = {each: partial(check_tracker(each), folder, name=name, config=config) for each in names}
    return Trackers(makers)


def check_tracker(name: str) -> Callable[..., Tracker]:
    """Return the tracker of this name, which can be made with an empty folder's arguments; errors as above."""
    given: dict[str, Any] = {"name": "", "config": {}}
    found: Callable[..., Tracker] = check_part(
        "asyncrl.trackers", name, Path(), options={}, path="telemetry.trackers", **given
    )
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class TensorBoardTracker:
    """Event files under ``tensorboard/`` of the run's folder, through torch's writer: ``tensorboard --logdir RUN``."""

    package = "tensorboard"

    def __init__(self, folder: Path, *, name: str, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(log_dir=str(folder / "tensorboard"))
        self._writer.add_text("config", f"```\n{name}: {json.dumps(config, indent=2, default=str)}\n```", 0)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        for metric, value in metrics.items():
            self._writer.add_scalar(metric, value, step)

    def log_text(self, name: str, text: str, *, step: int) -> None:
        self._writer.add_text(name, f"```\n{text}\n```", step)

    def close(self) -> None:
        self._writer.close()


class TrackioTracker:
    """A run of the project that our run is named after, also of a resumed one: ``trackio show --project NAME``.

    Where it keeps its files, and whether it sends them anywhere, is of its environment (``TRACKIO_DIR``,
    ``TRACKIO_SPACE_ID``, ``TRACKIO_SERVER_URL``).
    """

    package = "trackio"

    def __init__(self, folder: Path, *, name: str, config: Mapping[str, Any]) -> None:
        with redirect_stdout(_Aside()):  # it greets on standard output, where only results belong
            self._trackio: Any = importlib.import_module("trackio")
            self._run: Any = self._trackio.init(
                project=name, name=folder.name, config=dict(config), resume="allow", embed=False
            )

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_text(self, name: str, text: str, *, step: int) -> None:
        self._run.log({name: self._trackio.Markdown(f"```\n{text}\n```")}, step=step)

    def close(self) -> None:
        with redirect_stdout(_Aside()):
            self._run.finish()


class _Aside:
    """Standard output, but what the thread that made this writes goes to standard error, also if it hangs."""

    def __init__(self) -> None:
        self._thread, self._stream = threading.get_ident(), sys.stdout

    def write(self, text: str) -> int:
        return self._now().write(text)

    def flush(self) -> None:
        self._now().flush()

    def __getattr__(self, name: str) -> Any:  # what else is asked of a stream
        return getattr(self._now(), name)

    def _now(self) -> TextIO:
        return sys.stderr if threading.get_ident() == self._thread else self._stream


_STEP = "trainer/step"


class WandbTracker:
    """A run named like ours, which a resumed run goes on with; the rest (project, mode, key) is of its environment.

    Without a network: ``WANDB_MODE=offline``, and later ``wandb sync RUN/wandb/offline-run-*``.

    Our step is a metric of its own, against which all others are drawn: scores of an evaluation beside training come
    after those of later steps, and wandb drops what goes back by its own step.
    """

    package = "wandb"

    def __init__(self, folder: Path, *, name: str, config: Mapping[str, Any]) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        self._run: Any = self._wandb.init(
            id=re.sub(r"[^\w.\-]", "-", folder.name)[-64:],
            name=folder.name,
            group=name,
            dir=str(folder),
            config=dict(config),
            # Offline there is nothing to ask, and wandb 0.31 then writes nothing at all of a run that may be resumed.
            resume="allow" if self._wandb.setup().settings.mode == "online" else None,
        )
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._run.log({**metrics, _STEP: step})

    def log_text(self, name: str, text: str, *, step: int) -> None:
        self._run.log({name: self._wandb.Html(f"<pre>{html.escape(text)}</pre>"), _STEP: step})

    def close(self) -> None:
        self._run.finish()
