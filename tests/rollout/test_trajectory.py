"""From episodes to the batch of a group."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncrl.data.ragged import lengths, rows_of
from asyncrl.errors import InvalidDataError
from asyncrl.interfaces import GroupSummary
from asyncrl.rollout.trajectory import Trajectory, Turn, summarise, trajectories_to_batch


def trajectory(**changes: Any) -> Trajectory:
    """Prompt 1 2, sampled 3 4 under versions 5 and 6, environment 8, sampled 9 under version 6."""
    values: dict[str, Any] = {
        "task": {"question": "?"},
        "token_ids": (1, 2, 3, 4, 8, 9),
        "loss_mask": (False, False, True, True, False, True),
        "behaviour_log_probs": (0.0, 0.0, -0.5, -1.0, 0.0, -0.25),
        "weight_versions": (-1, -1, 5, 6, -1, 6),
        "reward": 1.0,
        "turns": (
            Turn(start=2, end=4, finish_reason="stop", message={"role": "assistant", "content": "hm"}, reward=0.25),
            Turn(start=5, end=6, finish_reason="length", message={"role": "assistant", "content": "nine"}, reward=0.75),
        ),
        "finish_reason": "done",
        "info": {"calls": 1},
    }
    return Trajectory(**(values | changes))


def short() -> Trajectory:
    return trajectory(
        token_ids=(1, 7),
        loss_mask=(False, True),
        behaviour_log_probs=(0.0, -2.0),
        weight_versions=(-1, 4),
        reward=0.0,
        turns=(Turn(start=1, end=2, finish_reason="length", message={"role": "assistant", "content": "seven"}),),
        finish_reason="max_seq_len",
        info={},
    )


def test_a_trajectory_counts_what_the_policy_sampled() -> None:
    assert trajectory().sampled_tokens == 3
    assert trajectory().version_tokens == {5: 1, 6: 2}


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(InvalidDataError, match="weight_versions has 1 entries for 6 tokens"):
        trajectory(weight_versions=(5,))


def test_a_group_becomes_a_batch() -> None:
    batch = trajectories_to_batch([trajectory(), short()], group_id=12)
    columns = batch.batch
    assert columns is not None
    assert lengths(columns["input_ids"]).tolist() == [6, 2]
    assert [row.tolist() for row in rows_of(columns["input_ids"])] == [[1, 2, 3, 4, 8, 9], [1, 7]]
    assert [row.tolist() for row in rows_of(columns["loss_mask"])] == [[0, 0, 1, 1, 0, 1], [0, 1]]
    assert [row.tolist() for row in rows_of(columns["behaviour_log_probs"])] == [
        [0.0, 0.0, -0.5, -1.0, 0.0, -0.25],
        [0.0, -2.0],
    ]
    assert [row.tolist() for row in rows_of(columns["weight_versions"])] == [[-1, -1, 5, 6, -1, 6], [-1, 4]]
    assert {name: columns[name].dtype for name in columns.keys()} == {  # noqa: SIM118 (a TensorDict)
        "input_ids": torch.int64,
        "loss_mask": torch.bool,
        "behaviour_log_probs": torch.float32,
        "weight_versions": torch.int32,
        "turns": torch.int32,
        "turn_rewards": torch.float32,
        "branches": torch.int32,
        "rewards": torch.float32,
        "num_turns": torch.int64,
        "group_id": torch.int64,
        "row": torch.int64,
    }
    assert columns["rewards"].tolist() == [1.0, 0.0]
    assert [row.tolist() for row in rows_of(columns["turns"])] == [[-1, -1, 0, 0, -1, 1], [-1, 0]]
    assert [row.tolist() for row in rows_of(columns["turn_rewards"])] == [[0.25, 0.75], [0.0]]
    assert columns["num_turns"].tolist() == [2, 1]
    assert columns["group_id"].tolist() == [12, 12]
    assert columns["row"].tolist() == [0, 1]
    assert batch.non_tensor_batch["finish_reason"].tolist() == ["done", "max_seq_len"]
    assert batch.non_tensor_batch["reply"].tolist() == ["nine", "seven"]
    assert batch.non_tensor_batch["task"].tolist() == [{"question": "?"}] * 2
    assert batch.non_tensor_batch["info"].tolist() == [{"calls": 1}, {}]


def test_ragged_columns_can_be_computed_with_each_other() -> None:
    columns = trajectories_to_batch([trajectory(), short()], group_id=0).batch
    assert columns is not None
    total = (columns["behaviour_log_probs"] * columns["loss_mask"]).values().sum()
    assert total.item() == pytest.approx(-3.75)


def test_the_summary_travels_in_the_header() -> None:
    expected = GroupSummary(
        group_id=12,
        rows=2,
        oldest_version=4,
        tokens=4,
        version_tokens={4: 1, 5: 1, 6: 2},
        rewards=(1.0, 0.0),
        lengths=(3, 1),
        turn_rewards=((0.25, 0.75), (0.0,)),
        turn_anchors=(trajectory().turn_anchors, short().turn_anchors),
    )
    group = [trajectory(), short()]
    assert summarise(group, group_id=12) == expected
    assert GroupSummary(**trajectories_to_batch(group, group_id=12).meta_info["summary"]) == expected


def test_a_batch_survives_the_codec() -> None:
    from asyncrl.data.codec import decode, encode

    batch = trajectories_to_batch([trajectory(), short()], group_id=12)
    encoded = encode(batch)
    received = decode(encoded.header, encoded.buffers)
    assert received.non_tensor_batch["info"].tolist() == [{"calls": 1}, {}]
    summary = GroupSummary(**received.meta_info["summary"])
    assert dict(summary.version_tokens) == {4: 1, 5: 1, 6: 2}


def test_a_group_needs_rows_and_sampled_tokens() -> None:
    with pytest.raises(InvalidDataError, match="no trajectory"):
        trajectories_to_batch([], group_id=1)
    silent = trajectory(token_ids=(1,), loss_mask=(False,), behaviour_log_probs=(0.0,), weight_versions=(-1,), turns=())
    with pytest.raises(InvalidDataError, match="no sampled token"):
        summarise([silent], group_id=1)


def test_turns_begin_alike_where_the_environment_said_the_same() -> None:
    first, second = trajectory(), trajectory(token_ids=(1, 2, 7, 7, 8, 9))  # other words of its own, the same prompts
    assert first.turn_anchors == second.turn_anchors
    assert len(set(first.turn_anchors)) == 2
    assert all(0 <= anchor < 2**63 for anchor in first.turn_anchors)
    other = trajectory(token_ids=(1, 2, 3, 4, 6, 9))
    assert (other.turn_anchors[0], other.turn_anchors[1]) == (first.turn_anchors[0], other.turn_anchors[1])
    assert other.turn_anchors[1] != first.turn_anchors[1]


def test_turns_of_a_tree_begin_alike_where_the_model_saw_the_same() -> None:
    def turn(start: int, end: int, parent: int) -> Turn:
        return Turn(start=start, end=end, finish_reason="stop", message={"role": "assistant"}, parent=parent)

    ids = (1, 2, 3, 4, 5, 9, 6)  # after 1 2 3 come 4 and 5, and after 9 comes 6
    turns = (turn(1, 3, -1), turn(3, 4, 0), turn(4, 5, 0), turn(6, 7, 0))
    columns = {"loss_mask": (False,) * 7, "behaviour_log_probs": (0.0,) * 7, "weight_versions": (-1,) * 7}
    first, *siblings, last = trajectory(token_ids=ids, turns=turns, **columns).turn_anchors
    assert siblings[0] == siblings[1]
    assert len({first, siblings[0], last}) == 3
    turns = (turn(1, 2, -1), turn(2, 3, 0), turn(3, 4, 1), turn(4, 5, -1), turn(5, 7, 2))
    in_pieces = trajectory(token_ids=ids, turns=turns, **columns).turn_anchors
    assert in_pieces[2] == siblings[0]  # however what it saw came to be
    assert in_pieces[1] != in_pieces[3]
