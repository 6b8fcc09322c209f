"""Anthropic's requests, answers and events, as far as they are served."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from asyncrl.serve.openai_schema import Count, Text, ToolSchema

__all__ = ["CountTokensRequest", "MessageAnswer", "MessageEvent", "MessagesRequest", "TokenCount"]


class TextBlock(Struct, tag="text", tag_field="type"):
    text: str


class ToolUseBlock(Struct, tag="tool_use", tag_field="type", kw_only=True):
    id: str
    name: Text
    input: dict[str, Any]  # Any: what the tool takes


class ToolResultBlock(Struct, tag="tool_result", tag_field="type", kw_only=True):
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


Block: TypeAlias = TextBlock | ToolUseBlock | ToolResultBlock


class InputMessage(Struct):
    role: Literal["user", "assistant"]
    content: str | list[Block]


class ToolParam(Struct, kw_only=True):
    name: Text
    input_schema: ToolSchema
    description: str | None = None


class ToolChoice(Struct, kw_only=True):
    """``any`` and ``tool`` (which has a ``name``) restrict what is sampled to calls."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct):
    """Only ``disabled``: what a model thinks before it answers is part of its text."""

    type: Literal["disabled"]


class OutputFormat(Struct, kw_only=True):
    """JSON of ``schema``, whose tokens alone are sampled."""

    schema: ToolSchema
    type: Literal["json_schema"] = "json_schema"


class OutputConfig(Struct, kw_only=True):
    format: OutputFormat | None = None


class _Conversation(Struct, kw_only=True):
    model: str
    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None


class MessagesRequest(_Conversation, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Count
    stop_sequences: list[Text] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    stream: bool | None = None


class CountTokensRequest(_Conversation, kw_only=True):
    """POST /v1/messages/count_tokens."""


class TokenCount(Struct):
    """Tokens of a prompt."""

    input_tokens: int


class AnthropicUsage(Struct, kw_only=True):
    input_tokens: int
    output_tokens: int


AnswerBlock: TypeAlias = TextBlock | ToolUseBlock


class MessageAnswer(Struct, tag="message", tag_field="type", kw_only=True):
    """The assistant's turn."""

    id: str
    model: str
    content: list[AnswerBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn"] | None
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
