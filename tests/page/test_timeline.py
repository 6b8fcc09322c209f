"""Bins show what a walk over the events would find."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.page.timeline import MOST_BINS, read_timeline, thinned
from asyncrl.telemetry.timeline import Timeline

INTERVALS = st.lists(st.tuples(st.floats(0, 50), st.floats(0, 20)), min_size=1, max_size=20)


def made(path: Path, intervals: list[tuple[float, float]]) -> Path:
    now = [0.0]
    timeline = Timeline(clock=lambda: now[0])
    for start_s, duration_s in intervals:
        now[0] = start_s if start_s >= now[0] else now[0]
        with timeline.span("train", "step 1"):
            now[0] += duration_s
    timeline.save(path)
    return path


@settings(max_examples=40, deadline=None)
@given(intervals=INTERVALS, start=st.floats(0, 60), width=st.floats(0.1, 80), bins=st.integers(1, 50))
def test_a_bin_has_the_share_of_its_time(tmp_path_factory, intervals, start, width, bins):
    path = made(tmp_path_factory.mktemp("t") / "timeline.json", intervals)
    view = read_timeline(path).view(start, start + width, bins)
    spans = sorted(
        (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        for event in json.loads(path.read_text())["traceEvents"]
        if event["ph"] == "X"
    )
    size = width / bins
    wanted = [
        sum(max(min(end, start + (number + 1) * size) - max(begin, start + number * size), 0.0) for begin, end in spans)
        / size
        for number in range(bins)
    ]
    shares = view["rows"][0]["shares"] if view["rows"] else [0.0] * bins
    assert shares == pytest.approx(wanted, abs=2e-3)


def test_waits_and_work_are_told_apart(tmp_path: Path):
    now = [0.0]
    timeline = Timeline(clock=lambda: now[0])
    for step in range(3):
        with timeline.wait("train", "rollouts"):
            now[0] += 1.0
        with timeline.span("train", f"step {step}"):
            now[0] += 3.0
    timeline.save(tmp_path / "timeline.json")
    view = read_timeline(tmp_path / "timeline.json").view(0, 12, 12)
    json.dumps(view, allow_nan=False)
    rows = {(row["kind"], row["name"]): (row["seconds"], row["shares"]) for row in view["rows"]}
    assert rows == {("span", "step"): (9, [0, 1, 1, 1] * 3), ("wait", "rollouts"): (3, [1, 0, 0, 0] * 3)}


@pytest.mark.parametrize(("start", "end", "bins"), [(1, 1, 5), (-1, 2, 5), (0, 1, 0), (0, 1, MOST_BINS + 1)])
def test_a_view_that_is_none_is_refused(tmp_path: Path, start: float, end: float, bins: int):
    timeline = read_timeline(made(tmp_path / "timeline.json", [(0, 1)]))
    with pytest.raises(ValueError, match="a view is"):
        timeline.view(start, end, bins)


@settings(deadline=None)
@given(length=st.integers(0, 500), most=st.integers(1, 60))
def test_thinned_columns_keep_their_last_values(length, most):
    column = [float(number) for number in range(length)]
    thin = thinned({"a": column, "b": column}, most)
    assert thin["a"] == thin["b"]
    assert len(thin["a"]) <= most
    assert thin["a"][-1:] == column[-1:]
