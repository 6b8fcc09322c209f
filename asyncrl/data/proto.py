"""DataProto: a batch of rows; and the functions that pad it or fold its rows into a second dimension."""

from __future__ import annotations

import builtins
import copy
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, cast, overload

import numpy as np
import torch

from asyncrl.data.columns import (
    Array,
    Columns,
    array_column,
    chunk_bounds,
    concat_meta_info,
    is_list_of_tensors,
    row_index,
    tensor_columns,
    union_meta_info,
    values_equal,
)
from asyncrl.data.ragged import normalise_ragged, offsets_of, row_of, values_of
from asyncrl.data.schema import Schema
from asyncrl.errors import SchemaError

if TYPE_CHECKING:
    from tensordict import TensorDict

    from asyncrl.data.future import DataProtoFuture

# tensordict leaves arguments without types.
# pyright: reportUnknownMemberType=false


class _Switch(type):
    _on = False

    @property
    def auto_padding(cls) -> bool:
        """Set by the program, or by the environment: ``VERL_AUTO_PADDING`` is ``true`` or ``1``."""
        return cls._on or os.environ.get("VERL_AUTO_PADDING", "").lower() in ("true", "1")

    @auto_padding.setter
    def auto_padding(cls, enabled: bool) -> None:
        if not isinstance(enabled, bool):  # pyright: ignore[reportUnnecessaryIsInstance]  programs without types
            raise SchemaError(f"auto_padding is True or False, got {enabled!r}")
        cls._on = enabled


class DataProtoConfig(metaclass=_Switch):
    """``DataProtoConfig.auto_padding = True`` lets ``chunk`` cut any batch of this process unequally.

    For programs written for verl. ``DataProto.from_dict(..., auto_padding=True)`` allows it for one batch only; calls
    of worker groups need neither.

        >>> DataProtoConfig.auto_padding = True
        >>> [len(part) for part in data.chunk(2)]
        [2, 1]
        >>> DataProtoConfig.auto_padding = False

    Raises:
        SchemaError: the switch is set to anything but True or False.
    """


def tensordict_of(
    tensors: Mapping[str, torch.Tensor], *, rows: int | None, device: torch.device | None = None
) -> TensorDict:
    """Return a TensorDict of ``rows`` rows, or of none if that is None; later entries move to ``device``."""
    # Imported here: tensordict takes as long to load as torch, and half of this package works without it.
    from tensordict import TensorDict

    return TensorDict(dict(tensors), batch_size=[] if rows is None else [rows], device=device)


@dataclass(slots=True)
class DataProtoItem:
    """One row: tensors without the batch dimension, elements of the other columns, and the batch's ``meta_info``.

    >>> data[1]  # doctest: +ELLIPSIS
    DataProtoItem(batch=TensorDict(...), non_tensor_batch={'name': 'b'}, meta_info={'step': 7})
    """

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict[str, Any])
    meta_info: dict[str, Any] = field(default_factory=dict[str, Any])


class DataProto:
    """A batch of rows: what flows between workers.

    ``batch`` holds the tensors, dense ``[B, ...]`` or ragged (jagged nested tensors), ``non_tensor_batch`` numpy arrays
    ``[B, ...]`` of anything, ``meta_info`` what belongs to no single row. Names of columns are strings and unique.
    ``auto_padding`` allows :meth:`chunk` to cut unequal chunks.

    **Sharing.** The containers (``batch``, ``non_tensor_batch``, ``meta_info``) always belong to this object alone (the
    constructor copies them): setting or removing an entry never changes another batch. The *tensors and arrays* in them
    may be views of another batch: ``slice``, ``chunk``, ``split``, ``select``, ``union``, ``with_columns``,
    mini-batches that are not shuffled and ``unpad_dataproto`` copy nothing, so writing *into* a tensor writes through.
    ``select_idxs``, ``repeat``, ``concat`` and ``clone`` copy. A batch from another process may be :attr:`read_only`.

    ``to``, ``rename``, ``pop``, ``union``, ``reorder`` and ``padding`` change this object, as in verl; everything else
    returns a new one. They change everything or, when they raise, nothing.

        >>> import numpy as np, torch
        >>> data = DataProto.from_dict(
        ...     tensors={"x": torch.tensor([1, 2, 3])}, non_tensors={"name": ["a", "b", "c"]}, meta_info={"step": 7}
        ... )
        >>> data.slice(0, 2).batch["x"].tolist(), data[[2, 0]].batch["x"].tolist()
        ([1, 2], [3, 1])
        >>> [part.non_tensor_batch["name"].tolist() for part in data.split(2)]
        [['a', 'b'], ['c']]
        >>> data.with_columns(double=data.batch["x"] * 2).batch["double"].tolist()
        [2, 4, 6]

    Raises:
        SchemaError: columns differ in their number of rows, or are no columns at all.
    """

    if TYPE_CHECKING:
        # An attribute at run time. tensordict's bases are partly unknown, so pyright takes one for a descriptor.
        @property
        def batch(self) -> TensorDict | None: ...
        @batch.setter
        def batch(self, value: TensorDict | None) -> None: ...

    non_tensor_batch: dict[str, Array]
    meta_info: dict[str, Any]
    auto_padding: bool

    def __init__(
        self,
        batch: TensorDict | None = None,
        non_tensor_batch: Mapping[str, Array] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        *,
        auto_padding: bool = False,
    ) -> None:
        self.batch = None if batch is None else batch.copy()
        self.non_tensor_batch = dict(non_tensor_batch or {})
        self.meta_info = dict(meta_info or {})
        self.auto_padding = auto_padding
        self.check_consistency()

    # ------------------------------------------------------------------------------------------------------- making

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor | Sequence[torch.Tensor]] | None = None,
        non_tensors: Mapping[str, Array | Iterable[Any]] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> DataProto:
        """Make a batch of these columns. The dictionaries are not changed, the tensors and arrays not copied.

        A list of tensors becomes a ragged column; a list among ``non_tensors`` a 1-d object array of its elements,
        whatever they are. Ragged columns with equal lengths share their offsets, so that torch can compute between
        them.

            >>> made = DataProto.from_dict({"ids": [torch.tensor([5, 6]), torch.tensor([7])]}, {"text": ["a", "b"]})
            >>> print(made.schema)
            rows: 2
            ids: ragged int64[*]
            text: object

        Raises:
            SchemaError: columns differ in their number of rows, or ``num_batch_dims`` is not 1.
        """
        if num_batch_dims != 1:
            raise SchemaError(f"a DataProto has one batch dimension, got num_batch_dims={num_batch_dims}")
        columns = tensor_columns(tensors or {})
        return cls(
            batch=tensordict_of(columns, rows=next(iter(columns.values())).shape[0]) if columns else None,
            non_tensor_batch={name: array_column(name, value) for name, value in (non_tensors or {}).items()},
            meta_info=meta_info,
            auto_padding=auto_padding,
        )

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None, auto_padding: bool = False
    ) -> DataProto:
        """As :meth:`from_dict`, with columns of both kinds in one dictionary, distinguished by their types."""
        tensors, others = _sorted_columns(data)
        return cls.from_dict(tensors=tensors, non_tensors=others, meta_info=meta_info, auto_padding=auto_padding)

    @classmethod
    def from_tensordict(
        cls, tensor_dict: TensorDict, meta_info: Mapping[str, Any] | None = None, num_batch_dims: int = 1
    ) -> DataProto:
        """Make a batch of a TensorDict: its NonTensorStacks become object arrays, its NonTensorData ``meta_info``.

        Raises:
            SchemaError: an entry is no column, or ``num_batch_dims`` is not 1.
        """
        from tensordict import NonTensorData, NonTensorStack

        tensors: dict[str, torch.Tensor] = {}
        lists: dict[str, list[Any]] = {}
        info = dict(meta_info or {})
        for name in list(tensor_dict.keys()):
            value = cast("Any", tensor_dict).get(name)
            if isinstance(value, NonTensorStack):
                lists[str(name)] = [element.data for element in value]
            elif isinstance(value, NonTensorData):
                info[str(name)] = value.data
            else:
                tensors[str(name)] = value
        return cls.from_dict(tensors, lists, info, num_batch_dims)

    def to_tensordict(self) -> TensorDict:
        """Return all of it in one TensorDict: other columns as NonTensorStack, ``meta_info`` as NonTensorData.

        Raises:
            SchemaError: an entry of ``meta_info`` has the name of a column.
        """
        from tensordict import NonTensorData, NonTensorStack

        columns = self.columns()
        clash = sorted(self.meta_info.keys() & {*columns.names})
        if clash:
            raise SchemaError(f"meta_info {clash} have names of columns: one TensorDict cannot hold both")
        result: Any = tensordict_of(columns.tensors, rows=columns.rows)
        for name, array in columns.arrays.items():
            result.set(name, NonTensorStack(*(NonTensorData(element) for element in array)))
        for name, value in self.meta_info.items():
            result.set(name, NonTensorData(value, batch_size=[columns.rows]))
        return result  # type: ignore[no-any-return]

    def columns(self) -> Columns:
        """Return the columns, checked (:meth:`check_consistency`), for code that computes on them."""
        self.check_consistency()
        tensors = {name: normalise_ragged(each, name) if each.is_nested else each for name, each in self._tensors()}
        return Columns(tensors=tensors, arrays=self.non_tensor_batch, rows=len(self))

    @classmethod
    def from_columns(
        cls,
        columns: Columns,
        *,
        meta_info: Mapping[str, Any] | None = None,
        has_batch: bool = False,
        auto_padding: bool = False,
        device: torch.device | None = None,
    ) -> DataProto:
        """Make a batch of columns that are known to fit together. The counterpart of :meth:`columns`.

        With ``has_batch`` it has a TensorDict also where no column is a tensor. ``device`` is the TensorDict's own.
        """
        data = object.__new__(cls)
        data.batch = None
        if columns.tensors or has_batch:
            data.batch = tensordict_of(columns.tensors, rows=columns.rows, device=device)
        data.non_tensor_batch = dict(columns.arrays)
        data.meta_info = dict(meta_info or {})
        data.auto_padding = auto_padding
        return data

    def with_rows(self, columns: Columns, *, meta_info: Mapping[str, Any] | None = None) -> DataProto:
        """Make a batch like this one of other columns that are known to fit together."""
        return self.from_columns(
            columns,
            meta_info=self.meta_info if meta_info is None else meta_info,
            has_batch=self.batch is not None,
            auto_padding=self.auto_padding,
            device=self._device,
        )

    def _become(self, columns: Columns) -> None:
        other = self.with_rows(columns)
        self.batch, self.non_tensor_batch = other.batch, other.non_tensor_batch

    @property
    def _device(self) -> torch.device | None:
        """The device that :meth:`to` moved the batch to; entries that are set later move there too."""
        batch: Any = self.batch
        return None if batch is None else batch.device

    def _tensors(self) -> Iterable[tuple[str, Any]]:
        batch: Any = self.batch  # programs may have set anything
        return () if batch is None else ((str(name), value) for name, value in batch.items())

    def check_consistency(self) -> None:
        """Check that this is a batch: one batch dimension, and the same number of rows in every column.

        Raises:
            SchemaError: it is not, naming the column.
        """
        rows: int | None = None
        names: set[str] = set()
        if self.batch is not None:
            if len(self.batch.batch_size) != 1:
                raise SchemaError(f"batch must have one batch dimension, got batch_size {tuple(self.batch.batch_size)}")
            rows = self.batch.batch_size[0]
            for name, value in self._tensors():
                names.add(name)
                if not isinstance(value, torch.Tensor):
                    raise SchemaError(
                        f"column {name!r} of the batch must be a tensor, got {type(value).__name__}; "
                        "from_tensordict takes TensorDicts with other data"
                    )
        for name, array in self.non_tensor_batch.items():
            if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]  programs may set any
                raise SchemaError(f"columns are named by strings, got {name!r}")
            is_array = isinstance(array, np.ndarray)  # pyright: ignore[reportUnnecessaryIsInstance]  likewise
            if not is_array or array.ndim == 0:
                raise SchemaError(
                    f"column {name!r} of non_tensor_batch must be an array with one entry for each row, "
                    f"got {'a 0-d array' if is_array else type(array).__name__}"
                )
            rows = len(array) if rows is None else rows
            if len(array) != rows:
                raise SchemaError(f"column {name!r} has {len(array)} rows, the batch has {rows}")
            if name in names:
                raise SchemaError(f"column {name!r} is both in batch and in non_tensor_batch")

    # ------------------------------------------------------------------------------------------------------ looking

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        for array in self.non_tensor_batch.values():
            return len(array)
        return 0

    @property
    def schema(self) -> Schema:
        return self.columns().schema

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensors and arrays. Python objects in object arrays count as their pointers only."""
        total = sum(array.nbytes for array in self.non_tensor_batch.values())
        for _, value in self._tensors():
            total += values_of(value).nbytes + offsets_of(value).nbytes if value.is_nested else value.nbytes
        return total

    def equals(self, other: DataProto) -> bool:
        """Compare columns bit by bit (NaN equals itself), rows and ``meta_info``; so does ``==``.

        The order of columns, the device and ``auto_padding`` do not matter.
        """
        return self.columns().equal(other.columns()) and values_equal(self.meta_info, other.meta_info)

    def __repr__(self) -> str:
        from asyncrl.data.display import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from asyncrl.data.display import as_html

        return as_html(self)

    def __eq__(self, other: object) -> bool:
        return self.equals(other) if isinstance(other, DataProto) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # mutable

    def get_data_info(self) -> str:
        """List every column and entry with its type, one a line, as verl does."""
        from asyncrl.data.display import as_data_info

        return as_data_info(self)

    def print_size(self, prefix: str = "") -> None:
        print(f"{prefix + ', ' if prefix else ''}{len(self)} rows, {self.size_bytes} bytes")  # noqa: T201  its purpose

    # --------------------------------------------------------------------------------------------------------- rows

    @overload
    def __getitem__(self, item: int | np.integer[Any]) -> DataProtoItem: ...
    @overload
    def __getitem__(self, item: builtins.slice | Sequence[int] | Array | torch.Tensor) -> DataProto: ...
    def __getitem__(
        self, item: int | np.integer[Any] | builtins.slice | Sequence[int] | Array | torch.Tensor
    ) -> DataProtoItem | DataProto:
        """Return a row for an integer, a batch for a slice or an index of rows."""
        if isinstance(item, builtins.slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, int | np.integer) and not isinstance(item, bool):
            return self._item(int(item), self.columns())
        if isinstance(item, list | tuple | range | np.ndarray | torch.Tensor):
            return self.select_idxs(item)
        raise TypeError(f"rows are selected by an integer, a slice or an index of rows, not by {type(item).__name__}")

    def __iter__(self) -> Iterator[DataProtoItem]:
        columns = self.columns()
        return (self._item(row, columns) for row in range(columns.rows))

    def _item(self, row: int, columns: Columns) -> DataProtoItem:
        if not -columns.rows <= row < columns.rows:
            raise IndexError(f"row {row} is out of range for {columns.rows} rows")
        row %= columns.rows
        tensors = {name: row_of(each, row) if each.is_nested else each[row] for name, each in columns.tensors.items()}
        return DataProtoItem(
            batch=None if self.batch is None else tensordict_of(tensors, rows=None, device=self._device),
            non_tensor_batch={name: array[row] for name, array in columns.arrays.items()},
            meta_info=dict(self.meta_info),
        )

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """Slice the rows as a list. Views for ``step`` 1 (dense tensors and arrays: for any positive step)."""
        first, last, stride = builtins.slice(start, end, step).indices(len(self))
        if stride < 0:
            return self.with_rows(self.columns().take(np.arange(first, last, stride)))
        return self.with_rows(self.columns().slice(first, max(first, last), stride))

    def select_idxs(self, idxs: Sequence[int] | Sequence[bool] | Array | torch.Tensor) -> DataProto:
        """Copy the rows ``idxs``: integers (negative ones from the end) in their order, or one boolean for each row.

        Raises:
            TypeError: neither integers nor booleans.
            IndexError: out of range, or a mask of another length.
        """
        return self.with_rows(self.columns().take(row_index(idxs, len(self))))

    def reorder(self, indices: Sequence[int] | Array | torch.Tensor) -> None:
        """Replace the rows of *this* batch by the rows that :meth:`select_idxs` returns, or raise as it does."""
        self._become(self.columns().take(row_index(indices, len(self))))

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Copy every row ``repeat_times`` times: a a b b if ``interleave``, else a b a b. Columns ``[B * n, ...]``.

        Raises:
            SchemaError: ``repeat_times`` is negative.
        """
        if repeat_times < 0:
            raise SchemaError(f"repeat_times must not be negative, got {repeat_times}")
        rows = np.arange(len(self))
        index = np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times)
        return self.with_rows(self.columns().take(index))

    def sample_level_repeat(self, repeat_times: Sequence[int] | Array | torch.Tensor) -> DataProto:
        """Copy row i ``repeat_times[i]`` times, copies of a row side by side; ``repeat_times`` are integers ``[B]``.

        Raises:
            SchemaError: they are not one integer >= 0 for each row.
        """
        times = np.asarray(repeat_times.cpu() if isinstance(repeat_times, torch.Tensor) else repeat_times)
        if times.shape != (len(self),) or (times.size > 0 and (times.dtype.kind not in "iu" or times.min() < 0)):
            raise SchemaError(
                f"repeat_times must hold one integer >= 0 for each of the {len(self)} rows, "
                f"got {times.dtype} of shape {times.shape}"
            )
        return self.with_rows(self.columns().take(np.repeat(np.arange(len(self)), times.astype(np.int64))))

    def chunk(self, chunks: int) -> list[DataProto]:
        """Cut into ``chunks`` batches of consecutive rows, as views, each with a ``meta_info`` dict of its own.

        Raises:
            SchemaError: ``chunks`` does not divide the rows and padding is not enabled. When it is, sizes differ by at
                most one, larger ones first, and may be 0.
        """
        columns = self.columns()
        bounds = chunk_bounds(len(self), chunks, uneven=self.is_padding_enabled())
        return [self.with_rows(columns.slice(rows.start, rows.stop)) for rows in bounds]

    def split(self, split_size: int) -> list[DataProto]:
        """Cut into batches of ``split_size`` rows, the last one perhaps smaller, as views. No rows, no batches.

        Raises:
            SchemaError: ``split_size`` is below 1.
        """
        if split_size < 1:
            raise SchemaError(f"split_size must be at least 1, got {split_size}")
        columns = self.columns()
        starts = range(0, columns.rows, split_size)
        return [self.with_rows(columns.slice(start, min(start + split_size, columns.rows))) for start in starts]

    @overload
    @staticmethod
    def concat(data: Iterable[DataProto]) -> DataProto: ...
    @overload
    @staticmethod
    def concat(data: Iterable[DataProto | DataProtoFuture]) -> DataProto | DataProtoFuture: ...
    @staticmethod
    def concat(data: Iterable[DataProto | DataProtoFuture]) -> DataProto | DataProtoFuture:
        """Copy the rows of all batches, in order. With a future among them, return the future of that.

        ``meta_info``: a key in several batches must have equal values, except ``metrics`` (a dict, or a list of dicts),
        which become one dict of lists: for each name the values of the batches that have it.

        Raises:
            SchemaError: there is no batch, or columns, dtypes, shapes or ``meta_info`` differ, naming the batch by its
                position, and each difference.
        """
        given = list(data)
        parts = [part for part in given if isinstance(part, DataProto)]
        if len(parts) < len(given):
            from asyncrl.data.future import DataProtoFuture

            return DataProtoFuture.concat(given)
        columns = Columns.concat([part.columns() for part in parts])
        joined = parts[0].with_rows(columns, meta_info=concat_meta_info([part.meta_info for part in parts]))
        joined.auto_padding = any(part.auto_padding for part in parts)
        return joined

    def padding(self, padding_size: int, padding_candidate: Literal["first", "last", ""] = "") -> None:
        """Append the last row (or the first) ``padding_size`` times to *this* batch.

        Raises:
            SchemaError: the batch has no row to repeat, or another candidate is named.
        """
        if padding_candidate not in ("first", "last", ""):
            raise SchemaError(f"padding_candidate must be 'first' or 'last', got {padding_candidate!r}")
        if padding_size < 0 or (padding_size > 0 and len(self) == 0):
            raise SchemaError(f"cannot pad {len(self)} rows by {padding_size}")
        row = 0 if padding_candidate == "first" else len(self) - 1
        if padding_size:
            columns = self.columns()
            self._become(Columns.concat([columns, columns.take(np.full(padding_size, row))]))

    def is_padding_enabled(self) -> bool:
        """Whether :meth:`chunk` may cut unequal chunks: of this batch, or (:class:`DataProtoConfig`) of any batch."""
        return self.auto_padding or DataProtoConfig.auto_padding

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> DataProto:
        """Cut the second dimension of ``split_keys`` into ``n_split`` rows each; repeat the rows of other columns.

            >>> pairs = DataProto.from_dict({"pair": torch.tensor([[1, 2], [3, 4]]), "prompt": torch.tensor([8, 9])})
            >>> unfolded = pairs.unfold_column_chunks(2, ["pair"])
            >>> unfolded.batch["pair"].tolist(), unfolded.batch["prompt"].tolist()
            ([[1], [2], [3], [4]], [8, 8, 9, 9])

        Raises:
            SchemaError: a named column is missing, ragged, or its second dimension is no multiple of ``n_split``.
        """
        return self.with_rows(self.columns().unfold(n_split, tuple(split_keys or ())))

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[DataProto]:
        """Iterate ``epochs`` times over the rows in mini-batches: views of consecutive rows, or copies when shuffled.

        ``dataloader_kwargs`` may have ``shuffle`` and ``drop_last``. Shuffled rows come in the order of torch's
        DataLoader, with a generator of this ``seed`` or, if None, with torch's own, which ends in the same state.
        Arguments are checked at once, not at the first mini-batch.

        Raises:
            SchemaError: ``mini_batch_size`` does not divide the rows and ``drop_last`` is not set; unknown arguments.
        """
        from torch.utils.data import DataLoader

        options = dict(dataloader_kwargs or {})
        shuffle, drop_last = options.pop("shuffle", False), options.pop("drop_last", False)
        if options:
            raise SchemaError(f"make_iterator takes 'shuffle' and 'drop_last', got {sorted(options)}")
        if mini_batch_size < 1:
            raise SchemaError(f"mini_batch_size must be at least 1, got {mini_batch_size}")
        rows = len(self)
        if rows % mini_batch_size and not drop_last:
            raise SchemaError(
                f"{rows} rows cannot be cut into mini-batches of {mini_batch_size}: choose a divisor, or drop_last=True"
            )
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        loader: Iterable[list[int]] = DataLoader(
            cast("Any", range(rows)),
            batch_size=mini_batch_size,
            shuffle=shuffle,
            drop_last=True,
            generator=generator,
            collate_fn=list,
        )
        batches = (index for _ in range(epochs) for index in loader)
        if shuffle:
            return (self.select_idxs(index) for index in batches)
        return (self.slice(index[0], index[-1] + 1) for index in batches)

    # ------------------------------------------------------------------------------------------------------ columns

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """Return a batch of only these columns and entries; None means all. Views, unless ``deepcopy``.

        Raises:
            SchemaError: naming a key that is missing.
        """
        columns = self.columns()
        tensors = _picked(columns.tensors, batch_keys, "batch")
        arrays = _picked(columns.arrays, non_tensor_batch_keys, "non_tensor_batch")
        info = _picked(self.meta_info, meta_info_keys, "meta_info")
        if deepcopy:
            tensors = tensor_columns({name: value.clone() for name, value in tensors.items()})
            arrays, info = copy.deepcopy(arrays), copy.deepcopy(info)
        return self.with_rows(Columns(tensors=tensors, arrays=arrays, rows=columns.rows), meta_info=info)

    def pop(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> DataProto:
        """Remove these columns and entries from *this* batch (None means none), and return them as a batch.

        Raises:
            SchemaError: naming a key that is missing; nothing is removed then.
        """
        taken = self.select(batch_keys or (), non_tensor_batch_keys or (), meta_info_keys or ())
        columns = taken.columns()
        self._become(self.columns().without(columns.names))
        for name in taken.meta_info:
            del self.meta_info[name]
        if not columns.tensors:
            taken.batch = None
        return taken

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> DataProto:
        """Rename columns of either kind in *this* batch, and return it.

        Raises:
            SchemaError: an old name is missing, a new one taken, or their numbers differ.
        """
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        self._become(self.columns().rename(old, new))
        return self

    def union(self, other: DataProto) -> DataProto:
        """Add the columns and ``meta_info`` of ``other`` to *this* batch, and return it.

        What both have must be equal, bit by bit. Either may be without tensors; a batch without any column takes the
        rows of the other.

        Raises:
            SchemaError: rows differ in number, or naming the column or entry that differs; nothing is changed then.
        """
        columns = self.columns().union(other.columns())
        info = union_meta_info(self.meta_info, other.meta_info)
        self._become(columns)
        self.meta_info = info
        return self

    def with_columns(self, **columns: Any) -> DataProto:
        """Return a batch with these columns added or replaced: tensors, lists of tensors (ragged), arrays, lists.

        Raises:
            SchemaError: a column has another number of rows than this batch.
        """
        mine = self.columns()
        kept = mine.without(columns)
        tensors, others = _sorted_columns(columns)
        result = type(self).from_dict(
            tensors={**kept.tensors, **tensors},
            non_tensors={**kept.arrays, **others},
            meta_info=self.meta_info,
            auto_padding=self.auto_padding,
        )
        if mine.rows and columns and len(result) != mine.rows:
            raise SchemaError(f"columns {sorted(columns)} have {len(result)} rows, the batch has {mine.rows}")
        return result

    # ------------------------------------------------------------------------------------------------------- places

    def to(self, device: torch.device | str | int) -> DataProto:
        """Move the tensors of *this* batch to ``device``, and return it. Tensors that are set later move there too."""
        columns = self.columns()
        if self.batch is not None:
            moved = tensor_columns({name: value.to(device) for name, value in columns.tensors.items()})
            self.batch = tensordict_of(moved, rows=columns.rows, device=torch.device(device))
        return self

    @property
    def read_only(self) -> bool:
        """Whether some column is in memory that others read, and must not be written to.

        That is so for a batch from Ray's object store: its tensors are torch inference tensors, its arrays read-only.
        Writing to an array raises ValueError. Writing to a tensor raises RuntimeError, but after torch has written: the
        error reports damage, it does not prevent it (and inside ``inference_mode()``, or through ``values()`` of a
        ragged column, torch does not even raise). Autograd refuses to save such tensors for a backward pass. Call
        :meth:`writable` before passing a batch to code that writes or trains; ``select_idxs``, ``repeat``, ``concat``
        and moving to a GPU return ordinary tensors anyway.

        True as well for tensors that were made under ``torch.inference_mode()``, with the same remedy.
        """
        return any(value.is_inference() for _, value in self._tensors()) or any(
            not array.flags.writeable for array in self.non_tensor_batch.values()
        )

    def writable(self) -> DataProto:
        """Return this batch, or a copy of it if it is :attr:`read_only`."""
        return self.clone() if self.read_only else self

    def save_to_disk(self, filepath: str | os.PathLike[str]) -> None:
        """Write this batch to a file, as :func:`asyncrl.data.disk.save` does."""
        from asyncrl.data.disk import save

        save(self, filepath)

    @staticmethod
    def load_from_disk(filepath: str | os.PathLike[str], mmap: bool = False) -> DataProto:
        """Read the batch in a file, as :func:`asyncrl.data.disk.load` does."""
        from asyncrl.data.disk import load

        return load(filepath, mmap=mmap)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Pickle as the codec's header and buffers, out of band from protocol 5 on: Ray then copies nothing twice."""
        from asyncrl.data.codec import encode

        return encode(self).__reduce_ex__(protocol)

    def clone(self) -> DataProto:
        return self.select(deepcopy=True)

    def __copy__(self) -> DataProto:
        return self.select()

    def __deepcopy__(self, memo: dict[int, Any]) -> DataProto:
        return self.clone()


def _sorted_columns(columns: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return tensors and lists of tensors, and everything else."""
    tensors: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in columns.items():
        (tensors if isinstance(value, torch.Tensor) or is_list_of_tensors(value) else others)[name] = value
    return tensors, others


def _picked(entries: Mapping[str, Any], keys: Iterable[str] | None, place: str) -> dict[str, Any]:
    if keys is None:
        return dict(entries)
    wanted = [keys] if isinstance(keys, str) else list(keys)
    missing = [key for key in wanted if key not in entries]
    if missing:
        raise SchemaError(f"{place} has no {missing}: it has {list(entries)}")
    return {key: entries[key] for key in entries if key in wanted}


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Repeat rows from the beginning until ``size_divisor`` divides their number; return the batch and how many.

    A batch that fits already is returned as it is; otherwise the result is a copy and ``data`` is not changed.
    A batch without rows fits every divisor.

        >>> padded, pad_size = pad_dataproto_to_divisor(data, 4)
        >>> padded.batch["x"].tolist(), pad_size
        ([1, 2, 3, 1], 1)

    Raises:
        SchemaError: ``size_divisor`` is below 1.
    """
    if size_divisor < 1:
        raise SchemaError(f"size_divisor must be at least 1, got {size_divisor}")
    rows = len(data)
    pad_size = -rows % size_divisor
    if pad_size == 0:
        return data, 0
    return DataProto.concat([data, data.select_idxs(np.arange(pad_size) % rows)]), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Return ``data`` without its last ``pad_size`` rows, as a view.

        >>> unpad_dataproto(data, 1).batch["x"].tolist()
        [1, 2]

    Raises:
        SchemaError: ``pad_size`` is not in 0..B.
    """
    if not 0 <= pad_size <= len(data):
        raise SchemaError(f"pad_size must lie in 0..{len(data)} (the number of rows), got {pad_size}")
    return data if pad_size == 0 else data.slice(0, len(data) - pad_size)


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Fold consecutive rows into a second dimension: columns ``[B, ...]`` become ``[N, B / N, ...]``.

        >>> fold_batch_dim(data.repeat(2), 3).batch["x"].tolist()
        [[1, 1], [2, 2], [3, 3]]

    Raises:
        SchemaError: ``new_batch_size`` does not divide the rows, or a column is ragged.
    """
    columns = _dense_columns(data)
    if new_batch_size < 1 or columns.rows % new_batch_size:
        raise SchemaError(f"{columns.rows} rows cannot be folded into {new_batch_size}")
    inner = columns.rows // new_batch_size
    fold = columns.apply(lambda value: value.reshape(new_batch_size, inner, *value.shape[1:]), rows=new_batch_size)
    return data.with_rows(fold)


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Turn the first ``batch_dims`` dimensions of every column into rows. The counterpart of :func:`fold_batch_dim`.

        >>> unfold_batch_dim(fold_batch_dim(data.repeat(2), 3)) == data.repeat(2)
        True

    Raises:
        SchemaError: columns differ in these dimensions or have fewer, or a column is ragged.
    """
    columns = _dense_columns(data)
    values: dict[str, Any] = {**columns.tensors, **columns.arrays}
    leading = {name: tuple(each.shape[:batch_dims]) for name, each in values.items()}
    if batch_dims < 1 or not leading or len(set(leading.values())) > 1 or len(min(leading.values())) < batch_dims:
        raise SchemaError(f"columns must agree in their first {batch_dims} dimensions, got {leading}")
    rows = math.prod(next(iter(leading.values())))
    return data.with_rows(columns.apply(lambda value: value.reshape(rows, *value.shape[batch_dims:]), rows=rows))


def _dense_columns(data: DataProto) -> Columns:
    columns = data.columns()
    if columns.ragged:
        raise SchemaError(f"ragged columns {list(columns.ragged)} cannot be folded")
    return columns
