"""What one episode leaves behind, and the batch that a group of them becomes."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from asyncrl.errors import InvalidDataError
from asyncrl.interfaces import FinishReason, GroupSummary, Message, Task

if TYPE_CHECKING:
    from asyncrl.data import DataProto

__all__ = ["REWARD_PARTS", "EpisodeEnd", "Trajectory", "Turn", "summarise", "trajectories_to_batch"]

REWARD_PARTS = "reward_parts"
"""Key of a step's ``info`` under which an environment tells what the reward was made of: numbers by name."""

EpisodeEnd: TypeAlias = Literal["done", "max_turns", "max_tokens"]
"""Why an episode ended: the environment said so, or the limit of its turns, or that of its tokens was reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One sampled turn: tokens ``start <= t < end`` of the trajectory, the message they were read as, and its reward.

    A turn that was not shown to the environment, because it was cut, has earned nothing.
    """

    start: int
    end: int
    finish_reason: FinishReason
    message: Message
    reward: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One finished episode: the tokens as they were sampled, in the order the model saw them.

    Attributes:
        task: what was posed.
        token_ids: L tokens: prompt, sampled turns, and the environment's words between them.
        loss_mask: L, True where the policy sampled the token.
        behaviour_log_probs: L, under the distribution sampled from; 0 where not sampled.
        weight_versions: L, version that sampled the token; -1 where not sampled.
        reward: sum over the environment's steps.
        turns: the sampled spans.
        finish_reason: why it ended.
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
        """Tokens that the policy sampled."""
        return sum(self.loss_mask)

    @property
    def turn_numbers(self) -> list[int]:
        """L, turn in which the token was sampled; -1 where not sampled."""
        numbers = [-1] * len(self.token_ids)
        for number, turn in enumerate(self.turns):
            numbers[turn.start : turn.end] = [number] * (turn.end - turn.start)
        return numbers

    @property
    def turn_anchors(self) -> tuple[int, ...]:
        """For each turn a hash of what the environment said just before it, by its tokens: 63 bits."""
        said = [0, *(turn.end for turn in self.turns)]
        words = [self.token_ids[begin : turn.start] for begin, turn in zip(said, self.turns, strict=False)]
        return tuple(_fingerprint(each) for each in words)

    @property
    def version_tokens(self) -> dict[int, int]:
        """How many tokens were sampled under each weight version, oldest first."""
        counts = Counter(v for v, mine in zip(self.weight_versions, self.loss_mask, strict=True) if mine)
        return dict(sorted(counts.items()))


def _fingerprint(token_ids: Sequence[int]) -> int:
    return int.from_bytes(blake2b(array("q", token_ids).tobytes(), digest_size=8).digest(), "little") >> 1


def trajectories_to_batch(trajectories: Sequence[Trajectory], *, slot: int) -> DataProto:
    """The rows of one group in the columns listed at the top of :mod:`asyncrl.interfaces`.

    Further columns: ``num_turns`` [B] int64; ``finish_reason`` (str), ``task`` and ``info`` (dicts) and ``reply`` (the
    text of the last turn) as non-tensors. ``meta_info["summary"]`` is the group's :class:`GroupSummary` as a dict.

    Raises:
        InvalidDataError: there is no trajectory.
    """
    import numpy as np
    import torch

    from asyncrl.data import DataProto
    from asyncrl.data.ragged import ragged_from_list

    if not trajectories:
        raise InvalidDataError(f"group {slot} has no trajectory; a batch needs at least one")
    ragged = {
        "input_ids": ragged_from_list([torch.tensor(t.token_ids, dtype=torch.int64) for t in trajectories]),
        "loss_mask": ragged_from_list([torch.tensor(t.loss_mask, dtype=torch.bool) for t in trajectories]),
        "behaviour_log_probs": ragged_from_list(
            [torch.tensor(t.behaviour_log_probs, dtype=torch.float32) for t in trajectories]
        ),
        "weight_versions": ragged_from_list([torch.tensor(t.weight_versions, dtype=torch.int32) for t in trajectories]),
        "turns": ragged_from_list([torch.tensor(t.turn_numbers, dtype=torch.int32) for t in trajectories]),
        "turn_rewards": ragged_from_list(
            [torch.tensor([turn.reward for turn in t.turns], dtype=torch.float32) for t in trajectories]
        ),
    }
    rows = len(trajectories)
    inspection: dict[str, list[Any]] = {
        "finish_reason": [t.finish_reason for t in trajectories],
        "task": [t.task for t in trajectories],
        "info": [dict(t.info) for t in trajectories],
        "reply": [str(t.turns[-1].message.get("content") or "") if t.turns else "" for t in trajectories],
    }
    non_tensors = {name: np.empty(rows, dtype=object) for name in inspection}
    for name, values in inspection.items():
        for row, value in enumerate(values):
            non_tensors[name][row] = value
    return DataProto.from_dict(
        tensors={
            **ragged,
            "rewards": torch.tensor([t.reward for t in trajectories], dtype=torch.float32),
            "num_turns": torch.tensor([len(t.turns) for t in trajectories], dtype=torch.int64),
            "slot": torch.full((rows,), slot, dtype=torch.int64),
            "row": torch.arange(rows, dtype=torch.int64),
        },
        non_tensors=non_tensors,
        meta_info={"summary": asdict(summarise(trajectories, slot=slot))},
    )


def summarise(trajectories: Sequence[Trajectory], *, slot: int) -> GroupSummary:
    """What the driver needs to know of a group.

    Raises:
        InvalidDataError: no trajectory, or none with a sampled token: then there is no oldest version.
    """
    versions: Counter[int] = Counter()
    for trajectory in trajectories:
        versions.update(trajectory.version_tokens)
    if not versions:
        raise InvalidDataError(f"group {slot} has no sampled token; it cannot be trained on")
    return GroupSummary(
        slot=slot,
        rows=len(trajectories),
        oldest_version=min(versions),
        tokens=versions.total(),
        version_tokens=dict(sorted(versions.items())),
        rewards=tuple(trajectory.reward for trajectory in trajectories),
        lengths=tuple(trajectory.sampled_tokens for trajectory in trajectories),
        environment=str(trajectories[0].task.get("environment", "")),
        reward_parts=_reward_parts(trajectories),
        turn_rewards=tuple(tuple(turn.reward for turn in trajectory.turns) for trajectory in trajectories),
        turn_anchors=tuple(trajectory.turn_anchors for trajectory in trajectories),
    )


def _reward_parts(trajectories: Sequence[Trajectory]) -> dict[str, tuple[float, ...]]:
    parts: dict[str, list[float]] = {}
    for trajectory in trajectories:
        told = trajectory.info.get(REWARD_PARTS)
        for name, value in told.items() if isinstance(told, Mapping) else ():
            parts.setdefault(str(name), []).append(float(value))
    return {name: tuple(values) for name, values in sorted(parts.items())}
