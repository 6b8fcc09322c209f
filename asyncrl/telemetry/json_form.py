"""Values in a form that is always valid JSON: no NaN, no infinity, no array types."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

__all__ = ["not_finite", "to_json"]


def to_json(value: Any) -> Any:
    """Numbers, texts, lists and dictionaries only; a number that is not finite becomes None.

    Scalars and arrays of numpy and torch become Python's, dataclasses dictionaries, anything else its text.
    """
    if value is None or isinstance(value, bool | int | str):
        return value if not isinstance(value, str) else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | AbstractSet):
        return [to_json(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: to_json(getattr(value, each.name)) for each in fields(value)}
    if not isinstance(value, Path | type) and hasattr(value, "tolist"):  # numpy and torch, scalars and arrays
        return to_json(value.tolist())
    return to_json(str(value))


def not_finite(values: Mapping[str, Any]) -> dict[str, str]:
    """Which of the numbers are NaN or infinite, and which of the two: the note that goes beside the nulls."""
    found: dict[str, str] = {}
    for key, value in values.items():
        plain = value.tolist() if hasattr(value, "tolist") and not isinstance(value, type) else value
        if isinstance(plain, float) and not math.isfinite(plain):
            found[key] = "nan" if math.isnan(plain) else ("inf" if plain > 0 else "-inf")
    return found
