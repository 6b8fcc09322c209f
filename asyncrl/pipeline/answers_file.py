"""The file that answers go to: JSON lines or parquet, and gone on with after an interruption.

While it grows, answers are JSON lines (of parquet, in ``NAME.unfinished.jsonl`` beside it), and ``NAME.settings.json``
says what they were made with. Another call with the same settings keeps what is there and answers the rest. When all
are there they are put in order, and the settings go: a finished file is never touched again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from asyncrl.datasets.source import open_sources
from asyncrl.errors import ConfigError
from asyncrl.parts import install_command
from asyncrl.telemetry.json_form import to_json
from asyncrl.telemetry.json_lines import JsonLines, read_json_lines, rewrite_json_lines

__all__ = ["AnswersFile", "read_answers"]

_SUFFIXES = (".jsonl", ".parquet")
_AS_TEXT = ("task", "reward_parts")
"""Columns that parquet keeps as JSON text: their members differ from row to row."""


class AnswersFile:
    """Takes the answers to tasks, all samples of one at once.

    Args:
        path: ``.jsonl`` or ``.parquet``; its folder exists.
        settings: what the answers depend on; plain data.
        samples: answers of a task.

    Attributes:
        done: numbers of the tasks that are answered already.

    Raises:
        ConfigError: the path cannot be used, is a finished file, or an unfinished one with other settings.
    """

    def __init__(self, path: Path, *, settings: Mapping[str, Any], samples: int) -> None:
        self.path = path
        if path.suffix not in _SUFFIXES:
            told = f"--out = {str(path)!r} is of no kind that is written"
            raise ConfigError(told, path="--out", remedy=" or ".join(_SUFFIXES))
        if not path.absolute().parent.is_dir():
            told = f"--out = {str(path)!r}: its folder does not exist"
            raise ConfigError(told, path="--out", remedy="make the folder")
        if path.suffix == ".parquet":
            _parquet()  # before minutes of work
        self._journal = path if path.suffix == ".jsonl" else path.with_name(f"{path.name}.unfinished.jsonl")
        self._settings = path.with_name(f"{path.name}.settings.json")
        plain = json.loads(json.dumps(to_json(settings)))
        counts: Counter[int] = Counter()
        if self._settings.is_file():
            counts.update(record["task_number"] for record in read_json_lines(self._journal))
        elif path.exists():
            told = f"--out = {str(path)!r} is there already"
            raise ConfigError(told, path="--out", remedy="give another, or remove it")
        if counts:
            _compare(json.loads(self._settings.read_text(encoding="utf-8")), plain, path=path)
        self._settings.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
        self.done = {number for number, found in counts.items() if found == samples}
        rewrite_json_lines(self._journal, lambda record: record["task_number"] in self.done)
        self._lines = JsonLines(self._journal)

    def append(self, answers: Iterable[Mapping[str, Any]]) -> None:
        """Take the answers of one task. Does not wait for the disk."""
        for answer in answers:
            self._lines.append(answer)

    def finish(self) -> list[dict[str, Any]]:
        """All answers are there: put them in order, and forget that it was unfinished. Blocks. Returns them."""
        self._lines.close()
        answers = sorted(read_json_lines(self._journal), key=lambda each: (each["task_number"], each["sample"]))
        draft = self.path.with_name(f".{self.path.name}.part")
        if self.path.suffix == ".parquet":
            _write_parquet(answers, draft)
        else:
            text = "".join(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers)
            draft.write_text(text, encoding="utf-8")
        draft.replace(self.path)
        if self._journal != self.path:
            self._journal.unlink()
        self._settings.unlink()
        return answers

    def close(self) -> None:
        """Write what is left. Blocks. Idempotent."""
        self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_answers(path: Path) -> list[dict[str, Any]]:
    """The answers in a file of :class:`AnswersFile`, finished or not.

    Raises:
        ConfigError: there is none.
        InvalidDataError: it holds something else.
    """
    answers = []
    for source in open_sources(path, key="--answers"):
        for number in range(len(source)):
            record = dict(source[number])
            if not isinstance(record.get("task_number"), int) or not isinstance(record.get("reward"), int | float):
                raise ConfigError(
                    f"{source.where(number)} is no answer: it has no task_number and reward",
                    path="--answers",
                    remedy="give a file that asyncrl generate or asyncrl eval wrote with --out",
                )
            for column in _AS_TEXT:
                if isinstance(record.get(column), str):
                    record[column] = json.loads(record[column])
            answers.append(record)
    return answers


def _compare(found: Any, wanted: Mapping[str, Any], *, path: Path) -> None:
    before = found if isinstance(found, dict) else {}
    changed = sorted(name for name in {*before, *wanted} if before.get(name) != wanted.get(name))
    if changed:
        raise ConfigError(
            f"--out = {str(path)!r} is unfinished, and was begun with another {', '.join(changed)}",
            path="--out",
            remedy="go on with the same settings, or give another file",
        )


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        remedy = f"install it: {install_command('pyarrow')}, or write .jsonl"
        raise ConfigError(f"--out: parquet needs the package pyarrow; {remedy}", path="--out", remedy=remedy) from error
    return pyarrow


def _write_parquet(answers: Sequence[Mapping[str, Any]], path: Path) -> None:
    pa = _parquet()
    rows = [{**each, **{name: json.dumps(each.get(name)) for name in _AS_TEXT}} for each in answers]
    whole, real = pa.list_(pa.int32()), pa.list_(pa.float32())
    types = {"token_ids": whole, "log_probs": real, "weight_versions": whole}
    table = pa.Table.from_pylist(rows)
    for name, kind in types.items():
        if name in table.column_names:
            at = table.column_names.index(name)
            table = table.set_column(at, name, table.column(name).cast(kind))
    pa.parquet.write_table(table, path)
