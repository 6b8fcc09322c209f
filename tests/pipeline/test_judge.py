"""What the driver joins to a batch's rows, by what the advantage is given to."""

from __future__ import annotations

import pytest
import torch

from asyncrl.algorithms import AdvantageEstimator, FixedKL, gigpo_advantages, load_estimator
from asyncrl.data.ragged import rows_of
from asyncrl.errors import InvalidDataError
from asyncrl.interfaces import GroupSummary
from asyncrl.pipeline.judge import Judge
from asyncrl.pipeline.reward_penalty import RewardPenalty


def group(slot: int, *rewards: float, turns: tuple[tuple[float, ...], ...] = ()) -> GroupSummary:
    return GroupSummary(
        slot=slot,
        rows=len(rewards),
        oldest_version=0,
        tokens=2 * len(rewards),
        version_tokens={0: 2 * len(rewards)},
        rewards=rewards,
        lengths=(2,) * len(rewards),
        turn_rewards=turns,
        turn_anchors=tuple(tuple(range(len(row))) for row in turns),
    )


def test_rows_get_a_number_each() -> None:
    judge = Judge(estimator=load_estimator("dr_grpo"))
    found = judge.judge([group(3, 0.0, 1.0), group(7, 5.0, 5.0)])
    assert found.credit is None
    assert found.columns.batch["advantages"].tolist() == [-0.5, 0.5, 0.0, 0.0]
    assert judge.row_columns == ()
    assert judge.stepped([group(3, 0.0, 1.0)]) == {}


def test_remax_compares_with_the_greedy_answer_of_each_group() -> None:
    judge = Judge(estimator=load_estimator("remax"), greedy={3: 0.25, 7: 1.0, 8: 0.0})
    groups = [group(3, 0.0, 1.0), group(7, 1.0, 0.0)]
    assert judge.judge(groups).columns.batch["advantages"].tolist() == [-0.25, 0.75, 0.0, -1.0]
    assert judge.stepped(groups) == {"greedy_reward": 0.625}
    judge.forget(8)
    assert judge.greedy == {}
    with pytest.raises(InvalidDataError, match="group 3 has no reward of a greedy answer"):
        judge.judge(groups)


def test_turns_get_a_number_each() -> None:
    groups = [group(3, 1.0, 0.0, turns=((0.0, 1.0), (0.0,))), group(4, 2.0, turns=((2.0, 0.0),))]
    judge = Judge(estimator=load_estimator("gigpo", options={"normalise": False, "discount": 0.5}))
    found = judge.judge(groups)
    assert judge.row_columns == ("turns",)
    # Episodes: +-0.5 and 0. The first turns of group 3 start alike: returns 0.5 and 0, so +-0.25 more.
    assert [row.tolist() for row in rows_of(found.columns.batch["turn_advantages"])] == [
        [0.75, 0.5],
        [-0.75],
        [0.0, 0.0],
    ]
    # A reward model's score is of the whole row: it stands at its last turn.
    scored = Judge(estimator=judge.estimator, by_turns=False).judge([group(3, 1.0, 3.0, turns=((9.0, 9.0), (9.0,)))])
    expected = gigpo_advantages(
        torch.tensor([1.0, 3.0]),
        torch.tensor([3, 3]),
        torch.tensor([0.0, 1.0, 3.0]),
        torch.tensor([0, 0, 1]),
        torch.tensor([0, 1, 0]),
        normalise=False,
        discount=0.5,
    )
    assert torch.cat(rows_of(scored.columns.batch["turn_advantages"])).tolist() == expected.tolist()
    with pytest.raises(InvalidDataError, match="group 5 does not tell of the turns of its rows"):
        judge.judge([group(5, 1.0)])


def test_tokens_are_judged_where_they_are_trained() -> None:
    penalty = RewardPenalty(FixedKL(coefficient=0.5))
    judge = Judge(
        estimator=load_estimator("gae", options={"trace": 0.9}), trace=0.7, penalty=penalty, kl_estimator="k3"
    )
    found = judge.judge([group(3, 0.0, 1.0)])
    assert found.columns.batch["rewards"].tolist() == [0.0, 1.0]  # the penalty is taken off token by token
    assert found.credit is not None
    assert (found.credit.estimator, found.credit.options, found.credit.trace) == ("gae", {"trace": 0.9}, 0.7)
    assert (found.credit.kl_coefficient, found.credit.kl_estimator, found.credit.by_turns) == (0.5, "k3", True)
    assert judge.row_columns == ("turns", "turn_rewards", "values")
    assert Judge(estimator=judge.estimator, by_turns=False).row_columns == ("values",)
    alone = AdvantageEstimator("alone", lambda token_rewards: token_rewards, {})
    assert Judge(estimator=alone, by_turns=False).row_columns == ()


def test_online_dpo_compares_what_diverged() -> None:
    judge = Judge(estimator=load_estimator("online_dpo", options={"beta": 0.5}))
    groups = [group(3, 0.0, 1.0), group(7, 1.0, 1.0)]
    judge.told(3, (1.0, 3.0))
    judge.told(7, (0.0, 0.0))
    judge.told(8, (9.0,))
    # One pair, 4 rows: 4 * 0.5 * sigmoid(-0.5 * (3 - 1)) = 2 * 0.268941
    found = judge.judge(groups).columns.batch["advantages"].tolist()
    assert found == pytest.approx([-0.537883, 0.537883, 0.0, 0.0])
    assert judge.stepped(groups) == {"divergence": 4.0 / 8}
    judge.forget(8)
    assert judge.divergences == {}
    with pytest.raises(InvalidDataError, match="group 3 has no divergence for each of its rows"):
        judge.judge(groups)
