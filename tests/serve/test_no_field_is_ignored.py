"""Every field of every request does something: it reaches the engine, changes the answer, or is refused by name.

Fields that are declared as :data:`asyncrl.serve.limits.Ignored` are those that documentation calls harmless.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from msgspec import Struct

from asyncrl.serve.anthropic import MessagesRequest
from asyncrl.serve.native import GenerateRequest
from asyncrl.serve.openai import ChatCompletionRequest, ChatTokensRequest, CompletionRequest
from asyncrl.serve.responses import ResponsesRequest
from asyncrl.serve.routes import ROUTES
from asyncrl.serve.sglang import GenerateBody, SGLangSampling
from asyncrl.serve.vllm import TokensRequest, VLLMSampling

ASK = [{"role": "user", "content": "say it again please"}]
CHAT = {"model": "tiny", "messages": ASK}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "add", "parameters": SCHEMA}
TOOLS = {"tools": [{"type": "function", "function": FUNCTION}]}
RESPONSES_TOOLS = {"tools": [{"type": "function", **FUNCTION}]}
MESSAGES_TOOLS = {"tools": [{"name": "add", "input_schema": SCHEMA}]}
REPLY = 'it <|user|>again<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|end|>'

BODIES: dict[str, tuple[type[Struct], dict[str, Any], str]] = {
    "chat": (ChatCompletionRequest, CHAT, "/v1/chat/completions"),
    "tokens": (ChatTokensRequest, {**CHAT, "tokens": [70, 71, 72]}, "/v1/chat/completions/tokens"),
    "completions": (CompletionRequest, {"model": "tiny", "prompt": "say it again"}, "/v1/completions"),
    "responses": (ResponsesRequest, {"model": "tiny", "input": "say it again"}, "/v1/responses"),
    "messages": (MessagesRequest, {**CHAT, "max_tokens": 99}, "/v1/messages"),
    "generate": (GenerateRequest, {"prompt_token_ids": [70, 71]}, "/generate"),
    "sglang": (GenerateBody, {"input_ids": [70, 71]}, "/generate"),
    "vllm": (TokensRequest, {"token_ids": [70, 71], "sampling_params": {}}, "/inference/v1/generate"),
}
NESTED = {"sglang": SGLangSampling, "vllm": VLLMSampling}
FORM = {"format": {"type": "json_schema", "schema": SCHEMA}}

# A value with an effect, and the fields that it needs besides.
VALUES: dict[str, tuple[Any, dict[str, Any]]] = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens"), (2, {})),
    **dict.fromkeys(("min_tokens", "min_new_tokens", "n", "top_k", "best_of", "top_logprobs_num"), (2, {})),
    **dict.fromkeys(("temperature", "top_p", "min_p", "typical_p", "length_penalty"), (0.5, {})),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), (0.5, {})),
    **dict.fromkeys(("seed", "sampling_seed", "prompt_logprobs", "prompt_log_probs", "top_log_probs"), (1, {})),
    **dict.fromkeys(("ignore_eos", "return_token_ids", "use_beam_search", "echo", "background"), (True, {})),
    "return_logprob": (True, {}),
    "no_stop_trim": (True, {"stop": ["again"]}),
    **dict.fromkeys(("functions", "function_call", "audio", "prediction", "conversation"), ({}, {})),
    **dict.fromkeys(("guided_json", "json_schema"), (json.dumps(SCHEMA), {})),
    **dict.fromkeys(("regex", "guided_regex"), ("it", {})),
    **dict.fromkeys(("ebnf", "guided_grammar"), ('root ::= "it"', {})),
    **dict.fromkeys(("stop", "stop_sequences", "bad_words"), (["again"], {})),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids"), ([71], {})),
    **dict.fromkeys(("suffix", "rid", "previous_response_id", "instructions", "system"), ("once", {})),
    **dict.fromkeys(("stream",), (True, {})),
    "stream_interval": (2, {"stream": True}),
    "logit_bias": ({"71": 5}, {}),
    "spaces_between_special_tokens": (False, {}),
    "include_stop_str_in_output": (True, {"stop": ["again"]}),
    "skip_special_tokens": (True, {}),
    "truncate_prompt_tokens": (1, {}),
    "response_format": ({"type": "json_object"}, {}),
    "structured_outputs": ({"choice": ["it"]}, {}),
    "guided_choice": (["it"], {}),
    "grammar": ("start: /it/", {}),
    "stream_options": ({"include_usage": True}, {"stream": True}),
    "logprobs": (True, {}),
    "top_logprobs": (2, {"logprobs": True}),
    "tools": (TOOLS["tools"], {}),
    "tool_choice": ("required", TOOLS),
    "parallel_tool_calls": (False, {**TOOLS, "tool_choice": "required"}),
    "chat_template_kwargs": ({"tokenize": False}, {}),  # no variable of a template
    "add_generation_prompt": (False, {}),
    "continue_final_message": (True, {"messages": [*ASK, {"role": "assistant", "content": "it"}]}),
    "modalities": (["audio"], {}),
    "output_mode": ("text", {}),
    "logprob_start_len": (0, {"return_logprob": True}),
    "return_text_in_logprobs": (True, {"return_logprob": True}),
    "text": (FORM, {}),
    "reasoning": ({"effort": "low"}, {}),
    "include": (["message.output_text.logprobs"], {}),
    "store": (False, {}),
    "truncation": ("auto", {}),
    "prompt": ({"id": "p"}, {}),
    "metadata": ({"a": "b"}, {}),
    "thinking": ({"type": "enabled", "budget_tokens": 9}, {}),
    "verbosity": ("low", {}),
    "reasoning_effort": ("low", {}),
    "context_management": ({"edits": [{"type": "clear_tool_uses_20250919"}]}, {}),
    "output_config": (FORM, {}),
    "output_format": (FORM["format"], {}),
    "sampling_params": ({"temperature": 0.5}, {}),
    "model": ("another", {}),
}
OWN: dict[tuple[str, str], tuple[Any, dict[str, Any]]] = {
    ("completions", "logprobs"): (1, {}),
    ("completions", "skip_special_tokens"): (False, {}),
    ("sglang", "skip_special_tokens"): (False, {}),
    ("vllm", "logprobs"): (1, {}),
    ("responses", "tools"): (RESPONSES_TOOLS["tools"], {}),
    ("responses", "tool_choice"): ("required", RESPONSES_TOOLS),
    ("responses", "parallel_tool_calls"): (False, {**RESPONSES_TOOLS, "tool_choice": "required"}),
    ("responses", "top_logprobs"): (2, {"include": ["message.output_text.logprobs"]}),
    ("messages", "tools"): (MESSAGES_TOOLS["tools"], {}),
    ("messages", "tool_choice"): ({"type": "any"}, MESSAGES_TOOLS),
    ("sglang", "top_logprobs_num"): (2, {"return_logprob": True}),
    ("sglang", "prompt_token_ids"): ([70], {}),
}
UNCHANGED = {  # why nothing changes
    ("tokens", "chat_template_kwargs"): "the messages are not rendered",
    ("tokens", "add_generation_prompt"): "the messages are not rendered",
}


def fields() -> list[Any]:
    """Return every field but those that bodies have by themselves, and those declared as without effect."""
    found = []
    for route, (kind, body, _) in BODIES.items():
        for owner in (kind, *([NESTED[route]] if route in NESTED else [])):
            notes = {
                name: note for each in owner.__mro__ for name, note in vars(each).get("__annotations__", {}).items()
            }
            found += [
                pytest.param(route, name, owner is not kind, id=f"{route}-{name}")
                for name in owner.__struct_fields__
                if notes[name] != "Ignored"
                and (name not in body or owner is not kind or name in ("model", "max_tokens"))
            ]
    return found


def nested(route: str, body: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return ``body`` with ``more`` in its sampling parameters, as far as they belong there."""
    inner = {name: value for name, value in more.items() if name in NESTED[route].__struct_fields__}
    outer = {name: value for name, value in more.items() if name not in inner}
    return {**body, **outer, "sampling_params": {**body.get("sampling_params", {}), **inner}}


def test_every_body_refuses_fields_that_it_does_not_have():
    taken = {route.path: route.request for route in ROUTES if route.request is not None}
    assert {"/abort", "/replicas", "/sessions/{session}/reward", "/v1/messages"} <= taken.keys()
    assert [path for path, kind in taken.items() if not kind.__struct_config__.forbid_unknown_fields] == []


@pytest.mark.parametrize(("route", "name", "inner"), fields())
async def test_a_field_has_an_effect(serve, route, name, inner):
    kind, body, path = BODIES[route]
    value, needed = OWN.get((route, name)) or VALUES.get(name, (None, {}))
    assert value is not None, f"{kind.__name__}.{name} has no value here: say what it changes, or declare it as Ignored"
    async with serve(lambda prompt: REPLY) as served:

        async def effect(more: dict[str, Any]) -> tuple[int, str, Any]:
            begin = len(served.engines[0].requests)
            sent = nested(route, body, more) if inner else {**body, **more}
            async with served.client.post(served.url + path, json=sent) as answer:
                text = re.sub(r"[0-9a-f]{6,}|\d{10}", "-", await answer.text())
            asked = [(each.prompt_token_ids, each.sampling) for each in served.engines[0].requests[begin:]]
            return answer.status, text, asked

        without, with_field = await effect(needed), await effect({**needed, name: value})
        assert without[0] == 200, without[1]
        assert with_field[0] != 500, with_field[1]  # 503: the script does not keep to a grammar
        assert (without == with_field) == ((route, name) in UNCHANGED)
        if with_field[0] == 400:
            named = {name, *(value if isinstance(value, dict) else [str(value)])}
            assert any(each in with_field[1] for each in named), with_field[1]
