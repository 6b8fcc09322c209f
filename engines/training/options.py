"""Options of the training engine that are checked before anything is made of them."""

from __future__ import annotations

import math
from typing import get_args

from asyncrl.algorithms.policy_loss import check_range
from asyncrl.errors import ConfigError
from engines.training.microbatch import Layout
from engines.training.model import ComputeDtype

__all__ = ["check_options"]


def check_options(
    *,
    max_grad_norm: float | None,
    temperature: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
    layout: str,
    dtype: str,
    publish_dtype: str,
    **counts: int | None,
) -> None:
    """Raise :class:`ConfigError`, which names the option, unless all can be used; ``counts`` are 1 or more, or None."""
    for name, value in counts.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ConfigError(f"{name} is {value}", path=name, remedy="a whole number of at least 1")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ConfigError(f"max_grad_norm is {max_grad_norm}", path="max_grad_norm", remedy="positive, or None")
    check_range("temperature", temperature, low=0.0, open_low=True)
    check_range("weight_decay", weight_decay, low=0.0)
    check_range("eps", eps, low=0.0, open_low=True)
    for beta in betas:
        check_range("betas", beta, low=0.0, high=math.nextafter(1.0, 0.0))
    if layout not in ("auto", *get_args(Layout)):
        raise ConfigError(
            f"layout is {layout!r}", path="layout", remedy=f"auto or one of {', '.join(get_args(Layout))}"
        )
    for name, chosen in (("dtype", dtype), ("publish_dtype", publish_dtype)):
        if chosen not in get_args(ComputeDtype):
            raise ConfigError(f"{name} is {chosen!r}", path=name, remedy=f"one of {', '.join(get_args(ComputeDtype))}")
