"""Whole runs with a critic, with a greedy baseline, and with advantages of turns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.tasks.run import train
from asyncrl.trainer.assembly import Assembly
from asyncrl.trainer.run import TrainingRun

MakeConfig = Callable[..., Config]

GAE = {"advantage": "gae", "loss": "ppo", "whiten_advantages": True}


def steps_of(config: Config) -> list[dict[str, float]]:
    (run,) = config.runs.glob("small-2*")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "train/loss" in line]


@pytest.mark.slow
def test_a_critic_learns_beside_the_policy_and_goes_on_after_a_resume(small_config: MakeConfig) -> None:
    config = small_config(
        steps=3,
        eval={"tasks": 0},
        algorithm=GAE,
        critic={"lr": 1e-2, "num_mini_batches": 2},
        trainer={"group_size": 1, "groups_per_step": 6},
        checkpoint={"every": 3},
    )
    summary = train(config)
    steps = steps_of(config)
    assert [step["train/critic_tokens_trained"] for step in steps] == [step["train/tokens_trained"] for step in steps]
    first = steps[0]
    assert first["train/critic_value"] == pytest.approx(0.0, abs=0.2)  # it began by saying 0
    # The mean over tokens of what each row got: rows weigh by their length.
    assert 0.0 <= first["train/critic_return"] <= 1.0
    assert (first["train/critic_return"] > 0) == (first["reward_mean"] > 0)
    assert all(step["train/critic_grad_norm"] > 0 for step in steps)
    assert len({step["train/critic_value"] for step in steps}) == 3
    assert summary["tokens"]["generated"] == summary["tokens"]["trained"] + sum(summary["tokens"]["dropped"].values())
    (run,) = config.runs.glob("small-2*")
    assert (run / "checkpoints" / "step-000003" / "critic" / "rank-00000.safetensors").is_file()
    train(config.model_copy(update={"steps": 4}), resume=run)
    *_, third, fourth = steps_of(config)
    assert fourth["step"] == 4
    assert fourth["train/critic_value"] != 0.0
    del third


@pytest.mark.slow
def test_roles_share_processes_and_penalties_are_taken_off_tokens(small_config: MakeConfig) -> None:
    config = small_config(
        steps=2,
        eval={"tasks": 0},
        algorithm={**GAE, "kl_placement": "reward", "kl_coef": 0.5, "kl_estimator": "k1"},
        cluster={"backend": "local", "colocate": ["trainer", "critic", "reference"]},
    )
    (host,) = [each for each in Assembly(config, log_folder=Path("unused"))._requests() if each.role != "rollout"]
    assert (host.name, list(host.colocated)) == ("trainer+reference+critic", ["trainer", "reference", "critic"])
    train(config)
    first, second = steps_of(config)
    assert first["train/reward_kl"] == pytest.approx(0.0, abs=1e-5)
    assert second["train/critic_grad_norm"] > 0


@pytest.mark.slow
def test_a_reward_models_score_stands_at_the_end(small_config: MakeConfig) -> None:
    reward = {"source": "function", "options": {"function": "worlds:length_score"}}
    config = small_config(steps=2, eval={"tasks": 0}, algorithm=GAE, reward=reward)
    train(config)
    assert all(step["train/critic_return"] > 0 for step in steps_of(config))


def test_remax_compares_with_a_greedy_answer(small_config: MakeConfig) -> None:
    config = small_config(steps=2, eval={"tasks": 0}, algorithm={"advantage": "remax"}, trainer={"group_size": 1})
    summary = train(config)
    assert all("train/greedy_reward" in step for step in steps_of(config))
    tokens = summary["tokens"]  # greedy answers are not samples: none of their tokens is among these
    assert tokens["generated"] == tokens["trained"] + sum(tokens["dropped"].values()) + tokens["in_flight"]


@pytest.mark.slow
def test_a_group_whose_greedy_answer_fails_is_replaced(small_config: MakeConfig) -> None:
    config = small_config(
        steps=2,
        max_staleness=0,
        eval={"tasks": 0},
        algorithm={"advantage": "remax"},
        env={"name": "worlds:DigitsFactory", "options": {"fails_on": [1]}},
        rollout={"max_attempts": 1},
    )
    summary = train(config)
    assert summary["weight_version"] == 2
    assert "baseline_failed" not in summary["tokens"]["dropped"]  # the samples failed as well, and first or last


@pytest.mark.slow
def test_online_dpo_refers_to_a_frozen_policy(small_config: MakeConfig) -> None:
    config = small_config(steps=2, max_staleness=0, eval={"tasks": 0}, algorithm={"advantage": "online_dpo"})
    assert "reference" in {each.role for each in Assembly(config, log_folder=Path("unused"))._requests()}
    train(config)
    first, second = steps_of(config)
    assert first["train/divergence"] == pytest.approx(0.0, abs=1e-5)  # the reference is where the policy begins
    assert second["train/divergence"] != 0.0
    assert first["train/grad_norm"] > 0


@pytest.mark.slow
def test_gigpo_gives_every_turn_its_own_credit(small_config: MakeConfig) -> None:
    config = small_config(steps=2, eval={"tasks": 0}, algorithm={"advantage": "gigpo"})
    train(config)
    assert all(step["train/grad_norm"] > 0 for step in steps_of(config))


def test_roles_in_one_process_have_as_many_ranks(small_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="trainer has 2, reference has 1"):
        small_config(
            cluster={"backend": "ray", "colocate": ["trainer", "reference"]}, trainer={"world_size": 2, "lr": 1e-2}
        )


async def test_the_ranks_of_a_critic_fetch_the_model_of_a_url_themselves(
    small_config: MakeConfig, tmp_path: Path
) -> None:
    built: list[str] = []

    class Critic:
        async def build(self, path: str, *_: object) -> None:
            built.append(path)

        async def prepare_snapshots(self) -> None: ...

    config = small_config(algorithm=GAE, critic={"path": "memory://bucket/critic"})
    run = SimpleNamespace(_config=config, _run=SimpleNamespace(path=tmp_path), _checkpoint=None)
    await TrainingRun._load_critic(run, Critic(), "policy")
    assert built == ["memory://bucket/critic"]


async def test_a_critic_that_a_resumed_run_begins_to_need_starts_anew(small_config: MakeConfig, tmp_path: Path) -> None:
    done: list[str] = []

    class Critic:
        async def build(self, path: str, *_: object) -> None:
            done.append(path)

        async def load(self, path: Path) -> None:
            done.append(path.name)

        async def prepare_snapshots(self) -> None: ...

    run = SimpleNamespace(
        _config=small_config(algorithm=GAE), _checkpoint=tmp_path, _progress=SimpleNamespace(note=done.append)
    )
    await TrainingRun._load_critic(run, Critic(), "policy")
    assert done == ["policy", "the critic starts anew: the run had none until here"]
    (tmp_path / "critic").mkdir()
    await TrainingRun._load_critic(run, Critic(), "policy")
    assert done[2:] == ["policy", "critic"]


@pytest.mark.parametrize(
    ("steps", "every", "prepared"), [(3, None, True), (3, 2, True), (3, 0, False), (0, None, False)]
)
async def test_memory_of_snapshots_is_prepared_where_they_are_taken_between_steps(
    small_config: MakeConfig, steps: int, every: int | None, prepared: bool
) -> None:
    done: list[str] = []

    class Engines:
        async def build(self, *_: object) -> None:
            done.append("build")

        async def prepare_snapshots(self) -> None:
            done.append("prepare")

    run = SimpleNamespace(
        _config=small_config(algorithm=GAE, steps=steps, checkpoint={"every": every}),
        _checkpoint=None,
        _assembly=SimpleNamespace(trainer=Engines()),
        _progress=SimpleNamespace(note=lambda _: None),
    )
    expected = ["build", "prepare"] if prepared else ["build"]
    await TrainingRun._load_trainer(run, "policy", weight_version=0)
    assert done == expected
    await TrainingRun._load_critic(run, Engines(), "policy")
    assert done == expected * 2
