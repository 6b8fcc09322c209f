"""Overlap of stages, worked by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.telemetry import Occupancy


def overlap_share(spans, stages=None):
    """The share of the time in which two or more stages of finished spans ``(stage, start_s, end_s)`` were busy."""
    # At one moment begins come before ends, so that spans that touch count as one stretch of their stage.
    edges = sorted(
        edge for stage, start_s, end_s in spans for edge in ((float(start_s), 0, stage), (float(end_s), 1, stage))
    )
    occupancy = Occupancy()
    for at_s, kind, stage in edges:
        (occupancy.end if kind else occupancy.begin)(stage, at_s)
    return occupancy.overlap_share(stages, now_s=edges[-1][0] if edges else 0.0)


@pytest.mark.parametrize(
    ("spans", "share"),
    [
        ([], 0.0),
        ([("a", 0, 10)], 0.0),
        ([("a", 0, 5), ("b", 5, 10)], 0.0),  # one after the other
        ([("a", 0, 6), ("b", 4, 10)], 0.2),  # 4..6 of 0..10
        ([("a", 0, 10), ("a", 2, 8)], 0.0),  # one stage twice is still one stage
        ([("a", 0, 10), ("b", 0, 10)], 1.0),
        ([("a", 0, 2), ("b", 1, 2), ("a", 8, 10), ("b", 8, 9)], 0.2),  # the gap counts as time: 1 + 1 of 10
        ([("a", 0, 10), ("b", 1, 4), ("c", 3, 6)], 0.5),  # 1..6; three at once are not counted twice
        ([("a", 3, 3)], 0.0),  # no time at all
    ],
)
def test_the_share_in_which_two_stages_work(spans, share):
    assert overlap_share(spans) == pytest.approx(share)


def test_only_the_stages_asked_for_count():
    spans = [("rollout", 0, 8), ("train", 4, 8), ("evaluate", 8, 20), ("publish", 10, 12)]
    assert overlap_share(spans) == pytest.approx(6 / 20)
    assert overlap_share(spans, {"rollout", "train"}) == pytest.approx(4 / 8)
    assert overlap_share(spans, {"nobody"}) == 0.0


def test_open_spans_last_until_now():
    occupancy = Occupancy()
    occupancy.begin("a", 0)
    occupancy.begin("b", 6)
    assert occupancy.busy_s("a", now_s=10) == 10
    assert occupancy.overlap_share(now_s=10) == pytest.approx(0.4)


def test_forbidden_moves():
    occupancy = Occupancy()
    with pytest.raises(ValueError, match="no span of 'a' is open"):
        occupancy.end("a", 1)
    occupancy.begin("a", 5)
    with pytest.raises(ValueError, match="went back"):
        occupancy.begin("b", 4)


spans = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 20), st.integers(0, 10)).map(lambda s: (s[0], s[1], s[1] + s[2])),
    max_size=12,
)


@settings(max_examples=200, deadline=None)
@given(spans)
def test_it_equals_counting_second_by_second(spans):
    def busy(second):
        return {stage for stage, start, end in spans if start <= second < end}

    if not spans:
        return
    first, last = min(start for _, start, _ in spans), max(end for *_, end in spans)
    seconds = range(first, last)
    counted = sum(len(busy(second)) >= 2 for second in seconds) / len(seconds) if seconds else 0.0
    assert overlap_share(spans) == pytest.approx(counted)
