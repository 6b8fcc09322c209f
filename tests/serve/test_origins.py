"""Calls of web pages: preflights, and what a browser lets a page read (Fetch standard, CORS protocol)."""

from __future__ import annotations

import json

import pytest

from asyncrl.errors import ConfigError
from asyncrl.serve.limits import Limits
from asyncrl.serve.middleware import KeyRing
from asyncrl.serve.routes import ROUTES
from asyncrl.serve.server import Binding

LAB, EVIL = "https://lab.example", "https://evil.example"
GENERATE = {"prompt_token_ids": [5, 6]}
USER_KEY, OPERATOR_KEY = "user-key-0123456789", "operator-key-0123456789"
# The headers of OpenAI's and Anthropic's clients for browsers, lower-cased and sorted, as a preflight lists them.
CLIENT_HEADERS = (
    "anthropic-beta,anthropic-dangerous-direct-browser-access,anthropic-version,authorization,content-type,"
    "openai-organization,openai-project,user-agent,x-api-key,x-request-id,x-session-id,x-stainless-arch,"
    "x-stainless-helper,x-stainless-helper-method,x-stainless-lang,x-stainless-os,x-stainless-package-version,"
    "x-stainless-retry-count,x-stainless-runtime,x-stainless-runtime-version,x-stainless-timeout"
)


async def send(served, method, path, *, origin=LAB, url=None, **more):
    """Status, headers and body; ``more`` goes to the client."""
    headers = {**more.pop("headers", {}), **({"Origin": origin} if origin else {})}
    async with served.client.request(method, (url or served.url) + path, headers=headers, **more) as answer:
        return answer.status, answer.headers, await answer.text()


def preflight(served, path, *, method="POST", **more):
    headers = {"Access-Control-Request-Method": method, "Access-Control-Request-Headers": CLIENT_HEADERS}
    return send(served, "OPTIONS", path, headers=headers, **more)


def may_be_read(headers, origin=LAB):
    """Return whether a browser lets a page of ``origin`` read the answer."""
    assert "Access-Control-Allow-Credentials" not in headers
    return headers.getall("Access-Control-Allow-Origin", []) == [origin] and headers.getall("Vary") == ["Origin"]


async def test_a_preflight_needs_no_key_on_any_route(serve):
    users = KeyRing({"alice": USER_KEY})
    async with serve(users=users, origins=(LAB, "http://localhost:3000")) as served:
        for route in ROUTES:
            path = route.path.replace("{session}", "s").replace("{model}", "tiny")
            status, headers, body = await preflight(served, path, method=route.method)
            if route.plane == "control":
                assert status == 404, path
                continue
            assert (status, body) == (204, ""), path
            assert may_be_read(headers), path
            assert route.method in headers["Access-Control-Allow-Methods"].split(", ")
            assert set(CLIENT_HEADERS.split(",")) <= set(headers["Access-Control-Allow-Headers"].lower().split(", "))
            assert int(headers["Access-Control-Max-Age"]) > 0
        status, headers, _ = await preflight(served, "/generate", origin="http://localhost:3000")
        assert status == 204
        assert may_be_read(headers, "http://localhost:3000")
    assert served.engines[0].requests == []


async def test_pages_read_answers_streams_and_errors(serve):
    limits = Limits(body_size_bytes=1000)
    async with serve(users=KeyRing({"alice": USER_KEY}), origins=(LAB,), limits=limits) as served:
        key = {"x-api-key": USER_KEY}
        cases = [
            (200, "POST", "/generate", {"json": GENERATE, "headers": key}),
            (200, "POST", "/generate", {"json": {**GENERATE, "stream": True}, "headers": key}),
            (200, "GET", "/metrics", {"headers": key}),
            (401, "POST", "/generate", {"json": GENERATE}),
            (404, "GET", "/nothing", {}),
            (404, "GET", "/sessions/none", {"headers": key}),
            (405, "PUT", "/generate", {"json": GENERATE, "headers": key}),
            (405, "OPTIONS", "/generate", {}),  # no preflight
            (413, "POST", "/generate", {"json": "x" * 2000, "headers": key}),
            (415, "POST", "/generate", {"data": b"{}", "headers": {**key, "Content-Type": "text/plain"}}),
            (417, "POST", "/generate", {"data": b"{}", "headers": {**key, "Expect": "the impossible"}}),
        ]
        for status, method, path, more in cases:
            got, headers, body = await send(served, method, path, **more)
            assert got == status, body
            assert may_be_read(headers), (method, path, status)
            assert headers["Access-Control-Expose-Headers"] == "X-Request-ID, Retry-After"


async def test_a_page_reads_the_error_of_a_broken_stream(serve):
    async with serve(lambda prompt: [7] * 50, token_s=0.01, origins=(LAB,)) as served:
        body, origin = {**GENERATE, "stream": True}, {"Origin": LAB}
        async with served.client.post(f"{served.url}/generate", json=body, headers=origin) as answer:
            assert may_be_read(answer.headers)
            await answer.content.readline()
            await served.engines[0].close()
            assert b'"error"' in await answer.content.read()


async def test_pages_of_other_origins_are_refused_without_cors_headers(serve):
    async with serve(origins=(LAB,)) as served:
        for origin in (
            EVIL,
            "null",
            "*",
            "https://lab.example:443",
            "https://LAB.example",
            LAB + "/",
            "http://lab.example",
        ):
            for got, headers, body in (
                await preflight(served, "/generate", origin=origin),
                await preflight(served, "/nothing", origin=origin),
                await send(served, "POST", "/generate", origin=origin, json=GENERATE),
            ):
                assert got == 403
                assert "may not call" in json.loads(body)["error"]["message"]
                assert not [name for name in headers if name.lower().startswith("access-control-")]
        got, headers, _ = await send(served, "POST", "/generate", origin=None, json=GENERATE)
        assert got == 200
        assert "Access-Control-Allow-Origin" not in headers
        assert headers["Vary"] == "Origin", "caches keep answers for allowed pages apart from others"
        assert (await preflight(served, "/generate", origin=None))[0] == 405
        got, headers, _ = await preflight(served, "/nothing")
        assert got == 404
        assert may_be_read(headers)
        got, headers, _ = await preflight(served, "/generate", data=b"x" * 10)
        assert got == 405, "a browser's preflight has no body"


async def check_no_cors(served, url):
    """Check that a preflight is refused, without CORS headers."""
    got, headers, _ = await preflight(served, "/generate", url=url)
    assert got == 403
    assert "Vary" not in headers
    got, headers, _ = await preflight(served, "/generate", url=url, origin=None)
    assert (got, headers["Allow"]) == (405, "POST")
    assert not [name for name in headers if name == "Vary" or name.lower().startswith("access-control-")]


async def test_without_origins_there_are_no_cors_headers(serve):
    async with serve() as served:
        await check_no_cors(served, served.url)
        assert not any(runner.app.on_response_prepare for runner in served.server._runners), (
            "no further step per answer"
        )
    async with serve(origins=(LAB,), operators=KeyRing({"olga": OPERATOR_KEY}), control_port=0) as served:
        await check_no_cors(served, served.server.control_url)
        assert [len(runner.app.on_response_prepare) for runner in served.server._runners] == [0, 0, 1]


@pytest.mark.parametrize(
    "origin",
    [
        "*",
        "null",
        "",
        "lab.example",
        LAB + "/",
        LAB + "/page",
        "https://*.example",
        "https://Lab.example",
        f"{LAB},{EVIL}",
    ],
)
def test_an_invalid_origin_is_refused(origin):
    with pytest.raises(ConfigError, match="is not an origin"):
        Binding(origins=(origin,))


@pytest.mark.parametrize("origin", [LAB, "http://localhost:3000", "http://[::1]:8080", "chrome-extension://abcdef"])
def test_valid_origins(origin):
    assert Binding(origins=(origin,)).origins == (origin,)
