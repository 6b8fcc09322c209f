"""How long things take: distributions with a name, a mean and what lies beyond a bound."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass

from asyncrl.errors import ConfigError

__all__ = ["Distribution"]

_PARAMETERS = {"constant": 1, "uniform": 2, "exponential": 1, "lognormal": 2}
_POINTS = 4096


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution of positive numbers.

    ``constant(value)``, ``uniform(low, high)``, ``exponential(mean)``, ``lognormal(mu, sigma)`` with the mean and
    deviation of the logarithm.

    >>> Distribution.parse("lognormal(1, 1)").mean
    4.4816890703380645
    >>> round(Distribution.parse("lognormal(1, 1)").excess(4) / Distribution.parse("lognormal(1, 1)").mean, 3)
    0.418
    """

    kind: str
    parameters: tuple[float, ...]

    def __post_init__(self) -> None:
        wanted = _PARAMETERS.get(self.kind)
        if wanted is None or len(self.parameters) != wanted or not all(map(math.isfinite, self.parameters)):
            raise ConfigError(
                f"{self} is no distribution",
                remedy="constant(value), uniform(low, high), exponential(mean) or lognormal(mu, sigma)",
            )
        if not math.isfinite(self.mean):
            raise ConfigError(f"{self} has no finite mean", remedy="smaller numbers: lognormal takes logarithms")
        if self.quantile(0.0) < 0 or self.quantile(0.5) < self.quantile(0.25):
            raise ConfigError(f"{self} has negative values", remedy="durations and lengths are positive")

    @staticmethod
    def parse(text: str) -> Distribution:
        """Read ``kind(number, ...)``; a bare number is a constant.

        Raises:
            ConfigError: it is none.
        """
        found = re.fullmatch(r"\s*(?:([a-z]+)\s*\()?\s*([-+.\deE,\s]+?)\s*(\))?\s*", text)
        try:
            if found is None or bool(found[1]) != bool(found[3]):
                raise ValueError(text)
            return Distribution(found[1] or "constant", tuple(float(number) for number in found[2].split(",")))
        except ValueError:
            raise ConfigError(
                f"{text!r} is no distribution", remedy='write for example "lognormal(4.5, 0.8)", or a number'
            ) from None

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(f'{parameter:g}' for parameter in self.parameters)})"

    @property
    def mean(self) -> float:
        """The expected value."""
        if self.kind == "uniform":
            return sum(self.parameters) / 2
        if self.kind == "lognormal":
            mu, sigma = self.parameters
            try:
                return math.exp(mu + sigma * sigma / 2)
            except OverflowError:
                return math.inf
        return self.parameters[0]

    def sample(self, dice: random.Random) -> float:
        """One value."""
        first, *rest = self.parameters
        match self.kind:
            case "uniform":
                return dice.uniform(first, rest[0])
            case "exponential":
                return dice.expovariate(1 / first) if first else 0.0
            case "lognormal":
                return dice.lognormvariate(first, rest[0])
        return first

    def quantile(self, share: float) -> float:
        """The value below which ``share`` of them lie, for 0 <= share < 1."""
        first, *rest = self.parameters
        match self.kind:
            case "uniform":
                return first + (rest[0] - first) * share
            case "exponential":
                return -first * math.log1p(-share)
            case "lognormal":
                return math.exp(first + rest[0] * _normal_quantile(share)) if share > 0 else 0.0
        return first

    def excess(self, bound: float) -> float:
        """E[(X - bound)+]: what lies beyond ``bound``, on average."""
        if bound <= 0:
            return self.mean - bound
        if self.kind == "lognormal":
            mu, sigma = self.parameters
            if sigma > 0:
                above = (mu - math.log(bound)) / sigma
                return self.mean * _normal(above + sigma) - bound * _normal(above)
        if self.kind == "exponential":
            return self.mean * math.exp(-bound / self.mean) if self.mean else 0.0
        return sum(max(0.0, self.quantile((point + 0.5) / _POINTS) - bound) for point in range(_POINTS)) / _POINTS


def _normal(x: float) -> float:
    """Probability that a standard normal number is below ``x``."""
    return 0.5 * math.erfc(-x / math.sqrt(2))


def _normal_quantile(share: float) -> float:
    """Inverse of :func:`_normal`."""
    from statistics import NormalDist

    return NormalDist().inv_cdf(share)
