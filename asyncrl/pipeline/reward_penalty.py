"""The divergence from the reference as a part of the reward: what every group diverged, and how strongly it counts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncrl.algorithms import KLController, penalised_rewards
from asyncrl.errors import InvalidDataError
from asyncrl.interfaces import GroupSummary

__all__ = ["RewardPenalty"]


class RewardPenalty:
    """Holds the divergences of groups from the moment the reference told them until they are trained on.

    Args:
        controller: how strongly they count; replaced by its successor after every step.
    """

    def __init__(self, controller: KLController) -> None:
        self.controller = controller
        self._divergences: dict[int, tuple[float, ...]] = {}

    def told(self, slot: int, divergences: Sequence[float]) -> None:
        """What each row of a group diverged, its sampled tokens summed, in nats."""
        self._divergences[slot] = tuple(divergences)

    def forget(self, slot: int) -> None:
        """The group was dropped."""
        self._divergences.pop(slot, None)

    def rewards(self, summaries: Sequence[GroupSummary]) -> list[float]:
        """Penalised returns of all rows, group by group.

        Raises:
            InvalidDataError: a group's divergences were never told.
        """
        answer: list[float] = []
        for summary in summaries:
            found = self._divergences.get(summary.slot)
            if found is None or len(found) != len(summary.rewards):
                raise InvalidDataError(f"group {summary.slot} has no divergence for each of its rows")
            penalised = penalised_rewards(
                torch.tensor(summary.rewards), torch.tensor(found), coefficient=self.controller.coefficient
            )
            answer += penalised.tolist()
        return answer

    def stepped(self, summaries: Sequence[GroupSummary]) -> dict[str, float]:
        """The groups were trained on: forget them, and let the controller see how far they were.

        Returns:
            ``reward_kl``, mean divergence per token, and ``reward_kl_coefficient`` that it counted with.
        """
        nats = sum(sum(self._divergences.pop(summary.slot)) for summary in summaries)
        tokens = sum(summary.tokens for summary in summaries)
        told = {"reward_kl": nats / max(tokens, 1), "reward_kl_coefficient": self.controller.coefficient}
        self.controller = self.controller.updated(told["reward_kl"], rows=sum(summary.rows for summary in summaries))
        return told
