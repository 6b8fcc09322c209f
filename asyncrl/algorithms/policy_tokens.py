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

        >>> half = torch.tensor([0.5, 0.5, 0.5]).log()
        >>> tokens = PolicyTokens(  # two of one row, one of another
        ...     current=torch.tensor([0.5, 0.75, 0.25]).log(),
        ...     anchor=half,
        ...     proximal=half,
        ...     behaviour=torch.tensor([0.5, 0.25, 0.5]).log(),
        ...     advantages=torch.tensor([1.0, 1.0, -1.0]),
        ...     mask=torch.tensor([True, True, True]),
        ...     row_index=torch.tensor([0, 0, 1]),
        ... )
        >>> tokens.ratio
        tensor([1.0000, 1.5000, 0.5000])

    The examples of losses and corrections are about these tokens.

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
        """log(current / anchor), differentiable in ``current``.

        >>> tokens.log_ratio
        tensor([ 0.0000,  0.4055, -0.6931])
        """
        return self.current - self.anchor

    @property
    def ratio(self) -> Tensor:
        """Ratio current / anchor, always finite.

        >>> tokens.ratio
        tensor([1.0000, 1.5000, 0.5000])
        """
        return probability_ratio(self.log_ratio)

    def rows(self) -> Rows:
        """Sums over rows.

            >>> tokens.rows().sum(tokens.advantages)
            tensor([ 2.,  2., -1.])

        Raises:
            SchemaError: ``row_index`` was not given.
        """
        if self.row_index is None:
            raise SchemaError("this loss or correction sums over rows: token_losses needs rows, the row of each token")
        return Rows(self.row_index, self.mask)
