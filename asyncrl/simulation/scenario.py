"""What is simulated: sizes, durations, and what goes wrong when."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from asyncrl.pipeline.staleness import StalenessPolicy, staleness_policy
from asyncrl.simulation.distributions import Distribution

__all__ = ["Fault", "FaultKind", "Scenario"]

FaultKind: TypeAlias = Literal[
    "environment", "crash", "freeze", "slow", "garbage", "duplicate", "weights", "trainer", "storage"
]
"""What may go wrong.

    environment   the group's environment fails for good: the group is dropped, another takes its place
    crash         the replica dies under the group, and under whatever else it was doing
    freeze        the replica never answers the group; its deadline ends the wait
    slow          the replica decodes at a tenth of its speed until the group is done
    garbage       the replica answers with rows that contradict themselves
    duplicate     the group's rows are put into the buffer a second time, later
    weights       the replica does not take the next version
    trainer       the trainer dies in the step
    storage       the checkpoint after the step cannot be written
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that goes wrong once: at the group of this slot, or at the training step of this number."""

    kind: FaultKind
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A run as it is planned. Time is in seconds of the virtual clock, whatever a second stands for.

    Attributes:
        steps: training steps.
        groups_per_step: groups in a batch.
        group_size: rollouts in a group.
        max_staleness: the bound.
        policy: what becomes of the slow ones: a name, or a policy of one's own.
        tokens: length of a rollout, over all its turns.
        most_tokens: where a rollout is cut; None for never.
        token_s: seconds a token takes a request that decodes alone.
        turns: turns of a rollout.
        turn_s: seconds the environment takes after each turn.
        replicas: rollout replicas.
        saturation: requests from which on a replica's requests share its speed.
        reward_s: seconds a reward takes after the rollout; None: it comes with the rollout.
        update_s: seconds of an update.
        publish_s: seconds until the trainer has its weights ready to be fetched.
        prepare_s: seconds a replica takes to fetch them.
        checkpoint_every: steps between checkpoints; 0 for none.
        ledger: keep one, on the disk, and go on from it after a fault; without one what came after the checkpoint is
            sampled again.
        buffer: further options of the replay buffer.
        rollout_deadline_s: seconds a group may take.
        weights_deadline_s: seconds a replica may take for a phase of a weight update.
        revive_s: seconds until a dead replica is made again; None: it stays dead.
        endless: issue groups without regard to the run's end, so that the last steps are like all others.
        faults: what goes wrong.
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
    checkpoint_every: int = 0
    ledger: bool = False
    buffer: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rollout_deadline_s: float | None = None
    weights_deadline_s: float = 300.0
    revive_s: float | None = 0.5
    endless: bool = False
    faults: tuple[Fault, ...] = ()
    seed: int = 0

    @property
    def staleness(self) -> StalenessPolicy:
        """The policy that holds under this bound."""
        if isinstance(self.policy, StalenessPolicy):
            return self.policy
        return staleness_policy(self.policy, max_staleness=self.max_staleness)

    @property
    def capacity_groups(self) -> int:
        """Places in the buffer, as :attr:`asyncrl.config.Config.capacity_groups` derives them."""
        lead = (self.max_staleness + 1) * self.groups_per_step
        return 2 * lead if self.staleness.overdue else lead

    def dice(self, slot: int, row: int) -> random.Random:
        """What a rollout's length and pauses are drawn with: its own, wherever and whenever it runs."""
        return random.Random(((self.seed * 1_000_003 + slot) << 16) + row)  # noqa: S311  reproducible, not secret

    def length(self, dice: random.Random) -> int:
        """Tokens of a rollout."""
        tokens = max(1, round(self.tokens.sample(dice)))
        return tokens if self.most_tokens is None else min(tokens, self.most_tokens)
