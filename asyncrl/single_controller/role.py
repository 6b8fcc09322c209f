"""Role: what a worker group is for."""

from __future__ import annotations

from enum import Enum

from asyncrl.errors import ConfigError

__all__ = ["Role"]


class Role(Enum):
    """The parts of a training run. ``str(role)`` is its short name, as in configurations.

    >>> str(Role.RefPolicy), Role.from_string("rm")
    ('ref', <Role.RewardModel: 'rm'>)
    """

    Actor = "actor"
    Rollout = "rollout"
    ActorRollout = "actor_rollout"
    Critic = "critic"
    RefPolicy = "ref"
    RewardModel = "rm"
    ActorRolloutRef = "actor_rollout_ref"
    Env = "env"

    def __str__(self) -> str:
        return self.value

    @classmethod
    def from_string(cls, name: str) -> Role:
        """The role of a short name.

            >>> Role.from_string("critic")
            <Role.Critic: 'critic'>

        Raises:
            ConfigError: there is none of that name.
        """
        try:
            return cls(name.lower())
        except ValueError:
            known = [role.value for role in cls]
            raise ConfigError(f"no role is called {name!r}", remedy=f"one of {known}") from None
