"""Shapes: what a call was given, in one line for an error message."""

from __future__ import annotations

import reprlib
from typing import Any, cast

from asyncrl.single_controller.call import Arguments, StoredValue

__all__ = ["shapes_of"]

MAX_CHARACTERS = 1_000
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60


def shapes_of(arguments: Arguments) -> str:
    """``(4 rows: prompts int64[16], answer object; times=2)``: shapes of batches and arrays, short forms of the rest.

    Fetches nothing, needs no torch, and never raises.
    """
    listed = [_shape(each) for each in arguments.args]
    listed += [f"{name}={_shape(each)}" for name, each in arguments.kwargs.items()]
    text = f"({'; '.join(listed)})"
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} ...)"


def _shape(value: Any) -> str:
    if type(value) in (list, tuple):
        inner = ", ".join(_shape(each) for each in value[:6]) + (", ..." if len(value) > 6 else "")
        return f"[{inner}]" if type(value) is list else f"({inner})"
    if type(value) is dict:
        entries = cast("dict[object, object]", value)
        return "{" + ", ".join(f"{key!r}: {_shape(each)}" for key, each in entries.items()) + "}"
    if isinstance(value, StoredValue):
        return "a large value"
    schema = getattr(getattr(value, "header", value), "schema", None)  # of a plan, or of a batch
    columns = getattr(schema, "columns", None)
    if columns is not None:
        rows = getattr(schema, "rows", None)
        return f"{rows} rows: " + ", ".join(f"{each.name} {_without_kind(str(each))}" for each in columns)
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        return f"{type(value).__name__} {dtype}{list(shape)}".replace("torch.", "")
    try:
        return _short.repr(value)
    except Exception:  # noqa: BLE001  a value's own __repr__ may do anything, and an error is being reported
        return type(value).__name__


def _without_kind(column: str) -> str:
    return column.removeprefix("tensor ").removeprefix("array ")
