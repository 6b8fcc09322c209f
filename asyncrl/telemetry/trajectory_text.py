"""Trajectories as a person reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError

from .json_lines import read_json_lines

__all__ = ["trajectories_of", "trajectory_text"]


def trajectory_text(record: Mapping[str, Any]) -> str:
    """One record of ``trajectories.jsonl``: a line about it, what was to be done, and the conversation as it went.

    >>> print(trajectory_text({"step": 3, "slot": 7, "reward": 1.0, "finish": "done", "text": "2+2=4"}))
    step 3, slot 7: reward 1, done
    2+2=4
    """
    parts = ", ".join(f"{name} {value:.4g}" for name, value in (record.get("reward_parts") or {}).items())
    versions = record.get("weight_versions") or []
    about = [
        f"reward {record['reward']:.4g}" + (f" ({parts})" if parts else "") if record.get("reward") is not None else "",
        str(record.get("finish", "")),
        f"weight version {min(versions)}" + (f" to {max(versions)}" if min(versions) < max(versions) else "")
        if versions
        else "",
    ]
    where = ", ".join(f"{name} {record[name]}" for name in ("step", "slot") if record.get(name) is not None)
    head = ": ".join(part for part in (where, ", ".join(filter(None, about))) if part)
    task = record.get("task") or {}
    asked = task.get("ground_truth", task.get("answer"))
    expected = [f"expected: {asked}"] if asked is not None else []
    return "\n".join([head, *expected, str(record.get("text", "")).rstrip()])


def trajectories_of(run: Path, *, step: int | None = None, last: int | None = None) -> Iterator[str]:
    """What :func:`trajectory_text` makes of a run's trajectories, in the order they were written.

    Raises:
        ConfigError: the folder is no run's, or holds none of that step.
    """
    path = run / "trajectories.jsonl"
    if not path.is_file():
        raise ConfigError(f"{run}: no run: it has no trajectories.jsonl", path=str(run), remedy="give a run's folder")
    records = [record for record in read_json_lines(path) if step is None or record.get("step") == step]
    if not records:
        what = "no trajectories" if step is None else f"no trajectory of step {step}"
        raise ConfigError(
            f"{run} holds {what}", path=str(run), remedy="telemetry.trajectories_per_step says how many are written"
        )
    yield from map(trajectory_text, records[-last:] if last is not None else records)
