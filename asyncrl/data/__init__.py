"""What flows: batches of rows (:class:`DataProto`), and batches still being made (:class:`DataProtoFuture`)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.data.folding import fold_batch_dim as fold_batch_dim
    from asyncrl.data.folding import unfold_batch_dim as unfold_batch_dim
    from asyncrl.data.future import DataProtoFuture as DataProtoFuture
    from asyncrl.data.future import FinishedRows as FinishedRows
    from asyncrl.data.gathering import as_completed as as_completed
    from asyncrl.data.gathering import gather as gather
    from asyncrl.data.padding import pad_dataproto_to_divisor as pad_dataproto_to_divisor
    from asyncrl.data.padding import unpad_dataproto as unpad_dataproto
    from asyncrl.data.proto import DataProto as DataProto
    from asyncrl.data.proto import DataProtoItem as DataProtoItem
    from asyncrl.data.schema import Schema as Schema

_HOMES = {
    "DataProto": "asyncrl.data.proto",
    "DataProtoFuture": "asyncrl.data.future",
    "DataProtoItem": "asyncrl.data.proto",
    "FinishedRows": "asyncrl.data.future",
    "Schema": "asyncrl.data.schema",
    "as_completed": "asyncrl.data.gathering",
    "fold_batch_dim": "asyncrl.data.folding",
    "gather": "asyncrl.data.gathering",
    "pad_dataproto_to_divisor": "asyncrl.data.padding",
    "unfold_batch_dim": "asyncrl.data.folding",
    "unpad_dataproto": "asyncrl.data.padding",
}

__all__ = [
    "DataProto",
    "DataProtoFuture",
    "DataProtoItem",
    "FinishedRows",
    "Schema",
    "as_completed",
    "fold_batch_dim",
    "gather",
    "pad_dataproto_to_divisor",
    "unfold_batch_dim",
    "unpad_dataproto",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'asyncrl.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
