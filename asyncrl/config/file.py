"""From a TOML file and overrides to a :class:`Config`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.errors import ConfigError

from .config import Config
from .document import Document
from .overrides import apply_overrides, parse_overrides
from .section import DEEPEST_TABLE
from .toml import nested_deeper

__all__ = ["load_config", "load_document"]

DocumentT = TypeVar("DocumentT", bound=Document)

_POSITION = re.compile(r"\s*\(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)$")


def load_config(path: Path | str | None, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a run; see :func:`load_document`.

    Example:
        ``load_config("examples/calculator.toml", ["--trainer.lr", "1e-4", "--seed=3"])``
    """
    return load_document(Config, path, overrides)


def load_document(kind: type[DocumentT], path: Path | str | None, overrides: Sequence[str] = ()) -> DocumentT:
    """Read and check a configuration; ``path`` None takes everything from the overrides.

    Relative paths inside the file are relative to the working directory, like those of the command line.

    Raises:
        ConfigError: the file cannot be read, is no TOML (with file:line:column), or holds what is not allowed; all
            problems are told together.
    """
    parsed = parse_overrides(overrides)
    data = {} if path is None else read_toml(Path(path))
    return kind.from_mapping(apply_overrides(data, parsed, kind), origin="command line" if path is None else str(path))


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file.

    Raises:
        ConfigError: no file, not readable, not UTF-8, no TOML.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        near = sorted(path.parent.glob("*.toml"))[:5] if path.parent.is_dir() else []
        remedy = f"there is {', '.join(map(str, near))}" if near else "check the path"
        raise ConfigError(f"{path}: no such file; {remedy}", path=str(path), remedy=remedy) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path}: cannot be read: {reason}", path=str(path), remedy="give a readable file") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"{path}:{line}: byte 0x{content[error.start]:02x} is no UTF-8", path=str(path), remedy="save it as UTF-8"
        ) from None
    try:
        data = tomllib.loads(text)
        if nested_deeper(data, DEEPEST_TABLE):
            raise RecursionError
    except RecursionError:
        raise ConfigError(
            f"{path}: nested too deep: at most {DEEPEST_TABLE} levels", path=str(path), remedy="nest fewer tables"
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
        raise ConfigError(f"{where}: no valid TOML: {what}", path=str(path), remedy="correct the line") from None
    return data
