"""Dotted overrides: ``--trainer.lr 1e-4``, ``--max-staleness=0``, ``--env.options.digits 3``."""

from __future__ import annotations

import copy
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from asyncrl.errors import ConfigError

from .problem import field_at
from .section import DEEPEST_TABLE, is_there_by_default
from .toml import value_from_toml

__all__ = ["Override", "apply_overrides", "parse_overrides"]


@dataclass(frozen=True, slots=True)
class Override:
    """One value from the command line, still as text."""

    path: tuple[str, ...]
    text: str


def parse_overrides(arguments: Sequence[str]) -> list[Override]:
    """Read ``--key value`` and ``--key=value``, any number of them.

    Raises:
        ConfigError: something that is no such pair.
    """
    overrides: list[Override] = []
    rest = list(arguments)
    while rest:
        option = rest.pop(0)
        key, equals, text = option.partition("=")
        if not key.startswith("--") or len(key) == 2:
            raise ConfigError(
                f"{option!r} is no setting", path=option, remedy="write settings like --trainer.lr 1e-4 (or =1e-4)"
            )
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"{key} needs a value", path=key[2:], remedy=f"write {key} VALUE")
            text = rest.pop(0)
        path = tuple(part.replace("-", "_") for part in key[2:].split("."))
        if not all(path) or len(path) > DEEPEST_TABLE or not _encodable(option) or not _encodable(text):
            raise ConfigError(f"{option!r} is no dotted key", path=key[2:], remedy="keys look like trainer.lr")
        overrides.append(Override(path, text))
    return overrides


def apply_overrides(data: Mapping[str, Any], overrides: Iterable[Override], model: type[BaseModel]) -> dict[str, Any]:
    """A copy of ``data`` with the overrides in it, later ones over earlier ones.

    Values are TOML literals, and text where they are none or where ``model`` wants text. ``none`` takes an optional
    key away, also one that is there by default.
    """
    result = copy.deepcopy(dict(data))
    for override in overrides:
        table = result
        for key in override.path[:-1]:
            child = table.get(key)
            if not isinstance(child, dict):
                child = table[key] = {}
            table = child
        value = _value(override, model)
        if value is None:
            field = field_at(model, override.path)
            table.pop(override.path[-1], None)
            if field is not None and is_there_by_default(field):
                table[override.path[-1]] = "none"
        else:
            table[override.path[-1]] = value
    return result


def _value(override: Override, model: type[BaseModel]) -> Any:
    value = value_from_toml(override.text)
    field = field_at(model, override.path)
    if field is None:
        return value
    kinds = _kinds(field.annotation)
    if type(None) in kinds and override.text.lower() == "none":
        return None
    if not isinstance(value, str) and kinds & {str, Path} and type(value) not in kinds:
        return override.text
    if isinstance(value, str) and tuple in kinds:
        return [value]
    return value


def _kinds(annotation: Any) -> set[Any]:
    if hasattr(annotation, "__metadata__"):
        return _kinds(get_args(annotation)[0])
    origin = get_origin(annotation)
    if origin in {Union, types.UnionType}:
        return {kind for choice in get_args(annotation) for kind in _kinds(choice)}
    return {origin or annotation}


def _encodable(text: str) -> bool:
    """Whether text is Unicode: bytes of the command line that are not arrive as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
