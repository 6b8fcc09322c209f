"""An advantage estimator by its name: what it needs, and how it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any, cast

import torch
from torch import Tensor

from asyncrl.errors import ConfigError, SchemaError, UserCodeError
from asyncrl.parts import load_part

__all__ = ["AdvantageEstimator", "load_estimator"]


@dataclass(frozen=True, slots=True)
class AdvantageEstimator:
    """A function from columns of a batch to advantages, with its options.

    The function's own signature says what it needs: its positional parameters are names of columns, its keyword-only
    parameters are options. The columns a training step has:

        rewards   [B] float32   return of each row
        groups    [B] int64     equal for the rows of one prompt
        lengths   [B] int64     sampled tokens of each row

    It returns [B], or what it documents for columns of its own. A user's function of that form is named by its path,
    ``package.module:function``.

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
        """Names of the columns it cannot do without."""
        return tuple(name for name, each in _columns(self.function).items() if each.default is Parameter.empty)

    def __call__(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Advantages [B] float32 of a batch.

        Raises:
            SchemaError: a column it needs is not there.
            UserCodeError: what it returned is no [B] of finite numbers.
        """
        missing = [name for name in self.needs if name not in columns]
        if missing:
            raise SchemaError(f"advantage {self.name!r} needs {', '.join(missing)}; there are {', '.join(columns)}")
        given = {name: columns[name] for name in _columns(self.function) if name in columns}
        advantages = self.function(**given, **self.options)
        rows = len(columns["rewards"])
        if not isinstance(advantages, Tensor) or advantages.shape != (rows,) or not bool(advantages.isfinite().all()):
            shape = tuple(advantages.shape) if isinstance(advantages, Tensor) else type(advantages).__name__
            raise UserCodeError(f"advantage {self.name!r} must return [{rows}] finite numbers, got {shape}")
        return advantages.detach().to(torch.float32)


def load_estimator(
    name: str, *, options: Mapping[str, Any] | None = None, path: str = "algorithm.advantage"
) -> AdvantageEstimator:
    """The estimator behind ``name``: an entry point of ``asyncrl.advantages``, or ``package.module:function``.

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
