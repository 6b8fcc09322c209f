"""Tasks of the package ``reasoning-gym``: over a hundred procedural data sets, each with its own scorer.

An episode has one turn: the model answers the question between ``<answer>`` tags, and the data set's scorer returns the
reward (0..1), in a process of its own (:mod:`asyncrl.rewards.gym`).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

from asyncrl.envs.calculator import is_held_out, question_messages
from asyncrl.errors import ConfigError, EnvironmentFailure
from asyncrl.interfaces import Message, Step, Task, Tool
from asyncrl.rewards.rules import Answer, FunctionRule
from asyncrl.runtime import in_thread

if TYPE_CHECKING:
    from collections.abc import Sequence


_STRIDE = 16
"""Distance between the first candidates of two tasks: nearly always enough to find an item of the split."""
_SCORE = "asyncrl.rewards.gym:score"
_DEADLINE_S = 60.0

INSTRUCTIONS = "Think step by step. Then write the final answer, and nothing else, between <answer> and </answer>."


class ReasoningGymEnvironment:
    """One question, one answer."""

    def __init__(self, dataset: Any, rule: FunctionRule, *, instructions: str, answer_tag: str) -> None:
        self._dataset = dataset  # a reasoning_gym.ProceduralDataset, which is not annotated
        self._rule = rule
        self._instructions = instructions
        self._answer_tag = answer_tag
        self._entry: dict[str, Any] | None = None

    @property
    def tools(self) -> Sequence[Tool]:
        return ()

    async def reset(self, task: Task) -> Sequence[Message]:
        entry: dict[str, Any] = await in_thread(self._dataset.__getitem__, task["item"])
        if entry["question"] != task["question"]:
            raise EnvironmentFailure(
                f"item {task['item']} is not the question of the task, which came from another seed, configuration or "
                "version of reasoning-gym"
            )
        self._entry = entry
        return question_messages(task["question"], instructions=self._instructions)

    async def step(self, reply: Message) -> Step:
        if self._entry is None:
            raise EnvironmentFailure("step before reset: the environment has no task")
        answer = self._answer(str(reply.get("content") or ""))
        if answer is None:
            return Step(done=True, info={"answered": False})
        entry = {"entry": self._entry}
        verdict = await self._rule.judge(
            Answer(data_source="reasoning_gym", solution_str=answer, ground_truth=None, extra_info=entry)
        )
        return Step(reward=verdict.score, done=True, info={"answered": True})

    async def close(self) -> None:
        self._entry = None

    def _answer(self, content: str) -> str | None:
        """Return the text in the last pair of tags (without a tag, all of it), or None if the tags are missing."""
        if not self._answer_tag:
            return content.strip()
        _, opened, rest = content.rpartition(f"<{self._answer_tag}>")
        answer, closed, _ = rest.partition(f"</{self._answer_tag}>")
        return answer.strip() if opened and closed else None


class ReasoningGymFactory:
    """Items of one data set; the hash of its text assigns each question to one split, so that they are disjoint.

    No two held-out tasks are the same item until all were used.

    Args:
        dataset: its name in reasoning-gym (``chain_sum``, ``leg_counting`` ...).
        size: number of its items; larger task numbers wrap around. Most data sets generate items on demand.
        instructions: system message; none if empty.
        answer_tag: tag around the answer; if empty, the whole reply is the answer.
        processes: largest number of processes that score. Answers wait for one within ``env.deadline_s``.
        config: options of the data set.
    """

    def __init__(
        self,
        *,
        dataset: str,
        seed: int = 0,
        size: int = 1_000_000,
        instructions: str = INSTRUCTIONS,
        answer_tag: str = "answer",
        processes: int = min(4, os.cpu_count() or 1),
        **config: Any,
    ) -> None:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise ConfigError(
                "the environment reasoning_gym needs the package reasoning-gym",
                path="env",
                remedy="pip install asyncrl[envs]",
            ) from error
        if dataset not in DATASETS:
            import difflib

            near = difflib.get_close_matches(dataset, DATASETS, n=3)
            raise ConfigError(
                f"reasoning-gym has no data set {dataset!r}",
                path="env.options.dataset",
                remedy=f"did you mean {' or '.join(near)}?" if near else f"one of {', '.join(sorted(DATASETS))}",
            )
        try:
            self._dataset: Any = reasoning_gym.create_dataset(dataset, seed=seed, size=size, **config)
        except (TypeError, AssertionError, ValueError) as error:
            raise ConfigError(
                f"reasoning-gym cannot make {dataset!r} with {config}: {error}",
                path="env.options",
                remedy=f"options of {DATASETS[dataset][1].__name__}",
            ) from error
        options = {"seed": seed, "size": size, **config}
        self._rule = FunctionRule(_SCORE, deadline_s=_DEADLINE_S, processes=processes, dataset=dataset, config=options)
        self._name = dataset
        self._size = size
        self._instructions = instructions
        self._answer_tag = answer_tag
        self._held_out: dict[int, Task] = {}  # by item, in the order of their numbers
        self._all_held_out = False

    def task(self, index: int, *, split: Literal["train", "held_out"]) -> Task:
        task = self._find(index, split) if split == "train" else self._held_out_task(index)
        if task is not None:
            return dict(task)
        raise ConfigError(
            f"no question of the {self._size} items of {self._name!r} belongs to the split {split!r}",
            path="env.options.size",
            remedy="a larger size, or harder options: this data set repeats its questions",
        )

    def _held_out_task(self, index: int) -> Task | None:
        while index >= len(self._held_out) and not self._all_held_out:  # in turn: none has the item of an earlier one
            task = self._find(len(self._held_out), "held_out")
            if task is None:
                self._all_held_out = True
            else:
                self._held_out[task["item"]] = task
        return [*self._held_out.values()][index % len(self._held_out)] if self._held_out else None

    def _find(self, index: int, split: Literal["train", "held_out"]) -> Task | None:
        """Return the first item of the split from a start that depends on ``index``, held-out ones only once."""
        stride = min(_STRIDE, self._size)
        start = index * stride + index * stride // self._size  # each pass begins at another item
        for item in (number % self._size for number in range(start, start + self._size)):
            if item in self._held_out:
                continue
            entry = self._dataset[item]
            if is_held_out(entry["question"]) == (split == "held_out"):
                return {
                    "dataset": self._name,
                    "item": item,
                    "question": entry["question"],
                    "answer": str(entry["answer"]),
                }
        return None

    def make(self) -> ReasoningGymEnvironment:
        return ReasoningGymEnvironment(
            self._dataset, self._rule, instructions=self._instructions, answer_tag=self._answer_tag
        )

    async def aclose(self) -> None:
        """End the processes that score."""
        await self._rule.close()

    def demonstration(self, index: int) -> list[Message]:
        raise ConfigError(
            "the environment reasoning_gym has no demonstrations",
            path="sft",
            remedy="start from a pretrained model, without a supervised warm start",
        )
