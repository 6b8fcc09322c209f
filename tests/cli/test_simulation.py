"""``asyncrl simulate`` and ``asyncrl plan``: what they print is what the simulation gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.cli.main import main

PLAN = """
name = "planned"
steps = 12
max_staleness = 1

[model]
source = "scratch"

[env]
name = "calculator"

[trainer]
groups_per_step = 4
group_size = 2

[simulation]
tokens = "100"
token_s = 0.1
saturation = 8
update_s = "5"
"""


@pytest.fixture
def plan(tmp_path: Path) -> str:
    file = tmp_path / "plan.toml"
    file.write_text(PLAN)
    return str(file)


def test_a_forecast_by_hand(plan: str, capsys: pytest.CaptureFixture[str]):
    # Synchronous: 8 rollouts of 100 tokens side by side take 10 s at full speed, then an update takes 5 s.
    assert main(["simulate", plan, "--json", "--max-staleness", "0"]) == 0
    synchronous = json.loads(capsys.readouterr().out)
    assert synchronous["step_s"] == pytest.approx(15.0)
    assert synchronous["tokens_per_s"] == pytest.approx(800 / 15)
    assert synchronous["trainer_idle"]["rollouts"] == pytest.approx(2 / 3, rel=0.01)
    assert synchronous["replicas_idle"] == pytest.approx(1 / 3, rel=0.01)
    assert synchronous["staleness"].keys() == {"0"}
    # One step ahead the replica never rests.
    assert main(["simulate", plan, "--json"]) == 0
    overlapped = json.loads(capsys.readouterr().out)
    assert overlapped["step_s"] == pytest.approx(10.0, rel=0.1)
    assert overlapped["replicas_idle"] == pytest.approx(0.0, abs=0.05)
    assert sum(overlapped["trainer_idle"].values()) == pytest.approx(1 - 5 / overlapped["step_s"])  # of the same steps


def test_on_shared_devices_rollouts_and_updates_alternate(plan: str, capsys: pytest.CaptureFixture[str]):
    shared = [plan, "--cluster.colocate", '["trainer", "rollout"]']
    assert main(["simulate", *shared, "--json", "--max-staleness", "0"]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] == pytest.approx(15.0)
    assert main(["simulate", *shared, "--json"]) == 0
    ahead = json.loads(capsys.readouterr().out)
    assert (1 - ahead["replicas_idle"]) + 5 / ahead["step_s"] <= 1 + 1e-9  # never both
    assert main(["plan", *shared]) == 2
    assert "there is no split to search" in capsys.readouterr().err


def test_the_buffer_is_the_configurations(plan: str, capsys: pytest.CaptureFixture[str]):
    # No more groups than a step takes: the next ones begin when a step has released these.
    assert main(["simulate", plan, "--json", "--buffer.capacity-groups", "4", "--buffer.selection", "freshest"]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] == pytest.approx(15.0)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (("--buffer.kind", "asyncrl.testing:Buffer"), "buffer.kind = 'asyncrl.testing:Buffer' cannot be simulated"),
        (("--buffer.options.zero-variance", "drop"), "buffer.options.zero_variance = 'drop' cannot be simulated"),
        (("--buffer.options.max-uses", "2"), "buffer.options.max_uses = 2 cannot be simulated"),
        (("--buffer.options.eviction", "lowest_advantage"), "buffer.options.eviction = 'lowest_advantage' cannot be"),
    ],
)
def test_a_buffer_that_cannot_be_simulated_is_refused(
    plan: str, setting: tuple[str, str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["simulate", plan, *setting]) == 2
    assert message in capsys.readouterr().err


def test_a_limit_that_has_no_effect_is_ignored(plan: str, capsys: pytest.CaptureFixture[str]):
    assert main(["simulate", plan, "--json", "--buffer.options.zero-variance-limit", "500"]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"]


def test_a_forecast_as_text(plan: str, capsys: pytest.CaptureFixture[str]):
    assert main(["simulate", plan, "--max-staleness", "0"]) == 0
    out = capsys.readouterr().out
    assert "step                           15 s" in out
    assert "staleness policy               wait, bound 0" in out


@pytest.mark.slow
def test_the_plan_names_the_split_that_wastes_least(plan: str, capsys: pytest.CaptureFixture[str]):
    # Two replicas need 5 s for the tokens of a step, as long as the update. Full speed takes 16 rollouts at once beside
    # the 8 that are trained on: three batches, two steps ahead.
    arguments = ["plan", plan, "--devices", "3", "--json"]
    assert main(arguments) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["candidates"]) == 2 * 5
    assert (answer["best"]["replicas"], answer["best"]["max_staleness"]) == (2, 2)
    assert main(arguments[:-1]) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 1 + 2 * 5
    assert sum("<-- least stale" in line for line in table) == 1


@pytest.mark.parametrize(
    "setting", [("--simulation.tokens", "gauss(1,2)"), ("--steps", "1"), ("--simulation.update-s", "-1")]
)
def test_what_cannot_be_simulated_is_refused(plan: str, setting: tuple[str, str], capsys: pytest.CaptureFixture[str]):
    assert main(["simulate", plan, *setting]) == 2
    assert setting[1].replace(",", ", ") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "reason"), [("/nowhere", "no such folder"), ("{folder}", "transformers does not know this model")]
)
def test_memory_of_no_model_is_not_planned(path: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file, name = tmp_path / "plan.toml", path.format(folder=tmp_path)
    (tmp_path / "config.json").write_text("{}")
    file.write_text(PLAN.replace('source = "scratch"', f'path = "{name}"'))
    assert main(["plan", str(file), "--memory-gb", "64"]) == 2
    assert f"model.path = {name!r}: {reason}" in capsys.readouterr().err


@pytest.mark.slow
def test_memory_is_planned_from_the_configuration_and_refused_with_a_mesh_that_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    from transformers import LlamaConfig

    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6, "num_attention_heads": 8}
    LlamaConfig(vocab_size=8192, tie_word_embeddings=False, **sizes).save_pretrained(tmp_path / "model")
    file = tmp_path / "plan.toml"
    settings = f"""
        [model]
        path = "{tmp_path / "model"}"
        dtype = "bfloat16"
        [rollout]
        max_seq_len = 512
    """
    file.write_text(PLAN.replace('[model]\nsource = "scratch"', settings))
    assert main(["plan", str(file), "--memory-gb", "64", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    weights = 2 * 8192 * 1024 + 6 * (4 * 1024**2 + 3 * 1024 * 4096 + 2 * 1024) + 1024
    assert plan["gradients"] == 4 * weights
    assert plan["total"] > 16 * weights
    assert main(["plan", str(file), "--memory-gb", "1"]) == 2
    assert "world_size = 8 with mesh = {tp = 8} needs" in capsys.readouterr().err
