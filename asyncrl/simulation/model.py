"""The model of a run: distributions of durations, the scenario with its faults, and the decoder of a replica."""

from __future__ import annotations

import asyncio
import heapq
import math
import random
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, Literal, TypeAlias

from asyncrl.errors import ConfigError
from asyncrl.staleness import StalenessPolicy, staleness_policy

_PARAMETERS = {"constant": 1, "uniform": 2, "exponential": 1, "lognormal": 2}
_POINTS = 4096


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution of positive numbers.

    ``constant(value)``, ``uniform(low, high)``, ``exponential(mean)``, or ``lognormal(mu, sigma)`` with the mean and
    the standard deviation of the logarithm.

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
                f"{self} is not a distribution",
                remedy="constant(value), uniform(low, high), exponential(mean) or lognormal(mu, sigma)",
            )
        if not math.isfinite(self.mean):
            raise ConfigError(f"{self} has no finite mean", remedy="use smaller numbers: lognormal takes logarithms")
        if self.quantile(0.0) < 0 or self.quantile(0.5) < self.quantile(0.25):
            raise ConfigError(f"{self} has negative values", remedy="durations and lengths are positive")

    @staticmethod
    def parse(text: str) -> Distribution:
        """Parse ``kind(number, ...)`` or a number, which is a constant; raise ConfigError for any other text."""
        found = re.fullmatch(r"\s*(?:([a-z]+)\s*\()?\s*([-+.\deE,\s]+?)\s*(\))?\s*", text)
        try:
            if found is None or bool(found[1]) != bool(found[3]):
                raise ValueError(text)
            return Distribution(found[1] or "constant", tuple(float(number) for number in found[2].split(",")))
        except ValueError:
            raise ConfigError(
                f"{text!r} is not a distribution", remedy='write for example "lognormal(4.5, 0.8)", or a number'
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
        """Return the value below which ``share`` of all values lie, for 0 <= share < 1."""
        first, *rest = self.parameters
        match self.kind:
            case "uniform":
                return first + (rest[0] - first) * share
            case "exponential":
                return -first * math.log1p(-share)
            case "lognormal":
                return math.exp(first + rest[0] * NormalDist().inv_cdf(share)) if share > 0 else 0.0
        return first

    def excess(self, bound: float) -> float:
        """Return E[(X - bound)+], the mean excess over ``bound``."""
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
    """Return the distribution function of the standard normal distribution at ``x``."""
    return 0.5 * math.erfc(-x / math.sqrt(2))


FaultKind: TypeAlias = Literal[
    "environment",
    "crash",
    "freeze",
    "slow",
    "garbage",
    "duplicate",
    "weights",
    "evaluation",
    "hand-over",
    "trainer",
    "snapshot",
    "storage",
]
"""Kinds of faults.

    environment   the group's environment fails permanently: the group is dropped, and another replaces it
    crash         the replica dies during the group, with all of its other rollouts
    freeze        the replica never answers the group; a deadline ends the wait
    slow          the replica decodes at a tenth of its speed until the group is done
    garbage       the replica answers with contradictory rows
    duplicate     the group's rows are put into the buffer a second time, later
    weights       the replica dies while it fetches the next version
    evaluation    the replica dies while it answers held-out tasks under the version of the step
    hand-over     the replica dies while it sleeps or wakes, under the version of the step
    trainer       the trainer dies in the step
    snapshot      the checkpoint after the step cannot be taken
    storage       the checkpoint after the step cannot be written
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault that happens once: at the group of this group_id, or at the training step of this number."""

    kind: FaultKind
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The configuration of a simulated run. All times are seconds of the virtual clock.

    Attributes:
        tokens: length of a rollout, over all its turns.
        most_tokens: upper bound of that length; None for no bound.
        token_s: time of a token when one request decodes alone.
        turn_s: time of the environment after each turn.
        saturation: number of requests above which a replica's requests share its speed.
        reward_s: time of a reward after the rollout; None: the rollout includes it.
        publish_s: time until new weights can be fetched.
        prepare_s: time in which a replica fetches them; ``commit_s`` in which it swaps them then.
        checkpoint_every: steps between checkpoints; 0 for none.
        checkpoint_s: time for which a checkpoint stops training; ``checkpoint_write_s`` until it is written then.
        ledger: keep a ledger on the disk and continue from it after a fault; without one, rollouts after the checkpoint
            are sampled again.
        buffer: options of the replay buffer; they replace those of the scenario.
        eval_every: steps between evaluations of ``eval_tasks`` held-out tasks, which are as long as rollouts; 0: none.
        eval_replicas: replicas that are pinned for each; 0: all replicas evaluate.
        shared_devices: whether replicas and trainer take turns on the same devices.
        hand_over_s: time in which a replica, or the trainer, sleeps or wakes.
        weights_deadline_s: longest time of a replica for a phase of a weight update.
        revive_s: time until a dead replica is replaced; None: never.
        endless: keep issuing groups at the end of the run, so that the last steps are like all others.
        seed: draws lengths, times and the order of simultaneous events.
    """

    steps: int
    groups_per_step: int
    group_size: int = 1
    max_staleness: int = 1
    policy: str | StalenessPolicy = "mask"
    tokens: Distribution = field(default_factory=lambda: Distribution("constant", (16.0,)))
    most_tokens: int | None = None
    token_s: float = 1 / 16
    turns: int = 1
    turn_s: Distribution = field(default_factory=lambda: Distribution("constant", (0.0,)))
    replicas: int = 1
    saturation: float = math.inf
    reward_s: Distribution | None = None
    update_s: Distribution = field(default_factory=lambda: Distribution("constant", (1.0,)))
    publish_s: float = 0.0
    prepare_s: float = 0.0
    commit_s: float = 0.0
    checkpoint_every: int = 0
    checkpoint_s: float = 0.0
    checkpoint_write_s: float = 0.0
    ledger: bool = False
    eval_every: int = 0
    eval_tasks: int = 1
    eval_replicas: int = 0
    shared_devices: bool = False
    hand_over_s: float = 0.0
    buffer: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rollout_deadline_s: float | None = None
    weights_deadline_s: float = 300.0
    revive_s: float | None = 0.5
    endless: bool = False
    faults: tuple[Fault, ...] = ()
    seed: int = 0

    @property
    def staleness(self) -> StalenessPolicy:
        """The staleness policy as an instance."""
        if isinstance(self.policy, StalenessPolicy):
            return self.policy
        return staleness_policy(self.policy, max_staleness=self.max_staleness)

    @property
    def capacity_groups(self) -> int:
        """Capacity of the buffer, derived as in :attr:`asyncrl.config.Config.capacity_groups`."""
        lead = (self.max_staleness + 1) * self.groups_per_step
        return 2 * lead if self.staleness.overdue else lead

    def dice(self, group_id: int, row: int) -> random.Random:
        """Return the random generator of a rollout, which does not depend on its replica or time."""
        return random.Random(((self.seed * 1_000_003 + group_id) << 16) + row)  # noqa: S311  reproducible, not secret

    def length(self, dice: random.Random) -> int:
        tokens = max(1, round(self.tokens.sample(dice)))
        return tokens if self.most_tokens is None else min(tokens, self.most_tokens)


@dataclass(slots=True, eq=False)
class _Request:
    begin: float
    end: float
    done: asyncio.Future[None]
    left: bool = False


class ModelledDecoder:
    """Decodes requests at ``tokens_per_s`` each; more than ``saturation`` concurrent requests share that total speed.

    *Work* is the number of tokens of a hypothetical request that runs from the start. A request that begins at work
    ``b`` samples its token k at work ``b + k``, so only the earliest end needs a timer.
    """

    def __init__(self, *, tokens_per_s: float, saturation: float = math.inf, weight_version: int = 0) -> None:
        self._tokens_per_s = tokens_per_s
        self._saturation = saturation
        self._pace = 1.0
        self._work = 0.0
        self._used_s = 0.0
        self._as_of_s = asyncio.get_running_loop().time()
        self._running = 0
        self._ends: list[tuple[float, int, _Request]] = []
        self._number = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s = math.inf
        self._commits: list[float] = [-math.inf]  # work at which each version was committed
        self._versions: list[int] = [weight_version]

    @property
    def running(self) -> int:
        """Number of current requests."""
        return self._running

    @property
    def weight_version(self) -> int:
        """Version that samples the next token."""
        return self._versions[-1]

    def used_until_now(self) -> float:
        """Return the time of the decoding so far in seconds of full speed; a second at half speed counts as 0.5."""
        return self._used_s + self._used_until(asyncio.get_running_loop().time())

    async def generate(self, tokens: int) -> Counter[int]:
        """Decode ``tokens`` tokens and return their number by version. Cancelling the call ends the request."""
        self._advance()
        loop = asyncio.get_running_loop()
        request = _Request(self._work, self._work + tokens, loop.create_future())
        self._number += 1
        heapq.heappush(self._ends, (request.end, self._number, request))
        self._running += 1
        self._arm()
        try:
            await request.done
        finally:
            if not request.left:
                self._advance()
                request.left = True
                self._running -= 1
                self._arm()
        return self._counts(request.begin, tokens)

    def commit(self, version: int) -> None:
        """Sample all further tokens with ``version``."""
        self._advance()
        self._commits.append(self._work)
        self._versions.append(version)

    def set_pace(self, pace: float) -> None:
        """Continue at ``pace`` times the speed; 0 stops the decoder."""
        self._advance()
        self._pace = pace
        self._arm()

    def _speed(self) -> float:
        shared = min(1.0, self._saturation / self._running) if self._running else 1.0
        return self._tokens_per_s * self._pace * shared

    def _advance(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._running:
            self._work += (now_s - self._as_of_s) * self._speed()
            self._used_s += self._used_until(now_s)
        self._as_of_s = now_s

    def _used_until(self, now_s: float) -> float:
        full_speed = self._saturation if self._saturation < math.inf else 1.0  # number of requests
        return (now_s - self._as_of_s) * self._pace * min(1.0, self._running / full_speed)

    def _arm(self) -> None:
        while self._ends and self._ends[0][2].left:
            heapq.heappop(self._ends)
        speed = self._speed()
        at_s = self._as_of_s + max(0.0, self._ends[0][0] - self._work) / speed if self._ends and speed else math.inf
        if at_s == self._timer_at_s:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at_s = at_s
        if at_s < math.inf:
            self._timer = asyncio.get_running_loop().call_at(at_s, self._finish)

    def _finish(self) -> None:
        self._timer, self._timer_at_s = None, math.inf
        self._advance()
        if self._ends:  # rounding must not leave the first one a hair short of its end
            self._work = max(self._work, self._ends[0][0])
        while self._ends and self._ends[0][0] <= self._work:
            request = heapq.heappop(self._ends)[2]
            if not request.left:
                request.left = True
                self._running -= 1
                if not request.done.done():
                    request.done.set_result(None)
        self._arm()

    def _counts(self, begin: float, tokens: int) -> Counter[int]:
        """Count tokens 1..``tokens``, sampled at work begin + k, by the last version committed before."""
        counts: Counter[int] = Counter()
        first = bisect_left(self._commits, begin + 1) - 1
        before = 0
        for index in range(first, len(self._commits)):
            last = index + 1 == len(self._commits)
            until = tokens if last else min(tokens, max(0, math.floor(self._commits[index + 1] - begin + 1e-9)))
            if until > before:
                counts[self._versions[index]] += until - before
                before = until
            if before == tokens:
                break
        return counts
