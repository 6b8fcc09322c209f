"""An advantage estimator by its name: what it needs, and how it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any, Literal, cast

import torch
from torch import Tensor

from asyncrl.errors import ConfigError, SchemaError, UserCodeError
from asyncrl.parts import load_part

__all__ = ["TOKEN_COLUMNS", "TURN_COLUMNS", "AdvantageEstimator", "load_estimator"]

TOKEN_COLUMNS = frozenset({"token_rewards", "values"})
"""Columns [T] of sampled tokens. An estimator that needs one looks at each row alone and returns [T]."""

TURN_COLUMNS = frozenset({"turn_rewards", "turn_rows", "turn_anchors"})
"""Columns [K] of turns. An estimator that needs one returns [K]."""


@dataclass(frozen=True, slots=True)
class AdvantageEstimator:
    """A function from columns of a batch to advantages, with its options.

    The function's own signature says what it needs: its positional parameters are names of columns, its keyword-only
    parameters are options. The columns a training step has:

        rewards   [B] float32   return of each row
        groups    [B] int64     equal for the rows of one prompt
        lengths   [B] int64     sampled tokens of each row

        greedy_rewards  [B]     reward of a greedy answer to the row's prompt, rolled out for it
        divergences     [B]     log(policy that sampled / reference) of each row, its sampled tokens summed

        turn_rewards    [K] float32   of all turns, row after row: what the environment gave it
        turn_rows       [K] int64     row of each turn
        turn_anchors    [K] int64     within a group equal for turns that begin after the same words

        token_rewards   [T] float32   of all sampled tokens, row after row: rewards at the ends of their turns
        values          [T] float32   a critic's, before each of them

    It returns as many numbers as the finest of its columns has: [B], [K] or [T]. One of tokens sees some rows at a
    time, whole ones, so beside its columns it may have ``rewards`` and ``lengths`` but no groups. A user's function of
    that form is named by its path, ``package.module:function``.

        >>> def above_half(rewards, *, slope=1.0):
        ...     return slope * (rewards - 0.5)
        >>> estimator = AdvantageEstimator("above_half", above_half, {"slope": 2.0})
        >>> estimator({"rewards": torch.tensor([1.0, 0.0]), "groups": torch.tensor([3, 3])})
        tensor([ 1., -1.])

    Attributes:
        name: how it was asked for.
        function: the estimator itself.
        options: values of its keyword-only parameters.
    """

    name: str
    function: Callable[..., Tensor]
    options: Mapping[str, Any]

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the columns it cannot do without.

        >>> load_estimator("rloo").needs
        ('rewards', 'groups')
        """
        return tuple(name for name, each in _columns(self.function).items() if each.default is Parameter.empty)

    @property
    def level(self) -> Literal["row", "turn", "token"]:
        """What it gives an advantage to.

        >>> load_estimator("rloo").level, load_estimator("gae").level
        ('row', 'token')
        """
        needs = set(self.needs)
        return "token" if needs & TOKEN_COLUMNS else "turn" if needs & TURN_COLUMNS else "row"

    def option(self, name: str) -> Any:
        """Value of an option, the function's default where none was given; None if it takes no such option.

        >>> load_estimator("pass_at_k").option("k"), load_estimator("grpo").option("k")
        (4, None)
        """
        parameter = signature(self.function).parameters.get(name)
        if parameter is None or parameter.kind is not parameter.KEYWORD_ONLY:
            return None
        return self.options.get(name, parameter.default)

    def __call__(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Advantages [B], [K] or [T] float32 of a batch, by :attr:`level`.

        Raises:
            SchemaError: a column it needs is not there.
            UserCodeError: what it returned is not as many finite numbers.
        """
        missing = [name for name in self.needs if name not in columns]
        if missing:
            raise SchemaError(f"advantage {self.name!r} needs {', '.join(missing)}; there are {', '.join(columns)}")
        given = {name: columns[name] for name in _columns(self.function) if name in columns}
        advantages = self.function(**given, **self.options)
        rows = len(columns[{"row": "rewards", "turn": "turn_rewards", "token": "token_rewards"}[self.level]])
        if isinstance(advantages, Tensor):
            advantages = advantages.detach().to(torch.float32)
        if not isinstance(advantages, Tensor) or advantages.shape != (rows,) or not bool(advantages.isfinite().all()):
            shape = tuple(advantages.shape) if isinstance(advantages, Tensor) else type(advantages).__name__
            raise UserCodeError(f"advantage {self.name!r} must return [{rows}] finite numbers, got {shape}")
        return advantages


def load_estimator(
    name: str, *, options: Mapping[str, Any] | None = None, path: str = "algorithm.advantage"
) -> AdvantageEstimator:
    """The estimator behind ``name``: an entry point of ``asyncrl.advantages``, or ``package.module:function``.

        >>> load_estimator("pass_at_k", options={"k": 2}).options
        {'k': 2}
        >>> load_estimator("pass_at_k", options={"kk": 2})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        asyncrl.errors.ConfigError: algorithm.advantage_options.kk: ... did you mean 'k'? allowed: k, success_reward

    Args:
        name: as above.
        options: values of its keyword-only parameters.
        path: dotted key of the configuration that asked for it; options stand at ``<path>_options``.

    Raises:
        ConfigError: no such estimator, or an option it does not take.
    """
    part = load_part("asyncrl.advantages", name, path=path)
    if not callable(part):
        raise ConfigError(f"{path}: advantage {name!r} is no function", path=path, remedy="name a function")
    function = cast("Callable[..., Tensor]", part)
    allowed = [each.name for each in signature(function).parameters.values() if each.kind is each.KEYWORD_ONLY]
    for option in options or {}:
        if option not in allowed:
            near = get_close_matches(option, allowed, n=1)
            remedy = (f"did you mean {near[0]!r}? " if near else "") + f"allowed: {', '.join(allowed) or 'none'}"
            key = f"{path}_options.{option}"
            raise ConfigError(f"{key}: advantage {name!r} has no option {option!r}; {remedy}", path=key, remedy=remedy)
    return AdvantageEstimator(name, function, dict(options or {}))


def _columns(function: Callable[..., Tensor]) -> dict[str, Parameter]:
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.POSITIONAL_ONLY)
    return {name: each for name, each in signature(function).parameters.items() if each.kind in kinds}
