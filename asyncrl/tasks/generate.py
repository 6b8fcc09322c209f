"""Answers to tasks over a pool that is not trained, and the file they are written to.

While a file is unfinished, answers are JSON lines (for parquet, in ``NAME.unfinished.jsonl`` beside it), and
``NAME.settings.json`` has the settings they were made with. Another call with the same settings keeps them and answers
the rest. At the end they are sorted, and the settings are removed: a finished file is never changed again. The process
that writes a file holds a lock on its settings.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal, Self

from asyncrl.datasets.source import open_sources
from asyncrl.errors import ConfigError, EnvironmentFailure, InvalidDataError, RolloutsLostError, UserCodeError
from asyncrl.interfaces import EnvironmentFactory
from asyncrl.plugins import install_command
from asyncrl.rollout.chat import ChatRenderer
from asyncrl.rollout.pool import RolloutPool
from asyncrl.rollout.trajectory import REWARD_PARTS, Trajectory, derive_seed, prompt_rows, read_records, read_trajectory
from asyncrl.telemetry.run_directory import JsonLines, read_json_lines, rewrite_json_lines, to_json
from asyncrl.trainer.group import Score, fetch_numbers

_log = logging.getLogger(__name__)
_SUFFIXES = (".jsonl", ".parquet")
_AS_TEXT = ("task", "reward_parts")
"""Columns that parquet keeps as JSON text: their members differ from row to row."""


class AnswersFile:
    """Writes the answers to tasks, all ``samples`` of a task at once, to a ``.jsonl`` or ``.parquet`` file.

    ``settings`` are plain data that the answers depend on, ``done`` the numbers of the tasks that are answered.

    Raises:
        ConfigError: the path cannot be used, is a finished file, an unfinished one with other settings, or one that
            another process writes.
    """

    def __init__(self, path: Path, *, settings: Mapping[str, Any], samples: int) -> None:
        self.path = path
        if path.suffix not in _SUFFIXES:
            rule = f"--out = {str(path)!r} has a suffix that cannot be written"
            raise ConfigError(rule, path="--out", remedy=" or ".join(_SUFFIXES))
        if not path.absolute().parent.is_dir():
            rule = f"--out = {str(path)!r}: its folder does not exist"
            raise ConfigError(rule, path="--out", remedy="make the folder")
        if path.suffix == ".parquet":
            _parquet()  # before minutes of work
        self._journal = path if path.suffix == ".jsonl" else path.with_name(f"{path.name}.unfinished.jsonl")
        self._settings = path.with_name(f"{path.name}.settings.json")
        self._samples = samples
        with contextlib.ExitStack() as stack:
            self._held = stack.enter_context(_held(self._settings, path=path))
            plain, before = json.loads(json.dumps(to_json(settings))), self._held.read()
            if not before and path.exists():
                self._settings.unlink(missing_ok=True)  # another start may be refused at the same moment
                rule = f"--out = {str(path)!r} exists"
                raise ConfigError(rule, path="--out", remedy="give another, or remove it")
            found = read_json_lines(self._journal) if before else []
            if found:
                _compare(json.loads(before), plain, path=path)
            else:
                self._held.truncate(0)
                self._held.write(json.dumps(plain, indent=2) + "\n")
                self._held.flush()
            self.done = _answered(found, samples)
            rewrite_json_lines(self._journal, lambda record: record["task_number"] in self.done)
            self._lines = JsonLines(self._journal)
            stack.pop_all()

    def append(self, answers: Iterable[Mapping[str, Any]]) -> None:
        """Append the answers to one task. Does not wait for the disk."""
        for answer in answers:
            self._lines.append(answer)

    def finish(self, tasks: int) -> list[dict[str, Any]]:
        """Sort the answers to the first ``tasks``, write the final file and return them. Blocks.

        Raises:
            InvalidDataError: lines of the file are damaged, missing or there twice; it stays unfinished.
        """
        self._lines.close()
        wanted = [each for each in read_json_lines(self._journal) if each["task_number"] < tasks]
        if wrong := sorted({*range(tasks)} - _answered(wanted, self._samples)):
            raise InvalidDataError(
                f"{self._journal}: {len(wrong)} of {tasks} tasks, first task {wrong[0]}, have more or less than "
                f"{self._samples} whole answers: lines are damaged, or another program wrote some; the same command "
                "answers these tasks again"
            )
        answers = sorted(wanted, key=lambda each: (each["task_number"], each["sample"]))
        draft = self.path.with_name(f".{self.path.name}.part")
        if self.path.suffix == ".parquet":
            _write_parquet(answers, draft)
        else:
            text = "".join(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers)
            draft.write_text(text, encoding="utf-8")
        draft.replace(self.path)
        self._settings.unlink()  # first: without them it is finished, whatever is beside it
        if self._journal != self.path:
            self._journal.unlink()
        return answers

    def close(self) -> None:
        """Write what is left. Blocks. Idempotent."""
        try:
            self._lines.close()
        finally:
            self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_answers(path: Path) -> list[dict[str, Any]]:
    """Read the answers of an :class:`AnswersFile`, finished or not.

    Raises:
        ConfigError: the file does not exist, or has other records.
        InvalidDataError: it cannot be read.
    """
    answers = []
    for source in open_sources(path, key="--answers"):
        for number in range(len(source)):
            record = dict(source[number])
            if not isinstance(record.get("task_number"), int) or not isinstance(record.get("reward"), int | float):
                raise ConfigError(
                    f"{source.where(number)} is not an answer: it has no task_number and reward",
                    path="--answers",
                    remedy="give a file that asyncrl generate or asyncrl eval wrote with --out",
                )
            for column in _AS_TEXT:
                if isinstance(record.get(column), str):
                    record[column] = json.loads(record[column])
            answers.append(record)
    return answers


def _answered(records: Iterable[Mapping[str, Any]], samples: int) -> set[int]:
    """Return the tasks of which each of ``samples`` is there once."""
    found: dict[int, list[int]] = {}
    for record in records:
        found.setdefault(record["task_number"], []).append(record["sample"])
    return {number for number, rows in found.items() if sorted(rows) == [*range(samples)]}


def _held(settings: Path, *, path: Path) -> IO[str]:
    """Open the settings of the file ``path``, which are empty if it is new, and lock them until they are closed."""
    file = settings.open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        rule = f"--out = {str(path)!r} is being written by another process"
        raise ConfigError(rule, path="--out", remedy="wait for its end, or give another file") from None
    except OSError as error:  # a file system without locks
        _log.warning("%s cannot be locked (%s): see that no other process writes %s", settings, error.strerror, path)
    file.seek(0)
    return file


def _compare(found: Any, wanted: Mapping[str, Any], *, path: Path) -> None:
    before = found if isinstance(found, dict) else {}
    changed = sorted(name for name in {*before, *wanted} if before.get(name) != wanted.get(name))
    if changed:
        raise ConfigError(
            f"--out = {str(path)!r} is unfinished, and its answers were made with another {', '.join(changed)}",
            path="--out",
            remedy="use the same settings, or another file",
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


_TASKS_AT_ONCE = 64


class FailedTask:
    def __init__(self, number: int, failure: EnvironmentFailure | RolloutsLostError | UserCodeError) -> None:
        self.number = number
        self.failure = failure


async def answer_tasks(
    pool: RolloutPool,
    environments: EnvironmentFactory,
    numbers: Iterable[int],
    *,
    renderer: ChatRenderer,
    samples: int,
    seed: int,
    sampling: Mapping[str, Any],
    score: Score | None = None,
    split: Literal["train", "held_out"] = "held_out",
) -> AsyncGenerator[list[dict[str, Any]] | FailedTask, None]:
    """Yield the ``samples`` answers to each task as it is finished; a bounded number of tasks runs at a time. Close it.

    The pool must serve one version throughout. Sample i of task n depends on ``seed``, n and i alone. ``sampling`` are
    fields of :class:`asyncrl.interfaces.SamplingParams` that replace the pool's; ``score`` rewards the answers in place
    of the environment.
    """
    waiting = iter(numbers)

    async def answer(number: int) -> list[dict[str, Any]] | FailedTask:
        task = environments.task(number, split=split)
        rows = prompt_rows(
            [task] * samples,
            group_id=number,
            seeds=[derive_seed(seed, "eval", number, *([row] if row else [])) for row in range(samples)],
            purpose="eval",
            record=True,
            sampling=sampling,
        )
        try:
            answered = await pool.rollout(rows)
            header = await answered.header()
            scores = await fetch_numbers(score(answered), "scores") if score is not None else None
        except (EnvironmentFailure, RolloutsLostError, UserCodeError) as failure:
            return FailedTask(number, failure)
        trajectories = [read_trajectory(record) for record in read_records(header.meta_info["record"])]
        rewards = scores if scores is not None else [each.reward for each in trajectories]
        return [
            answer_record(number, row, each, renderer, reward=reward)
            for row, (each, reward) in enumerate(zip(trajectories, rewards, strict=True))
        ]

    async with asyncio.TaskGroup() as tasks:
        running = {tasks.create_task(answer(number)) for number in islice(waiting, _TASKS_AT_ONCE)}
        while running:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                if (number := next(waiting, None)) is not None:
                    running.add(tasks.create_task(answer(number)))
                yield each.result()


def answer_record(
    number: int, sample: int, trajectory: Trajectory, renderer: ChatRenderer, *, reward: float
) -> dict[str, Any]:
    """Return an answer as it is written to files.

    ``token_ids`` are all tokens of the conversation as the model saw them; where ``weight_versions`` is -1 a token was
    not sampled, and its log-prob is 0.
    """
    task = trajectory.task
    parts = trajectory.info.get(REWARD_PARTS)
    first = trajectory.turns[0].start if trajectory.turns else len(trajectory.token_ids)
    return {
        "task_number": number,
        "sample": sample,
        "data_source": str(task.get("data_source", "")),
        "task": task,
        "text": renderer.decode(trajectory.token_ids),
        "response": str(trajectory.turns[-1].message.get("content") or "") if trajectory.turns else "",
        "reward": reward,
        REWARD_PARTS: dict(parts) if isinstance(parts, Mapping) else {},
        "finish": trajectory.finish_reason,
        "truncated": any(turn.finish_reason == "length" for turn in trajectory.turns),
        "turns": len(trajectory.turns),
        "prompt_tokens": first,
        "sampled_tokens": trajectory.sampled_tokens,
        "token_ids": list(trajectory.token_ids),
        "log_probs": list(trajectory.behaviour_log_probs),
        "weight_versions": list(trajectory.weight_versions),
    }
