"""Many hostile clients, and a well-behaved one beside them."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time

import pytest

from asyncrl.serve.limits import Limits

GOOD = json.dumps({"prompt_token_ids": [5, 6]}).encode()
CHAIN = b"".join(rb"\nr%d ::= r%d" % (number, number + 1) for number in range(4000))
"""Rules of which each has to be looked at before the one before it."""


def request(body=GOOD, *, line="POST /generate HTTP/1.1", headers=()):
    head = [line, "Host: localhost", "Content-Type: application/json", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*head, "", ""]).encode("latin-1") + body


def damaged(dice: random.Random) -> bytes:
    """Return a good request with one to four damages, or random bytes."""
    if dice.random() < 0.1:
        return dice.randbytes(dice.randrange(1, 400))
    data = bytearray(
        request(line=dice.choice(["POST /generate HTTP/1.1", "GET /v1/models HTTP/1.1", "PUT * HTTP/1.0"]))
    )
    for _ in range(dice.randrange(1, 5)):
        at = dice.randrange(len(data))
        kind = dice.randrange(5)
        if kind == 0:
            data[at] = dice.randrange(256)
        elif kind == 1:
            del data[at : at + dice.randrange(1, 20)]
        elif kind == 2:
            data[at:at] = dice.choice([b"\r\n", b"\x00", b"\xff" * 9, b"Transfer-Encoding: chunked\r\n", b"{" * 40])
        elif kind == 3:
            data[at:at] = data[at : at + dice.randrange(1, 60)]
        else:
            data = data[: max(1, at)]
        data = data or bytearray(b"x")
    return bytes(data)


async def send(port, data):
    """Send ``data`` and end the stream; return the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        if writer.can_write_eof():
            writer.write_eof()
        return await asyncio.wait_for(reader.read(65_536), 20)
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize("streams", [300, pytest.param(50_000, marks=pytest.mark.slow)])
@pytest.mark.timeout(300)
async def test_damaged_requests_crash_nothing_and_leave_nothing_behind(serve, streams):
    dice = random.Random(7)
    async with serve(limits=Limits(body_timeout_s=0.2, idle_timeout_s=5.0)) as served:
        port = int(served.url.rpartition(":")[2])
        server = served.server._runners[-1].server
        for _ in range(streams // 50):
            for answer in await asyncio.gather(*(send(port, damaged(dice)) for _ in range(50))):
                assert answer == b"" or answer.startswith(b"HTTP/"), answer  # HTTP/0.9 is one that lost its version
                assert not answer[9:].startswith(b"5"), answer
        assert (await served.post("/generate", {"prompt_token_ids": [5, 6]}))["token_ids"] == [7, 8, 9]
        await asyncio.wait_for(served.state.concurrency.wait_idle(), 10)
        async with asyncio.timeout(10):
            while len(server.connections) > 1:  # the good client's stays
                await asyncio.sleep(0)
        assert served.state.choices_by_request == {}
        assert not served.engines[0].statistics().running


@pytest.mark.slow
async def test_two_thousand_slow_clients_take_no_place_of_a_well_behaved_one(serve):
    """benchmarks/abuse.py has what they cost it."""
    limits = Limits(concurrent_requests=1, concurrent_requests_per_key=1, idle_timeout_s=600.0)
    async with serve(limits=limits) as served:
        port = int(served.url.rpartition(":")[2])
        slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2000)]
        for _, writer in slow:
            writer.write(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
        trickling = True

        async def trickle():
            while trickling:
                for _, writer in slow[::20]:
                    writer.write(b"a")
                await asyncio.sleep(0.1)

        trickler = asyncio.create_task(trickle())
        for _ in range(400):
            assert (await served.post("/generate", {"prompt_token_ids": [5, 6]}))["token_ids"] == [7, 8, 9]
        trickling = False
        await trickler
        assert not any(reader.at_eof() for reader, _ in slow)
        for _, writer in slow:
            writer.close()


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt_token_ids": [5], "max_new_tokens": 1000000000}',
        b"[" * 1_000_000,
        b'{"prompt_token_ids": ' + b"[" * 1_000_000,
        b'{"prompt_token_ids": [5], "stop": [' + b'"x",' * 1_000_000 + b'"x"]}',
        b'{"input_ids": [5], "sampling_params": {"ebnf": "' + rb"\n" * 4_000_000 + b'"}}',
        b'{"input_ids": [5], "sampling_params": {"ebnf": "' + rb"\n" * 60_000 + b'"}}',
        b'{"input_ids": [5], "sampling_params": {"ebnf": "root ::= r0' + CHAIN + rb'\nr4000 ::= [a]"}}',
        b'{"input_ids": [5], "sampling_params": {"json_schema": "' + b"[" * 60_000 + b'"}}',
        b"[]" * 40 + b"]" * 8_000_000,
        b'{"prompt_token_ids": [5], "allowed_token_ids": [' + b"7," * 1_000_000 + b"7]}",
    ],
)
async def test_excessive_requests_cost_little(serve, body):
    async with serve() as served:
        headers = {"Content-Type": "application/json"}
        begin = time.process_time()
        async with served.client.post(f"{served.url}/generate", data=body, headers=headers) as answer:
            assert answer.status == 400
        assert time.process_time() - begin < 0.5
        assert served.engines[0].requests == []


async def test_a_body_of_600_megabytes_is_refused_by_its_header(serve):
    async with serve() as served:
        port = int(served.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        begin = time.process_time()
        writer.write(request(b"").replace(b"Content-Length: 0", b"Content-Length: 629145600"))
        answer = await asyncio.wait_for(reader.readline(), 10)
        assert b" 413 " in answer
        assert time.process_time() - begin < 0.2
        writer.close()


async def test_a_client_that_does_not_read_its_answer_is_disconnected(serve):
    async with serve(lambda prompt: [7] * 2000, limits=Limits(write_timeout_s=0.2)) as served, asyncio.timeout(20):
        loop, connected = asyncio.get_running_loop(), served.server._runners[-1].server._connections
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", int(served.url.rpartition(":")[2])))
            body = json.dumps({"prompt_token_ids": [5, 6], "max_new_tokens": 2000}).encode()
            await loop.sock_sendall(client, request(body))
            while not served.state.metrics.sampled_tokens:
                await asyncio.sleep(0.01)
            while connected:
                await asyncio.sleep(0.01)
