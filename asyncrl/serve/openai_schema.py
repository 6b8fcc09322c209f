"""OpenAI's requests and answers, as far as they are served, and what asyncrl adds to them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from asyncrl.serve.call import Version

__all__ = [
    "ChatCompletion",
    "ChatCompletionRequest",
    "ChatMessage",
    "Completion",
    "CompletionRequest",
    "ModelList",
]

Count: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Temperature: TypeAlias = Annotated[float, Meta(ge=0, le=100)]
Probability: TypeAlias = Annotated[float, Meta(gt=0, le=1)]
Seed: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Text: TypeAlias = Annotated[str, Meta(min_length=1)]
ToolSchema: TypeAlias = dict[str, Any]  # Any: a JSON schema


class FunctionCall(Struct):
    """``arguments`` is JSON in a string; an object is taken too."""

    name: Text
    arguments: str | dict[str, Any] = "{}"  # Any: what the tool takes


class ToolCall(Struct):
    function: FunctionCall
    id: str = ""
    type: Literal["function"] = "function"


class ContentPart(Struct):
    """Only text; no URL is ever fetched."""

    text: str
    type: Literal["text"]


class ChatMessage(Struct):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class FunctionDefinition(Struct):
    name: Text
    description: str | None = None
    parameters: ToolSchema | None = None


class ToolDefinition(Struct):
    function: FunctionDefinition
    type: Literal["function"] = "function"


class StreamOptions(Struct):
    include_usage: bool | None = None


class ResponseFormat(Struct):
    """Only ``text``."""

    type: str


class _Sampling(Struct, kw_only=True):
    model: str
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    n: Count | None = None
    max_tokens: Count | None = None
    seed: Seed | None = None
    stop: Text | list[Text] | None = None
    stop_token_ids: list[TokenId] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    logit_bias: dict[str, float] | None = None


class ChatCompletionRequest(_Sampling, kw_only=True):
    """POST /v1/chat/completions. ``return_token_ids`` adds ids and weight versions to the answer."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: str | dict[str, Any] | None = None  # Any: another choice than auto and none is refused
    response_format: ResponseFormat | None = None


class CompletionRequest(_Sampling, kw_only=True):
    """POST /v1/completions. The prompt is text or token ids, or several of either."""

    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class Usage(Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class AnswerCall(Struct, kw_only=True):
    """A tool call of the model; ``index`` only in streams."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class AnswerMessage(Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None = None
    tool_calls: list[AnswerCall] | None = None
    refusal: str | None = None


class TokenLogProb(Struct, kw_only=True):
    """``logprob`` under the distribution the token was sampled from: after temperature, top-p and top-k."""

    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[Any] = []  # Any: always empty; the engine tells sampled tokens only


class ChatLogProbs(Struct, kw_only=True):
    content: list[TokenLogProb]
    refusal: None = None


class ChatChoice(Struct, kw_only=True, omit_defaults=False):
    index: int
    message: AnswerMessage
    finish_reason: str
    logprobs: ChatLogProbs | None = None
    token_ids: list[int] | None = None
    weight_versions: list[Version] | None = None


class ChatCompletion(Struct, kw_only=True):
    """Answer of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_token_ids: list[int] | None = None
    system_fingerprint: str | None = None


class CompletionLogProbs(Struct, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float]
    text_offset: list[int]
    top_logprobs: None = None


class CompletionChoice(Struct, kw_only=True):
    index: int
    text: str
    finish_reason: str | None = None
    logprobs: CompletionLogProbs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    weight_versions: list[Version] | None = None


class Completion(Struct, kw_only=True):
    """Answer of /v1/completions, and each event of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: str | None = None


class CallDelta(Struct, kw_only=True):
    index: int
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class Delta(Struct, kw_only=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChunkChoice(Struct, kw_only=True):
    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: ChatLogProbs | None = None
    token_ids: list[int] | None = None
    weight_versions: list[Version] | None = None


class ChatCompletionChunk(Struct, kw_only=True):
    """``weight_versions`` count from the first token of the choice, not of the chunk."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class ModelCard(Struct, kw_only=True):
    id: str
    created: int
    object: Literal["model"] = "model"
    owned_by: str = "asyncrl"


class ModelList(Struct, kw_only=True):
    """Answer of /v1/models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"
