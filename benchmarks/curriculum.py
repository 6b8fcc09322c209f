"""The curriculum on the calculator with mixed difficulty: groups without variance, and tokens to the same score.

    python benchmarks/curriculum.py [--json] [--seeds 3] [--steps 60] [--candidates 16] [--warm-steps 800]

A tiny model is asked questions with one to four operations. Its warm start shows conversations that stop before the
last operation, two of three times, so that questions with one operation (more than half) are solved, those with two are
right now and then, and those with more hardly ever. Each seed is trained twice, with the tasks as they are numbered
(the floor) and with a curriculum (``env.candidates``).

* flat_groups_ratio: share of groups whose rows all earn the same reward, with the curriculum over without it;
* tokens_ratio: tokens sampled for training until the held-out score has risen by nine tenths of what it rises in both
  runs (to the smaller mean of their last five evaluations: at the end single answers decide), with the curriculum over
  without it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from serve import Figure, shown

EVERY = 2
LAST, RISE = 5, 0.9
GROUPS, ROWS = 4, 8


def configuration(*, candidates: int, seed: int, steps: int, warm_steps: int, runs: str) -> dict[str, Any]:
    return {
        "name": f"c{candidates}-{seed}",
        "steps": steps,
        "seed": seed,
        "max_staleness": 1,
        "runs": runs,
        "cluster": {"backend": "local"},
        "model": {
            "source": "scratch",
            "options": {
                "architecture": "llama", "hidden_size": 96, "intermediate_size": 256, "layers": 4, "heads": 4,
                "rope_theta": 500.0, "initializer_range": 0.05, "max_position": 256,
            },
        },
        "env": {
            "name": "calculator", "max_turns": 6, "candidates": candidates,
            "options": {
                "max_operand": 49, "operation_shares": [0.55, 0.15, 0.15, 0.15],
                "early_stop_share": 0.65, "misread_share": 0.0, "guess_share": 0.0,
            },
        },
        "sft": {"steps": warm_steps, "batch_size": 32, "lr": 3e-3, "lr_scheduler_type": "linear", "warmup_steps": 1},
        "rollout": {"max_new_tokens": 16, "max_seq_len": 128, "options": {"max_running_requests": 128}},
        "trainer": {"groups_per_step": GROUPS, "group_size": ROWS, "lr": 1e-4},
        "algorithm": {"loss": "dapo", "correction": "tis", "correction_options": {"cap": 5.0}},
        "eval": {"tasks": 256, "every": EVERY},
        "telemetry": {"progress": "none"},
    }  # fmt: skip


def trained(**options: Any) -> list[dict[str, Any]]:
    """Train in a process of its own; return the metrics."""
    program = "import json, sys; from asyncrl.config import Config; from asyncrl.tasks.run import train\n"
    program += "train(Config.from_mapping(json.loads(sys.argv[1])))"
    with tempfile.TemporaryDirectory() as runs:
        given = configuration(**options, runs=runs)
        subprocess.run([sys.executable, "-c", program, json.dumps(given)], check=True, stdout=subprocess.DEVNULL)
        (file,) = Path(runs).glob("*/metrics.jsonl")
        return [json.loads(line) for line in file.read_text().splitlines()]


def curves(metrics: list[dict[str, Any]], *, rows: int) -> tuple[float, list[tuple[float, float]]]:
    """Return the share of groups without variance, and (tokens sampled so far, held-out score)."""
    flat = [line["groups_without_signal"] for line in metrics if "groups_without_signal" in line]
    lengths = {line["step"]: line["length_mean"] for line in metrics if "length_mean" in line}
    scores = {line["step"]: line["eval/success"] for line in metrics if "eval/success" in line}
    curve = [
        (rows * sum(n for at, n in lengths.items() if at <= step), score) for step, score in sorted(scores.items())
    ]
    return mean(flat), curve


def tokens_to(score: float, curve: list[tuple[float, float]]) -> float:
    return next(tokens for tokens, found in curve if found >= score)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--candidates", type=int, default=16)
    parser.add_argument("--warm-steps", type=int, default=800)
    options = parser.parse_args()
    flats, ratios, lines = [], [], []
    for seed in range(options.seeds):
        found = [
            curves(
                trained(candidates=candidates, seed=seed, steps=options.steps, warm_steps=options.warm_steps),
                rows=GROUPS * ROWS,
            )
            for candidates in (0, options.candidates)
        ]
        (flat, curve), (flat_with, curve_with) = found
        first = max(curve[0][1], curve_with[0][1])
        score = first + RISE * (min(mean(each for _, each in some[-LAST:]) for some in (curve, curve_with)) - first)
        learned = score > first  # else there is nothing to compare
        ratios.append(tokens_to(score, curve_with) / tokens_to(score, curve) if learned else 1.0)
        flats.append((flat_with, flat))
        lines.append(f"seed {seed}: flat {flat:.3f} -> {flat_with:.3f}; score {score:.3f}, tokens x {ratios[-1]:.2f}")
        ends = f"{curve[-1][1]:.3f} -> {curve_with[-1][1]:.3f}"
        print(f"{lines[-1]}; first {curve[0][1]:.3f}, last {ends}", file=sys.stderr)
    flat_ratio = mean(each for each, _ in flats) / mean(each for _, each in flats)
    figures = [
        Figure(
            "flat_groups_ratio",
            flat_ratio,
            "",
            mean(each for _, each in flats),
            flat_ratio,
            "<= 0.5",
            flat_ratio <= 0.5,
        ),
        Figure("tokens_ratio", mean(ratios), "", 1.0, mean(ratios), "<= 0.7", mean(ratios) <= 0.7),
    ]
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    if options.json:
        print(json.dumps({"machine": machine, "figures": [asdict(figure) for figure in figures], "seeds": lines}))
    else:
        print(shown(figures))


if __name__ == "__main__":
    main()
