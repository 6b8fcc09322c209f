"""Tool calls of models that do not write them as Hermes does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncrl.interfaces import Tool
from asyncrl.rollout.chat import ChatRenderer
from asyncrl.serve.chat import JSON_OBJECT, calls_grammar
from asyncrl.serve.text import ModelText

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "say it again please"}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
CALL = '{"name": "add", "parameters": {"a": 1}}'
NAMED = {"type": "function", "function": {"name": "add"}}
JSON = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


@pytest.fixture
def notation() -> str:
    return "llama3_json"


@pytest.fixture
def text(tokenizer: Any, notation: str) -> ModelText:
    return ModelText(tokenizer, renderer=ChatRenderer(tokenizer, tool_call_parser=notation))


async def answered(served: Any, **fields: Any) -> tuple[str, list[dict[str, Any]], str]:
    """Return the content, the called functions and the finish reason of an answer, which is streamed alike."""
    (choice,) = (await served.post("/v1/chat/completions", {**CHAT, **fields}))["choices"]
    whole = choice["message"]["content"] or "", choice["message"].get("tool_calls") or [], choice["finish_reason"]
    lines = await served.events("/v1/chat/completions", {**CHAT, **fields, "stream": True})
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    content = "".join(delta.get("content") or "" for delta in deltas)
    calls = [call for delta in deltas for call in delta.get("tool_calls") or []]
    streamed = content, calls, chunks[-1]["choices"][0]["finish_reason"]
    assert (whole[0], [each["function"] for each in whole[1]], whole[2]) == (
        streamed[0],
        [each["function"] for each in streamed[1]],
        streamed[2],
    )
    return content, [each["function"] for each in calls], streamed[2]


ADDED = {"name": "add", "arguments": '{"a": 1}'}


@pytest.mark.parametrize(
    ("reply", "content", "calls"),
    [
        (CALL, "", [ADDED]),
        (f"\n {CALL}; {CALL}", "\n ", [ADDED, ADDED]),
        (f"sum:<|python_tag|>{CALL}", "sum:", [ADDED]),
        (f"sum: {CALL}", f"sum: {CALL}", []),
        ('{"a": 1}', '{"a": 1}', []),
        ("{a} is a set", "{a} is a set", []),
        ("<|python_tag|>nonsense", "<|python_tag|>nonsense", []),
    ],
)
async def test_calls_of_llama_are_parsed(serve, reply, content, calls):
    async with serve(lambda prompt: reply + "<|end|>") as served:
        reason = "tool_calls" if calls else "stop"
        assert await answered(served, tools=TOOLS) == (content, calls, reason)
        assert await answered(served) == (reply, [], "stop")


@pytest.mark.parametrize(
    ("notation", "reply"),
    [
        ("mistral", 'sum:[TOOL_CALLS]add[ARGS]{"a": 1}'),
        (
            "qwen3_coder",
            "sum:<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        ),
    ],
)
async def test_calls_of_other_models_are_parsed(serve, reply):
    async with serve(lambda prompt: reply + "<|end|>") as served:
        assert await answered(served, tools=TOOLS) == ("sum:", [ADDED], "tool_calls")


async def test_a_text_is_streamed_from_where_it_is_no_call(serve):
    async with serve(lambda prompt: " it again, {gladly}<|end|>", token_s=0.001) as served:
        lines = await served.events("/v1/chat/completions", {**CHAT, "tools": TOOLS, "stream": True})
        assert len(lines) > 5


@pytest.mark.parametrize(
    ("fields", "reply", "form"),
    [
        ({"tool_choice": "required"}, CALL, {}),
        ({"tool_choice": NAMED}, CALL, {}),
        ({"response_format": JSON}, '{"a": 1}', {"otherwise": SCHEMA}),
        ({"response_format": JSON}, CALL, {"otherwise": SCHEMA}),
        ({"response_format": {"type": "json_object"}}, '{"nam": 1}', {"otherwise": JSON_OBJECT}),
    ],
)
async def test_forms_of_llamas_calls(serve, fields, reply, form):
    llguidance = pytest.importorskip("llguidance")
    expected = calls_grammar([Tool(name="add", description="", parameters=SCHEMA)], several=False, bare=True, **form)
    async with serve(lambda prompt: reply + "<|end|>") as served:
        await answered(served, tools=TOOLS, **fields)
        assert served.engines[0].requests[-1].sampling.grammar == expected
    bytes_ = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(bytes_, expected)
    assert matcher.consume_tokens(bytes_.tokenize_str(reply))
    assert matcher.is_accepting()


@pytest.mark.parametrize("notation", ["mistral", "qwen3_coder"])
async def test_forms_of_other_calls_are_refused(serve, notation):
    async with serve(lambda prompt: '{"a": 1}<|end|>') as served:
        for fields in ({"tool_choice": "required"}, {"tool_choice": NAMED}, {"response_format": JSON}):
            refused = await served.post("/v1/chat/completions", {**CHAT, "tools": TOOLS, **fields}, status=400)
            assert f"notation ({notation}) cannot be enforced" in refused["error"]["message"]
        await served.post("/v1/chat/completions", {**CHAT, "response_format": JSON})
        await served.post("/v1/chat/completions", {**CHAT, "tools": TOOLS})
