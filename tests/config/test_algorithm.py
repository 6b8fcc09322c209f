"""The algorithm of a run: parts by name, their options, and combinations that are refused with the reason."""

from __future__ import annotations

import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.algorithms import (
    DAPO,
    GSPO,
    PPO,
    AdaptiveKL,
    FixedKL,
    NoCorrection,
    PolicyLoss,
    PolicyTokens,
    TokenLosses,
    TruncatedImportance,
)
from asyncrl.cli.main import main
from asyncrl.config import Config, check_algorithm, load_config
from asyncrl.errors import ConfigError, UserCodeError

SMALLEST: dict[str, Any] = {
    "name": "first",
    "steps": 10,
    "max_staleness": 2,
    "model": {"source": "scratch"},
    "env": {"name": "calculator"},
}


@pytest.fixture(autouse=True)
def _advantages(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("advantages_of_ones_own")
    module.of_dreams = lambda dreams: dreams  # type: ignore[attr-defined]
    module.of_two_kinds = lambda values, groups: values - groups  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


DROP: dict[str, Any] = {"options": {"zero_variance": "drop"}}


def config(*, max_staleness: int = 2, trainer: Any = (), buffer: Any = (), **algorithm: Any) -> Config:
    tables = {"trainer": dict(trainer), "buffer": dict(buffer), "algorithm": algorithm}
    return Config.from_mapping({**SMALLEST, "max_staleness": max_staleness, **tables})


def refused(**settings: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check_algorithm(config(**settings))
    return caught.value


def test_the_default_is_decoupled_ppo_with_clip_higher() -> None:
    default = config().algorithm.objective(longest=7)
    assert default.loss == DAPO(clip_ratio_low=0.2, clip_ratio_high=0.28)
    assert default.correction == TruncatedImportance(cap=2.0)
    assert default.anchor == "proximal"
    assert config().algorithm.estimator().name == "grpo"
    assert check_algorithm(config()) == ()


def test_parts_are_named_and_take_options() -> None:
    objective = config(
        loss="gspo",
        loss_options={"clip_ratio_high": 5e-4},
        correction="none",
        loss_agg_mode="fixed_length",
        kl_coef=0.1,
        kl_estimator="low_variance",
    ).algorithm.objective(longest=64)
    assert objective.loss == GSPO(clip_ratio_low=3e-4, clip_ratio_high=5e-4)
    assert objective.correction == NoCorrection()
    assert (objective.fixed_length, objective.kl_coef, objective.kl_estimator) == (64, 0.1, "low_variance")
    estimator = config(advantage="pass_at_k", advantage_options={"k": 2}).algorithm.estimator()
    assert (estimator.needs, estimator.options) == (("rewards", "groups"), {"k": 2})


@pytest.mark.parametrize(
    ("settings", "path", "words"),
    [
        ({"loss": "gpso"}, "algorithm.loss", "did you mean 'gspo'"),
        ({"advantage": "grop"}, "algorithm.advantage", "did you mean 'grpo'"),
        ({"correction": "tiss"}, "algorithm.correction", "did you mean 'tis'"),
        ({"loss_options": {"clip_hihg": 1.0}}, "algorithm.loss_options.clip_hihg", "did you mean 'clip_ratio_high'"),
        ({"loss_options": {"clip_ratio_low": 2.0}}, "clip_ratio_low", "at most 1"),
        ({"loss_options": {"clip_ratio_low": "x"}}, "algorithm.loss_options", "cannot be made"),
        ({"advantage_options": {"eps": 1.0}}, "algorithm.advantage_options.eps", "did you mean 'epsilon'"),
        ({"correction_options": {"cap": 0.5}}, "cap", "at least 1"),
        ({"loss": "asyncrl.algorithms:TokenLosses", "loss_options": {"loss": 1}}, "algorithm.loss", "not a PolicyLoss"),
        ({"correction": "asyncrl.algorithms:PPO"}, "algorithm.correction", "not a Correction"),
        ({"advantage": "asyncrl.algorithms.kl:LOG_RATIO_LIMIT"}, "algorithm.advantage", "not a function"),
        (
            {"advantage": "advantages_of_ones_own:of_dreams"},
            "algorithm.advantage",
            "needs dreams",
        ),
        ({"advantage": "advantages_of_ones_own:of_two_kinds"}, "algorithm.advantage", "sees rows without their groups"),
        ({"trainer": {"group_size": 1}}, "trainer.group_size", "no baseline"),
        ({"advantage": "pass_at_k", "advantage_options": {"k": 9}}, "algorithm.advantage_options.k", "group_size = 8"),
        ({"advantage": "pass_at_k", "trainer": {"group_size": 3}}, "algorithm.advantage_options.k", "4 answers cannot"),
        (
            {"advantage": "pass_at_k", "kl_coef": 0.1, "kl_placement": "reward"},
            "algorithm.kl_placement",
            "answers would fail",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_its_key(settings: dict[str, Any], path: str, words: str) -> None:
    for allow_unsound in (False, True):
        error = refused(**settings, allow_unsound=allow_unsound)
        assert error.path == path
        assert words in str(error)
        assert error.remedy
        assert "allow_unsound" not in error.remedy


@pytest.mark.parametrize(
    ("settings", "path", "words"),
    [
        ({"correction": "none"}, "algorithm.correction", "neither loss nor correction uses the policy that sampled"),
        ({"correction": "none", "anchor": "interpolated"}, "algorithm.correction", "2 versions old"),
        ({"anchor": "behaviour", "correction": "none"}, "algorithm.anchor", "plain PPO on stale data"),
        ({"loss": "topr"}, "algorithm.correction", "count it twice"),
        ({"loss": "m2po"}, "algorithm.correction", "count it twice"),
        ({"anchor": "behaviour", "max_staleness": 1}, "algorithm.correction", "every weight is 1"),
        ({"loss": "kl_cov"}, "algorithm.loss", "one optimizer step"),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "algorithm.kl_estimator", "noise"),
        *[
            (
                {"kl_coef": 0.1, "kl_placement": "reward", "kl_estimator": estimator},
                "algorithm.kl_estimator",
                "may push away",
            )
            for estimator in ("k2", "k3", "low_variance")
        ],
        ({"advantage": "gigpo", "kl_coef": 0.1, "kl_placement": "reward"}, "algorithm.kl_placement", "single turns"),
        *[
            ({**settings, "buffer": DROP}, "buffer.options.zero_variance", "more than the rewards of a group")
            for settings in (
                {"kl_coef": 0.1, "kl_placement": "reward"},
                {"whiten_advantages": True},
                {"advantage": "reinforce_plus_plus_baseline"},
                *[{"advantage": name} for name in ("reinforce_plus_plus", "remax", "gae", "gigpo")],
            )
        ],
    ],
)
def test_what_goes_wrong_is_refused_with_the_reason_unless_asked_for(
    settings: dict[str, Any], path: str, words: str
) -> None:
    error = refused(**settings)
    assert error.path == path
    assert words in str(error)
    assert "algorithm.allow_unsound = true" in error.remedy
    (issue,) = check_algorithm(config(**settings, allow_unsound=True))
    assert issue.key == path
    assert words in issue.reason


@pytest.mark.parametrize(
    "settings",
    [
        {"correction": "none", "max_staleness": 0},
        {"correction": "none", "anchor": "behaviour", "max_staleness": 1},
        {"correction": "none", "loss": "topr"},
        {"correction": "none", "loss": "m2po"},
        {"anchor": "interpolated"},
        {"correction": "mis"},
        {"correction": "icepop"},
        {"correction": "rejection"},
        {"loss": "kl_cov", "trainer": {"num_mini_batches": 2}},
        {"loss": "kl_cov", "trainer": {"epochs": 2}},
        {"kl_coef": 0.1, "kl_estimator": "k2"},
        {"kl_estimator": "k1"},
        {"advantage": "reinforce_plus_plus", "trainer": {"group_size": 1}},
        {"advantage": "gae", "whiten_advantages": True, "trainer": {"group_size": 1}},
        {"advantage": "remax", "trainer": {"group_size": 1}},
        {"advantage": "gigpo"},
        {"advantage": "pass_at_k", "advantage_options": {"k": 8}},
        {"credit": "turn", "buffer": DROP},
        {"advantage": "online_dpo", "buffer": DROP},
        {"advantage": "opo", "buffer": DROP},
    ],
    ids=str,
)
def test_what_is_sound_is_let_through(settings: dict[str, Any]) -> None:
    assert check_algorithm(config(**settings)) == ()


def test_a_replay_drops_nothing() -> None:
    assert check_algorithm(config(advantage="remax", buffer=DROP), samples=False) == ()


def test_correcting_past_the_bound_counts_as_any_staleness() -> None:
    data = {**SMALLEST, "max_staleness": 1, "algorithm": {"anchor": "behaviour", "correction": "none"}}
    assert check_algorithm(Config.from_mapping(data)) == ()
    with pytest.raises(ConfigError, match="up to 10 versions old"):
        check_algorithm(Config.from_mapping({**data, "staleness": {"policy": "correct"}}))


def test_the_divergence_counts_in_one_place() -> None:
    in_reward = config(kl_coef=0.2, kl_placement="reward", kl_estimator="k1").algorithm
    assert in_reward.objective(longest=8).kl_coef == 0.0
    assert in_reward.controller() == FixedKL(coefficient=0.2)
    assert check_algorithm(config(kl_coef=0.2, kl_placement="reward", kl_estimator="k1")) == ()
    steered = config(kl_coef=0.2, kl_placement="reward", target_kl=0.1, kl_horizon=50.0).algorithm
    assert in_reward.controller(0.7) == FixedKL(coefficient=0.2)
    assert steered.controller() == AdaptiveKL(coefficient=0.2, target=0.1, horizon=50.0, start=0.2)
    assert steered.controller(0.7) == AdaptiveKL(coefficient=0.7, target=0.1, horizon=50.0, start=0.2)
    assert config(kl_coef=0.2).algorithm.controller() is None
    assert config(kl_placement="reward").algorithm.controller() is None
    for wrong in (
        {"target_kl": 0.1},
        {"target_kl": 0.1, "kl_coef": 0.1},
        {"target_kl": 0.1, "kl_placement": "reward"},
    ):
        with pytest.raises(ConfigError, match="steers the coefficient") as caught:
            config(**wrong)
        assert caught.value.path == "algorithm.target_kl"
    again = {
        **SMALLEST,
        "algorithm": {"kl_placement": "reward", "kl_coef": 0.1},
        "buffer": {"options": {"max_uses": 2}},
    }
    with pytest.raises(ConfigError, match="divergences are computed once for a group"):
        check_algorithm(Config.from_mapping(again))
    with pytest.raises(ConfigError, match="greedy rewards are computed once for a group"):
        check_algorithm(Config.from_mapping({**again, "algorithm": {"advantage": "remax"}}))


def test_a_file_that_names_the_estimator_that_was_the_default_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(config(kl_coef=0.1, kl_placement="reward", kl_estimator="k3").to_toml())
    with pytest.raises(ConfigError, match=r'"k3".*use k1'):
        check_algorithm(load_config(file))
    for value in ("k1", "none"):
        assert check_algorithm(load_config(file, ["--algorithm.kl_estimator", value])) == ()
    assert check_algorithm(load_config(file, ["--algorithm.kl_placement", "loss"])) == ()
    (issue,) = check_algorithm(load_config(file, ["--algorithm.allow_unsound", "true"]))
    assert issue.key == "algorithm.kl_estimator"


def test_the_algorithm_of_a_run_without_training_is_not_checked() -> None:
    data = {**SMALLEST, "steps": 0, "algorithm": {"correction": "none"}}
    assert check_algorithm(Config.from_mapping(data)) == ()


def test_all_refusals_are_reported_together() -> None:
    error = refused(correction="none", trainer={"group_size": 1})
    assert "2 problems" in str(error)


def test_the_command_line_refuses_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text(config(correction="none").to_toml())
    assert main(["train", str(file), "--dry-run"]) == 2
    assert "the gradient is that of other samples" in capsys.readouterr().err
    assert main(["train", str(file), "--dry-run", "--algorithm.allow-unsound", "true"]) == 0
    assert main(["eval", str(file), "--dry-run"]) == 0, "nothing trains"


def test_a_users_algorithm_is_named_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    custom = config(
        advantage="custom_algorithm:sign_of_the_median",
        advantage_options={"margin": 0.1},
        loss="custom_algorithm:SquaredDistance",
    )
    try:
        assert check_algorithm(custom) == ()
        assert custom.algorithm.estimator().needs == ("rewards", "groups")
    finally:
        sys.modules.pop("custom_algorithm", None)


# -------------------------------------------------------------------------------------------------- objects for names


class Mine(PolicyLoss):
    def __init__(self, table: list[float]) -> None:
        self.table = table

    def __call__(self, tokens: PolicyTokens) -> TokenLosses:
        return TokenLosses(loss=tokens.current)


def plain(tokens: PolicyTokens, *, scale: float = 1.0) -> torch.Tensor:
    return -scale * tokens.advantages * tokens.ratio


class Above:
    """An advantage that is made with options: its instance is called."""

    def __init__(self, half: float = 0.5) -> None:
        self.half = half

    def __call__(self, rewards: torch.Tensor) -> torch.Tensor:
        return rewards - self.half


def test_an_instance_of_a_dataclass_is_in_the_file_with_its_options() -> None:
    given = config(loss=PPO(clip_ratio_low=0.1), correction=TruncatedImportance(cap=5.0))
    read = Config.from_mapping(tomllib.loads(given.to_toml()))
    for each in (given, read):
        objective = each.algorithm.objective(longest=7)
        assert (objective.loss, objective.correction) == (PPO(clip_ratio_low=0.1), TruncatedImportance(cap=5.0))


def test_another_instance_is_used_as_it_is_and_given_again_to_a_resume() -> None:
    mine = Mine([1.0])
    given = config(loss=mine, advantage=Above(half=0.25))
    assert given.algorithm.objective(longest=7).loss is mine
    assert given.algorithm.estimator()({"rewards": torch.tensor([1.0])}).tolist() == [0.75]
    read = Config.from_mapping(tomllib.loads(given.to_toml())).algorithm
    with pytest.raises(ConfigError, match="give it again, in Python"):
        read.objective(longest=7)
    with pytest.raises(ConfigError, match="give it again, in Python"):
        read.estimator()


def test_a_function_of_tokens_is_a_loss_or_a_correction_and_a_class_an_advantage() -> None:
    algorithm = config(
        loss=plain,
        loss_options={"scale": 2.0},
        correction=lambda tokens: torch.ones_like(tokens.behaviour),
        advantage=Above,
        advantage_options={"half": 0.75},
    ).algorithm
    column = torch.zeros(2)
    given = dict.fromkeys(("current_log_probs", "proximal_log_probs", "behaviour_log_probs"), column)
    mask = torch.tensor([True, True])
    objective = algorithm.objective(longest=7)
    losses = objective.token_losses(**given, advantages=torch.tensor([1.0, 3.0]), mask=mask)
    assert losses.loss.tolist() == [-2.0, -6.0]
    assert algorithm.estimator()({"rewards": torch.tensor([1.0])}).tolist() == [0.25]
    averaged = config(loss=lambda tokens: tokens.ratio.mean()).algorithm.objective(longest=7)
    with pytest.raises(UserCodeError, match=r"<lambda> must return a number for each token, \[2\], not torch.Size"):
        averaged.token_losses(**given, advantages=column, mask=mask)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss": plain, "loss_options": {"scal": 1.0}}, "did you mean 'scale'"),
        ({"loss": Mine([1.0]), "loss_options": {"table": 1.0}}, "no option 'table'"),
        ({"advantage": Above, "advantage_options": {"hal": 1.0}}, "did you mean 'half'"),
    ],
)
def test_options_that_an_object_does_not_take_are_refused(settings: dict[str, Any], words: str) -> None:
    assert words in str(refused(**settings))
