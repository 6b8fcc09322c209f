"""What a recorded run may be trained with instead: settings that change the update, and none that changes a token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl.config import Config, apply_overrides, parse_overrides
from asyncrl.config.problem import Problem, raise_problems
from asyncrl.config.toml import value_to_toml

__all__ = ["fork_config", "forked_keys"]

LAW = ("algorithm", "trainer", "staleness", "max_staleness")
"""Keys that an update is a function of."""
BESIDE = ("name", "runs", "cluster", "checkpoint", "telemetry")
"""Keys that change neither tokens nor weights."""
SHAPE = ("trainer.groups_per_step", "trainer.group_size")
"""Keys among the first that say what a batch is made of, which is recorded."""


def fork_config(config: Config, settings: Mapping[str, Any]) -> Config:
    """``config`` with ``settings`` (dotted keys; values, or their text) in it.

    Raises:
        ConfigError: a key or value that there is none of, or a key that decided what was sampled.
    """
    words = [
        f"--{key}={value if isinstance(value, str) else 'none' if value is None else value_to_toml(value)}"
        for key, value in settings.items()
    ]
    tables = config.model_dump(mode="json", exclude_none=True)
    forked = Config.from_mapping(apply_overrides(tables, parse_overrides(words), Config), origin="--set")
    refused = [key for key in _changed(config, forked) if key.partition(".")[0] not in LAW + BESIDE or key in SHAPE]
    if refused:
        raise_problems(
            [
                Problem(
                    key,
                    "decided what was sampled, and that is recorded",
                    remedy=f"a recording can be trained again under other {', '.join(LAW)}",
                )
                for key in refused
            ],
            origin="--set",
        )
    return forked


def forked_keys(config: Config, forked: Config) -> tuple[str, ...]:
    """Dotted keys that change what an update does."""
    return tuple(key for key in _changed(config, forked) if key.partition(".")[0] in LAW)


def _changed(config: Config, forked: Config) -> list[str]:
    before, after = dict(_leaves(config.model_dump(mode="json"))), dict(_leaves(forked.model_dump(mode="json")))
    return sorted(key for key in {*before, *after} if before.get(key) != after.get(key))


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
