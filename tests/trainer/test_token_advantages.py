"""Advantages of tokens and turns, made of columns: by hand, and against a plain loop in float64."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.data import DataProto
from asyncrl.data.ragged import rows_of
from asyncrl.errors import SchemaError, UserCodeError
from asyncrl.trainer.workers import TokenAdvantages, with_returns, with_token_advantages, with_turn_advantages


def rows(*turns: list[int], values: list[list[float]], rewards: list[float], **columns: Any) -> DataProto:
    """Rows of tokens in these turns, -1 for the environment's."""
    return DataProto.from_dict(
        tensors={
            "turns": [torch.tensor(row, dtype=torch.int32) for row in turns],
            "weight_versions": [
                torch.tensor([5 if turn >= 0 else -1 for turn in row], dtype=torch.int32) for row in turns
            ],
            "values": [torch.tensor(row) for row in values],
            "rewards": torch.tensor(rewards),
            **columns,
        }
    )


def column(batch: DataProto, name: str) -> list[list[float]]:
    assert batch.batch is not None
    return [[pytest.approx(value, abs=1e-6) for value in row.tolist()] for row in rows_of(batch.batch[name])]


def test_two_turns_are_one_episode_and_the_environment_takes_no_step() -> None:
    # Sampled: values 1, 2 | 3; rewards 0, 0.5 (the first turn's) | 2 (the second's). Discount 1, trace 0.5:
    # delta = 0 + 2 - 1 = 1; 0.5 + 3 - 2 = 1.5; 2 + 0 - 3 = -1
    # advantage = -1; 1.5 - 0.5 = 1; 1 + 0.5 = 1.5
    batch = rows(
        [-1, 0, 0, -1, -1, 1],
        values=[[9.0, 1.0, 2.0, 9.0, 9.0, 3.0]],
        rewards=[2.5],
        turn_rewards=[torch.tensor([0.5, 2.0])],
    )
    by_token = TokenAdvantages(estimator="gae", options={"gae_lambda": 0.5}, by_turns=True, gae_lambda=1.0)
    assert column(with_token_advantages(batch, by_token), "advantages") == [[0.0, 1.5, 1.0, 0.0, 0.0, -1.0]]
    assert column(with_returns(batch, by_token), "returns") == [[0.0, 2.5, 2.5, 0.0, 0.0, 2.0]]
    # A reward model's score is one number for the row, at its last token: the turns' rewards are not looked at.
    by_token = TokenAdvantages(estimator="gae", options={"gae_lambda": 0.0}, gae_lambda=0.0)
    assert column(with_token_advantages(batch, by_token), "advantages") == [[0.0, 1.0, 1.0, 0.0, 0.0, -0.5]]
    assert column(with_returns(batch, by_token), "returns") == [[0.0, 2.0, 3.0, 0.0, 0.0, 2.5]]


def test_what_no_turn_earned_stands_at_the_end() -> None:
    earned = [torch.tensor([0.5, 0.0]), torch.tensor([1.0])]
    batch = rows([0, -1, 1], [0], values=[[0.0, 0.0, 0.0], [0.0]], rewards=[3.0, 1.0], turn_rewards=earned)
    by_token = TokenAdvantages(estimator="gae", options={"gae_lambda": 0.0}, by_turns=True)
    assert column(with_token_advantages(batch, by_token), "advantages") == [[0.5, 0.0, 2.5], [1.0]]


def test_the_divergence_is_taken_off_each_tokens_reward() -> None:
    batch = rows(
        [-1, 0, 0],
        values=[[0.0, 0.0, 0.0]],
        rewards=[1.0],
        behaviour_log_probs=[torch.tensor([0.0, -1.0, -2.0])],
        reference_log_probs=[torch.tensor([7.0, -1.5, -1.0])],
    )
    by_token = TokenAdvantages(estimator="gae", kl_coef=0.2)  # k1: 0.5 and -1
    assert column(with_returns(batch, by_token), "returns") == [[0.0, 1.0 - 0.1 + 0.2, 1.0 + 0.2]]


def test_the_critic_learns_what_the_estimator_discounts(monkeypatch: pytest.MonkeyPatch) -> None:
    def discounted(token_rewards: torch.Tensor, values: torch.Tensor, *, gamma: float = 0.5) -> torch.Tensor:
        return token_rewards - values

    module = types.ModuleType("an_estimator")
    module.discounted = discounted  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "an_estimator", module)
    batch = rows([-1, 0, 0], values=[[0.0, 1.0, 2.0]], rewards=[4.0])
    for options, first in (({}, 2.0), ({"gamma": 0.25}, 1.0)):
        by_token = TokenAdvantages(estimator="an_estimator:discounted", options=options)
        assert column(with_returns(batch, by_token), "returns") == [[0.0, first, 4.0]]


def test_a_token_that_is_masked_is_still_a_step() -> None:
    batch = rows([-1, 0, 0], values=[[0.0, 1.0, 2.0]], rewards=[4.0], loss_mask=[torch.tensor([False, False, True])])
    assert column(
        with_token_advantages(batch, TokenAdvantages(estimator="gae", options={"gae_lambda": 1.0})), "advantages"
    ) == [[0.0, 3.0, 2.0]]


def test_every_token_of_a_turn_has_its_advantage() -> None:
    batch = DataProto.from_dict(
        tensors={
            "turns": [
                torch.tensor([-1, 0, 0, -1, 1], dtype=torch.int32),
                torch.tensor([-1], dtype=torch.int32),
                torch.tensor([0], dtype=torch.int32),
            ],
            "turn_advantages": [torch.tensor([0.5, -2.0]), torch.zeros(0), torch.tensor([3.0])],
        }
    )
    assert column(with_turn_advantages(batch), "advantages") == [[0.0, 0.5, 0.5, 0.0, -2.0], [0.0], [3.0]]
    short = batch.select(["turns"]).union(
        DataProto.from_dict(tensors={"turn_advantages": [torch.tensor([0.5]), torch.zeros(0), torch.tensor([3.0])]})
    )
    with pytest.raises(SchemaError, match="row 0 has 1 advantages of turns"):
        with_turn_advantages(short)


def test_an_estimator_must_give_a_number_for_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = rows([-1, 0, 0], values=[[0.0, 1.0, 2.0]], rewards=[4.0])
    with pytest.raises(UserCodeError, match=r"must return \[2\] finite numbers, got \(1,\)"):
        with_token_advantages(batch, _one_for_all(monkeypatch))
    with pytest.raises(SchemaError, match="need 'values'"):
        with_returns(batch.select(["turns", "weight_versions", "rewards"]), TokenAdvantages(estimator="gae"))


def _one_for_all(monkeypatch: pytest.MonkeyPatch) -> TokenAdvantages:
    module = types.ModuleType("an_estimator")
    module.one = lambda token_rewards: token_rewards.sum()[None]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "an_estimator", module)
    return TokenAdvantages(estimator="an_estimator:one")


episodes = st.lists(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2), st.integers(-4, 4)), max_size=3), min_size=1, max_size=4
)


@settings(max_examples=15, deadline=None)
@given(
    episodes=episodes,
    gamma=st.sampled_from([1.0, 0.9]),
    gae_lambda=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 9),
)
def test_it_is_the_plain_loop_whatever_the_rows(
    episodes: list[list[tuple[int, int, int]]], gamma: float, gae_lambda: float, seed: int
) -> None:
    """Ragged rows, rows that sampled nothing, environments that say nothing between two turns; in any order."""
    draw = torch.Generator().manual_seed(seed)
    turns, values, rewards, turn_rewards, expected = [], [], [], [], []
    for episode in episodes:
        numbers = [-1]
        for number, (said, heard, _) in enumerate(episode):
            numbers += [number] * said + [-1] * heard
        value = torch.randn(len(numbers), generator=draw)
        steps = [token for token, number in enumerate(numbers) if number >= 0]
        gains = dict.fromkeys(steps, 0.0)
        for number, (*_, reward) in enumerate(episode):
            gains[max(token for token in steps if numbers[token] == number)] = float(reward)
        after, following, row = 0.0, 0.0, [0.0] * len(numbers)
        for token in reversed(steps):
            after = gains[token] + gamma * following - float(value[token].double()) + gamma * gae_lambda * after
            following, row[token] = float(value[token].double()), after
        turns.append(numbers)
        values.append(value.tolist())
        rewards.append(float(sum(reward for *_, reward in episode)))
        turn_rewards.append(torch.tensor([float(reward) for *_, reward in episode]))
        expected.append(row)
    by_token = TokenAdvantages(estimator="gae", options={"gamma": gamma, "gae_lambda": gae_lambda}, by_turns=True)
    batch = rows(*turns, values=values, rewards=rewards, turn_rewards=turn_rewards)
    found = [row.tolist() for row in rows_of(with_token_advantages(batch, by_token).batch["advantages"])]
    assert found == [[pytest.approx(value, abs=1e-5) for value in row] for row in expected]
    order = torch.randperm(len(turns), generator=draw)
    shuffled = rows_of(with_token_advantages(batch.select_idxs(order), by_token).batch["advantages"])
    assert [row.tolist() for row in shuffled] == [found[row] for row in order.tolist()]
