"""Every route of the server, as data: who may call it, on which plane, what goes in and what comes out.

The application, its OpenAPI document and the tests of access are made from this table; there is no other.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from aiohttp import web

from asyncrl.serve import anthropic, completions, control, openai, probes, session_routes, tokens
from asyncrl.serve import anthropic_schema as anthropic_types
from asyncrl.serve import openai_schema as openai_types
from asyncrl.serve.call import Call, Plane
from asyncrl.serve.failure import Dialect

__all__ = ["ROUTES", "Access", "Caller", "Route", "routes_of", "verdict"]

Access: TypeAlias = Literal["anyone", "user", "operator"]
"""Who may call a route."""

Caller: TypeAlias = Literal["nobody", "stranger", "user", "operator"]
"""Who calls: with no key, a wrong one, a user's, an operator's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One thing that can be asked.

    Attributes:
        method: GET, POST or DELETE.
        path: with ``{session}`` where a name goes.
        plane: ``user`` routes are served on both planes, ``control`` routes on the control plane only.
        access: who may call it.
        handler: answers.
        request: type of the body; None for none.
        answer: type of the answer's body; None where it is no JSON.
        stream: type of the events where the answer may be a stream.
        status: of success.
        statuses: further ones that the handler may answer with.
        query: JSON schemas of its query's parameters, by name.
        body_needed: False where an absent body means all defaults.
        dialect: form of its errors.
        tag: chapter of the document.
        timed: whether it ends after the limit of a generation's time.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    plane: Plane
    access: Access
    handler: Callable[[Call], Awaitable[web.StreamResponse]]
    answer: Any = None  # Any: a msgspec type
    request: type | None = None
    stream: Any = None
    status: int = 200
    statuses: tuple[int, ...] = ()
    query: Mapping[str, Any] = field(default_factory=dict)  # Any: JSON schemas
    body_needed: bool = True
    dialect: Dialect = "openai"
    tag: str = "tokens"
    timed: bool = True

    @property
    def summary(self) -> str:
        """What it does, in a line."""
        return (self.handler.__doc__ or "").strip().splitlines()[0]


def verdict(route: Route, *, plane: Plane, caller: Caller, keyless: bool) -> int:
    """Whether ``caller`` may have ``route``: 200, or the status of the refusal. Pure; a test walks all of it.

    Args:
        route: what is asked.
        plane: where it is asked.
        caller: who asks.
        keyless: the plane needs no key: a user plane on loopback without keys, or a control plane on a Unix socket.
            Keys that come nevertheless are not looked at.
    """
    if route.plane == "control" and plane == "user":
        return 404
    if route.access == "anyone" or keyless:
        return 200
    if caller in ("nobody", "stranger"):
        return 401
    if plane == "control":
        return 200 if caller == "operator" else 403
    return 200 if caller == "user" else 401


_CHAT = {
    "handler": openai.chat_completions,
    "request": openai_types.ChatCompletionRequest,
    "answer": openai_types.ChatCompletion,
    "stream": openai_types.ChatCompletionChunk,
}
_COMPLETIONS = {
    "handler": completions.completions,
    "request": openai_types.CompletionRequest,
    "answer": openai_types.Completion,
    "stream": openai_types.Completion,
}
_MESSAGES = {
    "handler": anthropic.messages,
    "request": anthropic_types.MessagesRequest,
    "answer": anthropic_types.MessageAnswer,
    "stream": anthropic_types.MessageEvent,
}
_COUNT_TOKENS = {
    "handler": anthropic.count_tokens,
    "request": anthropic_types.CountTokensRequest,
    "answer": anthropic_types.TokenCount,
}
_GENERATE = {
    "handler": tokens.generate,
    "request": tokens.GenerateRequest,
    "answer": tokens.GenerateAnswer,
    "stream": tokens.GenerateAnswer,
}


def _user(method: Any, path: str, *, tag: str, **more: Any) -> Route:
    """Any: see Route."""
    more.setdefault("access", "user")
    return Route(method=method, path=path, plane="user", tag=tag, **more)


def _control(method: Any, path: str, **more: Any) -> Route:
    """Any: see Route."""
    more.setdefault("tag", "control")
    return Route(method=method, path=path, plane="control", access="operator", timed=False, **more)


def _models(path: str) -> tuple[Route, ...]:
    return (
        _user("GET", path, tag="openai", handler=openai.models, answer=openai_types.ModelList),
        _user("GET", f"{path}/{{model}}", tag="openai", handler=openai.model, answer=openai_types.ModelCard),
    )


def _in_session(prefix: str) -> tuple[Route, ...]:
    """The routes that make tokens: plain, and under a session's own address for clients that set no headers."""
    return (
        *_models(f"{prefix}/v1/models"),
        _user("POST", f"{prefix}/v1/chat/completions", tag="openai", **_CHAT),
        _user("POST", f"{prefix}/v1/completions", tag="openai", **_COMPLETIONS),
        _user("POST", f"{prefix}/v1/messages", tag="anthropic", dialect="anthropic", **_MESSAGES),
        _user("POST", f"{prefix}/v1/messages/count_tokens", tag="anthropic", dialect="anthropic", **_COUNT_TOKENS),
        _user("POST", f"{prefix}/generate", tag="tokens", **_GENERATE),
    )


_SESSION = "/sessions/{session}"
_VLLM = "calls of vLLM's trainers"

ROUTES: tuple[Route, ...] = (
    *_in_session(""),
    *_in_session(_SESSION),
    _user("GET", _SESSION, tag="sessions", handler=session_routes.session_status, answer=session_routes.SessionStatus),
    _user(
        "DELETE", _SESSION, tag="sessions", handler=session_routes.drop_session, answer=session_routes.DroppedSession
    ),
    _user(
        "GET",
        f"{_SESSION}/trajectories",
        tag="sessions",
        handler=session_routes.session_trajectories,
        answer=session_routes.TrajectoryList,
    ),
    _user(
        "POST",
        f"{_SESSION}/reward",
        tag="sessions",
        handler=session_routes.reward_session,
        request=session_routes.RewardRequest,
        answer=session_routes.RewardAnswer,
    ),
    _user("GET", "/livez", tag="probes", access="anyone", handler=probes.livez, answer=probes.Alive),
    _user("GET", "/readyz", tag="probes", access="anyone", handler=probes.readyz, answer=probes.Alive),
    _user("GET", "/health", tag="probes", handler=probes.health, answer=probes.HealthReport, statuses=(503,)),
    _user("GET", "/metrics", tag="probes", handler=probes.metrics),
    _user("GET", "/openapi.json", tag="probes", access="anyone", handler=probes.openapi, answer=dict[str, Any]),
    _control("GET", "/pool", handler=control.pool_report, answer=control.PoolReport),
    _control(
        "POST",
        "/pause",
        handler=control.pause,
        request=control.PauseRequest,
        answer=control.Done,
        query={"mode": {"enum": ["keep", "abort", "drain", "wait"]}},
        body_needed=False,
    ),
    _control("POST", "/resume", handler=control.resume, answer=control.Done),
    _control("GET", "/weights", handler=control.weight_status, answer=control.WeightStatus),
    _control(
        "POST",
        "/weights",
        handler=control.weights,
        request=control.WeightsRequest,
        answer=control.WeightStatus,
    ),
    _control("POST", "/abort", handler=control.abort, request=control.AbortRequest, answer=control.AbortAnswer),
    _control("GET", "/replicas", handler=control.replicas, answer=control.ReplicaList),
    _control(
        "POST",
        "/replicas",
        handler=control.add_replica,
        request=control.ReplicaRequest,
        answer=control.ReplicaList,
        status=201,
    ),
    _control(
        "POST",
        "/replicas/drain",
        handler=control.drain_replica,
        request=control.ReplicaRequest,
        answer=control.ReplicaList,
    ),
    _control("GET", "/get_world_size", tag=_VLLM, handler=control.world_size, answer=control.WorldSize),
    _control(
        "GET",
        "/server_info",
        tag=_VLLM,
        handler=control.server_info,
        answer=control.ServerInfo,
        query={"config_format": {"enum": ["json"]}},
    ),
    *(
        _control(
            "POST",
            path,
            tag=_VLLM,
            handler=handler,
            request=control.UpdateRequest,
            answer=control.Done,
            body_needed=False,
        )
        for path, handler in (
            ("/init_weight_transfer_engine", control.init_weight_transfer),
            ("/start_weight_update", control.start_weight_update),
            ("/update_weights", control.update_weights),
            ("/finish_weight_update", control.finish_weight_update),
        )
    ),
)


def routes_of(plane: Plane) -> tuple[Route, ...]:
    """The routes that a plane serves."""
    return ROUTES if plane == "control" else tuple(route for route in ROUTES if route.plane == "user")
