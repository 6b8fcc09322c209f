"""What four versions of staleness do to learning: corrected losses, plain PPO as it is, and the synchronous loop.

    python benchmarks/staleness_learning.py [--json] [--seeds 10] [--steps 50] [--jobs 2] [--cases sync,decoupled,naive]
    python benchmarks/staleness_learning.py --clip 0.02 --max-staleness 8 --steps 30 --latency-s 0  # narrow region

The calculator environment with harder settings: batches of 64 rollouts are trained on four versions after they were
issued, in four optimizer steps each, with a latency in every step of the environment; tokens that are sampled after new
weights arrive are less stale. One seed is one process on one core. Success is that of 128 held-out tasks, greedy, with
the last weights.

Plain PPO (anchor = "behaviour", no correction) is refused at this staleness; here it runs with allow_unsound = true.
The floor is the warm start alone. Each case is compared with the synchronous loop with the same numbers.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Any

GOAL_SUCCESS, GOAL_SEEDS = 0.9, 0.9

CASES: dict[str, dict[str, Any]] = {
    "sync": {"max_staleness": 0, "algorithm": {"loss": "ppo", "correction": "none"}},
    "decoupled": {"max_staleness": 4, "algorithm": {"loss": "ppo", "correction": "tis"}},
    "interpolated": {"max_staleness": 4, "algorithm": {"loss": "ppo", "anchor": "interpolated", "correction": "tis"}},
    "m2po": {"max_staleness": 4, "algorithm": {"loss": "m2po", "correction": "none"}},
    "uncorrected": {
        "max_staleness": 4,
        "algorithm": {"loss": "ppo", "correction": "none", "allow_unsound": True},
    },
    "naive": {
        "max_staleness": 4,
        "algorithm": {"loss": "ppo", "anchor": "behaviour", "correction": "none", "allow_unsound": True},
    },
}
"""What is compared; ``decoupled`` has the trust region around the weights of the step, and a truncated weight."""


def configuration(
    case: str,
    *,
    seed: int,
    steps: int,
    latency_s: float,
    lr: float,
    clip: float | None,
    max_staleness: int,
    runs: str,
) -> dict[str, Any]:
    """One run."""
    algorithm = dict(CASES[case]["algorithm"])
    if clip is not None and algorithm["loss"] == "ppo":
        algorithm["loss_options"] = {"clip_ratio_low": clip, "clip_ratio_high": clip}
    return {
        "name": f"{case}-{seed}",
        "seed": seed,
        "steps": steps,
        "runs": runs,
        "cluster": {"backend": "local"},
        "model": {
            "source": "scratch",
            "options": {
                "hidden_size": 64,
                "layers": 2,
                "intermediate_size": 192,
                "vocab_size": 320,
                "max_position": 128,
            },
        },
        "env": {
            "name": "calculator",
            "max_turns": 4,
            "latency_s": latency_s,
            "options": {"min_operand": 1, "max_operand": 9},
        },
        "sft": {"steps": 400, "batch_size": 32, "lr": 3e-3},
        "rollout": {"max_new_tokens": 24, "max_seq_len": 96, "options": {"max_running_requests": 512}},
        "trainer": {
            "groups_per_step": 8,
            "group_size": 8,
            "num_mini_batches": 4,
            "lr": lr,
            "lr_scheduler_type": "linear",
        },
        "staleness": {"policy": "wait"},
        "eval": {"tasks": 128},
        "telemetry": {"progress": "none"},
        "algorithm": algorithm,
        "max_staleness": max_staleness if CASES[case]["max_staleness"] else 0,
    }


def run(case: str, seed: int, **settings: Any) -> dict[str, Any]:
    """Train once; what the summary says of it. ``settings`` are those of :func:`configuration`."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from asyncrl.config import Config
    from asyncrl.tasks.run import train

    with tempfile.TemporaryDirectory() as folder:
        config = configuration(case, seed=seed, runs=folder, **settings)
        summary = train(Config.from_mapping(config))
        (path,) = Path(folder).glob("*/metrics.jsonl")
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    rewards = [line["reward_mean"] for line in lines if "reward_mean" in line]
    histogram = {int(age): tokens for age, tokens in summary["staleness"]["histogram"].items()}
    return {
        "case": case,
        "seed": seed,
        "before": summary["success_before"],
        "after": summary["success_after"],
        "best_reward": max(rewards),
        "last_reward": mean(rewards[-5:]),
        "train_s": summary["phases_s"]["train"],
        "staleness": sum(age * tokens for age, tokens in histogram.items()) / sum(histogram.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=100, help="seeds that no setting was chosen on")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--latency-s", type=float, default=0.05)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--clip", type=float, help="of PPO, to both sides; 0.2 if left out")
    parser.add_argument("--max-staleness", type=int, default=4, help="of all but the synchronous loop")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--cases", default=",".join(CASES))
    given = parser.parse_args()
    cases = given.cases.split(",")
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    work = [(case, seed) for seed in seeds for case in cases]
    settings = {name: getattr(given, name) for name in ("steps", "latency_s", "lr", "clip", "max_staleness")}
    with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        results = []
        for result in pool.map(functools.partial(run, **settings), *zip(*work, strict=True)):
            results.append(result)
            if not given.json:
                told = "  ".join(
                    f"{name} {value:.3f}" if isinstance(value, float) else str(value) for name, value in result.items()
                )
                print(told, flush=True)
    figures = [figure for case in cases for figure in _figures(case, results)]
    if given.json:
        machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        print(json.dumps({"machine": machine, "figures": figures, "runs": results}, indent=2))
        return
    for figure in figures:
        goal = "" if figure["goal"] is None else f"  goal {figure['goal']}: {'holds' if figure['holds'] else 'FAILS'}"
        print(f"{figure['name']:<40} {figure['value']:>8.3f} {figure['unit']}{goal}")


def _figures(case: str, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    mine = [result for result in results if result["case"] == case]
    after = [result["after"] for result in mine]
    floor = mean(result["before"] for result in mine)
    solved = sum(success >= GOAL_SUCCESS for success in after) / len(after)
    spread = stdev(after) if len(after) > 1 else 0.0
    asked = case not in {"naive", "uncorrected"}

    def figure(name: str, value: float, unit: str, *, goal: str | None = None, holds: bool = True) -> dict[str, Any]:
        ratio = value / floor if unit == "success" and floor else None
        return {
            "name": f"{case}: {name}",
            "value": value,
            "unit": unit,
            "floor": floor if unit == "success" else None,
            "ratio": ratio,
            "goal": goal,
            "holds": holds,
        }

    goal = f">= {GOAL_SEEDS:g} of seeds reach {GOAL_SUCCESS:g}" if asked else None
    return [
        figure("held-out success", mean(after), "success"),
        figure("its spread over seeds", spread, "standard deviation"),
        figure("sampled reward at the end", mean(result["last_reward"] for result in mine), "mean of 5 steps"),
        figure("seeds that reach it", solved, "share", goal=goal, holds=solved >= GOAL_SEEDS),
        figure("mean staleness trained", mean(result["staleness"] for result in mine), "versions"),
        figure("time of training", mean(result["train_s"] for result in mine), "s"),
    ]


if __name__ == "__main__":
    main()
