"""JSON mode, forced calls and the likeliest tokens: what is asked of the engine, and what becomes of its answer."""

from __future__ import annotations

import json

import pytest

from asyncrl.interfaces import Tool
from asyncrl.serve.grammar import calls_grammar, json_grammar
from asyncrl.serve.limits import Limits

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "say it again please"}]}
MESSAGE = {**CHAT, "max_tokens": 500}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ADD = Tool(name="add", description="", parameters=SCHEMA)
SUB = Tool(name="sub", description="", parameters=SCHEMA)
TOOLS = [{"type": "function", "function": {"name": tool.name, "parameters": SCHEMA}} for tool in (ADD, SUB)]
ANTHROPIC_TOOLS = [{"name": tool.name, "input_schema": SCHEMA} for tool in (ADD, SUB)]
NAMED = {"type": "function", "function": {"name": "sub"}}
JSON = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
CALL = '<tool_call>\n{"name": "sub", "arguments": {"a": 1}}\n</tool_call><|end|>'


@pytest.mark.parametrize(
    ("asked", "said", "grammar"),
    [
        ({}, CALL, ""),
        ({"response_format": {"type": "text"}}, "so", ""),
        ({"response_format": {"type": "json_object"}}, '{"b": 2}<|end|>', json_grammar({"type": "object"})),
        ({"response_format": JSON}, '{"a": 1}<|end|>', json_grammar(SCHEMA)),
        ({"tools": TOOLS, "tool_choice": "auto"}, "so", ""),
        ({"tools": TOOLS, "tool_choice": "none", "response_format": JSON}, '{"a": 1}<|end|>', json_grammar(SCHEMA)),
        ({"tools": TOOLS, "tool_choice": "required"}, CALL, calls_grammar([ADD, SUB], several=True)),
        ({"tools": TOOLS, "tool_choice": NAMED}, CALL, calls_grammar([SUB], several=False)),
        (
            {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
            CALL,
            calls_grammar([ADD, SUB], several=False),
        ),
        (
            {"tools": TOOLS, "response_format": JSON},
            '{"a": 1}<|end|>',
            calls_grammar([ADD, SUB], several=True, otherwise=SCHEMA),
        ),
    ],
)
async def test_openai_forms(serve, asked, said, grammar):
    async with serve(lambda prompt: said) as served:
        for stream in (False, True):
            body = {**CHAT, **asked, "stream": stream}
            if stream:
                lines = await served.events("/v1/chat/completions", body)
                assert not any('"error"' in line for line in lines)
            else:
                [choice] = (await served.post("/v1/chat/completions", body))["choices"]
                assert choice["finish_reason"] == ("tool_calls" if said == CALL and "tools" in asked else "stop")
            assert served.engines[0].requests[-1].sampling.grammar == grammar


@pytest.mark.parametrize(
    ("asked", "said", "grammar"),
    [
        ({"tool_choice": {"type": "auto"}}, "so", ""),
        ({"tool_choice": {"type": "any"}}, CALL, calls_grammar([ADD, SUB], several=True)),
        ({"tool_choice": {"type": "tool", "name": "sub"}}, CALL, calls_grammar([SUB], several=False)),
        (
            {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            CALL,
            calls_grammar([ADD, SUB], several=False),
        ),
        (
            {"tool_choice": {"type": "none"}, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            '{"a": 1}<|end|>',
            json_grammar(SCHEMA),
        ),
    ],
)
async def test_anthropic_forms(serve, asked, said, grammar):
    async with serve(lambda prompt: said) as served:
        answer = await served.post("/v1/messages", {**MESSAGE, "tools": ANTHROPIC_TOOLS, **asked})
        assert answer["stop_reason"] == ("tool_use" if said == CALL else "end_turn")
        assert served.engines[0].requests[-1].sampling.grammar == grammar


async def test_an_engine_that_keeps_no_grammar_is_found_out(serve, caplog):
    async with serve(lambda prompt: "no JSON at all<|end|>") as served:
        for asked in ({"response_format": JSON}, {"tools": TOOLS, "tool_choice": "required"}):
            await served.post("/v1/chat/completions", {**CHAT, **asked}, status=503)
        cut = await served.post("/v1/chat/completions", {**CHAT, "response_format": JSON, "max_tokens": 1})
        assert cut["choices"][0]["finish_reason"] == "length"
        assert "did not keep to it" in caplog.text


async def test_wrong_forms(serve):
    async with serve(limits=Limits(grammar_size_bytes=2000)) as served:
        large = {"type": "object", "properties": {"x" * 2000: {}}}
        for wrong in (
            {"response_format": {"type": "yaml"}},
            {"response_format": {"type": "json_schema"}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": large}}},
            {"tool_choice": "required"},
            {"tool_choice": NAMED},
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "mul"}}},
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}},
            {"top_logprobs": 3},
            {"logprobs": True, "top_logprobs": 21},
            {"structured_outputs": {"json": SCHEMA}},
            {"functions": [{"name": "f"}]},
        ):
            assert (await served.post("/v1/chat/completions", {**CHAT, **wrong}, status=400))["error"]["message"]
        for wrong in (
            {"tool_choice": {"type": "any"}},
            {"tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "tool", "name": "mul"}},
            {"thinking": {"type": "enabled", "budget_tokens": 2000}},
        ):
            assert (await served.post("/v1/messages", {**MESSAGE, **wrong}, status=400))["error"]["message"]
        assert served.engines[0].requests == []


async def test_the_likeliest_tokens(serve, text):
    async with serve(lambda prompt: [70, 80]) as served:
        asked = {**CHAT, "logprobs": True, "top_logprobs": 2}
        whole = await served.post("/v1/chat/completions", asked)
        entries = whole["choices"][0]["logprobs"]["content"]
        assert [[each["logprob"] for each in entry["top_logprobs"]] for entry in entries] == [[-0.5, -1.5]] * 2
        assert [each["token"] for each in entries[0]["top_logprobs"]] == [text.spelling(70), text.spelling(71)]
        lines = await served.events("/v1/chat/completions", {**asked, "stream": True})
        chunks = [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]
        streamed = [each for chunk in chunks for choice in chunk["choices"] for each in choice["logprobs"]["content"]]
        assert streamed == entries
        plain = await served.post("/v1/completions", {"model": "tiny", "prompt": [5], "logprobs": 2})
        tops = plain["choices"][0]["logprobs"]["top_logprobs"]
        assert tops[0] == {text.spelling(70): -0.5, text.spelling(71): -1.5}
        tokens = await served.post("/generate", {"prompt_token_ids": [5], "top_log_probs": 1})
        assert tokens["top_log_probs"] == [[[70, -0.5]], [[80, -0.5]]]
        assert "top_log_probs" not in await served.post("/generate", {"prompt_token_ids": [5]})


def test_tokens_are_told_as_their_bytes(text):
    said = "glädly \u2713"
    ids = text.encode(said)
    assert bytes(byte for token in ids for byte in text.spelled_bytes(token)) == said.encode()
    assert "\ufffd" in {text.spelling(token) for token in ids}, "one of them is half a character"
    end = text.renderer.end_of_turn_id
    assert bytes(text.spelled_bytes(end)).decode() == text.spelling(end)
