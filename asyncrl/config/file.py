"""From a TOML file and dotted overrides (``--trainer.lr 1e-4``, ``--max-staleness=0``) to a :class:`Config`."""

from __future__ import annotations

import copy
import re
import tomllib
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel

from asyncrl.config.config import Config, Document
from asyncrl.config.problem import field_at
from asyncrl.config.sections import DEEPEST_TABLE, Section, is_set_by_default
from asyncrl.config.toml import nested_deeper, value_from_toml
from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Override:
    """One value from the command line, still as text."""

    path: tuple[str, ...]
    text: str


def parse_overrides(arguments: Sequence[str]) -> list[Override]:
    """Read ``--key value`` and ``--key=value``, any number of them; raise :class:`ConfigError` for anything else."""
    overrides: list[Override] = []
    rest = list(arguments)
    while rest:
        option = rest.pop(0)
        key, equals, text = option.partition("=")
        if not key.startswith("--") or len(key) == 2:
            raise ConfigError(
                f"{option!r} is not a setting", path=option, remedy="write settings like --trainer.lr 1e-4 (or =1e-4)"
            )
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"{key} needs a value", path=key[2:], remedy=f"write {key} VALUE")
            text = rest.pop(0)
        path = tuple(part.replace("-", "_") for part in key[2:].split("."))
        if not all(path) or len(path) > DEEPEST_TABLE or not _encodable(option) or not _encodable(text):
            raise ConfigError(f"{option!r} is not a dotted key", path=key[2:], remedy="keys look like trainer.lr")
        overrides.append(Override(path, text))
    return overrides


def apply_overrides(data: Mapping[str, Any], overrides: Iterable[Override], model: type[BaseModel]) -> dict[str, Any]:
    """Return a copy of ``data`` with the overrides in it; the last one of a key wins.

    A value is read as a TOML literal, and is text where it is not a literal or where ``model`` expects text. ``none``
    removes an optional key, also one that is set by default.
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
            if field is not None and is_set_by_default(field):
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
    """Return whether text is Unicode: bytes of the command line that are not become lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def tables_of(config: Section | Mapping[str, Any]) -> dict[str, Any]:
    """Return what was set in a configuration as nested tables, which may be changed; objects in it are kept."""
    if not isinstance(config, Section):
        return {key: tables_of(value) if isinstance(value, Mapping) else value for key, value in config.items()}
    values = {key: getattr(config, key) for key in config.model_fields_set}
    return {
        key: tables_of(value) if isinstance(value, Section | Mapping) else value
        for key, value in values.items()
        if value is not None or is_set_by_default(type(config).model_fields[key])
    }


def set_key(tables: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in nested tables; a table, with keys as they stand, is merged into the one that is there."""
    *path, last = key.split(".")
    for part in path:
        child = tables.get(part)
        tables[part] = child = dict(child) if isinstance(child, Mapping) else {}
        tables = child
    _merge(tables, last, value)


def _merge(tables: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(value, Mapping):
        before = tables.get(key)
        tables[key] = table = dict(before) if isinstance(before, Mapping) else {}
        for name, item in value.items():
            _merge(table, str(name), item)
    else:
        tables[key] = str(value) if isinstance(value, Path) else value


DocumentT = TypeVar("DocumentT", bound=Document)

_POSITION = re.compile(r"\s*\(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)$")


def load_config(path: Path | str | None, overrides: Sequence[str] = ()) -> Config:
    """Return a run's configuration by :func:`load_document`; overrides are like ``["--trainer.lr", "1e-4"]``."""
    return load_document(Config, path, overrides)


def load_document(kind: type[DocumentT], path: Path | str | None, overrides: Sequence[str] = ()) -> DocumentT:
    """Read and check a configuration; ``path`` None takes everything from the overrides.

    Relative paths inside the file are relative to the working directory, like those of the command line.

    Raises:
        ConfigError: the file cannot be read, is not TOML (with file:line:column), or has values that are not allowed;
            one error reports all problems.
    """
    parsed = parse_overrides(overrides)
    data = {} if path is None else read_toml(Path(path))
    return kind.from_mapping(apply_overrides(data, parsed, kind), origin="command line" if path is None else str(path))


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a file; raise :class:`ConfigError` if it is missing, not readable, not UTF-8 or not TOML."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        near = sorted(path.parent.glob("*.toml"))[:5] if path.parent.is_dir() else []
        remedy = f"the folder has {', '.join(map(str, near))}" if near else "check the path"
        raise ConfigError(f"{path}: no such file; {remedy}", path=str(path), remedy=remedy) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path}: cannot be read: {reason}", path=str(path), remedy="give a readable file") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"{path}:{line}: byte 0x{content[error.start]:02x} is not UTF-8", path=str(path), remedy="save it as UTF-8"
        ) from None
    try:
        data = tomllib.loads(text)
        if nested_deeper(data, DEEPEST_TABLE):
            raise RecursionError
    except RecursionError:
        raise ConfigError(
            f"{path}: nested too deeply: at most {DEEPEST_TABLE} levels", path=str(path), remedy="nest fewer tables"
        ) from None
    except ValueError as error:  # TOMLDecodeError, and a number with more digits than Python reads
        message = str(error)
        place = _POSITION.search(message)
        if place is None:
            where = str(path)
        elif place["line"]:
            where = f"{path}:{place['line']}:{place['column']}"
        else:
            where = f"{path}:{text.count(chr(10)) + 1}"
        what = _POSITION.sub("", message)
        raise ConfigError(f"{where}: not valid TOML: {what}", path=str(path), remedy="correct the line") from None
    return data
