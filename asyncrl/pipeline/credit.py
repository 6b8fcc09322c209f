"""Advantages of tokens, made where their rows lie: of a critic's values, or of advantages of turns.

What an estimator needs decides where it runs. One that compares rows runs in the driver, on the numbers in the headers.
One that needs ``values`` or ``token_rewards`` looks at each row alone, so the worker that trains on the row makes its
advantages, right before the step: no column of tokens travels for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from asyncrl.data import DataProto
from asyncrl.errors import SchemaError

if TYPE_CHECKING:
    from torch import Tensor

    from asyncrl.algorithms import KLEstimator

__all__ = ["TokenCredit", "with_returns", "with_token_advantages", "with_turn_advantages"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCredit:
    """How rewards become advantages of tokens, and what the critic is to say; picklable.

    Columns of a batch it is used on: ``weight_versions``, ``rewards`` [B], ``values`` where the estimator or
    :func:`with_returns` needs them; ``turns`` and ``turn_rewards`` with ``by_turns``; ``behaviour_log_probs`` and
    ``reference_log_probs`` with a ``kl_coefficient``.

    Attributes:
        estimator: entry point of ``asyncrl.advantages``, or a dotted path.
        options: of the estimator.
        by_turns: rewards stand at the ends of the turns that earned them, and at the row's last token what no turn did;
            else a row's whole reward stands there.
        trace: lambda of the critic's returns: 1 is what really came, less leans on the critic itself.
        kl_coefficient: of the divergence from the reference, taken off each token's reward.
        kl_estimator: see :mod:`asyncrl.algorithms.kl`.
    """

    estimator: str
    options: Mapping[str, Any] = field(default_factory=dict)
    by_turns: bool = False
    trace: float = 1.0
    kl_coefficient: float = 0.0
    kl_estimator: KLEstimator = "k1"


def with_token_advantages(batch: DataProto, credit: TokenCredit) -> DataProto:
    """The same rows with ``advantages``: ragged float32, one for each sampled token, 0 elsewhere."""
    from asyncrl.algorithms import load_estimator

    found = _Sampled(batch, credit)
    estimator = load_estimator(credit.estimator, options=credit.options)
    columns = {"rewards": found.rewards, "lengths": found.lengths, "token_rewards": found.token_rewards}
    if "values" in found.columns:
        columns["values"] = found.of("values")
    return found.joined("advantages", estimator(columns))


def with_returns(batch: DataProto, credit: TokenCredit) -> DataProto:
    """The same rows with ``returns``, which the critic is to say: the estimate of ``gae`` with lambda = ``trace``."""
    from asyncrl.algorithms import gae

    found = _Sampled(batch, credit)
    discount = float(credit.options.get("discount", 1.0))
    _, returns = gae(found.token_rewards, found.of("values"), found.lengths, discount=discount, trace=credit.trace)
    return found.joined("returns", returns)


def with_turn_advantages(batch: DataProto) -> DataProto:
    """The same rows with ``advantages`` (ragged float32): of each sampled token, that of its turn.

    Columns ``turns`` and ``turn_advantages`` (ragged, one for each turn of the row).

    Raises:
        SchemaError: a row has a turn without an advantage.
    """
    import torch

    from asyncrl.data.ragged import lengths, offsets_of, ragged_from_values, values_of

    assert batch.batch is not None
    turns, by_turn = batch.batch["turns"], batch.batch["turn_advantages"]
    numbers = values_of(turns).long()
    rows = torch.repeat_interleave(torch.arange(len(batch)), lengths(turns))
    counts = lengths(by_turn)
    if bool((numbers >= counts[rows]).any()):
        row = int(rows[numbers >= counts[rows]][0])
        raise SchemaError(f"row {row} has {int(counts[row])} advantages of turns, and tokens of a later turn")
    places = (offsets_of(by_turn)[rows] + numbers).clamp(min=0)
    padded = torch.cat([values_of(by_turn).float(), torch.zeros(1)])  # a batch without any turn has nothing to index
    advantages = torch.where(numbers >= 0, padded[places.clamp(max=len(padded) - 1)], 0.0)
    return batch.with_columns(advantages=ragged_from_values(advantages, offsets_of(turns)))


class _Sampled:
    """The sampled tokens of a batch, row after row, and what they earned.

    What was sampled is told by ``weight_versions``: ``loss_mask`` may leave out tokens that are too old, which still
    are steps of the episode.
    """

    def __init__(self, batch: DataProto, credit: TokenCredit) -> None:
        import torch

        from asyncrl.data.ragged import lengths, offsets_of, values_of

        assert batch.batch is not None
        self._batch = batch
        self.columns: dict[str, Any] = dict(batch.batch.items())
        versions = self.columns["weight_versions"]
        self._offsets = offsets_of(versions)
        self._chosen = values_of(versions) >= 0
        rows = torch.repeat_interleave(torch.arange(len(batch)), lengths(versions))
        self.lengths = torch.bincount(rows[self._chosen], minlength=len(batch))
        self.rewards: Tensor = self.columns["rewards"].float()
        self.token_rewards = self._rewarded(credit)

    def of(self, name: str) -> Tensor:
        """[T] of a ragged column, the sampled tokens."""
        from asyncrl.data.ragged import values_of

        if name not in self.columns:
            raise SchemaError(f"advantages of tokens need {name!r}; the batch has {sorted(self.columns)}")
        return values_of(self.columns[name])[self._chosen]

    def joined(self, name: str, tokens: Tensor) -> DataProto:
        """The batch with one column more, of [T] numbers for the sampled tokens."""
        import torch

        from asyncrl.data.ragged import ragged_from_values

        column = torch.zeros(len(self._chosen))
        column[self._chosen] = tokens.float()
        return self._batch.with_columns(**{name: ragged_from_values(column, self._offsets)})

    def _rewarded(self, credit: TokenCredit) -> Tensor:
        import torch

        from asyncrl.algorithms import kl_estimate, penalised_token_rewards
        from asyncrl.data.ragged import rows_of

        divergences = torch.zeros(int(self.lengths.sum()))
        if credit.kl_coefficient:
            divergences = kl_estimate(
                self.of("behaviour_log_probs"), self.of("reference_log_probs"), estimator=credit.kl_estimator
            )
        outcomes = self.rewards
        if credit.by_turns:
            earned = rows_of(self.columns["turn_rewards"])
            outcomes = outcomes - torch.stack([row.sum() for row in earned]) if earned else outcomes
        tokens = penalised_token_rewards(outcomes, divergences, self.lengths, coefficient=credit.kl_coefficient)
        return tokens + self._turn_rewards() if credit.by_turns else tokens

    def _turn_rewards(self) -> Tensor:
        """[T]: what each turn earned, at its last token."""
        import torch

        from asyncrl.data.ragged import offsets_of, values_of

        numbers = self.of("turns").long()
        rows = torch.repeat_interleave(torch.arange(len(self.lengths)), self.lengths)
        last = torch.ones(len(numbers), dtype=torch.bool)
        last[:-1] = (numbers[1:] != numbers[:-1]) | (rows[1:] != rows[:-1])
        earned = torch.zeros(len(numbers))
        places = offsets_of(self.columns["turn_rewards"])[rows[last]] + numbers[last]
        earned[last] = values_of(self.columns["turn_rewards"])[places]
        return earned
