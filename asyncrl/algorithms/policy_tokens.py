"""What a policy loss sees: the columns of some tokens, with everything outside the mask taken out already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from asyncrl.algorithms.kl import probability_ratio
from asyncrl.algorithms.rows import Rows
from asyncrl.errors import SchemaError

__all__ = ["PolicyTokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTokens:
    """Columns of tokens, all of one shape, usually [T] packed; 0 outside ``mask``.

    Whole rows: a micro-batch may hold any rows, but never a part of one.

    Attributes:
        current: log-probs under the weights being trained; the only column with a gradient.
        anchor: log-probs where the trust region has its centre: the ratio is current / anchor.
        proximal: log-probs under the weights at the start of the step.
        behaviour: log-probs under the distribution the token was sampled from.
        advantages: one per token.
        mask: boolean, True where the token is trained on.
        row_index: integer, equal for tokens of one row; None where nobody asks for rows.
        prepared: columns that the loss itself computed over the whole batch (:meth:`PolicyLoss.prepare`).
    """

    current: Tensor
    anchor: Tensor
    proximal: Tensor
    behaviour: Tensor
    advantages: Tensor
    mask: Tensor
    row_index: Tensor | None = None
    prepared: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def log_ratio(self) -> Tensor:
        """log(current / anchor), differentiable in ``current``."""
        return self.current - self.anchor

    @property
    def ratio(self) -> Tensor:
        """Ratio current / anchor, always finite."""
        return probability_ratio(self.log_ratio)

    def rows(self) -> Rows:
        """Sums over rows.

        Raises:
            SchemaError: ``row_index`` was not given.
        """
        if self.row_index is None:
            raise SchemaError("this loss or correction sums over rows: token_losses needs rows, the row of each token")
        return Rows(self.row_index, self.mask)
