"""Adapters under fire: is every token labelled with the version that sampled it, while replicas are killed and paused?

    python benchmarks/adapters.py [--json] [--swaps 2000] [--replicas 2] [--kill-every 10] [--pause-every 7]
    python benchmarks/adapters.py --engine vllm --python .venv-vllm/bin/python --swaps 200

The model is made so that a token tells which adapter sampled it, on any engine. Of a llama of one layer without
attention, the feed-forward layer gives a positive number, an adapter of rank one turns it into a direction that
outweighs all else, and the head, an identity, gives the token of that direction: one for each version of each adapter
(modulo 63), another one without an adapter. Three tenants and the model itself stream greedy requests through a pool of
engines, each in a process of its own. One adapter after the other is exchanged; every so many seconds a replica is
killed, or the pool is paused.

``adapter_tokens_mislabelled``: tokens that are not those of the version they are labelled with, or of a version of
another adapter. ``adapter_tokens_lost``: tokens that requests are short of, or have too many. Both have to be 0.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import torch

from asyncrl.errors import WeightError
from asyncrl.interfaces import GenerationRequest, SamplingParams
from asyncrl.rollout.replica import PoolOptions, Supervision
from asyncrl.rollout.replica_pool import ReplicaPool
from asyncrl.weights import Adapter, TransportSpec, WeightManifest, entries_of
from engines.rollout.remote.engine import RemoteEngine
from engines.weights.shared_memory import SharedMemoryTransport

SIZE = 64
"""Of the hidden state and of the vocabulary."""
MODULE = "model.layers.0.mlp.down_proj"
TENANTS = ("red", "green", "blue")
TOKENS = 48


def make_model(folder: Path) -> list[tuple[str, torch.Tensor]]:
    """Write the model; return its tensors."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=SIZE,
        hidden_size=SIZE,
        intermediate_size=SIZE,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    layer: Any = model.model.layers[0]
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.gate_proj.weight.normal_()
    layer.mlp.up_proj.weight.copy_(layer.mlp.gate_proj.weight)  # silu(g) * g is positive
    layer.mlp.down_proj.weight.zero_()
    layer.mlp.down_proj.weight[0] = 1.0  # without an adapter: token 0
    model.lm_head.weight.copy_(torch.eye(SIZE))
    model.save_pretrained(folder)
    return [(name, tensor) for name, tensor in model.named_parameters()]


def token_of(version: int) -> int:
    return 1 + version % (SIZE - 1)


def adapter_of(version: int) -> list[tuple[str, torch.Tensor]]:
    b = torch.zeros(SIZE, 1)
    b[token_of(version)] = 1000.0
    return [
        (f"base_model.model.{MODULE}.lora_A.weight", torch.ones(1, SIZE)),
        (f"base_model.model.{MODULE}.lora_B.weight", b),
    ]


class Storm:
    """Requests, exchanges, kills and pauses of one pool, and what was counted."""

    def __init__(self, pool: ReplicaPool, transport: SharedMemoryTransport, base: Sequence[tuple[str, torch.Tensor]]):
        self.counts: Counter[str] = Counter()
        self._pool = pool
        self._transport = transport
        self._base = entries_of(base)
        self._parts: dict[str, WeightManifest] = {}
        self._of: dict[int, str] = {0: ""}
        self._numbers = count()
        self._over = False

    async def swap(self, name: str) -> None:
        version = max(self._of) + 1
        self._of[version] = name
        manifest = self._transport.publish(adapter_of(version), version=version)
        adapter = Adapter(rank=1, alpha=1.0, name=name, base=self._base)
        beside = tuple(part for each, part in self._parts.items() if each != name)
        manifest = msgspec.structs.replace(manifest, adapter=adapter)
        try:
            await self._pool.publish(msgspec.structs.replace(manifest, beside=beside))
            self._parts[name] = manifest
            self.counts["swaps"] += 1
        except WeightError:  # the replica that served has just been killed: the version is withdrawn
            self.counts["withdrawn"] += 1
        needed = {part.version for part in self._parts.values()} | self._pool.needed_versions
        for old in set(self._transport.versions) - needed:
            self._transport.release(old)

    async def stream(self, name: str) -> None:
        """Send one request after the other, and look at every token."""
        while not self._over:
            request = GenerationRequest(
                request_id=f"{name}-{next(self._numbers)}",
                prompt_token_ids=(1, 2, 3),
                sampling=SamplingParams(max_new_tokens=TOKENS, temperature=0.0, ignore_eos=True),
                adapter=name,
            )
            got = 0
            async for chunk in self._pool.generate(request):
                for token, version in zip(chunk.token_ids, chunk.weight_versions, strict=True):
                    right = token == (token_of(version) if name else 0) and self._of[version] == name
                    self.counts["mislabelled"] += not right
                got += len(chunk.token_ids)
            self.counts["tokens"] += got
            self.counts["lost"] += abs(got - TOKENS)
            self.counts["requests"] += 1

    async def every(self, seconds: float, action: Any) -> None:
        while seconds and not self._over:
            await asyncio.sleep(seconds)
            await action()

    async def run(self, swaps: int, engines: list[RemoteEngine], *, kill_every: float, pause_every: float) -> None:
        dice = random.Random(0)
        for name in TENANTS:
            await self.swap(name)

        async def kill() -> None:
            alive = [engine for engine in engines if engine.pid is not None and Path(f"/proc/{engine.pid}").exists()]
            if len(alive) > 1 and all(replica.state == "healthy" for replica in self._pool.replicas()):
                os.kill(alive[dice.randrange(len(alive))].pid or 0, signal.SIGKILL)
                self.counts["kills"] += 1

        async def pause() -> None:
            await self._pool.pause("keep")
            await asyncio.sleep(0.05)
            await self._pool.resume()
            self.counts["pauses"] += 1

        async with asyncio.TaskGroup() as tasks:
            for name in ("", *TENANTS, *TENANTS):
                tasks.create_task(self.stream(name))
            fire = [
                tasks.create_task(self.every(kill_every, kill)),
                tasks.create_task(self.every(pause_every, pause)),
            ]
            while self.counts["swaps"] < swaps:
                await self.swap(dice.choice(TENANTS))
            for task in fire:
                task.cancel()
            await self._pool.resume()
            self._over = True


async def storm(options: argparse.Namespace) -> Counter[str]:
    with tempfile.TemporaryDirectory(prefix="adapters-") as temporary:
        folder = Path(temporary) / "model"
        base = make_model(folder)
        given = {"directory": temporary, "max_versions": 16}
        spec = TransportSpec(name="shared_memory", namespace="storm", options=given)
        transport = SharedMemoryTransport(namespace="storm", **given)  # type: ignore[arg-type]
        made: list[RemoteEngine] = []
        own = {"vllm": {"kv_cache_bytes": 64 << 20}, "sglang": {}, "transformers": {"device": "cpu"}}[options.engine]

        def engine() -> RemoteEngine:
            made.append(
                RemoteEngine(
                    str(folder),
                    engine=options.engine,
                    python=options.python,
                    transport=spec,
                    dtype="float32",
                    threads=1,
                    max_adapter_rank=1,
                    options={"max_running_requests": 16, **own},
                    log_path=os.devnull,
                )
            )
            return made[-1]

        pool = ReplicaPool(
            {f"replica-{number}": engine for number in range(options.replicas)},
            options=PoolOptions(supervision=Supervision(probe_every_s=2.0)),
        )
        try:
            async with contextlib.AsyncExitStack() as stack:
                await stack.enter_async_context(pool)
                fire = Storm(pool, transport, base)
                await fire.run(options.swaps, made, kill_every=options.kill_every, pause_every=options.pause_every)
                return fire.counts
        finally:
            transport.close()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", action="store_true", help="print one JSON object")
    arguments.add_argument("--swaps", type=int, default=2000)
    arguments.add_argument("--replicas", type=int, default=2)
    arguments.add_argument("--kill-every", type=float, default=10.0, metavar="S", help="seconds; 0: never")
    arguments.add_argument("--pause-every", type=float, default=7.0, metavar="S", help="seconds; 0: never")
    arguments.add_argument("--engine", choices=("transformers", "vllm", "sglang"), default="transformers")
    arguments.add_argument("--python", help="interpreter of the engine's environment")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    counts = asyncio.run(storm(options))
    print(f"{options.engine}: {dict(counts)} in {time.monotonic() - started:.0f} s", file=sys.stderr)
    figures = [
        {"name": f"adapter_tokens_{kind}", "value": counts[kind], "unit": f"of {counts['tokens']} tokens", "goal": "0"}
        for kind in ("mislabelled", "lost")
    ]
    figures = [{**figure, "holds": figure["value"] == 0} for figure in figures]
    print(json.dumps({"machine": {"cores": os.cpu_count()}, "figures": figures}) if options.json else figures)


if __name__ == "__main__":
    main()
