"""Clients that know nothing of asyncrl, unmodified, and one that knows every corner of the OpenAPI document."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter

import pytest
from hypothesis.errors import Unsatisfiable

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "say it again please"}]
CALL = 'sum:<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|end|>'
TOOL = {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}


def script(prompt):
    return "it again, gladly<|end|>"


async def test_openai_asynchronous(serve):
    openai = pytest.importorskip("openai")
    async with serve(script) as served, openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        assert [model.id async for model in client.models.list()] == ["tiny", "alias"]
        answer = await client.chat.completions.create(
            model="tiny", messages=QUESTION, n=2, logprobs=True, extra_body={"return_token_ids": True}
        )
        assert [choice.message.content for choice in answer.choices] == ["it again, gladly"] * 2
        assert answer.choices[0].logprobs.content[0].logprob == -0.5
        assert answer.choices[0].model_extra["weight_versions"][0]["version"] == 0
        pieces = []
        stream = await client.chat.completions.create(
            model="tiny", messages=QUESTION, stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            pieces += [choice.delta.content or "" for choice in chunk.choices]
            usage = chunk.usage
        assert "".join(pieces) == "it again, gladly"
        assert usage.completion_tokens > 0
        text = await client.completions.create(model="tiny", prompt="say", max_tokens=50)
        assert text.choices[0].text == "it again, gladly"
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="tiny", messages=QUESTION, n=100)
        assert "at most 64 choices" in str(refused.value)
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="gpt-9", messages=QUESTION)


async def test_openai_synchronous_with_tools_in_a_session(serve):
    openai = pytest.importorskip("openai")
    async with serve(lambda prompt: CALL) as served:

        def agent():
            with openai.OpenAI(base_url=f"{served.url}/sessions/job/v1", api_key="none") as client:
                messages = list(QUESTION)
                for _ in range(3):
                    tools = [{"type": "function", "function": TOOL}]
                    said = client.chat.completions.create(model="tiny", messages=messages, tools=tools)
                    message = said.choices[0].message
                    [call] = message.tool_calls
                    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
                with client.chat.completions.create(
                    model="tiny", messages=messages, tools=tools, stream=True
                ) as stream:
                    return [chunk.choices[0].finish_reason for chunk in stream][-1]

        assert await asyncio.to_thread(agent) == "tool_calls"
        status = await served.get("/sessions/job")
        assert (status["turns"], status["branches"]) == (4, 1)


async def test_anthropic(serve):
    anthropic = pytest.importorskip("anthropic")
    async with serve(lambda prompt: CALL) as served:
        tools = [{"name": "add", "description": "adds", "input_schema": TOOL["parameters"]}]
        async with anthropic.AsyncAnthropic(base_url=served.url, api_key="none") as client:
            said = await client.messages.create(
                model="tiny", max_tokens=500, system="be short", messages=QUESTION, tools=tools
            )
            assert said.stop_reason == "tool_use"
            assert [block.type for block in said.content] == ["text", "tool_use"]
            async with client.messages.stream(model="tiny", max_tokens=500, messages=QUESTION, tools=tools) as stream:
                text = "".join([piece async for piece in stream.text_stream])
                final = await stream.get_final_message()
            assert text == "sum:"
            assert final.content[1].input == {"a": 1}
            counted = await client.messages.count_tokens(model="tiny", messages=QUESTION)
            assert counted.input_tokens > 0
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.create(model="other", max_tokens=5, messages=QUESTION)

        def synchronous():
            with anthropic.Anthropic(base_url=served.url, api_key="none") as client:
                return client.messages.create(model="tiny", max_tokens=500, messages=QUESTION).content[0].text

        assert (await asyncio.to_thread(synchronous)).startswith("sum:")


@pytest.mark.timeout(600)
async def test_the_document_is_true(serve):
    """Cases from every operation of the document, right and wrong ones: nothing fails, nothing is undeclared."""
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    examples = int(os.environ.get("ASYNCRL_SCHEMA_EXAMPLES", "20"))
    checks = [status_code_conformance, content_type_conformance, response_schema_conformance]
    statuses: Counter[int] = Counter()
    quiet = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )

    def try_operation(operation, mode, url):
        def one(case):
            answer = case.call(base_url=url, timeout=20)
            statuses[answer.status_code] += 1
            assert answer.status_code < 500, (case, answer.content)
            if "text/event-stream" not in answer.headers["content-type"][0]:
                case.validate_response(answer, checks=checks)

        nothing_wrong = (Unsatisfiable,) if mode is schemathesis.GenerationMode.NEGATIVE else ()
        with contextlib.suppress(*nothing_wrong):  # what takes no input has no wrong one
            quiet(given(case=operation.as_strategy(generation_mode=mode))(one))()

    def walk(url, document):
        schema = schemathesis.openapi.from_dict(document)
        for result in schema.get_all_operations():
            for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
                try_operation(result.ok(), mode, url)

    async with serve(script) as served:
        document = await served.get("/openapi.json")
        await asyncio.to_thread(walk, served.url, document)
        assert statuses.total() > 10 * examples, statuses
        assert statuses[200] > 0
        print(dict(statuses))
        assert await served.post("/v1/chat/completions", {"model": "tiny", "messages": QUESTION})
