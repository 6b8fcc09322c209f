"""Declared: what is said of a batch before it is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncrl.errors import SchemaError

if TYPE_CHECKING:
    from asyncrl.data.plan import Header
    from asyncrl.data.schema import Schema

__all__ = ["Declared"]


@dataclass(frozen=True, slots=True)
class Declared:
    """How many rows a batch will have, and which columns; None where nothing is said."""

    rows: int | None = None
    schema: Schema | None = None

    def check(self, header: Header, label: str) -> None:
        """Raise :class:`SchemaError` if the batch that ``label`` made is another."""
        found: list[str] = []
        if self.rows is not None and header.rows != self.rows:
            found.append(f"{header.rows} rows, declared were {self.rows}")
        if self.schema is not None and (difference := self.schema.any_rows().diff(header.schema)):
            found.append(difference)
        if found:
            raise SchemaError(f"{label} returned another batch than it declares:\n" + "\n".join(found))

    def with_rows(self, count: Callable[[int], int]) -> Declared | None:
        """What is known of a batch with ``count(rows)`` rows made of this one; columns are forgotten."""
        return None if self.rows is None else Declared(count(self.rows))
