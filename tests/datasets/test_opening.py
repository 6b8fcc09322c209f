"""Opening the data sets of a configuration as streams of rows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from asyncrl.datasets import open_conversations, open_dataset, open_prompts, read_preference, read_prompt
from asyncrl.errors import ConfigError, InvalidDataError


def test_a_file_with_verls_columns_becomes_shuffled_prompts(lines, problems):
    file = lines(problems(10))
    stream = open_prompts(file, seed=3)
    answers = [stream[index].ground_truth for index in range(20)]
    assert sorted(answers[:10]) == sorted(answers[10:]) == sorted(str(number + 1) for number in range(10))
    assert answers[:10] != answers[10:]
    again = open_prompts(str(file), seed=3)
    assert [again[index].ground_truth for index in reversed(range(20))] == answers[::-1]
    assert [open_prompts(file, seed=4)[index].ground_truth for index in range(20)] != answers


def test_files_are_mixed_by_weight(lines, problems):
    sums = lines(problems(4), "sums.jsonl")
    words = lines([{"prompt": "say a word"}], "words.jsonl")
    stream = open_prompts([{"files": str(sums), "weight": 3, "name": "sums"}, {"files": [str(words)]}], seed=0)
    drawn = Counter(stream.find(index)[0].name for index in range(400))
    assert drawn["sums"] == pytest.approx(300, abs=4)
    assert drawn[str(words)] == 400 - drawn["sums"]
    assert stream.rows == 5


def test_a_curriculum_goes_from_easy_to_hard_once(lines, problems):
    rows = [
        {**row, "extra_info": {"difficulty": difficulty}}
        for row, difficulty in zip(problems(4), [3, 1, 2, 1.5], strict=True)
    ]
    stream = open_prompts(
        [{"files": str(lines(rows)), "curriculum_key": "extra_info.difficulty", "order": "file"}], seed=0
    )
    assert [stream[index].extra_info["difficulty"] for index in range(8)] == [1, 1.5, 2, 3, 3, 1, 2, 1.5]


def test_a_limit_and_a_filter_leave_rows_out(lines, problems):
    stream = open_prompts([{"files": str(lines(problems(10))), "limit": 6, "order": "file"}], seed=0)
    even = stream.filtered(lambda row: row.extra_info["index"] % 2 == 0)
    assert [even[index].extra_info["index"] for index in range(6)] == [0, 2, 4, 0, 2, 4]
    assert stream.filtered(lambda row: False).parts == ()


def test_other_kinds_of_rows(lines):
    said = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    conversations = open_conversations(lines([{"dialogue": said}], "c.jsonl"), seed=0)
    with pytest.raises(InvalidDataError, match='needs "messages"'):
        conversations.check()
    table = {"files": str(lines([{"dialogue": said}], "c.jsonl")), "columns": {"messages": "dialogue"}}
    assert open_conversations([table], seed=0)[5].messages == tuple(said)
    file = lines([{"prompt": "1+1", "chosen": "2", "rejected": "3"}], "p.jsonl")
    preferences = open_dataset(file, read_preference)
    assert preferences[0].chosen == (said[1],)


def test_every_row_once_for_evaluation(lines, problems):
    files = [lines(problems(3), "a.jsonl"), lines(problems(2), "b.jsonl")]
    rows = open_dataset(files, read_prompt)
    assert [row.ground_truth for row in rows] == ["1", "2", "3", "1", "2"]
    assert rows.where(4) == f"{files[1]}:2"


def test_an_invalid_row_is_named_with_file_and_line(lines, problems):
    file = lines([*problems(2), {"prompt": 5}])
    with pytest.raises(InvalidDataError, match=rf'{file}:3: "prompt" must be messages'):
        open_prompts(file, seed=0).check()


def test_a_row_that_python_cannot_follow_is_named_with_file_and_line(lines, problems, tmp_path: Path):
    deep: list[Any] = []
    for _level in range(600):
        deep = [deep]
    file = lines([*problems(1), {"prompt": "1+1", "extra_info": {"deep": deep}}])
    with pytest.raises(InvalidDataError, match=rf"{file}:2: nested too deeply"):
        open_prompts(file, seed=0).check()
    for name, begin, end in (("long.jsonl", "", ""), ("long.json", "[", "]")):
        (tmp_path / name).write_text(f'{begin}{{"prompt": {"9" * 5000}}}{end}\n')
        with pytest.raises(InvalidDataError, match=rf"{name}.* not JSON.*4300 digits"):
            open_prompts(tmp_path / name, seed=0).check()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "files: is missing"),
        ({"weight": 1}, "files: is missing"),
        ({"files": "FILE", "wieght": 1}, "no such key; did you mean weight"),
        ({"files": "FILE", "weight": -1}, "a weight must be 0 or more"),
        ({"files": "FILE", "weight": [[0, 1], [0, 2]]}, "increasing indices"),
        ({"files": "FILE", "weight": [1, 2]}, r"a number, or points \[\[index, weight\]"),
        ({"files": "FILE", "weight": 0}, "all weights are 0 at index 0"),
        ({"files": "FILE", "weight": [[0, 1], [5000, 0]]}, "all weights are 0 at index 5000"),
        ({"files": "FILE", "order": "shufled"}, 'did you mean "shuffled"'),
        ({"files": "FILE", "columns": {"promt": "x"}}, "no such column"),
        ({"files": "absent.jsonl"}, "no such file"),
    ],
)
def test_invalid_tables_are_refused(lines, problems, table: dict[str, Any], message: str):
    file = lines(problems(1))
    given = {name: str(file) if value == "FILE" else value for name, value in table.items()}
    with pytest.raises(ConfigError, match=message):
        open_prompts([given], seed=0, key="env.options.sources")


def test_a_file_without_rows_is_refused(lines):
    with pytest.raises(InvalidDataError, match="has no rows"):
        open_prompts(lines([]), seed=0)


def test_sorting_needs_numbers(lines, problems):
    file = lines(problems(1))
    with pytest.raises(InvalidDataError, match=r"'extra_info.level' must be a number"):
        open_prompts([{"files": str(file), "curriculum_key": "extra_info.level"}], seed=0)


def test_parquet_in_verls_columns_works_unchanged(tmp_path: Path, problems):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.Table.from_pylist(problems(6)), tmp_path / "train.parquet")
    stream = open_prompts(tmp_path / "train.parquet", seed=0)
    row = stream[0]
    assert row.prompt[0]["content"] == f"{row.extra_info['index']} + 1 = ?"
    assert (row.data_source, row.ground_truth) == ("openai/gsm8k", str(row.extra_info["index"] + 1))
