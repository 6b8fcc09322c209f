"""OpenAI's dialect: /v1/chat/completions, /v1/models."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from asyncrl.interfaces import Message, Tool
from asyncrl.serve.call import Call, version_spans
from asyncrl.serve.chat_turn import ChatTurn
from asyncrl.serve.choice import Choice, ReadTurn
from asyncrl.serve.conversation import parsed_arguments
from asyncrl.serve.failure import Refusal
from asyncrl.serve.grammar import JSON_OBJECT, Form, chat_form
from asyncrl.serve.model_text import ModelText
from asyncrl.serve.openai_sampling import asked_sampling, penalties, token_counts
from asyncrl.serve.openai_schema import (
    AnswerCall,
    AnswerMessage,
    CallDelta,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatLogProbs,
    ChatMessage,
    ChunkChoice,
    ContentPart,
    Delta,
    FunctionCall,
    ModelCard,
    ModelList,
    NamedTool,
    TokenLogProb,
    TopLogProb,
)
from asyncrl.serve.sampling import check_choices, neutral

__all__ = ["chat_completions", "model", "models"]

_BEGAN = int(time.time())


async def models(call: Call) -> web.StreamResponse:
    """The model that is served, under each of its names."""
    cards = [_card(call, name) for name in call.face.names]
    return call.answer(ModelList(data=cards, first_id=cards[0].id, last_id=cards[-1].id))


async def model(call: Call) -> web.StreamResponse:
    """One of the names of the model."""
    name = call.request.match_info["model"]
    call.face.check_model(name)
    return call.answer(_card(call, name))


def _card(call: Call, name: str) -> ModelCard:
    began = datetime.fromtimestamp(_BEGAN, UTC).isoformat().replace("+00:00", "Z")
    return ModelCard(
        id=name, created=_BEGAN, display_name=name, created_at=began, max_model_len=call.face.context_tokens
    )


# ----------------------------------------------------------------------------------------------------------- chat


async def chat_completions(call: Call) -> web.StreamResponse:
    """A turn of a chat, whole or as a stream."""
    body = call.body_as(ChatCompletionRequest)
    call.face.check_model(body.model)
    neutral(
        **penalties(body),
        top_logprobs=(None if body.logprobs else body.top_logprobs, (0,)),
    )
    if call.face.limits.messages < len(body.messages):
        raise Refusal(400, f"at most {call.face.limits.messages} messages are taken")
    tools = [
        Tool(
            name=each.function.name,
            description=each.function.description or "",
            parameters=each.function.parameters or {"type": "object", "properties": {}},
        )
        for each in (body.tools or ())
        if body.tool_choice != "none"
    ]
    turn = await ChatTurn.begin(
        call,
        [_message(message, number) for number, message in enumerate(body.messages)],
        tools,
        asked_sampling(
            call,
            body,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            top_log_probs=body.top_logprobs or 0,
        ),
        form=_form(call.face.chat_text(), body, tools),
        choices=check_choices(call.face.limits, body.n or 1),
    )
    if body.stream:
        return await _stream_chat(call, body, turn)
    await turn.collect()
    return call.answer(
        ChatCompletion(
            id=f"chatcmpl-{call.id}",
            created=int(time.time()),
            model=body.model,
            choices=[_chat_choice(call, body, turn, number) for number in range(len(turn.choices))],
            usage=token_counts(len(turn.prompt.token_ids), turn.completion_tokens),
            prompt_token_ids=list(turn.prompt.token_ids) if body.return_token_ids else None,
        )
    )


def _form(text: ModelText, body: ChatCompletionRequest, tools: list[Tool]) -> Form:
    """What the answer must be: of the response format, calls that are demanded, or anything."""
    schema: Mapping[str, Any] | None = None
    if body.response_format is not None and body.response_format.type == "json_object":
        schema = JSON_OBJECT
    elif body.response_format is not None and body.response_format.type == "json_schema":
        if body.response_format.json_schema is None:
            raise Refusal(400, "response_format of type json_schema needs json_schema: {name, schema}")
        schema = body.response_format.json_schema.schema or JSON_OBJECT
    demanded: list[Tool] = []
    if isinstance(body.tool_choice, NamedTool):
        wanted = body.tool_choice.function.name
        demanded = [tool for tool in tools if tool.name == wanted]
        if not demanded:
            raise Refusal(400, f"tool_choice names {wanted[:80]!r}, which is none of the tools")
    elif body.tool_choice == "required":
        demanded = tools
        if not tools:
            raise Refusal(400, "tool_choice is required, and there are no tools")
    return chat_form(
        text,
        tools=tools,
        demanded=demanded,
        several=body.parallel_tool_calls is not False and not isinstance(body.tool_choice, NamedTool),
        schema=schema,
    )


def _chat_choice(call: Call, body: ChatCompletionRequest, turn: ChatTurn, number: int) -> ChatChoice:
    choice = turn.choices[number]
    read = turn.read(number)
    return ChatChoice(
        index=number,
        message=AnswerMessage(
            content=read.message["content"] or (None if read.calls else ""),
            tool_calls=[AnswerCall(id=each["id"], function=_function_call(each)) for each in read.calls] or None,
        ),
        finish_reason=_finish(choice, read),
        logprobs=_chat_log_probs(call.face.chat_text(), choice, 0) if body.logprobs else None,
        token_ids=choice.token_ids if body.return_token_ids else None,
        weight_versions=version_spans(choice.versions) if body.return_token_ids else None,
    )


async def _stream_chat(call: Call, body: ChatCompletionRequest, turn: ChatTurn) -> web.StreamResponse:
    events = call.events()
    created = int(time.time())
    text = call.face.chat_text()

    def chunk(choices: list[ChunkChoice], **more: Any) -> ChatCompletionChunk:
        return ChatCompletionChunk(id=f"chatcmpl-{call.id}", created=created, model=body.model, choices=choices, **more)

    opened: set[int] = set()
    async with aclosing(call.stream_all(turn.requests)) as stream:
        async for number, piece in stream:
            choice = turn.choices[number]
            before = len(choice.token_ids)
            delta = Delta(content=choice.feed(piece) or None)
            if number not in opened:
                delta.role = "assistant"
                delta.content = delta.content or ""
                more = {"prompt_token_ids": list(turn.prompt.token_ids)} if body.return_token_ids else {}
                opened.add(number)
            else:
                more = {}
            reason = None
            if choice.finish_reason is not None:
                read = turn.read(number)
                reason = _finish(choice, read)
                if read.tail:
                    delta.content = (delta.content or "") + read.tail
                if read.calls:
                    delta.tool_calls = [
                        CallDelta(index=at, id=each["id"], function=_function_call(each))
                        for at, each in enumerate(read.calls)
                    ]
            with_tokens = body.return_token_ids or (body.logprobs and piece.token_ids)
            if delta.content is None and not delta.tool_calls and reason is None and not with_tokens:
                continue
            answer = ChunkChoice(
                index=number,
                delta=delta,
                finish_reason=reason,
                logprobs=_chat_log_probs(text, choice, before) if body.logprobs else None,
            )
            if body.return_token_ids:
                answer.token_ids = list(piece.token_ids)
                answer.weight_versions = version_spans(piece.weight_versions, offset=before)
            await events.send(chunk([answer], **more))
    if body.stream_options is not None and body.stream_options.include_usage:
        await events.send(chunk([], usage=token_counts(len(turn.prompt.token_ids), turn.completion_tokens)))
    await events.send_bytes(b"data: [DONE]\n\n")
    return await events.end()


def _message(message: ChatMessage, number: int) -> Message:
    """One of a client's messages in the form that templates take."""
    where = f"messages[{number}]"
    role = "system" if message.role == "developer" else message.role
    made: Message = {"role": role, "content": _text(message.content)}
    if message.name:
        made["name"] = message.name
    if message.tool_call_id:
        made["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        if role != "assistant":
            raise Refusal(400, f"{where}: only the assistant calls tools")
        made["tool_calls"] = [
            {
                "id": each.id,
                "type": "function",
                "function": {
                    "name": each.function.name,
                    "arguments": parsed_arguments(each.function.arguments, where=where),
                },
            }
            for each in message.tool_calls
        ]
    return made


def _text(content: str | list[ContentPart] | None) -> str:
    return "".join(part.text for part in content) if isinstance(content, list) else content or ""


def _finish(choice: Choice, read: ReadTurn) -> str:
    return "tool_calls" if read.calls and choice.finish_reason == "stop" else str(choice.finish_reason)


def _function_call(call: dict[str, Any]) -> FunctionCall:
    return FunctionCall(name=call["function"]["name"], arguments=json.dumps(call["function"]["arguments"]))


def _chat_log_probs(text: ModelText, choice: Choice, begin: int) -> ChatLogProbs:
    entries = []
    for token, log_prob in zip(choice.token_ids[begin:], choice.log_probs[begin:], strict=True):
        entries.append(
            TokenLogProb(token=text.spelling(token), logprob=log_prob, bytes=text.spelled_bytes(token), top_logprobs=[])
        )
    for entry, top in zip(entries, choice.top_log_probs[begin:], strict=False):
        for token, log_prob in top:
            likely = TopLogProb(token=text.spelling(token), logprob=log_prob, bytes=text.spelled_bytes(token))
            entry.top_logprobs.append(likely)
    return ChatLogProbs(content=entries)
