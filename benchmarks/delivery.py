"""Plants faults on the way of weights from trainer to engine; counts those that are named before a token is trained on.

    python benchmarks/delivery.py [--each 20] [--clean 2000] [--only TEXT] [--json]
    python benchmarks/delivery.py --engine vllm --python .venv-vllm/bin/python [--each 2]

Trainer, transport and rollout worker are the real ones, with a small model that takes a real optimizer step for every
version, so that two versions differ as little as they do in training. Each fault is planted for one version: in what
the trainer publishes, in the published bytes, or in the engine. It is named where prepare or commit of that version
ends with an error whose text says what is wrong. Rollouts are in flight at each commit, and begun after it: tokens of
the version that they hand on count as trained. The next version is clean, and must be served. ``false_alarms`` counts
clean versions that were refused, in float32 and in bfloat16.

The cost: ``proof_ms`` is the time that the proof takes of an idle engine with the shape of SmolLM2-135M in bfloat16,
``proof_share_of_step`` what engine and trainer need for it in the quickstart, over a step of it.

With --engine the faults of publisher and transport alone are planted, and nothing else is measured: an engine in a
process of its own cannot be changed from here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import platform
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import torch

from asyncrl.config import Config
from asyncrl.data.ragged import values_of
from asyncrl.errors import AsyncRLError
from asyncrl.plugins import make_part
from asyncrl.rollout.live_weights import commit_into
from asyncrl.rollout.replica import fetch_into
from asyncrl.rollout.trajectory import prompt_rows
from asyncrl.rollout.worker import RolloutWorker
from asyncrl.trainer.assembly import make_environments, proof_spec, rollout_spec, trainer_options
from asyncrl.trainer.workers import TrainerSpec, TrainerWorker
from asyncrl.weights import Canary, TransportSpec, WeightManifest, rounding_error

ROOT = Path(__file__).parents[1]
Tensors = dict[str, torch.Tensor]


def configuration(dtype: str, *, rollout: Mapping[str, Any] | None = None, **options: Any) -> Config:
    return Config.from_mapping(
        {
            "name": "delivery",
            "steps": 1_000_000,
            "model": {
                "source": "scratch",
                "dtype": dtype,
                "options": {"hidden_size": 32, "intermediate_size": 64, "layers": 3, "heads": 4, "max_position": 128}
                | options,
            },
            "env": {"name": "calculator", "max_turns": 1},
            "rollout": {"max_new_tokens": 8, "max_seq_len": 96, **(rollout or {"options": {"device": "cpu"}})},
            "trainer": {"groups_per_step": 1, "group_size": 4, "lr": 1e-4},
        }
    )


class World:
    """A trainer and a rollout worker, and the version that both hold."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config, self.folder = config, folder / "model"
        environments = make_environments(config)
        assert config.model.source is not None
        make_part(
            "asyncrl.model_sources",
            config.model.source,
            self.folder,
            options=config.model.options,
            path="model.source",
            seed=0,
            demonstrations=environments.demonstration,
        )
        memory = folder / "memory"
        memory.mkdir()
        self.memory = memory
        transport = TransportSpec(name="shared_memory", namespace="delivery", options={"directory": str(memory)})
        self.trainer = TrainerWorker(TrainerSpec(engine="fsdp", transport=transport, proof=proof_spec(config)))
        self.worker = RolloutWorker(rollout_spec(config, transport, None))
        self.version = 0
        self.base: Tensors = {}
        self.tokens = 0
        """Of the last version, as rollouts handed them on."""
        self.cached: tuple[float, ...] = ()
        """What the engine gave last for the canary that may be answered from a cache."""
        self._tasks = [environments.task(index, split="train") for index in range(4)]
        self._rows: Any = None

    async def start(self) -> None:
        self.trainer.build(str(self.folder), trainer_options(self.config))
        await self.worker.start(str(self.folder), 0)
        generate = self.engine.generate

        async def recorded(request: Any) -> Any:
            async for chunk in generate(request):
                if request.request_id.endswith("-cached"):
                    self.cached = chunk.log_probs
                yield chunk

        self.engine.generate = recorded
        self._rows = await self.rollout()
        self.base = {name: tensor.clone() for name, tensor in self.engine_of_trainer.named_tensors()}

    @property
    def engine_of_trainer(self) -> Any:
        return self.trainer._held()

    @property
    def engine(self) -> Any:
        return self.worker._engine

    @property
    def weights(self) -> Any:
        return self.engine._running().weights

    def file(self, manifest: WeightManifest) -> Path:
        return self.memory / manifest.location

    async def rollout(self) -> Any:
        seeds = [random.getrandbits(30) for _ in self._tasks]
        return await self.worker.rollout(prompt_rows(self._tasks, group_id=0, seeds=seeds, purpose="eval"))

    async def deliver(self, change: Callable[[WeightManifest], WeightManifest] = lambda manifest: manifest) -> float:
        """Train a step, publish its weights, and bring them into the engine while rollouts are in flight.

        Return the error of the canary, over its tolerance.
        """
        advantages = torch.randn(len(self._rows))
        self.trainer.update(self._rows.with_columns(advantages=advantages))
        self.version += 1
        self.tokens = 0
        try:
            manifest = self.trainer.publish(self.version)
            assert manifest is not None
            manifest = change(manifest)
            flying = asyncio.create_task(self.rollout())
            await asyncio.sleep(0)
            error: AsyncRLError | None = None
            canary = 0.0
            try:
                await self.worker.prepare_weights(manifest)
                canary = (await self.worker.commit_weights(self.version)).canary
            except AsyncRLError as raised:
                error = raised
            for rows in (flying, self.rollout()):
                with contextlib.suppress(AsyncRLError):
                    versions = values_of((await rows).batch["weight_versions"])
                    self.tokens += int((versions == self.version).sum())
            if error is not None:
                raise error
            return canary
        finally:
            await self.trainer.release(self.version - 1)

    async def close(self) -> None:
        await self.worker.aclose()
        self.trainer.close()


# -------------------------------------------------------------------------------------------------------------- faults

Plant = Callable[[World, random.Random], contextlib.AbstractContextManager[Any]]


@dataclasses.dataclass(frozen=True)
class Fault:
    what: str
    named: str  # what an error has to say
    plant: Plant


def published(change: Callable[[Tensors, World, random.Random], Any]) -> Plant:
    """The trainer publishes other tensors than it trains."""

    @contextmanager
    def plant(world: World, dice: random.Random) -> Iterator[None]:
        true = world.engine_of_trainer.named_tensors

        def wrong() -> Iterator[tuple[str, torch.Tensor]]:
            tensors = {name: tensor.detach().clone() for name, tensor in true()}
            change(tensors, world, dice)
            yield from tensors.items()

        with patch.object(world.engine_of_trainer, "named_tensors", wrong):
            yield

    return plant


def swapped(change: Callable[[Any, Tensors, random.Random], Any], *, before: bool = False) -> Plant:
    """The engine's swap does something else; ``change`` gets its weights and the tensors that served before."""

    @contextmanager
    def plant(world: World, dice: random.Random) -> Iterator[None]:
        weights, true = world.weights, world.weights.swap

        def wrong(version: int) -> None:
            old = {name: live.data.clone() for name, live in weights._tensors.live.items()}
            if before:
                change(weights, old, dice)
            true(version)
            if not before:
                change(weights, old, dice)

        with patch.object(weights, "swap", wrong):
            yield

    return plant


def manifested(change: Callable[[WeightManifest, World, random.Random], WeightManifest]) -> Plant:
    """Something is done to the version between its publication and the engine."""

    @contextmanager
    def plant(world: World, dice: random.Random) -> Iterator[Callable[[WeightManifest], WeightManifest]]:
        yield lambda manifest: change(manifest, world, dice)

    return plant


def matrices(tensors: Mapping[str, torch.Tensor], *, square: bool = False) -> list[str]:
    """Matrices of the layers; with ``square`` those that can be transposed."""
    layers = [name for name, each in tensors.items() if each.dim() == 2 and "layers." in name]
    return [name for name in layers if not square or tensors[name].shape[0] == tensors[name].shape[1]]


def replace_live(weights: Any, name: str, tensor: torch.Tensor) -> None:
    weights._tensors.live[name].data = tensor.clone()


def rename(tensors: Tensors, _world: World, dice: random.Random) -> None:
    name = dice.choice(list(tensors))
    tensors[f"other.{name}"] = tensors.pop(name)


def other_shape(tensors: Tensors, _world: World, dice: random.Random) -> None:
    name = dice.choice([name for name in matrices(tensors) if tensors[name].shape[0] != tensors[name].shape[1]])
    tensors[name] = tensors[name].T.contiguous()


def integers(tensors: Tensors, _world: World, dice: random.Random) -> None:
    name = dice.choice(list(tensors))
    tensors[name] = tensors[name].to(torch.int32)


def another_model(tensors: Tensors, _world: World, _dice: random.Random) -> None:
    for name, tensor in tensors.items():
        tensors[name] = torch.cat([tensor, tensor])


def transposed(tensors: Tensors, _world: World, dice: random.Random) -> None:
    name = dice.choice(matrices(tensors, square=True))
    tensors[name] = tensors[name].T.contiguous()


def lost_scale(tensors: Tensors, _world: World, dice: random.Random) -> None:
    name = dice.choice(matrices(tensors))
    tensors[name] = tensors[name] / tensors[name].abs().max() * 127


def layers_swapped(tensors: Tensors, _world: World, dice: random.Random) -> None:
    one, other = dice.sample(range(3), 2)
    for name in [name for name in tensors if f"layers.{one}." in name]:
        twin = name.replace(f"layers.{one}.", f"layers.{other}.")
        tensors[name], tensors[twin] = tensors[twin], tensors[name]


def no_norm(tensors: Tensors, _world: World, dice: random.Random) -> None:
    name = dice.choice([name for name in tensors if "norm" in name])
    tensors[name] = torch.zeros_like(tensors[name])


def not_a_number(tensors: Tensors, _world: World, dice: random.Random) -> None:
    name = dice.choice(matrices(tensors))
    tensors[name].view(-1)[dice.randrange(tensors[name].numel())] = float("nan")


def not_merged(tensors: Tensors, world: World, _dice: random.Random) -> None:
    for name in matrices(tensors):
        tensors[name] = world.base[name].clone()


def heads_permuted(tensors: Tensors, _world: World, dice: random.Random) -> None:
    name = dice.choice([name for name in tensors if "o_proj" in name])
    tensors[name] = tensors[name].roll(8, dims=1)


def the_version_before(world: World, dice: random.Random) -> contextlib.AbstractContextManager[Any]:
    before = {name: tensor.clone() for name, tensor in world.engine_of_trainer.named_tensors()}
    return published(lambda tensors, *_: tensors.update(before))(world, dice)


def torn(manifest: WeightManifest, world: World, dice: random.Random) -> WeightManifest:
    entry = dice.choice(manifest.tensors)
    with world.file(manifest).open("r+b") as file:
        file.seek(entry.offset + dice.randrange(entry.size_bytes))
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1 << dice.randrange(8)]))
    return manifest


def half_of_a_shard(manifest: WeightManifest, world: World, dice: random.Random) -> WeightManifest:
    entry = dice.choice([each for each in manifest.tensors if len(each.shape) == 2])
    with world.file(manifest).open("r+b") as file:
        file.seek(entry.offset + entry.size_bytes // 2)
        file.write(bytes(entry.size_bytes - entry.size_bytes // 2))
    return manifest


def cut(manifest: WeightManifest, world: World, dice: random.Random) -> WeightManifest:
    path = world.file(manifest)
    os.truncate(path, path.stat().st_size - 64 * dice.randrange(1, 9))
    return manifest


def foreign(manifest: WeightManifest, _world: World, _dice: random.Random) -> WeightManifest:
    return msgspec.structs.replace(manifest, location=manifest.location.replace("delivery", "another"))


def relabelled(manifest: WeightManifest, _world: World, _dice: random.Random) -> WeightManifest:
    return msgspec.structs.replace(manifest, version=manifest.version - 2)


def number_alone(weights: Any, _old: Tensors, _dice: random.Random) -> None:
    weights._shadow.tensors.clear()


def one_tensor_kept(weights: Any, old: Tensors, dice: random.Random) -> None:
    changed = [name for name, live in weights._tensors.live.items() if not torch.equal(live, old[name])]
    name = dice.choice(changed)
    replace_live(weights, name, old[name])


def half_of_a_tensor_kept(weights: Any, old: Tensors, dice: random.Random) -> None:
    name = dice.choice(matrices(old))
    half = len(old[name]) // 2
    replace_live(weights, name, torch.cat([old[name][:half], weights._tensors.live[name][half:]]))


def live_layers_swapped(weights: Any, _old: Tensors, dice: random.Random) -> None:
    live = {name: each.data.clone() for name, each in weights._tensors.live.items()}
    layers_swapped(live, None, dice)  # type: ignore[arg-type]
    for name, tensor in live.items():
        replace_live(weights, name, tensor)


def one_element(weights: Any, _old: Tensors, dice: random.Random) -> None:
    name = dice.choice(list(weights._tensors.live))
    changed = weights._tensors.live[name].data.clone()
    at = dice.randrange(changed.numel())
    changed.view(-1)[at] = changed.view(-1)[at] * 1.5 + 1e-3
    replace_live(weights, name, changed)


def cast_down(weights: Any, _old: Tensors, _dice: random.Random) -> None:
    for name in matrices(weights._tensors.live):
        replace_live(weights, name, weights._tensors.live[name].data.to(torch.bfloat16).to(torch.float32))


@contextmanager
def untied_head(world: World, _dice: random.Random) -> Iterator[None]:
    """The head is a copy of the embedding before, as a packed one is."""
    model = world.engine._running().decoder.model
    tied = model.lm_head.weight
    model.lm_head.weight = torch.nn.Parameter(world.base["model.embed_tokens.weight"].clone(), requires_grad=False)
    try:
        yield
    finally:
        model.lm_head.weight = tied


@contextmanager
def stale_cache(world: World, _dice: random.Random) -> Iterator[None]:
    """A prompt that was read under an earlier version is answered from its keys and values."""
    true, kept = world.engine.generate, world.cached

    async def wrong(request: Any) -> Any:
        async for chunk in true(request):
            cached = request.request_id.endswith("-cached")
            yield msgspec.structs.replace(chunk, log_probs=kept) if cached else chunk

    with patch.object(world.engine, "generate", wrong):
        yield


@contextmanager
def computed_wrongly(world: World, dice: random.Random) -> Iterator[None]:
    """The engine has the tensors, and its kernel of one matrix loses a scale."""
    model = world.engine._running().decoder.model
    modules = [each for name, each in model.named_modules() if name.endswith("_proj")]
    handle = dice.choice(modules).register_forward_hook(lambda _module, _given, output: output * 0.5)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def old_stamps(world: World, _dice: random.Random) -> Iterator[None]:
    """Tokens are stamped with the version before."""
    generation = world.engine._running()
    true = generation._append

    def wrong(rows: Any, sampled: Any, logits: Any, version: int) -> None:
        true(rows, sampled, logits, version - 1)

    with patch.object(generation, "_append", wrong):
        yield


OTHER, UNKNOWN = r"differ from the trainer's by", r"do not fit the model"
LIVE, BYTES = r"but its tensor .* has checksum", r"differ from their checksum"
FAULTS = (
    Fault("publisher: the manifest of another model", r"has shape", published(another_model)),
    Fault("publisher: a tensor has another dtype", r"has dtype", published(integers)),
    Fault(
        "publisher: a tensor is missing",
        UNKNOWN,
        published(lambda tensors, _, dice: tensors.pop(dice.choice(list(tensors)))),
    ),
    Fault("publisher: a tensor has another name", UNKNOWN, published(rename)),
    Fault("publisher: a tensor has another shape", r"has shape", published(other_shape)),
    Fault("publisher: a fused matrix is transposed", OTHER, published(transposed)),
    Fault("publisher: the scale of a matrix is lost", OTHER, published(lost_scale)),
    Fault("publisher: the weights of the version before", OTHER, the_version_before),
    Fault("publisher: adapters are not merged", OTHER, published(not_merged)),
    Fault("publisher: two layers are swapped", OTHER, published(layers_swapped)),
    Fault("publisher: a norm is missing", OTHER, published(no_norm)),
    Fault("publisher: a matrix has a NaN", r"not finite|" + OTHER, published(not_a_number)),
    Fault("publisher: attention heads in another order", OTHER, published(heads_permuted)),
    Fault("transport: a bit is flipped", BYTES, manifested(torn)),
    Fault("transport: half of a shard is missing", BYTES, manifested(half_of_a_shard)),
    Fault("transport: the file is cut", r"the block has", manifested(cut)),
    Fault("transport: the version of another run", r"not in the shared memory of", manifested(foreign)),
    Fault(
        "transport: an older version's number", r"or not the manifest's|does not follow version", manifested(relabelled)
    ),
    Fault("engine: the commit is skipped", LIVE, swapped(number_alone, before=True)),
    Fault("engine: one tensor keeps the version before", LIVE, swapped(one_tensor_kept)),
    Fault("engine: half of a tensor keeps the version before", LIVE, swapped(half_of_a_tensor_kept)),
    Fault("engine: two layers are swapped", LIVE, swapped(live_layers_swapped)),
    Fault("engine: one element is overwritten", LIVE, swapped(one_element)),
    Fault("engine: weights are rounded to bfloat16", LIVE, swapped(cast_down)),
    Fault("engine: the tied head is not updated", OTHER, untied_head),
    Fault("engine: keys and values of older weights are used", r"keys and values of older weights", stale_cache),
    Fault("engine: a kernel loses a scale", OTHER, computed_wrongly),
    Fault("engine: tokens are stamped with the version before", r"was sampled under", old_stamps),
)


async def plant_all(
    config: Config, faults: list[Fault], each: int, folder: Path, *, say: Callable[[str], None]
) -> dict[str, Any]:
    world = World(config, folder)
    await world.start()
    dice, named, tokens, wrong = random.Random(7), 0, 0, []
    try:
        for _ in range(3):
            await world.deliver()
        for fault in faults:
            hits = 0
            for _ in range(each):
                text = "nothing was said"
                try:
                    with fault.plant(world, dice) as change:
                        await world.deliver(*([change] if change is not None else []))
                except AsyncRLError as error:
                    text = str(error)
                tokens += world.tokens
                if re.search(fault.named, text):
                    hits += 1
                else:
                    wrong.append(f"{fault.what}: {text[:200]}")
                await world.deliver()  # heals it, or raises
            named += hits
            say(f"{fault.what}: named {hits} of {each}")
    finally:
        await world.close()
    return {"named": named, "planted": each * len(faults), "tokens": tokens, "missed": wrong}


async def clean(versions: int, dtype: str, folder: Path, **options: Any) -> tuple[int, float]:
    """False alarms over clean versions, and the largest error of a canary over its tolerance."""
    world = World(configuration(dtype, **options), folder)
    await world.start()
    alarms, largest = 0, 0.0
    try:
        for _ in range(versions):
            try:
                largest = max(largest, await world.deliver())
            except AsyncRLError as error:
                alarms += 1
                print(f"false alarm in {dtype}: {error}", file=sys.stderr)
    finally:
        await world.close()
    return alarms, largest


# ---------------------------------------------------------------------------------------------------------------- cost


async def proof_times(folder: Path, dtype: str, versions: int) -> dict[str, float]:
    """Median milliseconds of the proof on an idle engine with SmolLM2-135M's shape, and of its two parts."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from engines.rollout.transformers.engine import TransformersEngine
    from engines.weights.shared_memory import SharedMemoryTransport

    shape = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    model: Any = AutoModelForCausalLM.from_config(shape, dtype=getattr(torch, dtype)).eval()
    model.save_pretrained(folder)
    token_ids = tuple(range(100, 120))
    with torch.inference_mode():
        log_probs = model(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)
    known = log_probs[:-1].gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()
    canary = Canary(token_ids=token_ids, log_probs=tuple(known), tolerance=8 * rounding_error(211, dtype))
    engine = TransformersEngine(str(folder), dtype=dtype, device="cpu", threads=1, max_model_tokens=256)
    transport = SharedMemoryTransport(namespace=f"delivery-{os.getpid()}")
    times: dict[str, list[float]] = {"proof": [], "fingerprint": [], "canary": []}
    await engine.start()
    try:
        asked = {"proof": (1 << 40, canary), "fingerprint": (1 << 40, None), "canary": (0, canary)}
        for version in range(1, 3 * versions + 1):
            part = list(asked)[version % 3]
            manifest = transport.publish(model.named_parameters(), version=version)
            checked_bytes, given = asked[part]
            manifest = msgspec.structs.replace(manifest, checked_bytes=checked_bytes, canary=given)
            await fetch_into(engine, manifest, transport=transport)
            proof = await commit_into(engine, version, kv_cache="keep", manifest=manifest)
            times[part].append(1e3 * proof.seconds)
            transport.release(version - 1)
    finally:
        await engine.close()
        transport.close()
    return {part: statistics.median(values) for part, values in times.items()}


def quickstart_share(folder: Path, steps: int) -> tuple[float, float]:
    """Seconds of the proof in engine and trainer per step of the quickstart, and seconds of the step; medians."""
    from asyncrl.config import load_config
    from asyncrl.tasks.run import train

    spent: list[float] = []
    true = TrainerWorker._canary_log_probs

    def timed(self: TrainerWorker) -> Any:
        begun = time.perf_counter()
        found = true(self)
        spent.append(time.perf_counter() - begun)
        return found

    tables = load_config(ROOT / "examples" / "calculator.toml").model_dump(exclude_none=True)
    config = Config.from_mapping(
        {
            "name": "quickstart",
            "steps": steps,
            "runs": str(folder),
            **{name: tables[name] for name in ("model", "env", "rollout", "trainer", "algorithm", "max_staleness")},
            "sft": tables["sft"] | {"steps": 200},
            "cluster": {"backend": "local"},
            "eval": {"tasks": 0},
            "telemetry": {"progress": "none"},
        }
    )
    with patch.object(TrainerWorker, "_canary_log_probs", timed):
        train(config)
    (run,) = folder.glob("quickstart-2*")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    proofs = [line["weights_proof_s"] for line in lines if line.get("weights_proofs")]
    ends = [line["time_s"] for line in lines if "reward_mean" in line]
    step_s = statistics.median(later - earlier for earlier, later in itertools.pairwise(ends))
    return statistics.median(proofs) + statistics.median(spent), step_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=20, help="how often each fault is planted")
    parser.add_argument("--clean", type=int, default=2000, help="clean versions")
    parser.add_argument("--only", default="", help="faults whose description contains this; measures nothing else")
    parser.add_argument("--engine", default="transformers", help="rollout engine")
    parser.add_argument("--python", help="interpreter of the engine's environment")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    torch.set_num_threads(1)

    def say(line: str) -> None:
        if not given.json:
            print(line, flush=True)

    figures: list[dict[str, Any]] = []

    def figure(name: str, value: float, unit: str, goal: str, holds: bool) -> None:
        figures.append({"name": name, "value": value, "unit": unit, "goal": goal, "holds": holds})
        say(f"{name}: {value:g} {unit}; goal: {goal}: {'holds' if holds else 'does not hold'}")

    with contextlib.ExitStack() as stack:

        def folder() -> Path:
            return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="delivery-")))

        chosen = [fault for fault in FAULTS if given.only in fault.what]
        config = configuration("float32")
        if given.engine != "transformers":
            chosen = [fault for fault in chosen if not fault.what.startswith("engine")]
            rollout = {"engine": given.engine, "python": given.python, "options": ENGINE_OPTIONS[given.engine]}
            config = configuration("float32", rollout=rollout, hidden_size=256, intermediate_size=512)
        found = asyncio.run(plant_all(config, chosen, given.each, folder(), say=say))
        for missed in found["missed"]:
            say(f"NOT NAMED: {missed}")
        share = found["named"] / found["planted"]
        figure("faults_named", share, f"of {found['planted']} of {len(chosen)} kinds", "1", share == 1)
        figure("unproven_tokens_trained", found["tokens"], "tokens", "0", found["tokens"] == 0)
        if not given.only and given.engine == "transformers":
            alarms, largest = 0, 0.0
            for dtype, options in (("float32", {}), ("bfloat16", {}), ("float32", LARGER), ("bfloat16", LARGER)):
                more, error = asyncio.run(clean(given.clean // 4, dtype, folder(), **options))
                say(f"clean, {dtype}, {options or 'small'}: the largest error is {error:.3g} of the tolerance")
                alarms, largest = alarms + more, max(largest, error)
            figure("false_alarms", alarms, f"of {given.clean} versions", "0", alarms == 0)
            figure("largest_canary", round(largest, 4), "of the tolerance", "below 1", largest < 1)
            for dtype in ("bfloat16", "float32"):
                took = asyncio.run(proof_times(folder(), dtype, 7))
                say(f"{dtype}: " + ", ".join(f"{part} {milliseconds:.1f} ms" for part, milliseconds in took.items()))
                if dtype == "bfloat16":
                    figure("proof_ms", round(took["proof"], 1), "ms", "at most 20", took["proof"] <= 20)
            spent_s, step_s = quickstart_share(folder(), steps=12)
            share = spent_s / step_s
            figure("proof_share_of_step", round(share, 5), f"of a step of {step_s:.2f} s", "0.01", share <= 0.01)
    if given.json:
        machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        print(json.dumps({"machine": machine, "figures": figures}))


ENGINE_OPTIONS = {"vllm": {"kv_cache_bytes": 64 << 20}, "sglang": {"device": "cpu", "kv_cache_tokens": 4096}}
LARGER = {"architecture": "qwen3", "hidden_size": 96, "intermediate_size": 256, "layers": 8, "heads": 4}

if __name__ == "__main__":
    main()
