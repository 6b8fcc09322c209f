"""Hostile clients, and what they cost a well-behaved one.

    python benchmarks/abuse.py [--json] [--rounds 5] [--streams 50000] [--slow 2000]

The server runs in a process of its own with its default limits, over a pool of replicas that echo, with a tokenizer.

* refusals: the longest time from the last byte of a request beyond the limits to the first line of its refusal;
* the well-behaved client: one request after the other. Its 99th percentile while one hostile client sends ten such
  requests a second, or while 2,000 connections send their heads a byte at a time, over the same without them. Windows
  with and without them alternate, and each ratio is of neighbouring windows, because the machine does other things too.
  Hostile clients are processes of their own, so that the well-behaved client does not wait for their work. For the
  worst of them, an endless body, the figures have its processor time, and its cost to the well-behaved client of a bare
  aiohttp handler that reads no byte of such a body, answers 413 and closes the connection;
* streams: requests damaged in one to four places, and bytes that are no request, from a seed. After them the server
  answers, holds no connection and no request, and has not grown.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import platform
import random
import resource
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).parent))
from serve import BODY, Child, Figure, connect, prepared, running, shown

from asyncrl.serve.limits import Limits

GOOD = prepared(BODY)
MEBIBYTE = b" " * (1 << 20)  # which breaks no rule but that of size


def post(path: str, body: bytes, *, length: int | None = None) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    return f"{head}{len(body) if length is None else length}\r\n\r\n".encode() + body


CHAT = {"model": "echo", "messages": [{"role": "user", "content": "x"}]}
GREEDY = {
    "n = 10^9": post("/v1/chat/completions", json.dumps({**CHAT, "n": 10**9}).encode()),
    "n = 65": post("/v1/chat/completions", json.dumps({**CHAT, "n": 65}).encode()),
    "max_new_tokens = 10^9": post("/generate", b'{"prompt_token_ids": [5], "max_new_tokens": 1000000000}'),
    "a body of 600 MB, by its head": post("/generate", b"", length=600_000_000),
    "JSON of depth 10^6": post("/generate", b'{"prompt_token_ids": ' + b"[" * 1_000_000),
    "JSON of 10^6 arrays": post("/generate", b'{"prompt_token_ids": [' + b"[]," * 1_000_000),
    "10^6 stop strings": post("/generate", b'{"prompt_token_ids": [5], "stop": [' + b'"x",' * 1_000_000 + b'"x"]}'),
    "a grammar of 100 kB": post(
        "/generate", json.dumps({"prompt_token_ids": [5], "grammar": 'start: "' + "x" * 100_000 + '"'}).encode()
    ),
}


CHUNKED = "600 MB in chunks"
SLOW = "slow clients"


async def refusal_ms(port: int, data: bytes) -> float:
    """From the last byte to the first line of a 4xx."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        await writer.drain()
        begin = time.perf_counter()
        line = await asyncio.wait_for(reader.readline(), 30)
        taken = time.perf_counter() - begin
        assert line.startswith(b"HTTP/1.1 4"), line
        return 1e3 * taken
    finally:
        writer.close()


async def chunked_ms(port: int) -> float:
    """600 MB without a length: from the first byte past the limit to the refusal."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
    answer = asyncio.ensure_future(reader.readline())
    came: list[float] = []  # while the client is still held back
    answer.add_done_callback(lambda _: came.append(time.perf_counter()))
    begin = sent = 0.0
    try:
        while not answer.done() and sent < 600:
            if sent == Limits().chunked_body_size_bytes >> 20:
                begin = time.perf_counter()
            writer.write(b"100000\r\n" + MEBIBYTE + b"\r\n")
            sent += 1
            await writer.drain()
            await asyncio.sleep(0)
    except ConnectionError:
        pass  # disconnected, with the answer on its way
    with contextlib.suppress(ConnectionError):  # the answer is lost where what was being sent is not taken any more
        line = await asyncio.wait_for(answer, 30)
        assert line.split()[1] in (b"411", b"413"), line  # of the server, of the bare handler
    writer.close()
    return 1e3 * (came[0] - begin)


async def good_ms(port: int, requests: int) -> tuple[float, float]:
    """Median and 99th percentile of the good client's requests."""
    connection = await connect(port)
    times = []
    for _ in range(requests):
        begin = time.perf_counter()
        answer = await connection.ask(GOOD)
        times.append(1e3 * (time.perf_counter() - begin))
        assert answer.startswith(b"HTTP/1.1 200"), answer
    connection.close()
    times.sort()
    return statistics.median(times), times[int(0.99 * len(times))]


@asynccontextmanager
async def hostile(server: Child, attack: str, slow: int) -> AsyncIterator[None]:
    """One hostile client meanwhile, or ``slow`` slow ones, in a process of their own."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--attack", attack, "--port", str(server.port), "--slow", str(slow)),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        await process.stdout.readline()  # refused once, or all are connected
        yield
        assert process.returncode is None, "the attack ended"
    finally:
        process.kill()
        await process.wait()


async def attack_for_ever(name: str, port: int, slow: int) -> None:
    """What the process of the hostile clients does; says when it has begun."""
    if name == SLOW:
        await trickle(port, slow)
    begun = False
    while True:
        await (chunked_ms(port) if name == CHUNKED else refusal_ms(port, GREEDY[name]))
        if not begun:
            print("begun", flush=True)
            begun = True
        await asyncio.sleep(0.1)


async def trickle(port: int, count: int) -> None:
    """Connections that send the head of a request a byte at a time, each once a second."""
    opened = []
    for _ in range(count):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
        opened.append(writer)
    print("connected", flush=True)
    while True:
        for start in range(0, count, 4):
            for writer in opened[start : start + 4]:
                writer.write(b"a")
            await asyncio.sleep(4 / count)


async def refusals(server: Child, bare: Child, rounds: int) -> list[Figure]:
    found = {name: [await refusal_ms(server.port, data) for _ in range(4 * rounds)] for name, data in GREEDY.items()}
    found[CHUNKED] = [await chunked_ms(server.port) for _ in range(4 * rounds)]
    figures = []
    for name, times in found.items():
        worst, title = max(times), f"refused: {name}, slowest of {len(times)}"
        figures.append(Figure(title, worst, "ms", statistics.median(times), 0, "<= 50", worst <= 50))
    taken = {name: await taken_ms(at, 4 * rounds) for name, at in (("", server), (" of a bare handler", bare))}
    for name, (served, sent) in taken.items():
        figures.append(Figure(f"processor time of {CHUNKED}{name}, served", served, "ms", 0, 0, "", True))
        figures.append(Figure(f"processor time of {CHUNKED}{name}, sent", sent, "ms", 0, 0, "", True))
    return figures


async def taken_ms(server: Child, times: int) -> tuple[float, float]:
    """Processor time of a body without an end, in the server's process and in the client's."""
    served, sent = server.cpu_s(), time.process_time()
    for _ in range(times):
        await chunked_ms(server.port)
    return 1e3 * (server.cpu_s() - served) / times, 1e3 * (time.process_time() - sent) / times


async def beside(server: Child, bare: Child, rounds: int, slow: int, requests: int = 3000) -> list[Figure]:
    """The good client's p99 beside each attack over its p99 just before and just after."""
    attacks = {name: (server, name) for name in (*GREEDY, CHUNKED, SLOW)}
    attacks["bare"] = bare, CHUNKED
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in attacks}
    for each in (server, bare):
        await good_ms(each.port, requests)
    for _ in range(rounds):
        for name, (at, attack) in attacks.items():
            _, before = await good_ms(at.port, requests)
            async with hostile(at, attack, slow):
                _, during = await good_ms(at.port, requests)
            _, after = await good_ms(at.port, requests)
            found[name].append((during, 2 * during / (before + after)))
    figures = []
    for name, tails in found.items():
        tail, ratio = (statistics.median(column) for column in zip(*tails, strict=True))
        of = f"p99 beside {f'{slow} slow clients' if name == SLOW else f'10/s of {attacks[name][1]}'}"
        if name == "bare":
            figures.append(Figure(f"{of}, of a bare handler", tail, "ms", tail / ratio, ratio, "", True))
        else:
            figures.append(Figure(of, tail, "ms", tail / ratio, ratio, "<= 2 of alone", ratio <= 2))
    return figures


def damaged(dice: random.Random) -> bytes:
    """A good request, hurt in one to four places; or no request at all."""
    if dice.random() < 0.1:
        return dice.randbytes(dice.randrange(1, 400))
    data = bytearray(GOOD)
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


async def hang_up_after(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        if writer.can_write_eof():
            writer.write_eof()
        return await asyncio.wait_for(reader.read(65_536), 60)
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def streams(server: Child, count: int) -> list[Figure]:
    dice = random.Random(7)
    failures = 0

    async def some(number: int) -> None:
        nonlocal failures
        for _ in range(number):
            answer = await hang_up_after(server.port, damaged(dice))
            failures += not (answer == b"" or answer.startswith(b"HTTP/")) or answer[9:].startswith(b"5")

    await asyncio.gather(*(some(count // 320) for _ in range(32)))  # what a server takes on to go at all
    settled = server.rss_mib()
    await asyncio.gather(*(some(count // 32) for _ in range(32)))
    grown = server.rss_mib() - settled
    begin = time.perf_counter()
    connection = await connect(server.port)
    assert (await connection.ask(GOOD)).startswith(b"HTTP/1.1 200")
    after = 1e3 * (time.perf_counter() - begin)
    connection.close()
    for _ in range(100):  # closed connections are noticed within a moment
        held = server.connections()
        if held == 0:
            break
        await asyncio.sleep(0.05)
    name = f"{count} damaged streams"
    return [
        Figure(f"{name}: answers that are no HTTP, or 5xx", failures, "streams", 0, 0, "0", failures == 0),
        Figure(f"{name}: connections held afterwards", held, "", 0, 0, "0", held == 0),
        Figure(f"{name}: memory grown", grown, "MiB", settled, 0, "<= 8", grown <= 8),
        Figure(f"{name}: a good request right after", after, "ms", 0, 0, "<= 50", after <= 50),
    ]


async def measure(options: argparse.Namespace) -> list[Figure]:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(running("guarded"))
        bare = await stack.enter_async_context(running("closing"))
        figures = await refusals(server, bare, options.rounds)
        figures += await beside(server, bare, options.rounds, options.slow)
        if options.streams:
            figures += await streams(server, options.streams)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=50_000)
    parser.add_argument("--slow", type=int, default=2000)
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if options.attack is not None:
            runner.run(attack_for_ever(options.attack, options.port, options.slow))
        figures = runner.run(measure(options))
    if options.json:
        machine = {"cpu": platform.processor() or platform.machine(), "python": platform.python_version()}
        print(json.dumps({"machine": machine, "figures": [asdict(figure) for figure in figures]}))
        return
    print(shown(figures))


if __name__ == "__main__":
    main()
