"""What a person sees."""

import io
import re

import pytest

from asyncrl.telemetry.progress import PlainProgress, RichProgress, SilentProgress, format_value, make_progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def test_plain_lines_come_at_most_every_second_and_at_the_end():
    clock, file = Clock(), io.StringIO()
    waits = {"train": {"rollouts": 2.5, "publication": 0.1}}
    progress = PlainProgress(file, clock=clock, waits=lambda: waits)
    progress.stage("train", 5)
    for step in range(1, 5):
        clock.now_s += 0.4
        progress.update(reward=step / 10, tokens_per_s=1234.5)
        progress.advance()
    progress.note("held-out success 0.5")
    waits.clear()
    progress.close()
    assert file.getvalue().splitlines() == [
        "[    0.0 s] train: begins, 5 steps",
        "[    0.4 s] train 1/5  reward 0.1  tokens/s 1,234  waiting: train: rollouts 2.5 s",
        "[    1.6 s] train 4/5  reward 0.4  tokens/s 1,234  waiting: train: rollouts 2.5 s",
        "[    1.6 s] held-out success 0.5",
    ]


def test_a_new_stage_finishes_the_one_before():
    file = io.StringIO()
    progress = PlainProgress(file, clock=Clock(), interval_s=100)
    progress.stage("sft", 3)
    progress.advance()
    progress.advance()
    progress.stage("evaluate", None)
    progress.advance()
    progress.close()
    lines = [line.partition("] ")[2] for line in file.getvalue().splitlines()]
    assert lines == ["sft: begins, 3 steps", "sft 1/3", "sft 2/3", "evaluate: begins", "evaluate 1"]


def test_the_live_display_says_the_same():
    file = Terminal()
    progress = RichProgress(file, waits=lambda: {"train": {"rollouts": 2.5}})
    progress.stage("train", 3)
    progress.update(reward=0.5, success=0.25, staleness=1)
    progress.advance(2)
    progress.note("a [note]")
    progress.close()
    progress.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    for part in ("train", "2/3", "reward 0.5", "held-out 0.25", "staleness 1", "rollouts 2.5 s", "a [note]"):
        assert part in text


def test_which_display():
    assert isinstance(make_progress("none"), SilentProgress)
    assert isinstance(make_progress("auto", file=io.StringIO()), PlainProgress)
    assert isinstance(make_progress("plain", file=Terminal()), PlainProgress)
    rich = make_progress("auto", file=Terminal())
    assert isinstance(rich, RichProgress)
    rich.close()


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("tokens_per_s", 1234.5, "1,234"),
        ("wall_s", 3.14159, "3.1 s"),
        ("overlap_share", 0.873, "87%"),
        ("reward", 0.123456, "0.123"),
        ("tokens", 1_234_567, "1,234,567"),
        ("step", 7, "7"),
        ("name", "x", "x"),
    ],
)
def test_values_are_read_by_their_units(name, value, text):
    assert format_value(name, value) == text


class Lost:
    """A terminal, or a pipe, of which nobody reads any more."""

    def __init__(self, error):
        self.error = error
        self.tried = 0

    def isatty(self):
        return True

    def write(self, text):
        self.tried += 1
        raise self.error

    def flush(self):
        self.write("")


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(5, "Input/output error"), ValueError("closed")])
@pytest.mark.parametrize("kind", [PlainProgress, RichProgress])
def test_a_display_that_is_gone_ends_nothing_and_is_silent(kind, error):
    file = Lost(error)
    progress = kind(file)
    progress.stage("train", 2)
    progress.advance()
    progress.note("held-out success 0.5")
    progress.advance()
    progress.close()
    assert file.tried == 1
