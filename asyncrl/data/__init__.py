"""What flows: batches of rows (:class:`DataProto`), and batches still being made (:class:`DataProtoFuture`)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.data.future import DataProtoFuture as DataProtoFuture
    from asyncrl.data.future import FinishedRows as FinishedRows
    from asyncrl.data.future import as_completed as as_completed
    from asyncrl.data.future import gather as gather
    from asyncrl.data.proto import DataProto as DataProto
    from asyncrl.data.proto import DataProtoItem as DataProtoItem
    from asyncrl.data.proto import fold_batch_dim as fold_batch_dim
    from asyncrl.data.proto import pad_dataproto_to_divisor as pad_dataproto_to_divisor
    from asyncrl.data.proto import unfold_batch_dim as unfold_batch_dim
    from asyncrl.data.proto import unpad_dataproto as unpad_dataproto
    from asyncrl.data.schema import Schema as Schema

_HOMES = {
    "DataProto": "asyncrl.data.proto",
    "DataProtoFuture": "asyncrl.data.future",
    "DataProtoItem": "asyncrl.data.proto",
    "FinishedRows": "asyncrl.data.future",
    "Schema": "asyncrl.data.schema",
    "as_completed": "asyncrl.data.future",
    "fold_batch_dim": "asyncrl.data.proto",
    "gather": "asyncrl.data.future",
    "pad_dataproto_to_divisor": "asyncrl.data.proto",
    "unfold_batch_dim": "asyncrl.data.proto",
    "unpad_dataproto": "asyncrl.data.proto",
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
