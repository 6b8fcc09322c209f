"""OpenAI's dialect over a script."""

from __future__ import annotations

import json

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "say it again please"}]}


def datas(lines):
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ") and line != "data: [DONE]"]


async def test_a_chat(serve, text):
    async with serve(lambda prompt: "it again<|end|>") as served:
        answer = await served.post("/v1/chat/completions", {**CHAT, "return_token_ids": True, "logprobs": True})
        [choice] = answer["choices"]
        assert choice["message"]["content"] == "it again"
        assert choice["finish_reason"] == "stop"
        assert text.renderer.decode(choice["token_ids"]) == "it again<|end|>"
        assert choice["weight_versions"] == [{"version": 0, "start": 0, "end": len(choice["token_ids"])}]
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-0.5] * len(choice["token_ids"])
        assert answer["prompt_token_ids"] == text.renderer.prompt(CHAT["messages"])
        assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])
        assert answer["object"] == "chat.completion"


async def test_a_stream_says_the_same_as_a_whole_answer(serve):
    async with serve(lambda prompt: "it again, glädly \u2713<|end|>") as served:
        lines = await served.events(
            "/v1/chat/completions", {**CHAT, "stream": True, "n": 2, "stream_options": {"include_usage": True}}
        )
        assert lines[-1] == "data: [DONE]"
        chunks = datas(lines)
        for number in (0, 1):
            mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == number]
            assert mine[0]["delta"]["role"] == "assistant"
            assert "".join(choice["delta"].get("content", "") for choice in mine) == "it again, glädly \u2713"
            assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["stop"]
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["total_tokens"] > 0


async def test_stop_strings_are_cut_off_and_length_is_told(serve):
    async with serve(lambda prompt: "it again, gladly") as served:
        answer = await served.post("/v1/chat/completions", {**CHAT, "stop": ["again"]})
        assert answer["choices"][0]["message"]["content"] == "it "
        lines = await served.events("/v1/chat/completions", {**CHAT, "stop": ["again"], "stream": True})
        said = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in datas(lines))
        assert said == "it "
        answer = await served.post("/v1/chat/completions", {**CHAT, "max_completion_tokens": 1})
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 1


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = 'sum:<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|end|>'


async def test_tool_calls_are_read(serve):
    async with serve(lambda prompt: CALL) as served:
        answer = await served.post("/v1/chat/completions", {**CHAT, "tools": TOOLS})
        [choice] = answer["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "sum:"
        [call] = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
        chunks = datas(await served.events("/v1/chat/completions", {**CHAT, "tools": TOOLS, "stream": True}))
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("content") or "" for delta in deltas) == "sum:"
        [streamed] = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert streamed["function"] == call["function"]
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_what_is_no_call_is_text(serve):
    async with serve(lambda prompt: "<tool_call>nonsense<|end|>") as served:
        answer = await served.post("/v1/chat/completions", {**CHAT, "tools": TOOLS})
        assert answer["choices"][0]["message"]["content"] == "<tool_call>nonsense"
        chunks = datas(await served.events("/v1/chat/completions", {**CHAT, "tools": TOOLS, "stream": True}))
        said = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
        assert said == "<tool_call>nonsense"


async def test_completions_of_text_and_of_ids(serve, text):
    async with serve(lambda prompt: [prompt[-1]] * 3) as served:
        body = {"model": "alias", "prompt": [[5, 6], [7]], "n": 2, "logprobs": 0, "return_token_ids": True}
        answer = await served.post("/v1/completions", body)
        assert [choice["token_ids"] for choice in answer["choices"]] == [[6] * 3, [6] * 3, [7] * 3, [7] * 3]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-0.5] * 3
        assert answer["choices"][2]["prompt_token_ids"] == [7]
        answer = await served.post("/v1/completions", {"model": "tiny", "prompt": "say it"})
        ids = text.encode("say it")
        assert served.engines[0].requests[-1].prompt_token_ids == tuple(ids)
        assert answer["choices"][0]["text"] == text.decode(ids[-1:]) * 3
        chunks = datas(await served.events("/v1/completions", {"model": "tiny", "prompt": "say it", "stream": True}))
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == answer["choices"][0]["text"]


async def test_choices_have_seeds_of_their_own(serve):
    async with serve() as served:
        await served.post("/v1/completions", {"model": "tiny", "prompt": [5], "n": 3, "seed": 11})
        seeds = [request.sampling.seed for request in served.engines[0].requests]
        assert 11 in seeds
        assert len(set(seeds)) == 3


async def test_what_is_not_served_is_refused(serve):
    async with serve() as served:
        for wrong, status in [
            ({"model": "other"}, 404),
            ({"n": 65}, 400),
            ({"n": 10**30}, 400),
            ({"max_tokens": 10**7}, 400),
            ({"temperature": -1}, 400),
            ({"temperature": 1e-40}, 400),
            ({"stop": ["x"] * 17}, 400),
            ({"stop": "x" * 257}, 400),
            ({"stop": ""}, 400),
            ({"frequency_penalty": 0.5}, 400),
            ({"logit_bias": {"5": 1}}, 400),
            ({"messages": []}, 400),
            ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400),
            ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, 5]}]}, 400),
            ({"messages": [{"role": "robot", "content": "x"}]}, 400),
            ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}]}, 400),
        ]:
            answer = await served.post("/v1/chat/completions", {**CHAT, **wrong}, status=status)
            assert answer["error"]["id"], wrong
        assert served.engines[0].requests == []


async def test_models(serve):
    async with serve() as served:
        assert [card["id"] for card in (await served.get("/v1/models"))["data"]] == ["tiny", "alias"]
        assert (await served.get("/v1/models/alias"))["id"] == "alias"
        await served.get("/v1/models/gpt-9", status=404)
