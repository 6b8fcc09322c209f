"""OpenAI's API over a scripted engine."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import threading

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncrl import __version__
from asyncrl.interfaces import GenerationChunk
from asyncrl.rollout.chat import ChatRenderer
from asyncrl.serve import call, openai
from asyncrl.serve.errors import APIError
from asyncrl.serve.limits import Limits
from asyncrl.serve.text import ModelText
from engines.rollout.request import Grammars

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "say it again please"}]}


def payloads(lines):
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


async def test_a_stream_equals_the_whole_answer(serve):
    async with serve(lambda prompt: "it again, glädly \u2713<|end|>") as served:
        lines = await served.events(
            "/v1/chat/completions", {**CHAT, "stream": True, "n": 2, "stream_options": {"include_usage": True}}
        )
        assert lines[-1] == "data: [DONE]"
        chunks = payloads(lines)
        for number in (0, 1):
            own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == number]
            assert own[0]["delta"]["role"] == "assistant"
            assert "".join(choice["delta"].get("content", "") for choice in own) == "it again, glädly \u2713"
            assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == ["stop"]
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["total_tokens"] > 0


PROMPT = [5] * 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"prompt_token_ids": PROMPT, "prompt_log_probs": 1}),
        ("/generate", {"input_ids": PROMPT, "return_logprob": True, "logprob_start_len": 0}),
        ("/v1/completions", {"model": "tiny", "prompt": PROMPT, "echo": True, "logprobs": 1}),
        (
            "/v1/responses",
            {"model": "tiny", "input": "say it", "include": ["message.output_text.logprobs"], "max_output_tokens": 400},
        ),
    ],
)
async def test_an_event_of_many_log_probs_is_encoded_in_a_thread(serve, monkeypatch, path, body):
    encode, encoded = msgspec.json.encode, []

    def recorded(content):
        made = encode(content)
        encoded.append((len(made), threading.current_thread() is threading.main_thread()))
        return made

    monkeypatch.setattr(call, "_INLINE_BYTES", 1000)
    monkeypatch.setattr(msgspec.json, "encode", recorded)
    async with serve(lambda prompt: [9] * 400 if path == "/v1/responses" else [9]) as served:
        lines = await served.events(path, {**body, "stream": True})
        assert max(map(len, lines)) > 1000
        assert max(encoded)[1] is False


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", {"model": "tiny", "prompt": "say it"})]
)
async def test_the_usage_of_a_stream(serve, path, body):
    async with serve(lambda prompt: "it again, gladly<|end|>") as served:
        used = []
        for options in ({}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}):
            lines = await served.events(path, {**body, "stream": True, "stream_options": options})
            used.append([chunk["usage"] and chunk["usage"]["completion_tokens"] for chunk in payloads(lines)])
        none, last, every = used
        assert not any(none)
        assert not any(last[:-1])
        assert every == sorted(every)
        assert every[0] == 1
        assert every[-1] == last[-1] > 1
        for options in ({}, {"include_usage": True}):
            refused = await served.post(path, {**body, "stream_options": options}, status=400)
            assert "stream_options are of streams" in refused["error"]["message"]


async def test_only_the_first_event_has_the_ids_of_the_prompt(serve):
    async with serve(lambda prompt: "it again") as served:
        lines = await served.events("/v1/chat/completions", {**CHAT, "stream": True, "return_token_ids": True})
        first, *rest = payloads(lines)
        assert first["prompt_token_ids"]
        assert all("prompt_token_ids" not in chunk for chunk in rest)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": [{"role": "user", "content": "say it", "speaker": 1}]}, "messages[0].speaker"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "it", "lang": "de"}]}]}, "lang"),
        ({"stream": True, "stream_options": {"every": True}}, "stream_options.every"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        ({"tools": [{"type": "function", "function": {"name": "add", "returns": {}}}]}, "returns"),
    ],
)
async def test_fields_within_fields_are_refused_by_name(serve, fields, named):
    async with serve() as served:
        refused = await served.post("/v1/chat/completions", {**CHAT, **fields}, status=400)
        assert f"{named} is not served" in refused["error"]["message"]


async def test_an_answer_may_be_sent_back_whole(serve):
    said = {"role": "assistant", "content": "it", "refusal": None, "annotations": [], "audio": None}
    said |= {"function_call": None, "tool_calls": None, "reasoning_content": "hm", "reasoning": None}
    async with serve() as served:
        history = [*CHAT["messages"], said, {"role": "user", "content": "again"}]
        await served.post("/v1/chat/completions", {**CHAT, "messages": history})


async def test_stop_strings_are_cut_off_and_length_is_reported(serve):
    async with serve(lambda prompt: "it again, gladly") as served:
        answer = await served.post("/v1/chat/completions", {**CHAT, "stop": ["again"]})
        assert answer["choices"][0]["message"]["content"] == "it "
        lines = await served.events("/v1/chat/completions", {**CHAT, "stop": ["again"], "stream": True})
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in payloads(lines))
        assert text == "it "
        answer = await served.post("/v1/chat/completions", {**CHAT, "max_completion_tokens": 1})
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 1


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = 'sum:<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|end|>'


async def test_tool_calls_are_parsed(serve):
    async with serve(lambda prompt: CALL) as served:
        answer = await served.post("/v1/chat/completions", {**CHAT, "tools": TOOLS})
        [choice] = answer["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "sum:"
        [call] = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
        chunks = payloads(await served.events("/v1/chat/completions", {**CHAT, "tools": TOOLS, "stream": True}))
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("content") or "" for delta in deltas) == "sum:"
        [streamed] = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert streamed["function"] == call["function"]
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_tool_call_that_a_stop_string_ends_is_one(serve):
    async with serve(lambda prompt: CALL) as served:
        body = {**CHAT, "tools": TOOLS, "stop": ["</tool_call>"]}
        [choice] = (await served.post("/v1/chat/completions", body))["choices"]
        assert choice["message"]["content"] == "sum:"
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["add"]


async def test_an_invalid_tool_call_is_text(serve):
    async with serve(lambda prompt: "<tool_call>nonsense<|end|>") as served:
        answer = await served.post("/v1/chat/completions", {**CHAT, "tools": TOOLS})
        assert answer["choices"][0]["message"]["content"] == "<tool_call>nonsense"
        chunks = payloads(await served.events("/v1/chat/completions", {**CHAT, "tools": TOOLS, "stream": True}))
        text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
        assert text == "<tool_call>nonsense"


async def test_completions_of_text_and_of_ids(serve, text):
    async with serve(lambda prompt: [prompt[-1]] * 3) as served:
        body = {"model": "alias", "prompt": [[5, 6], [7]], "n": 2, "logprobs": 0, "return_token_ids": True}
        answer = await served.post("/v1/completions", body)
        assert [choice["token_ids"] for choice in answer["choices"]] == [[6] * 3, [6] * 3, [7] * 3, [7] * 3]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-0.5] * 3
        alone = [{text.spelling(6): -0.5}] * 3  # with 0, the tokens that were sampled
        assert answer["choices"][0]["logprobs"]["top_logprobs"] == alone
        without = await served.post("/v1/completions", {**body, "logprobs": None})
        assert without["choices"][0]["logprobs"] is None
        assert answer["choices"][2]["prompt_token_ids"] == [7]
        answer = await served.post("/v1/completions", {"model": "tiny", "prompt": "say it"})
        ids = text.encode("say it")
        assert served.engines[0].requests[-1].prompt_token_ids == tuple(ids)
        assert answer["choices"][0]["text"] == text.decode(ids[-1:]) * 3
        chunks = payloads(await served.events("/v1/completions", {"model": "tiny", "prompt": "say it", "stream": True}))
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == answer["choices"][0]["text"]


async def test_what_grows_with_a_long_body_is_done_in_a_thread(serve, watch_threads):
    on_the_loop = watch_threads(
        (ModelText, "encode"),
        (ModelText, "decode"),
        (ModelText, "piece"),
        (ChatRenderer, "prompt"),
        (openai, "tool_call"),
        (openai, "token_log_probs"),
        (openai, "_log_probs"),
    )
    long, fields = "it again " * 3000, {f"property {n}": {"type": "string"} for n in range(999)}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": fields}}}
    call = {"function": {"name": "f", "arguments": json.dumps({"text": long})}}
    called = [*CHAT["messages"], {"role": "assistant", "tool_calls": [call]}]
    scored = {"logprobs": True, "top_logprobs": 20}
    async with serve(lambda prompt: [7] * 250) as served:
        for path, body, name in (
            ("/v1/chat/completions", {**CHAT, "messages": called}, "tool_call"),
            ("/tokenize", {"messages": called}, "tool_call"),
            ("/v1/completions", {"model": "tiny", "prompt": long}, "encode"),
            ("/v1/completions", {"model": "tiny", "prompt": ["it", long]}, "encode"),
            ("/v1/chat/completions", {**CHAT, "tools": [tool]}, "prompt"),
            ("/tokenize", {"prompt": long}, "encode"),
            ("/tokenize", {"prompt": long, "return_token_strs": True}, "piece"),
            ("/detokenize", {"tokens": [70] * 9000}, "decode"),
            ("/v1/chat/completions", {**CHAT, **scored}, "token_log_probs"),
            ("/v1/completions", {"model": "tiny", "prompt": "it", "max_tokens": 250, "logprobs": 20}, "_log_probs"),
        ):
            await served.post(path, body)
            assert on_the_loop.pop(name) is False, path
        await served.post("/detokenize", {"tokens": [70]})
        assert on_the_loop.pop("decode") is True


async def test_arguments_in_strings_count_altogether_as_those_of_the_body(serve):
    call = {"function": {"name": "f", "arguments": '{"x": [' + "[]," * 60 + "[]]}"}}
    item = {"type": "function_call", "call_id": "c", **call["function"]}
    async with serve(limits=Limits(json_containers=100)) as served:
        for calls, status in ((1, 200), (2, 400)):
            said = {"role": "assistant", "tool_calls": [call] * calls}
            body = {**CHAT, "messages": [*CHAT["messages"], said]}
            chat = await served.post("/v1/chat/completions", body, status=status)
            body = {"model": "tiny", "input": [{"role": "user", "content": "x"}, *[item] * calls]}
            response = await served.post("/v1/responses", body, status=status)
        for refused in (chat, response):
            assert "the arguments of tool calls: the body has 12" in refused["error"]["message"]


async def test_an_echo_of_ids_has_their_special_tokens(serve, text):
    async with serve(lambda prompt: "it") as served:
        ids = text.encode("<|user|>say it")
        for prompt, echoed in ((ids, "<|user|>say it"), ("say it", "say it")):
            body = {"model": "tiny", "prompt": prompt, "echo": True, "max_tokens": 5}
            answer = await served.post("/v1/completions", body)
            assert answer["choices"][0]["text"] == echoed + "it"


def end_apart(engine):
    """Have ``engine`` end with a chunk of its own, as one does whose tokens are read between two of its writes."""
    generate = engine.generate

    async def split(request):
        async for chunk in generate(request):
            if chunk.finish_reason is None:
                yield chunk
            else:
                yield replace(chunk, finish_reason=None)
                yield GenerationChunk(token_ids=(), log_probs=(), weight_versions=(), finish_reason=chunk.finish_reason)

    engine.generate = split


async def test_a_streamed_echo_is_the_whole_answer_in_parts(serve):
    async with serve(lambda prompt: "it again, gl\u00e4dly") as served:
        end_apart(served.engines[0])
        for max_tokens in (0, 30):
            body = {"model": "tiny", "prompt": "say it", "echo": True, "logprobs": 1, "max_tokens": max_tokens}
            (whole,) = (await served.post("/v1/completions", body))["choices"]
            parts = payloads(await served.events("/v1/completions", {**body, "stream": True}))
            parts = [choice for part in parts for choice in part["choices"]]
            assert len(parts) > 1
            assert "".join(part["text"] for part in parts) == whole["text"]
            for name in ("tokens", "text_offset", "token_logprobs"):
                assert [each for part in parts for each in part["logprobs"][name]] == whole["logprobs"][name]


async def test_an_aborted_completion_has_no_log_probs_of_its_prompt(serve):
    async with serve(lambda prompt: [80], token_s=0.05) as served:
        body = {"model": "tiny", "prompt": [70, 71], "echo": True, "logprobs": 1}
        running = asyncio.create_task(served.post("/v1/completions", body, headers={"X-Request-ID": "mine"}))
        while not served.engines[0].statistics().running:
            await asyncio.sleep(0)
        assert await served.control("POST", "/abort", {"request_id": "mine"}) == {"aborted": 1}
        (choice,) = (await running)["choices"]
        assert choice["finish_reason"] == "abort"
        assert choice["logprobs"]["token_logprobs"] == [None, None]


async def test_top_log_probs_are_bounded_altogether(serve):
    async with serve(lambda prompt: [80] * 11, limits=Limits(likeliest_tokens=100)) as served:
        chat = {**CHAT, "logprobs": True, "top_logprobs": 5, "n": 2}
        prompts = {"model": "tiny", "prompt": [[5] * 10, [6] * 10], "prompt_logprobs": 5}
        for path, fits, more in (
            ("/v1/chat/completions", {**chat, "max_tokens": 10}, {"max_tokens": 11}),
            ("/v1/completions", prompts, {"n": 2}),
        ):
            await served.post(path, fits)
            refused = await served.post(path, {**fits, **more}, status=400)
            assert "top log-probs; at most 100 are returned: lower max_tokens" in refused["error"]["message"]
        for lengths in ((1, 19), (19, 1)):
            await served.post("/v1/completions", {**prompts, "prompt": [[5] * length for length in lengths]})
        served.state.context_tokens = 100
        await served.post("/v1/completions", {"model": "tiny", "prompt": [5] * 90, "logprobs": 10, "max_tokens": 2000})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 20, "max_tokens": 300}),
        ("/v1/completions", {"model": "tiny", "prompt": [5], "logprobs": 20, "max_tokens": 300}),
        ("/generate", {"prompt_token_ids": [5], "top_log_probs": 20, "max_new_tokens": 300}),
        (
            "/generate",
            {
                "input_ids": [5],
                "return_logprob": True,
                "top_logprobs_num": 20,
                "sampling_params": {"max_new_tokens": 300},
            },
        ),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"logprobs": 20, "max_tokens": 300}}),
    ],
)
async def test_answers_with_many_log_probs_are_encoded_in_a_thread(serve, monkeypatch, path, body):
    monkeypatch.setattr("asyncrl.serve.call._json", None)  # what encodes in the event loop
    async with serve(lambda prompt: [80] * 300) as served:
        await served.post(path, body)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "n": 2}),
        ("/v1/messages", {"model": "tiny", "messages": CHAT["messages"], "max_tokens": 50}),
        ("/v1/responses", {"model": "tiny", "input": "say it"}),
        ("/sessions/s/generate", {"prompt_token_ids": [5]}),
        ("/sessions/s/generate", {"input_ids": [5]}),
        ("/sessions/s/inference/v1/generate", {"token_ids": [5], "sampling_params": {"n": 2}}),
    ],
)
async def test_long_answers_become_text_in_a_thread(serve, monkeypatch, path, body):
    threads = []

    def watched(decode):
        def watch(*arguments, **options):
            threads.append(threading.current_thread() is threading.main_thread())
            return decode(*arguments, **options)

        return watch

    monkeypatch.setattr(call, "_INLINE_BYTES", 150)
    monkeypatch.setattr(ModelText, "decode", watched(ModelText.decode))
    monkeypatch.setattr(ChatRenderer, "decode", watched(ChatRenderer.decode))
    async with serve(lambda prompt: [80] * 50) as served:
        await served.post(path, body)
    assert threads
    assert not any(threads)


async def test_the_prompt_is_scored_once_where_the_first_choice_alone_shows_it(serve):
    async with serve(limits=Limits(likeliest_tokens=100)) as served:
        given = {"max_tokens": 1, "prompt_logprobs": 10, "n": 3}
        await served.post("/inference/v1/generate", {"token_ids": [5] * 10, "sampling_params": given})
        assert sorted(str(each.sampling.prompt_log_probs) for each in served.engines[0].requests) == [
            "10",
            "None",
            "None",
        ]


async def test_prompts_are_counted_before_they_are_read(serve, monkeypatch):
    monkeypatch.setattr(openai, "_prompts", None)
    async with serve(limits=Limits(prompts=2, concurrent_requests_per_key=3)) as served:
        for prompts, said in (
            (["x"] * 3, "at most 2 prompts"),
            (["x"] * 2, "2 prompts of 2 choices are more than the 3 generations"),
        ):
            body = {"model": "tiny", "prompt": prompts, "n": 2}
            assert said in (await served.post("/v1/completions", body, status=400))["error"]["message"]


def held_encoding(monkeypatch, text):
    """Have long texts wait to be tokenized until the event is set; return it and the threads that do so."""
    encode, release, threads = text.encode, threading.Event(), []

    def held(given, **options):
        if len(given) > 1000:
            threads.append(threading.current_thread().name)
            assert release.wait(60)
        return encode(given, **options)

    monkeypatch.setattr(text, "encode", held)
    return release, threads


async def test_threads_that_tokenize_are_no_others(serve, text, monkeypatch):
    release, threads = held_encoding(monkeypatch, text)
    async with serve() as served, asyncio.timeout(60), asyncio.TaskGroup() as group:
        try:
            for _ in range(40):
                group.create_task(served.post("/tokenize", {"prompt": "it again " * 3000}))
            while served.state.concurrency.running < 40 or not threads:
                await asyncio.sleep(0.01)
            assert await asyncio.wait_for(asyncio.to_thread(str, 5), 10) == "5"
            assert all(name.startswith("text") for name in threads), threads
        finally:
            release.set()


async def test_a_request_that_was_given_up_has_its_turn_until_its_text_is_tokenized(serve, text, monkeypatch):
    release, threads = held_encoding(monkeypatch, text)
    async with serve() as served, asyncio.timeout(60):
        served.state.text_turn = asyncio.Semaphore(1)
        body = {"prompt": "it again " * 3000}
        try:
            given_up = asyncio.create_task(served.post("/tokenize", body))
            while not threads:
                await asyncio.sleep(0.01)
            given_up.cancel()
            while served.state.concurrency.running:
                await asyncio.sleep(0.01)
            second = asyncio.create_task(served.post("/tokenize", body))
            while not served.state.concurrency.running:
                await asyncio.sleep(0.01)
            assert (await served.post("/tokenize", {"prompt": "it"}))["count"]  # in the event loop
            assert (len(threads), served.state.text_turn.locked()) == (1, True)
        finally:
            release.set()
        assert (await second)["count"] > 1000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "it"}),
        ("/detokenize", {"tokens": [5]}),
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": CHAT["messages"]}),
    ],
)
async def test_requests_for_tokens_are_bounded(serve, path, body):
    async with serve(limits=Limits(concurrent_requests_per_key=1)) as served:
        served.state.concurrency.acquire("")
        await served.post(path, body, status=429)
        served.state.concurrency.release("")
        for _ in range(2):
            await served.post(path, body)


LONG = "it again please " * 100
TURN = [{"role": "user", "content": LONG}]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/completions", {"model": "tiny", "prompt": ["it", LONG]}, "maximum context length is 20 tokens. However"),
        ("/v1/chat/completions", {**CHAT, "messages": TURN}, "resulted in at least "),
        ("/v1/responses", {"model": "tiny", "input": LONG}, "resulted in at least "),
        ("/generate", {"text": LONG}, "resulted in at least "),
        ("/v1/messages", {"model": "tiny", "messages": TURN, "max_tokens": 5}, "prompt is too long: "),
        ("/sessions/s/v1/messages", {"model": "tiny", "messages": TURN, "max_tokens": 5}, "tokens > 20 maximum"),
    ],
)
async def test_a_prompt_of_too_many_bytes_is_not_tokenized(serve, tokenizer, monkeypatch, path, body, said):
    encode, longest = tokenizer.encode, 0

    def measured(given, **options):
        nonlocal longest
        longest = max(longest, len(given))
        return encode(given, **options)

    async with serve() as served:
        served.state.context_tokens = 20
        monkeypatch.setattr(tokenizer, "encode", measured)
        refused = await served.post(path, body, status=400)
        assert said in refused["error"]["message"]
        assert longest < len(LONG)
        assert "code" not in refused["error"] or refused["error"]["code"] == "context_length_exceeded"
        cut = {"model": "tiny", "prompt": LONG, "truncate_prompt_tokens": 5, "max_tokens": 1}
        await served.post("/v1/completions", cut)
        assert (await served.post("/tokenize", {"prompt": LONG}))["count"] > 20


@given(st.text(alphabet="it again\u00e9\U0001f600<|end|>", max_size=300), st.integers(1, 40))
def test_what_is_refused_by_its_bytes_has_too_many_tokens(text, prompt, context):
    tokens = text.encode(prompt)
    try:
        assert text.within(context).encode(prompt) == tokens
    except APIError:
        assert len(tokens) >= context


def test_bytes_bound_no_tokens_where_a_tokenizer_leaves_some_out(tokenizer):
    from tokenizers import normalizers

    longest = max(map(len, tokenizer.get_vocab()))
    for normalizer, bound in ((None, longest), (normalizers.NFC(), 4 * longest), (normalizers.Strip(), None)):
        other = copy.deepcopy(tokenizer)
        if normalizer is not None:
            other.backend_tokenizer.normalizer = normalizer
        assert ModelText(other)._token_bytes == bound


async def test_what_a_template_raises_on_a_tool_is_the_mistake_of_the_request(serve, tokenizer, monkeypatch):
    declared = "{% for tool in tools or [] %}{{ tool.function.parameters.properties | dictsort }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", declared + tokenizer.chat_template)
    async with serve() as served:
        for properties, status in (({}, 200), ([], 400)):
            function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
            body = {**CHAT, "tools": [{"type": "function", "function": function}]}
            answer = await served.post("/v1/chat/completions", body, status=status)
        assert "the model's chat template refuses these messages" in answer["error"]["message"]


async def test_each_choice_has_its_own_seed(serve):
    async with serve() as served:
        await served.post("/v1/completions", {"model": "tiny", "prompt": [5], "n": 3, "seed": 11})
        seeds = [request.sampling.seed for request in served.engines[0].requests]
        assert 11 in seeds
        assert len(set(seeds)) == 3


async def test_unsupported_requests_are_refused(serve):
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
            ({"messages": []}, 400),
            ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400),
            ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, 5]}]}, 400),
            ({"messages": [{"role": "robot", "content": "x"}]}, 400),
            ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}]}, 400),
        ]:
            answer = await served.post("/v1/chat/completions", {**CHAT, **wrong}, status=status)
            assert answer["error"]["id"], wrong
        assert served.engines[0].requests == []


NOT_SERVED = (
    {"use_beam_search": True},
    {"length_penalty": 2},
    {"typical_p": 0.5},
    {"logits_processors": ["x"]},
    {"lora_path": "x"},
    {"documents": [{"title": "x"}]},
    {"chat_template": "x"},
    {"return_tokens_as_token_ids": True},
    {"logprob_token_ids": [5]},
    {"kv_transfer_params": {"a": 1}},
    {"prompt_embeds": "x"},
    {"verbosity": "low"},
    {"truncate_prompt_tokens": 0},
    {"chat_template_kwargs": {"tokenize": True}},
    {"continue_final_message": True},
    {"continue_final_message": True, "add_generation_prompt": True},
    {"temprature": 0.5},
)


@pytest.mark.parametrize("fields", NOT_SERVED, ids=lambda fields: "+".join(fields))
async def test_no_field_that_changes_the_answer_is_ignored(serve, fields):
    async with serve() as served:
        error = (await served.post("/v1/chat/completions", {**CHAT, **fields}, status=400))["error"]
        assert any(name in error["message"] for name in (*fields, "tokenize", "last message")), error
        body = {"model": "tiny", "prompt": "x", **fields}
        await served.post("/v1/completions", body, status=400)
        if "chat_template_kwargs" not in fields:
            await served.post("/v1/messages", {**CHAT, "max_tokens": 4, **fields}, status=400)
            await served.post("/generate", {"prompt_token_ids": [5], **fields}, status=400)
        assert served.engines[0].requests == []


async def test_fields_that_change_nothing_are_taken(serve):
    async with serve() as served:
        neutral = {"user": "a", "metadata": {"x": "y"}, "store": False, "min_p": 0, "logit_bias": {}, "min_tokens": 0}
        neutral |= {"skip_special_tokens": True, "add_generation_prompt": True, "spaces_between_special_tokens": True}
        neutral |= {"frequency_penalty": 0.0, "chat_template_kwargs": {}, "echo": False, "length_penalty": 1.0}
        await served.post("/v1/chat/completions", {**CHAT, **neutral})


LOGITS = {
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.2,
    "logit_bias": {"5": 1, "7": -100},
    "allowed_token_ids": [7, 5, 7],
    "bad_words": ["so"],
    "min_tokens": 2,
    "ignore_eos": True,
}


async def test_what_changes_logits_reaches_the_engine_from_every_api(serve, text):
    async with serve() as served:
        await served.post("/v1/chat/completions", {**CHAT, **LOGITS})
        await served.post("/v1/completions", {"model": "tiny", "prompt": "x", **LOGITS})
        await served.post("/generate", {"prompt_token_ids": [5], **LOGITS})
        expected = LOGITS | {"logit_bias": ((5, 1.0), (7, -100.0)), "allowed_token_ids": (5, 7), "bad_words": ("so",)}
        for request in served.engines[0].requests:
            assert {name: getattr(request.sampling, name) for name in LOGITS} == expected
            assert request.sampling.stop_token_ids == ()  # not even the end of the turn


WRONG_LOGITS = (
    ({"min_p": 1.5}, "<= 1.0 - at `$.min_p`"),
    ({"presence_penalty": -2.5}, ">= -2.0 - at `$.presence_penalty`"),
    ({"frequency_penalty": 3}, "<= 2.0 - at `$.frequency_penalty`"),
    ({"repetition_penalty": 1e-38}, ">= 0.01 - at `$.repetition_penalty`"),
    ({"logit_bias": {"5": 101}}, "<= 100.0 - at `$.logit_bias"),
    ({"logit_bias": {"five": 1}}, "`$.logit_bias`"),
    ({"allowed_token_ids": []}, "at `$.allowed_token_ids`"),
    ({"bad_words": [" "]}, "bad_words must not hold an empty or blank text"),
    ({"bad_words": ["x" * 300]}, "bad_words of 256 characters"),
    ({"min_tokens": -1}, ">= 0 - at `$.min_tokens`"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens must lie in 0..4"),
    ({"ignore_eos": True, "regex": "a+"}, "ignore_eos goes on after the end"),
)


@pytest.mark.parametrize(("fields", "said"), WRONG_LOGITS, ids=["+".join(fields) for fields, _ in WRONG_LOGITS])
async def test_an_error_names_the_field_and_its_rule(serve, fields, said):
    async with serve() as served:
        native = {"max_new_tokens" if name == "max_tokens" else name: value for name, value in fields.items()}
        native |= {"grammar": f"start: /{native.pop('regex')}/"} if "regex" in native else {}
        for path, body in (
            ("/v1/chat/completions", {**CHAT, **fields}),
            ("/v1/completions", {"model": "tiny", "prompt": "x", **fields}),
            ("/generate", {"prompt_token_ids": [5], **native}),
        ):
            error = (await served.post(path, body, status=400))["error"]
            assert said in error["message"]
        assert served.engines[0].requests == []


async def test_a_stop_string_among_the_first_tokens_is_text(serve, text):
    first = len(text.renderer.tokenizer.encode("it again", add_special_tokens=False))
    async with serve(lambda prompt: "it again, and again, gladly") as served:
        for stream in (False, True):
            body = {**CHAT, "stop": ["again"], "min_tokens": first, "stream": stream}
            if stream:
                chunks = payloads(await served.events("/v1/chat/completions", body))
                content = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
            else:
                content = (await served.post("/v1/chat/completions", body))["choices"][0]["message"]["content"]
            assert content == "it again, and "


GRAMMARS = (
    ({"regex": "a/b"}, "start: /a\\/b/\n"),
    ({"guided_regex": r"a\/\\/"}, "start: /" + r"a\/\\\/" + "/\n"),
    ({"structured_outputs": {"regex": "a\nb"}}, "start: /a\\nb/\n"),
    ({"guided_choice": ["yes", 'n"o']}, 'start: "yes" | "n\\"o"\n'),
    ({"structured_outputs": {"choice": ["a"]}}, 'start: "a"\n'),
    ({"guided_grammar": 'start: "a" | "b"\n'}, 'start: "a" | "b"\n'),
)


@pytest.mark.parametrize(("fields", "grammar"), GRAMMARS, ids=[next(iter(fields)) for fields, _ in GRAMMARS])
async def test_grammars_of_vllm_and_sglang(serve, text, fields, grammar):
    async with serve(lambda _: [70]) as served:
        await served.post("/v1/chat/completions", {**CHAT, **fields})
        await served.post("/v1/completions", {"model": "tiny", "prompt": "x", **fields})
        assert [request.sampling.grammar for request in served.engines[0].requests] == [grammar] * 2
    guide = Grammars(text._tokenizer, vocabulary=len(text._tokenizer)).guide(grammar, (), stop_token_ids=frozenset())
    assert guide.allowed(frozenset()).any()


async def test_schemas_of_vllm(serve):
    async with serve(lambda _: [70]) as served:
        for fields in (
            {"guided_json": '{"type": "string"}'},
            {"structured_outputs": {"json": {"type": "string"}}},
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "string"}}}},
        ):
            await served.post("/v1/completions", {"model": "tiny", "prompt": "x", **fields})
        grammars = {request.sampling.grammar for request in served.engines[0].requests}
        assert len(grammars) == 1
        assert '{"type": "string"' in grammars.pop()


async def test_an_answer_to_nothing_is_not_continued(serve):
    alone = [{"role": "assistant", "content": ""}]
    async with serve() as served:
        for path, fields in (
            ("/v1/chat/completions", {"continue_final_message": True}),
            ("/v1/messages", {"max_tokens": 1}),
        ):
            answer = await served.post(path, {"model": "tiny", "messages": alone, **fields}, status=400)
            assert "none before it" in answer["error"]["message"]
        assert served.engines[0].requests == []


async def test_an_answer_that_was_begun_is_continued(serve, text):
    begun = [*CHAT["messages"], {"role": "assistant", "content": "it ag"}]
    async with serve(lambda _: [*text.encode("ain"), text.renderer.end_of_turn_id]) as served:
        body = {**CHAT, "messages": begun, "continue_final_message": True}
        headers = {"X-Session-ID": "s"}
        answer = await served.post("/v1/chat/completions", body, headers=headers)
        assert answer["choices"][0]["message"]["content"] == "ain"
        anthropic = {"model": "tiny", "messages": begun, "max_tokens": 9}
        answer = await served.post("/v1/messages", anthropic)
        assert answer["content"] == [{"type": "text", "text": "ain"}]
        first, second = served.engines[0].requests
        prompt = text.renderer.prompt(CHAT["messages"]) + text.renderer.encode("it ag")
        assert list(first.prompt_token_ids) == list(second.prompt_token_ids) == prompt
        later = [*begun[:-1], {"role": "assistant", "content": "it again"}, {"role": "user", "content": "x"}]
        await served.post("/v1/chat/completions", {**CHAT, "messages": later}, headers=headers)
        third = served.engines[0].requests[2].prompt_token_ids
        sampled = [*text.encode("ain"), text.renderer.end_of_turn_id]
        assert list(third[: len(prompt) + len(sampled)]) == prompt + sampled, "what was sampled stays as it was"


async def test_the_prompt_as_it_is_asked_for(serve, text):
    async with serve(lambda _: [70]) as served:
        await served.post("/v1/chat/completions", {**CHAT, "add_generation_prompt": False})
        await served.post("/v1/chat/completions", {**CHAT, "truncate_prompt_tokens": 3})
        await served.post("/v1/completions", {"model": "tiny", "prompt": [5, 6, 7, 8], "truncate_prompt_tokens": 3})
        await served.post("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"unused": 1}})
        bare, short, ids, same = (list(request.prompt_token_ids) for request in served.engines[0].requests)
        whole = text.renderer.prompt(CHAT["messages"])
        assert (short, ids, same) == (whole[-3:], [6, 7, 8], whole)
        assert bare == whole[: len(bare)]
        assert len(bare) < len(whole)


async def test_what_of_the_text_is_shown(serve, text):
    end = text.renderer.end_of_turn_id
    async with serve(lambda _: [*text.encode("a"), end, *text.encode("b;c")]) as served:
        ask = {"model": "tiny", "prompt": "x", "stop": [";"]}
        for fields, expected in (
            ({}, "ab"),
            ({"include_stop_str_in_output": True}, "ab;"),
            ({"skip_special_tokens": False}, f"a{text.spelling(end)}b"),
        ):
            answer = await served.post("/v1/completions", {**ask, **fields})
            assert answer["choices"][0]["text"] == expected


async def test_stop_tokens_are_text_where_they_are_asked_for(serve, text):
    end, (first,), (stop,) = text.renderer.end_of_turn_id, text.encode("a"), text.encode("b")
    both, special = {"include_stop_str_in_output": True}, {"skip_special_tokens": False}
    async with serve(lambda prompt: [first, stop] if prompt[-1] == 5 else [first, end]) as served:
        for last, fields, expected in (
            (5, {"stop_token_ids": [stop]}, "a"),
            (5, {"stop_token_ids": [stop], **both}, "ab"),
            (6, {**both}, "a"),
            (6, {**special}, "a"),
            (6, {**both, **special}, f"a{text.spelling(end)}"),
        ):
            for path, body in (
                ("/v1/completions", {"model": "tiny", "prompt": [last]}),
                ("/v1/chat/completions/tokens", {**CHAT, "tokens": [last]}),
            ):
                (choice,) = (await served.post(path, {**body, **fields}))["choices"]
                assert (choice.get("text") or choice["message"]["content"]) == expected
            skip = {name: value for name, value in fields.items() if name not in both}
            sampling = {**skip, "no_stop_trim": "include_stop_str_in_output" in fields}
            answer = await served.post("/generate", {"input_ids": [last], "sampling_params": sampling})
            assert answer["text"] == expected


async def test_an_end_that_comes_after_its_token_is_no_text(serve):
    async with serve(lambda prompt: "it<|user|> again<|end|>") as served:
        end_apart(served.engines[0])
        parts = payloads(await served.events("/v1/chat/completions", {**CHAT, "stream": True}))
        said = [choice["delta"].get("content") or "" for part in parts for choice in part["choices"]]
        assert "".join(said) == "it<|user|> again"


async def test_a_prompt_that_is_too_long_has_the_code_that_clients_match(serve):
    async with serve() as served:
        served.state.context_tokens = 3
        error = (await served.post("/v1/chat/completions", CHAT, status=400))["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["message"].startswith("This model's maximum context length is 3 tokens. However, your messages")
        error = (await served.post("/v1/messages", {**CHAT, "max_tokens": 4}, status=400))["error"]
        assert error["type"] == "invalid_request_error"
        assert re.fullmatch(r"prompt is too long: \d+ tokens > 3 maximum", error["message"])


async def test_tokens_of_text_and_text_of_tokens(serve, text):
    async with serve() as served:
        got = await served.post("/tokenize", {"model": "tiny", "prompt": "again", "return_token_strs": True})
        assert (got["tokens"], got["count"]) == (text.encode("again"), len(text.encode("again")))
        pieces = [text.renderer.tokenizer.convert_ids_to_tokens(token) for token in got["tokens"]]
        assert got["token_strs"] == pieces
        chat = await served.post("/tokenize", {"messages": CHAT["messages"]})
        assert chat["tokens"] == text.renderer.prompt(CHAT["messages"])
        bare = await served.post("/tokenize", {"messages": CHAT["messages"], "add_generation_prompt": False})
        assert bare["tokens"] == chat["tokens"][: bare["count"]] != chat["tokens"]
        back = await served.post("/detokenize", {"tokens": chat["tokens"]})
        assert back["prompt"] == text.renderer.decode(chat["tokens"])
        for wrong in ({}, {"prompt": "x", "messages": CHAT["messages"]}, {"prompt": "x", "other": 1}):
            await served.post("/tokenize", wrong, status=400)
        for body, fields in (
            ({"messages": CHAT["messages"]}, {"add_special_tokens": True}),
            ({"prompt": "x"}, {"tools": TOOLS}),
            ({"prompt": "x"}, {"chat_template_kwargs": {"a": 1}}),
            ({"prompt": "x"}, {"add_generation_prompt": True}),
            ({"prompt": "x"}, {"continue_final_message": True}),
        ):
            refused = await served.post("/tokenize", {**body, **fields}, status=400)
            assert f"{next(iter(fields))} = " in refused["error"]["message"]
        await served.post("/tokenize", {"model": "other", "prompt": "x"}, status=404)
        await served.post("/detokenize", {"tokens": [10**6]}, status=400)
        assert (await served.get("/version"))["version"] == __version__
        await served.get("/ping")


async def test_models(serve):
    async with serve() as served:
        assert [card["id"] for card in (await served.get("/v1/models"))["data"]] == ["tiny", "alias"]
        assert (await served.get("/v1/models/alias"))["id"] == "alias"
        await served.get("/v1/models/gpt-9", status=404)
        served.state.names = ("org/tiny",)
        for path in ("/v1/models/org/tiny", "/v1/models/org%2Ftiny", "/sessions/s/v1/models/org/tiny"):
            assert (await served.get(path))["id"] == "org/tiny"
        async with served.client.delete(f"{served.url}/v1/models/org/tiny") as answer:
            assert (answer.status, answer.headers["Allow"]) == (405, "GET")


async def test_a_chat_after_a_prompt_of_tokens(serve, text):
    """prime-rl's route: in a session the tokens continue the turn that they begin with."""
    async with serve(lambda prompt: CALL) as served:
        asked = {**CHAT, "tools": TOOLS, "return_token_ids": True, "logprobs": True}
        first = await served.post("/sessions/s/v1/chat/completions", asked)
        tokens = [*first["prompt_token_ids"], *first["choices"][0]["token_ids"], 5, 6]
        second = await served.post("/sessions/s/v1/chat/completions/tokens", {**asked, "tokens": tokens})
        assert list(served.engines[0].requests[1].prompt_token_ids) == second["prompt_token_ids"] == tokens
        counted = await served.post(
            "/sessions/s/tokenize", {"model": "tiny", "messages": CHAT["messages"], "tools": TOOLS}
        )
        assert counted["tokens"] == first["prompt_token_ids"]
        (choice,) = second["choices"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "sum:")
        assert len(choice["token_ids"]) == len(choice["logprobs"]["content"])
        assert second["usage"]["prompt_tokens"] == len(tokens)
        status = await served.get("/sessions/s")
        assert (status["turns"], status["branches"]) == (2, 1)
        path = "/v1/chat/completions/tokens"
        parts = payloads(await served.events(path, {**asked, "tokens": tokens, "stream": True}))
        assert parts[0]["prompt_token_ids"] == tokens
        for wrong in ({}, {"tokens": []}, {"tokens": [1], "truncate_prompt_tokens": 1}):
            await served.post(path, {**asked, **wrong}, status=400)
