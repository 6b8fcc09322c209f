"""How a request ends badly: a status, a kind, a sentence and an id. Never a traceback."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import msgspec

from asyncrl.errors import (
    AsyncRLError,
    DeadlineError,
    EngineClosedError,
    InfrastructureError,
    InvalidDataError,
    OverloadedError,
    RequestAbortedError,
    ResourceError,
    WeightError,
)

__all__ = ["AnthropicErrorBody", "Dialect", "ErrorBody", "Refusal", "error_body", "refusal_of"]

Dialect: TypeAlias = Literal["openai", "anthropic"]

_KINDS = {
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


class Refusal(Exception):
    """This request is not served, or not any further.

    Attributes:
        status: HTTP status.
        message: the rule, the value and the remedy.
        retry_after_s: when it may be worth another try; 0 says nothing.
        allow: methods that would be taken (405).
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        retry_after_s: int = 0,
        allow: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
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
    """An error in OpenAI's form."""

    error: ErrorDetail


class AnthropicErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """Kind and sentence."""

    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, frozen=True, kw_only=True, tag="error", tag_field="type"):
    """An error in Anthropic's form."""

    error: AnthropicErrorDetail
    request_id: str


def error_body(refusal: Refusal, *, request_id: str, dialect: Dialect) -> ErrorBody | AnthropicErrorBody:
    """What the client reads."""
    kind = _KINDS.get(refusal.status, "api_error")
    if dialect == "anthropic":
        return AnthropicErrorBody(error=AnthropicErrorDetail(type=kind, message=refusal.message), request_id=request_id)
    return ErrorBody(error=ErrorDetail(message=refusal.message, type=kind, code=str(refusal.status), id=request_id))


def refusal_of(error: AsyncRLError) -> Refusal | None:
    """What an error that asyncrl knows means for the client; None if it is the server's own failure."""
    if isinstance(error, InvalidDataError):
        return Refusal(400, str(error))
    if isinstance(error, RequestAbortedError):
        return Refusal(499, "the request was aborted")
    if isinstance(error, WeightError):
        return Refusal(409, str(error))
    if isinstance(error, DeadlineError):
        return Refusal(504, str(error))
    if isinstance(error, OverloadedError):
        status = 429 if error.tenant else 503
        return Refusal(status, "the queue for replicas is full", retry_after_s=max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, ResourceError | EngineClosedError):
        return Refusal(503, "no replica can take the request now", retry_after_s=1)
    if isinstance(error, InfrastructureError):
        return Refusal(503, "the replica that served this request failed", retry_after_s=1)
    return None
