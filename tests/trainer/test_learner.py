"""What is joined to the rows of a batch, by what the advantage is computed from."""

from __future__ import annotations

import pytest
import torch

from asyncrl.algorithms import AdvantageEstimator, FixedKL, gigpo_advantages, load_estimator
from asyncrl.data.ragged import rows_of
from asyncrl.errors import InvalidDataError
from asyncrl.interfaces import GroupSummary
from asyncrl.staleness import certify
from asyncrl.trainer.group import Group
from asyncrl.trainer.learner import Advantages, StepRecord


def group(
    group_id: int,
    *rewards: float,
    turns: tuple[tuple[float, ...], ...] = (),
    parents: tuple[tuple[int, ...], ...] = (),
    baseline_reward: float | None = None,
    divergences: tuple[float, ...] | None = None,
) -> Group:
    summary = GroupSummary(
        group_id=group_id,
        rows=len(rewards),
        oldest_version=0,
        tokens=2 * len(rewards),
        version_tokens={0: 2 * len(rewards)},
        rewards=rewards,
        lengths=(2,) * len(rewards),
        turn_rewards=turns,
        turn_anchors=tuple(tuple(range(len(row))) for row in turns),
        turn_parents=parents,
    )
    return Group(
        group_id=group_id,
        summary=summary,
        baseline_reward=baseline_reward,
        divergences=divergences,
    )


def test_rows_get_a_number_each() -> None:
    advantages = Advantages(estimator=load_estimator("dr_grpo"))
    found = advantages.of([group(3, 0.0, 1.0), group(7, 5.0, 5.0)])
    assert found.by_token is None
    assert found.columns.batch["advantages"].tolist() == [-0.5, 0.5, 0.0, 0.0]
    assert advantages.row_columns == ()
    assert advantages.finish_step([group(3, 0.0, 1.0)]) == {}


def test_remax_compares_with_the_greedy_answer_of_each_group() -> None:
    advantages = Advantages(estimator=load_estimator("remax"))
    assert advantages.needs_baseline
    groups = [group(3, 0.0, 1.0, baseline_reward=0.25), group(7, 1.0, 0.0, baseline_reward=1.0)]
    assert advantages.of(groups).columns.batch["advantages"].tolist() == [-0.25, 0.75, 0.0, -1.0]
    assert advantages.finish_step(groups) == {"greedy_reward": 0.625}
    with pytest.raises(InvalidDataError, match="group 3 has no reward of a greedy answer"):
        advantages.of([group(3, 0.0, 1.0)])


def test_turns_get_a_number_each() -> None:
    groups = [group(3, 1.0, 0.0, turns=((0.0, 1.0), (0.0,))), group(4, 2.0, turns=((2.0, 0.0),))]
    advantages = Advantages(estimator=load_estimator("gigpo", options={"normalise": False, "gamma": 0.5}))
    found = advantages.of(groups)
    assert advantages.row_columns == ("turns",)
    # Episodes: +-0.5 and 0. The first turns of group 3 start alike: returns 0.5 and 0, so +-0.25 more.
    assert [row.tolist() for row in rows_of(found.columns.batch["turn_advantages"])] == [
        [0.75, 0.5],
        [-0.75],
        [0.0, 0.0],
    ]
    # A reward model's score is of the whole row: it stands at its last turn.
    scored = Advantages(estimator=advantages.estimator, by_turns=False).of(
        [group(3, 1.0, 3.0, turns=((9.0, 9.0), (9.0,)))]
    )
    expected = gigpo_advantages(
        torch.tensor([1.0, 3.0]),
        torch.tensor([3, 3]),
        torch.tensor([0.0, 1.0, 3.0]),
        torch.tensor([0, 0, 1]),
        torch.tensor([0, 1, 0]),
        normalise=False,
        gamma=0.5,
    )
    assert torch.cat(rows_of(scored.columns.batch["turn_advantages"])).tolist() == expected.tolist()
    with pytest.raises(InvalidDataError, match="group 5 lacks the turns of its rows"):
        advantages.of([group(5, 1.0)])


def test_turns_of_a_tree_are_followed_by_those_that_continue_them() -> None:
    groups = [group(3, 1.0, turns=((1.0,),)), group(4, 4.0, turns=((0.0, 3.0, 0.0),), parents=((-1, 0, 0),))]
    seen: dict[str, list[float]] = {}

    def watched(turn_rewards: torch.Tensor, turn_parents: torch.Tensor) -> torch.Tensor:
        seen.update(rewards=turn_rewards.tolist(), parents=turn_parents.tolist())
        return turn_rewards

    Advantages(estimator=AdvantageEstimator("watched", watched, {})).of(groups)
    # What no turn earned stands at the last turn of each branch.
    assert seen == {"rewards": [1.0, 0.0, 4.0, 1.0], "parents": [-1, -1, 1, 1]}


def test_advantages_of_tokens_are_made_where_the_rows_are() -> None:
    advantages = Advantages(
        estimator=load_estimator("gae", options={"gae_lambda": 0.9}),
        gae_lambda=0.7,
        kl_controller=FixedKL(coefficient=0.5),
        kl_estimator="k3",
    )
    found = advantages.of([group(3, 0.0, 1.0)])
    assert found.columns.batch["rewards"].tolist() == [0.0, 1.0]  # the penalty is taken off token by token
    assert found.by_token is not None
    assert (found.by_token.estimator, found.by_token.options, found.by_token.gae_lambda) == (
        "gae",
        {"gae_lambda": 0.9},
        0.7,
    )
    assert (found.by_token.kl_coef, found.by_token.kl_estimator, found.by_token.by_turns) == (0.5, "k3", True)
    assert advantages.row_columns == ("turns", "turn_rewards", "values")
    assert Advantages(estimator=advantages.estimator, by_turns=False).row_columns == ("values",)
    alone = AdvantageEstimator("alone", lambda token_rewards: token_rewards, {})
    assert Advantages(estimator=alone, by_turns=False).row_columns == ()


def test_online_dpo_compares_what_diverged() -> None:
    advantages = Advantages(estimator=load_estimator("online_dpo", options={"beta": 0.5}))
    assert advantages.needs_divergences
    groups = [group(3, 0.0, 1.0, divergences=(1.0, 3.0)), group(7, 1.0, 1.0, divergences=(0.0, 0.0))]
    # One pair, 4 rows: 4 * 0.5 * sigmoid(-0.5 * (3 - 1)) = 2 * 0.268941
    found = advantages.of(groups).columns.batch["advantages"].tolist()
    assert found == pytest.approx([-0.537883, 0.537883, 0.0, 0.0])
    assert advantages.finish_step(groups) == {"divergence": 4.0 / 8}
    with pytest.raises(InvalidDataError, match="group 3 has no divergence for each of its rows"):
        advantages.of([group(3, 0.0, 1.0)])


def test_a_kl_penalty_is_subtracted_from_the_rewards_of_rows() -> None:
    advantages = Advantages(estimator=load_estimator("dr_grpo"), kl_controller=FixedKL(coefficient=0.5))
    groups = [group(3, 1.0, 0.0, divergences=(2.0, 0.0)), group(4, 2.0, 2.0, divergences=(-2.0, 4.0))]
    # Rewards 0, 0 | 3, 0: around their group's mean.
    assert advantages.of(groups).columns.batch["advantages"].tolist() == [0.0, 0.0, 1.5, -1.5]
    assert advantages.finish_step(groups) == {"reward_kl": 0.5, "reward_kl_coefficient": 0.5}  # 4 nats in 8 tokens
    for divergences in (None, (1.0,)):
        with pytest.raises(InvalidDataError, match="has no divergence for each of its rows"):
            advantages.of([group(5, 1.0, 2.0, divergences=divergences)])


def test_credit_is_given_by_branch_or_by_turn() -> None:
    """Of row 0 (a tree: two turns continue the first) the turns earned 0, 2 and 0; of row 1 (a line) 0 and 1."""
    groups = [group(3, 2.0, 1.0, turns=((0.0, 2.0, 0.0), (0.0, 1.0)), parents=((-1, 0, 0), ()))]
    estimator = load_estimator("dr_grpo")
    found = {
        credit: rows_of(Advantages(estimator=estimator, credit=credit).of(groups).columns.batch["turn_advantages"])
        for credit in ("branch", "turn")
    }
    # Branches: 2 and 0 in row 0, 1 in row 1; their mean is 1.
    assert [row.tolist() for row in found["branch"]] == [[0.0, 1.0, -1.0], [0.0, 0.0]]
    # Turns: 1 (the mean of what follows), 2 and 0; 1 and 1; their mean is 1.
    assert [row.tolist() for row in found["turn"]] == [[0.0, 1.0, -1.0], [0.0, 0.0]]
    assert Advantages(estimator=estimator, credit="turn").row_columns == ("turns",)


def test_groups_without_a_signal_are_counted_where_a_batch_mixes_sizes() -> None:
    """As after a resume with another group size: 1, 1 and 0, 0, 0 have no signal, 1, 0 has one."""
    certificate = certify([], trainer_version=0)
    record = StepRecord(
        step=1,
        trainer_metrics={},
        certificate=certificate,
        reused=certificate,
        rewards=(1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0),
        lengths=(1,) * 7,
        rows=(2, 3, 2),
    )
    assert record.metrics()["groups_without_signal"] == pytest.approx(2 / 3)
