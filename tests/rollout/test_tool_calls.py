"""Tool calls in each notation: what is written is what is read, and the chat template says in which notation."""

from __future__ import annotations

import copy
import pickle
import string
from collections.abc import Sequence
from functools import cache
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.sections import ModelConfig
from asyncrl.envs.tools import Toolbox, tool
from asyncrl.errors import ConfigError
from asyncrl.interfaces import Message, SamplingParams, Step, Task, Tool
from asyncrl.rollout.chat import ChatRenderer
from asyncrl.rollout.episode import run_episode
from asyncrl.rollout.recheck import ReplayedRewards
from asyncrl.rollout.tool_calls import NOTATIONS
from asyncrl.rollout.trajectory import Trajectory, trajectories_to_batch
from asyncrl.rollout.work import EpisodeTimes
from asyncrl.testing import ScriptedEngine

# What a template writes for the calls of a turn. Mistral's templates refuse other ids, and Llama's a second call.
WRITTEN = {
    "hermes": """{%- for call in calls %}
{{ '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\n</tool_call>\n' }}
{%- endfor -%}""",
    "llama3_json": """{%- if calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif -%}
{{- '{"name": "' + calls[0].function.name + '", "parameters": ' + (calls[0].function.arguments | tojson) + '}' -}}""",
    "mistral": """{%- for call in calls if call.id | length != 9 %}{{ raise_exception('a wrong id') }}{% endfor -%}
[TOOL_CALLS]{{ calls | map(attribute='function') | list | tojson }}""",
    "qwen3_coder": """{%- for call in calls %}{{ '<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for name, value in call.function.arguments | items -%}
{{ '<parameter=' + name + '>\n' + (value if value is string else value | tojson) + '\n</parameter>\n' }}
{%- endfor %}{{ '</function>\n</tool_call>\n' }}{% endfor -%}""",
}
TEMPLATE = """{%- if tools %}{{ '<|im_start|>system\nYou may call ' + (tools | tojson) + '<|im_end|>\n' }}{% endif -%}
{%- for message in messages -%}
{%- set calls = message.tool_calls or [] -%}
{{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}
{%- if message.role == 'tool' %}{{ ' answers ' + message.tool_call_id }}{% endif -%}
{%- if calls -%}WRITTEN{%- endif -%}
{{- '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""
USER: Message = {"role": "user", "content": "1 + 2?"}
ADD = Tool(
    name="add",
    description="Add.",
    parameters={"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
)
SUM = {"name": "add", "arguments": {"a": 1, "b": 2}}
NOTE = {"name": "note", "arguments": {"text": "so"}}


def with_template(renderer: ChatRenderer, template: str, **options: Any) -> ChatRenderer:
    tokenizer = copy.deepcopy(renderer.tokenizer)
    tokenizer.chat_template = template
    return ChatRenderer(tokenizer, **options)


@cache
def in_notation(chatml: ChatRenderer, name: str) -> ChatRenderer:
    return with_template(chatml, TEMPLATE.replace("WRITTEN", WRITTEN[name]))


def turn(*functions: dict[str, Any]) -> Message:
    calls = [{"id": f"call_{at}", "type": "function", "function": each} for at, each in enumerate(functions)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def functions(message: Message) -> list[dict[str, Any]]:
    return [call["function"] for call in message.get("tool_calls", ())]


XML_SUM = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n"
XML_SUM += "</tool_call>"
JSON_SUM = '{"name": "add", "parameters": {"a": 1, "b": 2}}'


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("llama3_json", JSON_SUM, "", [SUM]),
        ("llama3_json", f"\n<|python_tag|> {JSON_SUM}<|eom_id|>", "", [SUM]),
        ("llama3_json", '{"name": "note", "arguments": {"text": "so"}}', "", [NOTE]),
        ("llama3_json", '{"type": "function", "name": "note", "parameters": {"text": "so"}}', "", [NOTE]),
        ("llama3_json", f"{JSON_SUM}; {JSON_SUM}\n{JSON_SUM};", "", [SUM] * 3),
        ("llama3_json", f"I add.<|python_tag|>{JSON_SUM}", "I add.", [SUM]),
        ("llama3_json", f"I add: {JSON_SUM}", f"I add: {JSON_SUM}", []),
        ("llama3_json", f"{JSON_SUM} is how", f"{JSON_SUM} is how", []),
        ("llama3_json", '{"answer": 3}', '{"answer": 3}', []),
        ("llama3_json", '{"name": "Ada"}', '{"name": "Ada"}', []),
        ("llama3_json", f'{JSON_SUM}; "so"', f'{JSON_SUM}; "so"', []),
        ("llama3_json", "{x} is a set", "{x} is a set", []),
        ("llama3_json", "3", "3", []),
        ("llama3_json", "", "", []),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "abcdefghi"}]', "", [SUM]),
        (
            "mistral",
            'So:[TOOL_CALLS][{"name": "note", "arguments": {"text": "so"}}, {"name": "now", "arguments": {}}]',
            "So:",
            [NOTE, {"name": "now", "arguments": {}}],
        ),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}', "", [SUM]),
        ("mistral", '[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": 1, "b": 2}', "", [SUM]),
        (
            "mistral",
            'So: [TOOL_CALLS]add{"a": 1, "b": 2}[TOOL_CALLS] note {"text": "so"}\n add[ARGS] {"a": 1, "b": 2}',
            "So:",
            [SUM, NOTE, SUM],
        ),
        ("mistral", "add[ARGS]{}", "add[ARGS]{}", []),
        ("qwen3_coder", XML_SUM, "", [SUM]),
        ("qwen3_coder", f"So:\n{XML_SUM}\n{XML_SUM} there", "So:\n\n there", [SUM, SUM]),
        (
            "qwen3_coder",
            "<tool_call><function=note><parameter=text>so</parameter></function></tool_call>",
            "",
            [NOTE],
        ),
        ("qwen3_coder", "<tool_call><function=now></function></tool_call>", "", [{"name": "now", "arguments": {}}]),
        ("qwen3_coder", "<function=add> and </tool_call>", "<function=add> and </tool_call>", []),
    ],
)
def test_calls_are_read(name: str, text: str, content: str, calls: list[Any]) -> None:
    message = NOTATIONS[name].parse(text, [ADD])
    assert (message["content"], functions(message)) == (content, calls)
    assert "malformed" not in message
    assert [call["id"] for call in message.get("tool_calls", ())] == [
        ("call{:05}" if name == "mistral" else "call_{}").format(number) for number in range(len(calls))
    ]


@pytest.mark.parametrize(
    ("name", "text", "why", "calls"),
    [
        ("llama3_json", "<|python_tag|>brave_search.call(query='x')", "not JSON", []),
        ("llama3_json", "<|python_tag|>", "no tool call", []),
        ("llama3_json", '<|python_tag|>{"name": "add"}', 'is an object {"name": ..., "parameters": {...}}', []),
        ("llama3_json", f'<|python_tag|>{JSON_SUM}; {{"name": "add", "para', "not JSON", [SUM]),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"x": NaN}}', "not JSON", []),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": "x"}', "is an object", []),
        ("mistral", "[TOOL_CALLS]", "no tool call", []),
        ("mistral", "[TOOL_CALLS] []", "no tool call", []),
        ("mistral", "[TOOL_CALLS]add", "its name and an object", []),
        ("mistral", '[TOOL_CALLS]{"name": "add", "arguments": {}}', "its name and an object", []),
        ("mistral", "[TOOL_CALLS]I would add{}", "its name and an object", []),
        ("mistral", '[TOOL_CALLS]add{"a": 1, "b": 2} as you see', "its name and an object", [SUM]),
        ("mistral", '[TOOL_CALLS]add{"a": 1, "b', "not JSON", []),
        ("mistral", '[TOOL_CALLS]add{"a": NaN}[TOOL_CALLS]add{"a": 1, "b": 2}', "not JSON", [SUM]),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": "x"}]', "is an object", []),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {}}] so', "not JSON", []),
        ("qwen3_coder", '<tool_call>{"name": "add"}</tool_call>', "a tool call is <function=NAME>", []),
        ("qwen3_coder", "<tool_call><function=></function></tool_call>", "a tool call is <function=NAME>", []),
        ("qwen3_coder", "<tool_call><function=f>so</function></tool_call>", "a tool call is <function=NAME>", []),
        (
            "qwen3_coder",
            "<tool_call><function=f><parameter>1</parameter></function></tool_call>",
            "a parameter of a tool call is",
            [],
        ),
        (
            "qwen3_coder",
            "<tool_call><function=f>x<parameter=a>1</parameter></function></tool_call>",
            "a parameter of a tool call is",
            [],
        ),
        ("qwen3_coder", f"{XML_SUM}<tool_call>\n<function=add>", "without </tool_call>", [SUM]),
    ],
)
def test_a_call_that_cannot_be_read_leaves_a_mark(name: str, text: str, why: str, calls: list[Any]) -> None:
    message = NOTATIONS[name].parse("hm " + text if "<|python" not in text else text, [ADD])
    assert message["content"] == ("hm" if "<|python" not in text else "")
    assert functions(message) == calls
    assert why in message["malformed"]


@pytest.mark.parametrize("name", NOTATIONS)
@pytest.mark.parametrize(
    "text",
    [
        "{mark}" * 100_000,
        "{mark}x{{" * 100_000,
        "{mark}" + " " * 100_000 + "x" * 100_000 + " " * 100_000 + "[CALL_ID]" + "x" * 100_000 + " " * 100_000 + "x",
        "{mark}" + "[" * 100_000,
        '{mark}f{{"a":' + '{{"a":' * 100_000,
        "{mark}" + '{{"name": "f", "parameters": {{}}}};' * 50_000 + "x",
        "{mark}" + "f{{}}" * 100_000 + "[",
        "{mark}<function=f>" + "<parameter=a>" * 100_000 + "</function></tool_call>",
        "{mark}<function=f>" + "<parameter=a></parameter>" * 100_000 + "x</function></tool_call>",
    ],
)
def test_a_hostile_turn_is_read_in_linear_time(name: str, text: str) -> None:
    assert NOTATIONS[name].parse(text.format(mark=NOTATIONS[name].mark), [ADD])["malformed"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{{"name": "f", "arguments": {}}}</tool_call>'),
        ("llama3_json", '<|python_tag|>{{"name": "f", "parameters": {}}}'),
        ("mistral", "[TOOL_CALLS]f{}"),
        ("mistral", '[TOOL_CALLS][{{"name": "f", "arguments": {}}}]'),
    ],
)
def test_arguments_have_a_bounded_depth(name: str, text: str) -> None:
    for depth, reads in ((50, True), (70, False)):
        message = NOTATIONS[name].parse(text.format('{"a":' * depth + "1" + "}" * depth))
        assert bool(functions(message)) == reads
        assert ("more than 64 levels" in message.get("malformed", "")) != reads


def test_llamas_hostile_turn_without_a_mark_is_an_answer() -> None:
    for text in ("{" * 100_000, '{"a":' * 100_000, JSON_SUM * 20_000 + "x"):
        assert NOTATIONS["llama3_json"].parse(text, [ADD]) == {"role": "assistant", "content": text}


ANY_OF = {"anyOf": [{"type": "string"}, {"type": "null"}, {"type": "array", "items": {"type": "string"}}]}


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "string"}, "3", "3"),
        ({"type": "string"}, "\n two lines \n", "\n two lines \n"),
        ({"type": "integer"}, "3", 3),
        ({"type": "integer"}, "three", "three"),
        ({"type": "number"}, "2.5", 2.5),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "array"}, '["a", 1]', ["a", 1]),
        ({"type": "object"}, '{"a": null}', {"a": None}),
        ({"type": "array"}, "[" * 1000, "[" * 1000),
        ({}, "3", 3),
        ({}, '"3"', '"3"'),
        (ANY_OF, "None", None),
        (ANY_OF, "null", None),
        (ANY_OF, "3", "3"),
        (ANY_OF, '["a"]', ["a"]),
        ({"type": ["string", "null"]}, "null", None),
        (None, "3", "3"),
        ("garbage", "3", "3"),
        ({"type": 7, "anyOf": 7}, "3", 3),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, "3", "3"),
        ({"anyOf": [{"type": "number"}, {"type": "string"}]}, "3", 3),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"$ref": "#/$defs/Colour"}, "1", "1"),
        ({"$ref": "#/$defs/Hostile"}, "1", 1),
    ],
)
def test_values_of_qwen3_coder_have_the_types_of_the_tool(schema: Any, written: str, value: Any) -> None:
    itself = {"anyOf": [{"$ref": "#/$defs/Hostile"}] * 50}
    definitions = {"Colour": {"type": "string", "enum": ["1"]}, "Hostile": itself}
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": definitions}
    declared = Tool(name="f", description="", parameters=parameters)
    text = f"<tool_call>\n<function=f>\n<parameter=x>\n{written}\n</parameter>\n</function>\n</tool_call>"
    qwen = NOTATIONS["qwen3_coder"]
    assert functions(qwen.parse(text, [ADD, declared])) == [{"name": "f", "arguments": {"x": value}}]
    assert functions(qwen.parse(text)) == [{"name": "f", "arguments": {"x": written}}]


NAMES = st.text(string.ascii_letters + string.digits + "_-.", min_size=1, max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(st.fixed_dictionaries({"name": NAMES, "arguments": st.dictionaries(NAMES, JSON, max_size=3)}))


def declarations(calls: Sequence[dict[str, Any]]) -> list[Tool]:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return [
        Tool(
            name=call["name"],
            description="",
            parameters={
                "type": "object",
                "properties": {key: {"type": kinds.get(type(each), "null")} for key, each in call["arguments"].items()},
            },
        )
        for call in calls
    ]


@pytest.mark.parametrize("name", NOTATIONS)
@given(calls=CALLS.filter(bool))
@settings(max_examples=40, deadline=None)
def test_what_a_template_writes_is_read(chatml: ChatRenderer, name: str, calls: list[dict[str, Any]]) -> None:
    calls = list({call["name"]: call for call in calls}.values())[: 1 if name == "llama3_json" else 3]
    renderer = in_notation(chatml, name)
    encoded = renderer.encode_conversation([USER, turn(*calls)], declarations(calls))
    said = [token for token, mine in zip(encoded.token_ids, encoded.loss_mask, strict=True) if mine]
    message = renderer.parse(said, declarations(calls))
    assert (functions(message), message["content"]) == (calls, "")
    written = NOTATIONS[name].write(calls)
    assert functions(NOTATIONS[name].parse(written, declarations(calls))) == calls


@pytest.mark.parametrize("name", NOTATIONS)
def test_the_template_says_in_which_notation(chatml: ChatRenderer, name: str) -> None:
    renderer = in_notation(chatml, name)
    assert renderer.notation.name == name
    assert renderer.declares_tools()
    assert renderer.reads_calls()
    assert pickle.loads(pickle.dumps(renderer)).notation.name == name
    assert renderer.with_options({"more": 1}).notation.name == name


@pytest.mark.parametrize("name", NOTATIONS)
def test_a_generation_prompt_may_say_more_than_a_turn_begins_with(chatml: ChatRenderer, name: str) -> None:
    template = TEMPLATE.replace("WRITTEN", WRITTEN[name]).replace("assistant\n' }}", "assistant\n<think>\n' }}")
    assert "<think>" in template
    renderer = with_template(chatml, template)
    assert (renderer.notation.name, renderer.reads_calls()) == (name, True)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("{{ raise_exception('no calls') }}", True),  # it writes none
        ("{{ calls[0].function.arguments + 'is no text' }}", True),
        ("{{ calls[0].function.name + '(said=\"x\")' }}", False),
        ('{{ \'<tool_call>{"name": "probe", "parameters": {"said": "x"}}</tool_call>\' }}', False),
        ('{{ \'<function=probe>{"said": "x"}</function>\' }}', False),
    ],
)
def test_a_template_of_no_known_notation_gets_that_of_hermes(chatml: ChatRenderer, written: str, read: bool) -> None:
    renderer = with_template(chatml, TEMPLATE.replace("WRITTEN", written))
    assert (renderer.notation.name, renderer.reads_calls()) == ("hermes", read)


def test_a_notation_may_be_named(chatml: ChatRenderer) -> None:
    plain = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
    renderer = with_template(chatml, plain, tool_call_parser="mistral")
    assert not renderer.declares_tools()
    assert renderer.reads_calls()
    text = renderer.decode(renderer.prompt([USER, {**turn(SUM), "content": "So:"}]))
    assert text.endswith('So:\n[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}]<|im_end|>')
    with pytest.raises(ConfigError, match="no notation of tool calls") as caught:
        with_template(chatml, plain, tool_call_parser="llama")
    assert caught.value.remedy == "use one of auto, hermes, llama3_json, mistral, qwen3_coder"
    assert get_args(ModelConfig.model_fields["tool_call_parser"].annotation) == ("auto", *NOTATIONS)


def test_mistrals_ids_are_nine_letters_and_digits(chatml: ChatRenderer) -> None:
    """Others would be refused: those of demonstrations and clients, and the empty one of a call that is malformed."""
    renderer = in_notation(chatml, "mistral")
    ids = ("call_0", "", "call_0123456789abcdef_1")
    text = renderer.decode(
        renderer.prompt([USER, turn(SUM), *({"role": "tool", "tool_call_id": each, "content": "3"} for each in ids)])
    )
    assert [part[:9] for part in text.split("answers ")[1:]] == ["0000call0", "000000000", "89abcdef1"]


ALTERNATING = """{%- set seen = namespace(role='') -%}
{%- for message in messages if message.role != 'tool' and not message.tool_calls -%}
{%- if message.role == seen.role %}{{ raise_exception('roles alternate') }}{% endif -%}
{%- set seen.role = message.role -%}
{%- endfor -%}
"""


def test_turns_that_templates_refuse_do_not_end_a_conversation(chatml: ChatRenderer) -> None:
    """What was said is in the tokens; of the messages before it, templates need only what they check."""
    llama = in_notation(chatml, "llama3_json")
    several = llama.parse(llama.encode(f"{JSON_SUM}; {JSON_SUM}"), [ADD])
    answers = [{"role": "tool", "tool_call_id": each["id"], "content": "3"} for each in several["tool_calls"]]
    assert len(answers) == 2
    assert llama.decode(llama.extend([USER, several, *answers], [], [USER])) == (
        "<|im_end|>\n<|im_start|>user\n1 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    mistral = with_template(chatml, ALTERNATING + TEMPLATE.replace("WRITTEN", WRITTEN["mistral"]))
    unread = mistral.parse(mistral.encode("[TOOL_CALLS]add"))
    error: Message = {"role": "tool", "tool_call_id": "", "content": "error"}
    assert "malformed" in unread
    assert mistral.decode(mistral.extend([USER, unread, error], [], [error])) == (
        "<|im_end|>\n<|im_start|>tool\nerror answers 000000000<|im_end|>\n<|im_start|>assistant\n"
    )


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Adding:
    """Earns 1 for the right sum, which a tool gives."""

    deterministic = True

    def __init__(self) -> None:
        self.tools: tuple[Tool, ...] = ()
        self._toolbox = Toolbox([add])

    async def reset(self, task: Task) -> list[Message]:
        self.tools = self._toolbox.declarations
        return [USER]

    async def step(self, reply: Message) -> Step:
        if answers := await self._toolbox.answer_all(reply):
            return Step(messages=tuple(each.message for each in answers))
        return Step(reward=float(reply["content"] == "3"), done=True)

    async def close(self) -> None: ...


async def play(renderer: ChatRenderer, *said: str) -> Trajectory:
    turns = iter([*said])
    engine = ScriptedEngine(lambda _: [*renderer.encode(next(turns)), renderer.end_of_turn_id])
    await engine.start()
    return await run_episode(
        engine,
        Adding(),
        renderer,
        {},
        sampling=SamplingParams(max_new_tokens=400),
        max_turns=4,
        max_seq_len=4000,
        deadline_s=5.0,
        request_prefix="row",
        seed=0,
    )


async def test_an_episode_with_tools_of_a_llama(chatml: ChatRenderer) -> None:
    renderer = in_notation(chatml, "llama3_json")
    trajectory = await play(renderer, "<|python_tag|>add(1, 2)", JSON_SUM, "3")
    assert trajectory.reward == 1.0
    first, second, third = trajectory.turns
    assert "not JSON" in first.message["malformed"]
    assert functions(second.message) == [SUM]
    assert renderer.decode(trajectory.token_ids[second.end : third.start]) == (
        "\n<|im_start|>tool\n3 answers call_0<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_a_replayed_call_has_the_types_of_the_tool(chatml: ChatRenderer) -> None:
    """The tools, which this environment has after its reset, are those that the turn was read with."""
    renderer = in_notation(chatml, "qwen3_coder")
    played = [await play(renderer, XML_SUM, "3"), await play(renderer, XML_SUM, "4")]
    assert [each.reward for each in played] == [1.0, 0.0]
    assert functions(played[0].turns[0].message) == [SUM]

    class Checked(Adding):
        async def step(self, reply: Message) -> Step:
            assert functions(reply) in ([], [SUM])
            return await super().step(reply)

    class Factory:
        make = Checked

        def task(self, index: int, *, split: str) -> Task:
            return {}

        def demonstration(self, index: int) -> list[Message]:
            return []

    times = EpisodeTimes()
    times.totals["generate_s"] = 1.0
    checks = ReplayedRewards(Factory(), share=0.5, max_seq_len=4000, deadline_s=5.0, times=times)
    checks._budget.spend(0.0, rows=8)
    found = await checks.check(trajectories_to_batch(played, group_id=1), played, renderer, group_id=1)
    assert (found.rows, dict(found.failures)) == (2, {})
