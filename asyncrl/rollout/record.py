"""Trajectories as bytes for a ledger: everything a finished group is, so that it need not be generated again.

About nine bytes a token: the id (4), the log-prob of a sampled one (4), version spans and turns. The worker that ran
the episodes writes these bytes, whoever keeps them need not read them, and :func:`decode_rows` makes the same batch of
them: same tensors, bit for bit, and the same summary.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import compress, groupby
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from asyncrl.data.objects import extension, packed
from asyncrl.errors import CodecError, InvalidDataError
from asyncrl.interfaces import FinishReason, Message
from asyncrl.rollout.trajectory import EpisodeEnd, Trajectory, Turn, trajectories_to_batch

if TYPE_CHECKING:
    from asyncrl.data import DataProto

__all__ = ["RowRecord", "decode_rows", "encode_rows", "read_records", "read_trajectory", "write_records"]


class RowRecord(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One trajectory, in the columns of a ledger's table ``trajectories``.

    Attributes:
        row: number in its group.
        reward: sum over the environment's steps.
        finish_reason: why the episode ended.
        tokens: how many the policy sampled.
        oldest_version: lowest weight version among them; -1 without any.
        newest_version: highest one.
        turns: JSON: ``[[start, end, finish_reason, message, reward], ...]``, tokens ``start <= t < end``.
        spans: JSON: ``[[version, start, end], ...]``, runs of sampled tokens of one version, in order.
        task: JSON.
        info: msgpack of the environment's last ``info``.
        input_ids: int32, little-endian, all tokens.
        log_probs: float32, little-endian, of the sampled tokens.
    """

    row: int
    reward: float
    finish_reason: str
    tokens: int
    oldest_version: int
    newest_version: int
    turns: str
    spans: str
    task: str
    info: bytes
    input_ids: bytes
    log_probs: bytes


class _TurnForm(msgspec.Struct, frozen=True, array_like=True):
    """A turn in the column ``turns``; records of before rewards were kept by turn have none."""

    start: int
    end: int
    finish_reason: FinishReason
    message: Message
    reward: float = 0.0


def encode_rows(trajectories: Sequence[Trajectory]) -> bytes:
    """A finished group as bytes, rows in order.

    Raises:
        CodecError: a task, message or ``info`` holds something that is no data.
    """
    return _ENCODER.encode([_record(row, trajectory) for row, trajectory in enumerate(trajectories)])


def read_records(rows: bytes) -> list[RowRecord]:
    """The records in what :func:`encode_rows` wrote.

    Raises:
        CodecError: these bytes are no rows.
    """
    try:
        return _DECODER.decode(rows)
    except (UnicodeError, msgspec.MsgspecError) as error:
        raise CodecError(f"not the rows of a group: {error}") from error


def write_records(records: Sequence[RowRecord]) -> bytes:
    """Counterpart of :func:`read_records`: equal records, equal bytes."""
    return _ENCODER.encode(list(records))


def decode_rows(rows: bytes, *, slot: int) -> DataProto:
    """The batch of a group (:func:`asyncrl.rollout.trajectory.trajectories_to_batch`).

    Raises:
        CodecError: these bytes are no rows, or contradict themselves.
    """
    try:
        return trajectories_to_batch([read_trajectory(record) for record in read_records(rows)], slot=slot)
    except (msgspec.MsgspecError, InvalidDataError, ValueError, IndexError) as error:
        raise CodecError(f"not the rows of a group: {error}") from error


def _record(row: int, trajectory: Trajectory) -> RowRecord:
    token_ids = trajectory.token_ids
    log_probs = tuple(compress(trajectory.behaviour_log_probs, trajectory.loss_mask))
    # A span ends where the version changes; what was not sampled has version -1 and is left out.
    spans: list[tuple[int, int, int]] = []
    end = 0
    for version, run in groupby(trajectory.weight_versions):
        start, end = end, end + sum(1 for _ in run)
        if version >= 0:
            spans.append((version, start, end))
    versions = [version for version, _start, _end in spans]
    try:
        return RowRecord(
            row=row,
            reward=trajectory.reward,
            finish_reason=trajectory.finish_reason,
            tokens=len(log_probs),
            oldest_version=min(versions, default=-1),
            newest_version=max(versions, default=-1),
            turns=_json(
                [(turn.start, turn.end, turn.finish_reason, turn.message, turn.reward) for turn in trajectory.turns]
            ),
            spans=_json(spans),
            task=_json(trajectory.task),
            info=_ENCODER.encode(packed(dict(trajectory.info))),
            input_ids=struct.pack(f"<{len(token_ids)}i", *token_ids),
            log_probs=struct.pack(f"<{len(log_probs)}f", *log_probs),
        )
    except (TypeError, msgspec.MsgspecError) as error:
        raise CodecError(f"row {row} cannot be recorded: its task or a message is no JSON: {error}") from error


def read_trajectory(record: RowRecord) -> Trajectory:
    """The trajectory of a record."""
    token_ids = np.frombuffer(record.input_ids, dtype="<i4")
    log_probs = np.zeros(len(token_ids), dtype=np.float32)
    versions = np.full(len(token_ids), -1, dtype=np.int64)
    for version, start, end in msgspec.json.decode(record.spans, type=list[tuple[int, int, int]]):
        versions[start:end] = version
    mask = versions >= 0
    log_probs[mask] = np.frombuffer(record.log_probs, dtype="<f4")
    turns = msgspec.json.decode(record.turns, type=list[_TurnForm])
    return Trajectory(
        task=msgspec.json.decode(record.task),
        token_ids=tuple(token_ids.tolist()),
        loss_mask=tuple(mask.tolist()),
        behaviour_log_probs=tuple(log_probs.tolist()),
        weight_versions=tuple(versions.tolist()),
        reward=record.reward,
        turns=tuple(
            Turn(
                start=turn.start,
                end=turn.end,
                finish_reason=turn.finish_reason,
                message=turn.message,
                reward=turn.reward,
            )
            for turn in turns
        ),
        finish_reason=_END.decode(f'"{record.finish_reason}"'),
        info=_INFO.decode(record.info),
    )


def _json(value: object) -> str:
    return _JSON.encode(value).decode()


_ENCODER = msgspec.msgpack.Encoder()
_JSON = msgspec.json.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[RowRecord])
_INFO = msgspec.msgpack.Decoder(dict, ext_hook=extension)
_END = msgspec.json.Decoder(EpisodeEnd)
