"""The OpenAPI document, made from the route table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from asyncrl import __version__
from asyncrl.serve.failure import AnthropicErrorBody, ErrorBody
from asyncrl.serve.routes import Route

__all__ = ["document"]

_REFUSALS = {
    400: "The request breaks a rule; the message says which.",
    401: "No key, or one that is not known.",
    403: "The key, the Host or the Origin does not open this.",
    404: "There is no such thing.",
    405: "Another method is needed; Allow says which.",
    408: "The body took too long.",
    409: "It does not fit to what is going on.",
    411: "A body so large has to tell its length.",
    413: "The body is too large.",
    415: "The body must be application/json, not compressed.",
    429: "Too much of this key is under way; Retry-After says when to come back.",
    499: "The request was aborted.",
    500: "A failure of the server; the id finds it in the log.",
    501: "This server does not do that.",
    503: "No room, or no replica; Retry-After says when to come back.",
    504: "It took too long.",
}


_ALWAYS = (400, 403, 409, 500)
"""Host, Origin and the form of ``X-Request-ID`` are looked at before anything else."""
_WITH_A_KEY = (401,)
_WITH_A_BODY = (408, 411, 413, 415)
_WITH_A_NAME = (404, 405)
"""A path with a name in it: there may be nothing of that name, and another name may make another address."""
_OF_WORK = (404, 429, 499, 501, 503, 504)
"""What asks the pool for something."""

_NAME = "^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$"
_PARAMETERS: dict[str, Any] = {  # Any: pieces of the document
    "session": {
        "name": "session",
        "in": "path",
        "required": True,
        "description": "Made by its first request; what is sampled under it is captured, token by token.",
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
        "description": "Names the request; an operator may abort it by this. Unique among those under way.",
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$"},
    },
}


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """OpenAPI 3.1 of ``routes``. Any: it is JSON."""
    types: list[Any] = [ErrorBody, AnthropicErrorBody]
    for route in routes:
        types += [kind for kind in (route.request, route.answer, route.stream) if kind is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    # msgspec gives no hashable key for every type: the schemas come in the order of the types.
    placed = iter(schemas)
    errors = {"openai": next(placed), "anthropic": next(placed)}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        request, answer, event = (
            next(placed) if kind is not None else None for kind in (route.request, route.answer, route.stream)
        )
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(
            route, request, answer, event, errors[route.dialect]
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


def _refusals(route: Route) -> set[int]:
    """The statuses that may come instead of success."""
    told = {*_ALWAYS}
    if route.access != "anyone":
        told |= {*_WITH_A_KEY}
    if route.request is not None:
        told |= {*_WITH_A_BODY}
    if "{" in route.path:
        told |= {*_WITH_A_NAME}
    if route.timed or route.plane == "control":
        told |= {*_OF_WORK}
    return told


def _operation(route: Route, request: Any, answer: Any, event: Any, error: Any) -> dict[str, Any]:
    """Any: pieces of the document."""
    succeeded: dict[str, Any] = {}
    if answer is not None:
        succeeded["application/json"] = {"schema": answer}
    else:
        succeeded["text/plain"] = {"schema": {"type": "string"}}
    if event is not None:
        succeeded["text/event-stream"] = {"schema": {"type": "string"}, "x-asyncrl-event": event}
    responses: dict[str, Any] = {
        str(status): {"description": _REFUSALS[status], "content": {"application/json": {"schema": error}}}
        for status in sorted(_refusals(route))
    }
    responses[str(route.status)] = {"description": "Done.", "content": succeeded}
    for status in route.statuses:
        responses[str(status)] = {
            "description": "As said in the answer.",
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
    if route.access != "anyone":
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
        operation["requestBody"] = {
            "required": route.body_needed,
            "content": {"application/json": {"schema": request}},
        }
    return operation
