"""Advantages against plain Python in float64, hand-worked numbers, and the laws of groups."""

import itertools
import math
import random
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms import (
    AdvantageEstimator,
    best_of_group_advantages,
    dr_grpo_advantages,
    gae,
    gae_advantages,
    gigpo_advantages,
    grpo_advantages,
    load_estimator,
    online_dpo_advantages,
    opo_advantages,
    pass_at_k_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
    rloo_advantages,
)
from asyncrl.errors import ConfigError, InvalidDataError, SchemaError, UserCodeError

Row = tuple[float, int, int]
rows = st.lists(
    st.tuples(st.floats(-100, 100, width=32), st.integers(-3, 3), st.integers(0, 9)),
    min_size=1,
    max_size=24,
)


NAMES = ("grpo", "dr_grpo", "rloo", "opo", "best_of_group", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
BY_NAME = {name: load_estimator(name) for name in (*NAMES, "pass_at_k")}


def close(got: torch.Tensor, expected: list[float]) -> None:
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), torch.tensor(expected).double(), rtol=1e-4, atol=1e-4)


def of_group(batch: list[Row], group: int) -> list[Row]:
    return [row for row in batch if row[1] == group]


def plain_group_relative(name: str, batch: list[Row]) -> list[float]:
    answer = []
    for reward, group, _ in batch:
        members = of_group(batch, group)
        rewards = [r for r, _, _ in members]
        if len(set(rewards)) == 1:
            answer.append(0.0)
            continue
        deviation = reward - math.fsum(rewards) / len(rewards)
        match name:
            case "grpo":
                answer.append(deviation / (statistics.stdev(rewards) + 1e-6))
            case "dr_grpo":
                answer.append(deviation)
            case "rloo":
                answer.append(reward - (math.fsum(rewards) - reward) / (len(rewards) - 1))
            case "opo":
                weights = [length for _, _, length in members]
                if not sum(weights):
                    weights = [1] * len(weights)
                answer.append(reward - sum(w * r for w, r in zip(weights, rewards, strict=True)) / sum(weights))
    return answer


def plain_whitened(values: list[float], lengths: list[int]) -> list[float]:
    tokens = [value for value, length in zip(values, lengths, strict=True) for _ in range(length)]
    if len(set(tokens)) <= 1:
        return [0.0] * len(values)
    deviation = statistics.stdev(tokens) + 1e-8
    return [(v - statistics.fmean(tokens)) / deviation if n else 0.0 for v, n in zip(values, lengths, strict=True)]


def columns_of(batch: list[Row]) -> dict[str, torch.Tensor]:
    return {
        "rewards": torch.tensor([r for r, _, _ in batch]),
        "groups": torch.tensor([g for _, g, _ in batch]),
        "lengths": torch.tensor([n for _, _, n in batch]),
    }


# ------------------------------------------------------------------------------------------------ relative to a group


def test_three_of_four_solved() -> None:
    rewards, groups = torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([9, 9, 9, 9])
    # mean 3/4, squared deviations 3 * 1/16 + 9/16 = 3/4, sample variance 1/4, deviation 1/2
    torch.testing.assert_close(
        grpo_advantages(rewards, groups=groups), torch.tensor([0.5, 0.5, -1.5, 0.5]), rtol=1e-5, atol=0
    )
    assert dr_grpo_advantages(rewards, groups=groups).tolist() == [0.25, 0.25, -0.75, 0.25]
    # the others' mean: 2/3 for a solved row, 1 for the failed one
    torch.testing.assert_close(rloo_advantages(rewards, groups=groups), torch.tensor([1 / 3, 1 / 3, -1.0, 1 / 3]))
    # the failed row is as long as the others together: the length-weighted mean is 1/2
    lengths = torch.tensor([2, 3, 10, 5])
    assert opo_advantages(rewards, groups, lengths).tolist() == [0.5, 0.5, -0.5, 0.5]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo"])
@given(rows)
@settings(max_examples=40, deadline=None)
def test_group_relative_ones_equal_plain_python(name: str, batch: list[Row]) -> None:
    close(BY_NAME[name](columns_of(batch)), plain_group_relative(name, batch))


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "best_of_group"])
@pytest.mark.parametrize("reward", [0.1, 1e-30, 16777217.3, -3.3])
def test_equal_rewards_and_single_rows_give_exactly_zero(name: str, reward: float) -> None:
    columns = {
        "rewards": torch.tensor([reward, 7.0, reward, reward, 0.7], dtype=torch.float64),
        "groups": torch.tensor([4, 1, 4, 4, 2]),
        "lengths": torch.tensor([1, 2, 3, 4, 5]),
    }
    assert BY_NAME[name](columns).tolist() == [0.0] * 5


def test_epsilon_is_what_the_deviation_is_held_above() -> None:
    rewards, groups = torch.tensor([0.0, 2.0]), torch.tensor([0, 0])
    # deviations -1 and 1, sample deviation sqrt(2)
    expected = 1 / (math.sqrt(2) + 0.5)
    assert grpo_advantages(rewards, groups, epsilon=0.5).tolist() == pytest.approx([-expected, expected])
    assert float(grpo_advantages(rewards, groups)[1]) == pytest.approx(1 / (math.sqrt(2) + 1e-6), rel=1e-7)


@pytest.mark.parametrize("name", NAMES)
@given(rows, st.randoms(use_true_random=False))
@settings(max_examples=20, deadline=None)
def test_order_of_rows_does_not_matter(name: str, batch: list[Row], shuffle: random.Random) -> None:
    order = list(range(len(batch)))
    shuffle.shuffle(order)
    columns = columns_of(batch)
    straight = BY_NAME[name](columns)
    shuffled = BY_NAME[name]({key: column[order] for key, column in columns.items()})
    torch.testing.assert_close(shuffled, straight[order], rtol=1e-4, atol=1e-5)


def test_a_shift_of_a_groups_rewards_changes_nothing_and_other_groups_do_not_matter() -> None:
    groups = torch.tensor([0, 1, 0, 1, 0])
    rewards = torch.tensor([1.0, 8.0, 3.0, 16.0, 5.0])
    shifted = rewards + torch.tensor([1024.0, 0.0, 1024.0, 0.0, 1024.0])
    assert grpo_advantages(shifted, groups=groups).equal(grpo_advantages(rewards, groups=groups))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_named(bad: float) -> None:
    rewards = torch.tensor([0.0, 1.0, bad, 1.0])
    with pytest.raises(InvalidDataError, match=r"row 2 \(group 31\) is (nan|-?inf): a reward must be"):
        grpo_advantages(rewards, groups=torch.tensor([30, 30, 31, 31]))
    with pytest.raises(InvalidDataError, match=r"reward of row 2 is (nan|-?inf): a reward must be"):
        reinforce_plus_plus_advantages(rewards, torch.tensor([1, 1, 1, 1]))
    with pytest.raises(InvalidDataError, match=r"row 0 .*; rows \[2\] are not finite either: a reward"):
        grpo_advantages(torch.tensor([bad, 1.0, bad]), groups=torch.tensor([1, 1, 1]))


def test_columns_that_do_not_fit_are_refused() -> None:
    with pytest.raises(SchemaError, match=r"rewards must be \[B\] floating, got torch.int64 of shape \(2,\)"):
        grpo_advantages(torch.tensor([1, 2]), groups=torch.tensor([0, 0]))
    with pytest.raises(SchemaError, match="rewards must be"):
        grpo_advantages(torch.zeros(2, 2), groups=torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(SchemaError, match=r"groups must be \(2,\) integers like rewards, got torch.int64 of .*\(1,"):
        grpo_advantages(torch.tensor([1.0, 2.0]), groups=torch.tensor([0]))
    with pytest.raises(SchemaError, match="groups must be"):
        grpo_advantages(torch.tensor([1.0, 2.0]), groups=torch.tensor([0.0, 0.0]))
    with pytest.raises(SchemaError, match="groups must be"):
        grpo_advantages(torch.tensor([1.0, 2.0]), groups=torch.tensor([True, False]))
    with pytest.raises(SchemaError, match="lengths must be"):
        opo_advantages(torch.tensor([1.0, 2.0]), torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
    with pytest.raises(SchemaError, match="lengths must be"):
        reinforce_plus_plus_baseline_advantages(torch.tensor([1.0, 2.0]), torch.tensor([0, 0]), torch.tensor([1]))


def test_no_rows_have_no_advantages() -> None:
    empty = {"rewards": torch.empty(0), "groups": torch.empty(0, dtype=torch.int64)}
    empty["lengths"] = empty["groups"]
    for each in BY_NAME.values():
        assert each(empty).tolist() == []


# ------------------------------------------------------------------------------------------ batch and greedy baselines


@given(rows)
@settings(max_examples=40, deadline=None)
def test_reinforce_plus_plus_equals_plain_python(batch: list[Row]) -> None:
    columns, lengths = columns_of(batch), [n for _, _, n in batch]
    close(
        reinforce_plus_plus_advantages(columns["rewards"], columns["lengths"]),
        plain_whitened([r for r, _, _ in batch], lengths),
    )
    deviations = plain_group_relative("dr_grpo", batch)
    if len(set(deviations)) > 1 and statistics.pstdev(deviations) < 1e-3:
        return  # both sides whiten rounding errors there
    close(
        reinforce_plus_plus_baseline_advantages(columns["rewards"], columns["groups"], columns["lengths"]),
        plain_whitened(deviations, lengths),
    )


def test_a_long_row_counts_for_each_of_its_tokens() -> None:
    # four tokens 0, 0, 0, 4: mean 1, squared deviations 3 + 9 = 12, sample variance 4, deviation 2
    got = reinforce_plus_plus_advantages(torch.tensor([0.0, 4.0, 100.0]), torch.tensor([3, 1, 0]))
    assert got.tolist() == pytest.approx([-0.5, 1.5, 0.0], rel=1e-6)
    got = reinforce_plus_plus_advantages(torch.tensor([0.0, 4.0]), torch.tensor([3, 1]), epsilon=2.0)
    assert got.tolist() == pytest.approx([-0.25, 0.75], rel=1e-6)
    # groups of mean 5 and 1: deviations -1 and 1, and 0; tokens -1, -1, 1, 1, 0, 0, 0, 0: sample variance 4/7
    got = reinforce_plus_plus_baseline_advantages(
        torch.tensor([4.0, 6.0, 1.0]), torch.tensor([0, 0, 1]), torch.tensor([2, 2, 4])
    )
    assert got.tolist() == pytest.approx([-math.sqrt(7) / 2, math.sqrt(7) / 2, 0.0], rel=1e-6)


def test_a_batch_of_equal_rewards_teaches_nothing() -> None:
    same = torch.full((3,), 0.1, dtype=torch.float64)
    assert reinforce_plus_plus_advantages(same, torch.tensor([1, 2, 3])).tolist() == [0.0] * 3
    assert reinforce_plus_plus_advantages(torch.tensor([1.0, 2.0]), torch.tensor([0, 0])).tolist() == [0.0] * 2
    assert reinforce_plus_plus_advantages(torch.tensor([1.0, 2.0]), torch.tensor([0, 1])).tolist() == [0.0] * 2


def test_remax_is_the_distance_from_the_greedy_answer() -> None:
    got = remax_advantages(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0.25, 1.0, 0.5]))
    assert got.tolist() == [0.75, -1.0, 0.0]
    with pytest.raises(SchemaError, match=r"greedy_rewards must be \(2,\) like rewards, got \(1,\)"):
        remax_advantages(torch.zeros(2), torch.zeros(1))
    with pytest.raises(InvalidDataError, match="row 1"):
        remax_advantages(torch.zeros(2), torch.tensor([0.0, math.nan]))


# --------------------------------------------------------------------------------------------------- best of several


def plain_pass_at_k(solved: list[bool], k: int) -> list[float]:
    """Every subset of k rows written out: its reward is 1 if any row in it solved."""
    subsets = list(itertools.combinations(range(len(solved)), k))
    reward = [float(any(solved[row] for row in subset)) for subset in subsets]
    mean, deviation = statistics.fmean(reward), statistics.pstdev(reward)
    if deviation == 0:
        return [0.0] * len(solved)
    relative = [(each - mean) / deviation for each in reward]
    return [
        statistics.fmean(a for a, subset in zip(relative, subsets, strict=True) if row in subset)
        for row in range(len(solved))
    ]


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
@settings(max_examples=60, deadline=None)
def test_pass_at_k_is_the_mean_over_all_subsets(solved: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(solved)))
    got = pass_at_k_advantages(torch.tensor(solved).float(), torch.zeros(len(solved), dtype=torch.int64), k=k)
    close(got, plain_pass_at_k(solved, k))


def test_one_of_four_solved_with_two_answers() -> None:
    # 3 of 6 pairs fail: q = 1/2, s = 1/2. A failure is in 3 pairs, 2 of which fail: (1/2 - 2/3) / (1/2)
    rewards, groups = torch.tensor([0.0, 1.0, 0.0, 0.0]), torch.tensor([5, 5, 5, 5])
    assert pass_at_k_advantages(rewards, groups, k=2).tolist() == pytest.approx([-1 / 3, 1.0, -1 / 3, -1 / 3])
    assert pass_at_k_advantages(rewards * 0.5, groups, k=2, success_reward=0.5).tolist() == pytest.approx(
        [-1 / 3, 1.0, -1 / 3, -1 / 3]
    )
    assert pass_at_k_advantages(rewards * 0.9, groups, k=2, success_reward=0.9)[1] == 1.0  # float32 has less than 0.9
    assert pass_at_k_advantages(rewards, groups).tolist() == [0.0] * 4  # four answers of four: never missed
    with pytest.raises(InvalidDataError, match=r"group 5 has 4 rows; pass@5 needs 5"):
        pass_at_k_advantages(rewards, groups, k=5)
    with pytest.raises(InvalidDataError, match=r"group 8 has 1 rows"):
        pass_at_k_advantages(torch.zeros(3), torch.tensor([5, 8, 5]), k=2)
    with pytest.raises(ConfigError, match="k is 0"):
        pass_at_k_advantages(rewards, groups, k=0)


def test_only_a_single_best_row_gets_an_advantage() -> None:
    rewards = torch.tensor([3.0, 1.0, 2.5, 4.0, 4.0, 0.0, 9.0])
    groups = torch.tensor([0, 0, 0, 1, 1, 1, 2])
    assert best_of_group_advantages(rewards, groups).tolist() == [0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert best_of_group_advantages(-rewards, groups).tolist() == [0.0, 1.5, 0.0, 0.0, 0.0, 4.0, 0.0]


# --------------------------------------------------------------------------------------------------- tokens and turns


def plain_gae(
    rewards: list[float], values: list[float], *, gamma: float, gae_lambda: float, last: float
) -> tuple[list[float], list[float]]:
    advantages = []
    for start in range(len(rewards)):
        total = 0.0
        for t in range(start, len(rewards)):
            following = values[t + 1] if t + 1 < len(values) else last
            total += (gamma * gae_lambda) ** (t - start) * (rewards[t] + gamma * following - values[t])
        advantages.append(total)
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


@given(
    st.lists(st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), max_size=6), min_size=1, max_size=5),
    st.floats(0, 1),
    st.floats(0, 1),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_gae_equals_plain_sums(
    batch: list[list[tuple[float, float]]], gamma: float, gae_lambda: float, cut_off: bool
) -> None:
    last = [0.5 * row if cut_off else 0.0 for row in range(len(batch))]
    expected = [
        plain_gae([r for r, _ in row], [v for _, v in row], gamma=gamma, gae_lambda=gae_lambda, last=end)
        for row, end in zip(batch, last, strict=True)
    ]
    got = gae(
        torch.tensor([r for row in batch for r, _ in row], dtype=torch.float64),
        torch.tensor([v for row in batch for _, v in row], dtype=torch.float64),
        torch.tensor([len(row) for row in batch]),
        gamma=gamma,
        gae_lambda=gae_lambda,
        last_values=torch.tensor(last) if cut_off else None,
    )
    for which in (0, 1):
        close(got[which], [value for row in expected for value in row[which]])


def test_gae_of_two_rows_by_hand() -> None:
    # Rows of 2 and 1 tokens. gamma 1/2, lambda 1/2: delta_1 = 1 - 2 = -1, delta_0 = 0 + 1 - 4 = -3, A_0 = -3 - 1/4
    rewards, values = torch.tensor([0.0, 1.0, 5.0]), torch.tensor([4.0, 2.0, 3.0], requires_grad=True)
    advantages, returns = gae(rewards, values, torch.tensor([2, 1]), gamma=0.5, gae_lambda=0.5)
    assert advantages.tolist() == [-3.25, -1.0, 2.0]
    assert returns.tolist() == [0.75, 1.0, 5.0]
    assert not advantages.requires_grad
    assert gae_advantages(rewards, values, torch.tensor([2, 1]), gamma=0.5, gae_lambda=0.5).equal(advantages)
    default = gae(rewards, values, torch.tensor([2, 1]))[0]
    assert default.tolist() == pytest.approx([-2 - 0.95, -1.0, 2.0])
    assert gae_advantages(rewards, values, torch.tensor([2, 1])).equal(default)
    with pytest.raises(SchemaError, match=r"must be \[3\], one per sampled token, got \(2,\) and \(3,\)"):
        gae(rewards[:2], values, torch.tensor([2, 1]))
    with pytest.raises(SchemaError, match=r"got \(3,\) and \(1,\)"):
        gae(rewards, values[:1], torch.tensor([2, 1]))
    with pytest.raises(SchemaError, match=r"last_values must be \[2\], one per row, got \(1,\)"):
        gae(rewards, values, torch.tensor([2, 1]), last_values=torch.zeros(1))
    assert [len(each) for each in gae(rewards[:0], values[:0], torch.tensor([], dtype=torch.int64))] == [0, 0]


def plain_gigpo(
    rewards: list[float], groups: list[int], turns: list[tuple[float, int, int]], *, gamma: float, weight: float
) -> list[float]:
    def relative(values: list[float], keys: list[Any]) -> list[float]:
        answer = []
        for value, key in zip(values, keys, strict=True):
            same = [v for v, k in zip(values, keys, strict=True) if k == key]
            if len(set(same)) == 1:
                answer.append(0.0)
            else:
                answer.append((value - statistics.fmean(same)) / (statistics.stdev(same) + 1e-6))
        return answer

    returns = []
    for at, (_, row, _) in enumerate(turns):
        later = [earned for earned, its_row, _ in turns[at:] if its_row == row]
        returns.append(sum(gamma**n * earned for n, earned in enumerate(later)))
    episodes = relative(rewards, groups)
    steps = relative(returns, [(groups[row], anchor) for _, row, anchor in turns])
    return [episodes[row] + weight * step for (_, row, _), step in zip(turns, steps, strict=True)]


@given(
    st.lists(st.tuples(st.integers(-4, 4), st.integers(0, 1)), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 4), st.integers(0, 2)), max_size=10),
    st.sampled_from([0.5, 1.0]),
    st.sampled_from([0.0, 1.0, 2.0]),
)
@settings(max_examples=60, deadline=None)
def test_gigpo_equals_plain_python(
    batch: list[tuple[int, int]], drawn: list[tuple[int, int, int]], gamma: float, weight: float
) -> None:
    turns = [(float(earned), row % len(batch), anchor) for earned, row, anchor in drawn]
    rewards, groups = [float(r) for r, _ in batch], [g for _, g in batch]
    got = gigpo_advantages(
        torch.tensor(rewards),
        torch.tensor(groups),
        torch.tensor([earned for earned, _, _ in turns]),
        torch.tensor([row for _, row, _ in turns], dtype=torch.int64),
        torch.tensor([anchor for _, _, anchor in turns], dtype=torch.int64),
        gamma=gamma,
        weight=weight,
    )
    close(got, plain_gigpo(rewards, groups, turns, gamma=gamma, weight=weight))


def test_gigpo_by_hand() -> None:
    # Two rows of one prompt, returns 1 and 0; both pass state 7, from where one earns 1 and the other 0.
    arguments = (
        torch.tensor([1.0, 0.0]),
        torch.tensor([3, 3]),
        torch.tensor([0.0, 0.0, 1.0, 0.0]),
        torch.tensor([0, 1, 0, 1]),
        torch.tensor([7, 7, 8, 9]),
    )
    got = gigpo_advantages(*arguments, gamma=0.5, normalise=False)
    # episode: +-1/2; state 7: discounted returns 1/2 and 0, so +-1/4; states 8 and 9 have one turn each
    assert got.tolist() == [0.75, -0.75, 0.5, -0.5]
    assert gigpo_advantages(*arguments, normalise=False).tolist() == pytest.approx([0.975, -0.975, 0.5, -0.5])
    with pytest.raises(InvalidDataError, match=r"turn_rows must lie in 0\.\.1"):
        gigpo_advantages(*arguments[:3], torch.tensor([0, 1, 2, 1]), arguments[4])
    with pytest.raises(InvalidDataError, match="turn_rows"):
        gigpo_advantages(*arguments[:3], torch.tensor([0, 1, -1, 1]), arguments[4])
    for wrong in (arguments[3][:2], arguments[4][:2]):
        with pytest.raises(SchemaError, match=r"must be \[K\]"):
            gigpo_advantages(*arguments[:3], wrong, arguments[4])
        with pytest.raises(SchemaError, match=r"must be \[K\]"):
            gigpo_advantages(*arguments[:4], wrong)


def test_gigpo_of_a_tree_by_hand() -> None:
    # Row 0: two turns continue the first and earn 4 and 0; row 1 passes the same state, and earns 0 from there.
    arguments = (
        torch.tensor([4.0, 0.0]),
        torch.tensor([3, 3]),
        torch.tensor([0.0, 4.0, 0.0, 0.0]),
        torch.tensor([0, 0, 0, 1]),
        torch.tensor([7, 8, 8, 7]),
    )
    got = gigpo_advantages(*arguments, torch.tensor([-1, 0, 0, -1]), gamma=0.5, normalise=False)
    # episode: +-2; state 7: 0.5 * (4 + 0) / 2 = 1 and 0, so +-0.5; state 8: 4 and 0, so +-2
    assert got.tolist() == [2.5, 4.0, 0.0, -2.5]
    for wrong in ([-1, 0, 0], [-1, 1, 0, -1], [-2, 0, 0, -1]):
        with pytest.raises(InvalidDataError, match="turn_parents"):
            gigpo_advantages(*arguments, torch.tensor(wrong))


# -------------------------------------------------------------------------------------------------------- online DPO


def plain_preference_loss(rewards: list[float], owners: list[int], ratios: list[float], kind: str) -> float:
    """Mean loss of the pairs of a batch: best with worst, second best with second worst, as long as they differ."""
    losses = []
    for group in sorted(set(owners)):
        members = [row for row, owner in enumerate(owners) if owner == group]
        best = sorted(members, key=lambda row: -rewards[row])
        worst = sorted(members, key=lambda row: (rewards[row], -row))
        for chosen, rejected in zip(best, worst, strict=True):
            if rewards[chosen] <= rewards[rejected]:
                break
            x = ratios[chosen] - ratios[rejected]
            losses.append(math.log1p(math.exp(-0.3 * x)) if kind == "dpo" else (x - 1 / 0.6) ** 2)
    return sum(losses) / len(losses) if losses else 0.0


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 3).map(float), st.integers(0, 2), st.floats(-3, 3, width=32)), min_size=1, max_size=12
    ),
    kind=st.sampled_from(["dpo", "ipo"]),
)
def test_online_dpo_is_minus_the_slope_of_the_preference_loss(rows: list[tuple[float, int, float]], kind: str) -> None:
    rewards, owners, ratios = map(list, zip(*rows, strict=True))
    got = online_dpo_advantages(
        torch.tensor(rewards), torch.tensor(owners), torch.tensor(ratios, dtype=torch.float64), beta=0.3, kind=kind
    )
    slopes = []
    for row in range(len(rows)):
        moved = [[*ratios] for _ in range(2)]
        moved[0][row] += 1e-5
        moved[1][row] -= 1e-5
        up, down = (plain_preference_loss(rewards, owners, each, kind) for each in moved)
        slopes.append((up - down) / 2e-5)
    # The mean over rows of -advantage * log-prob has the slope of the mean over pairs.
    assert got.tolist() == pytest.approx([-slope * len(rows) for slope in slopes], rel=1e-3, abs=1e-4)


def test_online_dpo_refuses_what_does_not_fit() -> None:
    with pytest.raises(SchemaError, match="divergences must be"):
        online_dpo_advantages(torch.zeros(2), torch.zeros(2, dtype=torch.int64), torch.zeros(3))
    with pytest.raises(ConfigError, match="beta is 0"):
        online_dpo_advantages(torch.zeros(2), torch.zeros(2, dtype=torch.int64), torch.zeros(2), beta=0.0)


# ----------------------------------------------------------------------------------------------------------- by name


def test_an_estimator_names_the_columns_it_needs() -> None:
    needs: Mapping[str, tuple[str, ...]] = {
        "grpo": ("rewards", "groups"),
        "opo": ("rewards", "groups", "lengths"),
        "reinforce_plus_plus": ("rewards", "lengths"),
        "remax": ("rewards", "greedy_rewards"),
        "online_dpo": ("rewards", "groups", "divergences"),
        "gae": ("token_rewards", "values", "lengths"),
        "gigpo": ("rewards", "groups", "turn_rewards", "turn_rows", "turn_anchors"),
    }
    assert {name: load_estimator(name).needs for name in needs} == needs
    with pytest.raises(SchemaError, match="'remax' needs greedy_rewards; the batch has rewards, groups"):
        load_estimator("remax")({"rewards": torch.zeros(2), "groups": torch.zeros(2)})


def test_names_and_options_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match="no advantage named 'gppo'") as caught:
        load_estimator("gppo")
    assert caught.value.path == "algorithm.advantage"
    with pytest.raises(ConfigError, match="did you mean 'epsilon'") as caught:
        load_estimator("grpo", options={"epsilom": 1.0}, path="x.y")
    assert caught.value.path == "x.y_options.epsilom"
    with pytest.raises(ConfigError, match="allowed: none"):
        load_estimator("rloo", options={"epsilon": 1.0})
    assert load_estimator("grpo", options={"epsilon": 1.0}).options == {"epsilon": 1.0}


def estimator(function: Callable[..., Any], **options: Any) -> AdvantageEstimator:
    return AdvantageEstimator("mine", function, options)


def test_a_users_function() -> None:
    def mine(rewards: torch.Tensor, lengths: torch.Tensor | None = None, *, scale: float = 1.0) -> torch.Tensor:
        return rewards.double() * scale + (0 if lengths is None else lengths)

    assert estimator(mine).needs == ("rewards",)
    columns = {"rewards": torch.tensor([1.0, 2.0]), "groups": torch.tensor([0, 0])}
    got = estimator(mine, scale=2.0)(columns)
    assert got.tolist() == [2.0, 4.0]
    assert got.dtype == torch.float32
    assert estimator(mine)({**columns, "lengths": torch.tensor([5, 6])}).tolist() == [6.0, 8.0]


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (torch.zeros(3), r"\(3,\)"),
        (torch.tensor([1.0, math.nan]), r"\(2,\)"),
        ([1.0, 2.0], "list"),
        (torch.tensor([1.0, 1e300]).double() * 1e300, r"\(2,\)"),
    ],
)
def test_an_answer_that_is_not_an_advantage_is_refused(answer: Any, got: str) -> None:
    with pytest.raises(UserCodeError, match=rf"advantage 'mine' must return \[2\] finite numbers, got {got}"):
        estimator(lambda rewards: answer)({"rewards": torch.zeros(2)})


def test_it_gives_as_many_numbers_as_its_finest_column_has() -> None:
    assert {name: load_estimator(name).level for name in ("grpo", "remax", "gigpo", "gae")} == {
        "grpo": "row",
        "remax": "row",
        "gigpo": "turn",
        "gae": "token",
    }
    columns = {"rewards": torch.zeros(1), "turn_rewards": torch.zeros(2), "token_rewards": torch.zeros(5)}
    of_turns, of_tokens = (
        AdvantageEstimator("mine", each, {})
        for each in (lambda rewards, turn_rewards: turn_rewards + 1, lambda token_rewards: token_rewards)
    )
    assert of_turns(columns).tolist() == [1.0, 1.0]
    assert len(of_tokens(columns)) == 5
    with pytest.raises(UserCodeError, match=r"must return \[5\] finite numbers, got \(2,\)"):
        AdvantageEstimator("mine", lambda token_rewards, turn_rewards: turn_rewards, {})(columns)
