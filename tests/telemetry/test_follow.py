"""Each whole line is read once, whenever the reader looks and whatever becomes of the file."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.telemetry.follow import MOST_LINE_BYTES, LineFollower, read_form
from asyncrl.telemetry.run_directory import RunDirectory, sound_record


@settings(max_examples=30, deadline=None)
@given(
    records=st.lists(
        st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=8), max_size=3), max_size=12
    ),
    cuts=st.lists(st.integers(0, 400), max_size=8),
)
def test_pieces_of_a_file_give_the_lines_of_the_whole(tmp_path_factory, records, cuts):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    whole = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    again, found = [], []
    follower = LineFollower(path, sound_record, again=lambda: again.append(path))
    for end in [*sorted(min(cut, len(whole)) for cut in cuts), len(whole)]:
        path.write_bytes(whole[:end]) if not path.exists() else _append(path, whole, end)
        found += list(follower.new_records())
    assert [record for _offset, _size, record in found] == records
    assert [follower.record_at(offset, size) for offset, size, _record in found] == records
    assert (follower.damaged, again) == (0, [])


def _append(path: Path, whole: bytes, end: int) -> None:
    with path.open("ab") as file:
        file.write(whole[path.stat().st_size : end])


def test_damaged_lines_are_counted_once_and_left_out(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\nnonsense\n\xff\xfe\n[1]\n{"a": 2}\n{"a":')
    follower = LineFollower(path, sound_record)
    assert [record for *_where, record in follower.new_records()] == [{"a": 1}, {"a": 2}]
    assert not list(follower.new_records())
    assert follower.damaged == 3


def test_a_changed_letter_is_noticed(tmp_path: Path):
    with RunDirectory.create(tmp_path, "run") as run:
        run.log_trajectory({"step": 1, "text": "seven"})
        run.log_trajectory({"step": 2, "text": "eight"})
    path = run.trajectories_path
    path.write_text(path.read_text().replace("seven", "sevem"))
    follower = LineFollower(path, sound_record)
    assert [record["step"] for *_where, record in follower.new_records()] == [2]
    assert follower.damaged == 1


def test_a_line_without_an_end_does_not_fill_the_memory(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.truncate(3 * MOST_LINE_BYTES)
        file.seek(0, 2)
        file.write(b'\n{"a": 1}\n')
    follower = LineFollower(path, sound_record)
    assert [record for *_where, record in follower.new_records()] == [{"a": 1}]
    assert follower.damaged == 1


def test_a_file_that_was_rewritten_begins_again(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    again = []
    follower = LineFollower(path, sound_record, again=lambda: again.append(path))
    assert len(list(follower.new_records())) == 2
    draft = tmp_path / "b"
    draft.write_text('{"a": 1}\n{"a": 3}\n{"a": 4}\n')
    draft.replace(path)
    assert [record["a"] for *_where, record in follower.new_records()] == [1, 3, 4]
    assert again == [path]


def test_what_is_not_an_object_is_nothing(tmp_path: Path):
    path = tmp_path / "a.json"
    assert read_form(path, dict[str, int]) is None
    for text in ("[1]", "{", "[" * 100_000, ""):
        path.write_text(text)
        assert read_form(path, dict[str, int]) is None
