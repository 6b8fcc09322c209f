"""The ``meta_info`` of batches that are put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from asyncrl.data.equality import values_equal
from asyncrl.errors import SchemaError

__all__ = ["concat_meta_info", "union_meta_info"]


def union_meta_info(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of both; a key in both must have equal values.

    Raises:
        SchemaError: naming the key whose values differ.
    """
    for key in left.keys() & right.keys():
        if not values_equal(left[key], right[key]):
            raise SchemaError(f"meta_info {key!r} differs: {_short(left[key])} here, {_short(right[key])} in the other")
    return {**left, **right}


def concat_meta_info(infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Entries of all batches; a key in several must have equal values, except ``metrics``.

    ``metrics`` (a dict, or a list of dicts, in each batch) become one dict of lists: for each name the values of the
    batches that have it, in order.

    Raises:
        SchemaError: naming the key and the batches whose values differ.
    """
    merged: dict[str, Any] = {}
    owner: dict[str, int] = {}
    metrics: dict[str, list[Any]] = {}
    for number, info in enumerate(infos):
        for key, value in info.items():
            if key == "metrics":
                for name, metric in _metric_items(value, number):
                    metrics.setdefault(name, []).append(metric)
            elif key not in merged:
                merged[key], owner[key] = value, number
            elif not values_equal(merged[key], value):
                raise SchemaError(
                    f"meta_info {key!r} differs: {_short(merged[key])} in batch {owner[key]}, "
                    f"{_short(value)} in batch {number}"
                )
    if metrics:
        merged["metrics"] = metrics
    return merged


def _metric_items(value: Any, number: int) -> list[tuple[str, Any]]:
    if value is None:
        return []
    records = cast("list[object]", value) if isinstance(value, list) else [value]
    for record in records:
        if not isinstance(record, Mapping):
            raise SchemaError(
                f"meta_info 'metrics' of batch {number} must be a dict or a list of dicts, got {type(record).__name__}"
            )
    return [item for record in records for item in cast("Mapping[str, Any]", record).items()]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
