"""Algorithms in whole runs: by name, with what they tell, and with a first step that cannot lie."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config import Config
from asyncrl.data import DataProto
from asyncrl.data.ragged import values_of
from asyncrl.errors import EngineError
from asyncrl.tasks.run import train
from asyncrl.trainer import run as training_run
from asyncrl.trainer.workers import with_staleness

MakeConfig = Callable[..., Config]


def steps_of(config: Config) -> list[dict[str, float]]:
    (run,) = config.runs.glob("small-2*")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "train/loss" in line]


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))


def test_a_run_tells_of_staleness_and_mismatch_by_age(small_config: MakeConfig) -> None:
    config = small_config(steps=4, max_staleness=2, eval={"tasks": 0}, staleness={"policy": "wait"})
    train(config)
    first, *later = steps_of(config)
    assert first["train/share_staleness_0"] == 1.0
    assert first["train/behaviour_kl_staleness_0"] < 1e-9  # engine and trainer are two programs of the same weights
    assert first["train/effective_sample_share"] == pytest.approx(1.0, abs=1e-5)
    assert (first["train/policy_kl"], first["train/ratio"], first["train/clip_fraction"]) == (0.0, 1.0, 0.0)
    last = later[-1]
    old = [name for name in last if name.startswith("train/share_staleness_") and not name.endswith("_0")]
    assert old
    assert sum(value for name, value in last.items() if name.startswith("train/share_staleness_")) == pytest.approx(1.0)
    assert last["train/behaviour_kl"] > 1e-9
    assert 0.0 < last["train/effective_sample_share"] < 1.0


@pytest.mark.parametrize(
    "algorithm",
    [
        {"loss": "gspo", "advantage": "rloo", "correction": "mis", "loss_agg_mode": "sequence_mean"},
        {"loss": "m2po", "advantage": "reinforce_plus_plus", "correction": "none"},
        {"loss": "ppo", "advantage": "opo", "anchor": "interpolated", "correction": "icepop"},
        {"loss": "custom_algorithm:SquaredDistance", "advantage": "custom_algorithm:sign_of_the_median"},
    ],
    ids=lambda algorithm: algorithm["loss"],
)
def test_algorithms_run_by_name(small_config: MakeConfig, algorithm: dict[str, Any]) -> None:
    config = small_config(steps=2, eval={"tasks": 0}, algorithm=algorithm)
    assert train(config)["weight_version"] == 2
    assert all(step["train/grad_norm"] > 0 for step in steps_of(config))


def test_a_trainer_that_computes_something_else_is_found_at_the_first_step(
    small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A temperature that is off by a tenth would spoil every ratio from then on, and nothing else would say so."""
    options = training_run.trainer_options
    monkeypatch.setattr(training_run, "trainer_options", lambda config: options(config) | {"temperature": 1.1})
    with pytest.raises(EngineError, match="disagree about tokens of the very same weights"):
        train(small_config(steps=1, eval={"tasks": 0}))
    train(small_config(steps=1, eval={"tasks": 0}, algorithm={"max_mismatch_kl": 1.0}, name="small-allowed"))


def test_what_is_run_although_it_is_unsound_is_told(
    small_config: MakeConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {"correction": "none", "allow_unsound": True}
    train(small_config(steps=1, eval={"tasks": 0}, algorithm=settings, telemetry={"progress": "plain"}))
    captured = capfd.readouterr()
    assert (
        "unsound, and run as configured: algorithm.correction: tokens may be 1 versions old"
        in captured.out + captured.err
    )


def test_a_divergence_in_the_reward_steers_its_own_coefficient(small_config: MakeConfig) -> None:
    settings = {"kl_placement": "reward", "kl_coef": 0.5, "kl_estimator": "k1"}
    steered = {"target_kl": 1e-9, "kl_horizon": 64.0}
    config = small_config(
        steps=3, max_staleness=0, eval={"tasks": 0}, algorithm={**settings, **steered}, checkpoint={"every": 2}
    )
    train(config)
    first, second, third = steps_of(config)
    assert first["train/reward_kl"] == pytest.approx(0.0, abs=1e-5)  # the reference is where the policy begins
    assert first["train/reward_kl_coefficient"] == 0.5
    assert abs(third["train/reward_kl"]) > 1e-4
    # 8 rows a step and a horizon of 64: an eighth of a fifth, up or (an estimate of few tokens can be negative) down
    changes = [
        later["train/reward_kl_coefficient"] / earlier["train/reward_kl_coefficient"]
        for earlier, later in ((first, second), (second, third))
    ]
    assert all(change in (pytest.approx(1.025), pytest.approx(0.975)) for change in changes)
    assert "train/reference_kl" in third  # told, but no term of the loss
    (run,) = config.runs.glob("small-2*")
    more = config.model_copy(update={"steps": 4})
    train(more, resume=run)
    *_, resumed = steps_of(config)
    assert resumed["step"] == 4
    change = resumed["train/reward_kl_coefficient"] / third["train/reward_kl_coefficient"]
    assert change in (pytest.approx(1.025), pytest.approx(0.975))


def test_staleness_counts_from_the_weights_that_are_trained() -> None:
    rows = DataProto.from_dict(
        tensors={"weight_versions": [torch.tensor([-1, 3, 5], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)]}
    )
    aged = with_staleness(rows, version=5)
    assert aged.batch is not None
    assert values_of(aged.batch["staleness"]).tolist() == [0.0, 2.0, 0.0, 1.0]
    assert values_of(aged.batch["staleness"]).dtype == torch.float32
    without = DataProto.from_dict(tensors={"x": torch.zeros(2)})
    assert with_staleness(without, version=5) is without
