"""How often checkpoints are written."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.pipeline.checkpoint_pace import LEAST_S, SHARE, CheckpointPace


def test_every_so_many_steps_or_never():
    pace, never = CheckpointPace(3), CheckpointPace(0)
    pace.begin(now_s=0.0)
    assert [step for step in range(1, 10) if pace.due(step, now_s=1e9)] == [3, 6, 9]
    assert not any(never.due(step, now_s=1e9) for step in range(1, 10))


@given(
    step_s=st.floats(min_value=0.01, max_value=500.0),
    took_s=st.floats(min_value=0.0, max_value=100.0),
    steps=st.integers(min_value=1, max_value=2000),
)
def test_by_itself_it_takes_its_share_of_the_time_and_no_more(step_s: float, took_s: float, steps: int):
    pace, now_s, spent_s, longest_s, last_s = CheckpointPace(None), 0.0, 0.0, 0.0, 0.0
    pace.begin(now_s=0.0)
    for step in range(1, steps + 1):
        now_s += step_s
        if pace.due(step, now_s=now_s):
            spent_s += took_s
            now_s += took_s
            pace.written(now_s=now_s, took_s=took_s)
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
    assert spent_s <= SHARE * now_s + took_s
    # What a kill costs in training is bounded, too: by a minute, or by fifty times what a checkpoint costs.
    assert longest_s <= max(LEAST_S, took_s / SHARE) + step_s + took_s + 1e-6
