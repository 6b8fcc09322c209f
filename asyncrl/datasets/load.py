"""Opens the data sets that a configuration names, as streams of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_core import PydanticCustomError

from asyncrl.config.problem import problems_of, raise_problems
from asyncrl.config.sections import Files, Section
from asyncrl.datasets.rows import (
    CONVERSATION_COLUMNS,
    PROMPT_COLUMNS,
    Conversation,
    PromptRow,
    read_conversation,
    read_prompt,
)
from asyncrl.datasets.source import Record, open_sources
from asyncrl.datasets.stream import Dataset, Part, Stream, Weight
from asyncrl.errors import ConfigError, InvalidDataError

RowT = TypeVar("RowT")
Read: TypeAlias = Callable[[Record, Mapping[str, str]], RowT]


def _points(value: Any) -> Any:
    """Convert a weight to the points of a piecewise linear function."""
    pairs = [(0.0, value)] if not isinstance(value, list | tuple) else value
    for pair in pairs:
        if not (isinstance(pair, list | tuple) and len(pair) == 2 and all(map(_is_number, pair))):
            raise PydanticCustomError("table", "must be a number, or points [[index, weight], ...]")
    return tuple((float(at), float(weight)) for at, weight in pairs)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class SourceConfig(Section):
    """One part of a mixture."""

    files: Files
    """Paths, patterns, folders, or `hub:owner/name?split=train`."""
    name: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """Its name in messages and metrics; none: the first of the files."""
    weight: Annotated[tuple[tuple[float, float], ...], BeforeValidator(_points)] = ((0.0, 1.0),)
    """Share of the mixture, or `[[index, weight], ...]`, interpolated linearly by the index of the row."""
    order: Literal["shuffled", "file"] = "shuffled"
    """`shuffled`: every pass differently, by seed; `file`: the order of the file."""
    curriculum_key: Annotated[str, Field(min_length=1)] | None = None
    """A column of numbers such as `extra_info.difficulty`: the first pass goes from the smallest to the largest."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Other names of columns, `{prompt = "extra_info.question"}`."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Use only this many rows, the first ones."""


def open_prompts(given: Any, *, seed: int, key: str = "data") -> Stream[PromptRow]:
    """Open prompts for reinforcement learning.

    Args:
        given: a path, several of them, or a list of tables (:class:`SourceConfig`) to be mixed.
        seed: of order and mixture.
        key: dotted key of the configuration, for messages.

    Raises:
        ConfigError: a file does not exist, or a value is out of range.
        InvalidDataError: a file cannot be read, or has no rows. A row is checked when it is read.
    """
    return _open(given, read_prompt, PROMPT_COLUMNS, seed=seed, key=key)


def open_conversations(given: Any, *, seed: int, key: str = "data") -> Stream[Conversation]:
    """Open conversations for supervised training; see :func:`open_prompts`."""
    return _open(given, read_conversation, CONVERSATION_COLUMNS, seed=seed, key=key)


def open_dataset(
    files: str | Path | Sequence[str | Path],
    read: Read[RowT],
    *,
    columns: Mapping[str, str] | None = None,
    known: Sequence[str] = (),
    key: str = "data",
) -> Dataset[RowT]:
    """Open the rows of files in their order, each once; ``columns`` renames some of the ``known``. Errors as above."""
    for column in columns or {}:
        if column not in known:
            near = get_close_matches(column, known, n=1)
            where = f"{key.removesuffix('.files').removesuffix('.held_out')}.columns.{column}"
            remedy = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(
                f"{where}: rows of this kind have no such column",
                path=where,
                remedy=f"{remedy}one of {', '.join(known)}",
            )
    sources = open_sources(files, key=key)
    names = dict(columns or {})
    rows: Dataset[RowT] = Dataset(sources, lambda record: read(record, names))
    if not len(rows):
        raise InvalidDataError(f"{', '.join(source.name for source in sources)} has no rows")
    return rows


def _open(given: Any, read: Read[RowT], known: Sequence[str], *, seed: int, key: str) -> Stream[RowT]:
    parts = [_part(config, read, known, key=key) for config in _configs(given, key=key)]
    return Stream(parts, seed=seed, key=key)


def _configs(given: Any, *, key: str) -> list[SourceConfig]:
    tables = given if isinstance(given, list | tuple) and any(isinstance(each, Mapping) for each in given) else [given]
    if not all(isinstance(each, Mapping) for each in tables):
        tables = [{"files": given}]
    configs = []
    for number, table in enumerate(tables):
        where = key if len(tables) == 1 else f"{key}[{number}]"
        try:
            configs.append(SourceConfig.model_validate(dict(table)))
        except ValidationError as error:
            raise_problems(problems_of(error, SourceConfig), origin=where)
    return configs


def _part(config: SourceConfig, read: Read[RowT], known: Sequence[str], *, key: str) -> Part[RowT]:
    rows = open_dataset(config.files, read, columns=config.columns, known=known, key=key)
    try:
        weight = Weight(config.weight)
    except ValueError as error:
        raise ConfigError(f"{key}.weight: {error}", path=f"{key}.weight", remedy="[[0, 1.0], [5000, 0.2]]") from error
    return Part(
        name=config.name or config.files[0],
        rows=rows if config.limit is None else rows.first(config.limit),
        shuffled=config.order == "shuffled",
        curriculum_key=config.curriculum_key,
        weight=weight,
    )
