"""Options of the training engine that are checked before anything is made of them."""

from __future__ import annotations

from typing import get_args

from asyncrl.errors import ConfigError
from engines.training.model import ComputeDtype

__all__ = ["check_options"]


def check_options(
    *, max_grad_norm: float | None, temperature: float, dtype: str, publish_dtype: str, **counts: int | None
) -> None:
    """Raise :class:`ConfigError`, which names the option, unless all can be used; ``counts`` are 1 or more, or None."""
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}", path=name, remedy="at least 1")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ConfigError(f"max_grad_norm is {max_grad_norm}", path="max_grad_norm", remedy="positive, or None")
    if not temperature > 0:
        raise ConfigError(f"temperature is {temperature}", path="temperature", remedy="positive; 1.0 for greedy")
    for name, chosen in (("dtype", dtype), ("publish_dtype", publish_dtype)):
        if chosen not in get_args(ComputeDtype):
            raise ConfigError(f"{name} is {chosen!r}", path=name, remedy=f"one of {', '.join(get_args(ComputeDtype))}")
