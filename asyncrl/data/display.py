"""Batches and futures for people: text for terminals and logs, a table for notebooks."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from asyncrl.data.plan import Header, Plan
from asyncrl.data.ragged import lengths
from asyncrl.data.schema import column_of

if TYPE_CHECKING:
    from asyncrl.data.columns import Array
    from asyncrl.data.future import Future, Shard
    from asyncrl.data.proto import DataProto


def size_text(size_bytes: float) -> str:
    """Return ``1.5 MiB`` for 1572864."""
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.4g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.4g} GiB"


def as_text(data: DataProto) -> str:
    """Return a line for the batch, one for each column, and one for ``meta_info``."""
    lines = [_headline(data)]
    columns = _described(data)
    widths = [max((len(line[field]) for line in columns), default=0) for field in range(2)]
    lines += [f"  {name:<{widths[0]}}  {kind:<{widths[1]}}  {more}".rstrip() for name, kind, more in columns]
    if data.meta_info:
        lines.append(f"  meta_info: {', '.join(map(str, data.meta_info))}")
    return "\n".join(lines)


def as_html(data: DataProto) -> str:
    """Return a small table. Names and all other text from the data are escaped."""
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in column) + "</tr>" for column in _described(data)
    )
    meta = f"<div>meta_info: {html.escape(', '.join(map(str, data.meta_info)))}</div>" if data.meta_info else ""
    heads = "".join(f"<th>{head}</th>" for head in ("column", "kind", ""))
    return f"<div><b>{html.escape(_headline(data))}</b><table><tr>{heads}</tr>{rows}</table>{meta}</div>"


def as_data_info(data: DataProto) -> str:
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
    """Return the type of a value, and of its first elements (list) or its first entry (dict)."""
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
    values = {**_tensors(data), **data.non_tensor_batch}
    return [(name, str(column_of(name, value)), _details(value)) for name, value in values.items()]


def _details(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return ""
    device = "" if value.device.type == "cpu" else f"on {value.device}"
    if not value.is_nested:
        return device
    sizes = lengths(value)
    if len(sizes) == 0:
        return device
    return f"lengths {int(sizes.min())}..{int(sizes.max())}, {int(sizes.sum())} in all {device}".rstrip()


MAX_DEPTH = 8
"""Levels of inputs that are shown at most: what is further back rarely explains a wait."""


def explanation_of(future: Future[Any], *, depth: int = MAX_DEPTH) -> list[str]:
    """Explain ``future`` as :meth:`Future.explain` does, by lines, with at most ``depth`` levels of inputs."""
    now = future.controller.now()
    below: list[list[str]] = []
    if not future.is_part and future.progress is not None:
        below += [[_shard_text(shard, now)] for shard in future.progress.shards]
    for label, reference in future.inputs:
        source = reference()
        if source is None:
            below.append([f"from {label}: no longer referenced"])
        elif depth == 0:
            below.append([f"from {label}: ..."])
        else:
            head, *rest = explanation_of(source, depth=depth - 1)
            below.append([f"from {head}", *rest])
    lines = [f"{future.outcome.label}: {_state_text(future, now)}"]
    for number, (head, *rest) in enumerate(below, start=1):
        last = number == len(below)
        lines.append(f"{'└─ ' if last else '├─ '}{head}")
        lines += [f"{'   ' if last else '│  '}{line}" for line in rest]
    return lines


def _state_text(future: Future[Any], now: float) -> str:
    outcome = future.outcome
    if outcome.state == "pending":
        return f"pending for {now - future.started_s:.1f} s"
    if outcome.state == "done" and isinstance(value := outcome.get(), Plan):
        return _header_text(value.header)
    return outcome.status


def _shard_text(shard: Shard, now: float) -> str:
    if shard.state == "running":
        text = f"running for {now - shard.since_s:.1f} s"
    else:
        text = f"{shard.state} after {shard.took_s:.1f} s"
    if shard.rows is not None:
        text += f", given rows {shard.rows.start}:{shard.rows.stop}"
    if shard.header is not None:
        text += f", gave {_header_text(shard.header)}"
    return f"rank {shard.rank}: {text}"


def _header_text(header: Header) -> str:
    rows = f"{header.rows} row{'' if header.rows == 1 else 's'}, {size_text(header.size_bytes)}"
    version = header.meta_info.get("weight_version")
    return rows if version is None else f"{rows}, weight version {version}"
