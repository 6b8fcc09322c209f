"""How the server is: alive, ready, well, and in numbers."""

from __future__ import annotations

from typing import Literal

from aiohttp import web
from msgspec import Struct

from asyncrl.errors import AsyncRLError
from asyncrl.interfaces import GenerationRequest, SamplingParams
from asyncrl.serve.call import Call
from asyncrl.serve.failure import Refusal
from asyncrl.serve.meters import exposition
from asyncrl.serve.model_text import RenderingReport

__all__ = ["Alive", "HealthReport", "health", "livez", "metrics", "openapi", "readyz"]


class Alive(Struct, kw_only=True):
    """A probe that succeeded."""

    status: Literal["ok"] = "ok"


class HealthReport(Struct, kw_only=True):
    """``healthy`` if a token was really generated just now."""

    healthy: bool
    model: str
    weight_version: int
    replicas: int
    serving: int
    probe_s: float
    error: str
    rendering: RenderingReport | None


async def livez(call: Call) -> web.StreamResponse:
    """The process answers."""
    return call.answer(Alive())


async def readyz(call: Call) -> web.StreamResponse:
    """A request would be served now."""
    face = call.face
    if face.admission.draining or not face.ready or not any(replica.serving for replica in face.pool.replicas()):
        raise Refusal(503, "not ready", retry_after_s=1)
    return call.answer(Alive())


async def health(call: Call) -> web.StreamResponse:
    """Generate one real token, as any request does. 200 if it came, 503 if not."""
    face = call.face
    begin = face.meters.clock()
    error = ""
    if face.pool.statistics().paused:
        error = "paused"
    else:
        request = GenerationRequest(
            request_id=f"{call.id}-0",
            prompt_token_ids=(0,),
            sampling=SamplingParams(max_new_tokens=1, temperature=0.0),
        )
        try:
            await call.collect(request)
        except (AsyncRLError, Refusal) as failure:
            error = type(failure).__name__
    replicas = face.pool.replicas()
    report = HealthReport(
        healthy=not error,
        model=face.names[0],
        weight_version=face.pool.weight_version,
        replicas=len(replicas),
        serving=sum(replica.serving for replica in replicas),
        probe_s=face.meters.clock() - begin,
        error=error,
        rendering=face.text.report if face.text is not None else None,
    )
    return call.answer(report, status=503 if error else 200)


async def metrics(call: Call) -> web.StreamResponse:
    """Everything in numbers, for Prometheus."""
    face = call.face
    told = exposition(
        face.meters,
        face.pool.statistics(),
        under_way=face.admission.under_way,
        sessions=len(face.sessions),
        session_tokens=face.sessions.tokens,
        unfinished_groups=0 if face.capture is None else face.capture.unfinished,
    )
    return web.Response(body=told, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def openapi(call: Call) -> web.StreamResponse:
    """This document, made from the route table: of the plane on which it is asked for."""
    from asyncrl.serve.openapi import document
    from asyncrl.serve.routes import routes_of

    return call.answer(document(routes_of(call.plane)))
