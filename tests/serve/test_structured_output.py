"""JSON mode, required tool calls and top log-probs: grammars of requests, and checks of answers."""

from __future__ import annotations

import json
import threading

import pytest

from asyncrl.interfaces import SamplingParams, Tool
from asyncrl.serve import chat as chat_module
from asyncrl.serve.chat import Form, calls_grammar, json_grammar
from asyncrl.serve.limits import Limits
from asyncrl.serve.text import Choice, ParsedTurn

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
    ("fields", "reply", "grammar"),
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
async def test_openai_requests_get_their_grammar(serve, fields, reply, grammar):
    async with serve(lambda prompt: reply) as served:
        for stream in (False, True):
            body = {**CHAT, **fields, "stream": stream}
            if stream:
                lines = await served.events("/v1/chat/completions", body)
                assert not any('"error"' in line for line in lines)
            else:
                [choice] = (await served.post("/v1/chat/completions", body))["choices"]
                assert choice["finish_reason"] == ("tool_calls" if reply == CALL and "tools" in fields else "stop")
            assert served.engines[0].requests[-1].sampling.grammar == grammar


@pytest.mark.parametrize(
    ("fields", "reply", "grammar"),
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
async def test_anthropic_requests_get_their_grammar(serve, fields, reply, grammar):
    async with serve(lambda prompt: reply) as served:
        answer = await served.post("/v1/messages", {**MESSAGE, "tools": ANTHROPIC_TOOLS, **fields})
        assert answer["stop_reason"] == ("tool_use" if reply == CALL else "end_turn")
        assert served.engines[0].requests[-1].sampling.grammar == grammar


async def test_an_answer_that_breaks_its_grammar_is_an_error(serve, caplog):
    async with serve(lambda prompt: "no JSON at all<|end|>") as served:
        for fields in ({"response_format": JSON}, {"tools": TOOLS, "tool_choice": "required"}):
            await served.post("/v1/chat/completions", {**CHAT, **fields}, status=503)
        cut = await served.post("/v1/chat/completions", {**CHAT, "response_format": JSON, "max_tokens": 1})
        assert cut["choices"][0]["finish_reason"] == "length"
        assert "did not follow it" in caplog.text


async def test_an_answer_that_a_token_of_the_client_ends_is_no_failure_of_the_engine(serve, tokenizer):
    end = tokenizer.encode('{"a": 1}', add_special_tokens=False)[2]
    async with serve(lambda prompt: '{"a": 1}<|end|>') as served:
        cut = await served.post("/v1/chat/completions", {**CHAT, "response_format": JSON, "stop_token_ids": [end]})
        (choice,) = cut["choices"]
        assert (choice["finish_reason"], choice["message"]["content"][:1]) == ("stop", "{")
        assert "}" not in choice["message"]["content"]


def test_json_deeper_than_python_follows_is_no_failure_of_the_engine(text):
    choice = Choice(text.decode, SamplingParams(max_new_tokens=1), special_ids=frozenset())
    choice.finish_reason = "stop"
    Form(json=True).check(choice, ParsedTurn(message={"role": "assistant", "content": "[" * 200_000}))


async def test_allowed_tools_are_all_that_is_declared(serve):
    async with serve(lambda _: [70]) as served:
        other = {"type": "function", "function": {"name": "other"}}
        choice = {"type": "function", "function": {"name": TOOLS[0]["function"]["name"]}}
        for mode in ("auto", "required"):
            allowed = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [choice]}}
            status = 200 if mode == "auto" else 503  # the scripted engine follows no grammar
            body = {**CHAT, "tools": [*TOOLS, other], "tool_choice": allowed}
            await served.post("/v1/chat/completions", body, status=status)
        await served.post("/v1/chat/completions", {**CHAT, "tools": TOOLS[:1], "tool_choice": "required"}, status=503)
        auto, required, plain = served.engines[0].requests
        assert auto.prompt_token_ids == required.prompt_token_ids == plain.prompt_token_ids
        assert required.sampling.grammar == plain.sampling.grammar
        assert not auto.sampling.grammar


async def test_invalid_formats_and_tool_choices_are_refused(serve):
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
            {
                "tools": TOOLS,
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "x"}}]},
                },
            },
            {"top_logprobs": 3},
            {"logprobs": True, "top_logprobs": 21},
            {"structured_outputs": {"json": "{"}},
            {"structured_outputs": {"json": SCHEMA, "regex": "a"}},
            {"structured_outputs": {"structural_tag": "x"}},
            {"guided_json": "5"},
            {"guided_grammar": "root ::= ("},
            {"guided_json": '{"a": ' + "[" * 900 + "]" * 900 + "}"},
            {"guided_json": "[" * 100_000},
            {"regex": "a", "tools": TOOLS},
            {"regex": "a", "tools": TOOLS, "tool_choice": "required"},
            {"guided_choice": ["a"], "tools": TOOLS, "tool_choice": NAMED},
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


async def test_top_log_probs(serve, text):
    async with serve(lambda prompt: [70, 80]) as served:
        body = {**CHAT, "logprobs": True, "top_logprobs": 2}
        whole = await served.post("/v1/chat/completions", body)
        entries = whole["choices"][0]["logprobs"]["content"]
        assert [[each["logprob"] for each in entry["top_logprobs"]] for entry in entries] == [[-0.5, -1.5]] * 2
        assert [each["token"] for each in entries[0]["top_logprobs"]] == [text.spelling(70), text.spelling(71)]
        lines = await served.events("/v1/chat/completions", {**body, "stream": True})
        chunks = [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]
        streamed = [each for chunk in chunks for choice in chunk["choices"] for each in choice["logprobs"]["content"]]
        assert streamed == entries
        plain = await served.post("/v1/completions", {"model": "tiny", "prompt": [5], "logprobs": 2})
        tops = plain["choices"][0]["logprobs"]["top_logprobs"]
        assert tops[0] == {text.spelling(70): -0.5, text.spelling(71): -1.5}
        tokens = await served.post("/generate", {"prompt_token_ids": [5], "top_log_probs": 1})
        assert tokens["top_log_probs"] == [[[70, -0.5]], [[80, -0.5]]]
        assert "top_log_probs" not in await served.post("/generate", {"prompt_token_ids": [5]})


async def test_completions_echo_and_score_their_prompt(serve, text):
    """As lm-eval's ``local-completions`` asks: token ids, echo, and one token or none after them."""
    prompt = [70, 71, 90]
    body = {"model": "tiny", "prompt": prompt, "echo": True, "logprobs": 1, "temperature": 0, "seed": 1}
    async with serve(lambda prompt: [80, 81]) as served:
        for max_tokens in (0, 1):
            (choice,) = (await served.post("/v1/completions", {**body, "max_tokens": max_tokens}))["choices"]
            ids = prompt + [80] * max_tokens
            found = choice["logprobs"]
            assert choice["text"] == text.decode(ids)
            assert found["tokens"] == [text.spelling(token) for token in ids]
            assert found["token_logprobs"] == [None, -0.5, -0.5, *[-0.5] * max_tokens]
            assert found["top_logprobs"][0] is None
            assert [max(top, key=top.get) for top in found["top_logprobs"][1:]] == found["tokens"][1:]
            assert choice["finish_reason"] == "length"
        (choice,) = (await served.post("/v1/completions", {**body, "echo": False, "prompt_logprobs": 2}))["choices"]
        assert choice["text"] == text.decode([80, 81])
        first, second, _ = choice["prompt_logprobs"]
        assert first is None
        assert second["71"]["logprob"] == -0.5
        tokens = await served.post("/generate", {"prompt_token_ids": prompt, "prompt_log_probs": 0})
        assert tokens["prompt_log_probs"] == [0.0, -0.5, -0.5]
        assert "prompt_log_probs" not in await served.post("/generate", {"prompt_token_ids": prompt})


def test_bytes_of_tokens(text):
    spelled = "glädly \u2713"
    ids = text.encode(spelled)
    assert bytes(byte for token in ids for byte in text.spelled_bytes(token)) == spelled.encode()
    assert "\ufffd" in {text.spelling(token) for token in ids}, "one of them is half a character"
    end = text.renderer.end_of_turn_id
    assert bytes(text.spelled_bytes(end)).decode() == text.spelling(end)
    assert (text.spelled_bytes(text.vocabulary + 1), text.piece(text.vocabulary + 1)) == ([], "")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {**CHAT, "tool_choice": "required"}),
        ("/v1/responses", {"model": "tiny", "input": "say it", "tool_choice": "required"}),
        ("/v1/messages", {**MESSAGE, "tool_choice": {"type": "any"}}),
        ("/v1/completions", {"model": "tiny", "prompt": "say it"}),
    ],
)
async def test_a_large_grammar_is_made_beside_the_event_loop(serve, monkeypatch, path, fields):
    large = {"type": "object", "description": "x" * 70_000}
    if path == "/v1/completions":
        fields = {**fields, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": large}}}
    else:
        chat = {"type": "function", "function": {"name": "f", "parameters": large}}
        other = {"/v1/messages": {"name": "f", "input_schema": large}}
        other["/v1/responses"] = {"type": "function", "name": "f", "parameters": large}
        fields = {**fields, "tools": [other.get(path, chat)]}
    threads, make = [], chat_module._json
    monkeypatch.setattr(chat_module, "_json", lambda schema: threads.append(threading.get_ident()) or make(schema))
    async with serve() as served:
        error = await served.post(path, fields, status=400)
        assert "have more than 65536 bytes" in json.dumps(error)
    assert threads
    assert threading.get_ident() not in threads
