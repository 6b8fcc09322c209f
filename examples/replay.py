"""Records a run that is far off its policy, and asks what would have corrected it: on the very same samples.

    python examples/replay.py

A small model plays the calculator world asynchronously, up to eight versions behind its trainer. Then the recording is
trained again: first as it was, which must reach the same weights bit for bit, then under other corrections.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from asyncrl import DataProto, Recording
from asyncrl.config import Config
from asyncrl.tasks.run import train

CORRECTIONS = ("none", "tis", "mis", "icepop")


def config_of(runs: Path, *, steps: int, warm_steps: int) -> Config:
    return Config.from_mapping(
        {
            "name": "recorded",
            "steps": steps,
            "max_staleness": 8,
            "runs": str(runs),
            "cluster": {"backend": "local"},
            "model": {
                "source": "scratch",
                "options": {"hidden_size": 64, "intermediate_size": 128, "layers": 2, "heads": 4, "max_position": 128},
            },
            "env": {"name": "calculator", "max_turns": 4, "options": {"max_operand": 49}},
            "sft": {"steps": warm_steps, "batch_size": 16, "lr": 3e-3},
            "rollout": {"max_new_tokens": 16, "max_seq_len": 64},
            "trainer": {"groups_per_step": 4, "group_size": 4, "lr": 1e-3},
            "staleness": {"policy": "correct"},
            "eval": {"tasks": 0},
            "telemetry": {"progress": "none"},
        }
    )


def oldest(step: int, batch: DataProto) -> int:
    """How many versions the oldest token that a step trained on was behind."""
    assert batch.batch is not None
    versions, trained = batch.batch["weight_versions"].values(), batch.batch["loss_mask"].values()
    return int((step - 1 - versions[trained]).max())


def main(*, steps: int = 12, warm_steps: int = 60) -> dict[str, float]:
    """Mean gradient norm of the steps of each replay, by its correction."""
    with tempfile.TemporaryDirectory() as folder:
        summary = train(config_of(Path(folder), steps=steps, warm_steps=warm_steps))
        print(f"recorded {steps} steps; the oldest token was {summary['staleness']['max']} versions old")
        (run,) = Path(folder).glob("recorded-2*")
        with Recording(run) as recording:
            again = recording.replay()
            print(f"replayed: {'the same weights, bit for bit' if again.equal else 'OTHER WEIGHTS'}")
            assert again.equal
            assert max(oldest(step, batch) for step, batch in recording.batches()) == summary["staleness"]["max"]
            norms = {}
            for correction in CORRECTIONS:
                # Without any is known to go wrong, and is refused unless it is asked for by name.
                settings = {"algorithm.correction": correction, "algorithm.allow_unsound": correction == "none"}
                fork = recording.replay(settings)
                norms[correction] = sum(metrics["grad_norm"] for metrics in fork.metrics) / steps
                left = "never" if fork.first_difference is None else f"at step {fork.first_difference}"
                print(f"{correction:7s} mean gradient norm {norms[correction]:.4f}; left the recorded weights {left}")
            return norms


if __name__ == "__main__":
    main()
