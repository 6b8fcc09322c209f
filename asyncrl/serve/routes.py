"""Every route of the server, as data; the applications, the OpenAPI document and the tests of access are made from it.

A request passes, from its socket to its answer:

1. :mod:`~asyncrl.serve.server`: the listening socket of a plane, with its bound on connections.
2. :mod:`~asyncrl.serve.middleware`: host and origin, key, then the body against :mod:`~asyncrl.serve.limits`.
3. The handler of its route: :mod:`~asyncrl.serve.openai`, :mod:`~asyncrl.serve.anthropic` (both through
   :mod:`~asyncrl.serve.chat`), :mod:`~asyncrl.serve.native` or :mod:`~asyncrl.serve.control`.
4. :mod:`~asyncrl.serve.call`: its session (:mod:`~asyncrl.serve.sessions`) and its generations, from the pool.
5. The handler again: tokens become text (:mod:`~asyncrl.serve.text`) and JSON; or an error, through the middleware.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, TypeAlias

import msgspec
from aiohttp import web

from asyncrl import __version__
from asyncrl.serve import anthropic, control, native, openai, responses, sglang, vllm
from asyncrl.serve.call import Call, Plane
from asyncrl.serve.errors import API, AnthropicErrorBody, ErrorBody

Handler: TypeAlias = Callable[[Call], Awaitable[web.StreamResponse]]

Method: TypeAlias = Literal["GET", "POST", "DELETE"]

Access: TypeAlias = Literal["public", "user", "operator"]
"""Who may call a route."""

Caller: TypeAlias = Literal["anonymous", "unknown", "user", "operator"]
"""Who calls: with no key, an unknown one, a user's, an operator's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One route.

    Attributes:
        path: with ``{session}`` or ``{model}`` for a name.
        plane: ``user`` routes are served on both planes, ``control`` routes on the control plane only. An ``agent``
            plane has the routes that generate within a session.
        request: type of the body; None for none.
        answer: type of the answer's body, for msgspec, or a tuple of alternatives; None if it is no JSON.
        stream: type of the events, or a tuple of alternatives, if the answer may be a stream.
        status: of success.
        statuses: further ones that the handler may answer with.
        query: JSON schemas of the query's parameters, by name.
        body_needed: False if an absent body means all defaults.
        api: schema of its errors.
        tag: chapter of the document.
        timed: whether the limit of a generation's time applies.
        takes_place: whether a request counts as a generation that is under way, before its body is read.
    """

    method: Method
    path: str
    plane: Plane
    access: Access
    handler: Handler
    answer: Any = None
    request: type | None = None
    stream: Any = None
    status: int = 200
    statuses: tuple[int, ...] = ()
    query: Mapping[str, Any] = field(default_factory=dict)
    body_needed: bool = True
    api: API = "openai"
    tag: str = "tokens"
    timed: bool = True
    takes_place: bool = False

    @property
    def summary(self) -> str:
        """The first line of the handler's docstring."""
        return (self.handler.__doc__ or "").strip().splitlines()[0]

    @property
    def pattern(self) -> re.Pattern[str]:
        """What its addresses match. A model's name may have slashes, as a hub's ids have; no other name may."""
        return re.compile(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(self.path).replace(r"\{model\}", ".+")))


def access_status(route: Route, *, plane: Plane, caller: Caller, keyless: bool) -> int:
    """Return 200 if ``caller`` may call ``route`` on ``plane``, else the status of the error. A test checks every case.

    A plane is ``keyless``, and ignores keys, if it is a user plane on loopback without keys, or a Unix socket.
    """
    if route.plane == "control" and plane == "user":
        return 404
    if route.access == "public" or keyless:
        return 200
    if caller in ("anonymous", "unknown"):
        return 401
    if plane == "control":
        return 200 if caller == "operator" else 403
    return 200 if caller == "user" else 401


# ------------------------------------------------------------------------------------------------------ the table


def _user(method: Method, path: str, handler: Handler, *, tag: str, access: Access = "user", **fields: Any) -> Route:
    """Any: fields of Route."""
    return Route(method=method, path=path, handler=handler, plane="user", access=access, tag=tag, **fields)


def _control(method: Method, path: str, handler: Handler, *, tag: str = "control", **fields: Any) -> Route:
    """Any: fields of Route."""
    return Route(
        method=method, path=path, handler=handler, plane="control", access="operator", tag=tag, timed=False, **fields
    )


def _models_and_generation(prefix: str) -> tuple[Route, ...]:
    return (
        _user("GET", f"{prefix}/v1/models", openai.models, tag="openai", answer=openai.ModelList),
        _user("GET", f"{prefix}/v1/models/{{model}}", openai.model, tag="openai", answer=openai.ModelCard),
        _user(
            "POST",
            f"{prefix}/v1/chat/completions",
            openai.chat_completions,
            takes_place=True,
            tag="openai",
            request=openai.ChatCompletionRequest,
            answer=openai.ChatCompletion,
            stream=openai.ChatCompletionChunk,
        ),
        _user(
            "POST",
            f"{prefix}/v1/chat/completions/tokens",
            openai.chat_tokens,
            takes_place=True,
            tag="openai",
            request=openai.ChatTokensRequest,
            answer=openai.ChatCompletion,
            stream=openai.ChatCompletionChunk,
        ),
        _user(
            "POST",
            f"{prefix}/v1/completions",
            openai.completions,
            takes_place=True,
            tag="openai",
            request=openai.CompletionRequest,
            answer=openai.Completion,
            stream=openai.Completion,
        ),
        _user(
            "POST",
            f"{prefix}/v1/responses",
            responses.create,
            takes_place=True,
            tag="openai",
            api="responses",
            request=responses.ResponsesRequest,
            answer=responses.Response,
            stream=responses.ResponseEvent,
        ),
        _user(
            "POST",
            f"{prefix}/v1/messages",
            anthropic.messages,
            takes_place=True,
            tag="anthropic",
            api="anthropic",
            request=anthropic.MessagesRequest,
            answer=anthropic.MessageAnswer,
            stream=anthropic.MessageEvent,
        ),
        _user(
            "POST",
            f"{prefix}/v1/messages/count_tokens",
            anthropic.count_tokens,
            takes_place=True,
            tag="anthropic",
            api="anthropic",
            request=anthropic.CountTokensRequest,
            answer=anthropic.TokenCount,
        ),
        _user(
            "POST",
            f"{prefix}/tokenize",
            openai.tokenize,
            takes_place=True,
            tag="openai",
            request=openai.TokenizeRequest,
            answer=openai.TokenizeAnswer,
        ),
        _user(
            "POST",
            f"{prefix}/detokenize",
            openai.detokenize,
            takes_place=True,
            tag="openai",
            request=openai.DetokenizeRequest,
            answer=openai.DetokenizeAnswer,
        ),
        _user(
            "POST",
            f"{prefix}/generate",
            sglang.generate,
            takes_place=True,
            tag="tokens",
            request=sglang.GenerateBody,
            answer=(native.GenerateAnswer, sglang.SGLangAnswer, list[sglang.SGLangAnswer]),
            stream=(native.GenerateAnswer, sglang.SGLangAnswer),
        ),
        _user(
            "POST",
            f"{prefix}/inference/v1/generate",
            vllm.generate,
            takes_place=True,
            tag="tokens",
            request=vllm.TokensRequest,
            answer=vllm.TokensAnswer,
        ),
    )


async def openapi(call: Call) -> web.StreamResponse:
    """Return this document, made from the route table of its plane."""
    return call.answer(_encoded_document(call.plane))


@cache
def _encoded_document(plane: Plane) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(document(routes_of(plane))))


_SESSION = "/sessions/{session}"
_VLLM = "calls of vLLM's trainers"
_WEIGHT_UPDATE: dict[str, Any] = {  # Any: fields of Route
    "tag": _VLLM,
    "request": control.UpdateRequest,
    "answer": native.Done,
    "body_needed": False,
}

ROUTES: tuple[Route, ...] = (
    *_models_and_generation(""),
    *_models_and_generation(_SESSION),  # the same under a session's address, for clients that set no headers
    _user("GET", _SESSION, native.session_status, tag="sessions", answer=native.SessionStatus),
    _user("DELETE", _SESSION, native.drop_session, tag="sessions", answer=native.DroppedSession),
    _user("GET", f"{_SESSION}/trajectories", native.session_trajectories, tag="sessions", answer=native.TrajectoryList),
    _user(
        "POST",
        f"{_SESSION}/reward",
        native.reward_session,
        tag="sessions",
        request=native.RewardRequest,
        answer=native.RewardAnswer,
    ),
    _user("GET", "/ping", native.livez, tag="probes", access="public", answer=native.Done),
    _user("GET", "/version", native.version, tag="probes", access="public", answer=native.ServerVersion),
    _user("GET", "/livez", native.livez, tag="probes", access="public", answer=native.Done),
    _user("GET", "/readyz", native.readyz, tag="probes", access="public", answer=native.Done),
    _user("GET", "/health", native.health, tag="probes", answer=native.HealthReport, statuses=(503,)),
    _user("GET", "/metrics", native.metrics, tag="probes"),
    _user("GET", "/openapi.json", openapi, tag="probes", access="public", answer=dict[str, Any]),
    _control("GET", "/pool", control.pool_report, answer=control.PoolReport),
    _control(
        "POST",
        "/pause",
        control.pause,
        request=control.PauseRequest,
        answer=native.Done,
        query={"mode": {"enum": ["keep", "abort", "drain", "wait"]}},
        body_needed=False,
    ),
    _control("POST", "/resume", control.resume, answer=native.Done),
    _control("GET", "/weights", control.weight_status, answer=control.WeightStatus),
    _control("POST", "/weights", control.weights, request=control.WeightsRequest, answer=control.WeightStatus),
    _control("POST", "/abort", control.abort, request=control.AbortRequest, answer=control.AbortAnswer),
    _control("GET", "/replicas", control.replicas, answer=control.ReplicaList),
    _control(
        "POST", "/replicas", control.add_replica, request=control.ReplicaRequest, answer=control.ReplicaList, status=201
    ),
    _control(
        "POST", "/replicas/drain", control.drain_replica, request=control.ReplicaRequest, answer=control.ReplicaList
    ),
    _control("GET", "/get_world_size", control.world_size, tag=_VLLM, answer=control.WorldSize),
    _control(
        "GET",
        "/server_info",
        control.server_info,
        tag=_VLLM,
        answer=control.ServerInfo,
        query={"config_format": {"enum": ["json"]}},
    ),
    _control("POST", "/init_weight_transfer_engine", control.init_weight_transfer, **_WEIGHT_UPDATE),
    _control("POST", "/start_weight_update", control.start_weight_update, **_WEIGHT_UPDATE),
    _control("POST", "/update_weights", control.update_weights, **_WEIGHT_UPDATE),
    _control("POST", "/finish_weight_update", control.finish_weight_update, **_WEIGHT_UPDATE),
)


def routes_of(plane: Plane) -> tuple[Route, ...]:
    if plane == "agent":
        return _models_and_generation(_SESSION)
    return ROUTES if plane == "control" else tuple(route for route in ROUTES if route.plane == "user")


# ------------------------------------------------------------------------------------------- the OpenAPI document

_ERRORS = {
    400: "The request breaks a rule; the message has it.",
    401: "The key is missing or unknown.",
    403: "The key, the Host or the Origin is not allowed here.",
    404: "It does not exist.",
    405: "Another method is needed; Allow has it.",
    408: "The body took too long.",
    409: "It conflicts with the present state.",
    411: "A body of this size needs Content-Length.",
    413: "The body is too large.",
    415: "The body must be application/json, not compressed.",
    429: "Too many requests of this key are running; try again after Retry-After.",
    499: "The request was aborted.",
    500: "A failure of the server; the id finds it in the log.",
    501: "This server does not support it.",
    503: "No capacity, or no replica; try again after Retry-After.",
    504: "It took too long.",
}
_ALWAYS = {400, 403, 409, 500}  # Host, Origin and X-Request-ID are checked before anything else
_WITH_A_BODY = {408, 411, 413, 415}
_WITH_A_NAME = {404, 405}  # it may not exist, and another name may be another address
_OF_THE_POOL = {404, 429, 499, 501, 503, 504}

_NAME = "^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$"
_PARAMETERS: dict[str, Any] = {  # Any: pieces of the document
    "session": {
        "name": "session",
        "in": "path",
        "required": True,
        "description": "Its first request creates it, and ends it if nothing is sampled; every turn is captured.",
        "schema": {"type": "string", "pattern": _NAME},
    },
    "model": {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}},
    "X-Session-ID": {
        "name": "X-Session-ID",
        "in": "header",
        "required": False,
        "description": "Captures what is sampled, token by token, under this name.",
        "schema": {"type": "string", "pattern": _NAME},
    },
    "X-Request-ID": {
        "name": "X-Request-ID",
        "in": "header",
        "required": False,
        "description": "Names the request; an operator may abort it by this. Unique among running requests.",
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$"},
    },
}


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """Return OpenAPI 3.1 of ``routes``. Any: it is JSON.

    msgspec makes the schemas from the types that decode and encode the bodies; the rest follows from the table.
    """
    types: list[Any] = [ErrorBody, AnthropicErrorBody]
    for route in routes:
        for kind in (route.request, route.answer, route.stream):
            types += kind if isinstance(kind, tuple) else [] if kind is None else [kind]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    # Not every type is hashable, so the schemas are found by their order.
    placed = iter(schemas)
    openai_error, anthropic_error = next(placed), next(placed)
    paths: dict[str, dict[str, Any]] = {}

    def placed_schema(kind: Any) -> Any:
        if isinstance(kind, tuple):
            return {"anyOf": [next(placed) for _ in kind]}
        return next(placed) if kind is not None else None

    for route in routes:
        request, answer, event = map(placed_schema, (route.request, route.answer, route.stream))
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(
            route, request, answer, event, anthropic_error if route.api == "anthropic" else openai_error
        )
    return {
        "openapi": "3.1.0",
        "info": {"title": "asyncrl", "version": __version__, "summary": "Rollouts of a language model, token by token"},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _error_statuses(route: Route) -> set[int]:
    statuses = {*_ALWAYS}
    if route.access != "public":
        statuses |= {401}
    if route.request is not None:
        statuses |= _WITH_A_BODY
    if "{" in route.path:
        statuses |= _WITH_A_NAME
    if route.timed or route.plane == "control":
        statuses |= _OF_THE_POOL
    return statuses


def _operation(route: Route, request: Any, answer: Any, event: Any, error: Any) -> dict[str, Any]:
    """Any: pieces of the document."""
    kind, schema = ("application/json", answer) if answer is not None else ("text/plain", {"type": "string"})
    succeeded: dict[str, Any] = {kind: {"schema": schema}}
    if event is not None:
        succeeded["text/event-stream"] = {"schema": {"type": "string"}, "x-asyncrl-event": event}
    responses: dict[str, Any] = {
        str(status): {"description": _ERRORS[status], "content": {"application/json": {"schema": error}}}
        for status in sorted(_error_statuses(route))
    }
    responses[str(route.status)] = {"description": "Done.", "content": succeeded}
    for status in route.statuses:
        responses[str(status)] = {
            "description": "As the answer describes.",
            "content": {"application/json": {"schema": {"anyOf": [answer, error]}}},
        }
    operation: dict[str, Any] = {
        "operationId": f"{route.method.lower()}{route.path.replace('/', '_').replace('{', '').replace('}', '')}",
        "summary": route.summary,
        "tags": [route.tag],
        "responses": responses,
        "x-asyncrl-plane": route.plane,
        "x-asyncrl-access": route.access,
    }
    if route.access != "public":
        operation["security"] = [{}, {"bearer": []}, {"header": []}]
    parameters = [_PARAMETERS[name] for name in re.findall(r"{(\w+)}", route.path)]
    if event is not None:
        parameters.append(_PARAMETERS["X-Request-ID"])
        if "{session}" not in route.path:
            parameters.append(_PARAMETERS["X-Session-ID"])
    parameters += [
        {"name": name, "in": "query", "required": False, "schema": schema} for name, schema in route.query.items()
    ]
    if parameters:
        operation["parameters"] = parameters
    if request is not None:
        operation["requestBody"] = {"required": route.body_needed, "content": {"application/json": {"schema": request}}}
    return operation
