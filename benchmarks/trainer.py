"""What a policy update costs on ragged rows, against a plain padded loop of transformers and AdamW.

    python benchmarks/trainer.py [--json] [--model 0.5m|135m] [--rows 128] [--rounds 7] [--threads 1]

Both train the same rows (40..80 tokens, a prompt of 16) with the same objective. The plain loop is what one writes
first: rows in the order they come, padded to the longest of a micro-batch with an attention mask, logits of every
position, log_softmax in float32, gradients accumulated, clipped, AdamW. It computes micro-batches of the same budget of
padded tokens. Loop and engine take turns; figures are medians over the rounds. That both do the same update is checked
before anything is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging

from asyncrl.algorithms import PolicyObjective
from asyncrl.data import DataProto
from asyncrl.data.ragged import rows_of
from engines.training.fsdp_engine import FSDPEngine

PROMPT = 16
MAX_TOKENS = 8192
LR = 1e-3
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
    "135m": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    ),
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

    def __init__(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.adamw = torch.optim.AdamW(self.model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
        self.objective = PolicyObjective()

    def microbatches(self, batch: DataProto) -> list[slice]:
        assert batch.batch is not None
        lengths = batch.batch["input_ids"].offsets().diff().tolist()
        cuts, start, longest = [], 0, 0
        for row, length in enumerate(lengths):
            if (row + 1 - start) * max(longest, length) > MAX_TOKENS:
                cuts.append(slice(start, row))
                start, longest = row, 0
            longest = max(longest, length)
        return [*cuts, slice(start, len(lengths))]

    def forward(self, batch: DataProto) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        assert batch.batch is not None
        columns = {
            name: pad_sequence(rows_of(batch.batch[name]), batch_first=True)
            for name in ("input_ids", "loss_mask", "behaviour_log_probs")
        }
        ids = columns["input_ids"]
        lengths = batch.batch["input_ids"].offsets().diff()
        attended = torch.arange(ids.shape[1]) < lengths[:, None]
        logits = self.model(input_ids=ids, attention_mask=attended.long(), use_cache=False).logits[:, :-1]
        log_p = logits.float().log_softmax(dim=-1)
        with torch.no_grad():
            entropy = -(log_p.exp() * log_p).sum(dim=-1)
        return log_p.gather(-1, ids[:, 1:, None]).squeeze(-1), entropy, columns

    def update(self, batch: DataProto) -> float:
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
                advantages=part.batch["advantages"][:, None].expand_as(current),
                mask=columns["loss_mask"][:, 1:],
                entropy=entropy,
            )
            loss = losses.loss.sum() / tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.adamw.step()
        return total

    @torch.no_grad()
    def log_probs(self, batch: DataProto) -> None:
        for rows in self.microbatches(batch):
            self.forward(batch[rows])


def ragged_rows(count: int, vocabulary: int) -> DataProto:
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(40, 81, (count,), generator=draw).tolist()
    return DataProto.from_dict(
        tensors={
            "input_ids": [torch.randint(0, vocabulary, (length,), generator=draw) for length in lengths],
            "loss_mask": [torch.arange(length) >= PROMPT for length in lengths],
            "behaviour_log_probs": [-6.0 + torch.rand(length, generator=draw) for length in lengths],
            "advantages": torch.randn(count, generator=draw),
        }
    )


def interleaved(left: Callable[[], object], right: Callable[[], object], *, rounds: int) -> tuple[float, float]:
    """Median seconds of both, taking turns."""
    durations: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for call, taken in zip((left, right), durations, strict=True):
            started = time.perf_counter()
            call()
            taken.append(time.perf_counter() - started)
    return statistics.median(durations[0]), statistics.median(durations[1])


def measure(*, model: str, rows: int, rounds: int, threads: int) -> list[Figure]:
    config = MODELS[model]
    batch = ragged_rows(rows, config.vocab_size)
    assert batch.batch is not None
    tokens = len(batch.batch["input_ids"].values())
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        plain = PlainLoop(folder)
        engine = FSDPEngine(
            folder,
            objective=PolicyObjective(),
            lr=LR,
            device="cpu",
            threads=threads,
            max_tokens_per_microbatch=MAX_TOKENS,
        )
        for _ in range(2):
            expected, found = plain.update(batch), engine.update(batch)["loss"]
            if abs(expected - found) > 1e-3 * max(1.0, abs(expected)):
                raise RuntimeError(f"the two do different updates: loss {expected} and {found}")

        engine_s, plain_s = interleaved(lambda: engine.update(batch), lambda: plain.update(batch), rounds=rounds)
        score_s, plain_score_s = interleaved(
            lambda: engine.log_probs(batch), lambda: plain.log_probs(batch), rounds=rounds
        )
        weights = [tensor.detach() for tensor in plain.model.parameters()]
        publish_s, copy_s = interleaved(
            lambda: [tensor.clone() for _, tensor in engine.named_tensors()],
            lambda: [tensor.clone() for tensor in weights],
            rounds=max(rounds, 20),
        )
        engine.close()

    def against(name: str, value: float, unit: str, floor: float, *, at_most: float) -> Figure:
        ratio = value / floor
        return Figure(name, value, unit, floor, ratio, f"ratio <= {at_most}", ratio <= at_most)

    speed = Figure(
        "update_tokens",
        tokens / engine_s,
        "tokens/s",
        tokens / plain_s,
        plain_s / engine_s,
        "ratio >= 1.0",
        engine_s <= plain_s,
    )
    return [
        against(f"update_{rows}_rows", engine_s * 1e3, "ms", plain_s * 1e3, at_most=1.0),
        speed,
        against(f"log_probs_{rows}_rows", score_s * 1e3, "ms", plain_score_s * 1e3, at_most=1.0),
        # Two milliseconds: what walking over the tensors may cost where there is next to nothing to copy.
        against("gather_weights_for_publishing", publish_s * 1e3, "ms", copy_s * 1e3 + 2.0, at_most=1.5),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", choices=sorted(MODELS), default="0.5m")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(arguments.threads)
    figures = measure(model=arguments.model, rows=arguments.rows, rounds=arguments.rounds, threads=arguments.threads)
    machine = {
        "cpus": os.cpu_count(),
        "threads": arguments.threads,
        "model": arguments.model,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if arguments.json:
        json.dump({"machine": machine, "figures": [asdict(figure) for figure in figures]}, sys.stdout, indent=2)
        print()
        return
    for each in figures:
        verdict = "holds" if each.holds else "DOES NOT HOLD"
        print(
            f"{each.name:32s} {each.value:10.1f} {each.unit:9s} plain {each.floor:10.1f}  "
            f"ratio {each.ratio:5.2f}  {each.goal}: {verdict}"
        )


if __name__ == "__main__":
    main()
