"""OpenAI's API: chat completions, completions, models. Its schema as far as it is served, then the handlers.

Fields that would change the distribution and are not served are refused, not ignored. asyncrl adds token ids and weight
versions to the answers (``return_token_ids``).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, Literal, TypeAlias

from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType

from asyncrl.interfaces import Generation, GenerationChunk, Message, Tool, TopLogProbs
from asyncrl.serve.call import Call, Version, version_spans
from asyncrl.serve.chat import (
    JSON_OBJECT,
    ChatTurn,
    Form,
    Rendering,
    ToolUse,
    chat_form,
    check_arguments,
    check_verbosity,
    choice_grammar,
    json_grammar,
    json_schema,
    lark_grammar,
    reasoning_effort,
    regex_grammar,
    render_prompt,
    text_grammar,
    tool_call,
    tool_use,
)
from asyncrl.serve.errors import APIError
from asyncrl.serve.limits import (
    Count,
    CountOrNone,
    Ignored,
    Limits,
    SamplingFields,
    Text,
    TokenId,
    TopLogProbCount,
    check_choices,
    check_neutral,
    sampling_params,
)
from asyncrl.serve.text import Choice, ModelText, ParsedTurn, last_tokens, log_prob_entries, prompt_only

NotServed: TypeAlias = None
"""A field that would change the answer and is not served: refused by name."""
ToolSchema: TypeAlias = dict[str, Any]  # Any: a JSON schema


class FunctionCall(Struct, forbid_unknown_fields=True):
    """``arguments`` is JSON in a string; an object is accepted too."""

    name: Text
    arguments: str | dict[str, Any] = "{}"  # Any: what the tool takes


class ToolCall(Struct, forbid_unknown_fields=True):
    """``index`` is that of a stream's delta, which clients send back."""

    function: FunctionCall
    id: str = ""
    type: Literal["function"] = "function"
    index: Ignored = None


class ContentPart(Struct, forbid_unknown_fields=True):
    """Text only; no URL is ever fetched."""

    text: str
    type: Literal["text"]
    cache_control: Ignored = None
    prompt_cache_breakpoint: Ignored = None


class ChatMessage(Struct, forbid_unknown_fields=True):
    """What answers have besides, in several dialects, is accepted; reasoning is not shown to the model."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: Ignored = None
    reasoning_content: Ignored = None
    refusal: Ignored = None
    annotations: Ignored = None
    cache_control: Ignored = None
    audio: NotServed = None
    function_call: NotServed = None


class FunctionDefinition(Struct, forbid_unknown_fields=True):
    """``strict`` makes no difference."""

    name: Text
    description: str | None = None
    parameters: ToolSchema | None = None
    strict: Ignored = None


class ToolDefinition(Struct, forbid_unknown_fields=True):
    function: FunctionDefinition
    type: Literal["function"] = "function"
    cache_control: Ignored = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    """``continuous_usage_stats`` is vLLM's: with ``include_usage``, each event has the usage so far."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Ignored = None


class JsonSchema(Struct, kw_only=True, forbid_unknown_fields=True):
    """``strict`` makes no difference: the schema always holds."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None  # Any: a JSON schema
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    """``json_object`` and ``json_schema`` restrict what is sampled, token by token."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class FunctionName(Struct, forbid_unknown_fields=True):
    name: Text


class NamedTool(Struct, tag="function", tag_field="type", forbid_unknown_fields=True):
    """The tool that must be called."""

    function: FunctionName


class ToolSelection(Struct, kw_only=True, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1)]


class AllowedTools(Struct, tag="allowed_tools", tag_field="type", forbid_unknown_fields=True):
    """Only these tools are declared; with mode ``required`` one of them must be called."""

    allowed_tools: ToolSelection


class StructuredOutputs(Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's: one of them, which the whole text follows."""

    json: str | dict[str, Any] | None = None  # Any: a JSON schema
    json_object: bool | None = None
    regex: Text | None = None
    choice: Annotated[list[Text], Meta(min_length=1)] | None = None
    grammar: Text | None = None


class _Sampling(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    model: str
    n: Count | None = None
    max_tokens: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    typical_p: float | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None  # Any: a JSON schema
    guided_regex: Text | None = None
    guided_choice: Annotated[list[Text], Meta(min_length=1)] | None = None
    guided_grammar: Text | None = None
    regex: Text | None = None
    ebnf: Text | None = None
    prompt_logprobs: TopLogProbCount | None = None
    user: Ignored = None
    metadata: Ignored = None
    request_id: Ignored = None
    priority: Ignored = None
    cache_salt: Ignored = None


class ChatCompletionRequest(_Sampling, kw_only=True):
    """POST /v1/chat/completions. ``return_token_ids`` adds ids and weight versions to the answer.

    With ``tools`` special tokens are text even if ``skip_special_tokens`` is set: calls are written with them.
    """

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogProbCount | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # Any: variables of the template
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    prompt_cache_options: Ignored = None
    functions: NotServed = None
    function_call: NotServed = None
    modalities: list[Literal["text"]] | None = None
    audio: NotServed = None
    prediction: NotServed = None


class ChatTokensRequest(ChatCompletionRequest, kw_only=True):
    """POST /v1/chat/completions/tokens, prime-rl's: a chat whose prompt is ``tokens``.

    The messages are not rendered, so what only their rendering takes has no effect.
    """

    tokens: Annotated[list[TokenId], Meta(min_length=1)]


class CompletionRequest(_Sampling, kw_only=True):
    """POST /v1/completions. The prompt is text or token ids, or several of either.

    With ``echo`` text and log-probs begin with the prompt's, and ``max_tokens`` may be 0.
    """

    max_tokens: CountOrNone | None = None
    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    logprobs: TopLogProbCount | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class TokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's: of a ``prompt``, or of ``messages`` with what their template takes."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    tools: list[ToolDefinition] | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # Any: variables of the template
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class TokenizeAnswer(Struct, kw_only=True):
    """``token_strs`` are the vocabulary's entries."""

    count: int
    max_model_len: int | None
    tokens: Sequence[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    tokens: list[TokenId]
    model: str | None = None


class DetokenizeAnswer(Struct):
    prompt: str


class Usage(Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class AnswerCall(Struct, kw_only=True):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class AnswerMessage(Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None = None
    tool_calls: list[AnswerCall] | None = None
    refusal: str | None = None


class TopLogProb(Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogProb(TopLogProb, kw_only=True):
    """``logprob`` under the distribution the token was sampled from, as :class:`asyncrl.interfaces.SamplingParams`.

    ``top_logprobs`` has fewer entries than requested where fewer tokens could be sampled.
    """

    top_logprobs: list[TopLogProb] = []


class ChatLogProbs(Struct, kw_only=True):
    content: list[TokenLogProb]
    refusal: None = None


class PromptLogProb(Struct, kw_only=True):
    """vLLM's; ``rank`` is None for a token that is not among the likeliest ones requested."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogProbs: TypeAlias = list[dict[str, PromptLogProb] | None]
"""By token id, for each token of the prompt; None for the first."""


class ChatChoice(Struct, kw_only=True):
    index: int
    message: AnswerMessage
    finish_reason: str
    logprobs: ChatLogProbs | None = None
    token_ids: Sequence[int] | None = None
    weight_versions: list[Version] | None = None


class ChatCompletion(Struct, kw_only=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_token_ids: Sequence[int] | None = None
    prompt_logprobs: PromptLogProbs | None = None
    system_fingerprint: str | None = None


class CompletionLogProbs(Struct, kw_only=True):
    """``top_logprobs`` have the token itself besides the likeliest ones, as OpenAI's have."""

    tokens: list[str]
    token_logprobs: Sequence[float | None]
    text_offset: list[int]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct, kw_only=True):
    index: int
    text: str
    finish_reason: str | None = None
    logprobs: CompletionLogProbs | None = None
    prompt_token_ids: Sequence[int] | None = None
    prompt_logprobs: PromptLogProbs | None = None
    token_ids: Sequence[int] | None = None
    weight_versions: list[Version] | None = None


class Completion(Struct, kw_only=True):
    """The answer, and each event of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: str | None = None


class CallDelta(AnswerCall, kw_only=True):
    index: int


class Delta(Struct, kw_only=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChunkChoice(Struct, kw_only=True):
    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: ChatLogProbs | None = None
    token_ids: Sequence[int] | None = None
    weight_versions: list[Version] | None = None


class ChatCompletionChunk(Struct, kw_only=True):
    """``weight_versions`` count from the first token of the choice, not of the chunk."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | None = None
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class ModelCard(Struct, kw_only=True):
    """A served model, as OpenAI's, Anthropic's and vLLM's clients read it.

    ``max_model_len`` is the longest prompt and answer together, in tokens; ``parent``, of an adapter, the model that it
    is served beside.
    """

    id: str
    created: int
    display_name: str
    created_at: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    owned_by: str = "asyncrl"
    max_model_len: int | None = None
    parent: str | None = None


class ModelList(Struct, kw_only=True):
    """One page, in OpenAI's and Anthropic's schema."""

    data: list[ModelCard]
    first_id: str
    last_id: str
    object: Literal["list"] = "list"
    has_more: bool = False


# --------------------------------------------------------------------------------------------------------- models

_CREATED = int(time.time())


async def models(call: Call) -> web.StreamResponse:
    """List the model under each of its names, then the adapters that are served beside it."""
    cards = [_card(call, name) for name in (*call.state.names, *call.state.adapters)]
    return call.answer(ModelList(data=cards, first_id=cards[0].id, last_id=cards[-1].id))


async def model(call: Call) -> web.StreamResponse:
    """Describe the model under one of its names, or an adapter."""
    name = call.request.match_info["model"]
    call.state.adapter_of(name)
    return call.answer(_card(call, name))


def _card(call: Call, name: str) -> ModelCard:
    created_at = datetime.fromtimestamp(_CREATED, UTC).isoformat().replace("+00:00", "Z")
    context = call.state.context_tokens
    return ModelCard(
        id=name,
        created=_CREATED,
        display_name=name,
        created_at=created_at,
        max_model_len=context,
        parent=call.state.names[0] if call.state.adapter_of(name) else None,
    )


# --------------------------------------------------------------------------------- what chats and completions share


def _check_neutral(body: ChatCompletionRequest | CompletionRequest, **fields: tuple[object, object]) -> None:
    check_neutral(
        use_beam_search=(body.use_beam_search, False),
        length_penalty=(body.length_penalty, 1),
        typical_p=(body.typical_p, 1),
        spaces_between_special_tokens=(body.spaces_between_special_tokens, True),
        **fields,
    )


async def _constraint(
    call: Call, body: ChatCompletionRequest | CompletionRequest
) -> tuple[Mapping[str, Any] | None, str]:
    """Return the JSON schema and the grammar that the text follows; at most one of them is there. Any: JSON."""
    outputs, form = body.structured_outputs or StructuredOutputs(), body.response_format
    schemas: dict[str, str | dict[str, Any] | None] = {
        "guided_json": body.guided_json,
        "structured_outputs.json": outputs.json,
        "structured_outputs.json_object": dict(JSON_OBJECT) if outputs.json_object else None,
    }
    if form is not None and form.type == "json_object":
        schemas["response_format"] = dict(JSON_OBJECT)
    elif form is not None and form.type == "json_schema":
        if form.json_schema is None:
            raise APIError(400, "response_format of type json_schema needs json_schema: {name, schema}")
        schemas["response_format"] = form.json_schema.schema or dict(JSON_OBJECT)
    texts: dict[str, tuple[Callable[[Any], str], Any]] = {
        "regex": (regex_grammar, body.regex),
        "guided_regex": (regex_grammar, body.guided_regex),
        "structured_outputs.regex": (regex_grammar, outputs.regex),
        "guided_choice": (choice_grammar, body.guided_choice),
        "structured_outputs.choice": (choice_grammar, outputs.choice),
        "ebnf": (lark_grammar, body.ebnf),
        "guided_grammar": (lark_grammar, body.guided_grammar),
        "structured_outputs.grammar": (lark_grammar, outputs.grammar),
    }
    given = [name for name, schema in schemas.items() if schema is not None]
    given += [name for name, (_, text) in texts.items() if text is not None]
    if len(given) > 1:
        raise APIError(400, f"{' and '.join(given)} both restrict the text: give one of them")
    if not given:
        return None, ""
    (name,) = given
    if name in texts:
        make, text = texts[name]
        return None, await text_grammar(call, make, text)
    return json_schema(call.state.limits, name, schemas[name]), ""


def _last_tokens(call: Call, body: ChatCompletionRequest | CompletionRequest) -> int | None:
    """Return the length that prompts are cut to on the left, as vLLM does; None for none."""
    if body.truncate_prompt_tokens == 0:
        raise APIError(400, "truncate_prompt_tokens is 0; at least 1, or -1 for what the context holds")
    if body.truncate_prompt_tokens == -1:
        context = call.state.context_tokens
        return None if context is None else context - 1
    return body.truncate_prompt_tokens


def _usage_events(body: ChatCompletionRequest | CompletionRequest) -> Literal["none", "last", "all"]:
    """Return the events of a stream that have the usage; an API error for options of a stream that is none."""
    options = body.stream_options
    if options is not None and not body.stream:
        raise APIError(400, "stream_options are of streams: leave them out, or set stream")
    if options is None or not options.include_usage:
        return "none"
    return "all" if options.continuous_usage_stats else "last"


def token_usage(prompt_tokens: int, completion_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, total_tokens=prompt_tokens + completion_tokens
    )


# ----------------------------------------------------------------------------------------------------------- chat


async def chat_completions(call: Call) -> web.StreamResponse:
    """Sample a turn of a chat, whole or as a stream."""
    return await _chat(call, call.body_as(ChatCompletionRequest))


async def chat_tokens(call: Call) -> web.StreamResponse:
    """Sample a turn of a chat after a prompt of token ids, whole or as a stream."""
    body = call.body_as(ChatTokensRequest)
    check_neutral(
        continue_final_message=(body.continue_final_message, False),
        truncate_prompt_tokens=(body.truncate_prompt_tokens, None),
    )
    return await _chat(call, body, tuple(body.tokens))


async def _chat(call: Call, body: ChatCompletionRequest, tokens: tuple[int, ...] = ()) -> web.StreamResponse:
    call.choose_model(body.model)
    _check_neutral(body, top_logprobs=(None if body.logprobs else body.top_logprobs, 0), echo=(body.echo, False))
    check_verbosity(call, body.verbosity, field="verbosity")
    effort = reasoning_effort(call, body.reasoning_effort, field="reasoning_effort")
    tools, usage = _tool_use(body), _usage_events(body)
    turn = await ChatTurn.begin(
        call,
        await call.off_loop(lambda: _messages(call.state.limits, body.messages)),
        tools.declared,
        sampling_params(
            call.state.limits,
            body,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            top_log_probs=body.top_logprobs or 0,
            prompt_log_probs=body.prompt_logprobs,
        ),
        form=await _form(call, body, tools),
        choices=check_choices(call.state.limits, body.n),
        rendering=_rendering(body, last=_last_tokens(call, body), more=effort),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens,
        tokens=tokens,
    )
    if body.stream:
        if body.prompt_logprobs is not None:
            raise APIError(400, "prompt_logprobs are part of a whole answer: leave out stream")
        return await _stream_chat(call, body, turn, usage)
    await turn.collect()
    parsed = [turn.parse(number) for number in range(len(turn.choices))]
    text = call.state.chat_text()

    def answer() -> ChatCompletion:
        return ChatCompletion(
            id=f"chatcmpl-{call.id}",
            created=int(time.time()),
            model=body.model,
            choices=[_chat_choice(text, body, turn.choices[at], at, each) for at, each in enumerate(parsed)],
            usage=token_usage(len(turn.prompt.token_ids), turn.completion_tokens),
            prompt_token_ids=turn.prompt.token_ids if body.return_token_ids else None,
            prompt_logprobs=prompt_log_probs(text, turn.prompt.token_ids, turn.choices[0]),
        )

    return await call.answer_made(answer, entries=log_prob_entries(turn.choices))


def _rendering(
    body: ChatCompletionRequest | TokenizeRequest, *, last: int | None = None, more: Mapping[str, Any] | None = None
) -> Rendering:
    """``more`` are variables of the template. Any: JSON."""
    if body.continue_final_message and body.add_generation_prompt:
        raise APIError(400, "continue_final_message begins no new message: leave out add_generation_prompt")
    return Rendering(
        template={**(body.chat_template_kwargs or {}), **(more or {})},
        continues=bool(body.continue_final_message),
        generation_prompt=bool(body.continue_final_message) or body.add_generation_prompt is not False,
        last_tokens=last,
    )


def _tools(body: ChatCompletionRequest | TokenizeRequest) -> list[Tool]:
    return [
        Tool(
            name=each.function.name,
            description=each.function.description or "",
            parameters=each.function.parameters or {"type": "object", "properties": {}},
        )
        for each in body.tools or ()
    ]


def _tool_use(body: ChatCompletionRequest) -> ToolUse:
    choice, tools = body.tool_choice, _tools(body)
    if isinstance(choice, NamedTool):
        return tool_use(tools, named=choice.function.name)
    if isinstance(choice, AllowedTools):
        allowed = choice.allowed_tools
        return tool_use(tools, mode=allowed.mode, only=[each.function.name for each in allowed.tools])
    return tool_use(tools, mode=choice or "auto")


async def _form(call: Call, body: ChatCompletionRequest, tools: ToolUse) -> Form:
    """Return the form of the answer: of the response format, required calls, or any text."""
    schema, grammar = await _constraint(call, body)
    return await chat_form(
        call,
        tools=tools.declared,
        required=tools.required,
        several=body.parallel_tool_calls is not False and not isinstance(body.tool_choice, NamedTool),
        schema=schema,
        grammar=grammar,
    )


def _chat_choice(
    text: ModelText, body: ChatCompletionRequest, choice: Choice, number: int, parsed: ParsedTurn
) -> ChatChoice:
    return ChatChoice(
        index=number,
        message=AnswerMessage(
            content=parsed.message["content"] or (None if parsed.calls else ""),
            tool_calls=[AnswerCall(id=each["id"], function=_function_call(each)) for each in parsed.calls] or None,
        ),
        finish_reason=_finish_reason(choice, parsed),
        logprobs=ChatLogProbs(content=token_log_probs(text, choice)) if body.logprobs else None,
        token_ids=choice.token_ids if body.return_token_ids else None,
        weight_versions=version_spans(choice.versions) if body.return_token_ids else None,
    )


async def _stream_chat(
    call: Call, body: ChatCompletionRequest, turn: ChatTurn, usage: Literal["none", "last", "all"]
) -> web.StreamResponse:
    events = call.events()
    created = int(time.time())
    text = call.state.chat_text()

    def chunk(choices: list[ChunkChoice]) -> ChatCompletionChunk:
        made = ChatCompletionChunk(id=f"chatcmpl-{call.id}", created=created, model=body.model, choices=choices)
        if usage == "all" or not choices:
            made.usage = token_usage(len(turn.prompt.token_ids), turn.completion_tokens)
        return made

    opened: set[int] = set()
    async with aclosing(call.stream_all(turn.requests)) as stream:
        async for number, piece in stream:
            choice = turn.choices[number]
            before = len(choice.token_ids)
            delta, reason = Delta(content=choice.feed(piece) or None), None
            first = number not in opened
            if first:
                opened.add(number)
                delta.role, delta.content = "assistant", delta.content or ""
            if choice.finish_reason is not None:
                parsed = turn.parse(number)
                reason = _finish_reason(choice, parsed)
                if parsed.tail:
                    delta.content = (delta.content or "") + parsed.tail
                if parsed.calls:
                    delta.tool_calls = [
                        CallDelta(index=at, id=each["id"], function=_function_call(each))
                        for at, each in enumerate(parsed.calls)
                    ]
            with_tokens = body.return_token_ids or (body.logprobs and piece.token_ids)
            if delta.content is None and not delta.tool_calls and reason is None and not with_tokens:
                continue
            answer = ChunkChoice(index=number, delta=delta, finish_reason=reason)
            event = chunk([answer])
            if body.logprobs:
                answer.logprobs = ChatLogProbs(content=token_log_probs(text, choice, before))
            if body.return_token_ids:
                answer.token_ids = piece.token_ids
                answer.weight_versions = version_spans(piece.weight_versions, offset=before)
                if first:
                    event.prompt_token_ids = turn.prompt.token_ids
            await events.send(event)
    if usage != "none":
        await events.send(chunk([]))
    call.leave_session()
    await events.send_bytes(b"data: [DONE]\n\n")
    return await events.end()


def _messages(limits: Limits, messages: Sequence[ChatMessage]) -> list[Message]:
    check_arguments(limits, (each.function.arguments for message in messages for each in message.tool_calls or ()))
    return [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _message(message: ChatMessage, where: str) -> Message:
    """Return a client's message in the form that chat templates take."""
    role = "system" if message.role == "developer" else message.role
    content = message.content
    text = "".join(part.text for part in content) if isinstance(content, list) else content or ""
    made: Message = {"role": role, "content": text}
    if message.name:
        made["name"] = message.name
    if message.tool_call_id:
        made["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        if role != "assistant":
            raise APIError(400, f"{where}: only the assistant calls tools")
        made["tool_calls"] = [
            tool_call(each.id, each.function.name, each.function.arguments, where) for each in message.tool_calls
        ]
    return made


def _finish_reason(choice: Choice, parsed: ParsedTurn) -> str:
    return "tool_calls" if parsed.calls and choice.finish_reason == "stop" else str(choice.finish_reason)


def _function_call(call: dict[str, Any]) -> FunctionCall:
    return FunctionCall(name=call["function"]["name"], arguments=json.dumps(call["function"]["arguments"]))


def token_log_probs(text: ModelText, choice: Choice, begin: int = 0) -> list[TokenLogProb]:
    """Return those of the tokens of ``choice`` from ``begin`` on."""

    def fields(token: int, log_prob: float) -> dict[str, Any]:
        return {"token": text.spelling(token), "logprob": log_prob, "bytes": text.spelled_bytes(token)}

    sampled = zip(choice.token_ids[begin:], choice.log_probs[begin:], strict=True)
    entries = [TokenLogProb(**fields(token, log_prob), top_logprobs=[]) for token, log_prob in sampled]
    for entry, top in zip(entries, choice.top_log_probs[begin:], strict=False):
        entry.top_logprobs = [TopLogProb(**fields(token, log_prob)) for token, log_prob in top]
    return entries


# -------------------------------------------------------------------------------------------------- tokens and text


async def tokenize(call: Call) -> web.StreamResponse:
    """Return the tokens of a prompt, or of the prompt of a chat."""
    body, state = call.body_as(TokenizeRequest), call.state
    call.choose_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise APIError(400, "give a prompt or messages")
    text = state.model_text()
    if body.messages is not None:
        given = body.messages
        check_neutral(add_special_tokens=(body.add_special_tokens, False))  # the template writes them
        messages = await call.off_loop(lambda: _messages(state.limits, given))
        prompt = await render_prompt(call, messages, _tools(body), None, _rendering(body))
        ids: Sequence[int] = prompt.token_ids
    else:
        check_neutral(
            tools=(body.tools, []),
            chat_template_kwargs=(body.chat_template_kwargs, {}),
            add_generation_prompt=(body.add_generation_prompt, False),
            continue_final_message=(body.continue_final_message, False),
        )
        special = body.add_special_tokens is not False
        ids = await call.off_loop(lambda: text.encode(body.prompt or "", add_special_tokens=special))
    spellings = await call.off_loop(lambda: [text.piece(each) for each in ids]) if body.return_token_strs else None
    return call.answer(
        TokenizeAnswer(count=len(ids), max_model_len=state.context_tokens, tokens=ids, token_strs=spellings)
    )


async def detokenize(call: Call) -> web.StreamResponse:
    """Return the text of tokens, special ones included."""
    body, state = call.body_as(DetokenizeRequest), call.state
    call.choose_model(body.model)
    text = state.model_text()

    def decode() -> str:
        if wrong := [token for token in body.tokens if token >= text.vocabulary]:
            raise APIError(400, f"{wrong[0]} is no token; the vocabulary is 0..{text.vocabulary - 1}")
        return text.decode(body.tokens, skip_special_tokens=False)

    return call.answer(DetokenizeAnswer(await call.off_loop(decode)))


# ----------------------------------------------------------------------------------------------------- completions


async def completions(call: Call) -> web.StreamResponse:
    """Sample continuations of plain prompts, whole or as a stream."""
    body, state = call.body_as(CompletionRequest), call.state
    call.choose_model(body.model)
    _check_neutral(body, best_of=(body.best_of, body.n or 1), suffix=(body.suffix, ""))
    text, usage = state.model_text(), _usage_events(body)
    choices = check_choices(state.limits, body.n)
    count = 1 if isinstance(body.prompt, str) or isinstance(body.prompt[0], int) else len(body.prompt)
    if count > state.limits.prompts:
        raise APIError(400, f"at most {state.limits.prompts} prompts are accepted at a time")
    if count * choices > (most := state.limits.concurrent_requests_per_key):
        raise APIError(400, f"{count} prompts of {choices} choices are more than the {most} generations that may run")
    last = _last_tokens(call, body)
    whole = text if last is not None else text.within(state.context_tokens)
    encoded = await call.off_loop(lambda: _prompts(whole, body.prompt))
    prompts = [last_tokens(prompt, last) for prompt in encoded]
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    schema, grammar = await _constraint(call, body)
    if schema is not None:
        grammar = await call.off_loop(partial(json_grammar, schema))
    scored = body.prompt_logprobs if body.prompt_logprobs is not None or not body.echo else body.logprobs
    sampling = sampling_params(
        state.limits,
        body,
        max_tokens=max(max_tokens, 1),  # for the prompt alone, engines sample a token as well, which is dropped
        top_log_probs=body.logprobs or 0,
        prompt_log_probs=scored,
        grammar=grammar,
    )
    requests = [
        request
        for at, prompt in enumerate(prompts)
        for request in call.requests(prompt, sampling, choices=choices, first=at * choices)
    ]
    session = call.session()
    places = [session.token_prompt(prompt) for prompt in prompts] if session is not None else []
    is_text = isinstance(body.prompt if isinstance(body.prompt, str) else body.prompt[0], str)
    special = body.skip_special_tokens is False
    readers = [
        Choice(
            partial(text.decode, skip_special_tokens=not special),
            request.sampling,
            special_ids=text.special_ids,
            include_stop=bool(body.include_stop_str_in_output),
            show_special=special,
        )
        for request in requests
    ]
    created = int(time.time())
    offsets: dict[int, int] = {}  # of the choices that have begun, where their next token begins in their text

    def part(number: int, chunk: Generation | GenerationChunk) -> CompletionChoice:
        """Feed ``chunk`` to its reader; return it as a choice."""
        reader, prompt, first = readers[number], prompts[number // choices], number not in offsets
        begin, offset = len(reader.token_ids), offsets.setdefault(number, 0)
        if not max_tokens:
            chunk = prompt_only(chunk)
        choice = CompletionChoice(index=number, text=reader.feed(chunk), finish_reason=chunk.finish_reason)
        echoed = bool(body.echo) and first
        if body.logprobs is not None:
            choice.logprobs = _log_probs(text, reader, begin, offset, prompt=prompt if echoed else ())
            offsets[number] += sum(map(len, choice.logprobs.tokens))
        if echoed:
            # Of a prompt of ids the special tokens are a part; to a text the tokenizer may have added some.
            choice.text = text.decode(prompt, skip_special_tokens=is_text) + choice.text
        if chunk.prompt_log_probs and body.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_log_probs(text, prompt, reader)
        if body.return_token_ids:
            choice.prompt_token_ids = prompt if first else None
            choice.token_ids = chunk.token_ids
            choice.weight_versions = version_spans(chunk.weight_versions, offset=begin)
        return choice

    def answer(parts: list[CompletionChoice], *, with_usage: bool) -> Completion:
        completion = Completion(id=f"cmpl-{call.id}", created=created, model=body.model, choices=parts)
        if with_usage:
            completion.usage = token_usage(sum(map(len, prompts)), sum(len(reader.token_ids) for reader in readers))
        return completion

    def record(number: int) -> None:
        if session is not None and max_tokens:
            message: Message = {"role": "assistant", "content": readers[number].text}
            call.record(places[number // choices], readers[number].generation(), message)

    if not body.stream:
        made = await call.collect_all(requests)
        entries = log_prob_entries(made)
        parts = await call.off_loop(lambda: list(map(part, range(len(made)), made)), entries=entries)
        for number in range(len(made)):
            record(number)
        return await call.answer_made(lambda: answer(parts, with_usage=True), entries=entries)
    events = call.events()
    async with aclosing(call.stream_all(requests)) as stream:
        async for number, piece in stream:
            entries = log_prob_entries([piece]) + (len(prompts[number // choices]) if number not in offsets else 0)
            choice = await call.off_loop(partial(part, number, piece), entries=entries, of_request=False)
            if piece.finish_reason:
                record(number)
            if choice.text or piece.finish_reason or body.return_token_ids or body.logprobs is not None:
                await events.send(answer([choice], with_usage=usage == "all"), entries=entries)
    if usage != "none":
        await events.send(answer([], with_usage=True))
    call.leave_session()
    await events.send_bytes(b"data: [DONE]\n\n")
    return await events.end()


def _prompts(text: ModelText, prompt: str | list[str | int | list[int]]) -> list[tuple[int, ...]]:
    """Return each prompt as ids: a list of ids is one prompt, a list of texts or of lists several."""
    if isinstance(prompt, str):
        return [tuple(text.encode(prompt))]
    ids = tuple(each for each in prompt if isinstance(each, int))
    if ids:
        if len(ids) != len(prompt):
            raise APIError(400, "a prompt holds token ids, or texts, or lists of ids; not a mixture")
        return [ids]
    return [
        tuple(text.encode(each)) if isinstance(each, str) else tuple(each)
        for each in prompt
        if not isinstance(each, int)
    ]


def _log_probs(
    text: ModelText, reader: Choice, begin: int, offset: int, *, prompt: tuple[int, ...]
) -> CompletionLogProbs:
    """Return those of ``prompt``, if it is echoed, and of the tokens from ``begin`` on."""
    sampled = len(reader.token_ids) - begin
    tokens = [text.spelling(token) for token in (*prompt, *reader.token_ids[begin:])]
    offsets = list(accumulate(map(len, tokens), initial=offset))[:-1]
    values: list[float | None] = [
        *(reader.prompt_log_probs[: len(prompt)] or [None] * len(prompt)),
        *reader.log_probs[begin:],
    ]
    tops: list[TopLogProbs] = [
        *(reader.prompt_top_log_probs[: len(prompt)] or [()] * len(prompt)),
        *(reader.top_log_probs[begin:] or [()] * sampled),
    ]
    log_probs = CompletionLogProbs(tokens=tokens, token_logprobs=values, text_offset=offsets, top_logprobs=[])
    for token, value, top in zip(tokens, values, tops, strict=True):
        # Tokens with one spelling (parts of characters have) share an entry: the likeliest one's.
        by_spelling: dict[str, float] = {}
        for token_id, log_prob in top:
            by_spelling.setdefault(text.spelling(token_id), log_prob)
        if value is not None:
            by_spelling.setdefault(token, value)
        log_probs.top_logprobs.append(by_spelling)
    if prompt:
        values[0] = log_probs.top_logprobs[0] = None
    return log_probs


def prompt_log_probs(text: ModelText, prompt: tuple[int, ...], reader: Choice) -> PromptLogProbs | None:
    """Return the prompt's log-probs as vLLM does; None where they were not requested."""
    if not reader.prompt_log_probs:
        return None
    places: PromptLogProbs = [None]
    scored = zip(prompt[1:], reader.prompt_log_probs[1:], reader.prompt_top_log_probs[1:], strict=True)
    for token, log_prob, top in scored:
        place = {str(token): PromptLogProb(logprob=log_prob, rank=None, decoded_token=text.spelling(token))}
        for rank, (likely, value) in enumerate(top, start=1):
            place[str(likely)] = PromptLogProb(logprob=value, rank=rank, decoded_token=text.spelling(likely))
        places.append(place)
    return places
