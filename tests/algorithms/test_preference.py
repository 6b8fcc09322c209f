"""DPO against plain Python."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms import PreferenceObjective, answer_log_probs, preference_pairs
from asyncrl.data.ragged import ragged_from_list
from asyncrl.errors import ConfigError, InvalidDataError, SchemaError

NAMES = ("chosen_log_probs", "rejected_log_probs", "reference_chosen_log_probs", "reference_rejected_log_probs")

pair = st.tuples(*[st.floats(-40, 0)] * 4)


def plain(beta: float, smoothing: float, values: tuple[float, ...], kind: str = "dpo") -> float:
    chosen, rejected, reference_chosen, reference_rejected = values
    if kind == "ipo":
        return (((chosen - reference_chosen) - (rejected - reference_rejected)) - 1 / (2 * beta)) ** 2
    margin = beta * ((chosen - reference_chosen) - (rejected - reference_rejected))
    return (1 - smoothing) * math.log1p(math.exp(-margin)) + smoothing * math.log1p(math.exp(margin))


def columns(pairs: list[tuple[float, ...]]) -> dict[str, torch.Tensor]:
    return {
        name: torch.tensor([values[i] for values in pairs], dtype=torch.float64, requires_grad=True)
        for i, name in enumerate(NAMES)
    }


@given(st.floats(0.01, 1), st.floats(0, 0.49), st.lists(pair, min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_loss_and_gradient_equal_plain_python(beta: float, smoothing: float, pairs: list[tuple[float, ...]]) -> None:
    given_columns = columns(pairs)
    got = PreferenceObjective(beta=beta, label_smoothing=smoothing).pair_losses(**given_columns)
    assert got.loss.tolist() == pytest.approx([plain(beta, smoothing, values) for values in pairs], rel=1e-9)
    got.loss.sum().backward()
    step = 1e-5
    for i, name in enumerate(NAMES[:2]):
        slopes = [
            (
                plain(beta, smoothing, (*values[:i], values[i] + step, *values[i + 1 :]))
                - plain(beta, smoothing, (*values[:i], values[i] - step, *values[i + 1 :]))
            )
            / (2 * step)
            for values in pairs
        ]
        gradient = given_columns[name].grad
        assert gradient is not None
        assert gradient.tolist() == pytest.approx(slopes, rel=1e-4, abs=1e-7)
        assert gradient.tolist() == pytest.approx((got.advantage * (-1, 1)[i]).tolist(), rel=1e-9)
    assert all(given_columns[name].grad is None for name in NAMES[2:])


@pytest.mark.parametrize("beta", [0.05, 0.5])
def test_ipo_and_its_gradient_equal_plain_python(beta: float) -> None:
    pairs = [(-3.0, -1.0, -2.0, -2.5), (-1.0, -6.0, -2.0, -4.0), (-1.0, -1.0, -1.0, -1.0)]
    given_columns = columns([*pairs])
    got = PreferenceObjective(kind="ipo", beta=beta).pair_losses(**given_columns)
    assert got.loss.tolist() == pytest.approx([plain(beta, 0.0, values, "ipo") for values in pairs])
    assert got.chosen_reward.tolist() == pytest.approx([-beta, beta, 0.0])
    got.loss.sum().backward()
    for i, name in enumerate(NAMES[:2]):
        slopes = [
            (
                plain(beta, 0.0, (*values[:i], values[i] + 1e-6, *values[i + 1 :]), "ipo")
                - plain(beta, 0.0, (*values[:i], values[i] - 1e-6, *values[i + 1 :]), "ipo")
            )
            / 2e-6
            for values in pairs
        ]
        gradient = given_columns[name].grad
        assert gradient is not None
        assert gradient.tolist() == pytest.approx(slopes, rel=1e-4, abs=1e-6)
        assert gradient.tolist() == pytest.approx((got.advantage * (-1, 1)[i]).tolist(), rel=1e-9)
    for wrong in ({"kind": "kpo"}, {"kind": "ipo", "label_smoothing": 0.1}):
        with pytest.raises(ConfigError) as caught:
            PreferenceObjective(**wrong)  # type: ignore[arg-type]
        assert caught.value.remedy


def test_a_policy_equal_to_the_reference_has_no_preference() -> None:
    given_columns = columns([(-3.0, -2.0, -3.0, -2.0)])
    got = PreferenceObjective(beta=0.1).pair_losses(**given_columns)
    assert float(got.loss.detach()) == pytest.approx(math.log(2))
    assert (float(got.chosen_reward), float(got.rejected_reward), float(got.correct)) == (0.0, 0.0, 0.5)
    got.loss.sum().backward()
    chosen, rejected = given_columns["chosen_log_probs"].grad, given_columns["rejected_log_probs"].grad
    assert chosen is not None
    assert rejected is not None
    assert (float(chosen), float(rejected)) == pytest.approx((-0.05, 0.05))  # beta * sigmoid(0)


def test_implicit_rewards_and_correct_pairs() -> None:
    got = PreferenceObjective(beta=0.5).pair_losses(**columns([(-1.0, -5.0, -2.0, -4.0), (-4.0, -1.0, -2.0, -2.0)]))
    assert got.chosen_reward.tolist() == [0.5, -1.0]
    assert got.rejected_reward.tolist() == [-0.5, 0.5]
    assert got.correct.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("kind", ["dpo", "ipo"])
def test_only_the_policy_gets_a_gradient(kind: Any) -> None:
    given_columns = columns([(-1.0, -2.0, -1.5, -1.0)])
    got = PreferenceObjective(beta=0.5, kind=kind).pair_losses(**given_columns)
    got.loss.sum().backward()
    assert {name for name, column in given_columns.items() if column.grad is not None} == {
        "chosen_log_probs",
        "rejected_log_probs",
    }
    detached = (got.chosen_reward, got.rejected_reward, got.correct, got.advantage)
    assert not any(column.requires_grad for column in detached)


def test_a_hopeless_margin_stays_finite() -> None:
    given_columns = columns([(-1e6, 0.0, 0.0, -1e6)])
    got = PreferenceObjective(beta=1.0).pair_losses(**given_columns)
    got.loss.sum().backward()
    assert float(got.loss) == pytest.approx(2e6)
    gradient = given_columns["chosen_log_probs"].grad
    assert gradient is not None
    assert float(gradient) == pytest.approx(-1.0)


@pytest.mark.parametrize(
    "wrong", [{"beta": 0.0}, {"beta": math.inf}, {"label_smoothing": 0.5}, {"label_smoothing": -0.1}]
)
def test_values_outside_their_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        PreferenceObjective(**wrong)


def test_columns_that_do_not_fit_are_named() -> None:
    good = {name: torch.zeros(2) for name in NAMES}
    with pytest.raises(SchemaError, match=r"rejected_log_probs must be \[P\] floating.*\(3,\)"):
        PreferenceObjective().pair_losses(**{**good, "rejected_log_probs": torch.zeros(3)})
    with pytest.raises(SchemaError, match="reference_chosen_log_probs"):
        PreferenceObjective().pair_losses(**{**good, "reference_chosen_log_probs": torch.zeros(2, dtype=torch.int64)})


def test_the_best_is_paired_with_the_worst_as_long_as_they_differ() -> None:
    rewards = torch.tensor([0.5, 3.0, 1.0, 1.0, 2.0, 0.0, 7.0, 7.0])
    groups = torch.tensor([4, 4, 4, 4, 2, 2, 3, 3])
    # group 2: rows 4 (2.0) and 5 (0.0); group 3: equal; group 4: 3.0 with 0.5, then 1.0 with 1.0
    assert preference_pairs(rewards, groups).tolist() == [4, 5, 1, 0]


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 3)), max_size=16))
@settings(max_examples=60, deadline=None)
def test_pairs_are_of_one_group_prefer_the_higher_reward_and_use_a_row_once(rows: list[tuple[float, int]]) -> None:
    rewards, groups = [r for r, _ in rows], [g for _, g in rows]
    pairs = preference_pairs(torch.tensor(rewards), torch.tensor(groups, dtype=torch.int64)).tolist()
    assert len(set(pairs)) == len(pairs)
    for chosen, rejected in zip(pairs[0::2], pairs[1::2], strict=True):
        assert groups[chosen] == groups[rejected]
        assert rewards[chosen] > rewards[rejected]
    for group in set(groups):  # with two rewards, as many pairs as the rarer one has rows
        members = [reward for reward, its in rows if its == group]
        if set(members) == {0.0, 1.0}:
            assert sum(groups[row] == group for row in pairs) == 2 * min(members.count(0.0), members.count(1.0))


def test_a_reward_that_is_no_number_cannot_be_compared() -> None:
    with pytest.raises(InvalidDataError, match=r"row 1 \(group 6\) is nan"):
        preference_pairs(torch.tensor([1.0, math.nan]), torch.tensor([6, 6]))


def test_answers_are_summed_over_what_was_sampled() -> None:
    leaf = torch.tensor([-1.0, math.nan, -2.0, -4.0, -8.0], requires_grad=True)
    masks = [torch.tensor([True, False, True]), torch.tensor([False]), torch.tensor([True])]
    columns = ragged_from_list([leaf[:3], leaf[3:4], leaf[4:]]), ragged_from_list(masks)
    sums = answer_log_probs(*columns)
    sums.sum().backward()
    assert sums.tolist() == [-3.0, 0.0, -8.0]
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [1.0, 0.0, 1.0, 0.0, 1.0]
    with pytest.raises(SchemaError, match="same lengths"):
        answer_log_probs(columns[0], ragged_from_list(masks[:2]))
    assert answer_log_probs(ragged_from_list([]), ragged_from_list([])).tolist() == []


def test_rewards_and_groups_that_do_not_fit_are_refused() -> None:
    with pytest.raises(SchemaError, match=r"must be \[B\], got \(2, 1\) and \(2, 1\)"):
        preference_pairs(torch.zeros(2, 1), torch.zeros(2, 1, dtype=torch.int64))
    with pytest.raises(SchemaError, match=r"must be \[B\], got \(2,\) and \(3,\)"):
        preference_pairs(torch.zeros(2), torch.zeros(3, dtype=torch.int64))
    assert preference_pairs(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []


def test_objectives_name_the_range_of_an_option() -> None:
    assert (PreferenceObjective().kind, PreferenceObjective().beta, PreferenceObjective().label_smoothing) == (
        "dpo",
        0.1,
        0.0,
    )
    PreferenceObjective(label_smoothing=0.0)
    with pytest.raises(ConfigError) as caught:
        PreferenceObjective(kind="kpo")  # type: ignore[arg-type]
    assert caught.value.path == "kind"
    with pytest.raises(ConfigError) as caught:
        PreferenceObjective(kind="ipo", label_smoothing=0.1)
    assert caught.value.path == "label_smoothing"
