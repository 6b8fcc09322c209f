"""Where rows come from: files of JSON lines and parquet, folders of them, and the Hugging Face hub.

    train.parquet   data/*.jsonl   data/          hub:openai/gsm8k?name=main&split=train

A source knows its length and gives any of its records by number, so that a shuffled run reads what it needs when it
needs it. Parquet needs the package pyarrow, the hub the package datasets (``pip install asyncrl[hub]`` brings both).
"""

from __future__ import annotations

import glob
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias
from urllib.parse import parse_qsl

from asyncrl.errors import ConfigError, InvalidDataError
from asyncrl.parts import install_command

from .json_lines import JsonLinesSource

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["HubSource", "ParquetSource", "Record", "RowSource", "check_files", "open_sources"]

Record: TypeAlias = dict[str, Any]
"""One row as its file has it: columns by name."""

_HUB = "hub:"
_BLOCK_ROWS = 1024
_SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".json")
_HUB_OPTIONS = ("name", "split", "revision", "data_files", "data_dir")


class RowSource(Protocol):
    """Records by number, 0 to ``len - 1``."""

    @property
    def name(self) -> str:
        """What messages call it: a path, or the name on the hub."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Record:
        """One record.

        Raises:
            InvalidDataError: it cannot be read, in words without file and number.
        """
        ...

    def where(self, number: int) -> str:
        """File and place of a record, for messages."""
        ...


class ParquetSource:
    """The rows of a parquet file, held in memory in Arrow's form, which is hardly larger than the file's content."""

    def __init__(self, path: Path, *, key: str = "files") -> None:
        parquet = _import("pyarrow.parquet", "pyarrow", needed_for=str(path), key=key)
        arrow = _import("pyarrow", "pyarrow", needed_for=str(path), key=key)
        self.name = str(path)
        try:
            self._table: pa.Table = parquet.read_table(path)
        except (arrow.ArrowException, OSError) as error:
            raise InvalidDataError(f"{path} cannot be read as parquet: {_first_line(error)}") from error
        self._first, self._block = 0, list[Record]()

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, number: int) -> Record:
        place = number - self._first
        if not 0 <= place < len(self._block):
            # Who asks for one row after the other gets them by the block, twenty times as fast.
            rows = _BLOCK_ROWS if place == len(self._block) > 0 else 1
            self._first, self._block, place = number, self._table.slice(number, rows).to_pylist(), 0
        return self._block[place]

    def where(self, number: int) -> str:
        """``FILE, row NUMBER``, from 0."""
        return f"{self.name}, row {number}"


class HubSource:
    """One split of a data set of the Hugging Face hub, or of a folder that ``Dataset.save_to_disk`` wrote.

    Args:
        data: its name on the hub, as ``owner/name``; or a folder.
        options: of ``datasets.load_dataset``: name, split (``train`` by default), revision, data_files, data_dir.
        key: the configuration's, for messages.
    """

    def __init__(self, data: str, /, *, key: str = "files", **options: str) -> None:
        datasets = _import("datasets", "datasets", needed_for=data, key=key)
        split = options.pop("split", "train")
        self.name = f"{data} ({split})"
        try:
            if Path(data).is_dir():
                loaded = datasets.load_from_disk(data)
            else:
                loaded = datasets.load_dataset(data, split=split, **options)
        except Exception as error:  # the library, the network and the data set's own files all have their say here
            raise ConfigError(
                f"{key}: the data set {data!r} cannot be loaded: {type(error).__name__}: {_first_line(error)}",
                path=key,
                remedy="check its name, split and revision, and the way to the hub (HF_ENDPOINT, HF_TOKEN)",
            ) from error
        if isinstance(loaded, datasets.DatasetDict):
            if split not in loaded:
                raise ConfigError(
                    f"{key}: {data!r} has no split {split!r}", path=key, remedy=f"one of {', '.join(loaded)}"
                )
            loaded = loaded[split]
        self._rows = loaded

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Record:
        return dict(self._rows[number])

    def where(self, number: int) -> str:
        """``NAME (SPLIT), row NUMBER``, from 0."""
        return f"{self.name}, row {number}"


def open_sources(files: str | Path | Sequence[str | Path], *, key: str = "files") -> list[RowSource]:
    """Open everything that ``files`` names, in their order; a folder's or pattern's in that of their names.

    Args:
        files: paths, patterns with ``*``, folders, or ``hub:owner/name?split=train``.
        key: dotted key of the configuration that names them, for messages.

    Raises:
        ConfigError: nothing is there, its kind is unknown, or a package is missing.
        InvalidDataError: a file is not what its name says.
    """
    given = [files] if isinstance(files, str | Path) else list(files)
    if not given:
        raise ConfigError(f"{key} names no file", path=key, remedy='give a path, or "hub:owner/name?split=train"')
    return [source for each in given for source in _open(str(each), key=key)]


def check_files(files: str | Path | Sequence[str | Path], *, key: str) -> None:
    """Check that everything ``files`` names is there, without reading it; the hub is not asked.

    Raises:
        ConfigError: as :func:`open_sources`.
    """
    for each in [files] if isinstance(files, str | Path) else files:
        if not str(each).startswith(_HUB):
            _found(str(each), key=key)


def _open(text: str, *, key: str) -> list[RowSource]:
    if text.startswith(_HUB):
        return [_open_hub(text.removeprefix(_HUB), key=key)]
    paths = _found(text, key=key)
    return [_open_file(path, key=key) if path.is_file() else HubSource(str(path), key=key) for path in paths]


def _found(text: str, *, key: str) -> list[Path]:
    """The files that a path, folder or pattern names; or the one folder that the package datasets wrote."""
    path = Path(text).expanduser()
    if path.is_dir():
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            return [path]
        paths = sorted(each for each in path.iterdir() if each.suffix in _SUFFIXES)
        what = f"the folder {text!r} holds no file of rows"
    elif path.is_file():
        paths, what = [path], ""
    else:
        paths = [Path(each) for each in sorted(glob.glob(str(path), recursive=True)) if Path(each).is_file()]  # noqa: PTH207  absolute patterns too
        what = f"{text!r}: no such file"
    if not paths:
        raise ConfigError(
            f"{key}: {what}",
            path=key,
            remedy=f'a path, a pattern or a folder of {", ".join(_SUFFIXES)}; or "hub:owner/name?split=train"',
        )
    return paths


def _open_file(path: Path, *, key: str) -> RowSource:
    if path.suffix == ".parquet":
        return ParquetSource(path, key=key)
    if path.suffix in _SUFFIXES:
        return JsonLinesSource(path)
    raise ConfigError(
        f"{key}: {str(path)!r} is of no kind that rows are read from", path=key, remedy=f"one of {', '.join(_SUFFIXES)}"
    )


def _open_hub(text: str, *, key: str) -> RowSource:
    name, _, query = text.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := sorted(options.keys() - set(_HUB_OPTIONS)):
        raise ConfigError(
            f"{key}: {_HUB}{text} has an option {unknown[0]!r}", path=key, remedy=f"one of {', '.join(_HUB_OPTIONS)}"
        )
    if not name:
        raise ConfigError(f"{key}: {_HUB} names no data set", path=key, remedy='write "hub:owner/name?split=train"')
    return HubSource(name, key=key, **options)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def _import(module: str, package: str, *, needed_for: str, key: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        remedy = f"install it: {install_command(package)}"
        raise ConfigError(
            f"{key}: {needed_for} needs the package {package}: {error}; {remedy}", path=key, remedy=remedy
        ) from error
