"""How a batch shows itself: text for terminals and logs, a table for notebooks."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from asyncrl.data.ragged import lengths
from asyncrl.data.schema import column_of

if TYPE_CHECKING:
    from asyncrl.data.columns import Array
    from asyncrl.data.proto import DataProto

__all__ = ["as_data_info", "as_html", "as_text", "size_text"]


def size_text(size_bytes: float) -> str:
    """``1.5 MiB`` for 1572864."""
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.4g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.4g} GiB"


def as_text(data: DataProto) -> str:
    """A line for the batch, one for each column, one for ``meta_info``."""
    lines = [_headline(data)]
    columns = _described(data)
    widths = [max((len(line[field]) for line in columns), default=0) for field in range(2)]
    lines += [f"  {name:<{widths[0]}}  {kind:<{widths[1]}}  {more}".rstrip() for name, kind, more in columns]
    if data.meta_info:
        lines.append(f"  meta_info: {', '.join(map(str, data.meta_info))}")
    return "\n".join(lines)


def as_html(data: DataProto) -> str:
    """A small table. Names and everything else that comes from the data are escaped."""
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in column) + "</tr>" for column in _described(data)
    )
    meta = f"<div>meta_info: {html.escape(', '.join(map(str, data.meta_info)))}</div>" if data.meta_info else ""
    heads = "".join(f"<th>{head}</th>" for head in ("column", "kind", ""))
    return f"<div><b>{html.escape(_headline(data))}</b><table><tr>{heads}</tr>{rows}</table>{meta}</div>"


def as_data_info(data: DataProto) -> str:
    """Every column and entry with its type, one a line, in verl's form."""
    lines = ["batch"]
    for name, value in _tensors(data).items():
        shape = f"({len(data)}, *)" if value.is_nested else str(tuple(value.shape))
        lines.append(f"  {name}: {shape} ({value.dtype}) {value.device}")
    lines.append("non_tensor_batch")
    lines += [f"  {name}: ndarray{array.shape} ({array.dtype})" for name, array in data.non_tensor_batch.items()]
    lines.append("meta_info")
    lines += [f"  {name}: {_type_text(value)}" for name, value in data.meta_info.items()]
    return "\n".join(lines)


def _type_text(value: object) -> str:
    """The type of a value, and of what is in it; of lists the first elements, of dicts the first entry."""
    kind = type(value).__name__
    if isinstance(value, list):
        elements = cast("list[object]", value)
        return f"list[{'|'.join(sorted({_type_text(each) for each in elements[:3]})) or '...'}]"
    if isinstance(value, tuple):
        return f"tuple({', '.join(map(_type_text, cast('tuple[object, ...]', value)))})"
    if isinstance(value, dict) and value:
        key, item = next(iter(cast("dict[object, object]", value).items()))
        return f"dict[{_type_text(key)}: {_type_text(item)}]"
    if isinstance(value, np.ndarray):
        array = cast("Array", value)
        return f"ndarray{array.shape} ({array.dtype})"
    return kind


def _tensors(data: DataProto) -> dict[str, Any]:
    batch = cast("Any", data.batch)  # pyright: ignore[reportUnknownMemberType]  tensordict leaves its types unknown
    return {} if batch is None else {str(name): value for name, value in batch.items()}


def _headline(data: DataProto) -> str:
    flags = [flag for flag, on in (("read-only", data.read_only), ("auto padding", data.auto_padding)) if on]
    rows = len(data)
    return ", ".join([f"DataProto: {rows} row{'' if rows == 1 else 's'}", size_text(data.size_bytes), *flags])


def _described(data: DataProto) -> list[tuple[str, str, str]]:
    """Name, kind and particulars of each column."""
    values = {**_tensors(data), **data.non_tensor_batch}
    return [(name, str(column_of(name, value)), _particulars(value)) for name, value in values.items()]


def _particulars(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return ""
    device = "" if value.device.type == "cpu" else f"on {value.device}"
    if not value.is_nested:
        return device
    sizes = lengths(value)
    if len(sizes) == 0:
        return device
    return f"lengths {int(sizes.min())}..{int(sizes.max())}, {int(sizes.sum())} in all {device}".rstrip()
