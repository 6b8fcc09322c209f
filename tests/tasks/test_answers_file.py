"""Answers on their way to a file: nothing twice, nothing lost, nothing overwritten."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncrl.tasks.generate
from asyncrl.config import Config
from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.errors import ConfigError, EnvironmentFailure, InvalidDataError, RolloutsLostError
from asyncrl.rollout.trajectory import write_records
from asyncrl.tasks.generate import AnswersFile, FailedTask, answer_tasks, read_answers
from asyncrl.tasks.run import evaluate, generate

SETTINGS = {"seed": 0, "temperature": 1.0}


def answers(task: int) -> list[dict[str, Any]]:
    return [
        {
            "task_number": task,
            "sample": sample,
            "task": {"n": task},
            "reward": 0.5,
            "reward_parts": {"format": 1.0},
            "token_ids": [1, 2],
            "log_probs": [0.0, -1.5],
            "weight_versions": [-1, 0],
        }
        for sample in range(2)
    ]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_an_interrupted_file_is_gone_on_with_and_put_in_order(tmp_path: Path, suffix: str):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    path = tmp_path / f"answers{suffix}"
    with AnswersFile(path, settings=SETTINGS, samples=2) as file:
        assert file.done == set()
        file.append(answers(3))
        file.append(answers(1)[:1])  # killed in the middle of a task
    with AnswersFile(path, settings=SETTINGS, samples=2) as file:
        assert file.done == {3}
        for task in (2, 1, 0):
            file.append(answers(task))
        file.append(answers(4))
        finished = file.finish(4)  # an earlier call wanted more
    assert finished == [answer for task in range(4) for answer in answers(task)]
    assert [found["task_number"] for found in read_answers(path)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert read_answers(path)[6] == answers(3)[0]
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_other_settings_are_refused_by_name(tmp_path: Path):
    path = tmp_path / "answers.jsonl"
    AnswersFile(path, settings={**SETTINGS, "seed": 5}, samples=2).close()  # nothing is lost with this one
    with AnswersFile(path, settings=SETTINGS, samples=2) as file:
        file.append(answers(0))
    with pytest.raises(ConfigError, match="made with another temperature"):
        AnswersFile(path, settings={**SETTINGS, "temperature": 0.5}, samples=1)


def test_a_finished_file_is_never_touched(tmp_path: Path):
    path = tmp_path / "answers.jsonl"
    path.write_text("{}\n")
    with pytest.raises(ConfigError, match="exists"):
        AnswersFile(path, settings=SETTINGS, samples=1)
    assert path.read_text() == "{}\n"


def test_two_starts_that_a_finished_file_refuses_at_once_are_told_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "answers.jsonl"
    path.write_text("{}\n")
    held = asyncrl.tasks.generate._held

    def other_first(settings: Path, **options: Any) -> Any:
        file = held(settings, **options)
        settings.unlink()  # by the other, which held the lock before
        return file

    monkeypatch.setattr(asyncrl.tasks.generate, "_held", other_first)
    with pytest.raises(ConfigError, match="exists"):
        AnswersFile(path, settings=SETTINGS, samples=1)


def test_a_file_that_another_process_writes_is_refused(tmp_path: Path):
    path = tmp_path / "answers.jsonl"
    with AnswersFile(path, settings=SETTINGS, samples=2) as file:
        file.append(answers(0))
        with pytest.raises(ConfigError, match="is being written by another process"):
            AnswersFile(path, settings=SETTINGS, samples=2)
    with AnswersFile(path, settings=SETTINGS, samples=2) as file:
        assert file.done == {0}


@pytest.mark.parametrize("wrong", ["{damaged\n", json.dumps(answers(1)[0]) + "\n"], ids=["damaged", "twice"])
def test_a_file_with_lines_damaged_or_there_twice_is_not_finished(tmp_path: Path, wrong: str):
    path = tmp_path / "answers.jsonl"
    with AnswersFile(path, settings=SETTINGS, samples=2) as file:
        file.append([*answers(0), answers(1)[0]])
        file._lines.close()
        with path.open("a") as other:
            other.write(wrong)
        with pytest.raises(InvalidDataError, match="1 of 2 tasks, first task 1, have more or less than 2"):
            file.finish(2)
    with AnswersFile(path, settings=SETTINGS, samples=2) as file:
        assert file.done == {0}
        file.append(answers(1))
        assert len(file.finish(2)) == 4


def test_a_crash_at_the_end_leaves_a_finished_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("pyarrow")
    path = tmp_path / "answers.parquet"
    with AnswersFile(path, settings=SETTINGS, samples=2) as file:
        file.append(answers(0))
        with monkeypatch.context() as patch:
            unlink, removed = Path.unlink, list[Path]()
            patch.setattr(Path, "unlink", lambda each: (removed or unlink(each), removed.append(each)))
            file.finish(1)
    with pytest.raises(ConfigError, match="exists"):
        AnswersFile(path, settings={**SETTINGS, "seed": 1}, samples=2)
    assert len(read_answers(path)) == 2


@pytest.mark.parametrize(
    ("name", "told"),
    [("answers.csv", "suffix that cannot be written"), ("absent/answers.jsonl", "folder does not exist")],
)
def test_what_cannot_be_written_is_told(tmp_path: Path, name: str, told: str):
    with pytest.raises(ConfigError, match=told):
        AnswersFile(tmp_path / name, settings=SETTINGS, samples=1)


def test_a_file_of_something_else_is_told(tmp_path: Path):
    (tmp_path / "x.jsonl").write_text(json.dumps({"prompt": "x"}))
    with pytest.raises(ConfigError, match=r"x\.jsonl:1 is not an answer"):
        read_answers(tmp_path / "x.jsonl")


@pytest.mark.parametrize("command", [evaluate, generate])
def test_less_than_one_task_is_refused_before_the_file_is_touched(
    command: Any, small_config: Callable[..., Config], tmp_path: Path
):
    with pytest.raises(ConfigError, match="--tasks = 0"):
        command(small_config(), tasks=0, out=tmp_path / "answers.jsonl")
    assert [*tmp_path.glob("answers*")] == []


class FailingPool:
    """Fails the rollouts of the tasks in ``failures``; the others answer with no rows."""

    def __init__(self, failures: dict[int, Exception]) -> None:
        self.failures = failures

    async def rollout(self, prompts: DataProto) -> DataProtoFuture:
        if (failure := self.failures.get(prompts.non_tensor_batch["task"][0]["number"])) is not None:
            raise failure
        return DataProtoFuture.of(
            DataProto.from_dict({"rewards": torch.zeros(1)}, meta_info={"record": write_records([])})
        )


class Numbers:
    def task(self, index: int, *, split: str) -> dict[str, Any]:
        return {"number": index}


def answering(pool: Any, tasks: int) -> Any:
    return answer_tasks(
        pool,
        Numbers(),  # type: ignore[arg-type]
        range(tasks),
        renderer=None,  # type: ignore[arg-type]
        samples=1,
        seed=0,
        sampling={},
    )


async def test_each_of_more_tasks_than_run_at_a_time_is_answered_once():
    failures: dict[int, Exception] = {number: EnvironmentFailure("ill") for number in range(200)}
    assert sorted([each.number async for each in answering(FailingPool(failures), 200)]) == [*range(200)]


async def test_a_task_that_fails_or_loses_its_replicas_costs_no_other():
    failures = {1: EnvironmentFailure("ill"), 3: RolloutsLostError("lost")}
    outcomes = [each async for each in answering(FailingPool(failures), 5)]
    assert len(outcomes) == 5
    assert {each.number: each.failure for each in outcomes if isinstance(each, FailedTask)} == failures
