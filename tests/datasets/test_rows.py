"""Reading rows from the columns that the field uses."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

import numpy as np
import pytest

from asyncrl.datasets import read_conversation, read_preference, read_prompt
from asyncrl.errors import InvalidDataError

USER = {"role": "user", "content": "1+1"}
RIGHT = {"role": "assistant", "content": "2"}
WRONG = {"role": "assistant", "content": "3"}


def verl(**more: Any) -> dict[str, Any]:
    return {"prompt": [USER], "data_source": "x", "reward_model": {"style": "rule", "ground_truth": "2"}, **more}


def test_verls_columns_are_a_prompt():
    row = read_prompt(verl(extra_info={"index": 3, "when": dt.date(2026, 1, 2), "array": np.arange(2)}))
    assert row.prompt == (USER,)
    assert (row.data_source, row.ground_truth) == ("x", "2")
    assert row.extra_info == {"index": 3, "when": "2026-01-02", "array": [0, 1]}
    assert json.loads(json.dumps(row.extra_info)) == row.extra_info


def test_a_ground_truth_may_stand_by_itself():
    assert read_prompt({"prompt": "1+1", "ground_truth": "2"}).ground_truth == "2"
    assert read_prompt(verl(ground_truth="3")).ground_truth == "2"
    unused = {"style": "rule", "ground_truth": None}  # a column of parquet, filled for the rows of another set
    assert read_prompt(verl(reward_model=unused, ground_truth="3")).ground_truth == "3"


def test_columns_without_another_use_are_extra_info_as_far_as_json_has_them():
    record = {"question": "1+1", "answer": 2, "level": "easy", "picture": b"1", "extra_info": {"level": "hard"}}
    assert read_prompt(record, {"prompt": "question"}).extra_info == {"answer": 2, "level": "hard"}
    assert read_prompt(verl(ability="math", images=[])).extra_info == {"ability": "math"}


def test_null_members_of_a_struct_were_not_written():
    row = read_prompt(verl(prompt=np.array([{**USER, "tool_calls": None, "name": None}], dtype=object)))
    assert row.prompt == (USER,)


def test_nulls_at_any_depth_of_calls_and_tools_were_not_written():
    def call(arguments: Any) -> dict[str, Any]:
        return {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": arguments}}]}

    given = [USER, {**call({"a": 1, "b": [None], "query": None}), "content": None}, call('{"query": null}')]
    properties = {"a": {"type": "integer", "enum": [1, None], "items": None}, "query": None}
    tool = {"type": "function", "function": {"name": "add", "parameters": {"properties": properties}}}
    row = read_conversation({"messages": given, "tools": [tool]})
    assert row.messages[1:] == (
        {**call({"a": 1, "b": [None]}), "content": None},
        {**call('{"query": null}'), "content": None},
    )
    assert row.tools[0].parameters == {"properties": {"a": {"type": "integer", "enum": [1, None]}}}
    (written,) = read_conversation({"messages": given, "tools": json.dumps([tool])}).tools
    assert written.parameters == {"properties": properties}


def test_a_text_is_a_user_message_and_columns_may_be_members_of_structs():
    record = {"question": "1+1", "extra": '{"answer": {"value": 2}}'}
    row = read_prompt(record, {"prompt": "question", "ground_truth": "extra.answer.value"})
    assert (row.prompt, row.ground_truth, row.data_source, row.extra_info) == ((USER,), 2, "", {})


@pytest.mark.parametrize("column", ["ground_truth", "data_source", "extra_info"])
def test_a_column_that_is_named_must_be_there(column: str):
    with pytest.raises(InvalidDataError, match=r"has no column 'answr' \(columns: prompt, data_source"):
        read_prompt(verl(), {column: "answr"})


def test_content_in_parts_of_text_is_joined():
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1"}]
    assert read_prompt(verl(prompt=[{"role": "user", "content": parts}])).prompt == (USER,)


def test_equal_prompts_have_equal_keys():
    assert read_prompt(verl()).key == read_prompt(verl(data_source="y")).key
    assert read_prompt(verl()).key != read_prompt(verl(prompt=[RIGHT, USER])).key


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "1"}, r"no column 'prompt' \(columns: text\)"),
        (verl(prompt=[]), '"prompt" must be messages'),
        (verl(prompt=7), '"prompt" must be messages'),
        (verl(prompt=[{"content": "x"}]), "without a role"),
        (verl(prompt=[{"role": "user", "content": None}]), "without content"),
        (verl(prompt=[USER, RIGHT]), "ends with a turn of the assistant"),
        (verl(prompt=[{"role": "user", "content": [{"type": "image"}]}]), "content of type image"),
        (verl(images=["x"]), "'images', and only text is supported"),
        (verl(images=3), "'images', and only text is supported"),
        (verl(extra_info=3), "'extra_info' must be a table"),
        (verl(extra_info={"x": b"1"}), "holds a bytes"),
        (verl(extra_info={"x": float("nan")}), "holds nan"),
        (verl(reward_model="{nope"), "is not JSON"),
        (verl(extra_info=f'{{"x": {"9" * 5000}}}'), "is not JSON"),
        (verl(extra_info='{"x": ' + "[" * 5000), "is not JSON"),
    ],
)
def test_invalid_prompts_are_refused(record: dict[str, Any], message: str):
    with pytest.raises(InvalidDataError, match=message):
        read_prompt(record)


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [USER, RIGHT]},
        {"prompt": "1+1", "response": "2"},
        {"prompt": [USER], "completion": [RIGHT]},
        {"conversations": [{"from": "human", "value": "1+1"}, {"from": "gpt", "value": "2"}]},
    ],
)
def test_conversations_have_four_formats(record: dict[str, Any]):
    assert read_conversation(record).messages == (USER, RIGHT)


def test_a_conversation_has_its_tools():
    declared = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
    for tools in ([declared], json.dumps([declared]), [declared["function"]]):
        (tool,) = read_conversation({"messages": [USER, RIGHT], "tools": tools}).tools
        assert tool.schema() == declared


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": [USER]}, "at least one turn of the assistant"),
        ({"prompt": "1"}, 'neither "response" nor "completion"'),
        ({"text": "1"}, 'needs "messages"'),
        ({"conversations": [{"from": "robot", "value": "1"}]}, '"conversations" must be turns'),
        ({"messages": [USER, RIGHT], "tools": "{"}, '"tools" is not JSON'),
    ],
)
def test_invalid_conversations_are_refused(record: dict[str, Any], message: str):
    with pytest.raises(InvalidDataError, match=message):
        read_conversation(record)


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "1+1", "chosen": "2", "rejected": "3"},
        {"prompt": [USER], "chosen": [RIGHT], "rejected": [WRONG]},
        {"prompt": [USER], "chosen": [USER, RIGHT], "rejected": [USER, WRONG]},
        {"chosen": [USER, RIGHT], "rejected": [USER, WRONG]},
    ],
)
def test_preferences_have_a_prompt_or_a_common_beginning(record: dict[str, Any]):
    row = read_preference({**record, "margin": 2})
    assert (row.prompt, row.chosen, row.rejected, row.margin) == ((USER,), (RIGHT,), (WRONG,), 2.0)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "1+1", "chosen": "2", "rejected": "2"}, "nothing is preferred"),
        ({"chosen": "2", "rejected": "3"}, "no beginning in common"),
        ({"prompt": "1+1", "chosen": "2"}, "no column 'rejected'"),
        ({"prompt": "1+1", "chosen": "2", "rejected": "3", "margin": "x"}, '"margin" is'),
        ({"prompt": "1+1", "chosen": [USER], "rejected": [WRONG]}, '"chosen" has no turn of the assistant'),
    ],
)
def test_invalid_preferences_are_refused(record: dict[str, Any], message: str):
    with pytest.raises(InvalidDataError, match=message):
        read_preference(record)
