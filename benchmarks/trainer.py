"""The cost of a policy update on ragged rows, against a plain padded loop of transformers and AdamW, and against TRL.

    python benchmarks/trainer.py [--json] [--model 25m|0.5m|135m] [--rows 32] [--rounds 3] [--threads 1]
    python benchmarks/trainer.py --device cuda --model 135m --rows 256    # bfloat16; prints MFU too
    python benchmarks/trainer.py --device cuda --shape 135m 1.5b 8b       # large models of random weights
    python benchmarks/trainer.py --device cuda --shape 1.5b --microbatch 16384 --compile --profile kernels.txt
    python benchmarks/trainer.py --trl-python trl/bin/python              # a Python that has TRL, torch, transformers
    python benchmarks/trainer.py --attention                              # ways to attend within packed rows
    python benchmarks/trainer.py --shared                                 # rows that begin with the same prompt
    python benchmarks/trainer.py --loading                                # the memory of ranks that load a model
    python benchmarks/trainer.py --held                                   # memory of frozen weights, and of sleep
    python benchmarks/trainer.py --mesh                                   # what meshes compute, against one rank
    python benchmarks/trainer.py --plan                                   # memory as planned, against that of updates

All train the same rows with the same objective: lengths lognormal with mean 256 (sigma 1), at most 2048, a prompt of 16
tokens. The plain loop is the obvious one: rows in the order they come, padded to the longest of a micro-batch with an
attention mask, logits of every position, log_softmax in float32, gradients accumulated, clipped, AdamW. TRL's
GRPOTrainer computes its own loss on the same micro-batches (``_compute_loss``, without generation), and AdamW steps.
All have the same budget of padded tokens a micro-batch. They alternate; figures are medians over the rounds. That loop
and engine make the same update is checked before the measurement. With one thread on the CPU the time is the process's
own CPU time, so that other programs do not count; otherwise it is wall time.

Peak memory is that of a forward and backward pass from hidden states to log-probs and entropies, 1024 tokens and a
vocabulary of 151,936, in processes of their own: the highest resident size minus that before.

``load_peak_over_model`` is the sum of the highest resident sizes of four ranks that load a model of 135M parameters
(0.5 GB in float32), minus what the same ranks need for one of 0.4M, over the bytes of the large one.

``lora_frozen_bytes`` are those of the weights beside adapters in a model that computes in bfloat16, over float32's.
``offload_equal`` is the share of weights that are bitwise the same after three updates with moments and weights on the
host between them, and without.

``checkpoint_pause_share`` is what a checkpoint costs the training thread, over a step without one: the longest
snapshot in wall time, and the difference between steps beside the write of shards, model and seal and steps without, in
the thread's own CPU time (medians). The memory of snapshots is prepared before, as in a run. ``checkpoint_step`` is the
same with both in wall time: it needs two cores that nothing else uses. ``checkpoint_snapshot`` is the snapshot alone,
beside a copy of as many bytes.

``--shape`` prints one JSON object a line, as soon as it is known: the rate, the MFU and the reserved memory of updates
of models whose weights are drawn on the device, without files. The work is what the model's forward pass needs, times
three (twice with LoRA, where weights need no gradients), without what checkpointing computes again. With ``--compile``
the first update also makes the code. ``--profile`` writes a table of the kernels of one more update, and prints for how
long the device computes in it.

``mesh_max_error`` is the largest difference between what meshes of two and four gloo ranks compute and what one does,
relative to the largest number of what is compared: loss and gradient norm of three updates, and each weight after them.

``plan_memory_error`` is the largest difference between what is planned of ten configurations, from the model's
configuration alone, and what their ranks have: the highest resident size in their second update, minus the size before
the model was loaded, of the rank that has most. Each has made updates of a small model before, so that libraries and
threads do not count; blocks of 64 KiB and more are returned to the system at once (``MALLOC_MMAP_THRESHOLD_``), so that
none that are free do. It includes what no operation of torch shows: what kernels and gloo have for themselves.

``shared_prefix_time`` is an update with a group of 8 rows, a prompt of 512 tokens and answers of 96 to 160, over the
same update without sharing. The model has 16M parameters, a fifth of them its head, as models of 0.1 to 0.5B have.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig
from transformers.utils import logging

from asyncrl.algorithms import PolicyObjective
from asyncrl.data import DataProto
from asyncrl.data.ragged import rows_of
from asyncrl.io import DurableFiles
from engines.training import fsdp_engine, loading
from engines.training.checkpoint import Snapshot
from engines.training.fsdp_engine import FSDPEngine, peak_tflops

PROMPT = 16
MEAN, LONGEST = 256, 2048
LR = 1e-3
PEAK_TOKENS, PEAK_HIDDEN, PEAK_VOCABULARY = 1024, 128, 151_936
MODELS = {
    "0.5m": LlamaConfig(
        vocab_size=512,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "0.9m-experts": Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
    ),
    "25m": LlamaConfig(
        vocab_size=32_000,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "16m": LlamaConfig(
        vocab_size=8_192,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "135m": LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    ),
    "1.5b": LlamaConfig(
        vocab_size=151_936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
    ),
    "8b": LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=32_768,
        tie_word_embeddings=False,
    ),
}


class Shape(NamedTuple):
    """How a model is trained by ``--shape``; ``row_tokens`` None: lognormal lengths, beside the plain loop."""

    rows: int
    microbatches: tuple[int, ...]  # most tokens of each
    row_tokens: int | None = None
    lora: dict[str, Any] | None = None


SHAPES = {
    "0.5m": Shape(rows=8, microbatches=(1024, 2048)),
    "135m": Shape(rows=256, microbatches=(16_384, 65_536)),
    "1.5b": Shape(rows=128, microbatches=(4_096, 8_192, 16_384)),
    "8b": Shape(rows=3, microbatches=(8_192,), row_tokens=8_192, lora={"rank": 16, "alpha": 32.0}),
}


@dataclass
class Figure:
    name: str
    value: float
    unit: str
    floor: float
    ratio: float
    goal: str
    holds: bool


class PlainLoop:
    """The peer."""

    def __init__(self, model: Any, *, device: str, max_tokens: int) -> None:
        self.device = device
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.model = model
        self.adamw = torch.optim.AdamW(self.model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
        self.objective = PolicyObjective()
        self.max_tokens = max_tokens

    def microbatches(self, batch: DataProto) -> list[slice]:
        assert batch.batch is not None
        lengths = batch.batch["input_ids"].offsets().diff().tolist()
        cuts, start, longest = [], 0, 0
        for row, length in enumerate(lengths):
            if row > start and (row + 1 - start) * max(longest, length) > self.max_tokens:
                cuts.append(slice(start, row))
                start, longest = row, 0
            longest = max(longest, length)
        return [*cuts, slice(start, len(lengths))]

    def padding(self, batch: DataProto) -> float:
        """Share of computed cells that hold no token."""
        assert batch.batch is not None
        lengths = batch.batch["input_ids"].offsets().diff().tolist()
        cells = sum(len(lengths[rows]) * max(lengths[rows]) for rows in self.microbatches(batch))
        return 1.0 - sum(lengths) / cells

    def forward(self, batch: DataProto) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        assert batch.batch is not None
        columns = {
            name: pad_sequence(rows_of(batch.batch[name]), batch_first=True).to(self.device)
            for name in ("input_ids", "loss_mask", "behaviour_log_probs")
        }
        ids = columns["input_ids"]
        lengths = batch.batch["input_ids"].offsets().diff()
        attended = (torch.arange(ids.shape[1]) < lengths[:, None]).long().to(self.device)
        with torch.autocast("cuda", dtype=self.dtype, enabled=self.device == "cuda"):
            logits = self.model(input_ids=ids, attention_mask=attended, use_cache=False).logits[:, :-1]
        log_p = logits.float().log_softmax(dim=-1)
        with torch.no_grad():
            entropy = -(log_p.exp() * log_p).sum(dim=-1)
        return log_p.gather(-1, ids[:, 1:, None]).squeeze(-1), entropy, columns

    def update(self, batch: DataProto) -> dict[str, float]:
        assert batch.batch is not None
        tokens = int(batch.batch["loss_mask"].values().sum())
        total = 0.0
        self.adamw.zero_grad()
        for rows in self.microbatches(batch):
            part = batch[rows]
            assert part.batch is not None
            current, entropy, columns = self.forward(part)
            losses = self.objective.token_losses(
                current_log_probs=current,
                proximal_log_probs=current.detach(),
                behaviour_log_probs=columns["behaviour_log_probs"][:, 1:],
                advantages=part.batch["advantages"].to(self.device)[:, None].expand_as(current),
                mask=columns["loss_mask"][:, 1:],
                entropy=entropy,
            )
            loss = losses.loss.sum() / tokens
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.adamw.step()
        return {"loss": total, "grad_norm": float(norm)}

    @torch.no_grad()
    def log_probs(self, batch: DataProto) -> None:
        for rows in self.microbatches(batch):
            self.forward(batch[rows])


class Trl:
    """TRL's trainer in a Python of its own; makes one update per line on stdin, and prints how long that took."""

    def __init__(self, python: str, folder: str, batch: DataProto, cuts: list[slice], *, threads: int) -> None:
        assert batch.batch is not None
        rows = {name: batch.batch[name].values() for name in ("input_ids",)}
        rows |= {"offsets": batch.batch["input_ids"].offsets(), "advantages": batch.batch["advantages"]}
        rows["cuts"] = torch.tensor([rows.stop for rows in cuts])
        save_file({name: tensor.contiguous() for name, tensor in rows.items()}, Path(folder) / "rows.safetensors")
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name("trainer_trl.py")), folder, str(PROMPT), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.version = self._answer("ready")

    def update(self) -> float:
        """Seconds of one update."""
        assert self._process.stdin is not None
        self._process.stdin.write("update\n")
        self._process.stdin.flush()
        return float(self._answer("took"))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self, word: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line.split()[1]
        raise RuntimeError(f"TRL's process ended with {self._process.wait()}; see what it printed above")


def ragged_rows(count: int, vocabulary: int, *, row_tokens: int | None = None) -> DataProto:
    draw = torch.Generator().manual_seed(0)
    drawn = torch.exp(torch.randn(count, generator=draw) + torch.tensor(float(MEAN)).log() - 0.5)
    lengths = drawn.round().clamp(PROMPT + 1, LONGEST).int().tolist() if row_tokens is None else [row_tokens] * count
    return rows_of_lengths(lengths, vocabulary, draw=draw)


def rows_of_lengths(lengths: list[int], vocabulary: int, *, draw: torch.Generator) -> DataProto:
    return DataProto.from_dict(
        tensors={
            "input_ids": [torch.randint(0, vocabulary, (length,), generator=draw) for length in lengths],
            "loss_mask": [torch.arange(length) >= PROMPT for length in lengths],
            "behaviour_log_probs": [-10.0 + torch.rand(length, generator=draw) for length in lengths],
            "advantages": torch.randn(len(lengths), generator=draw),
        }
    )


def interleaved(*calls: Callable[[], object], rounds: int, device: str, threads: int) -> list[float]:
    """Median seconds of each, taking turns. A call that returns a float has measured itself."""
    clock = time.process_time if device == "cpu" and threads == 1 else time.perf_counter
    durations: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, taken in zip(calls, durations, strict=True):
            started = clock()
            measured = call()
            if device == "cuda":
                torch.cuda.synchronize()
            taken.append(measured if isinstance(measured, float) else clock() - started)
    return [statistics.median(each) for each in durations]


def measure(arguments: argparse.Namespace, notes: dict[str, object]) -> list[Figure]:
    config = MODELS[arguments.model]
    batch = ragged_rows(arguments.rows, config.vocab_size)
    assert batch.batch is not None
    lengths = batch.batch["input_ids"].offsets().diff().tolist()
    tokens = sum(lengths)
    turns = {"rounds": arguments.rounds, "device": arguments.device, "threads": arguments.threads}
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(arguments.device)
        plain = PlainLoop(model, device=arguments.device, max_tokens=arguments.max_tokens)
        notes["padding_of_the_plain_loop"] = round(plain.padding(batch), 3)
        engine = FSDPEngine(
            folder,
            objective=PolicyObjective(),
            lr=LR,
            device=arguments.device,
            dtype="bfloat16" if arguments.device == "cuda" else "float32",
            threads=arguments.threads,
            max_tokens_per_microbatch=arguments.max_tokens,
        )
        expected, found = plain.update(batch), engine.update(batch)
        limit = 1e-3 if arguments.device == "cpu" else 2e-2
        for name, least in (("loss", 1.0), ("grad_norm", 0.0)):
            if not abs(expected[name] - found[name]) <= limit * max(least, abs(expected[name])):
                raise RuntimeError(f"the two do different updates: {name} {expected[name]} and {found[name]}")
        calls: list[Callable[[], object]] = [lambda: bool(engine.update(batch)), lambda: bool(plain.update(batch))]
        trl = None
        if arguments.trl_python:
            trl = Trl(arguments.trl_python, folder, batch, plain.microbatches(batch), threads=arguments.threads)
            notes["trl"] = trl.version
            trl.update()
            calls.append(trl.update)
        else:
            notes["trl"] = "skipped: no --trl-python"
        engine_s, plain_s, *trl_s = interleaved(*calls, **turns)
        if trl is not None:
            trl.close()
        score_s, plain_score_s = interleaved(lambda: engine.log_probs(batch), lambda: plain.log_probs(batch), **turns)
        weights = [tensor.detach() for tensor in plain.model.parameters()]
        publish_s, copy_s = interleaved(
            lambda: [tensor.clone() for _, tensor in engine.named_tensors()],
            lambda: [tensor.clone() for tensor in weights],
            **(turns | {"rounds": max(arguments.rounds, 10)}),
        )
        flops = 3 * 2 * sum(engine._cost.of(length, length - PROMPT) for length in lengths)
        engine.close()

    def speed(name: str, seconds: float, peer_s: float, *, at_least: float) -> Figure:
        ratio = peer_s / seconds
        return Figure(
            name, tokens / seconds, "tokens/s", tokens / peer_s, ratio, f"ratio >= {at_least:g}", ratio >= at_least
        )

    figures = [
        speed("update_against_plain_loop", engine_s, plain_s, at_least=2.0),
        *(speed("update_against_trl", engine_s, each, at_least=1.0) for each in trl_s),
        speed("log_probs_against_plain_loop", score_s, plain_score_s, at_least=1.0),
        # Two milliseconds: what walking over the tensors may cost where there is next to nothing to copy.
        _at_most("gather_weights_for_publishing", publish_s * 1e3, "ms", copy_s * 1e3 + 2.0, 1.5),
    ]
    if arguments.device == "cuda":
        figures.append(_mfu("mfu", flops / engine_s))
    return figures


def _mfu(name: str, flops: float, *, at_least: float = 0.0) -> Figure:
    """Work per second, over what the device can do."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peak = peak_tflops(device) or float("nan")
    ratio = flops / 1e12 / peak
    return Figure(name, flops / 1e12, "TFLOP/s", peak, ratio, f"ratio >= {at_least:g}", ratio >= at_least)


def _at_most(name: str, value: float, unit: str, floor: float, bound: float) -> Figure:
    return Figure(name, value, unit, floor, value / floor, f"ratio <= {bound}", value / floor <= bound)


# ------------------------------------------------------------------------------------------------------------- shapes


class DrawnWeights:
    """Stands in for a model's files: every tensor is drawn where it lies."""

    def fuse(self, causal_lm: object) -> bool:
        """Stored as the model has them."""
        return True

    def check(self, shapes: object) -> None:
        """Every name and shape will do."""

    def read(self, targets: Mapping[str, tuple[Tensor, object]]) -> None:
        for memory, _ in targets.values():
            if memory.ndim < 2:
                memory.fill_(1.0)
            else:
                memory.normal_(std=0.02)


@contextmanager
def drawn_weights() -> Iterator[None]:
    """Let engines load folders that have a configuration only; also one rank makes its model without memory then."""
    load = fsdp_engine.load_policy_model
    with (
        mock.patch.object(loading.WeightFiles, "of", return_value=DrawnWeights()),
        mock.patch.object(
            fsdp_engine, "load_policy_model", lambda *given, **named: load(*given, **named | {"sharded": True})
        ),
    ):
        yield


def random_model(config: LlamaConfig, *, device: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def measure_shape(name: str, arguments: argparse.Namespace) -> Iterator[Figure]:
    config, shape, device = MODELS[name], SHAPES[name], arguments.device
    batch = ragged_rows(shape.rows, config.vocab_size, row_tokens=shape.row_tokens)
    assert batch.batch is not None
    lengths = batch.batch["input_ids"].offsets().diff().tolist()
    turns = {"rounds": arguments.rounds, "device": device, "threads": arguments.threads}
    rates: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        microbatches = [each for each in shape.microbatches if arguments.microbatch in (None, each)]
        for max_tokens, checkpointing in [(each, False) for each in microbatches] + [
            (each, True) for each in microbatches if shape.lora
        ]:
            case = f"{name}{' LoRA' if shape.lora else ''}, {max_tokens} tokens{', checkpointing' * checkpointing}"
            case += ", compiled" * arguments.compile
            if device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            begun_s = time.perf_counter()
            try:
                with drawn_weights():
                    engine = FSDPEngine(
                        folder,
                        objective=PolicyObjective(),
                        lr=1e-6,
                        device=device,
                        dtype="bfloat16" if device == "cuda" else "float32",
                        lora=shape.lora,
                        gradient_checkpointing=checkpointing,
                        compile=arguments.compile,
                        threads=arguments.threads,
                        max_tokens_per_microbatch=max_tokens,
                    )
                loaded_s = time.perf_counter() - begun_s
                yield Figure(f"{case}: load", loaded_s, "s", float("nan"), float("nan"), "reported", True)
                engine.update(batch)
                first_s = time.perf_counter() - begun_s - loaded_s
                yield Figure(f"{case}: first update", first_s, "s", float("nan"), float("nan"), "reported", True)
                (update_s,) = interleaved(lambda engine=engine: bool(engine.update(batch)), **turns)
                work = sum(engine._cost.of(length, length - PROMPT) for length in lengths)
                if arguments.profile:
                    busy_s = profile(lambda engine=engine: engine.update(batch), arguments.profile)
                    yield Figure(f"{case}: device busy", busy_s, "s", update_s, busy_s / update_s, "reported", True)
                engine.close()
            except torch.OutOfMemoryError as error:
                yield Figure(f"{case}: does not fit", float("nan"), "", float("nan"), float("nan"), str(error), False)
                continue
            finally:
                engine = None
                gc.collect()
            rates[max_tokens] = sum(lengths) / update_s
            yield Figure(f"{case}: update", rates[max_tokens], "tokens/s", float("nan"), float("nan"), "reported", True)
            flops = (2 if shape.lora else 3) * 2 * work / update_s
            yield _mfu(f"{case}: mfu", flops, at_least=0.35 if name == "1.5b" else 0.0)
            if device == "cuda":
                used, most = torch.cuda.max_memory_reserved() / 1e9, torch.cuda.mem_get_info()[1] / 1e9
                yield _at_most(f"{case}: memory", used, "GB", min(most, 80.0), 1.0)
    if shape.lora or arguments.compile or arguments.profile:
        return
    max_tokens = shape.microbatches[0]
    plain = PlainLoop(random_model(config, device=device), device=device, max_tokens=max_tokens)
    plain.update(batch)
    (plain_s,) = interleaved(lambda: bool(plain.update(batch)), **turns)
    peer = sum(lengths) / plain_s
    for tokens, rate in rates.items():
        what = f"{name}, {tokens} tokens: update against plain loop of {max_tokens}"
        yield Figure(what, rate, "tokens/s", peer, rate / peer, "ratio >= 1", rate >= peer)


def profile(call: Callable[[], object], path: Path) -> float:
    """Append a table of the kernels of one call to a file; return the seconds that they took on the device."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
    found = profiler.key_averages()
    kernels = sorted(found, key=lambda each: -each.self_device_time_total)
    with path.open("a") as file:
        for each in kernels[:120]:
            times = f"{each.self_device_time_total / 1e3:10.2f} ms {each.self_cpu_time_total / 1e3:10.2f} ms on the CPU"
            print(f"{times} {each.count:7d} {each.device_type.name:5s} {each.key[:400]}", file=file)
    return sum(each.self_device_time_total for each in kernels if each.device_type != DeviceType.CPU) / 1e6


# -------------------------------------------------------------------------------------------------------- peak memory


def peak_of_a_pass(way: str) -> int:
    """Bytes that one forward and backward pass adds to this process at most."""
    from engines.training.log_probs import Head, token_log_probs

    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(PEAK_TOKENS, PEAK_HIDDEN, generator=draw).requires_grad_()
    weight = (torch.randn(PEAK_VOCABULARY, PEAK_HIDDEN, generator=draw) * 0.05).requires_grad_()
    targets = torch.randint(0, PEAK_VOCABULARY, (PEAK_TOKENS,), generator=draw)
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest size so far
    before = _status("VmRSS")
    if way == "fused":
        scores = token_log_probs(
            hidden, targets, head=Head(weight), vocabulary=PEAK_VOCABULARY, extras="entropy_gradient"
        )
        (scores.log_probs - 0.01 * scores.entropy).sum().backward()
    else:
        log_p = (hidden @ weight.T).float().log_softmax(dim=-1)
        entropy = -(log_p.exp() * log_p).sum(dim=-1)
        (log_p.gather(-1, targets[:, None]).squeeze(-1) - 0.01 * entropy).sum().backward()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    """Bytes, from the kernel."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc has no {field}")


def measure_memory() -> Figure:
    found: dict[str, int] = {}
    for way in ("fused", "naive"):
        program = subprocess.run(
            [sys.executable, __file__, "--peak", way], capture_output=True, text=True, check=True, env=os.environ
        )
        found[way] = int(program.stdout.split()[-1])
    return _at_most("peak_memory_of_log_probs", found["fused"] / 2**20, "MiB", found["naive"] / 2**20, 0.35)


# ---------------------------------------------------------------------------------------------------- shared prefixes


def group_of_rows(vocabulary: int) -> DataProto:
    draw = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, vocabulary, (512,), generator=draw)
    answers = torch.randint(96, 161, (8,), generator=draw).tolist()
    rows = [torch.cat([prompt, torch.randint(0, vocabulary, (length,), generator=draw)]) for length in answers]
    return DataProto.from_dict(
        tensors={
            "input_ids": rows,
            "loss_mask": [torch.arange(len(row)) >= len(prompt) for row in rows],
            "behaviour_log_probs": [-9.0 + torch.rand(len(row), generator=draw) for row in rows],
            "advantages": torch.randn(len(rows), generator=draw),
        }
    )


def measure_shared(arguments: argparse.Namespace) -> list[Figure]:
    batch = group_of_rows(MODELS["16m"].vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(MODELS["16m"]).save_pretrained(folder)
        engines = [
            FSDPEngine(
                folder,
                objective=PolicyObjective(),
                lr=LR,
                device="cpu",
                threads=arguments.threads,
                max_tokens_per_microbatch=arguments.max_tokens,
            )
            for _ in range(2)
        ]
    shared, apart = engines
    apart._passes._cost = None  # by which the engine decides what to share
    found, expected = shared.update(batch), apart.update(batch)
    if abs(found["grad_norm"] - expected["grad_norm"]) > 1e-4 * expected["grad_norm"]:
        raise RuntimeError(f"the two do different updates: {found} and {expected}")
    figures: list[Figure] = []
    for name, calls in (
        ("shared_prefix_time", [lambda each=each: bool(each.update(batch)) for each in engines]),
        ("shared_prefix_log_probs", [lambda each=each: bool(each.log_probs(batch)) for each in engines]),
    ):
        shared_s, apart_s = interleaved(*calls, rounds=arguments.rounds, device="cpu", threads=arguments.threads)
        figures.append(_at_most(name, shared_s, "s", apart_s, 0.4))
    for each in engines:
        each.close()
    return figures


# ------------------------------------------------------------------------------------------------------------ loading

LOADING_RANKS = 4


def peak_of_a_rank(folder: str, rank: int, port: int) -> int:
    """Bytes resident at most in a process that has loaded its shards of a model."""
    engine = FSDPEngine(
        folder,
        objective=PolicyObjective(),
        lr=LR,
        rank=rank,
        world_size=LOADING_RANKS,
        master_port=port,
        device="cpu",
    )
    peak = _status("VmHWM")
    engine.close()
    return peak


def _run_ranks(ranks: int, arguments: Callable[[int, int], list[str]], **variables: str) -> list[str]:
    """What processes of this program print that are given ``arguments(rank, port)``, and ``variables`` for all."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    programs = [
        subprocess.Popen(
            [sys.executable, __file__, *arguments(rank, port)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables},
        )
        for rank in range(ranks)
    ]
    printed = [program.communicate()[0] for program in programs]
    if any(program.returncode for program in programs):
        raise RuntimeError("a rank failed; see what it printed above")
    return printed


def measure_loading() -> Figure:
    peaks: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for model in ("0.5m", "135m"):
        with tempfile.TemporaryDirectory() as folder:
            whole = AutoModelForCausalLM.from_config(MODELS[model])
            sizes[model] = sum(each.nbytes for each in whole.parameters())
            whole.save_pretrained(folder)
            del whole
            printed = _run_ranks(
                LOADING_RANKS, lambda rank, port, folder=folder: ["--load", folder, str(rank), str(port)]
            )
            peaks[model] = sum(int(each.split()[-1]) for each in printed)
    return _at_most("load_peak_over_model", (peaks["135m"] - peaks["0.5m"]) / 2**20, "MiB", sizes["135m"] / 2**20, 1.3)


# --------------------------------------------------------------------------------------------------------------- held


def measure_held(arguments: argparse.Namespace) -> list[Figure]:
    """Bytes of weights that are not trained, and whether weights and moments survive the host."""
    config = MODELS[arguments.model]
    batch, frozen, weights = group_of_rows(config.vocab_size), {}, {}
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)

        def engine(**options: Any) -> FSDPEngine:
            return FSDPEngine(folder, objective=PolicyObjective(), lr=LR, device="cpu", **options)

        for dtype in ("float32", "bfloat16"):
            for base in ("float", "int8"):
                made = engine(dtype=dtype, lora={"rank": 16, "alpha": 32.0, "base": base})
                size = sum(each.nbytes for each in made._model.parameters() if not each.requires_grad)
                frozen[dtype if base == "float" else base] = size
                made.close()
        for sleeps in (False, True):
            made = engine()
            for _ in range(3):
                made.update(batch)
                if sleeps:
                    made.sleep()
                    made.wake()
            weights[sleeps] = {name: tensor.clone() for name, tensor in made.named_tensors()}
            made.close()
    equal = sum(torch.equal(tensor, weights[True][name]) for name, tensor in weights[False].items())
    share = equal / len(weights[False])
    return [
        _at_most("lora_frozen_bytes", frozen["bfloat16"] / 2**20, "MiB", frozen["float32"] / 2**20, 0.5),
        _at_most("lora_frozen_bytes_int8", frozen["int8"] / 2**20, "MiB", frozen["float32"] / 2**20, 0.3),
        Figure("offload_equal", equal, "tensors", len(weights[False]), share, "ratio = 1", share == 1.0),
    ]


# --------------------------------------------------------------------------------------------------------------- plan


class Planned(NamedTuple):
    """A configuration whose memory is planned."""

    family: type[Any]
    ranks: int = 1
    mesh: dict[str, int] | None = None
    options: Mapping[str, Any] = MappingProxyType({})
    sleeps: bool = False


PLANNED = [
    Planned(LlamaConfig),
    Planned(Qwen3Config, options={"dtype": "bfloat16"}),
    Planned(LlamaConfig, options={"gradient_checkpointing": True}),
    Planned(Qwen3Config, options={"dtype": "bfloat16", "lora": {"rank": 16, "alpha": 32.0}}),
    Planned(LlamaConfig, options={"lora": {"rank": 16, "alpha": 32.0}, "gradient_checkpointing": True}),
    Planned(LlamaConfig, ranks=2, mesh={"dp_shard": 2}),
    Planned(Qwen3Config, ranks=2, mesh={"dp_shard": 2}, options={"dtype": "bfloat16", "gradient_checkpointing": True}),
    Planned(LlamaConfig, ranks=2, mesh={"tp": 2}),
    Planned(Qwen3Config, ranks=2, mesh={"tp": 2}, options={"gradient_checkpointing": True}),
    Planned(LlamaConfig, sleeps=True),
]
PLANNED_TOKENS, PLANNED_ROW = 1024, 32


def planned_model(family: type[Any], **sizes: int) -> Any:
    sizes = {"vocab_size": 16_384, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 5} | sizes
    return family(num_attention_heads=8, num_key_value_heads=4, head_dim=64, tie_word_embeddings=False, **sizes)


def planned_rows(ranks: int, vocabulary: int) -> DataProto:
    """Rows of about :data:`PLANNED_ROW` tokens, for two micro-batches on each of the ranks, and some more."""
    draw = torch.Generator().manual_seed(3)
    count = 9 * PLANNED_TOKENS // (4 * PLANNED_ROW) * ranks
    lengths = torch.randint(PLANNED_ROW // 2, PLANNED_ROW * 3 // 2, (count,), generator=draw).tolist()
    return rows_of_lengths(lengths, vocabulary, draw=draw)


def held_by_a_rank(folder: str, number: int, rank: int, port: int) -> None:
    """Print bytes that a rank has in its second update, and on the host while it sleeps."""
    planned, held = PLANNED[number], {}
    for name in ("small", "large"):
        model = f"{folder}/{name}"
        gc.collect()
        before = _status("VmRSS")
        engine = FSDPEngine(
            model,
            objective=PolicyObjective(),
            lr=LR,
            rank=rank,
            world_size=planned.ranks,
            master_port=port,
            device="cpu",
            mesh=planned.mesh,
            max_tokens_per_microbatch=PLANNED_TOKENS,
            threads=1,
            **planned.options,
        )
        batch = planned_rows(planned.ranks, engine._model.vocabulary)
        size, data_rank = engine._ranks.data_size, engine._ranks.data_rank
        mine = batch[len(batch) * data_rank // size : len(batch) * (data_rank + 1) // size]
        engine.update(mine[:2])
        Path("/proc/self/clear_refs").write_text("5")  # the highest size is that from here on
        engine.update(mine)
        held = {"peak": _status("VmHWM") - before}
        if planned.sleeps:
            engine.sleep()
            held["host"] = sum(size for _, size in engine._offload._freed)
            engine.wake()
        engine.close()
        del engine
    print(json.dumps(held))


def measure_plans(notes: dict[str, object]) -> list[Figure]:
    figures: list[Figure] = []
    small = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2}
    for number, planned in enumerate(PLANNED):
        with tempfile.TemporaryDirectory() as folder:
            for name, sizes in (("large", {}), ("small", small)):
                torch.manual_seed(0)
                model = AutoModelForCausalLM.from_config(planned_model(planned.family, **sizes))
                model.save_pretrained(f"{folder}/{name}")
            batch = planned_rows(planned.ranks, model.config.vocab_size).batch
            assert batch is not None
            plan = FSDPEngine.plan_memory(
                f"{folder}/large",
                row_tokens=PLANNED_ROW,
                scored=float(batch["loss_mask"].values().double().mean()),
                objective=PolicyObjective(),
                world_size=planned.ranks,
                mesh=planned.mesh,
                max_tokens_per_microbatch=PLANNED_TOKENS,
                **planned.options,
            )
            printed = _run_ranks(
                planned.ranks,
                lambda rank, port, number=number, folder=folder: ["--planned", folder, *map(str, (number, rank, port))],
                MALLOC_MMAP_THRESHOLD_="65536",
            )
        held = [json.loads(each.splitlines()[-1]) for each in printed]
        name = " ".join([planned.family.model_type, *map(str, filter(None, (planned.mesh, planned.options)))])
        notes[name] = ", ".join(f"{key} {size / 2**20:.1f}" for key, size in asdict(plan).items() if key != "shape")
        for key, size in {"peak": plan.total, "host": plan.host}.items():
            if found := max(each.get(key, 0) for each in held):
                error = abs(size / found - 1)
                figures.append(
                    Figure(f"{key}: {name}", size / 2**20, "MiB", found / 2**20, error, "<= 0.1", error <= 0.1)
                )
                print(figures[-1], file=sys.stderr, flush=True)
    error = max(each.ratio for each in figures)
    return [*figures, Figure("plan_memory_error", error, "relative", 0.1, error / 0.1, "<= 0.1", error <= 0.1)]


# ------------------------------------------------------------------------------------------------------------- saving


def measure_saving(arguments: argparse.Namespace, notes: dict[str, object]) -> list[Figure]:
    """Steps beside the write of a checkpoint and without, in turns."""
    config, files = MODELS[arguments.model], DurableFiles()
    batch = group_of_rows(config.vocab_size)
    steps: list[Spent] = []
    beside: list[Spent] = []
    snapshots: list[Spent] = []
    writes_s: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        model, saved = Path(folder, "model"), Path(folder, "saved")
        AutoModelForCausalLM.from_config(config).save_pretrained(model)
        engine = FSDPEngine(str(model), objective=PolicyObjective(), lr=LR, device="cpu", threads=arguments.threads)

        def write(snapshot: Snapshot) -> None:
            begun = time.perf_counter()
            files.make_folder(saved / "trainer")
            written = snapshot.write(saved / "trainer")
            snapshot.export(saved / "trainer", saved / "model")
            files.seal(saved, known={f"trainer/{name}": entry for name, entry in written.items()})
            writes_s.append(time.perf_counter() - begun)

        notes["prepared"] = _seconds([Spent.by(engine.prepare_snapshots)])  # as a run does before its first step
        engine.update(batch)
        for _ in range(max(arguments.rounds, 3)):
            steps.append(Spent.by(lambda: engine.update(batch)))
            held: list[Snapshot] = []
            snapshots.append(Spent.by(lambda held=held: held.append(engine.snapshot())))
            writing = threading.Thread(target=write, args=held)
            writing.start()
            beside.append(Spent.by(lambda: engine.update(batch)))
            writing.join()
        shards = list(engine.snapshot().shards.values())
        copies_s: list[float] = []
        into = [torch.empty_like(each) for each in shards]
        for _ in range(5):
            begun = time.perf_counter()
            for mine, shard in zip(into, shards, strict=True):
                mine.copy_(shard)
            copies_s.append(time.perf_counter() - begun)
        engine.close()
    step_s, wall_s = (statistics.median(each) for each in zip(*steps, strict=True))
    beside_s, beside_wall_s = zip(*beside, strict=True)
    snapshot_s = [each.wall_s for each in snapshots]
    notes["checkpoint"] = f"{sum(each.nbytes for each in shards) / 2**20:.0f} MiB, written in {max(writes_s):.2f} s"
    notes["steps"] = f"without {_seconds(steps)}; beside a write {_seconds(beside)}; snapshots {_seconds(snapshots)}"
    pause_s = max(snapshot_s) + statistics.median(beside_s) - step_s
    wall_pause_s = max(snapshot_s) + statistics.median(beside_wall_s) - wall_s
    return [
        _at_most("checkpoint_pause_share", pause_s * 1e3, "ms", step_s * 1e3, 0.05),
        _at_most("checkpoint_step", wall_pause_s * 1e3, "ms", wall_s * 1e3, 0.05),
        _at_most(
            "checkpoint_snapshot", statistics.median(snapshot_s) * 1e3, "ms", statistics.median(copies_s) * 1e3, 1.5
        ),
    ]


def _seconds(spent: list[Spent]) -> str:
    return ", ".join(f"{each.cpu_s:.2f} ({each.wall_s:.2f} by the clock)" for each in spent)


class Spent(NamedTuple):
    """Time that a call took: the thread's own on a CPU, and that of the clock."""

    cpu_s: float
    wall_s: float

    @staticmethod
    def by(call: Callable[[], object]) -> Spent:
        cpu, wall = time.thread_time(), time.perf_counter()
        call()
        return Spent(time.thread_time() - cpu, time.perf_counter() - wall)


# ------------------------------------------------------------------------------------------------------------- meshes

MESHES: dict[int, list[dict[str, int]]] = {
    2: [{"dp_shard": 2}, {"dp_replicate": 2}, {"cp": 2}, {"tp": 2}, {"dp_shard": 2, "ep": 2}, {"pp": 2}],
    4: [
        {"dp_replicate": 2, "dp_shard": 2},
        {"dp_shard": 2, "cp": 2},
        {"dp_shard": 2, "tp": 2},
        {"dp_replicate": 2, "tp": 2},
        {"cp": 2, "tp": 2},
        {"dp_shard": 4, "ep": 4},
        {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
        {"dp_shard": 2, "cp": 2, "ep": 2},
        {"pp": 4},
        {"pp": 2, "dp_shard": 2},
        {"pp": 2, "tp": 2},
        {"pp": 2, "cp": 2},
        {"pp": 2, "dp_shard": 2, "ep": 2},
    ],
}


def model_of(mesh: dict[str, int]) -> str:
    return "0.9m-experts" if "ep" in mesh else "0.5m-untied" if "pp" in mesh else "0.5m"


def train_on_mesh(
    folder: str, mesh: dict[str, int] | None, *, rank: int = 0, port: int | None = None, ranks: int = 1
) -> dict[str, Tensor]:
    """Weights after three updates, and the loss and gradient norm of each."""
    engine = FSDPEngine(
        folder,
        objective=PolicyObjective(entropy_coef=0.01),
        lr=LR,
        eps=1e-3,  # a small one magnifies the rounding of gradients that are nearly 0
        device="cpu",
        mesh=mesh,
        rank=rank,
        world_size=ranks,
        master_port=port,
        max_tokens_per_microbatch=2048,
    )
    batch = ragged_rows(16, engine._model.vocabulary)
    size, data_rank = engine._ranks.data_size, engine._ranks.data_rank
    mine = batch[len(batch) * data_rank // size : len(batch) * (data_rank + 1) // size]
    made = [engine.update(mine) for _ in range(3)]
    found = {name: tensor.clone().contiguous() for name, tensor in engine.named_tensors()}
    found |= {name: torch.tensor([each[name] for each in made]) for name in ("loss", "grad_norm")}
    engine.close()
    return found


def train_on_meshes(folder: str, ranks: int, rank: int, port: int) -> None:
    for number, mesh in enumerate(MESHES[ranks]):
        found = train_on_mesh(f"{folder}/{model_of(mesh)}", mesh, rank=rank, port=port, ranks=ranks)
        if rank == 0:
            save_file(found, Path(folder) / f"mesh-{ranks}-{number}.safetensors")


def measure_meshes() -> list[Figure]:
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        expected: dict[str, dict[str, Tensor]] = {}
        for name in ("0.5m", "0.5m-untied", "0.9m-experts"):
            torch.manual_seed(0)
            config = copy.deepcopy(MODELS[name.removesuffix("-untied")])
            config.tie_word_embeddings = name == "0.5m"
            AutoModelForCausalLM.from_config(config).save_pretrained(f"{folder}/{name}")
            expected[name] = train_on_mesh(f"{folder}/{name}", None)
        for ranks, meshes in MESHES.items():
            _run_ranks(ranks, lambda rank, port, ranks=ranks: ["--train", folder, str(ranks), str(rank), str(port)])
            for number, mesh in enumerate(meshes):
                found = load_file(Path(folder) / f"mesh-{ranks}-{number}.safetensors")
                one = expected[model_of(mesh)]
                errors = [(found[name] - its).abs().max() / its.abs().max() for name, its in one.items()]
                error = float(torch.stack(errors).max())  # NaN if one of them is
                name = "mesh_error_" + "_".join(f"{dimension}_{size}" for dimension, size in mesh.items())
                figures.append(Figure(name, error, "relative", 1e-5, error / 1e-5, "<= 1e-5", error <= 1e-5))
    worst = float(torch.tensor([each.value for each in figures]).max())
    return [*figures, Figure("mesh_max_error", worst, "relative", 1e-5, worst / 1e-5, "<= 1e-5", worst <= 1e-5)]


# ---------------------------------------------------------------------------------------------------------- attention


def measure_attention(rounds: int) -> list[Figure]:
    """Forward and backward of one layer's attention over a stream; the value is ours, the floor another way."""
    from types import SimpleNamespace
    from typing import cast

    from engines.training.packed_attention import RowLayout, packed_attention

    draw = torch.Generator().manual_seed(0)
    short = torch.randint(24, 61, (96,), generator=draw).tolist()
    batch = ragged_rows(8, 100).batch
    assert batch is not None
    figures: list[Figure] = []
    for case, found, heads, kv_heads, size in (
        ("short_rows", short, 4, 4, 24),
        ("lognormal_rows", batch["input_ids"].offsets().diff().tolist(), 6, 2, 64),
    ):
        lengths = sorted(found, reverse=True)
        total = sum(lengths)
        leaves = [
            torch.randn(1, total, each, size, generator=draw).transpose(1, 2).requires_grad_()
            for each in (heads, kv_heads, kv_heads)
        ]
        layer = cast(Any, SimpleNamespace())
        equal = [(lengths.count(length), length) for length in sorted(set(lengths), reverse=True)]
        alone = [(1, length) for length in lengths]
        row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        mask = (row[:, None] == row[None, :]).tril()

        def packed(
            shapes: list[tuple[int, int]], layer: Any = layer, leaves: list[Tensor] = leaves
        ) -> tuple[Tensor, ...]:
            rows = RowLayout.of(shapes, device=torch.device("cpu"))
            attended, _ = packed_attention(layer, *leaves, asyncrl_rows=rows)
            return torch.autograd.grad(attended.sum(), leaves)

        def block_diagonal(mask: Tensor = mask, leaves: list[Tensor] = leaves) -> tuple[Tensor, ...]:
            attended = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True)
            return torch.autograd.grad(attended.sum(), leaves)

        def padded(lengths: list[int] = lengths, leaves: list[Tensor] = leaves) -> tuple[Tensor, ...]:
            pieces = [
                pad_sequence([part[0].transpose(0, 1) for part in each.split(lengths, dim=2)], batch_first=True)
                for each in leaves
            ]
            q, k, v = (each.transpose(1, 2) for each in pieces)
            attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return torch.autograd.grad(attended.sum(), leaves)

        ways: list[Callable[[], object]] = [
            lambda shapes=equal: packed(shapes),  # type: ignore[misc]
            lambda shapes=alone: packed(shapes),  # type: ignore[misc]
            block_diagonal,
            padded,
        ]
        for way in ways:
            way()
        ours, *others = interleaved(*ways, rounds=rounds, device="cpu", threads=1)
        for name, other in zip(("one_call_a_row", "block_diagonal_mask", "all_padded"), others, strict=True):
            figures.append(_at_most(f"{case}_against_{name}", ours * 1e3, "ms", other * 1e3, 1.1))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", choices=sorted(MODELS), default="25m")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=4096, help="padded tokens of a micro-batch")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", choices=sorted(SHAPES), nargs="+", help="models of random weights, and nothing else")
    parser.add_argument("--microbatch", type=int, help="of --shape: the most tokens of the only one that is measured")
    parser.add_argument("--compile", action="store_true", help="of --shape: torch.compile, without the plain loop")
    parser.add_argument("--profile", type=Path, help="of --shape: a file for the kernels, without the plain loop")
    parser.add_argument("--trl-python", help="interpreter of an environment with TRL")
    parser.add_argument("--attention", action="store_true", help="compare ways of attention, and nothing else")
    parser.add_argument("--shared", action="store_true", help="rows that begin with the same prompt, and nothing else")
    parser.add_argument("--loading", action="store_true", help="memory of ranks that load a model, and nothing else")
    parser.add_argument("--held", action="store_true", help="memory of weights, and nothing else")
    parser.add_argument("--saving", action="store_true", help="steps beside a checkpoint's write, and nothing else")
    parser.add_argument("--mesh", action="store_true", help="what meshes compute, and nothing else")
    parser.add_argument("--plan", action="store_true", help="memory as planned and as needed, and nothing else")
    parser.add_argument("--planned", nargs=4, metavar=("FOLDER", "NUMBER", "RANK", "PORT"), help=argparse.SUPPRESS)
    parser.add_argument("--train", nargs=4, metavar=("FOLDER", "RANKS", "RANK", "PORT"), help=argparse.SUPPRESS)
    parser.add_argument("--load", nargs=3, metavar=("FOLDER", "RANK", "PORT"), help=argparse.SUPPRESS)
    parser.add_argument("--peak", choices=["fused", "naive"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(arguments.threads)
    if arguments.peak:
        print(peak_of_a_pass(arguments.peak))
        return
    if arguments.load:
        folder, rank, port = arguments.load
        print(peak_of_a_rank(folder, int(rank), int(port)))
        return
    if arguments.planned:
        folder, *numbers = arguments.planned
        held_by_a_rank(folder, *map(int, numbers))
        return
    if arguments.train:
        folder, *numbers = arguments.train
        train_on_meshes(folder, *map(int, numbers))
        return
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing was measured", file=sys.stderr)
        return
    if arguments.shape:
        device = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
        for figure in (each for name in arguments.shape for each in measure_shape(name, arguments)):
            known = {key: None if value != value else value for key, value in asdict(figure).items()}  # NaN: none
            print(json.dumps({"device": device, "torch": torch.__version__, **known}), flush=True)
        return
    notes: dict[str, object] = {}
    if arguments.attention:
        figures = measure_attention(max(arguments.rounds, 5))
    elif arguments.shared:
        figures = measure_shared(arguments)
    elif arguments.loading:
        figures = [measure_loading()]
    elif arguments.held:
        figures = measure_held(arguments)
    elif arguments.saving:
        figures = measure_saving(arguments, notes)
    elif arguments.plan:
        figures = measure_plans(notes)
    elif arguments.mesh:
        figures = measure_meshes()
    else:
        figures = [*measure(arguments, notes), measure_memory(), *measure_shared(arguments), measure_loading()]
        figures += [*measure_held(arguments), *measure_saving(arguments, notes), *measure_meshes()]
    machine = {
        "cpus": os.cpu_count(),
        "threads": arguments.threads,
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "model": arguments.model,
        "rows": arguments.rows,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **notes,
    }
    if arguments.json:
        json.dump({"machine": machine, "figures": [asdict(figure) for figure in figures]}, sys.stdout, indent=2)
        print()
        return
    for name, value in notes.items():
        print(f"{name}: {value}")
    for each in figures:
        verdict = "holds" if each.holds else "DOES NOT HOLD"
        print(
            f"{each.name:40s} {each.value:10.4g} {each.unit:9s} peer {each.floor:10.4g}  "
            f"ratio {each.ratio:5.2f}  {each.goal}: {verdict}"
        )


if __name__ == "__main__":
    main()
