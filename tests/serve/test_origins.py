"""Web pages that call: what a browser asks first, and what it lets a page read (Fetch standard, CORS protocol)."""

from __future__ import annotations

import json

import pytest

from asyncrl.errors import ConfigError
from asyncrl.serve.keys import KeyRing
from asyncrl.serve.limits import Limits
from asyncrl.serve.routes import ROUTES
from asyncrl.serve.server import Binding

LAB, EVIL = "https://lab.example", "https://evil.example"
GENERATE = {"prompt_token_ids": [5, 6]}
USER_KEY, OPERATOR_KEY = "user-key-0123456789", "operator-key-0123456789"
# What OpenAI's and Anthropic's clients for browsers send, lower-cased and sorted, as a browser asks for it.
ASKED = (
    "anthropic-beta,anthropic-dangerous-direct-browser-access,anthropic-version,authorization,content-type,"
    "openai-organization,openai-project,user-agent,x-api-key,x-request-id,x-session-id,x-stainless-arch,"
    "x-stainless-helper,x-stainless-helper-method,x-stainless-lang,x-stainless-os,x-stainless-package-version,"
    "x-stainless-retry-count,x-stainless-runtime,x-stainless-runtime-version,x-stainless-timeout"
)


async def ask(served, method, path, *, origin=LAB, url=None, **more):
    """Status, headers and body; ``more`` goes to the client."""
    headers = {**more.pop("headers", {}), **({"Origin": origin} if origin else {})}
    async with served.client.request(method, (url or served.url) + path, headers=headers, **more) as answer:
        return answer.status, answer.headers, await answer.text()


def preflight(served, path, *, method="POST", **more):
    asks = {"Access-Control-Request-Method": method, "Access-Control-Request-Headers": ASKED}
    return ask(served, "OPTIONS", path, headers=asks, **more)


def may_be_read(headers, origin=LAB):
    """Whether a browser hands the answer to a page of ``origin``."""
    assert "Access-Control-Allow-Credentials" not in headers
    return headers.getall("Access-Control-Allow-Origin", []) == [origin] and headers.getall("Vary") == ["Origin"]


async def test_a_browser_may_ask_for_every_route_without_a_key(serve):
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
            assert set(ASKED.split(",")) <= set(headers["Access-Control-Allow-Headers"].lower().split(", "))
            assert int(headers["Access-Control-Max-Age"]) > 0
        status, headers, _ = await preflight(served, "/generate", origin="http://localhost:3000")
        assert status == 204
        assert may_be_read(headers, "http://localhost:3000")
    assert served.engines[0].requests == []


async def test_pages_read_answers_streams_and_refusals(serve):
    limits = Limits(body_size_bytes=1000)
    async with serve(users=KeyRing({"alice": USER_KEY}), origins=(LAB,), limits=limits) as served:
        key = {"x-api-key": USER_KEY}
        wanted = [
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
        for status, method, path, more in wanted:
            got, headers, body = await ask(served, method, path, **more)
            assert got == status, body
            assert may_be_read(headers), (method, path, status)
            assert headers["Access-Control-Expose-Headers"] == "X-Request-ID, Retry-After"


async def test_a_page_reads_the_end_of_a_stream_that_breaks(serve):
    async with serve(lambda prompt: [7] * 50, token_s=0.01, origins=(LAB,)) as served:
        body, origin = {**GENERATE, "stream": True}, {"Origin": LAB}
        async with served.client.post(f"{served.url}/generate", json=body, headers=origin) as answer:
            assert may_be_read(answer.headers)
            await answer.content.readline()
            await served.engines[0].close()
            assert b'"error"' in await answer.content.read()


async def test_other_pages_are_refused_and_told_nothing(serve):
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
                await ask(served, "POST", "/generate", origin=origin, json=GENERATE),
            ):
                assert got == 403
                assert "may not call" in json.loads(body)["error"]["message"]
                assert not [name for name in headers if name.lower().startswith("access-control-")]
        got, headers, _ = await ask(served, "POST", "/generate", origin=None, json=GENERATE)
        assert got == 200
        assert "Access-Control-Allow-Origin" not in headers
        assert headers["Vary"] == "Origin", "caches keep what a page may not read apart from what it may"
        assert (await preflight(served, "/generate", origin=None))[0] == 405
        got, headers, _ = await preflight(served, "/nothing")
        assert got == 404
        assert may_be_read(headers)
        got, headers, _ = await preflight(served, "/generate", data=b"x" * 10)
        assert got == 405, "a browser's preflight has no body"


async def told_no_page(served, url):
    """Refused as everywhere, and with no header more."""
    got, headers, _ = await preflight(served, "/generate", url=url)
    assert got == 403
    assert "Vary" not in headers
    got, headers, _ = await preflight(served, "/generate", url=url, origin=None)
    assert (got, headers["Allow"]) == (405, "POST")
    assert not [name for name in headers if name == "Vary" or name.lower().startswith("access-control-")]


async def test_where_no_page_may_call_nothing_is_different(serve):
    async with serve() as served:
        await told_no_page(served, served.url)
        assert not any(runner.app.on_response_prepare for runner in served.server._runners), "no step more per answer"
    async with serve(origins=(LAB,), operators=KeyRing({"olga": OPERATOR_KEY}), control_port=0) as served:
        await told_no_page(served, served.server.control_url)
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
def test_an_origin_that_no_browser_sends_is_told(origin):
    with pytest.raises(ConfigError, match="is no origin"):
        Binding(origins=(origin,))


@pytest.mark.parametrize("origin", [LAB, "http://localhost:3000", "http://[::1]:8080", "chrome-extension://abcdef"])
def test_origins_as_browsers_send_them(origin):
    assert Binding(origins=(origin,)).origins == (origin,)
