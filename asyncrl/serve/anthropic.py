"""Anthropic's dialect: /v1/messages."""

from __future__ import annotations

import json
from contextlib import aclosing
from typing import Literal, TypeAlias

from aiohttp import web

from asyncrl.interfaces import Message, Tool
from asyncrl.serve.anthropic_schema import (
    AnswerBlock,
    AnthropicUsage,
    BlockDelta,
    BlockStart,
    BlockStop,
    CountTokensRequest,
    InputDelta,
    InputMessage,
    MessageAnswer,
    MessageDelta,
    MessageEvent,
    MessagesRequest,
    MessageStart,
    MessageStop,
    StopDelta,
    TextBlock,
    TextDelta,
    TokenCount,
    ToolResultBlock,
    ToolUseBlock,
)
from asyncrl.serve.call import Call, EventStream
from asyncrl.serve.chat_turn import ChatTurn, rendered
from asyncrl.serve.choice import Choice, ReadTurn
from asyncrl.serve.failure import Refusal
from asyncrl.serve.grammar import Form, chat_form
from asyncrl.serve.model_text import ModelText
from asyncrl.serve.sampling import sampling_params

__all__ = ["count_tokens", "messages"]

StopReason: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn"]


async def count_tokens(call: Call) -> web.StreamResponse:
    """The length of the prompt that a conversation would have."""
    body = call.body_as(CountTokensRequest)
    call.face.check_model(body.model)
    prompt = await rendered(call, _conversation(body), _tools(body), call.session(make=False))
    return call.answer(TokenCount(len(prompt.token_ids)))


async def messages(call: Call) -> web.StreamResponse:
    """A turn of a chat, whole or as a stream."""
    body = call.body_as(MessagesRequest)
    call.face.check_model(body.model)
    tools = _tools(body)
    turn = await ChatTurn.begin(
        call,
        _conversation(body),
        tools,
        sampling_params(
            call.face.limits,
            max_tokens=body.max_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            stop=body.stop_sequences,
        ),
        form=_form(call.face.chat_text(), body, tools),
    )
    if body.stream:
        return await _stream(call, body, turn)
    await turn.collect()
    read = turn.read(0)
    content: list[AnswerBlock] = []
    if read.message["content"]:
        content.append(TextBlock(read.message["content"]))
    content += [_tool_use(call_made) for call_made in read.calls]
    return call.answer(_answer(call, body, turn, content, stop_reason=_stop_reason(turn.choices[0], read)))


def _form(text: ModelText, body: MessagesRequest, tools: list[Tool]) -> Form:
    """What the answer must be: of the output format, calls that are demanded, or anything."""
    choice, demanded = body.tool_choice, list[Tool]()
    if choice is not None and choice.type in ("any", "tool"):
        demanded = [tool for tool in tools if choice.type == "any" or tool.name == choice.name]
        if not demanded:
            raise Refusal(400, f"tool_choice demands {choice.name or 'a tool'!r}, which is none of the tools")
    written = (body.output_config.format if body.output_config is not None else None) or body.output_format
    return chat_form(
        text,
        tools=tools,
        demanded=demanded,
        several=choice is None or not (choice.disable_parallel_tool_use or choice.type == "tool"),
        schema=written.schema if written is not None else None,
    )


async def _stream(call: Call, body: MessagesRequest, turn: ChatTurn) -> web.StreamResponse:
    events = call.events()
    choice = turn.choices[0]
    block = -1
    async with aclosing(call.stream(turn.requests[0])) as stream:
        async for piece in stream:
            if not events.begun:
                await _send(events, MessageStart(_answer(call, body, turn, [], stop_reason=None)))
            text = choice.feed(piece)
            if text:
                if block < 0:
                    block = 0
                    await _send(events, BlockStart(block, TextBlock("")))
                await _send(events, BlockDelta(block, TextDelta(text)))
    read = turn.read(0)
    if read.tail:
        if block < 0:
            block = 0
            await _send(events, BlockStart(block, TextBlock("")))
        await _send(events, BlockDelta(block, TextDelta(read.tail)))
    if block >= 0:
        await _send(events, BlockStop(block))
    for made in read.calls:
        block += 1
        use = _tool_use(made)
        await _send(events, BlockStart(block, ToolUseBlock(id=use.id, name=use.name, input={})))
        await _send(events, BlockDelta(block, InputDelta(json.dumps(use.input))))
        await _send(events, BlockStop(block))
    stop = StopDelta(_stop_reason(choice, read), choice.stop_string)
    await _send(events, MessageDelta(stop, _usage(turn)))
    await _send(events, MessageStop())
    return await events.end()


async def _send(events: EventStream, event: MessageEvent) -> None:
    await events.send(event, event=str(event.__struct_config__.tag))


def _answer(
    call: Call,
    body: MessagesRequest,
    turn: ChatTurn,
    content: list[AnswerBlock],
    *,
    stop_reason: StopReason | None,
) -> MessageAnswer:
    return MessageAnswer(
        id=f"msg_{call.id}",
        model=body.model,
        content=content,
        stop_reason=stop_reason,
        stop_sequence=turn.choices[0].stop_string,
        usage=_usage(turn),
    )


def _usage(turn: ChatTurn) -> AnthropicUsage:
    return AnthropicUsage(input_tokens=len(turn.prompt.token_ids), output_tokens=turn.completion_tokens)


def _stop_reason(choice: Choice, read: ReadTurn) -> StopReason:
    """Why the turn ended. ``pause_turn`` is this dialect's word for one that is cut off and may go on."""
    if choice.finish_reason == "abort":
        return "pause_turn"
    if choice.stop_string is not None:
        return "stop_sequence"
    if choice.finish_reason == "length":
        return "max_tokens"
    return "tool_use" if read.calls else "end_turn"


def _tool_use(call: dict[str, object]) -> ToolUseBlock:
    function = call["function"]
    assert isinstance(function, dict)
    return ToolUseBlock(id=str(call["id"]), name=function["name"], input=function["arguments"])


def _tools(body: MessagesRequest | CountTokensRequest) -> list[Tool]:
    if body.tool_choice is not None and body.tool_choice.type == "none":
        return []
    return [
        Tool(name=tool.name, description=tool.description or "", parameters=tool.input_schema)
        for tool in body.tools or ()
    ]


def _conversation(body: MessagesRequest | CountTokensRequest) -> list[Message]:
    """All messages, in the form that templates take."""
    said: list[Message] = []
    if body.system:
        said.append({"role": "system", "content": _text(body.system)})
    names: dict[str, str] = {}
    for number, message in enumerate(body.messages):
        said += _said(message, names, where=f"messages[{number}]")
    return said


def _said(message: InputMessage, names: dict[str, str], *, where: str) -> list[Message]:
    """One message of Anthropic's is several where it brings results of tools.

    ``names`` collects the tools' names by the id of their calls: templates want the name of a result.
    """
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    texts: list[str] = []
    calls: list[dict[str, object]] = []
    results: list[Message] = []
    for block in message.content:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolUseBlock):
            if message.role != "assistant":
                raise Refusal(400, f"{where}: only the assistant uses tools")
            names[block.id] = block.name
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
        else:
            results.append(_result(block, names, message, where=where))
    made: Message = {"role": message.role, "content": "".join(texts)}
    if calls:
        made["tool_calls"] = calls
    return results + ([made] if texts or calls or not results else [])


def _result(block: ToolResultBlock, names: dict[str, str], message: InputMessage, *, where: str) -> Message:
    if message.role != "user":
        raise Refusal(400, f"{where}: results of tools come from the user")
    result: Message = {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content or "")}
    if block.tool_use_id in names:
        result["name"] = names[block.tool_use_id]
    return result


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)
