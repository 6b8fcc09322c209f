"""Writing TOML, and reading single values of the command line."""

from __future__ import annotations

import datetime as dt
import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.plugins import part_text

LONGEST_DECIMAL_BITS = 14_000

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def table_to_toml(table: Mapping[str, Any]) -> str:
    """Return a document with nested mappings as ``[tables]``; raise TypeError for a value that TOML lacks, as None."""
    lines: list[str] = []
    _write_table(table, (), lines)
    return "\n".join(lines).lstrip("\n") + "\n"


def _write_table(table: Mapping[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    tables = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    if path and (plain or not tables):
        lines += ["", f"[{'.'.join(key_to_toml(key) for key in path)}]"]
    lines += [f"{key_to_toml(key)} = {value_to_toml(value)}" for key, value in plain.items()]
    for key, value in tables.items():
        _write_table(value, (*path, key), lines)


def key_to_toml(key: str) -> str:
    """Return the key, quoted if it is not a bare key; raise TypeError if it is no text."""
    if not isinstance(key, str):
        raise TypeError(f"TOML has no key of type {type(key).__name__}")
    return key if _BARE_KEY.fullmatch(key) else value_to_toml(key)


def value_to_toml(value: Any) -> str:
    """Return one value as it stands behind ``=``; mappings become inline tables."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        # str() refuses numbers of thousands of digits; only hexadecimal ones can have been read
        return hex(value) if value.bit_length() > LONGEST_DECIMAL_BITS else str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
        text = repr(float(value))  # also of numpy
        return text if any(sign in text for sign in ".e") else text + ".0"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")  # a JSON string, but for DEL
    if isinstance(value, Path):
        return value_to_toml(str(value))
    if isinstance(value, dt.datetime | dt.date | dt.time):
        return value.isoformat()
    if callable(value):
        return value_to_toml(part_text(value))
    if isinstance(value, Mapping):
        pairs = (f"{key_to_toml(key)} = {value_to_toml(item)}" for key, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(value_to_toml(item) for item in value) + "]"
    raise TypeError(f"TOML has no form for {type(value).__name__}")


def nested_deeper(value: Any, levels: int) -> bool:
    """Return whether tables and arrays are nested more than ``levels`` deep; looks no deeper than that."""
    level = [value]
    for _ in range(levels + 1):
        level = [
            child
            for parent in level
            if isinstance(parent, Mapping | list)
            for child in (parent.values() if isinstance(parent, Mapping) else parent)
        ]
    return any(isinstance(child, Mapping | list) for child in level)


def value_from_toml(text: str) -> Any:
    """Return the value of a TOML literal; other text is returned as it is, so that shells need no second quotes."""
    try:
        document = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # also numbers with too many digits, arrays nested too deep
        return text
    return document["value"] if document.keys() == {"value"} else text
