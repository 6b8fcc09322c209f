"""The server of the page: on loopback, behind a token, with nothing from elsewhere.

    GET /?token=TOKEN              keeps the token in a cookie of the browser, and shows the page
    GET /api/runs                  a line for each run
    GET /api/runs/NAME/overview    and /failures, /timeline, /rollouts, /rollouts/NUMBER: what a view shows
    GET /api/runs/NAME/events      server-sent events: the names of all files, then of those that have changed

Answers are made in threads. A browser may load scripts and styles from this address alone, and may not frame it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from asyncrl.errors import ConfigError
from asyncrl.page.runs import MOST_LISTED, RunFolder, RunFolders
from asyncrl.telemetry.run_directory import to_json

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_STATIC = ("index.html", "page.css", "page.js", "charts.js", "uplot.js", "uplot.css")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_LOOK_S = 1.0
_MOST_STREAMS = 64
_MOST_TEXT = 200

Answer = Callable[[RunFolder, web.Request], Any]


class PageServer:
    """Serves the runs in a folder. Used from one event loop.

    Attributes:
        token: without it nothing is answered.
        url: the address to open, with the token; known inside :meth:`serving`.
    """

    def __init__(self, folder: Path, *, host: str = "127.0.0.1", port: int = 0) -> None:
        """Check the folder and the address.

        Raises:
            ConfigError: there is no such folder, the host is not loopback, or the port is none.
        """
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder", path="run", remedy="give a run, or the folder of runs")
        if host not in _LOOPBACK:
            raise ConfigError(
                f"{host} is not loopback: the page shows everything of a run, and is for this machine alone",
                path="host",
                remedy="leave it out, and reach it from elsewhere with `ssh -L PORT:127.0.0.1:PORT MACHINE`",
            )
        if not 0 <= port <= 65_535:
            raise ConfigError(f"{port} is not a port", path="port", remedy="give 0 (any) to 65535")
        self.runs = RunFolders(folder)
        self.token = secrets.token_urlsafe(24)
        self.url = ""
        self._host, self._port = host, port
        self._ending = asyncio.Event()
        self._streams = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve inside the block.

        Raises:
            ConfigError: the port is in use, or cannot be had.
        """
        try:
            family = socket.AF_INET6 if self._host == "::1" else socket.AF_INET
            listener = socket.create_server((self._host, self._port), family=family)
        except OSError as error:
            remedy = "give another --port, or 0 for any that is free"
            raise ConfigError(f"port {self._port}: {error.strerror}", path="port", remedy=remedy) from error
        self._port = listener.getsockname()[1]
        name = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"http://{name}:{self._port}/?token={self.token}"
        runner = web.AppRunner(self._application(), access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.SockSite(runner, listener).start()
            yield
        finally:
            self._ending.set()
            await runner.cleanup()

    def _application(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=0)
        app.router.add_get("/", self._index)
        for name in _STATIC[1:]:
            app.router.add_get(f"/{name}", self._static(name))
        app.router.add_get("/api/runs", self._list)
        answers: dict[str, Answer] = {
            "overview": lambda run, _request: run.overview(),
            "failures": lambda run, _request: run.failures(),
            "timeline": _timeline,
            "rollouts": _rollouts,
            "rollouts/{number}": _rollout,
        }
        for path, answer in answers.items():
            app.router.add_get(f"/api/runs/{{name}}/{path}", self._of_run(answer))
        app.router.add_get("/api/runs/{name}/events", self._events)
        return app

    @property
    def _cookie(self) -> str:
        return f"asyncrl_page_{self._port}"  # cookies do not tell ports apart

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            if _host_of(request) not in _LOOPBACK:  # a name of elsewhere that leads here: DNS rebinding
                raise web.HTTPForbidden(text="this page answers on loopback names only")
            given = request.query.get("token") or request.cookies.get(self._cookie) or _bearer(request)
            if not secrets.compare_digest(given.encode(errors="replace"), self.token.encode()):
                raise web.HTTPUnauthorized(text="open the address that asyncrl printed: it has the token")
            response = await handler(request)
        except web.HTTPException as error:
            error.headers.update(_HEADERS)
            raise
        if not response.prepared:
            response.headers.update(_HEADERS)
        return response

    async def _index(self, request: web.Request) -> web.StreamResponse:
        if "token" not in request.query:
            return await self._static("index.html")(request)
        response = web.Response(status=302, headers={"Location": "/"})
        # Lax: a browser that is led here by a file (cli/page.py) would leave a Strict one out of the next request.
        response.set_cookie(self._cookie, self.token, httponly=True, samesite="Lax", path="/")
        return response

    def _static(self, name: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        body = files("asyncrl.page").joinpath("static", name).read_bytes()

        async def answer(request: web.Request) -> web.StreamResponse:
            return web.Response(body=body, content_type=_TYPES[Path(name).suffix], charset="utf-8")

        return answer

    async def _list(self, request: web.Request) -> web.StreamResponse:
        def find() -> web.Response:
            return _json({"folder": str(self.runs.folder), "alone": self.runs.alone, "runs": self.runs.lines()})

        return await asyncio.to_thread(find)

    def _of_run(self, answer: Answer) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        def find(request: web.Request) -> web.Response:
            return _json(answer(self._run(request), request))

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                return await asyncio.to_thread(find, request)
            except ValueError as error:
                raise web.HTTPBadRequest(text=str(error)) from error

        return handle

    def _run(self, request: web.Request) -> RunFolder:
        run = self.runs.find(request.match_info["name"])
        if run is None:
            raise web.HTTPNotFound(text="there is no run of this name")
        return run

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if self._streams >= _MOST_STREAMS:
            raise web.HTTPTooManyRequests(text=f"{_MOST_STREAMS} pages are open: close some")
        self._streams += 1
        response = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream"})
        try:
            run = await asyncio.to_thread(self._run, request)
            await response.prepare(request)
            known: dict[str, int] = {}
            while not self._ending.is_set():
                now = await asyncio.to_thread(run.stamps)
                changed = sorted(name for name in known.keys() | now.keys() if known.get(name) != now.get(name))
                known = now
                await response.write(f"data: {json.dumps(changed)}\n\n".encode() if changed else b": on\n\n")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), _LOOK_S)
        except ConnectionError:
            pass
        finally:
            self._streams -= 1
        return response


def _timeline(run: RunFolder, request: web.Request) -> Any:
    query = request.query
    end_s = _number(query.get("end"))
    return run.timeline(_number(query.get("start")) or 0.0, end_s, int(query.get("bins") or 600))


def _rollouts(run: RunFolder, request: web.Request) -> Any:
    query = request.query
    step, before = query.get("step"), query.get("before")
    return run.rollouts(
        step=int(step) if step else None,
        least=_number(query.get("least")),
        most=_number(query.get("most")),
        longer=int(query.get("longer") or 0),
        text=query.get("text", "")[:_MOST_TEXT],
        before=int(before) if before else None,
        count=max(1, min(int(query.get("count") or 50), MOST_LISTED)),
    )


def _rollout(run: RunFolder, request: web.Request) -> Any:
    found = run.rollout(int(request.match_info["number"]))
    if found is None:
        raise web.HTTPNotFound(text="there is no rollout of this number, or its line is damaged")
    return found


def _number(text: str | None) -> float | None:
    """Read a finite number.

    Raises:
        ValueError: it is none.
    """
    if not text:
        return None
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not finite")
    return number


def _json(value: Any) -> web.Response:
    try:
        body = msgspec.json.encode(value)
    except UnicodeEncodeError:  # half of a character, which a damaged file may have
        body = json.dumps(to_json(value)).encode()
    return web.Response(body=body, content_type="application/json")


def _host_of(request: web.Request) -> str:
    host = request.headers.get("Host", "")
    return (host.partition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]).lower()


def _bearer(request: web.Request) -> str:
    return request.headers.get("Authorization", "").removeprefix("Bearer ")
