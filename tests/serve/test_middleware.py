"""Checks of requests before any work, errors as clients receive them, and lingering close."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import time

import pytest

from asyncrl.errors import ContinuationError
from asyncrl.serve import middleware
from asyncrl.serve.limits import BodyWatch, Limits, json_problem
from asyncrl.serve.middleware import KeyRing

GENERATE = {"prompt_token_ids": [5, 6]}


async def raw(served, data, *, timeout_s=5.0):
    """Send ``data`` as it is; return the answer, up to the end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
    try:
        writer.write(data)
        return await asyncio.wait_for(reader.read(65_536), timeout_s)
    finally:
        writer.close()


def post(body, *headers, path="/generate"):
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


async def test_a_large_body_is_refused_by_its_header(serve):
    async with serve(limits=Limits(body_size_bytes=1000)) as served:
        huge = post(b"", "Content-Length: 629145600").replace(b"Content-Length: 0\r\n", b"")
        begin = time.process_time()  # of client and server
        assert b" 413 " in await raw(served, huge)
        assert time.process_time() - begin < 0.5
        expecting = huge.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n")
        assert b" 413 " in await raw(served, expecting)
        chunked = post(b"", "Transfer-Encoding: chunked").replace(b"Content-Length: 0\r\n", b"")
        assert b" 413 " in await raw(served, chunked + b"400\r\n" + b"[" * 1024 + b"\r\n" + b"400\r\n")
        await served.post("/generate", {"prompt_token_ids": [5] * 2000}, status=413)
        await served.post("/generate", GENERATE)


async def test_a_large_body_needs_content_length(serve):
    body = json.dumps(GENERATE).encode() + b" " * 2000
    async with serve(limits=Limits(chunked_body_size_bytes=1000)) as served:
        chunked = post(b"", "Transfer-Encoding: chunked", "Connection: close").replace(b"Content-Length: 0\r\n", b"")
        whole = chunked + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        for sent in (whole, whole[:-5], whole[: len(chunked) + 1500]):
            answer = await raw(served, sent)
            assert b" 411 " in answer
            assert b"more than 1000 bytes needs Content-Length" in answer
        assert b" 200 " in await raw(served, post(body, "Connection: close"))


async def test_an_endless_body_is_not_read(serve):
    async with serve(limits=Limits(body_size_bytes=1000)) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
        writer.write(post(b"", "Transfer-Encoding: chunked").replace(b"Content-Length: 0\r\n", b""))
        answer = asyncio.create_task(reader.readline())
        sent = 0
        with contextlib.suppress(ConnectionError):
            while not answer.done():
                writer.write(b"10000\r\n" + b"[" * 65_536 + b"\r\n")
                sent += 1
                await writer.drain()
        assert b" 413 " in await answer
        assert sent < 500, "no more was taken than buffers hold"
        writer.close()
        await served.post("/generate", GENERATE)


def send_then_read(url, head, piece, pieces):
    """Return what a client reads that writes everything first."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(head)
        for _ in range(pieces):
            connection.sendall(piece)
        answer = b""
        while came := connection.recv(65_536):
            answer += came
        return answer


@pytest.mark.parametrize("framing", ["Transfer-Encoding: chunked", "Content-Length: 4000000"])
async def test_a_client_that_writes_before_it_reads_gets_the_error(serve, framing):
    async with serve(limits=Limits(body_size_bytes=1000)) as served:
        head = post(b"", framing).replace(b"Content-Length: 0\r\n", b"")
        piece = b"3e8\r\n" + b" " * 1000 + b"\r\n"
        answer = await asyncio.to_thread(send_then_read, served.url, head, piece, 4000)
        assert b" 413 " in answer
        assert b"Connection: close" in answer
        assert answer.endswith(b"}}")


@pytest.mark.parametrize("framing", ["Transfer-Encoding: chunked", "Content-Length: 4000000"])
@pytest.mark.parametrize(
    ("status", "line", "header"),
    [
        (401, b"POST /generate", "Authorization: Bearer wrong"),
        (404, b"POST /nowhere", "X: y"),
        (405, b"PUT /generate", "X: y"),
        (415, b"POST /generate", "Content-Encoding: gzip"),
    ],
)
async def test_an_error_before_the_body_closes_the_connection(serve, framing, status, line, header):
    """Each client sends 4 MB; the limit is 1,000 bytes."""
    given = {"users": KeyRing({"alice": "user-key-0123456789"})} if status == 401 else {}
    async with serve(limits=Limits(body_size_bytes=1000), **given) as served:
        head = post(b"", framing, header).replace(b"Content-Length: 0\r\n", b"").replace(b"POST /generate", line)
        piece = b"3e8\r\n" + b" " * 1000 + b"\r\n"
        answer = await asyncio.to_thread(send_then_read, served.url, head, piece, 4000)
        if status == 415 and framing.startswith("Content-Length"):
            status = 413  # the length is checked first
        assert b" %d " % status in answer.partition(b"\r\n")[0]
        assert b"Connection: close" in answer
        assert answer.endswith(b"}}")


def chunked(body):
    head = post(b"", "Transfer-Encoding: chunked").replace(b"Content-Length: 0\r\n", b"")
    return head + b"%x\r\n%s\r\n" % (len(body), body)


async def wait_until_closed(writer):
    """Write until the server has closed the connection."""
    with contextlib.suppress(ConnectionError):
        while not writer.is_closing():
            writer.write(b"1\r\n[\r\n")
            await writer.drain()
            await asyncio.sleep(0.005)


async def test_a_client_that_never_reads_is_disconnected_after_some_megabytes(serve):
    async with serve(limits=Limits(body_size_bytes=1000)) as served:
        head, piece, pieces = chunked(b"[" * 2000), b"10000\r\n" + b"[" * 65_536 + b"\r\n", 9600
        begin = time.process_time()  # client and server: 600 MB, of which a fortieth is discarded
        with pytest.raises(ConnectionError):
            await asyncio.to_thread(send_then_read, served.url, head, piece, pieces)
        assert time.process_time() - begin < 0.5
        await served.post("/generate", GENERATE)


async def test_a_client_that_does_not_close_is_disconnected(serve, monkeypatch):
    monkeypatch.setattr(middleware, "_LINGER_S", 0.05)
    async with serve(limits=Limits(body_size_bytes=1000, connections=1)) as served, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
        writer.write(chunked(b"[" * 2000))
        assert b" 413 " in await reader.read(), "the answer ends, though the connection is open"
        while b" 503 " in (answer := await raw(served, post(json.dumps(GENERATE).encode()))):
            pass
        assert b" 200 " in answer
        writer.close()


async def test_few_connections_linger(serve, monkeypatch):
    monkeypatch.setattr(middleware, "_LINGER_S", 60.0)
    async with serve(limits=Limits(body_size_bytes=1000, connections=16)) as served, asyncio.timeout(20):
        port = int(served.url.rpartition(":")[2])
        (first_reader, first), (second_reader, second) = [
            await asyncio.open_connection("127.0.0.1", port) for _ in range(2)
        ]
        first.write(chunked(b"[" * 2000))
        assert b" 413 " in await first_reader.read()
        second.write(chunked(b"[" * 2000))
        assert b" 413 " in await second_reader.readline()
        await wait_until_closed(second)
        first.write(b"1\r\n[\r\n")
        await first.drain()
        assert not first.is_closing(), "one connection in sixteen may linger"
        first.close()
        second.close()


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"a":' * 100_000, b'{"stop":' + b"[" * 50 + b"]" * 50 + b"}", b"[[],[]" * 60_000]
)
async def test_deep_json_is_refused_quickly(serve, body):
    async with serve() as served:
        begin = time.process_time()  # of client and server
        assert b" 400 " in await raw(served, post(body))
        assert time.process_time() - begin < 0.5
        await served.post("/generate", GENERATE)


def test_brackets_in_strings_do_not_count():
    limits = Limits(json_depth=2, json_containers=5)
    assert json_problem(json.dumps({"a": "[[[[" * 9, "b": ['"[{[', "\\"]}).encode(), limits) == ""
    assert "nested deeper than 2" in json_problem(b"[[[]]]", limits)
    assert "6 arrays" in json_problem(b"[[],[],[],[],[]]", limits)
    assert json_problem(b"[" + b"]" * 50, limits) == ""


def test_strings_are_counted_without_their_escapes():
    limits = Limits(json_strings=3)
    assert "4 strings" in json_problem(b'["a","b","c","d"]', limits)
    assert json_problem(json.dumps(["a" + '"' * 50, "\\", "c"]).encode(), limits) == ""


def test_brackets_are_counted_as_a_parser_counts_them():
    """Against json itself, on texts made of brackets, quotes and backslashes, some behind a long beginning."""

    def made(dice, depth):
        kind = dice.randrange(6)
        if depth == 0 or kind < 2:
            return "".join(dice.choices('[]{}"\\é\n', k=dice.randrange(5)))
        if kind < 4:
            return [made(dice, depth - 1) for _ in range(dice.randrange(4))]
        return {made(dice, 0): made(dice, depth - 1) for _ in range(dice.randrange(3))}

    def within(value):
        return list(value.values()) if isinstance(value, dict) else value

    def depth(value):
        return 0 if isinstance(value, str) else 1 + max(map(depth, within(value)), default=0)

    def count(value):
        return 0 if isinstance(value, str) else 1 + sum(map(count, within(value)))

    limits, dice = Limits(json_depth=3, json_containers=9), random.Random(5)
    for number in range(4000):
        value = made(dice, 5)
        if number % 10 == 0:
            value = ["x" * 5000, value]
        body = json.dumps(value, ensure_ascii=dice.random() < 0.5).encode()
        assert bool(json_problem(body, limits)) == (depth(value) > 3 or count(value) > 9), value


def test_an_incomplete_body_is_refused_only_if_the_complete_one_would_be():
    limits, dice, early = Limits(json_depth=4, json_containers=8, json_strings=8), random.Random(6), 0
    for _ in range(3000):
        body = bytes(dice.choices(b'[]{}",:\\ a1', weights=[4, 3, 2, 2, 4, 2, 1, 1, 1, 2, 2], k=dice.randrange(1, 60)))
        watch, problem, at = BodyWatch(limits), "", 0
        while at < len(body) and not problem:
            size = dice.randrange(1, 20)
            problem = watch.problem(body[at : at + size])
            at += size
        assert not problem or json_problem(body, limits), body
        early += bool(problem) and at < len(body)
        assert body.startswith(watch.body())
    assert early > 100


async def test_an_invalid_body_is_refused_while_it_arrives(serve):
    async with serve(limits=Limits(json_strings=10)) as served:
        port = int(served.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        begun, rest = b'{"stop": [' + b'"x",' * 20, b'"x"]}'
        length = len(begun) + len(rest)
        writer.write(b"%sContent-Length: %d\r\n\r\n%s" % (head, length, begun))
        answer = await asyncio.wait_for(reader.readuntil(b"}}"), 10)
        assert answer.startswith(b"HTTP/1.1 400")
        assert b"strings; at most 10 are accepted" in answer
        writer.write(rest + b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")  # the rest is discarded
        assert (await asyncio.wait_for(reader.readline(), 10)).startswith(b"HTTP/1.1 200")
        writer.close()


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Content-Type": "text/plain"}, b"{}", 415),
        ({"Content-Encoding": "gzip"}, b"{}", 415),
        ({}, b"", 400),
        ({}, b"{", 400),
        ({}, b"\xff\xfe", 400),
        ({}, b'{"prompt_token_ids": [1.5]}', 400),
        ({}, b'{"prompt_token_ids": [-1]}', 400),
        ({}, b'{"prompt_token_ids": [1e400]}', 400),
        ({}, b'{"prompt_token_ids": ' + b"9" * 10_000 + b"}", 400),
        ({}, b'{"prompt_token_ids": [5], "stop": ["\\ud800"]}', 400),
        ({"X-Request-ID": "a b"}, json.dumps(GENERATE).encode(), 400),
        ({"X-Session-ID": "a/b"}, json.dumps(GENERATE).encode(), 400),
    ],
)
async def test_invalid_requests(serve, headers, body, status):
    async with serve() as served:
        given = {"Content-Type": "application/json", **headers}
        async with served.client.post(f"{served.url}/generate", data=body, headers=given) as answer:
            content = await answer.json()
            assert answer.status == status, content
            assert content["error"]["id"] == answer.headers["X-Request-ID"] or "X-Request-ID" in headers


async def test_other_methods_and_addresses(serve):
    async with serve() as served:
        async with served.client.get(f"{served.url}/generate") as answer:
            assert (answer.status, answer.headers["Allow"]) == (405, "POST")
        async with served.client.options(f"{served.url}/sessions/x") as answer:
            assert (answer.status, answer.headers["Allow"]) == (405, "DELETE, GET")
        await served.get("/nothing", status=404)
        assert (await served.get("/v1/models/a%0Ab", status=404))["error"]["message"]  # a line break, too


async def test_a_full_server_answers_with_retry_after(serve):
    limits = Limits(concurrent_requests_per_key=1, concurrent_requests=1)
    async with serve(lambda prompt: [7] * 1000, token_s=0.01, limits=limits) as served:
        first = asyncio.create_task(served.post("/generate", GENERATE))
        while not served.engines[0].requests:
            await asyncio.sleep(0)
        async with served.client.post(f"{served.url}/generate", json=GENERATE) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await asyncio.wait_for(served.state.concurrency.wait_idle(), 5)  # a request whose client leaves is aborted
        assert served.state.pool.statistics().left == 1
        assert not served.engines[0].statistics().running


async def test_the_choices_of_a_request_have_their_places_before_any_is_sent(serve):
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "say it"}]}
    async with serve(limits=Limits(concurrent_requests_per_key=3)) as served:
        refused = await served.post("/v1/chat/completions", {**chat, "n": 4}, status=429)
        assert "4 requests of this key would run (each choice counts); at most 3 may" in refused["error"]["message"]
        assert served.engines[0].requests == []
        await served.post("/v1/chat/completions", {**chat, "n": 3})
        assert served.state.concurrency.running == 0


async def test_a_request_has_its_place_before_its_body_is_read(serve):
    async with serve(limits=Limits(concurrent_requests_per_key=1)) as served:
        _, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
        writer.write(post(b"{").replace(b"Content-Length: 1", b"Content-Length: 9"))
        while not served.state.concurrency.running:
            await asyncio.sleep(0)
        await served.post("/generate", GENERATE, status=429)
        writer.close()
        await asyncio.wait_for(served.state.concurrency.wait_idle(), 5)
        for body, status in (({}, 400), ({"prompt_token_ids": []}, 400), (GENERATE, 200)):
            await served.post("/generate", body, status=status)
        assert served.state.concurrency.running == 0


async def test_a_failed_engine_is_reported_without_its_traceback(serve, caplog):
    def broken(prompt):
        raise RuntimeError("secret of the engine")

    async with serve(broken) as served:
        answer = await served.post("/generate", GENERATE, status=503)
        assert answer["error"]["message"] == "the replica that served this request failed"
        assert answer["error"]["id"] in caplog.text
        assert "RuntimeError: secret of the engine" in caplog.text, "its traceback is in the log"


async def test_an_answer_that_no_other_replica_can_go_on_with_is_no_fault_of_the_client(serve):
    def unable(prompt):
        raise ContinuationError("it was begun with bad_words by a replica that is gone")

    async with (
        serve(unable) as served,
        served.client.post(f"{served.url}/generate", json=GENERATE) as answer,
    ):
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")


@pytest.mark.parametrize("path", ["/generate", "/v1/messages"])
async def test_a_stream_that_takes_too_long_ends_with_an_error_event(serve, path):
    bodies = {
        "/generate": {**GENERATE, "max_new_tokens": 5000},
        "/v1/messages": {"model": "tiny", "max_tokens": 5000, "messages": [{"role": "user", "content": "say"}]},
    }
    async with serve(lambda prompt: [7] * 5000, token_s=0.001, limits=Limits(request_timeout_s=0.2)) as served:
        lines = await served.events(path, {**bodies[path], "stream": True})
        assert len(lines) > 2
        (event, last) = lines[-2:]
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "timeout_error"
        assert (event == "event: error") is (path == "/v1/messages")


async def test_each_task_has_its_own_deadline_behind_one_timer():
    deadlines, begun_s = middleware._Deadlines(0.05), time.monotonic()
    ended_s: dict[str, float] = {}

    async def takes(name: str, work_s: float) -> None:
        deadline = deadlines.begin()
        try:
            await asyncio.sleep(work_s)
        except asyncio.CancelledError:
            assert deadline.passed
            ended_s[name] = time.monotonic() - begun_s
        finally:
            deadlines.end(deadline)
        await asyncio.sleep(0)  # the task goes on, as any that was not cancelled

    first = [asyncio.create_task(takes("first", 5)), asyncio.create_task(takes("in time", 0.01))]
    await asyncio.sleep(0.02)
    await asyncio.gather(*first, takes("second", 5))
    await takes("in time", 0)
    await takes("third", 5)
    assert list(ended_s) == ["first", "second", "third"]
    assert 0.05 <= ended_s["first"] < ended_s["second"]
    assert ended_s["second"] >= 0.07


async def test_of_two_requests_with_one_id_the_second_is_refused_and_the_first_can_be_aborted(serve):
    async with serve(lambda prompt: [7] * 5000, token_s=0.001) as served:
        port = int(served.url.rpartition(":")[2])
        body = json.dumps({**GENERATE, "max_new_tokens": 5000}).encode()
        head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nX-Request-ID: mine\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"%sContent-Length: %d\r\n\r\n" % (head, len(body)))  # the body comes later
        while "mine" not in served.state.choices_by_request:
            await asyncio.sleep(0)
        refused = await served.post("/generate", GENERATE, headers={"X-Request-ID": "mine"}, status=409)
        assert "request mine is running" in refused["error"]["message"]
        writer.write(body)
        while not served.engines[0].statistics().running:
            await asyncio.sleep(0)
        assert await served.control("POST", "/abort", {"request_id": "mine"}) == {"aborted": 1}
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        assert served.state.choices_by_request == {}


async def test_a_client_that_takes_the_next_id_before_it_is_made_disturbs_no_other(serve):
    async with serve(lambda prompt: [7] * 200, token_s=0.005) as served:
        made = (await served.post("/generate", {**GENERATE, "max_new_tokens": 1}))["request_id"]
        guesses = [f"{made[:8]}{int(made[8:], 16) + ahead:x}" for ahead in range(5, 9)]  # these requests count, too
        async with asyncio.TaskGroup() as taking:
            for guess in guesses:
                taking.create_task(served.post("/generate", GENERATE, headers={"X-Request-ID": guess}))
            while served.state.choices_by_request.keys() != {*guesses}:
                await asyncio.sleep(0)
            others = [taking.create_task(served.post("/generate", GENERATE)) for _ in range(4)]
        assert not {each.result()["request_id"] for each in others} & {*guesses}


async def test_a_broken_stream_ends_with_an_error_event(serve):
    async with serve(lambda prompt: [7] * 50, token_s=0.01) as served:
        async with served.client.post(f"{served.url}/generate", json={**GENERATE, "stream": True}) as answer:
            await answer.content.readline()
            await served.engines[0].close()
            rest = await answer.content.read()
        assert b'"error"' in rest
        assert b"Traceback" not in rest


async def test_a_body_has_a_timeout(serve):
    async with serve(limits=Limits(body_timeout_s=0.05, idle_timeout_s=0.2)) as served:
        assert b" 408 " in await raw(served, post(b"{", "X: y").replace(b"Content-Length: 1", b"Content-Length: 9"))
        assert await raw(served, b"POST /generate HTTP/1.1\r\nHost: lo") == b""  # closed without an answer
        await served.post("/generate", GENERATE)


async def test_connections_are_bounded(serve):
    async with serve(limits=Limits(connections=3)) as served:
        port = int(served.url.rpartition(":")[2])
        open_ones = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        assert b" 503 " in await raw(served, post(b"{}"))
        for _, writer in open_ones:
            writer.close()
        for _, writer in open_ones:
            await writer.wait_closed()
        while served.client:  # the server notices a moment later
            answer = await raw(served, post(json.dumps(GENERATE).encode(), "Connection: close"))
            if b" 503 " not in answer:
                break
        assert b" 200 " in answer


@pytest.mark.parametrize(
    "data",
    [
        b"\x00" * 100 + b"\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 500 + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 20_000 + b"\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\nzz\r\n",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
async def test_invalid_http_is_answered_or_dropped(serve, data):
    async with serve(limits=Limits(idle_timeout_s=0.2)) as served:
        answer = await raw(served, data)
        assert answer == b"" or answer.split()[1].startswith(b"4"), answer
        await served.post("/generate", GENERATE)
