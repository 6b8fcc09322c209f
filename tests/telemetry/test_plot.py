"""The picture of a run is drawn from its files alone."""

from base64 import b64decode

import pytest

from asyncrl.errors import ConfigError
from asyncrl.telemetry import RunDirectory, Timeline
from asyncrl.telemetry.plot import plot_run


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def run(tmp_path):
    clock = Clock()
    timeline = Timeline(clock=clock)
    with RunDirectory.create(tmp_path, "first", clock=clock) as run:
        run.log_metrics({"eval/success": 0.0}, step=0, version=0)
        for step in range(1, 9):
            with timeline.span("rollout", f"group {step}"):
                with timeline.wait("train", "rollouts"):
                    clock.now_s += 0.5
                with timeline.span("train", f"step {step}"):
                    clock.now_s += 1.0
            queue = {"groups_ready": step % 3, "groups_pending": 4}
            staleness = {"staleness/0": 3.0, "staleness/1": 1.0}
            run.log_metrics({"reward_mean": step / 10, **queue, **staleness}, step=step, version=step)
        run.log_metrics({"eval/success": 0.75}, step=8, version=8)
        timeline.save(run.timeline_path)
        run.write_summary({"steps": 8, "max_staleness": 1})
    return run.path


def test_all_panels_are_drawn(run, tmp_path):
    text = plot_run(run, tmp_path / "picture.svg").read_text()
    for words in (
        "Reward and held-out success",
        "training step",
        "0.75",
        "Stages side by side",
        "rollout",
        "seconds, from 3.5 s after the start  (hatched: waiting)",
        "versions behind the trainer",
        "bound 1",
        "75.0%",
        "Queue depth",
        "pending",
    ):
        assert words in text, words


def test_a_run_that_has_not_ended_is_drawn_as_far_as_it_goes(run, tmp_path):
    (run / "timeline.json").unlink()
    (run / "summary.json").unlink()
    picture = plot_run(run, tmp_path / "pictures" / "picture.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = picture._repr_mimebundle_()
    assert shown["text/plain"] == str(picture)
    assert b64decode(shown["image/png"]) == picture.read_bytes()


def test_a_run_without_a_single_number(tmp_path):
    with RunDirectory.create(tmp_path, "empty") as run:
        pass
    assert "no rewards in metrics.jsonl" in plot_run(run.path, tmp_path / "x.svg").read_text()


def test_what_cannot_be_drawn(run, tmp_path):
    with pytest.raises(ConfigError, match=r"no metrics\.jsonl"):
        plot_run(tmp_path / "nothing", tmp_path / "x.png")
    with pytest.raises(ConfigError, match="suffix"):
        plot_run(run, tmp_path / "x.gif")
    (run / "summary.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        plot_run(run, tmp_path / "x.png")
