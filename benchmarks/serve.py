"""The server itself, over replicas that only echo: its overhead, its throughput, and many sessions at once.

    python benchmarks/serve.py [--json] [--rounds 15] [--requests 2000] [--sessions 16000] [--mixed 1000]

The server runs in a process of its own, the load comes from this one: two cores for both. The floor is a bare aiohttp
handler that reads JSON, echoes and writes JSON, on uvloop like the server, with the same requests in the same run. The
load generator writes prepared bytes to sockets and reads as far as the length in the answer's head, so that little of
the second core is its own.

The load of the machine changes from one second to the next. So rounds are short, the servers alternate in each of them
(in the opposite order in every second one), a ratio is that of one round, and the figure is the median of the rounds.
Processor time is the kernel's count of nanoseconds, of the server's process alone.

* overhead: median of one request at a time over HTTP, less the median of the same request to the replica itself;
* throughput, and the processor time of the server's process, which does not depend on what else the machine does:
  token-native requests (128 ids in, 16 out) of 64 connections;
* sessions: so many connections at once, each a session of its own whose turns take the replica 1 s, with a tool call
  of `--think` seconds between them. Errors, memory of the server's process, and how late its event loop is;
* memory (`--mixed 1000`): requests of 20 to 8,000 tokens, 64 at a time, to the default engine with a model whose keys
  and values (16 KiB a token) are nearly all of its memory, and a cache of 512 MiB, less than they want. What the
  process holds beyond what it held idle, over the keys and values of the tokens that have them (median) and over the
  cache (at most); and what it holds after all of it, over what it held after 32 short requests.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import uvloop
from aiohttp import web

from asyncrl.errors import WeightError
from asyncrl.interfaces import (
    EngineHealth,
    GenerationChunk,
    GenerationRequest,
    KVCachePolicy,
    PauseMode,
    RolloutEngine,
    RolloutEngineStatistics,
    SamplingParams,
)
from asyncrl.rollout.publication import Ended
from asyncrl.rollout.replica import PoolStatistics, ReplicaStatus
from asyncrl.weights import WeightManifest

if TYPE_CHECKING:
    from asyncrl.serve.text import ModelText
    from engines.rollout.transformers.engine import TransformersEngine

PROMPT = list(range(1000, 1128))
NEW_TOKENS = 16
TICK_S = 0.005
"""How often the server's loop is looked at; every tick that falls into a wait counts with what is left of it."""
BODY = json.dumps({"prompt_token_ids": PROMPT, "max_new_tokens": NEW_TOKENS}).encode()


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    value: float
    unit: str
    floor: float
    ratio: float
    goal: str
    holds: bool


class EchoEngine:
    """A rollout engine that answers with the end of its prompt, all at once, after ``turn_s``."""

    pulls_weights: ClassVar[bool] = False
    weight_version = 0

    def __init__(self, turn_s: float = 0.0) -> None:
        self._turn_s = turn_s
        self._running = 0
        self._tokens = 0

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        self._running += 1
        try:
            if self._turn_s:
                await asyncio.sleep(self._turn_s)
            ids = request.prompt_token_ids[-request.sampling.max_new_tokens :]
            self._tokens += len(ids)
            yield GenerationChunk(
                token_ids=ids,
                log_probs=(-0.5,) * len(ids),
                weight_versions=(0,) * len(ids),
                finish_reason="length",
            )
        finally:
            self._running -= 1

    async def abort(self, request_id: str) -> bool:
        return False

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def prepare_weights(self, tensors: Mapping[str, Any], *, version: int) -> None: ...

    async def commit_weights(self, version: int, *, kv_cache: KVCachePolicy = "keep") -> None: ...

    async def health(self, deadline_s: float) -> EngineHealth:
        return EngineHealth(healthy=True, latency_s=0.0, weight_version=0)

    def statistics(self) -> RolloutEngineStatistics:
        return RolloutEngineStatistics(
            running=self._running,
            waiting=0,
            paused=False,
            weight_version=0,
            tokens_generated=self._tokens,
            prompt_tokens=0,
            requests_finished=0,
            requests_aborted=0,
            kv_cache_tokens=0,
            kv_cache_capacity_tokens=1,
            decode_steps=0,
            busy_s=0.0,
        )


class EchoPool:
    """The least that can be served: one replica, called directly, so that what is measured is the server."""

    weight_version = 0
    needed_versions: frozenset[int] = frozenset()

    def __init__(self, turn_s: float) -> None:
        self._engine = EchoEngine(turn_s)

    def generate(
        self, request: GenerationRequest, *, session: str | None = None, tenant: str = ""
    ) -> AsyncIterator[GenerationChunk]:
        return self._engine.generate(request)

    async def abort(self, request_id: str) -> bool:
        return False

    async def pause(self, mode: PauseMode = "keep") -> None: ...

    async def resume(self) -> None: ...

    async def publish(self, manifest: WeightManifest) -> Ended:
        raise WeightError("an echo has no weights")

    async def add(self, name: str, factory: Callable[[], RolloutEngine]) -> None: ...

    async def drain(self, name: str) -> None: ...

    async def remove(self, name: str) -> None: ...

    def replicas(self) -> list[ReplicaStatus]:
        return []

    def statistics(self) -> PoolStatistics:
        counters = dict.fromkeys(("running", "waiting", "accepted", "finished", "aborted", "failed", "left"), 0)
        return PoolStatistics(
            weight_version=0, paused=False, migrations=0, tokens=0, restarts=0, replicas=(), **counters
        )


# ------------------------------------------------------------------------------------------------------- the servers


async def serve_ours(stack: AsyncExitStack, *, turn_s: float, pooled: bool, guarded: bool = False) -> int:
    """The server, over one echo or over a pool of two; returns its port.

    ``guarded`` has a tokenizer, and the limits of every server.
    """
    from asyncrl.rollout.replica_pool import PoolOptions, ReplicaPool
    from asyncrl.runtime import freeze_gc
    from asyncrl.serve.call import ServerState
    from asyncrl.serve.limits import Limits
    from asyncrl.serve.server import Binding, Server

    many = 20_000
    limits = Limits(connections=many, concurrent_requests=many, concurrent_requests_per_key=many, idle_timeout_s=600.0)
    if guarded:
        limits = Limits()
    pool: Any = EchoPool(turn_s)  # or a ReplicaPool
    if pooled:
        options = PoolOptions(max_running=many)
        engines = {name: lambda: EchoEngine(turn_s) for name in ("a", "b")}
        pool = await stack.enter_async_context(ReplicaPool(engines, options=options))
    state = ServerState(
        pool=pool,
        names=("echo",),
        text=scratch_text() if guarded else None,
        limits=limits,
    )
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    server = Server(state, Binding(port=0, control_socket=Path(folder) / "control.sock"))
    await server.start()
    stack.push_async_callback(server.close)
    freeze_gc()
    return int(server.url.rpartition(":")[2])


def scratch_text() -> ModelText:
    """The text of a model that was never trained."""
    from asyncrl.serve.text import ModelText
    from engines.training.scratch import make_scratch_tokenizer

    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    return ModelText(make_scratch_tokenizer([messages]))


async def serve_bare(stack: AsyncExitStack, *, closing: bool = False) -> int:
    """The floor: JSON in, JSON out. ``closing`` reads no byte of a body in chunks, and hangs up."""

    async def generate(request: web.Request) -> web.Response:
        if closing and request.headers.get("Transfer-Encoding") == "chunked":
            refusal = web.Response(status=413)
            refusal.force_close()
            await refusal.prepare(request)
            await refusal.write_eof()
            assert request.transport is not None
            request.transport.close()
            return refusal
        body = await request.json()
        ids = body["prompt_token_ids"][-body["max_new_tokens"] :]
        answer = {
            "request_id": "x",
            "token_ids": ids,
            "log_probs": [-0.5] * len(ids),
            "weight_versions": [{"version": 0, "start": 0, "end": len(ids)}],
            "finish_reason": "length",
        }
        return web.json_response(answer)

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return int(runner.addresses[0][1])


KV_CACHE_BYTES = 512 << 20
KV_BYTES_PER_TOKEN = 2 * 16 * 2 * 64 * 4


async def serve_engine(stack: AsyncExitStack) -> tuple[int, TransformersEngine]:
    """The server, over the default engine."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from asyncrl.rollout.replica_pool import ReplicaPool
    from asyncrl.serve.call import ServerState
    from asyncrl.serve.limits import Limits
    from asyncrl.serve.server import Binding, Server
    from engines.rollout.transformers.engine import TransformersEngine

    folder = stack.enter_context(tempfile.TemporaryDirectory())
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    engine = TransformersEngine(folder, kv_cache_bytes=KV_CACHE_BYTES, prefill_tokens_per_step=512)
    pool = await stack.enter_async_context(ReplicaPool({"a": lambda: engine}))
    limits = Limits(concurrent_requests=1000, concurrent_requests_per_key=1000)
    server = Server(
        ServerState(pool=pool, names=("wide",), text=None, limits=limits),
        Binding(port=0, control_socket=Path(folder) / "control.sock"),
    )
    await server.start()
    stack.push_async_callback(server.close)
    return int(server.url.rpartition(":")[2]), engine


async def child(kind: str, turn_s: float) -> None:
    """Serve until SIGTERM; say the port first, memory and the loop's lateness last."""
    lags: list[float] = []
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, ended.set)

    async def watch() -> None:
        while True:
            begin = loop.time()
            await asyncio.sleep(TICK_S)
            late = loop.time() - begin - TICK_S
            lags.extend(late - TICK_S * missed for missed in range(1 + int(late / TICK_S)))

    async with AsyncExitStack() as stack:
        engine = None
        if kind == "engine":
            port, engine = await serve_engine(stack)
        elif kind in ("bare", "closing"):
            port = await serve_bare(stack, closing=kind == "closing")
        else:
            guarded = kind == "guarded"
            port = await serve_ours(stack, turn_s=turn_s, pooled=kind == "pool" or guarded, guarded=guarded)
        watching = asyncio.ensure_future(watch())
        print(port, flush=True)
        tokens_held: list[tuple[int, float]] = []
        preemptions = 0
        while not ended.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), 0.05)
            if engine is not None:
                schedule = engine._running().schedule
                preemptions = schedule.preemptions
                cached = sum(row.cached for row in list(schedule.running))  # random prompts share nothing
                tokens_held.append((cached, held_mib(os.getpid())))
        watching.cancel()
        lags.sort()
        rss = resource.getrusage(resource.RUSAGE_SELF)
        report = {
            "rss_mib": rss.ru_maxrss / 1024,
            "cpu_s": rss.ru_utime + rss.ru_stime,
            "lag_p99_ms": 1e3 * lags[int(0.99 * len(lags))],
            "lag_max_ms": 1e3 * lags[-1],
            "preemptions": preemptions,
            "held_most_mib": max((held for _, held in tokens_held), default=0.0),
            "tokens_held": tokens_held[:: 1 + len(tokens_held) // 500],
        }
        print(json.dumps(report), flush=True)


def held_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


@dataclass
class Child:
    port: int
    pid: int
    report: dict[str, Any]

    def cpu_s(self) -> float:
        """Processor time of its process so far, to the nanosecond."""
        threads = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return 1e-9 * sum(int(thread.read_text().split()[0]) for thread in threads)

    def rss_mib(self) -> float:
        """Memory that its process holds now."""
        return held_mib(self.pid)

    def connections(self) -> int:
        """TCP connections to it that are not closed on both sides."""
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        mine = f":{self.port:04X}"
        return sum(row[1].endswith(mine) and row[3] in ("01", "08") for row in rows)  # established, close-wait


@asynccontextmanager
async def running(kind: str, *, turn_s: float = 0.0) -> AsyncIterator[Child]:
    """A server in a process of its own; what it printed at its end is in ``report`` afterwards."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--child", kind, "--turn", str(turn_s), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        served = Child(int(await process.stdout.readline()), process.pid, {})
        yield served
        process.send_signal(signal.SIGTERM)
        served.report = json.loads(await asyncio.wait_for(process.stdout.readline(), 120))
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


# ---------------------------------------------------------------------------------------------------------- the load


class Connection(asyncio.Protocol):
    """Sends prepared bytes, and waits for one answer at a time."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._answer: asyncio.Future[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass

    def data_received(self, data: bytes) -> None:
        self._received += data
        head = self._received.find(b"\r\n\r\n")
        if head < 0:
            return
        at = self._received.lower().find(b"content-length: ", 0, head)
        if at < 0:  # in chunks
            whole = self._received.endswith(b"0\r\n\r\n")
        else:
            length = int(self._received[at + 16 : self._received.find(b"\r\n", at)])
            whole = len(self._received) >= head + 4 + length
        if whole and self._answer is not None:
            answer, self._received = bytes(self._received), bytearray()
            self._answer.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionResetError("closed"))

    async def ask(self, data: bytes) -> bytes:
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        return await self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def prepared(body: bytes, *, session: str = "") -> bytes:
    head = (
        f"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    )
    return f"{head}{f'{chr(13)}{chr(10)}X-Session-ID: {session}' if session else ''}\r\n\r\n".encode() + body


async def connect(port: int) -> Connection:
    _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", port)
    return connection


async def latency_ms(port: int, requests: int) -> float:
    """Median of one request at a time."""
    connection = await connect(port)
    data, times = prepared(BODY), []
    for _ in range(requests):
        begin = time.perf_counter()
        answer = await connection.ask(data)
        times.append(time.perf_counter() - begin)
        assert answer.startswith(b"HTTP/1.1 200"), answer
    connection.close()
    return 1e3 * statistics.median(times)


async def direct_ms(requests: int) -> float:
    """Median of the same request to the replica itself."""
    engine, times = EchoEngine(), []
    for number in range(requests):
        begin = time.perf_counter()
        request = GenerationRequest(
            request_id=str(number),
            prompt_token_ids=tuple(PROMPT),
            sampling=SamplingParams(max_new_tokens=NEW_TOKENS),
        )
        async for _ in engine.generate(request):
            pass
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)


async def requests_per_s(port: int, requests: int, *, connections: int = 64) -> float:
    """Requests of many connections, each asking again as soon as it is answered."""
    opened = [await connect(port) for _ in range(connections)]
    data = prepared(BODY)

    async def ask(connection: Connection, times: int) -> None:
        for _ in range(times):
            answer = await connection.ask(data)
            assert answer.startswith(b"HTTP/1.1 200"), answer

    begin = time.perf_counter()
    await asyncio.gather(*(ask(connection, requests // connections) for connection in opened))
    taken = time.perf_counter() - begin
    for connection in opened:
        connection.close()
    return requests // connections * connections / taken


async def speed(rounds: int, requests: int) -> list[Figure]:
    names = ["ours", "pool", "bare"]
    slow: dict[str, list[float]] = {name: [] for name in names}
    fast: dict[str, list[float]] = {name: [] for name in names}
    cost: dict[str, list[float]] = {name: [] for name in names}
    async with running("ours") as ours, running("pool") as pool, running("bare") as bare:
        servers = dict(zip(names, (ours, pool, bare), strict=True))
        for name in names:  # what a process does only once
            await requests_per_s(servers[name].port, 2000)
        for turn in range(rounds):
            direct = await direct_ms(requests // 10)
            for name in names if turn % 2 else reversed(names):
                slow[name].append(await latency_ms(servers[name].port, requests // 10) - direct)
            for name in names if turn % 2 else reversed(names):
                before = servers[name].cpu_s()
                fast[name].append(await requests_per_s(servers[name].port, requests))
                cost[name].append(1e6 * (servers[name].cpu_s() - before) / requests)
    figures = []
    for name, what in (("ours", "server"), ("pool", "server and pool")):
        over, floor = statistics.median(slow[name]), statistics.median(slow["bare"])
        title = f"{what}: overhead at concurrency 1, p50"
        figures.append(Figure(title, over, "ms", floor, over / floor, "<= 1.5 ms", over <= 1.5))
    for name, what in (("ours", "server"), ("pool", "server and pool")):
        value, floor, ratio = beside_floor(fast[name], fast["bare"])
        goal = ">= 2000, or >= 0.8 of floor"
        title = f"{what}: token-native requests, 64 connections"
        figures.append(Figure(title, value, "requests/s", floor, ratio, goal, value >= 2000 or ratio >= 0.8))
    for name, what in (("ours", "server"), ("pool", "server and pool")):
        value, floor, ratio = beside_floor(cost[name], cost["bare"])
        title = f"{what}: processor time of a request, 64 connections"
        figures.append(Figure(title, value, "us", floor, ratio, "<= 1.25 of floor", ratio <= 1.25))
    return figures


def beside_floor(values: list[float], floors: list[float]) -> tuple[float, float, float]:
    """Medians of both, and of their ratios round by round."""
    ratios = (value / floor for value, floor in zip(values, floors, strict=True))
    return statistics.median(values), statistics.median(floors), statistics.median(ratios)


async def sessions(count: int, *, think_s: float) -> list[Figure]:
    """Two turns each, the second one going on from the first."""
    errors = 0
    latencies: list[float] = []
    open_now = most_open = 0
    spread_s = think_s + 2.0  # turns are spread evenly: an agent's tool calls are not in step

    async def one(number: int, port: int) -> None:
        nonlocal errors, open_now, most_open
        await asyncio.sleep(spread_s * number / count)
        ids = PROMPT[:32]
        try:
            connection = await connect(port)
            open_now += 1
            most_open = max(most_open, open_now)
            try:
                for turn in range(3):
                    if turn:
                        await asyncio.sleep(think_s)
                    if connection.closed:  # idle for longer than the server waits: clients connect again
                        connection = await connect(port)
                    body = json.dumps({"prompt_token_ids": ids, "max_new_tokens": NEW_TOKENS}).encode()
                    begin = time.perf_counter()
                    answer = await connection.ask(prepared(body, session=f"s{number}"))
                    latencies.append(time.perf_counter() - begin)
                    if not answer.startswith(b"HTTP/1.1 200"):
                        errors += 1
                        return
                    content = json.loads(answer[answer.index(b"\r\n\r\n") + 4 :])
                    ids = [*ids, *content["token_ids"], 7, 8, 9]
            finally:
                open_now -= 1
                connection.close()
        except OSError:
            errors += 1

    async with running("pool", turn_s=1.0) as server:
        await asyncio.gather(*(one(number, server.port) for number in range(count)))
    report = server.report
    latencies.sort()
    p99 = latencies[int(0.99 * len(latencies))] - 1.0
    name = f"{count} sessions of 1 s turns, {most_open} open at a time"
    return [
        Figure(f"{name}: errors", errors, "errors", 0, 0, "0", errors == 0),
        Figure(f"{name}: memory", report["rss_mib"], "MiB", 0, 0, "<= 1536 MiB", report["rss_mib"] <= 1536),
        Figure(f"{name}: loop late, p99", report["lag_p99_ms"], "ms", 0, 0, "<= 100 ms", report["lag_p99_ms"] <= 100),
        Figure(f"{name}: loop late, most", report["lag_max_ms"], "ms", 0, 0, "reported", True),
        Figure(f"{name}: turn beyond its second, p99", 1e3 * p99, "ms", 0, 0, "reported", True),
    ]


async def memory(count: int) -> list[Figure]:
    dice = random.Random(0)
    few = asyncio.Semaphore(64)

    async def ask(port: int, prompt: int, tokens: int) -> None:
        async with few:
            ids = [dice.randrange(512) for _ in range(prompt)]
            connection = await connect(port)
            answer = await connection.ask(
                prepared(json.dumps({"prompt_token_ids": ids, "max_new_tokens": tokens}).encode())
            )
            connection.close()
            assert answer.startswith(b"HTTP/1.1 200"), answer

    def mixed() -> tuple[int, int]:
        prompt = round(20 * 400 ** dice.betavariate(1.5, 2.5))
        return prompt, min(dice.randrange(8, 257), 8192 - prompt)

    async with running("engine") as server:
        await asyncio.gather(*(ask(server.port, 40, 20) for _ in range(32)))
        await asyncio.sleep(1.0)
        before = server.rss_mib()
        await asyncio.gather(*(ask(server.port, *mixed()) for _ in range(count)), ask(server.port, 8000, 20))
        await asyncio.sleep(1.0)
        after = server.rss_mib()
    samples = [(tokens, held - before) for tokens, held in server.report["tokens_held"]]
    ideal = KV_BYTES_PER_TOKEN / (1 << 20)
    full = [held / (tokens * ideal) for tokens, held in samples if tokens * ideal > 64]
    per_token, budget = statistics.median(full), KV_CACHE_BYTES / (1 << 20)
    most, preempted = server.report["held_most_mib"] - before, server.report["preemptions"]
    name = f"{count} mixed requests, {preempted} preemptions"
    return [
        Figure(f"{name}: kv_bytes_per_token_over_ideal", per_token, "", 1.0, per_token, "<= 1.25", per_token <= 1.25),
        Figure(f"{name}: kv_over_budget", most, "MiB", budget, most / budget, "<= 1.1", most <= 1.1 * budget),
        Figure(
            f"{name}: memory_after_over_before", after, "MiB", before, after / before, "<= 1.1", after <= 1.1 * before
        ),
    ]


async def measure(options: argparse.Namespace) -> list[Figure]:
    figures = await speed(options.rounds, options.requests) if options.rounds else []
    if options.sessions:
        figures += await sessions(options.sessions, think_s=options.think)
    if options.mixed:
        figures += await memory(options.mixed)
    return figures


def shown(figures: list[Figure]) -> str:
    """A line each."""
    return "\n".join(
        f"{f.name:72s} {f.value:10.2f} {f.unit:10s} floor {f.floor:9.2f}  x{f.ratio:5.2f}  "
        f"goal {f.goal}: {'holds' if f.holds else 'DOES NOT HOLD'}"
        for f in figures
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--sessions", type=int, default=16_000)
    parser.add_argument("--think", type=float, default=14.0)
    parser.add_argument("--mixed", type=int, default=1000)
    parser.add_argument(
        "--child", choices=("ours", "pool", "bare", "closing", "guarded", "engine"), help=argparse.SUPPRESS
    )
    parser.add_argument("--turn", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if options.child:
            runner.run(child(options.child, options.turn))
            return
        _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        figures = runner.run(measure(options))
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
    }
    if options.json:
        print(json.dumps({"machine": machine, "figures": [asdict(figure) for figure in figures]}))
        return
    print(shown(figures))


if __name__ == "__main__":
    main()
