"""What every request passes before its handler: host and origin, key, size and JSON of the body; and how it ends.

Keys are kept as digests and compared in constant time. A connection whose client still sends when it has its answer is
closed in stages, by :class:`LingeringClose`.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import itertools
import logging
import math
import os
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.serve.call import Call, Plane, ServerState
from asyncrl.serve.errors import API, APIError, api_error_of, error_body, error_event
from asyncrl.serve.limits import BodyWatch, json_problem
from asyncrl.serve.routes import Caller, Route, access_status

_log = logging.getLogger(__name__)
_json = msgspec.json.Encoder()
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `([^`]*)`(?: - at `\$\.(.*)`)?")


# ----------------------------------------------------------------------------------------------------------- keys

_SHORTEST_KEY = 16
_LONGEST_KEY = 512


class KeyRing:
    """The keys of one plane, by holder's name.

    Raises:
        ConfigError: a key is shorter than 16 characters, longer than 512, or has a space in it.
    """

    def __init__(self, keys: Mapping[str, str]) -> None:
        for holder, key in keys.items():
            if not _SHORTEST_KEY <= len(key) <= _LONGEST_KEY or not key.isascii() or any(map(str.isspace, key)):
                raise ConfigError(
                    f"the key of {holder!r} must have {_SHORTEST_KEY} to {_LONGEST_KEY} ASCII characters and no space",
                    path="api-key",
                    remedy="make one: python -c 'import secrets; print(secrets.token_urlsafe(32))'",
                )
        self._digests = tuple((holder, _digest(key)) for holder, key in keys.items())

    def __len__(self) -> int:
        return len(self._digests)

    def __repr__(self) -> str:
        return f"KeyRing({', '.join(holder for holder, _ in self._digests)})"

    @classmethod
    def from_environment(cls, name: str) -> KeyRing | None:
        """Return the key in an environment variable, held by ``environment``; None if it is not set."""
        key = os.environ.get(name, "")
        return cls({"environment": key}) if key else None

    def holder_of(self, presented: str) -> str | None:
        """Return the holder of a key, or None. A wrong key takes as long as a right one."""
        found: str | None = None
        digest = _digest(presented[: _LONGEST_KEY + 1])
        for holder, known in self._digests:
            if hmac.compare_digest(digest, known):
                found = holder
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


# ------------------------------------------------------------------------------------------------ lingering close

_LINGER_S = 2.0
_LINGER_BYTES = 16 << 20  # by default Linux holds 4 MB of a connection at the end that sends, 6 MB at the other
_LINGER_SHARE = 16  # one connection in so many may linger; further ones are closed at once


class LingeringClose:
    """Closes connections of one listener whose clients still send, in stages (RFC 9112, section 9.6).

    Closing a socket with unread bytes resets its connection, and the reset may reach the client before the answer. So
    after the answer our half is ended, and what arrives is discarded unparsed until the client closes, or has had its
    time and its bytes. ``connections`` may be open at a time.
    """

    def __init__(self, connections: int) -> None:
        self._max_lingering = max(1, connections // _LINGER_SHARE)
        self._lingering = 0

    async def close(self, request: web.Request) -> None:
        """Close the connection of an answered request. Its body is parsed no further."""
        transport, content = request.transport, request.content
        if transport is None or transport.is_closing() or content.is_eof():
            return
        discarding = _DiscardProtocol(transport)
        transport.set_protocol(discarding)
        content.feed_eof()  # else aiohttp would wait for the rest of it
        transport.pause_reading()
        if self._lingering >= self._max_lingering:
            return
        self._lingering += 1
        try:
            transport.write_eof()
            transport.resume_reading()
            async with asyncio.timeout(_LINGER_S):
                await discarding.closed
        except (TimeoutError, OSError):
            transport.abort()
        finally:
            self._lingering -= 1


class LastResponse(web.Response):
    """An answer after which the connection is closed, even if the client still sends its request."""

    def __init__(
        self, request: web.Request, lingering: LingeringClose, *, body: bytes, status: int, headers: Mapping[str, str]
    ) -> None:
        super().__init__(body=body, status=status, headers=headers)
        self.force_close()
        self._request = request
        self._closing = lingering

    async def write_eof(self, data: bytes = b"") -> None:
        await super().write_eof(data)
        await self._closing.close(self._request)


class _DiscardProtocol(asyncio.Protocol):
    """Takes a connection over from the protocol that reads it, and passes the end of the connection on to that."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._reader = transport.get_protocol()
        self._left = _LINGER_BYTES
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left < 0:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)
        self._reader.connection_lost(exc)


# ------------------------------------------------------------------------------------------------------ middleware

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

_CACHED_HOSTS = 256

_CLIENT_HEADERS = (
    *("Authorization", "Content-Type", "X-API-Key", "X-Request-ID", "X-Session-ID"),
    "User-Agent",  # OpenAI's and Anthropic's clients set it, where the browser allows it
    *("OpenAI-Organization", "OpenAI-Project"),
    *("Anthropic-Version", "Anthropic-Beta", "Anthropic-Dangerous-Direct-Browser-Access"),
    *(f"X-Stainless-{name}" for name in ("Arch", "Lang", "OS", "Package-Version", "Runtime", "Runtime-Version")),
    *(f"X-Stainless-{name}" for name in ("Helper", "Helper-Method", "Retry-Count", "Timeout")),
)
_PREFLIGHT = {
    "Access-Control-Allow-Headers": ", ".join(_CLIENT_HEADERS),
    "Access-Control-Max-Age": "7200",  # seconds; Chromium's maximum
}
_READABLE_HEADERS = "X-Request-ID, Retry-After"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneAccess:
    """Who may call one plane, from where.

    Attributes:
        users: keys of the user plane; None if it needs none.
        operators: keys of the control plane; None on a Unix socket, which its file's mode protects.
        hosts: names that a ``Host`` header may have; None allows any.
        origins: of web pages that may call; all others are refused.
    """

    plane: Plane
    users: KeyRing | None = None
    operators: KeyRing | None = None
    hosts: frozenset[str] | None = None
    origins: frozenset[str] = frozenset()

    @property
    def keyless(self) -> bool:
        return (self.operators if self.plane == "control" else self.users) is None

    def caller(self, presented: str) -> tuple[Caller, str]:
        """Return the kind of caller that has this key (empty for none), and its holder: the kind and the name.

        Holders of two rings are never the same, although their files may name both alike.
        """
        if not presented:
            return "anonymous", ""
        found: tuple[Caller, str] = "unknown", ""
        if self.users is not None and (name := self.users.holder_of(presented)) is not None:
            found = "user", f"user {name}"
        if self.operators is not None and (name := self.operators.holder_of(presented)) is not None:
            found = "operator", f"operator {name}"
        return found


class _Deadlines:
    """Cancels tasks that still run after ``seconds``, like :func:`asyncio.timeout`, at a small part of its cost.

    All have the same time, so they end in the order in which they began, and one timer waits for the first.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._running: dict[_Deadline, None] = {}
        self._waits = False

    def begin(self) -> _Deadline:
        """Return the deadline of the current task, which has to :meth:`end` it."""
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        assert task is not None
        deadline = _Deadline(task, loop.time() + self._seconds)
        self._running[deadline] = None
        if not self._waits:
            self._wait(loop)
        return deadline

    def end(self, deadline: _Deadline) -> None:
        self._running.pop(deadline, None)
        if deadline.passed:
            deadline.task.uncancel()

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel what is late, and wait for the next one."""
        while first := next(iter(self._running), None):
            if first.ends_s > loop.time():
                loop.call_at(first.ends_s, self._wait, loop)
                break
            del self._running[first]
            first.passed = True
            first.task.cancel()
        self._waits = first is not None


class _Deadline:
    __slots__ = ("ends_s", "passed", "task")

    def __init__(self, task: asyncio.Task[Any], ends_s: float) -> None:
        self.task, self.ends_s = task, ends_s
        self.passed = False


class Middleware:
    """Makes the handlers of one plane for aiohttp, each a route's handler with the checks around it.

    Made once per route, not as aiohttp's chain of middlewares: the order of the checks is on one page, and a request
    passes no further coroutines.
    """

    def __init__(self, state: ServerState, access: PlaneAccess) -> None:
        self._state = state
        self._access = access
        self._prefix = secrets.token_hex(4)
        self._numbers = itertools.count()
        self._lingering = LingeringClose(state.limits.connections)
        self._good_hosts: set[str] = set()  # Host headers that were found allowed, with their ports

    def handler(self, route: Route) -> Handler:
        """Return the handler of ``route``: check the caller, the id, the load, then the body; call; answer errors."""
        decoder: msgspec.json.Decoder[object] | None = None
        if route.request is not None:
            decoder = msgspec.json.Decoder(route.request)
        state, plane, api = self._state, self._access.plane, route.api
        timed = route.timed and plane != "agent"  # whose requests end with their episode
        time_s = state.limits.request_timeout_s if timed else None
        deadlines = _Deadlines(time_s) if time_s is not None else None
        label = f"{route.method} {route.path}"

        async def handle(request: web.Request) -> web.StreamResponse:
            begin = state.clock()
            call: Call | None = None
            deadline: _Deadline | None = None
            call_id, claimed = self._new_id(), False
            holder, places = "", 0
            status = 499
            try:
                try:
                    holder = self._check_caller(request, route)
                    call_id = self._request_id(request) or call_id
                    state.choices_by_request[call_id] = 0
                    claimed = True
                    if route.takes_place:
                        state.concurrency.acquire(holder)
                        places = 1
                    body = await self._body(request, route, decoder) if decoder is not None else None
                    call = Call(state, request, id=call_id, holder=holder, plane=plane, body=body, places=places)
                    deadline = deadlines.begin() if deadlines is not None else None
                    try:
                        response = await route.handler(call)
                    finally:
                        call.leave_session()
                        if deadlines is not None and deadline is not None:
                            deadlines.end(deadline)
                except asyncio.CancelledError:
                    if deadline is None or not deadline.passed:
                        raise
                    late = APIError(504, f"the request took longer than {time_s:g} s")
                    response = await self._answer_error(request, call, late, call_id, api)
                except (ConnectionError, web.HTTPException):
                    raise
                except Exception as error:  # noqa: BLE001 - the last place that sees it: answered, and logged with its id
                    response = await self._answer_error(request, call, self._api_error(error, call_id), call_id, api)
                status = response.status
                return response
            finally:
                if claimed:
                    del state.choices_by_request[call_id]
                if left := places if call is None else call.places:
                    state.concurrency.release(holder, left)
                state.metrics.add_request(label, status, state.clock() - begin)

        return handle

    def _new_id(self) -> str:
        """Return an id that no request has, none either whose client guessed that this one would be the next."""
        while (made := f"{self._prefix}{next(self._numbers):x}") in self._state.choices_by_request:
            pass
        return made

    def fallback(self, routes: Sequence[Route]) -> Handler:
        """Return the handler of other requests: a browser's preflight, 405 if another method has a route, else 404."""
        patterns = [(route.pattern, route.method) for route in routes]

        async def handle(request: web.Request) -> web.StreamResponse:
            api: API = "anthropic" if "/v1/messages" in request.path else "openai"
            try:
                self._check_origin(request)
                allow = tuple(sorted({method for pattern, method in patterns if pattern.fullmatch(request.path)}))
                if allow and _is_preflight(request):  # from an allowed origin, as checked before
                    self._state.metrics.add_request("none", 204, 0.0)
                    return web.Response(
                        status=204, headers={"Access-Control-Allow-Methods": ", ".join(allow), **_PREFLIGHT}
                    )
                if allow:
                    raise APIError(405, f"this address takes {' or '.join(allow)}", allow=allow)
                raise APIError(404, "there is nothing under this address")
            except APIError as error:
                self._state.metrics.add_request("none", error.status, 0.0)
                return await self._answer_error(request, None, error, self._new_id(), api)

        return handle

    async def expect(self, request: web.Request) -> web.StreamResponse | None:
        """Answer ``Expect: 100-continue``: whether the client may send its body."""
        if (request.content_length or 0) > self._state.limits.body_size_bytes:
            raise web.HTTPRequestEntityTooLarge(self._state.limits.body_size_bytes)
        if request.headers.get("Expect", "").lower() != "100-continue":
            raise web.HTTPExpectationFailed
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
        return None

    async def add_cors_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add the headers by which a browser lets a web page read this answer (CORS protocol, Fetch standard).

        For ``on_response_prepare``, and only if some origin is allowed.
        """
        headers = response.headers
        headers["Vary"] = "Origin"
        origin = request.headers.get("Origin")
        if origin is not None and origin in self._access.origins:
            headers["Access-Control-Allow-Origin"] = origin
            headers["Access-Control-Expose-Headers"] = _READABLE_HEADERS

    # ------------------------------------------------------------------------------------------------ the caller

    def _check_caller(self, request: web.Request, route: Route) -> str:
        """Return the holder of the request's key; an API error if its host, origin or key is not allowed."""
        self._check_origin(request)
        access = self._access
        if access.plane == "agent":  # each session is a holder, as a key is
            name: str = request.match_info["session"]
            return self._state.sessions.find(name, name).holder
        if access.keyless:
            return "" if access.plane == "user" else "operator"
        caller, holder = access.caller(_presented_key(request.headers))
        status = access_status(route, plane=access.plane, caller=caller, keyless=False)
        if status == 401:
            raise APIError(401, "a key is needed: Authorization: Bearer KEY, or x-api-key: KEY")
        if status != 200:
            raise APIError(status, "this key is not allowed here")
        return holder

    def _check_origin(self, request: web.Request) -> None:
        headers = request.headers
        host = headers.get("Host", "")
        if host not in self._good_hosts:
            self._check_host(host)
        origin = headers.get("Origin")
        if origin is not None and origin not in self._access.origins:
            raise APIError(403, f"web pages of {origin[:80]!r} may not call; allow them with --allowed-origin")

    def _check_host(self, host: str) -> None:
        if self._access.hosts is not None:
            name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
            if name.lower() not in self._access.hosts:
                raise APIError(403, f"Host {host[:80]!r} is not this server's name; allow it with --allowed-host")
        if len(self._good_hosts) < _CACHED_HOSTS:
            self._good_hosts.add(host)

    def _request_id(self, request: web.Request) -> str | None:
        given = request.headers.get("X-Request-ID")
        if given is None:
            return None
        if not _REQUEST_ID.fullmatch(given):
            raise APIError(400, "X-Request-ID has 1 to 64 letters, digits and ._-")
        if given in self._state.choices_by_request:
            raise APIError(409, f"request {given} is running: ids are unique")
        return given

    # -------------------------------------------------------------------------------------------------- the body

    async def _body(self, request: web.Request, route: Route, decoder: msgspec.json.Decoder[object]) -> object:
        headers = request.headers
        content = request.content
        if not content.is_eof():
            self._check_size(request, request.content_length or 0)
        elif not route.body_needed and not request.body_exists:
            assert route.request is not None
            return route.request()
        if headers.get("Content-Type") != "application/json" and request.content_type != "application/json":
            raise APIError(415, "the body must be JSON: Content-Type: application/json")
        if headers.get("Content-Encoding", "identity") != "identity":
            raise APIError(415, "compressed bodies are not accepted")
        # Most bodies arrive with their head; reading them then needs no wait.
        try:
            body = content.read_nowait() if content.is_eof() else await self._read(request)
        except web.RequestPayloadError:
            raise APIError(400, "the body is not what its headers say") from None
        self._check_size(request, len(body))
        if problem := json_problem(body, self._state.limits):
            raise APIError(400, problem)
        if not body and not route.body_needed:
            body = b"{}"
        try:
            return decoder.decode(body)
        except (msgspec.MsgspecError, ValueError) as error:
            unknown = _UNKNOWN_FIELD.match(str(error))
            message = (
                f"{'.'.join(filter(None, unknown.group(2, 1)))} is not served; leave it out" if unknown else str(error)
            )
            raise APIError(400, message[:500]) from None
        except RecursionError:
            raise APIError(400, "the body is nested too deep") from None

    def _check_size(self, request: web.Request, size_bytes: int) -> None:
        """Raise 413 or 411 for a body that has, or by its header will have, too many bytes."""
        limits = self._state.limits
        if size_bytes > limits.body_size_bytes:
            raise APIError(413, f"the body has more than {limits.body_size_bytes} bytes")
        if request.content_length is None and size_bytes > limits.chunked_body_size_bytes:
            raise APIError(
                411, f"a body of more than {limits.chunked_body_size_bytes} bytes needs Content-Length, not chunks"
            )

    async def _read(self, request: web.Request) -> bytes:
        limits = self._state.limits
        watch = BodyWatch(limits)
        try:
            async with asyncio.timeout(limits.body_timeout_s):
                while piece := await request.content.readany():
                    problem = watch.problem(piece)
                    self._check_size(request, watch.size_bytes)
                    if problem:
                        raise APIError(400, problem)
        except TimeoutError:
            raise APIError(408, f"the body did not arrive within {limits.body_timeout_s:g} s") from None
        return watch.body()

    # --------------------------------------------------------------------------------------------------- errors

    async def _answer_error(
        self, request: web.Request, call: Call | None, error: APIError, call_id: str, api: API
    ) -> web.StreamResponse:
        """Send an error: as an answer, or as the last event of a stream that has begun."""
        if call is not None and (events := call.open_events) is not None and events.begun:
            if events.stalled and request.transport is not None:
                request.transport.abort()  # a client that does not read would not read this either
            else:
                last = error_event(error, request_id=call_id, api=api, number=events.sent)
                await events.send(last, event="" if api == "openai" else "error")
                await events.end()
            return events.response
        body = _json.encode(error_body(error, request_id=call_id, api=api))
        headers = {"Content-Type": "application/json", "X-Request-ID": call_id, "X-Content-Type-Options": "nosniff"}
        if error.retry_after_s:
            headers["Retry-After"] = str(math.ceil(error.retry_after_s))
        if error.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if error.allow:
            headers["Allow"] = ", ".join(error.allow)
        # aiohttp reads and discards a short rest of the body; a long one ends the connection.
        length = request.content_length
        long = not request.content.is_eof() and (length is None or length > self._state.limits.body_size_bytes)
        if error.status == 408 or long:
            return LastResponse(request, self._lingering, body=body, status=error.status, headers=headers)
        return web.Response(body=body, status=error.status, headers=headers)

    def _api_error(self, error: Exception, call_id: str) -> APIError:
        """Return what ``error`` is for the client; log what is the server's failure."""
        if isinstance(error, APIError):
            return error
        if isinstance(error, AsyncRLError) and (known := api_error_of(error)) is not None:
            if known.status >= 500:
                _log.warning("request %s: %s: %s", call_id, type(error).__name__, error)
            return known
        if isinstance(error, TimeoutError):
            return APIError(504, "the request took too long")
        _log.error("request %s failed", call_id, exc_info=error)
        return APIError(500, f"the server failed; see {call_id} in its log")


def _is_preflight(request: web.Request) -> bool:
    headers = request.headers
    cors = "Origin" in headers and "Access-Control-Request-Method" in headers
    return cors and request.method == "OPTIONS" and not request.body_exists


def _presented_key(headers: Mapping[str, str]) -> str:
    """Return the key of a request, empty without one.

    It is a bearer token, ``x-api-key``, or the password of an address (``http://user:KEY@host``), which is the only
    place for it in clients that do not support keys.
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
