"""Trajectories: the prompt rows that request them, the batch that a group of them becomes, and their bytes.

The bytes, about nine for a token, are everything that a finished group consists of, so that it need not be generated
again. The worker that ran the episodes writes them, a ledger keeps them without reading them, and :func:`decode_rows`
makes the same batch of them: same tensors, bit for bit, and the same summary.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from itertools import compress, groupby
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import torch
from torch import Tensor

from asyncrl.data import DataProto
from asyncrl.data.codec import extension, packed
from asyncrl.data.ragged import ragged_from_list
from asyncrl.errors import CodecError, InvalidDataError, InvariantError
from asyncrl.interfaces import FinishReason, GroupSummary, Message, Task


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that depends on every part and on nothing else (BLAKE2b of their text)."""
    digest = hashlib.blake2b("/".join(str(part) for part in parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def check_seeds(seeds: Sequence[int], *, run_seed: int, purpose: str, group_id: int) -> None:
    """Check that rows are sampled with seeds that depend on the run's seed, their group and their number alone.

    Raises:
        InvariantError: they are not.
    """
    expected = [derive_seed(run_seed, purpose, group_id, row) for row in range(len(seeds))]
    if list(seeds) != expected:
        row = next(row for row, (seed, other) in enumerate(zip(seeds, expected, strict=True)) if seed != other)
        raise InvariantError(
            f"the seed of a row follows from seed = {run_seed}, its group and its number alone, but row {row} of group "
            f"{group_id} came with {seeds[row]} instead of {expected[row]}; this is a defect of asyncrl: report it"
        )


def prompt_rows(
    tasks: Sequence[Task],
    *,
    group_id: int,
    seeds: Sequence[int],
    purpose: str,
    sample: bool = False,
    record: bool = False,
    sampling: Mapping[str, Any] | None = None,
    attempt: int | None = None,
    turns: bytes = b"",
) -> DataProto:
    """Return rows [B] for :meth:`asyncrl.rollout.worker.RolloutWorker.rollout`, all of one group, numbered 0..B-1.

    Columns: ``group_id``, ``row`` and ``seed`` [B] int64, non-tensor ``task``. Tokens are counted to the account
    ``purpose``; with ``sample`` the answer's header has row 0 as readable text, with ``record`` all rows as bytes.
    ``sampling`` replaces fields of the worker's sampling parameters. With ``attempt``, the number of this attempt,
    turns are recorded as they end; the rows are continued from the ``turns`` of earlier attempts
    (:mod:`asyncrl.rollout.turns`).
    """
    rows = len(tasks)
    return DataProto.from_dict(
        tensors={
            "group_id": torch.full((rows,), group_id, dtype=torch.int64),
            "row": torch.arange(rows, dtype=torch.int64),
            "seed": torch.tensor(list(seeds), dtype=torch.int64),
        },
        non_tensors={"task": _objects(tasks)},
        meta_info={
            "purpose": purpose,
            "sample": sample,
            "record": record,
            "sampling": dict(sampling or {}),
            "attempt": attempt,
            "turns": turns,
        },
    )


def _objects(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Return one object for each row; numpy would make an array of equally long lists two-dimensional."""
    column = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        column[row] = value
    return column


REWARD_PARTS = "reward_parts"
"""Key of a step's ``info`` under which an environment reports the parts of the reward: numbers by name."""

EpisodeEnd: TypeAlias = Literal["done", "max_turns", "max_seq_len"]
"""Why an episode ended: the environment ended it, or the limit of turns or of tokens was reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One sampled turn: tokens ``start <= t < end`` of the trajectory, the message they were read as, and its reward.

    A turn that was cut, and so not passed to the environment, has no reward. ``parent`` is the number of the turn that
    it continues, -1 if it continues none; None in a trajectory in which each turn continues the one before.
    """

    start: int
    end: int
    finish_reason: FinishReason
    message: Message
    reward: float = 0.0
    parent: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One finished episode: L tokens as they were sampled, in the order the model saw them.

    An agent's episode may be a tree of turns: then a turn's own tokens follow those of the turn that ended before it,
    and the model saw the tokens of its ``parent``, and so on back to the root (:mod:`asyncrl.rollout.branches`).

    Attributes:
        token_ids: [L] prompt, sampled turns, and the environment's answers between them.
        loss_mask: [L] True where the policy sampled the token.
        behaviour_log_probs: [L] under the distribution sampled from; 0 where not sampled.
        weight_versions: [L] version that sampled the token; -1 where not sampled.
        reward: sum over the environment's steps.
        info: of the environment's last step.
    """

    task: Task
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    behaviour_log_probs: tuple[float, ...]
    weight_versions: tuple[int, ...]
    reward: float
    turns: tuple[Turn, ...]
    finish_reason: EpisodeEnd
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lengths = {
            "loss_mask": len(self.loss_mask),
            "behaviour_log_probs": len(self.behaviour_log_probs),
            "weight_versions": len(self.weight_versions),
        }
        for name, length in lengths.items():
            if length != len(self.token_ids):
                raise InvalidDataError(f"{name} has {length} entries for {len(self.token_ids)} tokens; they must agree")

    @property
    def sampled_tokens(self) -> int:
        return sum(self.loss_mask)

    @property
    def turn_numbers(self) -> list[int]:
        """[L] turn in which the token was sampled; -1 where not sampled."""
        numbers = [-1] * len(self.token_ids)
        for number, turn in enumerate(self.turns):
            numbers[turn.start : turn.end] = [number] * (turn.end - turn.start)
        return numbers

    @property
    def branches(self) -> list[int]:
        """Of a tree, three numbers for each turn: where its own tokens begin and end, and its parent. Else empty."""
        if all(turn.parent is None for turn in self.turns):
            return []
        begins = [0, *(turn.end for turn in self.turns)]
        places = ((begin, turn.end, turn.parent) for begin, turn in zip(begins, self.turns, strict=False))
        return [-1 if number is None else number for place in places for number in place]

    @property
    def turn_anchors(self) -> tuple[int, ...]:
        """For each turn a hash of the environment's tokens just before it, or of all it saw if it has none: 63 bits."""
        anchors: list[int] = []
        seen: list[blake2b] = []  # by each turn and those before it
        begin = 0
        for turn in self.turns:
            parent = len(seen) - 1 if turn.parent is None else turn.parent
            before = array("q", self.token_ids[begin : turn.start])
            state = seen[parent].copy() if parent >= 0 else blake2b(digest_size=8)
            state.update(before)
            anchor = blake2b(before, digest_size=8) if before else state
            anchors.append(int.from_bytes(anchor.digest(), "little") >> 1)
            state.update(array("q", self.token_ids[turn.start : turn.end]))
            seen.append(state)
            begin = turn.end
        return tuple(anchors)

    @property
    def version_tokens(self) -> dict[int, int]:
        """How many tokens were sampled under each weight version, oldest first."""
        counts = Counter(v for v, mine in zip(self.weight_versions, self.loss_mask, strict=True) if mine)
        return dict(sorted(counts.items()))


def trajectories_to_batch(trajectories: Sequence[Trajectory], *, group_id: int) -> DataProto:
    """Return the rows of one group in the columns listed at the top of :mod:`asyncrl.interfaces`.

    Further columns: ``num_turns`` [B] int64; ``finish_reason`` (str), ``task`` and ``info`` (dicts) and ``reply`` (the
    text of the last turn) as non-tensors. ``meta_info["summary"]`` is the group's :class:`GroupSummary` as a dict.

    Raises:
        InvalidDataError: there is no trajectory.
    """
    if not trajectories:
        raise InvalidDataError(f"group {group_id} has no trajectory; a batch needs at least one")

    def ragged(column: Callable[[Trajectory], Sequence[Any]], dtype: torch.dtype) -> Tensor:
        return ragged_from_list([torch.tensor(column(each), dtype=dtype) for each in trajectories])

    rows = len(trajectories)
    inspection: dict[str, list[Any]] = {
        "finish_reason": [t.finish_reason for t in trajectories],
        "task": [t.task for t in trajectories],
        "info": [dict(t.info) for t in trajectories],
        "reply": [str(t.turns[-1].message.get("content") or "") if t.turns else "" for t in trajectories],
    }
    return DataProto.from_dict(
        tensors={
            "input_ids": ragged(lambda each: each.token_ids, torch.int64),
            "loss_mask": ragged(lambda each: each.loss_mask, torch.bool),
            "behaviour_log_probs": ragged(lambda each: each.behaviour_log_probs, torch.float32),
            "weight_versions": ragged(lambda each: each.weight_versions, torch.int32),
            "turns": ragged(lambda each: each.turn_numbers, torch.int32),
            "turn_rewards": ragged(lambda each: [turn.reward for turn in each.turns], torch.float32),
            "branches": ragged(lambda each: each.branches, torch.int32),
            "rewards": torch.tensor([t.reward for t in trajectories], dtype=torch.float32),
            "num_turns": torch.tensor([len(t.turns) for t in trajectories], dtype=torch.int64),
            "group_id": torch.full((rows,), group_id, dtype=torch.int64),
            "row": torch.arange(rows, dtype=torch.int64),
        },
        non_tensors={name: _objects(values) for name, values in inspection.items()},
        meta_info={"summary": asdict(summarise(trajectories, group_id=group_id))},
    )


def summarise(trajectories: Sequence[Trajectory], *, group_id: int) -> GroupSummary:
    """Return the summary of a group, for the driver.

    Raises:
        InvalidDataError: no trajectory, or none with a sampled token: then there is no oldest version.
    """
    versions: Counter[int] = Counter()
    for trajectory in trajectories:
        versions.update(trajectory.version_tokens)
    if not versions:
        raise InvalidDataError(f"group {group_id} has no sampled token; it cannot be trained on")
    parents = tuple(tuple(trajectory.branches[2::3]) for trajectory in trajectories)
    return GroupSummary(
        group_id=group_id,
        rows=len(trajectories),
        oldest_version=min(versions),
        tokens=versions.total(),
        version_tokens=dict(sorted(versions.items())),
        rewards=tuple(trajectory.reward for trajectory in trajectories),
        lengths=tuple(trajectory.sampled_tokens for trajectory in trajectories),
        environment=str(trajectories[0].task.get("environment", "")),
        reward_parts=reward_parts(trajectory.info for trajectory in trajectories),
        turn_rewards=tuple(tuple(turn.reward for turn in trajectory.turns) for trajectory in trajectories),
        turn_anchors=tuple(trajectory.turn_anchors for trajectory in trajectories),
        turn_parents=parents if any(parents) else (),
    )


def reward_parts(infos: Iterable[Mapping[str, Any]]) -> dict[str, tuple[float, ...]]:
    """Return the components of the rewards of rows by name, from the ``info`` of each."""
    parts: dict[str, list[float]] = {}
    for info in infos:
        given = info.get(REWARD_PARTS)
        for name, value in given.items() if isinstance(given, Mapping) else ():
            parts.setdefault(str(name), []).append(float(value))
    return {name: tuple(values) for name, values in sorted(parts.items())}


class RowRecord(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One trajectory, in the columns of a ledger's table ``trajectories``.

    Attributes:
        row: number in its group.
        tokens: how many the policy sampled.
        oldest_version, newest_version: among them; -1 without any.
        turns: JSON: ``[[start, end, finish_reason, message, reward], ...]``, tokens ``start <= t < end``; of a tree the
            parent follows.
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
    """A turn in the column ``turns``; older records have no reward by turn, and turns of a line no parent."""

    start: int
    end: int
    finish_reason: FinishReason
    message: Message
    reward: float = 0.0
    parent: int | None = None


def encode_rows(trajectories: Sequence[Trajectory]) -> bytes:
    """Return a finished group as bytes, rows in order.

    Raises:
        CodecError: a task, message or ``info`` holds something that is no data.
    """
    return _ENCODER.encode([_record(row, trajectory) for row, trajectory in enumerate(trajectories)])


def read_records(rows: bytes) -> list[RowRecord]:
    """Return the records in what :func:`encode_rows` wrote.

    Raises:
        CodecError: these bytes are no rows.
    """
    try:
        return _DECODER.decode(rows)
    except (UnicodeError, msgspec.MsgspecError) as error:
        raise CodecError(f"not the rows of a group: {error}") from error


def write_records(records: Sequence[RowRecord]) -> bytes:
    """Return the bytes of :func:`read_records`: equal records, equal bytes."""
    return _ENCODER.encode(list(records))


def decode_rows(rows: bytes, *, group_id: int) -> DataProto:
    """Return the batch of a group, as :func:`trajectories_to_batch`.

    Raises:
        CodecError: these bytes are no rows, or contradict themselves.
    """
    try:
        return trajectories_to_batch([read_trajectory(record) for record in read_records(rows)], group_id=group_id)
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
                [
                    (turn.start, turn.end, turn.finish_reason, turn.message, turn.reward)
                    + (() if turn.parent is None else (turn.parent,))
                    for turn in trajectory.turns
                ]
            ),
            spans=_json(spans),
            task=_json(trajectory.task),
            info=_ENCODER.encode(packed(dict(trajectory.info))),
            input_ids=struct.pack(f"<{len(token_ids)}i", *token_ids),
            log_probs=struct.pack(f"<{len(log_probs)}f", *log_probs),
        )
    except (TypeError, UnicodeError, msgspec.MsgspecError) as error:
        raise CodecError(f"row {row} cannot be recorded: its task or a message is no JSON: {error}") from error


def read_trajectory(record: RowRecord) -> Trajectory:
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
        turns=tuple(Turn(**msgspec.structs.asdict(turn)) for turn in turns),
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
