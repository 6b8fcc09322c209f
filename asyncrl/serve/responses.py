"""OpenAI's Responses API: /v1/responses. Its schema as far as it is served, then the handler.

A conversation of items instead of messages: calls of functions, their outputs and reasoning are items of their own. The
answer is one message, calls, or both. Conversations are kept for ``previous_response_id`` unless ``store`` is false.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType

from asyncrl.interfaces import Message, Tool
from asyncrl.serve.call import Call, Version, version_spans
from asyncrl.serve.chat import (
    JSON_OBJECT,
    ChatTurn,
    Form,
    Rendering,
    ToolUse,
    chat_form,
    check_arguments,
    reasoning_effort,
    tool_call,
    tool_use,
)
from asyncrl.serve.errors import APIError
from asyncrl.serve.limits import (
    Count,
    Ignored,
    Limits,
    SamplingFields,
    Text,
    TopLogProbCount,
    check_neutral,
    sampling_params,
)
from asyncrl.serve.openai import FunctionName, NotServed, TokenLogProb, ToolSchema, token_log_probs
from asyncrl.serve.text import ParsedTurn, log_prob_entries


class InputPart(Struct, kw_only=True, forbid_unknown_fields=True):
    """Text only; no address is ever fetched."""

    type: Literal["input_text", "output_text", "refusal", "reasoning_text"]
    text: str = ""
    refusal: str = ""
    annotations: Ignored = None
    logprobs: Ignored = None


class InputItem(Struct, kw_only=True, forbid_unknown_fields=True):
    """A message, a function's call or output, or reasoning, which is not shown to the model."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: Text | None = None
    arguments: str = "{}"
    output: str | list[InputPart] | None = None
    id: Ignored = None
    status: Ignored = None
    phase: Ignored = None
    summary: Ignored = None
    encrypted_content: Ignored = None


class FunctionTool(Struct, tag="function", tag_field="type", kw_only=True, forbid_unknown_fields=True):
    """``strict`` makes no difference."""

    name: Text
    description: str | None = None
    parameters: ToolSchema | None = None
    strict: bool | None = None


class ToolNamespace(Struct, tag="namespace", tag_field="type"):
    """Functions under a common name. Only agents may offer them, which a model never calls then."""


class WebSearchTool(Struct, tag="web_search", tag_field="type"):
    """Only agents may offer it; a model never calls it."""


class NamedFunction(FunctionName, tag="function", tag_field="type"):
    """The function that must be called."""


class AllowedFunctions(Struct, tag="allowed_tools", tag_field="type", kw_only=True, forbid_unknown_fields=True):
    """Only these functions are declared; with mode ``required`` one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Meta(min_length=1)]


FunctionChoice: TypeAlias = Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions


class TextFormat(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """``json_object`` and ``json_schema`` restrict what is sampled; ``strict`` makes no difference."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None  # Any: a JSON schema
    strict: bool | None = None


class TextConfig(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    format: TextFormat = TextFormat()
    verbosity: Literal["low", "medium", "high"] | None = None
    """A variable of the chat template, and a wish without effect where that has none: openai-agents always sends it."""


class Reasoning(Struct, kw_only=True, forbid_unknown_fields=True):
    """``effort`` is the variable ``reasoning_effort`` of the chat template. A model's reasoning is part of its text."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Ignored = None
    generate_summary: Ignored = None


class ResponsesRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses. ``return_token_ids`` adds ids and weight versions to the answer."""

    model: str
    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Count | None = None
    tools: list[FunctionTool | ToolNamespace | WebSearchTool] | None = None
    tool_choice: FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: TopLogProbCount | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # Any: variables of the template
    return_token_ids: bool | None = None
    stream: bool | None = None
    store: bool | None = None
    truncation: Literal["disabled"] | None = None
    background: bool | None = None
    prompt: NotServed = None
    conversation: NotServed = None
    metadata: dict[str, str] | None = None
    user: Ignored = None
    max_tool_calls: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    prompt_cache_options: Ignored = None
    client_metadata: Ignored = None
    stream_options: Ignored = None

    @property
    def with_log_probs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())


ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class OutputText(Struct, kw_only=True, tag="output_text", tag_field="type"):
    """``logprobs``, if they were requested, are of all tokens of the answer."""

    text: str
    annotations: list[str] = []
    logprobs: list[TokenLogProb] = []


class OutputMessage(Struct, kw_only=True, tag="message", tag_field="type"):
    id: str
    content: list[OutputText]
    status: ItemStatus
    role: Literal["assistant"] = "assistant"


class OutputCall(Struct, kw_only=True, tag="function_call", tag_field="type"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class InputDetails(Struct, frozen=True):
    cached_tokens: int = 0


class OutputDetails(Struct, frozen=True):
    reasoning_tokens: int = 0


class ResponseUsage(Struct, kw_only=True):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputDetails = InputDetails()
    output_tokens_details: OutputDetails = OutputDetails()


class IncompleteDetails(Struct):
    """``abort``: an operator ended the request."""

    reason: Literal["max_output_tokens", "abort"]


class Response(Struct, kw_only=True):
    """The answer: the settings of the request, and what was sampled."""

    id: str
    created_at: int
    model: str
    status: ItemStatus
    output: Sequence[OutputMessage | OutputCall]
    usage: ResponseUsage | None = None
    incomplete_details: IncompleteDetails | None = None
    error: None = None
    object: Literal["response"] = "response"
    instructions: str | None
    previous_response_id: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    tools: list[FunctionTool]
    tool_choice: FunctionChoice
    parallel_tool_calls: bool
    text: TextConfig
    reasoning: Reasoning
    top_logprobs: int
    store: bool
    metadata: dict[str, str]
    truncation: Literal["disabled"] = "disabled"
    background: bool = False
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET
    weight_versions: list[Version] | UnsetType = UNSET


class ResponseEvent(Struct, kw_only=True):
    """One event of a stream; the fields after ``sequence_number`` depend on its type."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
    ]
    sequence_number: int
    response: Response | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: OutputMessage | OutputCall | UnsetType = UNSET
    part: OutputText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[TokenLogProb] | UnsetType = UNSET


# -------------------------------------------------------------------------------------------------------- handler


async def create(call: Call) -> web.StreamResponse:
    """Sample a turn of a conversation of items, whole or as a stream."""
    body, state = call.body_as(ResponsesRequest), call.state
    call.choose_model(body.model)
    check_neutral(
        background=(body.background, False), top_logprobs=(None if body.with_log_probs else body.top_logprobs, 0)
    )
    kept = state.conversations.find(call.holder, body.previous_response_id) if body.previous_response_id else b"[]"
    call.kept_bytes = len(kept)
    conversation = await call.off_loop(lambda: _conversation(state.limits, kept, body.input))
    if not conversation:
        raise APIError(400, "the input has no message: reasoning is not shown to the model")
    tools = _tool_use(call, body)
    turn = await ChatTurn.begin(
        call,
        _with_instructions(conversation, body.instructions),
        tools.declared,
        sampling_params(state.limits, body, max_tokens=body.max_output_tokens, top_log_probs=body.top_logprobs or 0),
        form=await _form(call, body, tools),
        rendering=Rendering(template=_template_variables(call, body)),
    )
    if body.stream:
        return await _stream(call, body, turn, conversation)
    await turn.collect()
    response = await _finish(_response(body), call, body, turn, turn.parse(0), conversation)
    return await call.answer_made(lambda: response, entries=log_prob_entries(turn.choices))


async def _finish(
    response: Response,
    call: Call,
    body: ResponsesRequest,
    turn: ChatTurn,
    parsed: ParsedTurn,
    conversation: Sequence[Message],
) -> Response:
    """Complete the answer, and keep the conversation with it; return it."""
    choice = turn.choices[0]
    response.status, log_probs = "completed", list[TokenLogProb]()
    if choice.finish_reason != "stop":
        response.status = "incomplete"
        response.incomplete_details = IncompleteDetails(
            "max_output_tokens" if choice.finish_reason == "length" else "abort"
        )
    if body.with_log_probs:
        text, entries = call.state.chat_text(), log_prob_entries([choice])
        log_probs = await call.off_loop(lambda: token_log_probs(text, choice), entries=entries)
    items: list[OutputMessage | OutputCall] = []
    if parsed.message["content"] or not parsed.calls:
        said = OutputText(text=parsed.message["content"], logprobs=log_probs)
        items.append(OutputMessage(id=_message_id(call), content=[said], status=response.status))
    items += [
        OutputCall(
            id=f"fc_{call.id}_{number}",
            call_id=each["id"],
            name=each["function"]["name"],
            arguments=json.dumps(each["function"]["arguments"]),
            status=response.status,
        )
        for number, each in enumerate(parsed.calls)
    ]
    response.output = items
    taken, made = len(turn.prompt.token_ids), turn.completion_tokens
    response.usage = ResponseUsage(input_tokens=taken, output_tokens=made, total_tokens=taken + made)
    if body.return_token_ids:
        response.prompt_token_ids, response.token_ids = turn.prompt.token_ids, choice.token_ids
        response.weight_versions = version_spans(choice.versions)
    if response.store:
        content = await call.off_loop(lambda: msgspec.json.encode([*conversation, parsed.message]))
        call.state.conversations.add(call.holder, response.id, content)
    return response


def _response(body: ResponsesRequest) -> Response:
    """Return the response as it is before the first token."""
    return Response(
        id=f"resp_{secrets.token_hex(16)}",  # not the call's, which clients choose: a response is found by it
        created_at=int(time.time()),
        model=body.model,
        status="in_progress",
        output=(),
        instructions=body.instructions,
        previous_response_id=body.previous_response_id,
        max_output_tokens=body.max_output_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        tools=[each for each in body.tools or () if isinstance(each, FunctionTool)],
        tool_choice=body.tool_choice or "auto",
        parallel_tool_calls=body.parallel_tool_calls is not False,
        text=body.text or TextConfig(),
        reasoning=body.reasoning or Reasoning(),
        top_logprobs=body.top_logprobs or 0,
        store=body.store is not False,
        metadata=body.metadata or {},
    )


def _message_id(call: Call) -> str:
    return f"msg_{call.id}"


async def _stream(
    call: Call, body: ResponsesRequest, turn: ChatTurn, conversation: Sequence[Message]
) -> web.StreamResponse:
    events, choice, text = call.events(), turn.choices[0], call.state.chat_text()
    said = {"item_id": _message_id(call), "output_index": 0, "content_index": 0}
    response, opened, shown = _response(body), False, 0
    entries = 0  # of each event

    async def send(kind: Any, **fields: Any) -> None:
        """Any: fields of an event, and its type."""
        event = ResponseEvent(type=kind, sequence_number=events.sent, **fields)
        await events.send(event, event=kind, entries=entries)

    async def open_message() -> None:
        nonlocal opened
        opened = True
        item = OutputMessage(id=_message_id(call), content=[], status="in_progress")
        await send("response.output_item.added", output_index=0, item=item)
        await send("response.content_part.added", **said, part=OutputText(text=""))

    async def send_text(piece: str) -> None:
        nonlocal shown, entries
        if not opened:
            await open_message()
        log_probs: list[TokenLogProb] = []
        if body.with_log_probs:
            entries = (len(choice.token_ids) - shown) * (1 + (body.top_logprobs or 0))
            scored = partial(token_log_probs, text, choice, shown)
            log_probs = await call.off_loop(scored, entries=entries, of_request=False)
        shown = len(choice.token_ids)
        await send("response.output_text.delta", **said, delta=piece, logprobs=log_probs)

    async with aclosing(call.stream(turn.requests[0])) as stream:
        async for chunk in stream:
            if not events.begun:
                await send("response.created", response=response)
                await send("response.in_progress", response=response)
            if piece := choice.feed(chunk):
                await send_text(piece)
    parsed = turn.parse(0)
    if parsed.tail:
        await send_text(parsed.tail)
    await _finish(response, call, body, turn, parsed, conversation)
    entries = log_prob_entries([choice]) if body.with_log_probs else 0
    for at, item in enumerate(response.output):
        if isinstance(item, OutputMessage):
            if not opened:
                await open_message()
            (part,) = item.content
            await send("response.output_text.done", **said, text=part.text, logprobs=part.logprobs)
            await send("response.content_part.done", **said, part=part)
        else:
            begun = OutputCall(id=item.id, call_id=item.call_id, name=item.name, arguments="", status="in_progress")
            place = {"item_id": item.id, "output_index": at}
            await send("response.output_item.added", output_index=at, item=begun)
            await send("response.function_call_arguments.delta", **place, delta=item.arguments)
            await send("response.function_call_arguments.done", **place, name=item.name, arguments=item.arguments)
        await send("response.output_item.done", output_index=at, item=item)
    call.leave_session()
    await send(f"response.{response.status}", response=response)
    return await events.end()


# ---------------------------------------------------------------------------------------------------- the request


def _tool_use(call: Call, body: ResponsesRequest) -> ToolUse:
    choice = body.tool_choice
    others = [each for each in body.tools or () if not isinstance(each, FunctionTool)]
    if others and call.plane != "agent":
        raise APIError(400, f"tools of type {others[0].__struct_config__.tag} are not served; leave them out")
    tools = [
        Tool(
            name=each.name,
            description=each.description or "",
            parameters=each.parameters or {"type": "object", "properties": {}},
        )
        for each in body.tools or ()
        if isinstance(each, FunctionTool)
    ]
    if isinstance(choice, NamedFunction):
        return tool_use(tools, named=choice.name)
    if isinstance(choice, AllowedFunctions):
        return tool_use(tools, mode=choice.mode, only=[each.name for each in choice.tools])
    return tool_use(tools, mode=choice or "auto")


async def _form(call: Call, body: ResponsesRequest, tools: ToolUse) -> Form:
    """Return the form of the answer: of the text's format, required calls, or any text."""
    form = (body.text or TextConfig()).format
    schema = None if form.type == "text" else form.schema or JSON_OBJECT
    if form.type == "json_schema" and form.schema is None:
        raise APIError(400, "text.format of type json_schema needs a schema")
    return await chat_form(
        call,
        tools=tools.declared,
        required=tools.required,
        several=body.parallel_tool_calls is not False and not isinstance(body.tool_choice, NamedFunction),
        schema=schema,
    )


def _template_variables(call: Call, body: ResponsesRequest) -> Mapping[str, Any]:
    """Any: variables of the chat template."""
    effort = body.reasoning.effort if body.reasoning else None
    verbosity = body.text.verbosity if body.text else None
    wish = {"verbosity": verbosity} if verbosity and call.state.chat_text().template_mentions("verbosity") else {}
    return {**(body.chat_template_kwargs or {}), **wish, **reasoning_effort(call, effort, field="reasoning.effort")}


def _with_instructions(conversation: list[Message], instructions: str | None) -> list[Message]:
    """Return the conversation with ``instructions`` before it, in one system message with its own."""
    if not instructions:
        return conversation
    begins = conversation[0]["role"] == "system"
    more = [conversation[0]["content"]] if begins else []
    return [{"role": "system", "content": "\n\n".join([instructions, *more])}, *conversation[begins:]]


def _conversation(limits: Limits, kept: bytes, given: str | list[InputItem]) -> list[Message]:
    """Return the messages that were kept and the items as messages; those of the assistant in a row are one."""
    before: list[Message] = msgspec.json.decode(kept)
    if isinstance(given, str):
        return [*before, {"role": "user", "content": given}]
    check_arguments(limits, (item.arguments for item in given if item.type == "function_call"))
    names = {each["id"]: each["function"]["name"] for message in before for each in message.get("tool_calls", ())}
    made: list[Message] = []
    for number, item in enumerate(given):
        where = f"input[{number}]"
        if item.type == "reasoning":
            continue
        if item.type == "function_call_output":
            if item.call_id is None or item.call_id not in names:
                raise APIError(400, f"{where}: no function call before it has the call_id {str(item.call_id)[:80]!r}")
            result = {"tool_call_id": item.call_id, "name": names[item.call_id], "content": _text(item.output)}
            made.append({"role": "tool", **result})
            continue
        role = "assistant" if item.type == "function_call" else item.role
        if role is None:
            raise APIError(400, f"{where}: a message needs a role")
        if role != "assistant" or not made or made[-1]["role"] != "assistant":
            made.append({"role": "system" if role == "developer" else role, "content": ""})
        made[-1]["content"] += _text(item.content)
        if item.type == "function_call":
            if item.call_id is None or item.name is None:
                raise APIError(400, f"{where}: a function call needs call_id and name")
            names[item.call_id] = item.name
            made[-1].setdefault("tool_calls", []).append(tool_call(item.call_id, item.name, item.arguments, where))
    return before + made


def _text(content: str | list[InputPart] | None) -> str:
    return "".join(part.text or part.refusal for part in content) if isinstance(content, list) else content or ""
