"""The last words of a run: what it began with, what it ended with, and where the time and the tokens went."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import IO, Any

__all__ = ["print_report", "report_rows", "report_text"]

Rows = list[tuple[str, str]]


def report_rows(summary: Mapping[str, Any]) -> dict[str, Rows]:
    """The report as blocks of (name, text) rows; what the summary lacks is left out, never invented.

    Keys read: ``success_before``, ``success_after``, ``reward_first``, ``reward_last``, ``steps``, ``wall_s``,
    ``tokens_per_s``, ``overlap_share``, ``max_staleness``, ``staleness`` (``max``, ``histogram``: staleness to tokens),
    ``tokens`` (``generated``, ``trained``, ``dropped``: reason to tokens, ``in_flight``), ``weight_version``, ``waits``
    (stage to reason to seconds), ``phases_s`` (phase to seconds).
    """
    blocks = {
        "Learning": list(_learning(summary)),
        "Speed": list(_speed(summary)),
        "Staleness of trained tokens": list(_staleness(summary)),
        "Tokens": list(_tokens(summary)),
        "Waits": list(_waits(summary)),
    }
    return {title: rows for title, rows in blocks.items() if rows}


def _learning(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    pairs = (("held-out success", "success_before", "success_after"), ("reward", "reward_first", "reward_last"))
    for label, first, last in pairs:
        before, after = summary.get(first), summary.get(last)
        if before is not None or after is not None:
            yield label, f"{_score(before)} -> {_score(after)}"
    if "steps" in summary:
        version = summary.get("weight_version")
        yield "training steps", f"{summary['steps']:,}" + ("" if version is None else f", weight version {version:,}")


def _speed(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if summary.get("wall_s") is not None:
        yield "wall time", _seconds(summary["wall_s"])
    for phase, time_s in (summary.get("phases_s") or {}).items():
        yield f"  {phase}", _seconds(time_s)
    if summary.get("tokens_per_s") is not None:
        yield "tokens per second", f"{summary['tokens_per_s']:,.0f}"
    if summary.get("overlap_share") is not None:
        yield "stages overlap", f"{summary['overlap_share']:.1%} of the time"


def _staleness(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    staleness = summary.get("staleness") or {}
    histogram = {int(key): int(count) for key, count in (staleness.get("histogram") or {}).items()}
    total = sum(histogram.values())
    for versions in sorted(histogram):
        share = histogram[versions] / total if total else 0.0
        yield f"{versions} behind", f"{histogram[versions]:>12,}  {share:6.1%}  {'#' * round(24 * share)}".rstrip()
    if staleness.get("max") is not None:
        bound = summary.get("max_staleness")
        yield "largest", f"{staleness['max']}" + ("" if bound is None else f" (bound {bound})")


def _tokens(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    tokens = summary.get("tokens") or {}
    generated = tokens.get("generated")
    for key in ("generated", "trained", "in_flight"):
        if tokens.get(key) is not None:
            yield key.replace("_", " "), _count(tokens[key], of=None if key == "generated" else generated)
    for reason, count in sorted((tokens.get("dropped") or {}).items(), key=lambda item: -item[1]):
        yield f"dropped: {reason}", _count(count, of=generated)


def _waits(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for stage, reasons in (summary.get("waits") or {}).items():
        for reason, time_s in sorted(reasons.items(), key=lambda item: -item[1]):
            yield f"{stage}: {reason}", _seconds(time_s)


def report_text(summary: Mapping[str, Any]) -> str:
    """The report in plain aligned lines."""
    blocks = report_rows(summary)
    width = max((len(name) for rows in blocks.values() for name, _ in rows), default=0)
    lines: list[str] = []
    for title, rows in blocks.items():
        lines += ["", title]
        lines += [f"  {name:<{width}}  {text}" for name, text in rows]
    return "\n".join(lines[1:])


def print_report(summary: Mapping[str, Any], *, file: IO[str] | None = None) -> None:
    """Print the report: a table with rules on a terminal, :func:`report_text` elsewhere."""
    stream: IO[str] = sys.stdout if file is None else file
    if not stream.isatty():
        print(report_text(summary), file=stream)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    for title, rows in report_rows(summary).items():
        table.add_row(Text(title, style="bold not dim"), "")
        for name, text in rows:
            table.add_row(Text(f"  {name}"), Text(text))
        table.add_section()
    Console(file=stream).print(table)


def _score(value: Any) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def _count(value: int, *, of: int | None) -> str:
    share = f"  {value / of:6.1%}" if of else ""
    return f"{value:>12,}{share}"


def _seconds(value: float) -> str:
    minutes, seconds = divmod(float(value), 60)
    return f"{int(minutes)} min {seconds:04.1f} s" if minutes else f"{seconds:.2f} s"
