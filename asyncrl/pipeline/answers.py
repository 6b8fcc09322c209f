"""Answers to tasks, token by token, over a pool that serves and is not trained."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any, Literal

from asyncrl.agents.chat import ChatRenderer
from asyncrl.errors import EnvironmentFailure
from asyncrl.interfaces import EnvironmentFactory
from asyncrl.pipeline.group_stages import numbers_of
from asyncrl.pipeline.reference import Score
from asyncrl.rollout.pool import RolloutPool
from asyncrl.rollout.prompts import derive_seed, prompt_rows
from asyncrl.rollout.record import read_records, read_trajectory
from asyncrl.rollout.trajectory import REWARD_PARTS, Trajectory

__all__ = ["FailedTask", "answer_record", "answer_tasks"]

_TASKS_AT_ONCE = 64


class FailedTask:
    """A task that its environment could not be asked about, and why."""

    def __init__(self, number: int, failure: EnvironmentFailure) -> None:
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
    """The ``samples`` answers to each task, as each task is done; a bounded number of tasks is under way. Close it.

    Args:
        pool: serves one version throughout.
        environments: poses the tasks.
        numbers: of the tasks in their split.
        renderer: of the pool's model.
        samples: answers to each task.
        seed: sample i of task n depends on it, n and i alone.
        sampling: fields of :class:`asyncrl.interfaces.SamplingParams` that replace the pool's.
        score: gives the answers their rewards, in place of the environment.
        split: of the tasks.
    """
    waiting = iter(numbers)

    async def answer(number: int) -> list[dict[str, Any]] | FailedTask:
        task = environments.task(number, split=split)
        rows = prompt_rows(
            [task] * samples,
            slot=number,
            seeds=[derive_seed(seed, "eval", number, *([row] if row else [])) for row in range(samples)],
            purpose="eval",
            record=True,
            sampling=sampling,
        )
        try:
            answered = await pool.rollout(rows)
            header = await answered.header()
        except EnvironmentFailure as failure:
            return FailedTask(number, failure)
        trajectories = [read_trajectory(record) for record in read_records(header.meta_info["record"])]
        rewards = [each.reward for each in trajectories]
        if score is not None:
            rewards = await numbers_of(score(answered), "scores")
        return [
            answer_record(number, row, each, renderer, reward=reward)
            for row, (each, reward) in enumerate(zip(trajectories, rewards, strict=True))
        ]

    async with asyncio.TaskGroup() as tasks:
        running = {tasks.create_task(answer(number)) for number, _ in zip(waiting, range(_TASKS_AT_ONCE), strict=False)}
        while running:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                if (number := next(waiting, None)) is not None:
                    running.add(tasks.create_task(answer(number)))
                yield each.result()


def answer_record(
    number: int, sample: int, trajectory: Trajectory, renderer: ChatRenderer, *, reward: float
) -> dict[str, Any]:
    """One answer as it is written to files.

    ``token_ids`` are all tokens of the conversation as the model saw them; where ``weight_versions`` is -1 a token was
    not sampled, and its log-prob is 0.
    """
    task = trajectory.task
    first = trajectory.turns[0].start if trajectory.turns else len(trajectory.token_ids)
    return {
        "task_number": number,
        "sample": sample,
        "data_source": str(task.get("data_source", "")),
        "task": task,
        "text": renderer.decode(trajectory.token_ids),
        "response": str(trajectory.turns[-1].message.get("content") or "") if trajectory.turns else "",
        "reward": reward,
        REWARD_PARTS: dict(trajectory.info.get(REWARD_PARTS, {})),
        "finish": trajectory.finish_reason,
        "truncated": any(turn.finish_reason == "length" for turn in trajectory.turns),
        "turns": len(trajectory.turns),
        "prompt_tokens": first,
        "sampled_tokens": trajectory.sampled_tokens,
        "token_ids": list(trajectory.token_ids),
        "log_probs": list(trajectory.behaviour_log_probs),
        "weight_versions": list(trajectory.weight_versions),
    }
