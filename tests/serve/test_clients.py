"""Unmodified OpenAI and Anthropic clients, and Schemathesis on the OpenAPI document."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from typing import Literal

import pytest

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "say it again please"}]
CALL = 'sum:<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|end|>'
TOOL = {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": TOOL}]


def script(prompt):
    return "it again, gladly<|end|>"


async def test_openai_asynchronous(serve):
    import openai

    async with serve(script) as served, openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        assert [model.id async for model in client.models.list()] == ["tiny", "alias"]
        assert (await client.models.retrieve("tiny")).id == "tiny"
        answer = await client.chat.completions.create(
            model="tiny",
            messages=QUESTION,
            n=2,
            seed=7,
            stop=["never"],
            logprobs=True,
            top_logprobs=2,
            extra_body={"return_token_ids": True},
        )
        assert [choice.message.content for choice in answer.choices] == ["it again, gladly"] * 2
        first = answer.choices[0].logprobs.content[0]
        assert (first.logprob, [top.logprob for top in first.top_logprobs]) == (-0.5, [-0.5, -1.5])
        assert answer.choices[0].model_extra["weight_versions"][0]["version"] == 0
        pieces, usages = [], []
        stream = await client.chat.completions.create(
            model="tiny", messages=QUESTION, stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            pieces += [choice.delta.content or "" for choice in chunk.choices]
            usages.append(chunk.usage)
        assert "".join(pieces) == "it again, gladly"
        assert usages[-1].completion_tokens > 0
        assert usages[:-1] == [None] * (len(usages) - 1)
        text = await client.completions.create(model="tiny", prompt="say", max_tokens=50, logprobs=2)
        assert text.choices[0].text == "it again, gladly"
        assert len(text.choices[0].logprobs.top_logprobs[0]) == 2
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="tiny", messages=QUESTION, n=100)
        assert "at most 64 choices" in str(refused.value)
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="gpt-9", messages=QUESTION)


async def test_openai_parses_into_types(serve):
    import openai
    from pydantic import BaseModel

    class Answer(BaseModel):
        city: str
        kind: Literal["town", "village"]

    async with (
        serve(lambda prompt: '{"city": "Paris", "kind": "town"}<|end|>') as served,
        openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client,
    ):
        answer = await client.chat.completions.parse(model="tiny", messages=QUESTION, response_format=Answer)
        assert answer.choices[0].message.parsed == Answer(city="Paris", kind="town")
        async with client.chat.completions.stream(model="tiny", messages=QUESTION, response_format=Answer) as stream:
            async for _ in stream:
                pass
            assert (await stream.get_final_completion()).choices[0].message.parsed.city == "Paris"
        assert '"enum"' in served.engines[0].requests[-1].sampling.grammar


async def test_openai_responses(serve):
    import openai
    from pydantic import BaseModel

    class Answer(BaseModel):
        a: int

    function = {"type": "function", **TOOL, "strict": False}
    replies = ["it again, gladly<|end|>", CALL, "it again<|end|>", CALL, '{"a": 7}<|end|>']
    async with (
        serve(lambda prompt: replies.pop(0)) as served,
        openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
    ):
        plain = await client.responses.create(model="tiny", input=QUESTION, instructions="be short")
        assert (plain.output_text, plain.status) == ("it again, gladly", "completed")
        assert plain.usage.total_tokens == plain.usage.input_tokens + plain.usage.output_tokens

        called = await client.responses.create(model="tiny", input=QUESTION, tools=[function])
        [call] = [item for item in called.output if item.type == "function_call"]
        assert (call.name, call.arguments, called.output_text) == ("add", '{"a": 1}', "sum:")
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        after = await client.responses.create(
            model="tiny", input=[result], tools=[function], previous_response_id=called.id
        )
        assert after.output_text == "it again"
        assert after.previous_response_id == called.id

        async with client.responses.stream(model="tiny", input=QUESTION, tools=[function]) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
        assert [item.type for item in final.output] == ["message", "function_call"]
        assert (final.output_text, final.output[1].arguments) == ("sum:", '{"a": 1}')

        parsed = await client.responses.parse(model="tiny", input=QUESTION, text_format=Answer)
        assert parsed.output_parsed == Answer(a=7)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="tiny", input=QUESTION, previous_response_id="resp_0")
        assert refused.value.code == "previous_response_not_found"


async def test_openai_synchronous_with_tools_in_a_session(serve):
    import openai

    async with serve(lambda prompt: CALL) as served:

        def agent():
            with openai.OpenAI(base_url=f"{served.url}/sessions/job/v1", api_key="none") as client:
                messages = list(QUESTION)
                for _ in range(3):
                    answer = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
                    message = answer.choices[0].message
                    [call] = message.tool_calls
                    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
                with client.chat.completions.create(
                    model="tiny", messages=messages, tools=TOOLS, tool_choice="required", stream=True
                ) as stream:
                    return [chunk.choices[0].finish_reason for chunk in stream][-1]

        assert await asyncio.to_thread(agent) == "tool_calls"
        status = await served.get("/sessions/job")
        assert (status["turns"], status["branches"]) == (4, 1)


async def test_anthropic(serve):
    import anthropic

    async with serve(lambda prompt: CALL) as served:
        tools = [{"name": "add", "description": "adds", "input_schema": TOOL["parameters"]}]
        async with anthropic.AsyncAnthropic(base_url=served.url, api_key="none") as client:
            assert [model.id async for model in client.models.list()] == ["tiny", "alias"]
            assert (await client.models.retrieve("alias")).display_name == "alias"
            answer = await client.messages.create(
                model="tiny",
                max_tokens=500,
                system="be short",
                messages=QUESTION,
                tools=tools,
                tool_choice={"type": "any"},
            )
            assert answer.stop_reason == "tool_use"
            assert [block.type for block in answer.content] == ["text", "tool_use"]
            async with client.messages.stream(model="tiny", max_tokens=500, messages=QUESTION, tools=tools) as stream:
                text = "".join([piece async for piece in stream.text_stream])
                final = await stream.get_final_message()
            assert text == "sum:"
            assert final.content[1].input == {"a": 1}
            assert final.usage.output_tokens > 0
            counted = await client.messages.count_tokens(model="tiny", messages=QUESTION)
            assert counted.input_tokens > 0
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.create(model="other", max_tokens=5, messages=QUESTION)

        def synchronous():
            with anthropic.Anthropic(base_url=served.url, api_key="none") as client:
                return client.messages.create(model="tiny", max_tokens=500, messages=QUESTION).content[0].text

        assert (await asyncio.to_thread(synchronous)).startswith("sum:")


CASES = int(os.environ.get("ASYNCRL_SCHEMA_CASES", "3000"))


@pytest.mark.timeout(900)
async def test_the_server_follows_its_openapi_document(serve):
    """Send valid and invalid cases of every operation: no server error, no undeclared answer."""
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis.errors import Unsatisfiable
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    checks = [status_code_conformance, content_type_conformance, response_schema_conformance]
    statuses: Counter[int] = Counter()

    def try_operation(operation, mode, url, examples):
        quiet = settings(
            max_examples=examples,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )

        def one(case):
            answer = case.call(base_url=url, timeout=20)
            statuses[answer.status_code] += 1
            assert answer.status_code < 500, (case, answer.content)
            if "text/event-stream" not in answer.headers["content-type"][0]:
                case.validate_response(answer, checks=checks)

        nothing_wrong = (Unsatisfiable,) if mode is schemathesis.GenerationMode.NEGATIVE else ()
        with contextlib.suppress(*nothing_wrong):  # an operation without input has no invalid one
            quiet(given(case=operation.as_strategy(generation_mode=mode))(one))()

    def walk(url, document):
        schema = schemathesis.openapi.from_dict(document)
        operations = [result.ok() for result in schema.get_all_operations()]
        with_a_body = [operation for operation in operations if operation.body]
        for operation in operations:
            # Operations with a body get most cases, the others a few.
            share = CASES // (2 * len(with_a_body)) + 1 if operation in with_a_body else 5
            for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
                try_operation(operation, mode, url, share)

    async with serve(script, grammars=False) as served:
        document = await served.get("/openapi.json")
        await asyncio.to_thread(walk, served.url, document)
        print(f"{statuses.total()} cases: {dict(statuses)}")
        assert statuses.total() >= CASES
        assert statuses[200] > CASES // 100
        assert await served.post("/v1/chat/completions", {"model": "tiny", "messages": QUESTION})
