"""Sources of rows: files of JSON lines and parquet, folders of them, URLs, and the Hugging Face hub.

    train.parquet   data/*.jsonl   data/   s3://bucket/train.parquet   hub:openai/gsm8k?name=main&split=train

A source has a length and reads any record by its number, so a shuffled run reads rows on demand. Parquet needs the
package pyarrow, and the hub the package datasets (``pip install asyncrl[hub]`` installs both).
"""

from __future__ import annotations

import glob
import importlib
import json
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias
from urllib.parse import parse_qsl

import numpy as np

from asyncrl.errors import ConfigError, InvalidDataError
from asyncrl.plugins import install_command
from asyncrl.storage import is_url, local_copy

if TYPE_CHECKING:
    import pyarrow as pa


_NEWLINE = 0x0A
_BLANK = b" \t\r\n"
_BLOCK_BYTES = 2**24
_HUB = "hub:"
_BLOCK_ROWS = 1024
_SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".json")
_HUB_OPTIONS = ("name", "split", "revision", "data_files", "data_dir")

Record: TypeAlias = dict[str, Any]
"""One row of a file: columns by name."""


class RowSource(Protocol):
    """Records by number, 0 to ``len - 1``."""

    @property
    def name(self) -> str:
        """Its name in messages: a path, or the name on the hub."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Record:
        """Return one record; the InvalidDataError for an unreadable one names neither file nor number."""
        ...

    def where(self, number: int) -> str:
        """Return the file and place of a record, for messages."""
        ...


class JsonLinesSource:
    """A file with one JSON object per line (blank lines are skipped), or with one array of objects.

    Opening finds only the offsets of lines, and each line is parsed on demand; an array is parsed as a whole.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._records: list[Any] | None = None
        try:
            with path.open("rb") as file:
                empty = not file.read(1)
                self._map = None if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise InvalidDataError(f"{path} cannot be read: {error.strerror}") from error
        if self._map is not None and self._map[:64].lstrip(_BLANK)[:1] == b"[":
            self._records = self._array()
            return
        self._starts, self._ends, self._numbers = self._lines()

    def __len__(self) -> int:
        return len(self._records) if self._records is not None else len(self._starts)

    def __getitem__(self, number: int) -> dict[str, Any]:
        if self._records is not None:
            record = self._records[number]
        else:
            assert self._map is not None
            try:
                record = json.loads(self._map[self._starts[number] : self._ends[number]].decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                raise InvalidDataError(f"not UTF-8 text: {error}") from error
            except (ValueError, RecursionError) as error:  # also an integer of too many digits
                raise InvalidDataError(f"not JSON ({error})") from error
        if not isinstance(record, dict):
            raise InvalidDataError(f"a row must be an object with columns, not a {type(record).__name__}")
        return record

    def where(self, number: int) -> str:
        """``FILE:LINE``, from 1; ``FILE, row NUMBER``, from 0, of an array."""
        return f"{self.name}, row {number}" if self._records is not None else f"{self.name}:{self._numbers[number]}"

    def _array(self) -> list[Any]:
        assert self._map is not None
        try:
            records = json.loads(self._map[:])
        except (ValueError, RecursionError) as error:
            raise InvalidDataError(f"{self.name} begins like an array of rows but is not JSON: {error}") from error
        if not isinstance(records, list):
            raise InvalidDataError(f"{self.name} begins like an array of rows but is not one")
        return records

    def _lines(self) -> tuple[list[int], list[int], list[int]]:
        """Return the start, the end and the number in the file, from 1, of each line that is not blank."""
        starts, ends, numbers = [], [], []
        start = 0
        for number, end in enumerate(self._line_ends(), start=1):
            assert self._map is not None
            if self._map[start : min(end, start + 64)].strip(_BLANK) or self._map[start:end].strip(_BLANK):
                starts.append(start)
                ends.append(end)
                numbers.append(number)
            start = end + 1
        return starts, ends, numbers

    def _line_ends(self) -> list[int]:
        if self._map is None:
            return []
        size = len(self._map)
        found: list[int] = []
        for offset in range(0, size, _BLOCK_BYTES):
            block = np.frombuffer(self._map[offset : offset + _BLOCK_BYTES], dtype=np.uint8)
            found += (np.flatnonzero(block == _NEWLINE) + offset).tolist()
        return found if self._map[size - 1] == _NEWLINE else [*found, size]


class ParquetSource:
    """The rows of a parquet file, which are kept in memory in Arrow's format."""

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
            # Sequential reads convert a block of rows at once, which is twenty times as fast.
            rows = _BLOCK_ROWS if place == len(self._block) > 0 else 1
            self._first, self._block, place = number, self._table.slice(number, rows).to_pylist(), 0
        return self._block[place]

    def where(self, number: int) -> str:
        return f"{self.name}, row {number}"


class HubSource:
    """One split of a data set on the Hugging Face hub (``owner/name``), or of a folder from ``Dataset.save_to_disk``.

    ``options`` are those of ``datasets.load_dataset``: name, split (``train`` by default), revision, data_files,
    data_dir.
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
        except Exception as error:  # the library, the network and the data set may raise anything
            raise ConfigError(
                f"{key}: the data set {data!r} cannot be loaded: {type(error).__name__}: {_first_line(error)}",
                path=key,
                remedy="check its name, split and revision, and the access to the hub (HF_ENDPOINT, HF_TOKEN)",
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
        return f"{self.name}, row {number}"


def open_sources(files: str | Path | Sequence[str | Path], *, key: str = "files") -> list[RowSource]:
    """Open all sources in their order; files of a folder or pattern are sorted by name.

    Args:
        files: paths or URLs of files, folders and patterns with ``*``, or ``hub:owner/name?split=train``.
        key: dotted key of the configuration, for messages.

    Raises:
        ConfigError: a path matches no file, its kind is unknown, or a package is missing.
        InvalidDataError: a file is damaged.
    """
    given = [files] if isinstance(files, str | Path) else list(files)
    if not given:
        raise ConfigError(f"{key} names no file", path=key, remedy='give a path, or "hub:owner/name?split=train"')
    return [source for each in given for source in _open(str(each), key=key)]


def check_files(files: str | Path | Sequence[str | Path], *, key: str) -> None:
    """Raise ConfigError unless all ``files`` exist, without reading them or contacting the hub; URLs are fetched."""
    for each in [files] if isinstance(files, str | Path) else files:
        if not str(each).startswith(_HUB):
            _found(str(each), key=key)


def _open(text: str, *, key: str) -> list[RowSource]:
    if text.startswith(_HUB):
        return [_open_hub(text.removeprefix(_HUB), key=key)]
    paths = _found(text, key=key)
    return [_open_file(path, key=key) if path.is_file() else HubSource(str(path), key=key) for path in paths]


def _found(text: str, *, key: str) -> list[Path]:
    """Return the files of a path, folder, pattern or URL, or a folder that the package datasets wrote."""
    path = local_copy(text, key=key) if is_url(text) else Path(text).expanduser()
    if path.is_dir():
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            return [path]
        paths = sorted(each for each in path.iterdir() if each.suffix in _SUFFIXES)
        what = f"the folder {text!r} has no files of rows"
    elif path.is_file():
        paths, what = [path], ""
    else:
        paths = [Path(each) for each in sorted(glob.glob(str(path), recursive=True)) if Path(each).is_file()]  # noqa: PTH207  absolute patterns too
        what = f"{text!r}: no such file"
    if not paths:
        raise ConfigError(
            f"{key}: {what}",
            path=key,
            remedy=f'a path, a URL, a pattern or a folder of {", ".join(_SUFFIXES)}; or "hub:owner/name?split=train"',
        )
    return paths


def _open_file(path: Path, *, key: str) -> RowSource:
    if path.suffix == ".parquet":
        return ParquetSource(path, key=key)
    if path.suffix in _SUFFIXES:
        return JsonLinesSource(path)
    raise ConfigError(
        f"{key}: the kind of the file {str(path)!r} is unknown", path=key, remedy=f"one of {', '.join(_SUFFIXES)}"
    )


def _open_hub(text: str, *, key: str) -> RowSource:
    name, _, query = text.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := sorted(options.keys() - set(_HUB_OPTIONS)):
        raise ConfigError(
            f"{key}: {_HUB}{text} has the unknown option {unknown[0]!r}",
            path=key,
            remedy=f"one of {', '.join(_HUB_OPTIONS)}",
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
