"""The pool of replicas under faults: processes are killed, weights change, and errors are counted at the clients.

    python benchmarks/pool.py [--json] [--engine scripted|transformers|vllm|sglang] [--python FILE] [--replicas 4]
                              [--seconds 120] [--kill-every 5] [--swaps 2000] [--most-seconds S] [--clients 16]
                              [--max-committing 1]

The engines' every token is the weight version that made it (``scripted``: asyncrl.testing.VersionEchoEngine, one token
a millisecond; the others: a model of 20,000 parameters whose version v samples only token v), so a wrong version is
visible. Requests of 1 to 200 tokens come from ``--clients`` clients without a pause; weights are swapped ``--swaps``
times, one after another, pauses in between; every ``--kill-every`` seconds a serving replica is killed with SIGKILL.
The run ends when the swaps are done and the seconds have passed; after ``--most-seconds`` no swap is begun any more.
vLLM and SGLang run under the ``--python`` of their own environment.

Tokens are counted by the engines where they are sampled (by vLLM's and SGLang's where they arrive from the process that
samples), each in a file that outlives it: tokens that were sampled and that no client received were sampled in vain. A
replica that was killed has to come back with the version that was current at the kill, or a newer one.

Re-routing is measured from the kill to the first token that a request of the dead replica gets on another. Its floor is
the mean time between two chunks of one request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pool_engines import sampled_tokens  # beside this file

from asyncrl.errors import WeightError
from asyncrl.interfaces import GenerationRequest, SamplingParams
from asyncrl.rollout.engine_replica import Attempt
from asyncrl.rollout.health import HealthPolicy
from asyncrl.rollout.replica import PoolOptions, Supervision
from asyncrl.rollout.replica_pool import ReplicaPool
from asyncrl.testing import EmptyTransport
from asyncrl.weights import TransportSpec, WeightTransport
from engines.rollout.remote.engine import RemoteEngine

VOCABULARY = 67
MOST_RESTART_S = 5.0
COUNTED = {
    "transformers": "benchmarks.pool_engines:CountedTransformers",
    "vllm": "benchmarks.pool_engines:CountedVLLM",
    "sglang": "benchmarks.pool_engines:CountedSGLang",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "transformers": {"device": "cpu"},
    "vllm": {"kv_cache_bytes": 64 << 20},
    "sglang": {"device": "cpu", "kv_cache_tokens": 8192},
}


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    value: float
    unit: str
    floor: float
    ratio: float
    goal: str
    holds: bool


@dataclass(slots=True)
class Fire:
    """What was asked for, and what came of it."""

    pool: ReplicaPool
    dice: random.Random
    running: bool = True
    requests: int = 0
    tokens: int = 0
    wrong: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    gaps_s: list[float] = field(default_factory=list)
    rerouted_s: list[float] = field(default_factory=list)
    swaps_s: list[float] = field(default_factory=list)
    missed_swaps: int = 0
    kills: int = 0
    killed: dict[str, tuple[Attempt, float]] = field(default_factory=dict)
    pauses: Counter[str] = field(default_factory=Counter)
    away: dict[str, tuple[int, int, float]] = field(default_factory=dict)
    away_s: list[float] = field(default_factory=list)
    came_back: int = 0
    came_back_stale: int = 0
    overdue: int = 0

    async def client(self, name: int, says: Callable[[int], int]) -> None:
        turn = 0
        while self.running:
            turn += 1
            request = GenerationRequest(
                request_id=f"{name}.{turn}",
                prompt_token_ids=(1,) * self.dice.randint(1, 20),
                sampling=SamplingParams(max_new_tokens=self.dice.randint(1, 200)),
            )
            self.requests += 1
            try:
                await self.check(request, says)
            except Exception as error:  # noqa: BLE001 - what a client sees is what is measured
                self.errors[type(error).__name__] += 1

    async def check(self, request: GenerationRequest, says: Callable[[int], int]) -> None:
        got, version, reason, before = 0, 0, None, time.perf_counter()
        async for chunk in self.pool.generate(request):
            now = time.perf_counter()
            died, killed = self.killed.get(request.request_id, (None, 0.0))
            attempt = self.attempt(request.request_id)
            if died is not None and chunk.token_ids and attempt is not died:  # what had arrived before does not count
                del self.killed[request.request_id]
                if attempt is not None:  # its last chunk says not who made it
                    self.rerouted_s.append(now - killed)
            elif got:
                self.gaps_s.append(now - before)
            before = now
            got += len(chunk.token_ids)
            self.wrong += reason is not None or len(chunk.weight_versions) != len(chunk.token_ids)
            for token, label in zip(chunk.token_ids, chunk.weight_versions, strict=True):
                self.wrong += token != says(label) or label < version
                version = label
            reason = chunk.finish_reason
        self.tokens += got
        self.wrong += reason == "length" and got != request.sampling.max_new_tokens
        self.wrong += reason not in ("length", "abort")

    def attempt(self, request_id: str) -> Attempt | None:
        """What the request has on a replica now."""
        attempts = (attempt for replica in self.pool._replicas.values() for attempt in replica.attempts)
        return next((attempt for attempt in attempts if attempt.request_id.partition("~")[0] == request_id), None)

    async def kill(self, every_s: float) -> None:
        while self.running:
            await asyncio.sleep(every_s)
            serving = [status.name for status in self.pool.replicas() if status.serving]
            if len(serving) < 2:
                continue
            replica = self.pool._replicas[self.dice.choice(serving)]
            engine = replica.engine
            if isinstance(engine, RemoteEngine) and engine.pid is not None:
                now = time.perf_counter()
                self.killed |= {each.request_id.partition("~")[0]: (each, now) for each in replica.attempts}
                self.away[replica.name] = (replica.health.incarnation, self.pool.weight_version, now)
                os.kill(engine.pid, signal.SIGKILL)
                self.kills += 1

    async def watch(self, every_s: float = 0.02) -> None:
        while self.running:
            for status in self.pool.replicas():
                life, version, killed = self.away.get(status.name, (1 << 30, 0, 0.0))
                if status.serving and status.restarts > life:
                    del self.away[status.name]
                    self.came_back += 1
                    self.away_s.append(time.perf_counter() - killed)
                    self.came_back_stale += status.weight_version is None or status.weight_version < version
            await asyncio.sleep(every_s)

    async def swap(self, publish: Callable[[int], Any], swaps: int, *, most_s: float) -> None:
        until = time.perf_counter() + most_s
        for version in range(1, swaps + 1):
            begin = time.perf_counter()
            if begin > until:
                return
            try:
                await publish(version)
            except WeightError:
                self.missed_swaps += 1
            self.swaps_s.append(time.perf_counter() - begin)
            if version % 50 == 0:
                mode: Any = self.dice.choice(("keep", "keep", "drain", "abort"))
                await self.pool.pause(mode)
                self.pauses[mode] += 1
                await self.pool.resume()


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else float("nan")


def telltale(folder: Path) -> Callable[[int], dict[str, Any]]:
    """A model folder, and weights by version: the layers add nothing, and only row ``version`` of the head is high.

    Heads are as wide as vLLM's attention on a CPU needs them.
    """
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: Any = transformers.LlamaForCausalLM(config)

    def weights(version: int) -> dict[str, Any]:
        tensors = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        for name, tensor in tensors.items():
            if "o_proj" in name or "down_proj" in name:
                tensor.zero_()
            elif "embed_tokens" in name or "norm" in name:
                tensor.fill_(1.0)
            elif name == "lm_head.weight":
                tensor.fill_(-1.0)
                tensor[version % VOCABULARY] = 1.0
        return tensors

    with torch.no_grad():
        for name, tensor in weights(0).items():
            model.get_parameter(name).copy_(tensor)
    model.save_pretrained(folder)
    return weights


async def measure(given: argparse.Namespace, folder: Path) -> list[Figure]:
    transport: WeightTransport
    if given.engine != "scripted":
        from engines.weights.shared_memory import SharedMemoryTransport

        weights, says = telltale(folder), lambda label: label % VOCABULARY
        namespace = f"benchmark-{os.getpid()}"
        transport = SharedMemoryTransport(namespace=namespace, max_versions=4)
        spec = TransportSpec(name="shared_memory", namespace=namespace)
        made: dict[str, Any] = {"engine": COUNTED[given.engine], "threads": 1, "dtype": "float32"}
        made["options"] = {"count_in": str(folder), **OPTIONS[given.engine]}
        if given.python is not None:
            made |= {"python": given.python, "environment": {"OMP_NUM_THREADS": "1"}}
    else:
        weights, says = lambda _version: {}, lambda label: label
        transport = EmptyTransport()
        spec = TransportSpec(name="asyncrl.testing:EmptyTransport", namespace="none")
        made = {"engine": "benchmarks.pool_engines:CountedTelltale"}
        made["options"] = {"token_s": 0.001, "count_in": str(folder)}
    options = PoolOptions(
        supervision=Supervision(health=HealthPolicy(restart_s=0.2, max_restart_s=MOST_RESTART_S), probe_every_s=2.0),
        weights_s=60.0,
        max_committing=given.max_committing,
    )
    held: set[int] = set()
    async with contextlib.AsyncExitStack() as stack:
        factories = {f"r{n}": lambda: RemoteEngine(str(folder), transport=spec, **made) for n in range(given.replicas)}
        pool = await stack.enter_async_context(ReplicaPool(factories, options=options))
        fire = Fire(pool, random.Random(0))

        async def publish(version: int) -> None:
            manifest = await asyncio.to_thread(transport.publish, weights(version).items(), version=version)
            held.add(version)
            try:
                await pool.publish(manifest)
            finally:
                for old in held - pool.needed_versions:
                    transport.release(old)
                    held.discard(old)

        begin = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for name in range(given.clients):
                group.create_task(fire.client(name, says))
            killing = group.create_task(fire.kill(given.kill_every))
            group.create_task(fire.watch())
            await fire.swap(publish, given.swaps, most_s=given.most_seconds)
            await asyncio.sleep(max(0.0, given.seconds - (time.perf_counter() - begin)))
            fire.running = False
            killing.cancel()
        lasted_s = time.perf_counter() - begin
        most_s = MOST_RESTART_S + 2 * max(fire.away_s, default=0.0)
        fire.overdue = sum(begin + lasted_s - killed > most_s for _, _, killed in fire.away.values())
        counted = pool.statistics()
    transport.close()
    return figures(fire, counted, lasted_s, sampled=sampled_tokens(folder))


def figures(fire: Fire, counted: Any, lasted_s: float, *, sampled: int) -> list[Figure]:
    def plain(name: str, value: float, unit: str, goal: str = "", holds: bool = True) -> Figure:
        return Figure(name, value, unit, 0.0, 0.0, goal, holds)

    gap_s = statistics.fmean(fire.gaps_s)
    reroute_s = quantile(fire.rerouted_s, 0.99)
    twice = sampled - fire.tokens
    return [
        plain("wrong labels, lost and repeated tokens", fire.wrong, "tokens", "0", fire.wrong == 0),
        plain("errors seen by clients", fire.errors.total(), "requests", "0", not fire.errors),
        plain("replicas killed", fire.kills, "kills"),
        plain("came back", fire.came_back, "engines", "some", fire.came_back > 0),
        plain("away for longer than the others were", fire.overdue, "engines", "0", not fire.overdue),
        plain("from the kill to serving again, median", quantile(fire.away_s, 0.5), "s"),
        plain("the same, longest", max(fire.away_s, default=float("nan")), "s"),
        plain("came back with older weights", fire.came_back_stale, "engines", "0", not fire.came_back_stale),
        plain("tokens sampled that no client got", twice, "tokens"),
        plain("of all", twice / max(sampled, 1), "", "<= 0.01, and none missing", 0 <= twice <= 0.01 * sampled),
        plain("requests moved", counted.migrations, "requests"),
        plain("re-routing, median", quantile(fire.rerouted_s, 0.5), "s"),
        Figure("re-routing, p99", reroute_s, "s", gap_s, reroute_s / gap_s, "<= 2 s", reroute_s <= 2.0),
        plain("weight swaps", len(fire.swaps_s) - fire.missed_swaps, "swaps"),
        plain("swap, median", statistics.median(fire.swaps_s or [0.0]), "s"),
        plain("pauses", fire.pauses.total(), "pauses"),
        plain("requests", fire.requests, "requests"),
        plain("tokens", fire.tokens, "tokens", "as many as the pool counted", fire.tokens == counted.tokens),
        plain("tokens per second", fire.tokens / lasted_s, "1/s"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--engine", choices=("scripted", *COUNTED), default="scripted")
    parser.add_argument("--python", help="interpreter of vLLM's or SGLang's environment")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--kill-every", type=float, default=5.0)
    parser.add_argument("--swaps", type=int, default=2000)
    parser.add_argument("--most-seconds", type=float, default=float("inf"), help="begin no swap after so many")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--max-committing", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured = asyncio.run(measure(given, Path(folder)))
    machine = {"python": platform.python_version(), "cpus": os.cpu_count(), "system": platform.platform()}
    if given.json:
        json.dump({"machine": machine, "figures": [asdict(figure) for figure in measured]}, sys.stdout, indent=1)
        print()
        return
    for figure in measured:
        goal = f"   goal {figure.goal}: {'holds' if figure.holds else 'DOES NOT HOLD'}" if figure.goal else ""
        floor = f"   ({figure.ratio:.1f} x {figure.floor:.4g})" if figure.floor else ""
        print(f"{figure.name:40} {figure.value:12.4g} {figure.unit}{floor}{goal}")


if __name__ == "__main__":
    main()
