"""A tree of turns: each sampled token has one gradient, that of its branch written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.data import DataProto
from asyncrl.data.ragged import rows_of, values_of
from asyncrl.rollout.branches import unfold
from asyncrl.rollout.trajectory import Trajectory, Turn, decode_rows, encode_rows, trajectories_to_batch
from asyncrl.trainer.workers import with_turn_advantages
from engines.training.model import load_policy_model
from engines.training.packing import PackedRows, plan_microbatches
from engines.training.partition import RowCost
from engines.training.prefixes import plan_shared

from .conftest import in_float64

# A compacting agent with two sub-agents: 0 asks both (1, 2; 3), 4 has their answers, 5 goes on from a summary, and 6 is
# another sample of 4's turn.
PARENTS = (-1, -1, -1, 2, 0, -1, 0)
APPENDED = (9, 6, 6, 3, 7, 8, 7)
SAMPLED = (4, 5, 3, 6, 4, 5, 2)


def tree(*, seed: int = 0, turn_rewards: tuple[float, ...] = (0.0,) * 7) -> Trajectory:
    draw = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    mask: list[bool] = []
    turns: list[Turn] = []
    for parent, appended, sampled, reward in zip(PARENTS, APPENDED, SAMPLED, turn_rewards, strict=True):
        ids += torch.randint(0, 61, (appended + sampled,), generator=draw).tolist()
        mask += [False] * appended + [True] * sampled
        place = {"start": len(ids) - sampled, "end": len(ids)}
        turns.append(Turn(**place, finish_reason="stop", message={"role": "assistant"}, reward=reward, parent=parent))
    return Trajectory(
        task={},
        token_ids=tuple(ids),
        loss_mask=tuple(mask),
        behaviour_log_probs=tuple(-float(mine) for mine in mask),
        weight_versions=tuple(0 if mine else -1 for mine in mask),
        reward=1.0 + sum(turn_rewards),
        turns=tuple(turns),
        finish_reason="done",
    )


def line(*ids: int, sampled: int) -> Trajectory:
    mask = [False] * (len(ids) - sampled) + [True] * sampled
    turn = Turn(start=len(ids) - sampled, end=len(ids), finish_reason="stop", message={"role": "assistant"})
    return Trajectory(
        task={},
        token_ids=ids,
        loss_mask=tuple(mask),
        behaviour_log_probs=tuple(-float(mine) for mine in mask),
        weight_versions=tuple(0 if mine else -1 for mine in mask),
        reward=0.0,
        turns=(turn,),
        finish_reason="done",
    )


def written_out(trajectory: Trajectory, turn: int) -> list[int]:
    """The tokens that the model saw when it sampled a turn, and the turn's own."""
    begins = [0, *(each.end for each in trajectory.turns)]
    path: list[int] = []
    while turn >= 0:
        path[:0] = trajectory.token_ids[begins[turn] : trajectory.turns[turn].end]
        parent = trajectory.turns[turn].parent
        assert parent is not None
        turn = parent
    return path


def test_each_sampled_token_has_one_gradient_in_float64(model_folder: Callable[..., str]) -> None:
    trajectory, folder = tree(), model_folder("llama")
    batch = trajectories_to_batch([trajectory], group_id=0)
    rows = unfold(batch)
    assert rows.rows.batch is not None
    # The same direction for the same token, wherever its branch puts it.
    direction = torch.sin(torch.arange(len(trajectory.token_ids), dtype=torch.float64))

    plain = in_float64(AutoModelForCausalLM.from_pretrained(folder))
    for number, turn in enumerate(trajectory.turns):
        path = torch.tensor([written_out(trajectory, number)])
        log_p = plain(input_ids=path).logits[0, :-1].log_softmax(-1).gather(1, path[0, 1:, None]).squeeze(1)
        (log_p[-(turn.end - turn.start) :] * direction[turn.start : turn.end]).sum().backward()
    expected = {name: each.grad for name, each in plain.named_parameters()}

    model = in_float64(load_policy_model(folder, layout="packed", gradient_checkpointing=False))
    assert rows.source is not None
    packed = PackedRows.read(rows.rows.select(["input_ids", "loss_mask"], [], []), vocabulary=61)
    cost = RowCost(per_token=1.0, per_scored_token=0.0, per_pair=0.0)
    shared = plan_shared(packed, range(len(packed)), max_tokens=1000, cost=cost)
    assert shared is not None
    for plans in (shared, plan_microbatches(packed.lengths, max_tokens=1000, overhead_tokens=0)):
        model.zero_grad()
        scored = 0
        for each in map(packed.pack, plans):
            states = model.hidden_states(
                each.input_ids, each.positions, rectangles=each.rectangles, prefixes=each.prefixes
            ).index_select(0, each.predictors)
            log_p = model.logits_of(states).log_softmax(dim=-1).gather(1, each.targets[:, None]).squeeze(1)
            (log_p * direction[rows.source[each.tokens]]).sum().backward()
            scored += len(each.tokens)
        assert scored == sum(SAMPLED)
        mine = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        theirs = [each for each in expected.values() if each is not None]
        assert len(mine) == len(theirs)
        for one, other in zip(mine.values(), theirs, strict=True):
            assert (one - other).norm() <= 1e-10 * other.norm()


def test_branches_have_all_that_the_model_saw_and_fold_back() -> None:
    trajectory = tree()
    batch = trajectories_to_batch([line(1, 2, 3, sampled=2), trajectory, line(4, 5, sampled=1)], group_id=0)
    unfolded = unfold(batch)
    assert unfolded.rows.batch is not None
    leaves = [1, 3, 4, 5, 6]
    ids = [[1, 2, 3], *(written_out(trajectory, leaf) for leaf in leaves), [4, 5]]
    assert [row.tolist() for row in rows_of(unfolded.rows.batch["input_ids"])] == ids
    assert int(values_of(unfolded.rows.batch["loss_mask"]).sum()) == sum(SAMPLED) + 3
    assert unfolded.rows.batch["row"].tolist() == [0, 1, 1, 1, 1, 1, 2]
    seen = DataProto.from_dict(tensors={"seen": [row.float() for row in rows_of(unfolded.rows.batch["input_ids"])]})
    folded = unfolded.fold(seen).batch
    assert folded is not None
    assert values_of(folded["seen"]).tolist() == [1, 2, 3, *trajectory.token_ids, 4, 5]


def test_no_row_is_copied_whole_for_each_of_its_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[DataProto] = []
    select = DataProto.select_idxs

    def watched(batch: DataProto, rows: Any) -> DataProto:
        copied.append(select(batch, rows))
        return copied[-1]

    monkeypatch.setattr(DataProto, "select_idxs", watched)
    unfold(trajectories_to_batch([tree()], group_id=0))
    (others,) = copied
    assert others.batch is not None
    assert "input_ids" not in others.batch.keys()  # noqa: SIM118  a TensorDict iterates rows


def test_lines_are_left_as_they_are() -> None:
    batch = trajectories_to_batch([line(1, 2, 3, sampled=2)], group_id=0)
    unfolded = unfold(batch)
    assert unfolded.source is None
    assert unfolded.fold(batch) is batch


def test_a_tree_survives_the_ledger() -> None:
    trajectory = tree()
    batch = decode_rows(encode_rows([trajectory]), group_id=0)
    assert batch.batch is not None
    assert rows_of(batch.batch["branches"])[0].tolist() == trajectory.branches
    assert trajectory.branches[:6] == [0, 13, -1, 13, 24, -1]


def test_rewards_of_turns_belong_to_their_branches() -> None:
    """Of a row's reward of 1.8 the last turn earned 0.5 and another sample of it 0.3; the rest, 1, no turn did."""
    batch = trajectories_to_batch([tree(turn_rewards=(0, 0, 0, 0, 0.3, 0, 0.5))], group_id=0)
    rows = unfold(batch).rows
    assert rows.batch is not None
    assert rows.batch["rewards"].tolist() == pytest.approx([1.0, 1.0, 1.3, 1.0, 1.5])


def test_advantages_of_turns_reach_the_tokens_of_all_branches() -> None:
    batch = trajectories_to_batch([tree()], group_id=0).with_columns(turn_advantages=[torch.arange(7.0) + 1])
    rows = with_turn_advantages(unfold(batch).rows)
    assert rows.batch is not None
    kept = [
        row[mask].tolist()
        for row, mask in zip(rows_of(rows.batch["advantages"]), rows_of(rows.batch["loss_mask"]), strict=True)
    ]
    assert kept == [[2.0] * 5, [3.0] * 3 + [4.0] * 6, [1.0] * 4 + [5.0] * 4, [6.0] * 5, [7.0] * 2]
