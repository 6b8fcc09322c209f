"""What every request passes: where it comes from, whose it is, its size and form; and how it is ended."""

from __future__ import annotations

import asyncio
import base64
import itertools
import logging
import math
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from aiohttp import web

from asyncrl.errors import AsyncRLError
from asyncrl.serve.call import Call, Face, Plane
from asyncrl.serve.failure import Dialect, Refusal, error_body, refusal_of
from asyncrl.serve.farewell import Farewells, LastAnswer
from asyncrl.serve.keys import KeyRing
from asyncrl.serve.limits import BodyWatch, json_problem
from asyncrl.serve.routes import Caller, Route, verdict

__all__ = ["Doorway", "Gate"]

_log = logging.getLogger(__name__)

_json = msgspec.json.Encoder()
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

_HOSTS_REMEMBERED = 256

_CLIENTS_HEADERS = (
    *("Authorization", "Content-Type", "X-API-Key", "X-Request-ID", "X-Session-ID"),
    "User-Agent",  # OpenAI's and Anthropic's clients set it; some browsers let them
    *("OpenAI-Organization", "OpenAI-Project"),
    *("Anthropic-Version", "Anthropic-Beta", "Anthropic-Dangerous-Direct-Browser-Access"),
    *(f"X-Stainless-{name}" for name in ("Arch", "Lang", "OS", "Package-Version", "Runtime", "Runtime-Version")),
    *(f"X-Stainless-{name}" for name in ("Helper", "Helper-Method", "Retry-Count", "Timeout")),
)
_PREFLIGHT = {
    "Access-Control-Allow-Headers": ", ".join(_CLIENTS_HEADERS),
    "Access-Control-Max-Age": "7200",  # seconds; Chromium remembers none for longer
}
_READABLE_HEADERS = "X-Request-ID, Retry-After"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Doorway:
    """One plane's way in.

    Attributes:
        plane: what is served there.
        users: keys that open the user plane; None where it needs none.
        operators: keys that open the control plane; None on a Unix socket, which its file's mode guards.
        hosts: names that a ``Host`` header may carry; None takes any.
        origins: of web pages that may call; others, and so all by default, are refused.
    """

    plane: Plane
    users: KeyRing | None = None
    operators: KeyRing | None = None
    hosts: frozenset[str] | None = None
    origins: frozenset[str] = frozenset()

    @property
    def keyless(self) -> bool:
        """Whether no key is needed."""
        return (self.users if self.plane == "user" else self.operators) is None

    def caller(self, presented: str) -> tuple[Caller, str]:
        """Who presents this key (empty for none), and the holder's name."""
        if not presented:
            return "nobody", ""
        found: tuple[Caller, str] = "stranger", ""
        if self.users is not None and (holder := self.users.holder_of(presented)) is not None:
            found = "user", holder
        if self.operators is not None and (holder := self.operators.holder_of(presented)) is not None:
            found = "operator", holder
        return found


class _Deadline:
    """Cancels the task that makes it, later. What :func:`asyncio.timeout` does, at a fifth of its cost."""

    __slots__ = ("_task", "_timer", "passed")

    def __init__(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        assert task is not None
        self._task = task
        self._timer = loop.call_later(seconds, self._pass)
        self.passed = False

    def _pass(self) -> None:
        self.passed = True
        self._task.cancel()

    def over(self) -> None:
        """The task is done, or was cancelled."""
        self._timer.cancel()
        if self.passed:
            self._task.uncancel()


class Gate:
    """Makes aiohttp handlers of routes."""

    def __init__(self, face: Face, doorway: Doorway) -> None:
        self._face = face
        self._door = doorway
        self._prefix = secrets.token_hex(4)
        self._numbers = itertools.count()
        self._farewells = Farewells(face.limits.connections)
        self._known_hosts: set[str] = set()  # Host headers that were found good, ports and all

    def handler(self, route: Route) -> Handler:
        """Serve ``route``."""
        decoder: msgspec.json.Decoder[object] | None = None
        if route.request is not None:
            decoder = msgspec.json.Decoder(route.request)
        face, limits, plane = self._face, self._face.limits, self._door.plane
        clock = face.meters.clock
        time_s = limits.request_timeout_s if route.timed else None
        label = f"{route.method} {route.path}"

        async def handle(request: web.Request) -> web.StreamResponse:
            begin = clock()
            call: Call | None = None
            deadline: _Deadline | None = None
            call_id = f"{self._prefix}{next(self._numbers):x}"
            status = 499
            try:
                try:
                    holder = self._admit(request, route)
                    call_id = self._id_of(request, call_id)
                    body = await self._body(request, route, decoder) if decoder is not None else None
                    call = Call(face, request, id=call_id, holder=holder, plane=plane, body=body)
                    deadline = _Deadline(time_s) if time_s is not None else None
                    try:
                        response = await route.handler(call)
                    finally:
                        if deadline is not None:
                            deadline.over()
                except Refusal as refusal:
                    response = await self._refuse(request, call, refusal, call_id, route.dialect)
                except AsyncRLError as error:
                    response = await self._refuse(request, call, self._told(error, call_id), call_id, route.dialect)
                except asyncio.CancelledError:
                    if deadline is None or not deadline.passed:
                        raise
                    late = Refusal(504, f"it took longer than {time_s:g} s")
                    response = await self._refuse(request, call, late, call_id, route.dialect)
                except TimeoutError:
                    late = Refusal(504, "it took too long")
                    response = await self._refuse(request, call, late, call_id, route.dialect)
                except (ConnectionError, web.HTTPException):
                    raise
                except Exception as error:  # noqa: BLE001 - the last one to see it: logged with its id
                    response = await self._refuse(request, call, self._bug(error, call_id), call_id, route.dialect)
                status = response.status
                return response
            finally:
                if call is not None:
                    face.running.pop(call_id, None)
                face.meters.request(label, status, clock() - begin)

        return handle

    def fallback(self, routes: Sequence[Route]) -> Handler:
        """Answer what no route does: a browser's preflight, 405 where another method would do, else 404."""
        patterns = [
            (re.compile(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(route.path))), route.method) for route in routes
        ]

        async def handle(request: web.Request) -> web.StreamResponse:
            call_id = f"{self._prefix}{next(self._numbers):x}"
            dialect: Dialect = "anthropic" if "/v1/messages" in request.path else "openai"
            try:
                self._check_origin(request)
                allow = tuple(sorted({method for pattern, method in patterns if pattern.fullmatch(request.path)}))
                if allow and _is_preflight(request):  # from an allowed origin, or it would have been refused
                    self._face.meters.request("none", 204, 0.0)
                    return web.Response(
                        status=204, headers={"Access-Control-Allow-Methods": ", ".join(allow), **_PREFLIGHT}
                    )
                if allow:
                    raise Refusal(405, f"this needs {' or '.join(allow)}", allow=allow)
                raise Refusal(404, "there is nothing under this address")
            except Refusal as refusal:
                self._face.meters.request("none", refusal.status, 0.0)
                return await self._refuse(request, None, refusal, call_id, dialect)

        return handle

    async def expect(self, request: web.Request) -> web.StreamResponse | None:
        """A client asks whether it may send its body (``Expect: 100-continue``)."""
        if (request.content_length or 0) > self._face.limits.body_size_bytes:
            raise web.HTTPRequestEntityTooLarge(self._face.limits.body_size_bytes)
        if request.headers.get("Expect", "").lower() != "100-continue":
            raise web.HTTPExpectationFailed
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
        return None

    async def tell_browser(self, request: web.Request, response: web.StreamResponse) -> None:
        """Say whether a web page may read this answer (the CORS protocol of the Fetch standard).

        For ``on_response_prepare``, and only where some origin is allowed.
        """
        headers = response.headers
        headers["Vary"] = "Origin"
        origin = request.headers.get("Origin")
        if origin is not None and origin in self._door.origins:
            headers["Access-Control-Allow-Origin"] = origin
            headers["Access-Control-Expose-Headers"] = _READABLE_HEADERS

    # -------------------------------------------------------------------------------------------------- admission

    def _admit(self, request: web.Request, route: Route) -> str:
        """Whose request it is.

        Raises:
            Refusal: it may not be made, whoever's it is or because of that.
        """
        self._check_origin(request)
        door = self._door
        if door.keyless:
            return "" if door.plane == "user" else "operator"
        caller, holder = door.caller(_presented(request.headers))
        status = verdict(route, plane=door.plane, caller=caller, keyless=False)
        if status == 401:
            raise Refusal(401, "a key is needed: Authorization: Bearer KEY, or x-api-key: KEY")
        if status != 200:
            raise Refusal(status, "this key does not open this")
        return holder

    def _check_origin(self, request: web.Request) -> None:
        headers = request.headers
        host = headers.get("Host", "")
        if host not in self._known_hosts:
            self._check_host(host)
        origin = headers.get("Origin")
        if origin is not None and origin not in self._door.origins:
            raise Refusal(403, f"web pages of {origin[:80]!r} may not call; allow them with --allowed-origin")

    def _check_host(self, host: str) -> None:
        if self._door.hosts is not None:
            name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
            if name.lower() not in self._door.hosts:
                raise Refusal(403, f"Host {host[:80]!r} is not this server's name; allow it with --allowed-host")
        if len(self._known_hosts) < _HOSTS_REMEMBERED:
            self._known_hosts.add(host)

    def _id_of(self, request: web.Request, made: str) -> str:
        asked = request.headers.get("X-Request-ID")
        if asked is None:
            return made
        if not _REQUEST_ID.fullmatch(asked):
            raise Refusal(400, "X-Request-ID has 1 to 64 letters, digits and ._-")
        if asked in self._face.running:
            raise Refusal(409, f"request {asked} is under way: ids are unique")
        return asked

    # ------------------------------------------------------------------------------------------------------- body

    async def _body(self, request: web.Request, route: Route, decoder: msgspec.json.Decoder[object]) -> object:
        headers = request.headers
        content = request.content
        if not content.is_eof():
            self._check_size(request, request.content_length or 0)
        elif not route.body_needed and not request.body_exists:
            assert route.request is not None
            return route.request()
        if headers.get("Content-Type") != "application/json" and request.content_type != "application/json":
            raise Refusal(415, "the body must be JSON: Content-Type: application/json")
        if headers.get("Content-Encoding", "identity") != "identity":
            raise Refusal(415, "compressed bodies are not taken")
        limits = self._face.limits
        # Most bodies have come with their head; reading them then needs no wait.
        try:
            body = content.read_nowait() if content.is_eof() else await self._read(request)
        except web.RequestPayloadError:
            raise Refusal(400, "the body is not what its headers say") from None
        self._check_size(request, len(body))
        if problem := json_problem(body, limits):
            raise Refusal(400, problem)
        if not body and not route.body_needed:
            body = b"{}"
        try:
            return decoder.decode(body)
        except (msgspec.MsgspecError, ValueError) as error:
            raise Refusal(400, str(error)[:500]) from None
        except RecursionError:
            raise Refusal(400, "nested too deep") from None

    def _check_size(self, request: web.Request, size_bytes: int) -> None:
        """Refuse a body that has, or tells that it will have, too many bytes."""
        most = self._face.limits.body_size_bytes
        if size_bytes > most:
            raise Refusal(413, f"the body has more than {most} bytes")
        most = self._face.limits.chunked_body_size_bytes
        if request.content_length is None and size_bytes > most:
            raise Refusal(411, f"a body of more than {most} bytes has to tell its length: Content-Length, not chunks")

    async def _read(self, request: web.Request) -> bytes:
        limits = self._face.limits
        watch = BodyWatch(limits)
        try:
            async with asyncio.timeout(limits.body_timeout_s):
                while piece := await request.content.readany():
                    problem = watch.problem(piece)
                    self._check_size(request, watch.size_bytes)
                    if problem:
                        raise Refusal(400, problem)
        except TimeoutError:
            raise Refusal(408, f"the body did not arrive within {limits.body_timeout_s:g} s") from None
        return watch.body()

    # ---------------------------------------------------------------------------------------------------- endings

    async def _refuse(
        self, request: web.Request, call: Call | None, refusal: Refusal, call_id: str, dialect: Dialect
    ) -> web.StreamResponse:
        """Tell the client: as an answer, or as the last event of a stream that has begun."""
        body = _json.encode(error_body(refusal, request_id=call_id, dialect=dialect))
        if call is not None and (events := call.open_events) is not None and events.begun:
            if refusal.status == 504 and request.transport is not None:
                request.transport.abort()  # whoever does not read would not read this either
            else:
                name = b"event: error\n" if dialect == "anthropic" else b""
                await events.send_bytes(b"%sdata: %s\n\n" % (name, body))
                await events.end()
            return events.response
        headers = {"Content-Type": "application/json", "X-Request-ID": call_id, "X-Content-Type-Options": "nosniff"}
        if refusal.retry_after_s:
            headers["Retry-After"] = str(math.ceil(refusal.retry_after_s))
        if refusal.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if refusal.allow:
            headers["Allow"] = ", ".join(refusal.allow)
        if refusal.status == 408 or self._much_is_to_come(request):
            return LastAnswer(request, self._farewells, body=body, status=refusal.status, headers=headers)
        return web.Response(body=body, status=refusal.status, headers=headers)

    def _much_is_to_come(self, request: web.Request) -> bool:
        """Of the body, so much that the connection has to end; less is read and thrown away by aiohttp."""
        length = request.content_length
        return not request.content.is_eof() and (length is None or length > self._face.limits.body_size_bytes)

    def _told(self, error: AsyncRLError, call_id: str) -> Refusal:
        refusal = refusal_of(error)
        if refusal is None:
            return self._bug(error, call_id)
        if refusal.status >= 500:
            _log.warning("request %s: %s: %s", call_id, type(error).__name__, error)
        return refusal

    def _bug(self, error: Exception, call_id: str) -> Refusal:
        _log.error("request %s failed", call_id, exc_info=error)
        return Refusal(500, f"the server failed; its log tells why under {call_id}")


def _is_preflight(request: web.Request) -> bool:
    """Whether a browser asks what a page may send here."""
    headers = request.headers
    asks = "Origin" in headers and "Access-Control-Request-Method" in headers
    return asks and request.method == "OPTIONS" and not request.body_exists


def _presented(headers: Mapping[str, str]) -> str:
    """The key that comes with a request, empty without one.

    As a bearer token, in ``x-api-key``, or as the password of an address (``http://anybody:KEY@host``), which is the
    only place for it in clients that know nothing of keys.
    """
    scheme, _, credentials = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return credentials.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(credentials.strip(), validate=True).decode("ascii").partition(":")[2]
        except ValueError:
            return ""
    return headers.get("x-api-key", "")
