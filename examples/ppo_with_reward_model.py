"""PPO with a critic and a reward model of one's own: supervised start, comparisons, reward model, reinforcement.

    python examples/ppo_with_reward_model.py [--steps 30]

A model of 0.1 million random weights imitates demonstrations that mostly stop early. A second one, begun from the
first, learns from 1,200 comparisons that computing to the end is better. Then PPO maximises its
score. The printed share of right answers to 128 held-out questions is not trained on: in one run 0.148 before,
0.648 after.

Every stage is also a command: asyncrl sft FILE.toml, asyncrl train-reward-model FILE.toml, asyncrl train FILE.toml.
"""

import argparse
import copy
import itertools
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from asyncrl.config import Config, RewardTrainingConfig
from asyncrl.envs.calculator import CalculatorFactory
from asyncrl.tasks.run import sft, train, train_reward_model

DIGITS: dict[str, Any] = {"min_operand": 1, "max_operand": 9}
LOCAL: dict[str, Any] = {"backend": "local"}
QUIET: dict[str, Any] = {"progress": "none"}
SIZE = {"hidden_size": 64, "layers": 2, "intermediate_size": 192, "vocab_size": 320, "max_position": 128}


def write_comparisons(path: Path, count: int) -> None:
    """Questions with two answers each: one is right; the other is a slip, or stops early, misreads or guesses."""
    patient = CalculatorFactory(**DIGITS, guess_share=0.0, early_stop_share=0.0, misread_share=0.0)
    hasty = CalculatorFactory(**DIGITS, guess_share=0.3, early_stop_share=0.9, misread_share=0.3)
    draw = random.Random(0)
    pairs = 0
    with path.open("w") as file:
        for number in itertools.count():
            chosen = patient.demonstration(number)
            rejected = slipped(chosen, draw) if number % 2 else hasty.demonstration(number)
            if chosen != rejected:
                file.write(json.dumps({"chosen": chosen, "rejected": rejected}) + "\n")
                pairs += 1
            if pairs == count:
                return


def slipped(conversation: list[Any], draw: random.Random) -> list[Any]:
    """The same with a number miscopied, into a call or into the answer.

    Without such pairs a reward model learns to count calls, and the policy to call with any numbers.
    """
    other = copy.deepcopy(conversation)
    place = draw.choice([index for index, message in enumerate(other) if message["role"] == "assistant"])
    if not other[place].get("tool_calls"):
        other[place]["content"] = str(draw.randint(0, 18))
        return other
    call = other[place]["tool_calls"][0]["function"]["arguments"]
    call[draw.choice("ab")] = draw.randint(0, 18)
    result = call["a"] + call["b"] if call["operator"] == "+" else call["a"] - call["b"]
    other[place + 1]["content"] = str(result)
    return [*other[: place + 2], {"role": "assistant", "content": str(result)}]


def main(*, steps: int = 30, warm_steps: int = 200, comparisons: int = 1200) -> dict[str, Any]:
    """Returns how well the reward model knows pairs it has not seen, and the right answers before and after."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        world = {"name": "calculator", "max_turns": 4, "options": DIGITS}
        policy: dict[str, Any] = {
            "name": "policy",
            "steps": steps,
            "runs": str(folder),
            "cluster": LOCAL,
            "telemetry": QUIET,
            "env": world,
            "rollout": {"max_new_tokens": 24, "max_seq_len": 96, "options": {"max_running_requests": 64}},
        }
        start = sft(
            Config.from_mapping(
                {
                    **policy,
                    "model": {"source": "scratch", "options": SIZE},
                    "sft": {"steps": warm_steps, "batch_size": 32, "lr": 3e-3},
                }
            )
        )
        write_comparisons(folder / "comparisons.jsonl", comparisons)
        judge = train_reward_model(
            RewardTrainingConfig.from_mapping(
                {
                    "name": "reward-model",
                    "runs": str(folder),
                    "cluster": LOCAL,
                    "telemetry": QUIET,
                    "model": {"path": start["model"]},
                    "preferences": {"files": str(folder / "comparisons.jsonl")},
                    "trainer": {"lr": 1e-3},
                }
            )
        )
        print(f"the reward model is right about {judge['held_out_accuracy']:.3f} of pairs it has not seen")
        summary = train(
            Config.from_mapping(
                {
                    **policy,
                    "model": {"path": start["model"]},
                    "algorithm": {"advantage": "gae", "loss": "ppo", "whiten_advantages": True, "kl_coef": 0.05},
                    "trainer": {"groups_per_step": 64, "group_size": 1, "lr": 5e-4},
                    "critic": {"path": judge["model"], "lr": 3e-3, "num_mini_batches": 2},
                    "reward": {"source": "model", "options": {"path": judge["model"]}},
                    "eval": {"tasks": 128, "reward": "environment"},
                }
            )
        )
        print(f"right answers: {summary['success_before']:.3f} before, {summary['success_after']:.3f} after")
        return {
            "judge": judge["held_out_accuracy"],
            **{each: summary[f"success_{each}"] for each in ("before", "after")},
        }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    main(**vars(parser.parse_args()))
