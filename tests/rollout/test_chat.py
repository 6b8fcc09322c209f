"""Chats in tokens: sampled tokens stay as they were; added tokens are those that the template would write."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.envs.calculator import CalculatorFactory, calculator
from asyncrl.errors import ConfigError, InvalidDataError
from asyncrl.rollout.chat import ChatRenderer, load_renderer

USER = {"role": "user", "content": "(3+4)-2"}
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"a": 3, "operator": "+", "b": 4}}\n</tool_call>'
ANSWER = {"role": "tool", "tool_call_id": "call_0", "name": "calculator", "content": "7"}
PARSED_CALL = {
    "id": "call_0",
    "type": "function",
    "function": {"name": "calculator", "arguments": {"a": 3, "operator": "+", "b": 4}},
}


@pytest.fixture(params=["scratch", "chatml"])
def renderer(request: pytest.FixtureRequest) -> ChatRenderer:
    chosen: ChatRenderer = request.getfixturevalue(request.param)
    return chosen


def ids(renderer: ChatRenderer, text: str) -> list[int]:
    return renderer.tokenizer.encode(text, add_special_tokens=False)


def test_a_prompt_ends_where_the_assistant_begins(scratch: ChatRenderer, chatml: ChatRenderer) -> None:
    assert scratch.decode(scratch.prompt([USER], [calculator.tool])) == "<|user|>(3+4)-2<|end|><|assistant|>"
    assert chatml.decode(chatml.prompt([USER], [calculator.tool])) == (
        "<|im_start|>system\nTools: calculator<|im_end|>\n<|im_start|>user\n(3+4)-2<|im_end|>\n<|im_start|>assistant\n"
    )


def test_after_a_finished_turn_only_the_new_messages_are_appended(chatml: ChatRenderer) -> None:
    sampled = [*ids(chatml, CALL), chatml.end_of_turn_id]
    appended = chatml.extend([USER], sampled, [ANSWER, ANSWER])
    assert chatml.decode(appended) == (
        "\n<|im_start|>user\n<tool_response>\n7\n</tool_response>\n<tool_response>\n7\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_cut_turn_is_closed_by_what_is_appended(scratch: ChatRenderer) -> None:
    cut = ids(scratch, "so far")
    assert scratch.decode(scratch.extend([USER], cut, [ANSWER])) == "<|end|><|tool|>7<|end|><|assistant|>"
    assert scratch.decode(scratch.extend([USER], [], [ANSWER])) == "<|end|><|tool|>7<|end|><|assistant|>"


def test_without_drift_appending_equals_rendering_the_whole(renderer: ChatRenderer) -> None:
    """The sampled turn is spelled the way tokenizer and template would: then both ways agree, token for token."""
    prompt = renderer.prompt([USER], [calculator.tool])
    said = ids(renderer, CALL if renderer.end_of_turn_id == ids(renderer, "<|end|>")[0] else "\n" + CALL)
    sampled = [*said, renderer.end_of_turn_id]
    whole = [USER, {"role": "assistant", "content": "", "tool_calls": [PARSED_CALL]}, ANSWER]
    assert prompt + sampled + renderer.extend([USER], sampled, [ANSWER], [calculator.tool]) == renderer.prompt(
        whole, [calculator.tool]
    )


@given(spelling=st.lists(st.integers(min_value=6, max_value=260), min_size=1, max_size=12))
@settings(max_examples=40, deadline=None)
def test_any_spelling_is_kept(scratch: ChatRenderer, spelling: list[int]) -> None:
    """Ids that the tokenizer itself would never choose for their text change nothing in what is appended."""
    ended = [*spelling, scratch.end_of_turn_id]
    assert scratch.extend([USER], ended, [ANSWER]) == scratch.extend([USER], [scratch.end_of_turn_id], [ANSWER])


def test_a_call_is_parsed(renderer: ChatRenderer) -> None:
    message = renderer.parse([*ids(renderer, f"Let me see.\n{CALL}"), renderer.end_of_turn_id])
    assert message == {"role": "assistant", "content": "Let me see.", "tool_calls": [PARSED_CALL]}


def test_plain_text_is_parsed(renderer: ChatRenderer) -> None:
    assert renderer.parse(ids(renderer, "the answer is 5")) == {"role": "assistant", "content": "the answer is 5"}
    assert renderer.parse([renderer.end_of_turn_id]) == {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ('<tool_call>{"name": "calc</tool_call>', "not JSON"),
        ("<tool_call>[1]</tool_call>", "a tool call is an object"),
        ('<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "a tool call is an object"),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "a tool call is an object"),
        ('<tool_call>{"name": 7}</tool_call>', "a tool call is an object"),
        ('<tool_call>{"name": "", "arguments": {}}</tool_call>', "a tool call is an object"),
        ('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "not JSON"),
        ('<tool_call>{"name": "calculator"', "without </tool_call>"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not JSON"),
    ],
)
def test_a_call_that_cannot_be_read_leaves_a_mark(scratch: ChatRenderer, written: str, why: str) -> None:
    message = scratch.parse(ids(scratch, "hm " + written))
    assert message["content"] == "hm"
    assert "tool_calls" not in message
    assert why in message["malformed"]


def test_a_readable_call_beside_an_unreadable_one_is_kept(scratch: ChatRenderer) -> None:
    message = scratch.parse(ids(scratch, f"<tool_call>oops</tool_call>{CALL}"))
    assert message["tool_calls"] == [PARSED_CALL]
    assert "not JSON" in message["malformed"]


PIECES = ["<tool_call>", "</tool_call>", "<tool_", "call>", '{"name": "f"}', "a", " ", "\n", "\u3000"]


@given(text=st.lists(st.sampled_from(PIECES), max_size=9).map("".join))
@settings(max_examples=200, deadline=None)
def test_calls_are_what_lies_between_the_nearest_marks(scratch: ChatRenderer, text: str) -> None:
    pattern = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
    message = scratch.parse(ids(scratch, text))
    written, content = pattern.findall(text), pattern.sub("", text)
    assert message["content"] == content.partition("<tool_call>")[0].strip()
    assert len(message.get("tool_calls", ())) == written.count('{"name": "f"}')
    assert ("without </tool_call>" in message.get("malformed", "")) == ("<tool_call>" in content)


def test_a_turn_of_blanks_is_parsed_in_linear_time(scratch: ChatRenderer) -> None:
    message = scratch.parse(ids(scratch, "<tool_call>" + " " * 50_000))
    assert message["malformed"] == "<tool_call> without </tool_call>"


@given(arguments=st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=8) | st.booleans(), max_size=3))
@settings(max_examples=40, deadline=None)
def test_arguments_survive_writing_and_parsing(scratch: ChatRenderer, arguments: dict[str, object]) -> None:
    written = f"<tool_call>{json.dumps({'name': 'f', 'arguments': arguments})}</tool_call>"
    (call,) = scratch.parse(ids(scratch, written))["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": arguments}


def test_a_demonstration_becomes_the_tokens_that_generation_would_make(
    renderer: ChatRenderer, factory: CalculatorFactory
) -> None:
    messages = next(
        demonstration for demonstration in map(factory.demonstration, range(100)) if len(demonstration) == 6
    )  # question, call, answer, call, answer, result
    encoded = renderer.encode_conversation(messages, [calculator.tool])
    prompt = renderer.prompt(messages[:1], [calculator.tool])
    assert list(encoded.token_ids[: len(prompt)]) == prompt
    assert not any(encoded.loss_mask[: len(prompt)])
    said = [t for t, mine in zip(encoded.token_ids, encoded.loss_mask, strict=True) if mine]
    end = renderer.end_of_turn_id
    turns = renderer.decode(said).split(renderer.decode([end]))
    assert [renderer.parse(ids(renderer, turn)).get("tool_calls", [{}])[0].get("function") for turn in turns] == [
        messages[1]["tool_calls"][0]["function"],
        messages[3]["tool_calls"][0]["function"],
        None,
        None,
    ]
    assert said.count(end) == 3
    assert encoded.loss_mask[-1]
    whole = renderer.decode(renderer.prompt([*messages, USER], [calculator.tool]))
    assert whole.startswith(renderer.decode(encoded.token_ids))


def test_a_conversation_without_assistant_is_no_demonstration(scratch: ChatRenderer) -> None:
    with pytest.raises(InvalidDataError, match="needs a turn of the assistant"):
        scratch.encode_conversation([USER])


def test_a_template_without_tool_calls_gets_them_as_text(chatml: ChatRenderer) -> None:
    """SmolLM2's template is such a one: it writes the content and nothing else."""
    import copy

    tokenizer = copy.deepcopy(chatml.tokenizer)
    tokenizer.chat_template = (
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    said = {"role": "assistant", "content": "I ask.", "tool_calls": [PARSED_CALL]}
    encoded = ChatRenderer(tokenizer).encode_conversation([USER, said])
    assert chatml.decode(encoded.token_ids).endswith(f"<|im_start|>assistant\nI ask.\n{CALL}<|im_end|>")


def test_a_template_whose_turns_have_no_end_is_refused(chatml: ChatRenderer) -> None:
    import copy

    tokenizer = copy.deepcopy(chatml.tokenizer)
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
    )
    with pytest.raises(ConfigError, match="begins with no special token"):
        ChatRenderer(tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        ChatRenderer(tokenizer)


def test_a_template_of_ones_own_takes_the_place_of_the_models(scratch: ChatRenderer, tmp_path: Path) -> None:
    scratch.tokenizer.save_pretrained(str(tmp_path / "model"))
    template = tmp_path / "mine.jinja"
    template.write_text(
        "{% for message in messages %}<|{{ message.role }}|>{{ prefix }}{{ message.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    mine = load_renderer(str(tmp_path / "model"), chat_template=template, chat_template_kwargs={"prefix": "-"})
    assert mine.decode(mine.prompt([USER])) == "<|user|>-(3+4)-2<|end|><|assistant|>"
    with pytest.raises(ConfigError, match=r"model\.chat_template = .*cannot be read") as caught:
        load_renderer(str(tmp_path / "model"), chat_template=tmp_path / "absent.jinja")
    assert caught.value.path == "model.chat_template"


def test_the_roles_that_a_template_writes(chatml: ChatRenderer):
    assert chatml.further_roles() == ("system", "developer", "tool")
    tokenizer = copy.deepcopy(chatml.tokenizer)
    tokenizer.chat_template = (
        "{% for message in messages %}"
        "{% if message.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{% if message.role in ['user', 'assistant'] %}{{ message.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    assert ChatRenderer(tokenizer).further_roles() == ()
