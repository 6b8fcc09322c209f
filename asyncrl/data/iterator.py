"""Mini-batches of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from asyncrl.errors import SchemaError

if TYPE_CHECKING:
    from asyncrl.data.proto import DataProto

__all__ = ["mini_batches"]


def mini_batches(
    data: DataProto,
    mini_batch_size: int,
    *,
    epochs: int,
    seed: int | None = None,
    shuffle: bool = False,
    drop_last: bool = False,
    **unknown: object,
) -> Iterator[DataProto]:
    """See :meth:`asyncrl.data.DataProto.make_iterator`. Arguments are checked at once, not at the first mini-batch."""
    if unknown:
        raise SchemaError(f"make_iterator knows 'shuffle' and 'drop_last', got {sorted(unknown)}")
    if mini_batch_size < 1:
        raise SchemaError(f"mini_batch_size must be at least 1, got {mini_batch_size}")
    rows = len(data)
    if rows % mini_batch_size and not drop_last:
        raise SchemaError(
            f"{rows} rows cannot be cut into mini-batches of {mini_batch_size}: choose a divisor, or drop_last=True"
        )
    starts = range(0, rows - rows % mini_batch_size, mini_batch_size)
    given = None if seed is None else torch.Generator().manual_seed(seed)

    def passes() -> Iterator[DataProto]:
        for _ in range(epochs):
            # A DataLoader draws a seed for its workers before the order of its rows, and one order too many after
            # them; so do we, to get the same rows in every epoch, and to leave torch's own generator as it would.
            _drawn(given)
            if not shuffle:
                for start in starts:
                    yield data.slice(start, start + mini_batch_size)
                continue
            generator = given or torch.Generator().manual_seed(_drawn(None))
            order = torch.randperm(rows, generator=generator)
            for start in starts:
                yield data.select_idxs(order[start : start + mini_batch_size])
            torch.randperm(rows, generator=generator)

    return passes()


def _drawn(generator: torch.Generator | None) -> int:
    """A seed from ``generator``, or from torch's own if there is none."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
