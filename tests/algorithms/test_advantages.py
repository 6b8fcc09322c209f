"""Advantages against plain Python, and the laws of groups."""

import math
import random
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms import (
    ADVANTAGES,
    dr_grpo_advantages,
    get_advantage,
    grpo_advantages,
    register_advantage,
    rloo_advantages,
)
from asyncrl.errors import ConfigError, InvalidDataError, SchemaError

rows = st.lists(
    st.tuples(st.floats(-100, 100, width=32), st.integers(-3, 3)),
    min_size=1,
    max_size=24,
)


def reference(name: str, rewards: list[float], groups: list[int]) -> list[float]:
    answer = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if len(set(members)) == 1:
            answer.append(0.0)
            continue
        deviation = reward - math.fsum(members) / len(members)
        match name:
            case "grpo":
                answer.append(deviation / (statistics.stdev(members) + 1e-6))
            case "dr_grpo":
                answer.append(deviation)
            case "rloo":
                others = math.fsum(members) - reward
                answer.append(reward - others / (len(members) - 1))
    return answer


def test_three_of_four_solved() -> None:
    rewards, groups = torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([9, 9, 9, 9])
    # mean 3/4, squared deviations 3 * 1/16 + 9/16 = 3/4, sample variance 1/4, deviation 1/2
    torch.testing.assert_close(
        grpo_advantages(rewards, groups=groups), torch.tensor([0.5, 0.5, -1.5, 0.5]), rtol=1e-5, atol=0
    )
    assert dr_grpo_advantages(rewards, groups=groups).tolist() == [0.25, 0.25, -0.75, 0.25]
    # the others' mean: 2/3 for a solved row, 1 for the failed one
    torch.testing.assert_close(rloo_advantages(rewards, groups=groups), torch.tensor([1 / 3, 1 / 3, -1.0, 1 / 3]))


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
@given(rows)
@settings(max_examples=60, deadline=None)
def test_equals_plain_python(name: str, batch: list[tuple[float, int]]) -> None:
    rewards, groups = [r for r, _ in batch], [g for _, g in batch]
    got = get_advantage(name)(torch.tensor(rewards), groups=torch.tensor(groups))
    torch.testing.assert_close(
        got.double(), torch.tensor(reference(name, rewards, groups)).double(), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("reward", [0.1, 1e-30, 16777217.3, -3.3])
def test_equal_rewards_and_single_rows_give_exactly_zero(name: str, reward: float) -> None:
    rewards = torch.tensor([reward, 7.0, reward, reward, 0.7], dtype=torch.float64)
    groups = torch.tensor([4, 1, 4, 4, 2])
    assert get_advantage(name)(rewards, groups=groups).tolist() == [0.0] * 5


@given(rows, st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_order_of_rows_does_not_matter(batch: list[tuple[float, int]], shuffle: random.Random) -> None:
    order = list(range(len(batch)))
    shuffle.shuffle(order)
    rewards, groups = torch.tensor([r for r, _ in batch]), torch.tensor([g for _, g in batch])
    straight = grpo_advantages(rewards, groups=groups)
    shuffled = grpo_advantages(rewards[order], groups=groups[order])
    torch.testing.assert_close(shuffled, straight[order], rtol=1e-5, atol=1e-6)


def test_a_shift_of_a_groups_rewards_changes_nothing_and_other_groups_do_not_matter() -> None:
    groups = torch.tensor([0, 1, 0, 1, 0])
    rewards = torch.tensor([1.0, 8.0, 3.0, 16.0, 5.0])
    shifted = rewards + torch.tensor([1024.0, 0.0, 1024.0, 0.0, 1024.0])
    assert grpo_advantages(shifted, groups=groups).equal(grpo_advantages(rewards, groups=groups))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_named(bad: float) -> None:
    rewards = torch.tensor([0.0, 1.0, bad, 1.0])
    with pytest.raises(InvalidDataError, match=r"row 2 \(group 31\) is (nan|-?inf)"):
        grpo_advantages(rewards, groups=torch.tensor([30, 30, 31, 31]))


def test_columns_that_do_not_fit_are_refused() -> None:
    with pytest.raises(SchemaError, match="rewards must be"):
        grpo_advantages(torch.tensor([1, 2]), groups=torch.tensor([0, 0]))
    with pytest.raises(SchemaError, match="groups must be"):
        grpo_advantages(torch.tensor([1.0, 2.0]), groups=torch.tensor([0]))
    with pytest.raises(SchemaError, match="groups must be"):
        grpo_advantages(torch.tensor([1.0, 2.0]), groups=torch.tensor([0.0, 0.0]))


def test_no_rows_have_no_advantages() -> None:
    empty = grpo_advantages(torch.empty(0), groups=torch.empty(0, dtype=torch.int64))
    assert empty.tolist() == []


def test_the_registry_knows_its_names_and_takes_new_ones() -> None:
    with pytest.raises(ConfigError, match="'gppo' does not exist") as caught:
        get_advantage("gppo")
    assert caught.value.remedy == "one of dr_grpo, grpo, rloo"
    with pytest.raises(ConfigError, match="registered already"):
        register_advantage("grpo")(dr_grpo_advantages)

    @register_advantage("reward_itself")
    def plain(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        return rewards.float()

    try:
        assert get_advantage("reward_itself")(torch.tensor([3.0]), groups=torch.tensor([0])).tolist() == [3.0]
    finally:
        del ADVANTAGES["reward_itself"]
