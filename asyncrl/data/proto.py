"""DataProto: a batch of rows."""

from __future__ import annotations

import builtins
import copy
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, overload

import numpy as np
import torch

from asyncrl.data.auto_padding import DataProtoConfig
from asyncrl.data.columns import Array, Columns, array_column, is_list_of_tensors, row_index, tensor_columns
from asyncrl.data.equality import values_equal
from asyncrl.data.meta_info import concat_meta_info, union_meta_info
from asyncrl.data.ragged import normalise_ragged, offsets_of, row_of, values_of
from asyncrl.data.schema import Schema
from asyncrl.data.tensordicts import packed_tensordict, tensordict_of, unpacked_tensordict
from asyncrl.errors import SchemaError

if TYPE_CHECKING:
    from tensordict import TensorDict

    from asyncrl.data.future import DataProtoFuture

__all__ = ["DataProto", "DataProtoItem"]


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

    **Sharing.** The containers (``batch``, ``non_tensor_batch``, ``meta_info``) always belong to this object alone:
    setting or removing an entry never changes another batch. The *tensors and arrays* in them may be views of
    another batch: ``slice``, ``chunk``, ``split``, ``select``, ``union``, ``with_columns``, mini-batches that are not
    shuffled and ``unpad_dataproto`` copy nothing, so writing *into* a tensor writes through. ``select_idxs``,
    ``repeat``, ``concat`` and ``clone`` copy. A batch received from another process may be :attr:`read_only`.

    ``to``, ``rename``, ``pop``, ``union``, ``reorder`` and ``padding`` change this object, as in verl; everything else
    returns a new one. They change everything or, when they raise, nothing.

        >>> import numpy as np, torch
        >>> data = DataProto.from_dict(
        ...     tensors={"x": torch.tensor([1, 2, 3])}, non_tensors={"name": ["a", "b", "c"]}, meta_info={"step": 7}
        ... )
        >>> len(data)
        3

    The examples of the methods are about this batch.

    Args:
        batch: tensors; the container is copied, the tensors are not.
        non_tensor_batch: arrays; likewise.
        meta_info: everything else; likewise.
        auto_padding: whether :meth:`chunk` may cut unequal chunks.

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
        """A batch of these columns. The dictionaries are not changed, the tensors and arrays not copied.

        A list of tensors becomes a ragged column; a list among ``non_tensors`` a 1-d object array of its elements,
        whatever they are. Ragged columns with equal lengths will share their offsets, so that torch can compute
        between them.

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
        """A batch of columns of both kinds: tensors and lists of tensors on one side, arrays and lists on the other.

            >>> len(DataProto.from_single_dict({"x": torch.zeros(2, 3), "text": ["a", "b"]}))
            2

        Raises:
            SchemaError: columns differ in their number of rows, or something is no column.
        """
        tensors, others = _sorted_columns(data)
        return cls.from_dict(tensors=tensors, non_tensors=others, meta_info=meta_info, auto_padding=auto_padding)

    @classmethod
    def from_tensordict(
        cls, tensor_dict: TensorDict, meta_info: Mapping[str, Any] | None = None, num_batch_dims: int = 1
    ) -> DataProto:
        """A batch of a TensorDict: its NonTensorStacks become object arrays, its NonTensorData ``meta_info``.

            >>> DataProto.from_tensordict(data.to_tensordict()) == data
            True

        Raises:
            SchemaError: something in it is no column, or ``num_batch_dims`` is not 1.
        """
        tensors, others, info = unpacked_tensordict(tensor_dict)
        return cls.from_dict(tensors, others, {**(meta_info or {}), **info}, num_batch_dims)

    def to_tensordict(self) -> TensorDict:
        """All of it in one TensorDict: other columns as NonTensorStack, ``meta_info`` as NonTensorData.

            >>> sorted(data.to_tensordict().keys())
            ['name', 'step', 'x']

        Raises:
            SchemaError: an entry of ``meta_info`` has the name of a column.
        """
        return packed_tensordict(self.columns(), self.meta_info)

    def columns(self) -> Columns:
        """The columns, checked: for code that computes on them.

            >>> data.columns().names
            ['x', 'name']

        Raises:
            SchemaError: as :meth:`check_consistency`.
        """
        self.check_consistency()
        tensors: dict[str, torch.Tensor] = {}
        for name, value in () if self.batch is None else self._tensors():
            tensors[name] = normalise_ragged(value, name) if value.is_nested else value
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
        """A batch of columns that are known to fit together; ``has_batch`` asks for a TensorDict without tensors too.

        Counterpart of :meth:`columns`, for code that computes on them. ``device`` is the TensorDict's own.

            >>> DataProto.from_columns(data.columns(), meta_info=data.meta_info) == data
            True
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
        """A batch like this one of other columns that are known to fit together, perhaps with other ``meta_info``.

        >>> data.with_rows(data.columns().slice(0, 2)) == data[:2]
        True
        """
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
        """Where the batch was moved to, and what is set in it later goes too."""
        batch: Any = self.batch
        return None if batch is None else batch.device

    def _tensors(self) -> Iterable[tuple[str, Any]]:
        batch: Any = self.batch  # set freely: what is in it is known once it was looked at
        return () if batch is None else ((str(name), value) for name, value in batch.items())

    def check_consistency(self) -> None:
        """Check that this is a batch: one batch dimension, and every column with as many rows.

            >>> broken = data.select()
            >>> broken.non_tensor_batch["name"] = np.array(["a"], dtype=object)
            >>> broken.check_consistency()
            Traceback (most recent call last):
            asyncrl.errors.SchemaError: column 'name' has 1 rows, the batch has 3

        Raises:
            SchemaError: it is none, naming the column.
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
            if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]  they can be set freely
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
        """Columns and rows.

        >>> print(data.schema)
        rows: 3
        x: tensor int64
        name: object
        """
        return self.columns().schema

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensors and arrays. Python objects in object arrays count as their pointers only.

        >>> data.select(["x"], []).size_bytes
        24
        """
        total = sum(array.nbytes for array in self.non_tensor_batch.values())
        for _, value in self._tensors():
            total += values_of(value).nbytes + offsets_of(value).nbytes if value.is_nested else value.nbytes
        return total

    def equals(self, other: DataProto) -> bool:
        """Same columns with the same bits (NaN equals itself), same rows, equal ``meta_info``.

        The order of columns and the device do not matter, nor does ``auto_padding``.

            >>> data.equals(data.clone()), data.equals(data[:2])
            (True, False)
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
        """Every column and entry with its type, one a line.

        >>> print(data.get_data_info())
        batch
          x: (3,) (torch.int64) cpu
        non_tensor_batch
          name: ndarray(3,) (object)
        meta_info
          step: int
        """
        from asyncrl.data.display import as_data_info

        return as_data_info(self)

    def print_size(self, prefix: str = "") -> None:
        """Print rows and bytes, after ``prefix``.

        >>> data.select(["x"], []).print_size("here")
        here, 3 rows, 24 bytes
        """
        print(f"{prefix + ', ' if prefix else ''}{len(self)} rows, {self.size_bytes} bytes")  # noqa: T201  its purpose

    # --------------------------------------------------------------------------------------------------------- rows

    @overload
    def __getitem__(self, item: int | np.integer[Any]) -> DataProtoItem: ...
    @overload
    def __getitem__(self, item: builtins.slice | Sequence[int] | Array | torch.Tensor) -> DataProto: ...
    def __getitem__(
        self, item: int | np.integer[Any] | builtins.slice | Sequence[int] | Array | torch.Tensor
    ) -> DataProtoItem | DataProto:
        """A row for an integer (IndexError beyond the last), a batch for a slice or an index of rows.

        >>> data[0].non_tensor_batch, len(data[1:]), data[[2, 0]].batch["x"].tolist()
        ({'name': 'a'}, 2, [3, 1])
        """
        if isinstance(item, builtins.slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, int | np.integer) and not isinstance(item, bool):
            return self._item(int(item), self.columns())
        if isinstance(item, list | tuple | range | np.ndarray | torch.Tensor):
            return self.select_idxs(item)
        raise TypeError(f"rows are selected by an integer, a slice or an index of rows, not by {type(item).__name__}")

    def __iter__(self) -> Iterator[DataProtoItem]:
        """Row by row.

        >>> [int(row.batch["x"]) for row in data]
        [1, 2, 3]
        """
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
        """Rows as Python slices a list. Views for ``step`` 1 (dense tensors and arrays for any positive step).

        >>> data.slice(0, 2).batch["x"].tolist(), data.slice(None, None, -1).batch["x"].tolist()
        ([1, 2], [3, 2, 1])
        """
        first, last, stride = builtins.slice(start, end, step).indices(len(self))
        if stride < 0:
            return self.with_rows(self.columns().take(np.arange(first, last, stride)))
        return self.with_rows(self.columns().slice(first, max(first, last), stride))

    def select_idxs(self, idxs: Sequence[int] | Sequence[bool] | Array | torch.Tensor) -> DataProto:
        """The rows ``idxs``, copied: integers (negative ones from the end) in their order, or one boolean a row.

            >>> data.select_idxs([-1, 0, 0]).batch["x"].tolist()
            [3, 1, 1]
            >>> data.select_idxs(data.batch["x"] > 1).non_tensor_batch["name"].tolist()
            ['b', 'c']

        Raises:
            TypeError: neither integers nor booleans.
            IndexError: out of range, or a mask of another length.
        """
        return self.with_rows(self.columns().take(row_index(idxs, len(self))))

    def reorder(self, indices: Sequence[int] | Array | torch.Tensor) -> None:
        """Replace the rows of *this* batch by the rows ``indices``, as :meth:`select_idxs` takes them.

            >>> sorted_down = data.select()
            >>> sorted_down.reorder(torch.tensor([2, 1, 0]))
            >>> sorted_down.batch["x"].tolist()
            [3, 2, 1]

        Raises:
            TypeError: neither integers nor booleans.
            IndexError: out of range, or a mask of another length; the batch is as it was.
        """
        self._become(self.columns().take(row_index(indices, len(self))))

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Every row ``repeat_times`` times: a a b b if ``interleave``, else a b a b. Columns ``[B * n, ...]``, copied.

            >>> data.repeat(2).non_tensor_batch["name"].tolist()
            ['a', 'a', 'b', 'b', 'c', 'c']
            >>> data.repeat(2, interleave=False).non_tensor_batch["name"].tolist()
            ['a', 'b', 'c', 'a', 'b', 'c']

        Raises:
            SchemaError: ``repeat_times`` is negative.
        """
        if repeat_times < 0:
            raise SchemaError(f"repeat_times must not be negative, got {repeat_times}")
        rows = np.arange(len(self))
        index = np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times)
        return self.with_rows(self.columns().take(index))

    def sample_level_repeat(self, repeat_times: Sequence[int] | Array | torch.Tensor) -> DataProto:
        """Row i ``repeat_times[i]`` times, copies of a row side by side; ``repeat_times`` are integers ``[B]``.

            >>> data.sample_level_repeat([0, 2, 1]).batch["x"].tolist()
            [2, 2, 3]

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
        """``chunks`` batches of consecutive rows, as views, each with a ``meta_info`` dict of its own.

            >>> [part.batch["x"].tolist() for part in data.chunk(3)]
            [[1], [2], [3]]

        Raises:
            SchemaError: ``chunks`` does not divide the rows and padding is not enabled. When it is, sizes differ by at
                most one, larger ones first, and may be 0.
        """
        if chunks < 1:
            raise SchemaError(f"chunks must be at least 1, got {chunks}")
        size, larger = divmod(len(self), chunks)
        if larger and not self.is_padding_enabled():
            raise SchemaError(
                f"{len(self)} rows cannot be cut into {chunks} equal chunks: pad them (pad_dataproto_to_divisor), "
                "or create the batch with auto_padding=True to allow chunks that differ by one row"
            )
        columns = self.columns()
        starts = [number * size + min(number, larger) for number in range(chunks + 1)]
        return [self.with_rows(columns.slice(starts[n], starts[n + 1])) for n in range(chunks)]

    def split(self, split_size: int) -> list[DataProto]:
        """Batches of ``split_size`` rows, the last one perhaps smaller, as views. No rows, no batches.

            >>> [part.batch["x"].tolist() for part in data.split(2)]
            [[1, 2], [3]]

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
        """The rows of all batches, copied, in order. With a future among them, the future of that.

        ``meta_info``: a key in several batches must have equal values, except ``metrics`` (a dict, or a list of dicts),
        which become one dict of lists: for each name the values of the batches that have it.

            >>> both = DataProto.concat([data, data[:1]])
            >>> both.batch["x"].tolist(), both.meta_info
            ([1, 2, 3, 1], {'step': 7})

        Raises:
            SchemaError: there is no batch, or columns, dtypes, shapes or ``meta_info`` differ: the message names the
                batch by its position, and each difference.
        """
        given = list(data)
        parts = [part for part in given if isinstance(part, DataProto)]
        if len(parts) < len(given):
            from asyncrl.data.future import DataProtoFuture

            return DataProtoFuture.concat(given)
        if not parts:
            raise SchemaError("concat needs at least one batch: the columns of none are unknown")
        columns = Columns.concat([part.columns() for part in parts])
        joined = parts[0].with_rows(columns, meta_info=concat_meta_info([part.meta_info for part in parts]))
        joined.auto_padding = any(part.auto_padding for part in parts)
        return joined

    def padding(self, padding_size: int, padding_candidate: Literal["first", "last", ""] = "") -> None:
        """Append the last row (or the first) ``padding_size`` times to *this* batch.

            >>> padded = data.select()
            >>> padded.padding(2)
            >>> padded.batch["x"].tolist()
            [1, 2, 3, 3, 3]

        Raises:
            SchemaError: there is no row to repeat, or another candidate is named.
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
        """Whether :meth:`chunk` may cut unequal chunks: this batch, or (:class:`DataProtoConfig`) any batch.

        >>> [len(part) for part in DataProto(data.batch, auto_padding=True).chunk(2)]
        [2, 1]
        """
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
        """``epochs`` passes over the rows in mini-batches: views of consecutive rows, or copies when shuffled.

        ``dataloader_kwargs`` knows ``shuffle`` and ``drop_last``. Shuffled rows come as from torch's DataLoader,
        with a generator of this ``seed`` or, if None, with torch's own, which is left as a DataLoader leaves it.

            >>> [part.batch["x"].tolist() for part in data.make_iterator(1, epochs=2)]
            [[1], [2], [3], [1], [2], [3]]

        Raises:
            SchemaError: ``mini_batch_size`` does not divide the rows and ``drop_last`` is not set; unknown arguments.
        """
        from asyncrl.data.iterator import mini_batches

        return mini_batches(self, mini_batch_size, epochs=epochs, seed=seed, **dict(dataloader_kwargs or {}))

    # ------------------------------------------------------------------------------------------------------ columns

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """Only these columns and entries; None means all. Views, unless ``deepcopy``.

            >>> data.select(["x"], [], []).columns().names
            ['x']

        Raises:
            SchemaError: naming a key that is not there.
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
        """Take these columns and entries out of *this* batch; None means none. Returns them as a batch.

            >>> rest = data.select()
            >>> rest.pop(["x"]).columns().names, rest.columns().names
            (['x'], ['name'])

        Raises:
            SchemaError: naming a key that is not there; nothing was taken then.
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

            >>> data.select().rename("x", "y").columns().names
            ['y', 'name']

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

            >>> scores = DataProto.from_dict({"score": torch.tensor([0.5, 0.0, 1.0])})
            >>> data.select().union(scores).columns().names
            ['x', 'score', 'name']

        Raises:
            SchemaError: rows differ in number, or naming the column or entry that differs; nothing was changed then.
        """
        columns = self.columns().union(other.columns())
        info = union_meta_info(self.meta_info, other.meta_info)
        self._become(columns)
        self.meta_info = info
        return self

    def with_columns(self, **columns: Any) -> DataProto:
        """A new batch with these columns added or replaced: tensors, lists of tensors (ragged), arrays, lists.

            >>> data.with_columns(double=data.batch["x"] * 2).batch["double"].tolist()
            [2, 4, 6]

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
        """Move the tensors of *this* batch to ``device``, and return it.

        What is set in its ``batch`` later moves there too, and what is cut out of it knows the device.

        >>> data.select().to("cpu") == data
        True
        """
        columns = self.columns()
        if self.batch is not None:
            moved = tensor_columns({name: value.to(device) for name, value in columns.tensors.items()})
            self.batch = tensordict_of(moved, rows=columns.rows, device=torch.device(device))
        return self

    @property
    def read_only(self) -> bool:
        """Whether some column lies in memory that others read, so that nobody may write to it.

        So it is after a batch came out of Ray's object store without a copy: its tensors are torch inference tensors,
        its arrays read-only. Writing to an array raises ValueError. Writing to a tensor raises RuntimeError, but torch
        has written by then: the error tells of damage, it does not prevent it (and inside ``inference_mode()``, or
        through ``values()`` of a ragged column, there is not even an error). Autograd refuses to save such tensors for
        a backward pass. Call :meth:`writable` before giving a batch to code that writes or trains; ``select_idxs``,
        ``repeat``, ``concat`` and moving to a GPU yield ordinary tensors anyway.

        True as well for tensors that were made under ``torch.inference_mode()``, with the same remedy.

            >>> data.read_only
            False
        """
        return any(value.is_inference() for _, value in self._tensors()) or any(
            not array.flags.writeable for array in self.non_tensor_batch.values()
        )

    def writable(self) -> DataProto:
        """This batch, or a copy of it if it is :attr:`read_only`.

        >>> data.writable() is data
        True
        """
        return self.clone() if self.read_only else self

    def save_to_disk(self, filepath: str | os.PathLike[str]) -> None:
        """Write this batch to a file, completely or not at all. The format is that of ``asyncrl.data.disk``.

            >>> from tempfile import TemporaryDirectory
            >>> with TemporaryDirectory() as folder:
            ...     data.save_to_disk(f"{folder}/batch")
            ...     DataProto.load_from_disk(f"{folder}/batch") == data
            True

        Raises:
            CodecError: naming the column or entry that holds something that is no data.
        """
        from asyncrl.data.disk import save

        save(self, filepath)

    @staticmethod
    def load_from_disk(filepath: str | os.PathLike[str], mmap: bool = False) -> DataProto:
        """The batch in a file; with ``mmap`` its columns are mapped, not read (see ``asyncrl.data.disk.load``).

            >>> DataProto.load_from_disk("nowhere")  # doctest: +ELLIPSIS
            Traceback (most recent call last):
            FileNotFoundError: ...

        Raises:
            CodecError: the file is truncated, changed in any bit, of another format, or no batch.
            OSError: it cannot be read.
        """
        from asyncrl.data.disk import load

        return load(filepath, mmap=mmap)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Pickle as the codec's header and buffers, out of band from protocol 5 on: Ray then copies nothing twice."""
        from asyncrl.data.codec import encode

        return encode(self).__reduce_ex__(protocol)

    def clone(self) -> DataProto:
        """A batch that shares nothing with this one.

        >>> mine = data.clone()
        >>> _ = mine.batch["x"].zero_()
        >>> data.batch["x"].tolist()
        [1, 2, 3]
        """
        return self.select(deepcopy=True)

    def __copy__(self) -> DataProto:
        return self.select()

    def __deepcopy__(self, memo: dict[int, Any]) -> DataProto:
        return self.clone()


def _sorted_columns(columns: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors and lists of tensors, and everything else."""
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
