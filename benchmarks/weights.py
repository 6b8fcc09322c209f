"""Publish and pull of one version of the weights through shared memory, against a copy of the same bytes.

    python benchmarks/weights.py [--json] [--size-mb 540] [--rounds 7]

The tensors have the shapes of a 135 M-parameter model in float32 (540 MB), or as many of them as fit into --size-mb.
The floor is one memcpy of every tensor into memory that is mapped already. A memcpy into fresh memory is a second
floor: the first publications, before files are reused. Floors and transport alternate; medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable

import torch

from engines.weights.shared_memory import SharedMemoryTransport


def model(size_bytes: int) -> dict[str, torch.Tensor]:
    shapes: list[tuple[str, tuple[int, ...]]] = [("embed_tokens", (49152, 576))]
    for layer in range(30):
        shapes += [
            (f"layers.{layer}.q_proj", (576, 576)),
            (f"layers.{layer}.k_proj", (192, 576)),
            (f"layers.{layer}.v_proj", (192, 576)),
            (f"layers.{layer}.o_proj", (576, 576)),
            (f"layers.{layer}.gate_proj", (1536, 576)),
            (f"layers.{layer}.up_proj", (1536, 576)),
            (f"layers.{layer}.down_proj", (576, 1536)),
            (f"layers.{layer}.input_layernorm", (576,)),
            (f"layers.{layer}.post_attention_layernorm", (576,)),
        ]
    shapes.append(("norm", (576,)))
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes:
        tensor = torch.empty(shape)
        if tensor.nbytes <= size_bytes:
            tensors[name] = tensor.normal_()
            size_bytes -= tensor.nbytes
    return tensors


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def measure(tensors: dict[str, torch.Tensor], rounds: int) -> dict[str, float]:
    """Median seconds by name."""
    warm = {name: tensor.clone() for name, tensor in tensors.items()}
    target = {name: tensor.clone() for name, tensor in tensors.items()}
    times: dict[str, list[float]] = {}

    def note(name: str, action: Callable[[], object]) -> None:
        times.setdefault(name, []).append(seconds(action))

    def copy(sources: dict[str, torch.Tensor]) -> None:
        for name, tensor in sources.items():
            target[name].copy_(tensor)

    transport = SharedMemoryTransport(namespace=f"benchmark-{os.getpid()}")
    try:
        for version in range(rounds + 2):
            first = version < transport.max_versions
            note("memcpy", lambda: [warm[name].copy_(tensor) for name, tensor in tensors.items()])
            note("memcpy fresh", lambda: [tensor.clone() for tensor in tensors.values()])
            started = time.perf_counter()
            manifest = transport.publish(tensors.items(), version=version)
            times.setdefault("publish first" if first else "publish", []).append(time.perf_counter() - started)
            started = time.perf_counter()
            with transport.pull(manifest) as pulled:
                times.setdefault("pull", []).append(time.perf_counter() - started)
                note("load", lambda: copy(dict(pulled)))
            if version:
                transport.release(version - 1)
        if not all(torch.equal(target[name], tensor) for name, tensor in tensors.items()):
            raise AssertionError("what was pulled is not what was published")
    finally:
        transport.close()
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", action="store_true", help="print one JSON object")
    arguments.add_argument("--size-mb", type=int, default=540, help="megabytes of weights (default 540)")
    arguments.add_argument("--rounds", type=int, default=7)
    options = arguments.parse_args()
    torch.set_num_threads(1)

    tensors = model(options.size_mb * 1_000_000)
    size_bytes = sum(tensor.nbytes for tensor in tensors.values())
    took = measure(tensors, options.rounds)

    figures = []
    took["publish and pull"] = took["publish"] + took["pull"]
    for name, floor, goal in (
        ("publish", "memcpy", 1.5),
        ("publish first", "memcpy fresh", 3.0),
        ("pull", "memcpy", 1.0),
        ("publish and pull", "memcpy", 1.5),
        ("load", "memcpy", 1.5),
    ):
        ratio = took[name] / took[floor]
        figures.append(
            {
                "name": f"{name} (floor: {floor})",
                "value": round(size_bytes / took[name] / 1e9, 3),
                "unit": "GB/s",
                "floor": round(size_bytes / took[floor] / 1e9, 3),
                "ratio": round(ratio, 2),
                "goal": f"time at most {goal:g} x floor",
                "holds": ratio <= goal,
            }
        )
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
    if options.json:
        print(json.dumps({"machine": {**machine, "size_bytes": size_bytes}, "figures": figures}))
        return
    print(f"{size_bytes / 1e6:.0f} MB in {len(tensors)} tensors, {machine}")
    for figure in figures:
        print(
            f"{figure['name']:36s} {figure['value']:8.2f} {figure['unit']}  floor {figure['floor']:8.2f}  "
            f"time x{figure['ratio']:<6} goal: {figure['goal']}: {'holds' if figure['holds'] else 'does not hold'}"
        )


if __name__ == "__main__":
    main()
