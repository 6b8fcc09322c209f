"""Anthropic's API: /v1/messages and its count_tokens. Its schema as far as it is served, then the handlers."""

from __future__ import annotations

import json
from contextlib import aclosing
from typing import Annotated, Any, Literal, TypeAlias

from aiohttp import web
from msgspec import Meta, Struct

from asyncrl.interfaces import Message, Tool
from asyncrl.serve.call import Call, EventStream
from asyncrl.serve.chat import ChatTurn, Form, Rendering, chat_form, reasoning_effort, render_prompt, tool_use
from asyncrl.serve.errors import APIError
from asyncrl.serve.limits import Count, Ignored, Probability, SamplingFields, Temperature, Text, TopK, sampling_params
from asyncrl.serve.text import Choice, ParsedTurn

ToolSchema: TypeAlias = dict[str, Any]  # Any: a JSON schema


class TextBlock(Struct, tag="text", tag_field="type", forbid_unknown_fields=True, omit_defaults=True):
    text: str
    cache_control: Ignored = None
    citations: Ignored = None


class ToolUseBlock(
    Struct, tag="tool_use", tag_field="type", kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    id: str
    name: Text
    input: dict[str, Any]  # Any: what the tool takes
    cache_control: Ignored = None
    caller: Ignored = None


class ToolResultBlock(Struct, tag="tool_result", tag_field="type", kw_only=True, forbid_unknown_fields=True):
    """Templates have no place for ``is_error``: the content has to say so."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: Ignored = None
    cache_control: Ignored = None


class ThinkingBlock(Struct, tag="thinking", tag_field="type", forbid_unknown_fields=True):
    """Reasoning of an earlier turn, which is not shown to the model."""

    thinking: str
    signature: Ignored = None


class RedactedThinkingBlock(Struct, tag="redacted_thinking", tag_field="type", forbid_unknown_fields=True):
    data: str


Block: TypeAlias = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock


class InputMessage(Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolParam(Struct, kw_only=True, forbid_unknown_fields=True):
    """``strict`` makes no difference."""

    name: Text
    input_schema: ToolSchema
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: Ignored = None
    cache_control: Ignored = None
    eager_input_streaming: Ignored = None


class ToolChoice(Struct, kw_only=True, forbid_unknown_fields=True):
    """``any`` and ``tool`` (which has a ``name``) restrict what is sampled to calls."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class NoThinking(Struct, tag="disabled", tag_field="type", forbid_unknown_fields=True):
    """A model's reasoning is part of its text."""


class AdaptiveThinking(Struct, tag="adaptive", tag_field="type", forbid_unknown_fields=True):
    """The model decides, as it does anyway."""

    display: Ignored = None


class BudgetedThinking(Struct, tag="enabled", tag_field="type", kw_only=True, forbid_unknown_fields=True):
    """Only for agents, to which it makes no difference."""

    budget_tokens: Ignored = None
    display: Ignored = None


class ContextEdit(Struct, kw_only=True, forbid_unknown_fields=True):
    """Reasoning of earlier turns is not shown to the model anyway."""

    type: Literal["clear_thinking_20251015"]
    keep: Ignored = None


class ContextManagement(Struct, kw_only=True, forbid_unknown_fields=True):
    edits: list[ContextEdit] = []


class OutputFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    """Restricts what is sampled to JSON of ``schema``."""

    schema: ToolSchema
    type: Literal["json_schema"] = "json_schema"


class OutputConfig(Struct, kw_only=True, forbid_unknown_fields=True):
    """``effort`` is the variable ``reasoning_effort`` of the chat template."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class _Conversation(Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    metadata: Ignored = None
    service_tier: Ignored = None
    betas: Ignored = None
    cache_control: Ignored = None
    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoice | None = None
    thinking: NoThinking | AdaptiveThinking | BudgetedThinking | None = None
    context_management: ContextManagement | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None


class MessagesRequest(_Conversation, kw_only=True):
    max_tokens: Count
    stop_sequences: list[Text] | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    stream: bool | None = None


class CountTokensRequest(_Conversation, kw_only=True):
    """The fields of a conversation alone."""


class TokenCount(Struct):
    input_tokens: int


class AnthropicUsage(Struct, kw_only=True):
    input_tokens: int
    output_tokens: int


AnswerBlock: TypeAlias = TextBlock | ToolUseBlock
StopReason: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn"]


class MessageAnswer(Struct, tag="message", tag_field="type", kw_only=True):
    id: str
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: AnthropicUsage
    role: Literal["assistant"] = "assistant"


class MessageStart(Struct, tag="message_start", tag_field="type"):
    message: MessageAnswer


class BlockStart(Struct, tag="content_block_start", tag_field="type"):
    index: int
    content_block: AnswerBlock


class TextDelta(Struct, tag="text_delta", tag_field="type"):
    text: str


class InputDelta(Struct, tag="input_json_delta", tag_field="type"):
    partial_json: str


class BlockDelta(Struct, tag="content_block_delta", tag_field="type"):
    index: int
    delta: TextDelta | InputDelta


class BlockStop(Struct, tag="content_block_stop", tag_field="type"):
    index: int


class StopDelta(Struct):
    stop_reason: str
    stop_sequence: str | None


class MessageDelta(Struct, tag="message_delta", tag_field="type"):
    delta: StopDelta
    usage: AnthropicUsage


class MessageStop(Struct, tag="message_stop", tag_field="type"):
    pass


MessageEvent: TypeAlias = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
"""One event of a stream."""


# ------------------------------------------------------------------------------------------------------- handlers


async def count_tokens(call: Call) -> web.StreamResponse:
    """Count the tokens of the prompt of a conversation."""
    body = call.body_as(CountTokensRequest)
    call.choose_model(body.model)
    rendering = _rendering(call, body)
    prompt = await render_prompt(call, _conversation(body), _tools(body), call.session(create=False), rendering)
    return call.answer(TokenCount(len(prompt.token_ids)))


async def messages(call: Call) -> web.StreamResponse:
    """Sample a turn of a chat, whole or as a stream."""
    body = call.body_as(MessagesRequest)
    call.choose_model(body.model)
    tools = _tools(body)
    turn = await ChatTurn.begin(
        call,
        _conversation(body),
        tools,
        sampling_params(
            call.state.limits,
            SamplingFields(temperature=body.temperature, top_p=body.top_p, top_k=body.top_k, stop=body.stop_sequences),
            max_tokens=body.max_tokens,
        ),
        form=await _form(call, body, tools),
        rendering=_rendering(call, body),
    )
    if body.stream:
        return await _stream(call, body, turn)
    await turn.collect()
    parsed = turn.parse(0)
    content: list[AnswerBlock] = []
    if parsed.message["content"]:
        content.append(TextBlock(parsed.message["content"]))
    content += [_tool_use(each) for each in parsed.calls]
    return call.answer(_answer(call, body, turn, content, stop_reason=_stop_reason(turn.choices[0], parsed)))


async def _form(call: Call, body: MessagesRequest, tools: list[Tool]) -> Form:
    """Return the form of the answer: of the output format, required calls, or any text."""
    choice = body.tool_choice
    kind = choice.type if choice is not None else "auto"
    named = (choice.name or "") if choice is not None and kind == "tool" else None
    output = (body.output_config.format if body.output_config is not None else None) or body.output_format
    return await chat_form(
        call,
        tools=tools,
        required=tool_use(tools, mode="required" if kind == "any" else "auto", named=named).required,
        several=choice is None or not (choice.disable_parallel_tool_use or kind == "tool"),
        schema=output.schema if output is not None else None,
    )


async def _stream(call: Call, body: MessagesRequest, turn: ChatTurn) -> web.StreamResponse:
    events = call.events()
    choice = turn.choices[0]
    block = -1

    async def send_text(text: str) -> None:
        nonlocal block
        if block < 0:
            block = 0
            await _send(events, BlockStart(block, TextBlock("")))
        await _send(events, BlockDelta(block, TextDelta(text)))

    async with aclosing(call.stream(turn.requests[0])) as stream:
        async for chunk in stream:
            if not events.begun:
                await _send(events, MessageStart(_answer(call, body, turn, [], stop_reason=None)))
            if text := choice.feed(chunk):
                await send_text(text)
    parsed = turn.parse(0)
    if parsed.tail:
        await send_text(parsed.tail)
    if block >= 0:
        await _send(events, BlockStop(block))
    for made in parsed.calls:
        block += 1
        use = _tool_use(made)
        await _send(events, BlockStart(block, ToolUseBlock(id=use.id, name=use.name, input={})))
        await _send(events, BlockDelta(block, InputDelta(json.dumps(use.input))))
        await _send(events, BlockStop(block))
    await _send(events, MessageDelta(StopDelta(_stop_reason(choice, parsed), choice.stop_string), _usage(turn)))
    call.leave_session()
    await _send(events, MessageStop())
    return await events.end()


async def _send(events: EventStream, event: MessageEvent) -> None:
    await events.send(event, event=str(event.__struct_config__.tag))


def _answer(
    call: Call, body: MessagesRequest, turn: ChatTurn, content: list[AnswerBlock], *, stop_reason: StopReason | None
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


def _stop_reason(choice: Choice, parsed: ParsedTurn) -> StopReason:
    """Return why the turn ended; ``pause_turn``: it was cut off and may be continued."""
    if choice.finish_reason == "abort":
        return "pause_turn"
    if choice.stop_string is not None:
        return "stop_sequence"
    if choice.finish_reason == "length":
        return "max_tokens"
    return "tool_use" if parsed.calls else "end_turn"


def _tool_use(call: dict[str, Any]) -> ToolUseBlock:
    function = call["function"]
    return ToolUseBlock(id=call["id"], name=function["name"], input=function["arguments"])


def _tools(body: MessagesRequest | CountTokensRequest) -> list[Tool]:
    if body.tool_choice is not None and body.tool_choice.type == "none":
        return []
    return [
        Tool(name=tool.name, description=tool.description or "", parameters=tool.input_schema)
        for tool in body.tools or ()
    ]


def _rendering(call: Call, body: MessagesRequest | CountTokensRequest) -> Rendering:
    """Return how the conversation is rendered; the last message may be the beginning of the answer."""
    if isinstance(body.thinking, BudgetedThinking) and call.plane != "agent":
        raise APIError(400, "thinking.type = enabled is not served; leave it out")
    effort = body.output_config.effort if body.output_config is not None else None
    return Rendering(
        template=reasoning_effort(call, effort, field="output_config.effort"),
        continues=body.messages[-1].role == "assistant",
    )


def _conversation(body: MessagesRequest | CountTokensRequest) -> list[Message]:
    """Return all messages in the form that chat templates take."""
    conversation: list[Message] = []
    if body.system:
        conversation.append({"role": "system", "content": _text(body.system)})
    names: dict[str, str] = {}
    for number, message in enumerate(body.messages):
        conversation += _messages(message, names, where=f"messages[{number}]")
    return conversation


def _messages(message: InputMessage, names: dict[str, str], *, where: str) -> list[Message]:
    """Return one of Anthropic's messages, which is several if it has results of tools.

    ``names`` collects the tools' names by the id of their calls, since templates need the name with a result.
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
                raise APIError(400, f"{where}: only the assistant uses tools")
            names[block.id] = block.name
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ToolResultBlock):
            if message.role != "user":
                raise APIError(400, f"{where}: only the user sends results of tools")
            result: Message = {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content or "")}
            if block.tool_use_id in names:
                result["name"] = names[block.tool_use_id]
            results.append(result)
    made: Message = {"role": message.role, "content": "".join(texts)}
    if calls:
        made["tool_calls"] = calls
    return results + ([made] if texts or calls or not results else [])


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)
