"""Rank processes of ``weights.py --collective``: a trainer's, which publish, and an engine's, which pull slices.

    python benchmarks/collective_ranks.py '{"role": "trainer", "rank": 0, "ranks": 2, ...}'

Orders are JSON lines on standard input, answers and warnings JSON lines on standard output. Memory is the process's
resident set: how much its peak exceeds what it was before the order.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import math
import queue
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from asyncrl.errors import WeightError
from asyncrl.weights import WeightManifest, joined
from engines.weights.collective import CollectiveTransport
from engines.weights.resharding import Region, divided, volume, whole, within

BUCKET_BYTES = 64 << 20
COLUMNS, ROWS = (
    ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"),
    ("o_proj", "down_proj"),
)


def memory(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) << 10


def settle() -> int:
    """Give freed memory back, forget the peak, and return what is resident."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def tensor_parallel(manifest: WeightManifest, rank: int, ranks: int) -> dict[str, Region]:
    """Return a rank's regions of a llama: products divided over outputs, then over inputs; the rest whole."""
    regions: dict[str, Region] = {}
    for entry in manifest.tensors:
        module = entry.name.split(".")[-2] if "." in entry.name else ""
        dims = [dim for dim, names in enumerate((COLUMNS, ROWS)) if module in names]
        regions[entry.name] = divided(entry.shape, dims[0], rank=rank, ranks=ranks) if dims else whole(entry.shape)
    return regions


def sharded(manifest: WeightManifest, rank: int, ranks: int) -> dict[str, Region]:
    """Return a trainer rank's regions of a mesh of ``dp_shard`` alone."""
    return {each.name: divided(each.shape, 0, rank=rank, ranks=ranks) for each in manifest.tensors}


def size_bytes(manifest: WeightManifest, regions: Mapping[str, Region]) -> int:
    return sum(each.size_bytes // volume(whole(each.shape)) * volume(regions[each.name]) for each in manifest.tensors)


_saying = threading.Lock()


def say(**answer: Any) -> None:
    """Write one line; threads that send weights warn while an order is answered."""
    with _saying:
        print(json.dumps(answer), flush=True)


class Warnings(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(warning=record.getMessage())


def synthetic() -> Iterator[tuple[str, torch.Tensor]]:
    for layer in range(16):
        yield f"layers.{layer}.o_proj.weight", torch.full((1024, 1024), float(layer))


def serve(options: dict[str, Any]) -> None:
    """Be one rank: carry out orders until standard input ends."""
    torch.set_num_threads(1)
    logging.getLogger("engines").addHandler(Warnings())
    rank, ranks = options["rank"], options["ranks"]
    trains = options["role"] == "trainer"
    engine: Any = None
    if options.get("model"):
        from asyncrl.algorithms import PolicyObjective
        from engines.training.fsdp_engine import FSDPEngine

        shared: dict[str, Any] = {"rank": rank, "world_size": ranks, "master_port": options["port"]}
        engine = FSDPEngine(options["model"], objective=PolicyObjective(), lr=1e-3, threads=1, **shared)
    more = {"rank": rank, "ranks": ranks} if trains else {}
    transport = CollectiveTransport(
        namespace="benchmark", deadline_s=options["deadline_s"], bucket_bytes=options["bucket_bytes"], **more
    )
    say(ready=True)
    base = 0
    for line in sys.stdin:
        order = json.loads(line)
        answer: dict[str, Any] = {}
        if order["do"] == "change":
            for _, tensor in engine._model.tensors_by_name():
                tensor.detach().mul_(1.25)
            tensors = {name: each.clone() for name, each in engine.named_tensors()}
            if rank == 0:
                save_file(tensors, order["path"])
            del tensors
        elif order["do"] == "publish":
            transport.release(order["version"] - 1)
            base = settle()
            tensors_of: Iterable[tuple[str, torch.Tensor]] = engine.sharded_tensors() if engine else synthetic()
            manifest = transport.publish(tensors_of, version=order["version"])
            answer = {"manifest": manifest.encode().hex()}
        elif order["do"] == "peak":
            answer = {"grown": memory("VmHWM") - base}
        elif order["do"] == "busy":
            answer = {"names": [each.name for each in threading.enumerate()]}
        else:
            answer = pull(transport, order, rank, ranks)
        say(**answer)
    transport.close()
    if engine is not None:
        engine.close()


def pull(transport: CollectiveTransport, order: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    manifest = WeightManifest.decode(bytes.fromhex(order["manifest"]))
    regions = tensor_parallel(manifest, rank, ranks)
    base, begun = settle(), time.monotonic()
    try:
        found = transport.pull_regions(manifest, regions)
    except WeightError as error:
        return {"error": str(error)}
    took, grown = time.monotonic() - begun, memory("VmHWM") - base
    equal = True
    if order.get("reference"):
        with safe_open(order["reference"], framework="pt") as file:
            equal = found.keys() == regions.keys() == set(file.keys())
            for name, tensor in found.items():
                expected = file.get_slice(name)[within(regions[name], whole(file.get_slice(name).get_shape()))]
                equal = equal and torch.equal(tensor.view(torch.int32), expected.contiguous().view(torch.int32))
    return {"took": took, "grown": grown, "equal": equal}


# ------------------------------------------------------------------------------------------------------ who measures


class Rank:
    """A rank's process, as the program sees it that measures."""

    def __init__(self, **options: Any) -> None:
        command = [sys.executable, __file__, json.dumps(options)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.options = options
        self.answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self.warnings: list[tuple[float, str]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.startswith("{"):
                continue
            answer = json.loads(line)
            if "warning" in answer:
                self.warnings.append((time.monotonic(), answer["warning"]))
            else:
                self.answers.put({"at": time.monotonic(), **answer})

    def order(self, **order: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def answer(self, within_s: float = 120.0) -> dict[str, Any]:
        return self.answers.get(timeout=within_s)

    def ask(self, **order: Any) -> dict[str, Any]:
        self.order(**order)
        return self.answer()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def manifest_of(answers: list[dict[str, Any]]) -> str:
    return joined([WeightManifest.decode(bytes.fromhex(each["manifest"])) for each in answers]).encode().hex()


def resharded(versions: int = 3) -> tuple[bool, dict[str, float]]:
    """Return whether slices are bitwise equal, and each rank's peak over its shard and one bucket."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
    }
    config = LlamaConfig(**shape, num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=True)
    with tempfile.TemporaryDirectory(prefix="collective-") as folder, socket.socket() as free:
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(f"{folder}/model")
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        common: dict[str, Any] = {"ranks": 2, "deadline_s": 120.0, "bucket_bytes": BUCKET_BYTES}
        trainers = [Rank(role="trainer", rank=r, model=f"{folder}/model", port=port, **common) for r in range(2)]
        engines = [Rank(role="engine", rank=r, **common) for r in range(2)]
        try:
            for each in (*trainers, *engines):
                each.answer(300.0)
            equal, peaks = True, dict[str, float]()
            for version in range(1, versions + 1):
                everyone(trainers, do="change", path=f"{folder}/whole.safetensors")
                published = everyone(trainers, do="publish", version=version)
                order = {"manifest": manifest_of(published), "reference": f"{folder}/whole.safetensors"}
                pulled = everyone(engines, do="pull", **order)
                sent = everyone(trainers, do="peak")
                equal = equal and all(each["equal"] for each in pulled)
                manifest = WeightManifest.decode(bytes.fromhex(order["manifest"]))
                for name, ranks, regions in (("trainer", sent, sharded), ("engine", pulled, tensor_parallel)):
                    for rank, found in enumerate(ranks):
                        shard = size_bytes(manifest, regions(manifest, rank, len(ranks)))
                        over = found["grown"] / (shard + BUCKET_BYTES)
                        peaks[f"{name} {rank}"] = max(peaks.get(f"{name} {rank}", 0.0), over)
                        print(f"version {version}, {name} {rank}: {found['grown']} bytes, {over:.3f}", file=sys.stderr)
        finally:
            for each in (*trainers, *engines):
                each.end()
    return equal, peaks


def everyone(ranks: list[Rank], **order: Any) -> list[dict[str, Any]]:
    for each in ranks:
        each.order(**order)
    return [each.answer() for each in ranks]


def named_faults(rounds: int, deadline_s: float, grace_s: float) -> tuple[int, list[float]]:
    """Kill or stop a rank at a random moment of a pull; return how often it was named in time, and after how long.

    A trainer rank is named by every engine rank that waits for it, an engine rank by the trainer rank that sends to it
    at that moment (a fault that meets it in another is drawn again); the other engine rank has everything then.
    """
    common: dict[str, Any] = {"ranks": 2, "deadline_s": deadline_s, "bucket_bytes": 1 << 20}
    ranks = {(role, r): Rank(role=role, rank=r, **common) for role in ("trainer", "engine") for r in range(2)}
    draw, named, times, done = random.Random(20), 0, list[float](), 0
    try:
        for each in ranks.values():
            each.answer(300.0)
        published = everyone([ranks["trainer", r] for r in range(2)], do="publish", version=1)
        usual_s = 0.1
        while done < rounds:
            engines = [ranks["engine", r] for r in range(2)]
            role, number = draw.choice(["trainer", "engine"]), draw.randrange(2)
            blow = draw.choice([signal.SIGKILL, signal.SIGSTOP])
            victim, manifest = ranks[role, number], manifest_of(published)
            for each in engines:
                each.order(do="pull", manifest=manifest)
            time.sleep(draw.uniform(0.0, usual_s))
            senders, taker = [ranks["trainer", r] for r in range(2)], f"process {victim.process.pid} of "
            if role == "engine" and not sends(senders, taker):
                usual_s = 0.8 * max(each.answer(60.0).get("took", usual_s) for each in engines)
                continue
            victim.process.send_signal(blow)
            struck = time.monotonic()
            if role == "trainer":
                found = [named_by(each, f"trainer rank {number} of 2", manifest, struck) for each in engines]
            else:
                met = sends(senders, taker)
                other = engines[1 - number].answer(60.0)
                found = [warned(senders, taker, struck, deadline_s + grace_s)] if met else []
                if "error" in other:
                    found = [math.inf]
            if found:
                done += 1
                named += max(found) <= deadline_s + grace_s
                times += found
                print(f"{done}: {blow.name} {role} {number}: {[round(each, 2) for each in found]}", file=sys.stderr)
            if blow is signal.SIGSTOP:
                victim.process.send_signal(signal.SIGCONT)
                if role == "engine":
                    victim.answer(60.0)
                while sends(senders, "process"):  # what was stopped ends with a warning
                    time.sleep(0.02)
            else:
                victim.end()
                victim = ranks[role, number] = Rank(**victim.options)
                victim.answer(300.0)
                if role == "trainer":
                    published[number] = victim.ask(do="publish", version=1)
            for each in ranks.values():
                each.warnings.clear()
    finally:
        for each in ranks.values():
            each.end()
    return named, times


def sends(trainers: list[Rank], taker: str) -> bool:
    """Return whether a trainer rank is sending to an engine's process."""
    return any(taker in name for each in trainers for name in each.ask(do="busy")["names"])


def named_by(engine: Rank, rank: str, manifest: str, struck: float) -> float:
    """Return the seconds after which an engine rank named a trainer rank, in this pull or the next."""
    answer = engine.answer(60.0)
    if "error" not in answer:
        struck = time.monotonic()
        answer = engine.ask(do="pull", manifest=manifest)
    return float(answer["at"]) - struck if rank in answer.get("error", "") else math.inf


def warned(trainers: list[Rank], taker: str, struck: float, within_s: float) -> float:
    """Return the seconds after which a trainer rank named an engine's process."""
    while time.monotonic() < struck + within_s:
        if found := [at for each in trainers for at, text in each.warnings if taker in text and at >= struck]:
            return min(found) - struck
        time.sleep(0.02)
    return math.inf


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
