"""From what the driver knows of a batch's groups to what their rows are trained with.

estimator needs only       advantages are made            what is joined to the rows
rewards, groups, lengths   here, one a row                advantages [B]
greedy_rewards too         here, one a row                advantages [B]
turn_...                   here, one a turn               turn_advantages, one for each turn of a row
token_rewards, values      where the rows are trained     rewards [B], and a TokenCredit beside the batch
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from asyncrl.algorithms import AdvantageEstimator
from asyncrl.data import DataProto
from asyncrl.data.ragged import ragged_from_list
from asyncrl.errors import InvalidDataError
from asyncrl.interfaces import GroupSummary
from asyncrl.pipeline.credit import TokenCredit
from asyncrl.pipeline.reward_penalty import RewardPenalty

if TYPE_CHECKING:
    from asyncrl.algorithms import KLEstimator

__all__ = ["Judge", "Judgement"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What a batch's rows are trained with.

    Attributes:
        columns: to be joined to the rows.
        credit: how workers make advantages of tokens; None where they need not.
    """

    columns: DataProto
    credit: TokenCredit | None = None


@dataclass(slots=True, kw_only=True)
class Judge:
    """Makes advantages of rewards, or says how they are made.

    Attributes:
        estimator: the advantage.
        by_turns: the environment's rewards count, each for its turn; else one score for the whole row.
        penalty: takes the divergence from the reference off the rewards.
        trace: lambda of the critic's returns.
        kl_estimator: of the penalty, where it is taken off the rewards of tokens.
        greedy: reward of the greedy answer to the prompt of each group that waits to be trained on.
        divergences: of such groups' rows from the reference, in nats (k1).
    """

    estimator: AdvantageEstimator
    by_turns: bool = True
    penalty: RewardPenalty | None = None
    trace: float = 1.0
    kl_estimator: KLEstimator = "k1"
    greedy: dict[int, float] = field(default_factory=dict)
    divergences: dict[int, tuple[float, ...]] = field(default_factory=dict)

    @property
    def row_columns(self) -> tuple[str, ...]:
        """Columns of the rows that an update reads for the sake of advantages."""
        level = self.estimator.level
        if level == "row":
            return ()
        if level == "turn":
            return ("turns",)
        turns = ("turns", "turn_rewards") if self.by_turns else ()
        return (*turns, *(["values"] if "values" in self.estimator.needs else []))

    def forget(self, slot: int) -> None:
        """The group was dropped."""
        self.greedy.pop(slot, None)
        self.divergences.pop(slot, None)
        if self.penalty is not None:
            self.penalty.forget(slot)

    @property
    def wants_divergences(self) -> bool:
        """Whether the reference must tell what each row diverged."""
        return self.penalty is not None or "divergences" in self.estimator.needs

    def told(self, slot: int, divergences: Sequence[float]) -> None:
        """What each row of a group diverged from the reference."""
        if self.penalty is not None:
            self.penalty.told(slot, divergences)
        if "divergences" in self.estimator.needs:
            self.divergences[slot] = tuple(divergences)

    def judge(self, summaries: Sequence[GroupSummary]) -> Judgement:
        """What the rows of these groups, in this order, are trained with.

        Raises:
            InvalidDataError: a group's greedy reward or the rewards of its turns are not known.
        """
        rewards = [reward for summary in summaries for reward in summary.rewards]
        level = self.estimator.level
        if level == "token":
            return Judgement(
                columns=DataProto.from_dict(tensors={"rewards": torch.tensor(rewards, dtype=torch.float32)}),
                credit=TokenCredit(
                    estimator=self.estimator.name,
                    options=dict(self.estimator.options),
                    by_turns=self.by_turns,
                    trace=self.trace,
                    kl_coefficient=self.penalty.controller.coefficient if self.penalty is not None else 0.0,
                    kl_estimator=self.kl_estimator,
                ),
            )
        penalised = rewards if self.penalty is None else self.penalty.rewards(summaries)
        columns = {
            "rewards": torch.tensor(penalised, dtype=torch.float32),
            "groups": torch.tensor([summary.slot for summary in summaries for _ in summary.rewards]),
            "lengths": torch.tensor([length for summary in summaries for length in summary.lengths]),
        }
        if "greedy_rewards" in self.estimator.needs:
            columns["greedy_rewards"] = self._greedy_rewards(summaries)
        if "divergences" in self.estimator.needs:
            columns["divergences"] = self._divergences(summaries)
        if level == "turn":
            turns = _turns(summaries, by_turns=self.by_turns)
            advantages = self.estimator(columns | turns)
            counts = torch.bincount(turns["turn_rows"], minlength=len(rewards)).tolist()
            return Judgement(
                columns=DataProto.from_dict(
                    tensors={"turn_advantages": ragged_from_list(list(advantages.split(counts)))}
                )
            )
        return Judgement(columns=DataProto.from_dict(tensors={"advantages": self.estimator(columns)}))

    def stepped(self, summaries: Sequence[GroupSummary]) -> dict[str, float]:
        """The groups were trained on; returns what is to be told of it."""
        told: dict[str, float] = {}
        if "greedy_rewards" in self.estimator.needs:
            told["greedy_reward"] = float(self._greedy_rewards(summaries).mean())
            for summary in summaries:
                del self.greedy[summary.slot]
        if "divergences" in self.estimator.needs:
            tokens = sum(summary.tokens for summary in summaries)
            told["divergence"] = float(self._divergences(summaries).sum()) / max(tokens, 1)
            for summary in summaries:
                del self.divergences[summary.slot]
        return told if self.penalty is None else told | self.penalty.stepped(summaries)

    def _divergences(self, summaries: Sequence[GroupSummary]) -> torch.Tensor:
        for summary in summaries:
            if len(self.divergences.get(summary.slot, ())) != summary.rows:
                raise InvalidDataError(f"group {summary.slot} has no divergence for each of its rows")
        return torch.tensor([each for summary in summaries for each in self.divergences[summary.slot]])

    def _greedy_rewards(self, summaries: Sequence[GroupSummary]) -> torch.Tensor:
        for summary in summaries:
            if summary.slot not in self.greedy:
                raise InvalidDataError(f"group {summary.slot} has no reward of a greedy answer to its prompt")
        return torch.tensor([self.greedy[summary.slot] for summary in summaries for _ in summary.rewards])


def _turns(summaries: Sequence[GroupSummary], *, by_turns: bool) -> dict[str, torch.Tensor]:
    """The turns of all rows, [K] each; without ``by_turns`` a row's reward stands at its last turn."""
    rewards: list[float] = []
    rows: list[int] = []
    anchors: list[int] = []
    number = 0
    for summary in summaries:
        if not summary.rows == len(summary.turn_rewards) == len(summary.turn_anchors):
            raise InvalidDataError(f"group {summary.slot} does not tell of the turns of its rows")
        for reward, earned, states in zip(summary.rewards, summary.turn_rewards, summary.turn_anchors, strict=True):
            by_turn = [*earned] if by_turns else [0.0] * len(earned)
            if by_turn:
                by_turn[-1] += reward - sum(by_turn)  # what no single turn earned: all of a reward model's score
            rewards += by_turn
            rows += [number] * len(earned)
            anchors += states
            number += 1
    return {
        "turn_rewards": torch.tensor(rewards, dtype=torch.float32),
        "turn_rows": torch.tensor(rows, dtype=torch.int64),
        "turn_anchors": torch.tensor(anchors, dtype=torch.int64),
    }
