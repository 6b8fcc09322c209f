"""The OpenAPI document, made from the route table."""

from __future__ import annotations

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
    413: "The body is too large.",
    415: "The body must be application/json, not compressed.",
    429: "Too much of this key is under way; Retry-After says when to come back.",
    499: "The request was aborted.",
    500: "A failure of the server; the id finds it in the log.",
    501: "This server does not do that.",
    503: "No room, or no replica; Retry-After says when to come back.",
    504: "It took too long.",
}


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """OpenAPI 3.1 of ``routes``. Any: it is JSON."""
    types: list[Any] = [ErrorBody, AnthropicErrorBody]
    for route in routes:
        types += [kind for kind in (route.request, route.answer) if kind is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    # msgspec gives no hashable key for every type: the schemas come in the order of the types.
    placed = iter(schemas)
    errors = {"openai": next(placed), "anthropic": next(placed)}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        request = next(placed) if route.request is not None else None
        answer = next(placed) if route.answer is not None else None
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(
            route, request, answer, errors[route.dialect]
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


def _operation(route: Route, request: Any, answer: Any, error: Any) -> dict[str, Any]:
    """Any: pieces of the document."""
    succeeded: dict[str, Any] = {}
    if answer is not None:
        succeeded["application/json"] = {"schema": answer}
    else:
        succeeded["text/plain"] = {"schema": {"type": "string"}}
    if route.stream is not None:
        succeeded["text/event-stream"] = {"schema": {"type": "string"}}
    responses: dict[str, Any] = {
        str(status): {
            "description": text,
            "content": {"application/json": {"schema": error}},
        }
        for status, text in _REFUSALS.items()
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
    if "{session}" in route.path:
        operation["parameters"] = [
            {
                "name": "session",
                "in": "path",
                "required": True,
                "schema": {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$"},
            }
        ]
    elif route.stream is not None:
        operation["parameters"] = [
            {
                "name": "X-Session-ID",
                "in": "header",
                "required": False,
                "description": "Captures what is sampled, token by token, under this name.",
                "schema": {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$"},
            }
        ]
    if request is not None:
        operation["requestBody"] = {
            "required": route.body_needed,
            "content": {"application/json": {"schema": request}},
        }
    return operation
