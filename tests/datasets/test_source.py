"""Sources of rows: files, folders and the hub, and the errors of missing ones."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from asyncrl.datasets import open_sources
from asyncrl.datasets.source import check_files
from asyncrl.errors import ConfigError, InvalidDataError


def test_json_lines_are_read_by_number(tmp_path: Path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"n": 0}\r\n\n   \n{"n": 1, "text": "\xe2\x80\xa8"}\n{"n": 2}')
    (source,) = open_sources(file)
    assert len(source) == 3
    assert [source[number]["n"] for number in (2, 0, 1)] == [2, 0, 1]
    assert source[1]["text"] == "\u2028"  # a line separator inside a text ends no line
    assert source.where(1) == f"{file}:4"


def test_an_array_of_rows_is_read(tmp_path: Path):
    file = tmp_path / "a.json"
    file.write_text(json.dumps([{"n": 0}, {"n": 1}], indent=1))
    (source,) = open_sources(str(file))
    assert [source[number]["n"] for number in range(len(source))] == [0, 1]


def test_an_empty_file_has_no_rows(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b"")
    assert [len(source) for source in open_sources(tmp_path / "a.jsonl")] == [0]


def test_files_of_folders_and_patterns_are_sorted_by_name(lines, tmp_path: Path):
    for name in ("b", "a", "c"):
        lines([{"name": name}], f"{name}.jsonl")
    (tmp_path / "notes.txt").write_text("no rows")
    for files in (tmp_path, tmp_path / "*.jsonl", [tmp_path / "a.jsonl", tmp_path / "[bc].jsonl"]):
        assert [source[0]["name"] for source in open_sources(files)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.parquet", "no such file"),
        ("*.nothing", "no such file"),
        ("empty", "has no files of rows"),
        ("notes.txt", "the kind of the file"),
    ],
)
def test_paths_without_rows_are_refused(tmp_path: Path, name: str, message: str):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("no rows")
    with pytest.raises(ConfigError, match=message) as caught:
        open_sources(tmp_path / name, key="env.options.files")
    assert caught.value.path == "env.options.files"
    assert ".parquet" in caught.value.remedy
    if name != "notes.txt":
        with pytest.raises(ConfigError, match=message):
            check_files(str(tmp_path / name), key="x")


def test_parquet_gives_its_rows(tmp_path: Path, problems):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = problems(5)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=2)
    (source,) = open_sources(tmp_path / "a.parquet")
    assert len(source) == 5
    assert [source[number] for number in (4, 0, 1, 2, 3, 4, 1)] == [rows[n] for n in (4, 0, 1, 2, 3, 4, 1)]


def test_a_damaged_parquet_file_is_refused(tmp_path: Path):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(InvalidDataError, match=r"a\.parquet cannot be read as parquet"):
        open_sources(tmp_path / "a.parquet")


def test_a_missing_package_is_named_with_its_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match=r"needs the package pyarrow.*pip install 'pyarrow") as caught:
        open_sources(tmp_path / "a.parquet", key="sft.data")
    assert caught.value.path == "sft.data"


class Hub(types.ModuleType):
    """Stands in for the package datasets."""

    class DatasetDict(dict[str, Any]):
        pass

    def __init__(self) -> None:
        super().__init__("datasets")
        self.asked: list[Any] = []

    def load_dataset(self, path: str, **options: str) -> list[dict[str, Any]]:
        self.asked.append((path, options))
        if path == "no/body":
            raise FileNotFoundError("the hub has no such data set\nand more")
        return [{"n": 0}, {"n": 1}]

    def load_from_disk(self, name: str) -> Any:
        return Hub.DatasetDict(train=[{"n": 7}], test=[{"n": 8}])


def test_the_hub_receives_name_configuration_and_split(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    hub = Hub()
    monkeypatch.setitem(sys.modules, "datasets", hub)
    (source,) = open_sources("hub:openai/gsm8k?name=main&split=test")
    assert (len(source), source[1], source.where(1)) == (2, {"n": 1}, "openai/gsm8k (test), row 1")
    assert hub.asked == [("openai/gsm8k", {"name": "main", "split": "test"})]
    (tmp_path / "dataset_dict.json").write_text("{}")  # what save_to_disk leaves
    (saved,) = open_sources(tmp_path)
    assert saved[0] == {"n": 7}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("hub:no/body", "cannot be loaded: FileNotFoundError: the hub has no such data set"),
        ("hub:some/body?spilt=test", "has the unknown option 'spilt'"),
        ("hub:", "names no data set"),
    ],
)
def test_hub_names_that_cannot_be_loaded_are_refused(monkeypatch: pytest.MonkeyPatch, files: str, message: str):
    monkeypatch.setitem(sys.modules, "datasets", Hub())
    with pytest.raises(ConfigError, match=message):
        open_sources(files)


@pytest.mark.slow
def test_a_saved_folder_is_read_by_the_real_package(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_list([{"n": 1, "said": [{"role": "user", "content": "x"}]}])
    one.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=one, test=one.map(lambda row: {"n": 8})).save_to_disk(str(tmp_path / "both"))
    for files, number in ((tmp_path / "one", 1), (tmp_path / "both", 1), (f"hub:{tmp_path / 'both'}?split=test", 8)):
        (source,) = open_sources(files)
        assert [source[place] for place in range(len(source))] == [
            {"n": number, "said": [{"role": "user", "content": "x"}]}
        ]
    with pytest.raises(ConfigError, match="has no split 'dev'"):
        open_sources(f"hub:{tmp_path / 'both'}?split=dev")
