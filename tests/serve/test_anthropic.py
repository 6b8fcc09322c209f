"""Anthropic's API over a scripted engine."""

from __future__ import annotations

import asyncio
import json

import pytest

BODY = {"model": "tiny", "max_tokens": 500, "messages": [{"role": "user", "content": "say it again please"}]}
CALL = 'sum:<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|end|>'
TOOLS = [{"name": "add", "description": "adds", "input_schema": {"type": "object", "properties": {}}}]


def events(lines):
    named = [line[7:] for line in lines if line.startswith("event: ")]
    contents = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert named == [content["type"] for content in contents]
    return contents


async def test_a_message(serve, text):
    async with serve(lambda prompt: "it again<|end|>") as served:
        answer = await served.post("/v1/messages", {**BODY, "system": [{"type": "text", "text": "be short"}]})
        assert answer["content"] == [{"type": "text", "text": "it again"}]
        assert (answer["type"], answer["role"], answer["stop_reason"]) == ("message", "assistant", "end_turn")
        messages = [{"role": "system", "content": "be short"}, *BODY["messages"]]
        assert list(served.engines[0].requests[0].prompt_token_ids) == text.renderer.prompt(messages)
        assert answer["usage"]["input_tokens"] == len(text.renderer.prompt(messages))
        counted = await served.post(
            "/v1/messages/count_tokens", {"model": "tiny", "system": "be short", "messages": BODY["messages"]}
        )
        assert counted == {"input_tokens": answer["usage"]["input_tokens"]}


async def test_tool_calls_and_results_in_a_session(serve):
    async with serve(lambda prompt: CALL) as served:
        body = {**BODY, "tools": TOOLS}
        answer = await served.post("/sessions/s/v1/messages", body)
        assert answer["stop_reason"] == "tool_use"
        text, use = answer["content"]
        assert text == {"type": "text", "text": "sum:"}
        assert (use["name"], use["input"]) == ("add", {"a": 1})
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "3"}
        body["messages"] = [
            *BODY["messages"],
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
        ]
        await served.post("/sessions/s/v1/messages", body)
        assert (await served.get("/sessions/s"))["branches"] == 1
        first, second = served.engines[0].requests
        assert second.prompt_token_ids[: len(first.prompt_token_ids)] == first.prompt_token_ids


async def test_counting_tokens_uses_a_session_and_creates_none(serve):
    async with serve(lambda prompt: "it again<|end|>") as served:
        count = {"model": "tiny", "messages": BODY["messages"]}
        alone = await served.post("/sessions/s/v1/messages/count_tokens", count)
        assert alone == await served.post("/v1/messages/count_tokens", count, headers={"X-Session-ID": "s"})
        await served.get("/sessions/s", status=404)
        answer = await served.post("/sessions/s/v1/messages", BODY)
        assert answer["usage"]["input_tokens"] == alone["input_tokens"]
        count["messages"] = [
            *BODY["messages"],
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": "again"},
        ]
        counted = await served.post("/sessions/s/v1/messages/count_tokens", count)
        answer = await served.post("/sessions/s/v1/messages", {**BODY, "messages": count["messages"]})
        assert answer["usage"]["input_tokens"] == counted["input_tokens"]


async def test_an_aborted_turn_has_the_stop_reason_pause_turn(serve):
    async with serve(lambda prompt: [7] * 200, token_s=0.01) as served:
        for stream in (False, True):
            body, headers = {**BODY, "stream": stream}, {"X-Request-ID": "aborted"}

            async def request(body=body, headers=headers):
                async with served.client.post(f"{served.url}/v1/messages", json=body, headers=headers) as answer:
                    return answer.status, await answer.text()

            running = asyncio.create_task(request())
            while not (await served.control("POST", "/abort", {"request_id": "aborted"}))["aborted"]:
                await asyncio.sleep(0.05)
            status, text = await running
            assert status == 200
            assert '"stop_reason":"pause_turn"' in text


async def test_a_stream(serve):
    async with serve(lambda prompt: CALL) as served:
        content = events(await served.events("/v1/messages", {**BODY, "tools": TOOLS, "stream": True}))
        assert [event["type"] for event in content if not event["type"].endswith("delta")] == [
            "message_start",
            "content_block_start",
            "content_block_stop",
            "content_block_start",
            "content_block_stop",
            "message_stop",
        ]
        deltas = [event["delta"] for event in content if event["type"] == "content_block_delta"]
        assert "".join(delta.get("text", "") for delta in deltas) == "sum:"
        assert json.loads("".join(delta.get("partial_json", "") for delta in deltas)) == {"a": 1}
        [end] = [event for event in content if event["type"] == "message_delta"]
        assert end["delta"]["stop_reason"] == "tool_use"
        assert end["usage"]["output_tokens"] > 0


async def test_stop_sequences_and_errors(serve):
    async with serve(lambda prompt: "it again, gladly") as served:
        answer = await served.post("/v1/messages", {**BODY, "stop_sequences": ["again"]})
        assert answer["content"] == [{"type": "text", "text": "it "}]
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "again")
        refused = await served.post("/v1/messages", {**BODY, "model": "other"}, status=404)
        assert refused["type"] == "error"
        assert refused["error"]["type"] == "not_found_error"
        assert refused["request_id"]
        image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
        await served.post("/v1/messages", {**BODY, "messages": [{"role": "user", "content": [image]}]}, status=400)


async def test_a_system_message_may_stand_between_others(serve, text):
    async with serve(lambda prompt: "it again<|end|>") as served:
        between = [*BODY["messages"], {"role": "system", "content": "be short"}, {"role": "user", "content": "again"}]
        await served.post("/v1/messages", {**BODY, "messages": between})
        assert list(served.engines[0].requests[0].prompt_token_ids) == text.renderer.prompt(between)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [{**TOOLS[0], "defer_loading": True}]}, "defer_loading"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "it", "lang": "de"}]}]}, "lang"),
        ({"thinking": {"type": "disabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
    ],
)
async def test_fields_within_fields_are_refused_by_name(serve, fields, named):
    async with serve() as served:
        refused = await served.post("/v1/messages", {**BODY, **fields}, status=400)
        assert f"{named} is not served" in refused["error"]["message"]


async def test_an_effort_is_a_variable_of_the_template_and_refused_without_it(serve, monkeypatch):
    effort = {**BODY, "output_config": {"effort": "max"}}
    async with serve(lambda prompt: "it again<|end|>") as served:
        refused = await served.post("/v1/messages", effort, status=400)
        assert "output_config.effort = max is not served: the model's chat template" in refused["error"]["message"]
        tokenizer = served.state.text.renderer.tokenizer
        monkeypatch.setattr(
            tokenizer, "chat_template", "{{ reasoning_effort | default('') }}" + tokenizer.chat_template
        )
        await served.post("/v1/messages", effort)
        assert tokenizer.decode(served.engines[0].requests[0].prompt_token_ids).startswith("max")


async def test_marks_of_a_cache_and_signatures_are_accepted(serve):
    mark = {"cache_control": {"type": "ephemeral"}}
    said = [{"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "it", "citations": None}]
    asked = [{"type": "text", "text": "say it", **mark}]
    history = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}, *BODY["messages"]]
    async with serve(lambda prompt: "it again<|end|>") as served:
        tools = [{**TOOLS[0], "type": "custom", **mark}]
        await served.post("/v1/messages", {**BODY, "messages": history, "tools": tools})
