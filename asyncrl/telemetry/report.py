"""Text of a run: the report at its end, and its trajectories."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from numbers import Real
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.telemetry.run_directory import read_json_lines

MOST_SHOWN = 5
"""Causes of failures, and replicas, that a report lists."""


def trajectory_text(record: Mapping[str, Any]) -> str:
    """Format a record of ``trajectories.jsonl``: a headline, the expected answer, and the conversation.

    >>> print(trajectory_text({"step": 3, "group_id": 7, "reward": 1.0, "finish": "done", "text": "2+2=4"}))
    step 3, group_id 7: reward 1, done
    2+2=4
    """
    given = record.get("reward_parts")  # of an environment: it may be anything
    items = given.items() if isinstance(given, Mapping) else ()
    parts = ", ".join(f"{name} {value:.4g}" if isinstance(value, Real) else f"{name} {value}" for name, value in items)
    versions = record.get("weight_versions") or []
    about = [
        f"reward {record['reward']:.4g}" + (f" ({parts})" if parts else "") if record.get("reward") is not None else "",
        str(record.get("finish", "")),
        f"weight version {min(versions)}" + (f" to {max(versions)}" if min(versions) < max(versions) else "")
        if versions
        else "",
    ]
    where = ", ".join(f"{name} {record[name]}" for name in ("step", "group_id") if record.get(name) is not None)
    head = ": ".join(part for part in (where, ", ".join(filter(None, about))) if part)
    task = record.get("task") or {}
    truth = task.get("ground_truth", task.get("answer"))
    expected = [f"expected: {truth}"] if truth is not None else []
    return "\n".join([head, *expected, str(record.get("text", "")).rstrip()])


def trajectories_of(run: Path, *, step: int | None = None, last: int | None = None) -> Iterator[str]:
    """Format the trajectories of a run, in the order they were written.

    Raises:
        ConfigError: it is not the folder of a run, or holds none of that step.
    """
    path = run / "trajectories.jsonl"
    if not path.is_file():
        raise ConfigError(
            f"{run}: not the folder of a run: it has no trajectories.jsonl", path=str(run), remedy="give a run's folder"
        )
    records = [record for record in read_json_lines(path) if step is None or record.get("step") == step]
    if not records:
        what = "no trajectories" if step is None else f"no trajectory of step {step}"
        raise ConfigError(
            f"{run} holds {what}", path=str(run), remedy="telemetry.trajectories_per_step decides how many are written"
        )
    yield from map(trajectory_text, records[-last:] if last is not None else records)


def report_text(summary: Mapping[str, Any]) -> str:
    """Return the report, in blocks of lines; what the summary lacks is left out.

    Keys read: ``success_before``, ``success_after``, ``reward_first``, ``reward_last``, ``steps``, ``wall_s``,
    ``tokens_per_s``, ``trainer`` (``tflops``, ``mfu``, ``memory_peak_gb``), ``overlap_share``, ``max_staleness``,
    ``staleness`` (``max``, ``histogram``: staleness to tokens), ``tokens`` (``generated``, ``trained``, ``dropped``:
    reason to tokens, ``in_flight``), ``weight_version``, ``waits`` (stage to reason to seconds), ``idle`` (process to
    cause to percent), ``advice`` (with its ``sentence``), ``phases_s`` (phase to seconds), ``failures`` (cause to
    ``count`` and ``example``).
    """
    blocks = {
        "Learning": list(_learning(summary)),
        "Speed": list(_speed(summary)),
        "Staleness of trained tokens": list(_staleness(summary)),
        "Tokens": list(_tokens(summary)),
        "Waits": list(_waits(summary)),
        "Time of each process while training": list(_idle(summary)),
        "Bottleneck": [("", summary["advice"]["sentence"])] if summary.get("advice") else [],
        "Failures of the environment": list(_failures(summary)),
    }
    width = max((len(name) for rows in blocks.values() for name, _ in rows), default=0)
    lines: list[str] = []
    for title, rows in blocks.items():
        if rows:
            lines += ["", title, *(f"  {name:<{width}}  {text}" for name, text in rows)]
    return "\n".join(lines[1:])


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
    if trainer := summary.get("trainer"):
        mfu = f" ({trainer['mfu']:.0%} of what it can do)" if "mfu" in trainer else ""
        yield "trainer", f"{trainer['tflops']:.3g} TFLOP/s a rank{mfu}, {max(trainer['memory_peak_gb']):.3g} GB at most"
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


def _idle(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    idle = summary.get("idle") or {}
    for process, causes in islice(idle.items(), MOST_SHOWN + 4):
        yield process, ", ".join(f"{cause} {share:.1f} %" for cause, share in causes.items() if share >= 0.05)
    if len(idle) > MOST_SHOWN + 4:
        yield "", f"and {len(idle) - MOST_SHOWN - 4} more processes, in summary.json"


def _failures(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    failures = sorted((summary.get("failures") or {}).items(), key=lambda item: -item[1]["count"])
    for cause, found in failures[:MOST_SHOWN]:
        yield f"{found['count']:,} times", cause
        for line in found["example"].splitlines()[1:]:
            yield "", line
    if len(failures) > MOST_SHOWN:
        yield "", f"and {len(failures) - MOST_SHOWN} more causes, in summary.json"


def _score(value: Any) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def _count(value: int, *, of: int | None) -> str:
    share = f"  {value / of:6.1%}" if of else ""
    return f"{value:>12,}{share}"


def _seconds(value: float) -> str:
    minutes, seconds = divmod(float(value), 60)
    return f"{int(minutes)} min {seconds:04.1f} s" if minutes else f"{seconds:.2f} s"
