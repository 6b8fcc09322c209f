"""The last words of a run."""

from asyncrl.telemetry import report_text

SUMMARY = {
    "success_before": 0.125,
    "success_after": 0.75,
    "reward_first": 0.1,
    "reward_last": 0.8,
    "wall_s": 73.25,
    "steps": 40,
    "overlap_share": 0.873,
    "staleness": {"max": 1, "histogram": {"1": 250, "0": 750}},
    "max_staleness": 1,
    "tokens": {"generated": 2000, "trained": 1000, "dropped": {"stale": 600, "failed": 100}, "in_flight": 300},
    "weight_version": 40,
    "tokens_per_s": 27.3,
    "waits": {"train": {"publication": 0.5, "rollouts": 12.0}},
    "phases_s": {"train": 60.0},
}


def test_every_number_has_its_line():
    lines = [" ".join(line.split()) for line in report_text(SUMMARY).splitlines()]
    assert lines == [
        "Learning",
        "held-out success 0.125 -> 0.750",
        "reward 0.100 -> 0.800",
        "training steps 40, weight version 40",
        "",
        "Speed",
        "wall time 1 min 13.2 s",
        "train 1 min 00.0 s",
        "tokens per second 27",
        "stages overlap 87.3% of the time",
        "",
        "Staleness of trained tokens",
        "0 behind 750 75.0% ##################",
        "1 behind 250 25.0% ######",
        "largest 1 (bound 1)",
        "",
        "Tokens",
        "generated 2,000",
        "trained 1,000 50.0%",
        "in flight 300 15.0%",
        "dropped: stale 600 30.0%",
        "dropped: failed 100 5.0%",
        "",
        "Waits",
        "train: rollouts 12.00 s",
        "train: publication 0.50 s",
    ]


def test_what_is_not_known_is_not_invented():
    assert report_text({}) == ""
    assert "held-out success  unknown -> 0.500" in report_text({"success_before": None, "success_after": 0.5})
    assert "held-out" not in report_text({"success_before": None, "success_after": None, "steps": 1})
