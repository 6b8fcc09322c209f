"""JSON that is always valid, and lines that survive a crash."""

import errno
import json
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from asyncrl.telemetry.run_directory import (
    JsonLines,
    cut_torn_tail,
    not_finite,
    read_json_lines,
    rewrite_json_lines,
    to_json,
)


@dataclass
class Point:
    x: float
    y: tuple


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (float("nan"), None),
        ([1, float("inf"), {"a": -float("inf")}], [1, None, {"a": None}]),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.float64("nan"), None),
        (np.array([[1.0, np.nan]]), [[1.0, None]]),
        (np.bool_(True), True),
        ({3: Path("a")}, {"3": "a"}),
        ({"a"}, ["a"]),
        (Point(1.0, (2,)), {"x": 1.0, "y": [2]}),
        ("\udcff", "\\udcff"),
        ({"\ud83d": 1}, {"\\ud83d": 1}),
        (b"x", "b'x'"),
    ],
)
def test_plain_forms(value, plain):
    assert to_json(value) == plain
    json.dumps(to_json(value), allow_nan=False).encode()


def test_what_is_not_finite_is_named():
    values = {"a": 1.0, "b": float("nan"), "c": np.float32("inf"), "d": -float("inf"), "e": "nan", "f": None}
    assert not_finite(values) == {"b": "nan", "c": "inf", "d": "-inf"}


def test_lines_come_in_the_order_of_the_calls(tmp_path):
    lines = JsonLines(tmp_path / "x.jsonl")
    for number in range(200):
        lines.append({"n": number})
    lines.close()
    lines.close()
    assert [record["n"] for record in read_json_lines(lines.path)] == list(range(200))
    with pytest.raises(ValueError, match="closed"):
        lines.append({})


def test_an_error_of_any_kind_in_the_writer_is_raised_by_the_next_call(tmp_path):
    lines = JsonLines(tmp_path / "x.jsonl")
    lines._queue.put("\ud83d")  # as no record is written
    with pytest.raises(UnicodeEncodeError):
        lines.close()


def test_many_threads_write_whole_lines(tmp_path):
    lines = JsonLines(tmp_path / "x.jsonl")
    threads = [
        threading.Thread(target=lambda: [lines.append({"text": "y" * 300}) for _ in range(50)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines.close()
    assert len(read_json_lines(lines.path)) == 200


def test_a_record_is_read_when_it_is_appended(tmp_path):
    lines = JsonLines(tmp_path / "x.jsonl")
    record = {"n": [1]}
    lines.append(record)
    record["n"].append(2)
    lines.close()
    assert read_json_lines(lines.path) == [{"n": [1]}]


async def test_appending_does_not_touch_the_disk_in_the_event_loop(tmp_path):
    from blockbuster import blockbuster_ctx

    lines = JsonLines(tmp_path / "x.jsonl")
    with blockbuster_ctx():
        for number in range(100):
            lines.append({"n": number})
    lines.close()
    assert len(read_json_lines(lines.path)) == 100


def test_a_full_disk_is_told_to_the_next_caller():
    lines = JsonLines(Path("/dev/full"))
    lines.append({"n": 1})
    with pytest.raises(OSError, match="No space left"):
        lines.close()


def test_lines_wait_for_room_on_a_full_disk(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("asyncrl.io._RETRY_S", 0.001)
    written = threading.Event()

    class Filling:
        """The file on a disk that takes four bytes and is full for three tries."""

        def __init__(self, file):
            self.file, self.tries = file, 0

        def write(self, data):
            self.tries += 1
            if self.tries == 1:
                return self.file.write(data[:4])
            if self.tries < 5:
                raise OSError(errno.ENOSPC, "No space left on device")
            count = self.file.write(data)
            written.set()
            return count

    lines = JsonLines(tmp_path / "x.jsonl")
    lines._file = Filling(lines._file)
    lines.append({"text": "whole"})
    assert written.wait(60)
    lines.append({"n": 2})
    lines.close()
    assert lines.path.read_text() == '{"text": "whole"}\n{"n": 2}\n'
    assert caplog.text.count("waits for room") == 1


def test_a_torn_last_line_is_cut_off_before_going_on(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"n": 1}\n{"n": 2')
    assert read_json_lines(path) == [{"n": 1}]
    lines = JsonLines(path)
    lines.append({"n": 3})
    lines.close()
    assert read_json_lines(path) == [{"n": 1}, {"n": 3}]
    assert cut_torn_tail(path) == 0


def test_a_torn_line_may_be_long(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"n": 1}\n' + "x" * 200_000)
    assert cut_torn_tail(path) == 200_000
    path.write_text("x" * 70_000)
    assert cut_torn_tail(path) == 70_000
    assert path.read_text() == ""


def test_rewriting_keeps_what_it_is_told_to(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"n": 1}\n{"n": 2}\n{"n": 3}\n')
    assert rewrite_json_lines(path, lambda record: record["n"] != 2) == 1
    assert path.read_text() == '{"n": 1}\n{"n": 3}\n'
    assert rewrite_json_lines(tmp_path / "absent.jsonl", lambda record: False) == 0
