"""OpenAI's Responses API over a scripted engine."""

from __future__ import annotations

import json
import threading

import pytest

from asyncrl.errors import EngineError
from asyncrl.rollout.chat import ChatRenderer
from asyncrl.serve.conversations import Conversations
from asyncrl.serve.errors import APIError
from asyncrl.serve.limits import Limits

BODY = {"model": "tiny", "input": "say it again please"}
QUESTION = {"role": "user", "content": "say it again please"}
TOOLS = [{"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": True}]
CALL = 'sum:<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|end|>'


def prompts(served):
    return [list(request.prompt_token_ids) for request in served.engines[0].requests]


def events(lines):
    named = [line[7:] for line in lines if line.startswith("event: ")]
    contents = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert named == [content["type"] for content in contents]
    assert [content["sequence_number"] for content in contents] == list(range(len(contents)))
    return contents


async def test_a_response_has_the_answer_and_the_settings(serve, text):
    async with serve(lambda prompt: "it again<|end|>") as served:
        more = {"instructions": "be short", "metadata": {"a": "b"}, "temperature": 0.5, "return_token_ids": True}
        include = {"include": ["message.output_text.logprobs", "reasoning.encrypted_content"], "top_logprobs": 2}
        answer = await served.post("/v1/responses", {**BODY, **more, **include})
        assert prompts(served) == [text.renderer.prompt([{"role": "system", "content": "be short"}, QUESTION])]
        (message,) = answer["output"]
        (part,) = message["content"]
        assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "completed")
        assert (part["type"], part["text"], part["annotations"]) == ("output_text", "it again", [])
        assert [len(entry["top_logprobs"]) for entry in part["logprobs"]] == [2] * len(answer["token_ids"])
        assert answer["weight_versions"] == [{"version": 0, "start": 0, "end": len(answer["token_ids"])}]
        assert answer["prompt_token_ids"] == prompts(served)[0]
        used = len(answer["prompt_token_ids"]), len(answer["token_ids"])
        assert (answer["usage"]["input_tokens"], answer["usage"]["output_tokens"]) == used
        assert answer["usage"]["total_tokens"] == sum(used)
        told = {"object": "response", "status": "completed", "instructions": "be short", "metadata": {"a": "b"}}
        told |= {"temperature": 0.5, "top_p": 1.0, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
        told |= {"error": None, "incomplete_details": None, "store": True, "truncation": "disabled"}
        assert {name: answer[name] for name in told} == told
        assert answer["text"]["format"]["type"] == "text"
        short = await served.post("/v1/responses", {**BODY, "max_output_tokens": 1})
        assert (short["status"], short["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert short["output"][0]["status"] == "incomplete"


async def test_items_become_messages(serve, text):
    """The assistant's items in a row are one message; reasoning is left out; outputs get the name of their call."""
    async with serve(lambda prompt: "it again<|end|>") as served:
        items = [
            {"role": "developer", "content": "be short"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "add"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "id": "m", "content": [{"type": "output_text", "text": "sum:"}]},
            {"type": "function_call", "id": "f", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}", "status": "completed"},
            {"type": "function_call_output", "call_id": "c1", "output": "3"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "4"}]},
        ]
        await served.post("/v1/responses", {**BODY, "input": items, "instructions": "be kind"})
        calls = [
            {"id": key, "type": "function", "function": {"name": "add", "arguments": arguments}}
            for key, arguments in (("c1", {"a": 1}), ("c2", {}))
        ]
        messages = [
            {"role": "system", "content": "be kind\n\nbe short"},
            {"role": "user", "content": "add"},
            {"role": "assistant", "content": "sum:", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "3"},
            {"role": "tool", "tool_call_id": "c2", "name": "add", "content": "4"},
        ]
        assert prompts(served) == [text.renderer.prompt(messages)]
        lost = [QUESTION, {"type": "function_call_output", "call_id": "c9", "output": "3"}]
        error = (await served.post("/v1/responses", {**BODY, "input": lost}, status=400))["error"]
        assert "input[1]: no function call before it has the call_id 'c9'" in error["message"]
        for wrong in ([{"content": "x"}], [{"type": "function_call", "call_id": "c"}], items[2:3], []):
            await served.post("/v1/responses", {**BODY, "input": wrong}, status=400)


async def test_a_conversation_is_continued_by_the_id_of_its_last_response(serve):
    """Its prompts equal those of the whole conversation; in a session they are one branch."""
    async with serve(lambda prompt: CALL) as served:
        body = {**BODY, "tools": TOOLS}
        first = await served.post("/sessions/s/v1/responses", {**body, "instructions": "be short"})
        message, called = first["output"]
        assert [item["type"] for item in first["output"]] == ["message", "function_call"]
        assert (called["name"], called["arguments"]) == ("add", '{"a": 1}')
        result = {"type": "function_call_output", "call_id": called["call_id"], "output": "3"}
        more = {**body, "instructions": "be short", "input": [result]}
        second = await served.post("/sessions/s/v1/responses", {**more, "previous_response_id": first["id"]})
        assert second["previous_response_id"] == first["id"]
        whole = {**body, "instructions": "be short", "input": [QUESTION, message, called, result], "store": False}
        third = await served.post("/sessions/s/v1/responses", whole)
        one, two, three = prompts(served)
        assert two == three
        assert two[: len(one)] == one
        status = await served.get("/sessions/s")
        assert (status["turns"], status["branches"]) == (3, 2)  # the last two are answers to one prompt
        for unknown in (third["id"], "resp_0"):
            again = {**body, "previous_response_id": unknown}
            error = (await served.post("/v1/responses", again, status=400))["error"]
            assert error["code"] == "previous_response_not_found"


async def test_the_id_of_a_response_cannot_be_guessed(serve):
    """A response is found by it, and clients choose the id of their request: neither another's, nor twice the same."""
    async with serve(lambda prompt: "it again<|end|>") as served:
        headers = {"X-Request-ID": "mine"}
        first, second = [await served.post("/v1/responses", BODY, headers=headers) for _ in range(2)]
        assert first["id"] != second["id"]
        assert all("mine" not in each["id"] and len(each["id"]) >= 32 for each in (first, second))
        for each in (first, second):  # the second did not take the place of the first
            await served.post("/v1/responses", {**BODY, "previous_response_id": each["id"]})


async def test_a_short_request_after_a_long_conversation_is_rendered_in_a_thread(serve, monkeypatch):
    on_the_loop = []
    prompt = ChatRenderer.prompt

    def watched(*arguments, **options):
        on_the_loop.append(threading.current_thread() is threading.main_thread())
        return prompt(*arguments, **options)

    monkeypatch.setattr(ChatRenderer, "prompt", watched)
    async with serve(lambda prompt: "it again<|end|>") as served:
        short = await served.post("/v1/responses", BODY)
        await served.post("/v1/responses", {**BODY, "previous_response_id": short["id"]})
        long = await served.post("/v1/responses", {**BODY, "input": "it again " * 3000})
        await served.post("/v1/responses", {**BODY, "previous_response_id": long["id"]})
    assert on_the_loop == [True, True, False, False]


def test_conversations_are_kept_by_holder_up_to_the_limits():
    def said(content):
        return b'[{"role": "user", "content": "%s"}]' % content.encode()

    kept = Conversations(Limits(conversations_per_key=2, conversation_bytes_per_key=100))
    for number in range(2):
        kept.add("alice", f"r{number}", said("x"))
    assert kept.find("alice", "r0") == said("x")
    kept.add("alice", "r2", said("x"))  # r1 was not used for longest
    assert [kept.find("alice", name) for name in ("r0", "r2")] == [said("x")] * 2
    for holder, name in (("alice", "r1"), ("bob", "r2")):
        with pytest.raises(APIError, match="is kept"):
            kept.find(holder, name)
    kept.add("alice", "r3", said("x" * 60))
    with pytest.raises(APIError):
        kept.find("alice", "r0")
    kept.add("alice", "r4", said("x" * 100))  # too large: nothing is kept
    for number in range(5):
        with pytest.raises(APIError):
            kept.find("alice", f"r{number}")
    kept.add("alice", "r5", said("x"))
    assert kept.find("alice", "r5") == said("x")


@pytest.mark.parametrize("reply", ["it again, glädly \u2713<|end|>", CALL, "<|end|>", CALL.removeprefix("sum:"), "cut"])
async def test_a_stream_equals_the_whole_answer(serve, reply):
    async with serve(lambda prompt: reply) as served:
        body = {**BODY, "tools": TOOLS, "include": ["message.output_text.logprobs"]}
        whole = await served.post("/v1/responses", body)
        parts = events(await served.events("/v1/responses", {**body, "stream": True}))
        last = parts[-1]["response"]
        assert parts[-1]["type"] == f"response.{whole['status']}"
        assert {part["response"]["id"] for part in parts if "response" in part} == {last["id"]}
        assert [part["type"] for part in parts[:2]] == ["response.created", "response.in_progress"]
        assert (parts[0]["response"]["status"], parts[0]["response"]["output"]) == ("in_progress", [])
        names = {name: f"<{name}>" for name in ("id", "call_id", "created_at")}

        def plain(value):
            if isinstance(value, dict):
                return {key: names.get(key, plain(each)) for key, each in value.items()}
            return [plain(each) for each in value] if isinstance(value, list) else value

        assert plain(last) == plain(whole)

        def of(kind):
            return [part for part in parts if part["type"] == f"response.{kind}"]

        for at, item in enumerate(last["output"]):
            place = {"output_index": at, "item_id": item["id"]}
            assert [part["item"]["id"] for part in of("output_item.added")][at] == item["id"]
            assert of("output_item.done")[at]["item"] == item
            if item["type"] == "message":
                (content,) = item["content"]
                assert "".join(part["delta"] for part in of("output_text.delta")) == content["text"]
                assert of("output_text.done")[0]["text"] == content["text"]
                assert of("content_part.done")[0]["part"] == content
                assert of("content_part.added")[0].items() >= {"content_index": 0, **place}.items()
                shown = [entry for part in of("output_text.delta") for entry in part["logprobs"]]
                assert shown == content["logprobs"][: len(shown)]
            else:
                (done,) = of("function_call_arguments.done")
                assert done.items() >= {"name": "add", "arguments": item["arguments"], **place}.items()
                assert "".join(part["delta"] for part in of("function_call_arguments.delta")) == item["arguments"]


async def test_a_stream_that_fails_ends_with_an_error_event(serve):
    async with serve(lambda prompt: "it again") as served:

        async def failing(request):
            async for chunk in generate(request):
                yield chunk
                raise EngineError("broken")

        generate, served.state.pool.generate = served.state.pool.generate, lambda request, **_: failing(request)
        last = events(await served.events("/v1/responses", {**BODY, "stream": True}))[-1]
        assert last["type"] == "error"
        assert last["message"] == last["error"]["message"]


async def test_text_formats_and_tool_choices_restrict_what_is_sampled(serve):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    two = [*TOOLS, {"type": "function", "name": "sub"}]
    async with serve(lambda prompt: '{"a": 1}<|end|>') as served:
        form = {"type": "json_schema", "name": "s", "schema": schema, "strict": True}
        answer = await served.post("/v1/responses", {**BODY, "text": {"format": form, "verbosity": "medium"}})
        assert answer["text"]["format"] == {**form, "description": None}
        await served.post("/v1/responses", {**BODY, "text": {"format": {"type": "json_object"}}})
        grammars = [request.sampling.grammar for request in served.engines[0].requests]
        assert '"integer"' in grammars[0]
        assert "%json" in grammars[1]
        await served.post("/v1/responses", {**BODY, "text": {"format": {"type": "json_schema"}}}, status=400)
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}
    async with serve(lambda prompt: CALL.removeprefix("sum:")) as served:
        for choice in ("required", {"type": "function", "name": "add"}, allowed):
            answer = await served.post("/v1/responses", {**BODY, "tools": two, "tool_choice": choice})
            assert [item["type"] for item in answer["output"]] == ["function_call"]
            assert answer["tool_choice"] == choice
        every, named, only = (request.sampling.grammar for request in served.engines[0].requests)
        assert "sub" in every
        assert "sub" not in named + only
        for choice in (
            {"type": "function", "name": "div"},
            {**allowed, "tools": [{"type": "function", "name": "div"}]},
        ):
            await served.post("/v1/responses", {**BODY, "tools": two, "tool_choice": choice}, status=400)
        await served.post("/v1/responses", {**BODY, "tool_choice": "required"}, status=400)
        await served.post("/v1/responses", {**BODY, "tools": two, "tool_choice": "none"})
        assert served.engines[0].requests[-1].sampling.grammar == ""


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"conversation": "c"}, "conversation"),
        ({"nonsense": 1}, "nonsense"),
        ({"text": {"verbosity": "least"}}, "verbosity"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"tools": [{"type": "function", "name": "f", "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input_image"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"previous_response_id": "resp_0"}, "resp_0"),
    ],
)
async def test_what_would_change_the_answer_is_refused_by_name(serve, fields, said):
    async with serve(lambda prompt: "it again<|end|>") as served:
        error = (await served.post("/v1/responses", {**BODY, **fields}, status=400))["error"]
        assert said in error["message"]


async def test_fields_without_an_effect_are_taken_and_others_reach_the_engine(serve, monkeypatch):
    async with serve(lambda prompt: "it again<|end|>") as served:
        ignored = {"user": "u", "service_tier": "auto", "prompt_cache_key": "k", "background": False}
        ignored |= {
            "reasoning": {"effort": "none", "summary": "auto"},
            "stream_options": {"include_obfuscation": False},
        }
        ignored |= {"text": None, "tools": None, "include": None, "client_metadata": {"id": "1"}}
        sampled = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 3, "stop": "x", "min_p": 0.1}
        await served.post("/v1/responses", {**BODY, **ignored, **sampled})
        sampling = served.engines[0].requests[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 5, 3)
        assert (sampling.stop, sampling.min_p) == (("x",), 0.1)
        tokenizer = served.state.text.renderer.tokenizer
        template = "{{ reasoning_effort | default('') }}" + tokenizer.chat_template
        monkeypatch.setattr(tokenizer, "chat_template", template)
        await served.post("/v1/responses", {**BODY, "reasoning": {"effort": "high"}})
        assert tokenizer.decode(prompts(served)[-1]).startswith("high")
        short = {**BODY, "text": {"verbosity": "low"}}
        await served.post("/v1/responses", short)  # openai-agents sends it with its default model
        monkeypatch.setattr(tokenizer, "chat_template", "{{ verbosity | default('') }}" + tokenizer.chat_template)
        await served.post("/v1/responses", short)
        assert tokenizer.decode(prompts(served)[-1]).startswith("low")
