"""API errors: the status, type, message and id that a client receives. Never a traceback.

The lowest module of the server: limits, sessions and handlers raise :class:`APIError`, the middleware answers with it.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from asyncrl.errors import (
    AsyncRLError,
    ContextLengthError,
    DeadlineError,
    EngineClosedError,
    InfrastructureError,
    InvalidDataError,
    RequestAbortedError,
    ResourceError,
    WeightError,
)

API: TypeAlias = Literal["openai", "responses", "anthropic"]
"""Whose schema an answer follows."""

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    411: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    499: "aborted_error",
    501: "not_supported_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class APIError(Exception):
    """Ends a request with an error.

    Attributes:
        status: HTTP status.
        message: the rule, the value and the remedy.
        retry_after_s: value of ``Retry-After``; 0 leaves the header out.
        allow: methods that the address takes (405).
        code: in OpenAI's schema; the status if it has no name there.
        anthropic: the message in Anthropic's words, where clients match them.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        retry_after_s: int = 0,
        allow: tuple[str, ...] = (),
        code: str = "",
        anthropic: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code or str(status)
        self.anthropic = anthropic or message
        self.retry_after_s = retry_after_s
        self.allow = allow


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """``id`` finds the request in the server's log."""

    message: str
    type: str
    code: str
    id: str
    param: str | None = None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """An error in OpenAI's schema."""

    error: ErrorDetail


class AnthropicErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, frozen=True, kw_only=True, tag="error", tag_field="type"):
    """An error in Anthropic's schema."""

    error: AnthropicErrorDetail
    request_id: str


def error_body(error: APIError, *, request_id: str, api: API) -> ErrorBody | AnthropicErrorBody:
    kind = _TYPES.get(error.status, "api_error")
    if api == "anthropic":
        return AnthropicErrorBody(error=AnthropicErrorDetail(type=kind, message=error.anthropic), request_id=request_id)
    return ErrorBody(error=ErrorDetail(message=error.message, type=kind, code=error.code, id=request_id))


class ErrorEvent(msgspec.Struct, frozen=True, kw_only=True, tag="error", tag_field="type"):
    """The last event of a stream of the Responses API that failed; clients read ``message`` or ``error``."""

    message: str
    code: str
    sequence_number: int
    error: ErrorDetail
    param: str | None = None


def error_event(
    error: APIError, *, request_id: str, api: API, number: int
) -> ErrorBody | AnthropicErrorBody | ErrorEvent:
    """Return the error as the event with this ``number`` of a stream."""
    body = error_body(error, request_id=request_id, api=api)
    if api != "responses" or not isinstance(body, ErrorBody):
        return body
    return ErrorEvent(message=error.message, code=error.code, sequence_number=number, error=body.error)


def context_length_error(prompt_tokens: int, context_tokens: int, *, at_least: bool = False) -> APIError:
    """Return the error for a prompt that is too long, in the words that clients match to shorten it.

    The prompt may have more tokens, if they are ``at_least`` so many.
    """
    return APIError(
        400,
        f"This model's maximum context length is {context_tokens} tokens. However, your messages resulted in "
        f"{'at least ' if at_least else ''}{prompt_tokens} tokens. Please reduce the length of the messages.",
        code=CONTEXT_LENGTH_EXCEEDED,
        anthropic=f"prompt is too long: {prompt_tokens} tokens > {context_tokens} maximum",
    )


def api_error_of(error: AsyncRLError) -> APIError | None:
    """Return what ``error`` means for the client; None if it is a failure of the server itself."""
    if isinstance(error, ContextLengthError):
        return APIError(400, str(error), code=CONTEXT_LENGTH_EXCEEDED, anthropic=f"prompt is too long: {error}")
    if isinstance(error, InvalidDataError):
        return APIError(400, str(error))
    if isinstance(error, RequestAbortedError):
        return APIError(499, "the request was aborted")
    if isinstance(error, WeightError):
        return APIError(409, str(error))
    if isinstance(error, DeadlineError):
        return APIError(504, str(error))
    if isinstance(error, ResourceError | EngineClosedError):
        return APIError(503, "no replica can take the request now", retry_after_s=1)
    if isinstance(error, InfrastructureError):
        return APIError(503, "the replica that served this request failed", retry_after_s=1)
    return None
