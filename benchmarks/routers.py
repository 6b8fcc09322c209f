"""The pool compared with generic routers, in front of the same replicas, in the same run.

    python benchmarks/routers.py [--json] [--rounds 7] [--requests 1500] [--seconds 20] [--environment FOLDER]

Replicas are processes that serve OpenAI's /v1/completions over HTTP, and the n-th token of a context is n. In front of
them, each on its own port: the pool (``asyncrl.serve`` over engines that call the replicas), and ``smg`` and
``vllm-router`` from the package index, in an environment that this program makes for them (kept in ``--environment``),
because their Python halves bring packages that asyncrl does not need.

* throughput and 99th percentile: 32 connections that request 16 tokens at once. Rounds are short and alternate; the
  floor is one replica called directly.
* kill: streams of 200 tokens, one every 5 ms, from 24 clients, while a replica is killed every four seconds and comes
  back two seconds later. A stream that ends early, has a wrong token or is refused is an error at its client. Replicas
  count the tokens that they sample; those that no client received were sampled in vain.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
import platform
import random
import resource
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from aiohttp import web

sys.path.insert(0, str(Path(__file__).parent))
from serve import Connection, Figure, connect, scratch_text, shown

from asyncrl.errors import EngineError
from asyncrl.interfaces import (
    EngineHealth,
    GenerationChunk,
    GenerationRequest,
    KVCachePolicy,
    RolloutEngineStatistics,
)

PACKAGES = ("smg==1.13.0", "vllm-router==0.1.17")
PROMPT = "one two three four five six seven eight " * 16
NEW_TOKENS = 16
STREAM_TOKENS, TOKEN_S, KILL_EVERY_S, AWAY_S, CLIENTS = 200, 0.005, 4.0, 2.0, 24


# ------------------------------------------------------------------------------------------------------- the replicas


async def replica(port: int, counter: Path) -> None:
    """A worker: the n-th token of a context says n."""
    with counter.open("r+b") as file:
        made = mmap.mmap(file.fileno(), 8)
    served = {"object": "list", "data": [{"id": "echo", "object": "model", "owned_by": "vllm", "max_model_len": 4096}]}

    def count(tokens: int) -> None:
        struct.pack_into("q", made, 0, struct.unpack_from("q", made, 0)[0] + tokens)

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body["prompt"]
        begin, tokens = len(prompt.split()) if isinstance(prompt, str) else len(prompt), body["max_tokens"]
        if not body.get("stream"):
            count(tokens)
            text = "".join(f" {begin + number}" for number in range(tokens))
            choice = {"index": 0, "text": text, "finish_reason": "length", "logprobs": None}
            usage = {"prompt_tokens": begin, "completion_tokens": tokens, "total_tokens": begin + tokens}
            answer = {"id": "c", "object": "text_completion", "created": 1, "model": "echo"}
            return web.json_response({**answer, "choices": [choice], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in range(tokens):
            await asyncio.sleep(TOKEN_S)
            count(1)
            reason = "length" if number + 1 == tokens else None
            choice = {"index": 0, "text": f" {begin + number}", "finish_reason": reason, "logprobs": None}
            answer = {"id": "c", "object": "text_completion", "created": 1, "model": "echo", "choices": [choice]}
            await response.write(b"data: " + json.dumps(answer).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def well(request: web.Request) -> web.Response:
        return web.json_response(served if request.path == "/v1/models" else {"version": "0.33.0", "status": "ok"})

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    app.router.add_get("/{rest:.*}", well)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
    await asyncio.Event().wait()


class HttpReplica:
    """A rollout engine that asks such a worker. Its tokens are the numbers, modulo the vocabulary of bytes."""

    pulls_weights = False
    weight_version = 0

    def __init__(self, url: str) -> None:
        self._url = url
        self._session: aiohttp.ClientSession | None = None
        self._running = 0

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        if (error := (await self.health(5.0)).error) != "":
            raise EngineError(f"the replica at {self._url} does not answer: {error}")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        assert self._session is not None
        left = request.sampling.max_new_tokens - request.continued_tokens
        stream = left > NEW_TOKENS
        body = {"model": "echo", "prompt": request.prompt_token_ids, "max_tokens": left, "stream": stream}
        self._running += 1
        try:
            async with self._session.post(f"{self._url}/v1/completions", json=body) as answer:
                if not stream:
                    content = await answer.json()
                    yield self._chunk(content["choices"][0])
                    return
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        yield self._chunk(json.loads(line[6:])["choices"][0])
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EngineError(f"the replica at {self._url} is gone: {error}") from error
        finally:
            self._running -= 1

    @staticmethod
    def _chunk(choice: dict[str, Any]) -> GenerationChunk:
        """Any: JSON."""
        ids = tuple(map(int, choice["text"].split()))
        zeros = (0,) * len(ids)
        return GenerationChunk(
            token_ids=ids, log_probs=(-0.5,) * len(ids), weight_versions=zeros, finish_reason=choice["finish_reason"]
        )

    async def abort(self, request_id: str) -> bool:
        return False

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def prepare_weights(self, tensors: Mapping[str, Any], *, version: int) -> None: ...

    async def commit_weights(self, version: int, *, kv_cache: KVCachePolicy = "keep") -> None: ...

    async def health(self, deadline_s: float) -> EngineHealth:
        error = ""
        try:
            assert self._session is not None
            async with asyncio.timeout(deadline_s), self._session.get(f"{self._url}/health"):
                pass
        except (TimeoutError, aiohttp.ClientError, OSError) as failure:
            error = type(failure).__name__
        return EngineHealth(healthy=not error, latency_s=0.0, weight_version=0, error=error)

    def statistics(self) -> RolloutEngineStatistics:
        zeros = dict.fromkeys(
            ("waiting", "weight_version", "tokens_generated", "prompt_tokens", "requests_finished"), 0
        ) | dict.fromkeys(("requests_aborted", "kv_cache_tokens", "kv_cache_capacity_tokens", "decode_steps"), 0)
        return RolloutEngineStatistics(running=self._running, paused=False, busy_s=0.0, **zeros)


async def pool_server(urls: list[str]) -> None:
    """``asyncrl.serve`` over engines that ask the replicas; says its port."""
    from asyncrl.rollout.replica import PoolOptions, Supervision
    from asyncrl.rollout.replica_pool import ReplicaPool
    from asyncrl.runtime import freeze_gc
    from asyncrl.serve.call import ServerState
    from asyncrl.serve.limits import Limits
    from asyncrl.serve.server import Binding, Server

    limits = Limits()
    options = PoolOptions(supervision=Supervision(probe_every_s=0.5, start_s=10.0))
    engines: dict[str, Callable[[], HttpReplica]] = {url: lambda url=url: HttpReplica(url) for url in urls}
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(ReplicaPool(engines, options=options))
        state = ServerState(
            pool=pool,
            names=("echo",),
            text=scratch_text(),
            limits=limits,
        )
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        server = Server(state, Binding(port=0, control_socket=Path(folder) / "control.sock"))
        await server.start()
        stack.push_async_callback(server.close)
        freeze_gc()
        print(server.url.rpartition(":")[2], flush=True)
        await asyncio.Event().wait()


# --------------------------------------------------------------------------------------------------------- processes


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port: int = made.getsockname()[1]
        return port


class Replicas:
    """Processes that are killed and come back."""

    def __init__(self, count: int, folder: Path) -> None:
        self.ports = [free_port() for _ in range(count)]
        self._counters = [folder / f"made-{port}" for port in self.ports]
        for counter in self._counters:
            counter.write_bytes(bytes(8))
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    @property
    def made(self) -> int:
        """Tokens, of all of them, dead ones included."""
        return sum(struct.unpack("q", counter.read_bytes())[0] for counter in self._counters)

    async def start(self, number: int) -> None:
        arguments = ["--replica", str(self.ports[number]), "--counter", str(self._counters[number])]
        self._processes[number] = subprocess.Popen([sys.executable, __file__, *arguments])
        await answering(self.ports[number])

    async def kill(self, number: int) -> None:
        self._processes[number].kill()
        await asyncio.to_thread(self._processes[number].wait)

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


async def answering(port: int, timeout_s: float = 60.0) -> None:
    """Wait until something answers GET /health there."""
    async with asyncio.timeout(timeout_s), aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"http://127.0.0.1:{port}/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)


def router_python(folder: Path) -> Path:
    """An environment with the routers."""
    python = folder / "bin" / "python"
    if not (folder / "done").exists():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES], check=True)
        (folder / "done").touch()
    return python


def router_command(name: str, python: Path, port: int, urls: list[str]) -> list[str]:
    shared = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()), "--log-level", "error"]
    module = ["smg", "launch"] if name == "smg" else ["vllm-router"]
    return [str(python.parent / module[0]), *module[1:], "--worker-urls", *urls, "--policy", "round_robin", *shared]


@asynccontextmanager
async def fronts(replicas: Replicas, environment: Path) -> AsyncIterator[dict[str, int]]:
    """Ports of everything that is compared, by name."""
    processes: list[subprocess.Popen[bytes]] = []
    ports = {}
    try:
        ours = subprocess.Popen([sys.executable, __file__, "--pool", *replicas.urls], stdout=subprocess.PIPE)
        processes.append(ours)
        assert ours.stdout is not None
        ports["asyncrl"] = int(await asyncio.to_thread(ours.stdout.readline))
        for name in ("smg", "vllm-router"):
            ports[name] = free_port()
            command = router_command(name, router_python(environment), ports[name], replicas.urls)
            processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        for name, port in ports.items():
            if name != "asyncrl":
                await answering(port)
        await asyncio.sleep(3.0)  # routers look their workers over after they answer
        yield ports
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            try:
                await asyncio.to_thread(process.wait, 5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


# -------------------------------------------------------------------------------------------------------- what is shown


def whole(port: int) -> bytes:
    body = json.dumps({"model": "echo", "prompt": PROMPT, "max_tokens": NEW_TOKENS}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def throughput(port: int, requests: int, *, connections: int = 32) -> tuple[float, float]:
    """Requests a second, and the 99th percentile in milliseconds."""
    data, times = whole(port), []

    async def ask(connection: Connection) -> None:
        for _ in range(requests // connections):
            begin = time.perf_counter()
            answer = await connection.ask(data)
            times.append(1e3 * (time.perf_counter() - begin))
            assert answer.startswith(b"HTTP/1.1 200"), answer[:500]

    opened = [await connect(port) for _ in range(connections)]
    begin = time.perf_counter()
    await asyncio.gather(*(ask(connection) for connection in opened))
    taken = time.perf_counter() - begin
    for connection in opened:
        connection.close()
    return len(times) / taken, sorted(times)[int(0.99 * len(times))]


async def compare(ports: dict[str, int], rounds: int, requests: int) -> list[Figure]:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ports}
    for port in ports.values():
        await throughput(port, requests)
    for turn in range(rounds):
        for name in list(ports)[:: 1 if turn % 2 else -1]:
            found[name].append(await throughput(ports[name], requests))
    floor = [speed for speed, _ in found["one replica"]]
    figures = []
    for name, pairs in found.items():
        speeds, tails = zip(*pairs, strict=True)
        ratio = statistics.median(a / b for a, b in zip(speeds, floor, strict=True))
        speed, title = statistics.median(speeds), f"{name}: whole answers, 32 connections"
        figures.append(Figure(title, speed, "requests/s", statistics.median(floor), ratio, "reported", True))
        figures.append(Figure(f"{name}: 99th percentile", statistics.median(tails), "ms", 0, 0, "reported", True))
    return figures


async def stream_once(session: aiohttp.ClientSession, port: int) -> int:
    """Tokens of a stream that was right from the first to the last.

    Raises:
        ValueError: it was not.
    """
    body = {"model": "echo", "prompt": PROMPT, "max_tokens": STREAM_TOKENS, "stream": True, "return_token_ids": True}
    got, ended = 0, None
    async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise ValueError(f"status {answer.status}")
        expected = None
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise ValueError(event["error"])
            choice = event["choices"][0]
            for number in choice["token_ids"] if choice.get("token_ids") else map(int, choice["text"].split()):
                if expected is not None and number != expected:
                    raise ValueError(f"{number} instead of {expected}")
                expected = number + 1
                got += 1
            ended = choice["finish_reason"]
    if got != STREAM_TOKENS or ended != "length":
        raise ValueError(f"{got} tokens, ended {ended}")
    return got


async def kill(name: str, port: int, replicas: Replicas, seconds: float) -> list[Figure]:
    """Streams while replicas die."""
    received = right = errors = 0
    running = True
    before = replicas.made

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal received, right, errors
        while running:
            try:
                got = await stream_once(session, port)
                received, right = received + got, right + 1
            except (aiohttp.ClientError, ValueError, OSError):
                errors += 1
                await asyncio.sleep(0.05)

    async def murder() -> None:
        dice = random.Random(1)
        while running:
            await asyncio.sleep(KILL_EVERY_S - AWAY_S)
            number = dice.randrange(len(replicas.ports))
            await replicas.kill(number)
            await asyncio.sleep(AWAY_S)
            await replicas.start(number)

    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        clients = [asyncio.create_task(client(session)) for _ in range(CLIENTS)]
        killer = asyncio.create_task(murder())
        await asyncio.sleep(seconds)
        running = False
        await asyncio.gather(*clients, killer)
    made = replicas.made - before
    wasted = 100 * (made - received) / made
    ours = name == "asyncrl"
    title, goal = f"{name}: errors that clients saw, of {right + errors} streams", "0" if ours else "reported"
    return [
        Figure(title, errors, "errors", 0, 0, goal, not (ours and errors)),
        Figure(f"{name}: tokens made for nothing", wasted, "%", 0, 0, "reported", True),
    ]


async def measure(options: argparse.Namespace) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        environment = options.environment or Path(folder) / "routers"
        replicas = Replicas(4, Path(folder))
        try:
            for number in range(4):
                await replicas.start(number)
            async with fronts(replicas, environment) as ports:
                compared = {**ports, "one replica": replicas.ports[0]}
                figures = await compare(compared, options.rounds, options.requests)
                for name, port in ports.items():
                    figures += await kill(name, port, replicas, options.seconds)
        finally:
            replicas.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--environment", type=Path)
    parser.add_argument("--replica", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--counter", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--pool", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if options.replica:
            runner.run(replica(options.replica, options.counter))
        elif options.pool:
            runner.run(pool_server(options.pool))
        else:
            _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            figures = runner.run(measure(options))
            if options.json:
                machine = {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
                print(json.dumps({"machine": machine, "figures": [asdict(figure) for figure in figures]}))
            else:
                print(shown(figures))


if __name__ == "__main__":
    main()
