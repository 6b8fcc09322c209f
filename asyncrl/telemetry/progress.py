"""The progress of a run: a live display on a terminal, plain lines elsewhere.

Both show the same, on standard error, so that standard output has results only. One that cannot be written ends no run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol, cast

if TYPE_CHECKING:
    from rich.console import RenderableType


Waits = Callable[[], Mapping[str, Mapping[str, float]]]

LABELS = {
    "reward": "reward",
    "success": "held-out",
    "tokens_per_s": "tokens/s",
    "staleness": "staleness",
    "queue_depth": "queue",
    "weight_version": "version",
}


class Progress(Protocol):
    """The display. One stage (warm start, evaluation, training) is under way at a time."""

    def stage(self, name: str, total: int | None) -> None:
        """Begin a stage of ``total`` steps (None: unknown) and finish the one before."""
        ...

    def advance(self, steps: int = 1) -> None:
        """Count more steps of the stage; call :meth:`update` with their values before."""
        ...

    def update(self, **values: Any) -> None:
        """Show values by name; each stays until it is replaced."""
        ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


def make_progress(
    kind: Literal["auto", "rich", "plain", "none"], *, waits: Waits | None = None, file: IO[str] | None = None
) -> Progress:
    """Return the display that ``kind`` names; ``auto`` is rich on a terminal and plain elsewhere.

    ``waits`` returns what waits now, as :meth:`Timeline.current_waits`, at every drawing; ``file`` is standard error by
    default.
    """
    stream: IO[str] = sys.stderr if file is None else file
    if kind == "none":
        return SilentProgress()
    if kind == "rich" or (kind == "auto" and stream.isatty()):
        return RichProgress(stream, waits=waits)
    return PlainProgress(stream, waits=waits)


def format_value(name: str, value: Any) -> str:
    """Format a value for reading, by the unit in its name."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if name.endswith("_per_s") or (isinstance(value, int) and abs(value) < 10_000):
        return f"{value:,.0f}"
    if name.endswith("_s"):
        return f"{value:.1f} s"
    if name.endswith("_share"):
        return f"{value:.0%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def _format_waits(waits: Mapping[str, Mapping[str, float]], *, from_s: float = 0.5) -> str:
    """Format as ``trainer: groups 2.1 s``; waits shorter than ``from_s`` are left out."""
    return ", ".join(
        f"{stage}: {reason} {time_s:.1f} s"
        for stage, reasons in waits.items()
        for reason, time_s in reasons.items()
        if time_s >= from_s
    )


class SilentProgress:
    def stage(self, name: str, total: int | None) -> None: ...
    def advance(self, steps: int = 1) -> None: ...
    def update(self, **values: Any) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


class _Lasting:
    """A stream that shows nothing more once it cannot be written: a terminal or a pipe that is gone ends no run."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._gone = False

    def write(self, text: str) -> int:
        self._try(lambda: self._file.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._file.flush)

    def _try(self, call: Callable[[], object]) -> None:
        if not self._gone:
            try:
                call()
            except (BlockingIOError, UnicodeError):  # of this text alone
                pass
            except (OSError, ValueError):  # ValueError: it is closed
                self._gone = True

    def __getattr__(self, name: str) -> Any:  # what else rich asks of a stream
        return getattr(self._file, name)


class PlainProgress:
    """A line at most every ``interval_s``, and one at the end of each stage: fit for a log file."""

    def __init__(
        self,
        file: IO[str],
        *,
        waits: Waits | None = None,
        interval_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = _Lasting(file)
        self._waits = waits
        self._interval_s = interval_s
        self._clock = clock
        self._begun_s = clock()
        self._printed_s = float("-inf")
        self._name = ""
        self._total: int | None = None
        self._done = 0
        self._unprinted = False
        self._values: dict[str, Any] = {}

    def stage(self, name: str, total: int | None) -> None:
        self._finish_stage()
        self._name, self._total, self._done, self._values = name, total, 0, {}
        self._print(f"{name}: begins" + ("" if total is None else f", {total} steps"))

    def advance(self, steps: int = 1) -> None:
        self._done += steps
        self._unprinted = True
        if self._clock() - self._printed_s >= self._interval_s or self._done == self._total:
            self._print_state()

    def update(self, **values: Any) -> None:
        self._values |= values

    def note(self, text: str) -> None:
        self._print(text)

    def close(self) -> None:
        self._finish_stage()

    def _finish_stage(self) -> None:
        if self._unprinted:
            self._print_state()

    def _print_state(self) -> None:
        self._unprinted = False
        self._printed_s = self._clock()
        total = "" if self._total is None else f"/{self._total}"
        parts = [f"{self._name} {self._done}{total}"]
        parts += [f"{LABELS.get(name, name)} {format_value(name, value)}" for name, value in self._values.items()]
        waiting = _format_waits(self._waits()) if self._waits is not None else ""
        parts += [f"waiting: {waiting}"] if waiting else []
        self._print("  ".join(parts))

    def _print(self, text: str) -> None:
        print(f"[{self._clock() - self._begun_s:7.1f} s] {text}", file=self._file, flush=True)


class RichProgress:
    """A bar for the stage and the newest values below it, drawn four times a second by a thread of rich's."""

    def __init__(self, file: IO[str], *, waits: Waits | None = None) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        console = Console(file=cast("IO[str]", _Lasting(file)))
        self._waits = waits
        self._values: dict[str, Any] = {}
        self._bars = Bars(
            TextColumn("[bold]{task.description:>10}"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task: Any = None  # rich's TaskID, an int behind a NewType
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4)
        self._live.start()

    def stage(self, name: str, total: int | None) -> None:
        if self._task is not None:
            self._bars.stop_task(self._task)
        self._task = self._bars.add_task(name, total=total)

    def advance(self, steps: int = 1) -> None:
        if self._task is not None:
            self._bars.advance(self._task, steps)

    def update(self, **values: Any) -> None:
        self._values = self._values | values  # replaced, not changed: the drawing thread reads it

    def note(self, text: str) -> None:
        from rich.text import Text

        self._live.console.print(Text(text))

    def close(self) -> None:
        if self._task is not None:
            self._bars.stop_task(self._task)
        self._live.stop()

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        values = Text("  ")
        for name, value in self._values.items():
            values.append(f"{LABELS.get(name, name)} ", style="dim")
            values.append(f"{format_value(name, value)}   ", style="bold")
        waiting = _format_waits(self._waits()) if self._waits is not None else ""
        rows: list[RenderableType] = [self._bars, values]
        if waiting:
            rows.append(Text(f"  waiting  {waiting}", style="yellow"))
        return Group(*rows)
