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
    "ModelCard",
    "ModelList",
]

Count: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Temperature: TypeAlias = Annotated[float, Meta(ge=0, le=100)]
Probability: TypeAlias = Annotated[float, Meta(gt=0, le=1)]
Seed: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
LikeliestCount: TypeAlias = Annotated[int, Meta(ge=0, le=20)]
NotServed: TypeAlias = None
"""What would change the answer and is not served: refused by name."""
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


class JsonSchema(Struct, kw_only=True):
    """``strict`` makes no difference: the schema always holds."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None  # Any: a JSON schema
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True):
    """``json_object`` and ``json_schema`` restrict what is sampled, token by token."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class FunctionName(Struct):
    name: Text


class NamedTool(Struct):
    """The tool that must be called."""

    function: FunctionName
    type: Literal["function"] = "function"


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
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    bad_words: NotServed = None
    prompt_logprobs: NotServed = None
    structured_outputs: NotServed = None
    guided_json: NotServed = None
    guided_regex: NotServed = None
    guided_choice: NotServed = None
    guided_grammar: NotServed = None


class ChatCompletionRequest(_Sampling, kw_only=True):
    """POST /v1/chat/completions. ``return_token_ids`` adds ids and weight versions to the answer."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: LikeliestCount | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    functions: NotServed = None
    function_call: NotServed = None
    modalities: list[Literal["text"]] | None = None
    audio: NotServed = None
    prediction: NotServed = None


class CompletionRequest(_Sampling, kw_only=True):
    """POST /v1/completions. The prompt is text or token ids, or several of either."""

    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: LikeliestCount | None = None
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


class TopLogProb(Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogProb(Struct, kw_only=True):
    """``logprob`` under the distribution the token was sampled from: after temperature, top-p and top-k.

    ``top_logprobs`` has fewer entries than asked for where fewer tokens could be sampled.
    """

    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[TopLogProb] = []


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
    top_logprobs: list[dict[str, float]] | None = None


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
    """A served model, as OpenAI's, Anthropic's and vLLM's clients read it.

    ``max_model_len`` is the longest prompt and answer together, in tokens.
    """

    id: str
    created: int
    display_name: str
    created_at: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    owned_by: str = "asyncrl"
    max_model_len: int | None = None


class ModelList(Struct, kw_only=True):
    """Answer of /v1/models: one page, in both dialects."""

    data: list[ModelCard]
    first_id: str
    last_id: str
    object: Literal["list"] = "list"
    has_more: bool = False
