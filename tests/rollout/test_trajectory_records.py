"""A group as bytes: what comes back is what went in, bit for bit."""

from __future__ import annotations

import pytest
import torch

from asyncrl.errors import CodecError
from asyncrl.rollout.trajectory import (
    Trajectory,
    Turn,
    decode_rows,
    encode_rows,
    read_records,
    trajectories_to_batch,
    write_records,
)


def trajectory(reward: float = 0.1, *, task: object = "1+1") -> Trajectory:
    """Two turns of two tokens; the weights changed in the middle of the second."""
    return Trajectory(
        task={"question": task},
        token_ids=(5, 6, 7, 8, 9, 10, 11),
        loss_mask=(False, True, True, False, True, True, False),
        behaviour_log_probs=(0.0, -0.1, -0.2, 0.0, -0.3, -1e-7, 0.0),
        weight_versions=(-1, 3, 3, -1, 3, 4, -1),
        reward=reward,
        turns=(
            Turn(start=1, end=3, finish_reason="stop", message={"role": "assistant", "content": "a"}),
            Turn(start=4, end=6, finish_reason="length", message={"role": "assistant", "content": "b\u00e9"}),
        ),
        finish_reason="done",
        info={"score": 0.25, "seen": (1, 2)},
    )


def test_a_group_comes_back_bit_for_bit():
    group = [trajectory(), trajectory(-2.5)]
    batch = trajectories_to_batch(group, group_id=7)
    again = decode_rows(encode_rows(group), group_id=7)
    assert again == batch
    assert again.meta_info == batch.meta_info
    assert torch.equal(
        again.batch["behaviour_log_probs"].values().view(torch.int32),
        batch.batch["behaviour_log_probs"].values().view(torch.int32),
    )


def test_a_record_says_what_a_table_needs():
    (record,) = read_records(encode_rows([trajectory()]))
    assert (record.tokens, record.oldest_version, record.newest_version) == (4, 3, 4)
    assert record.spans == "[[3,1,3],[3,4,5],[4,5,6]]"
    assert len(record.input_ids) == 28
    assert len(record.log_probs) == 16


def test_equal_records_are_equal_bytes():
    rows = encode_rows([trajectory(), trajectory(1 / 3)])
    assert write_records(read_records(rows)) == rows


def test_what_is_no_row_is_refused():
    rows = encode_rows([trajectory()])
    for broken in (b"", rows[:-1], rows + b"\0", b"\x90"):
        with pytest.raises(CodecError):
            decode_rows(broken, group_id=0)
    with pytest.raises(CodecError, match="no JSON"):
        encode_rows([trajectory(task=object())])
    with pytest.raises(CodecError, match="no JSON"):
        encode_rows([trajectory(task="half of a character: \ud83d")])
