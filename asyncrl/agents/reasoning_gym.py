"""Tasks of the package ``reasoning-gym``: over a hundred procedural data sets, each with its own scorer.

One turn: the question, and the model's answer between ``<answer>`` tags. The data set's scorer gives the reward (0..1).
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Literal

from asyncrl.agents.tools import in_thread
from asyncrl.errors import ConfigError, EnvironmentFailure
from asyncrl.interfaces import Message, Step, Task, Tool

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ReasoningGymEnvironment", "ReasoningGymFactory"]

_HELD_OUT_IN = 5
"""One question in five (by the hash of its text) belongs to the held-out split."""

_STRIDE = 16
"""Items from one task's first candidate to the next task's: nearly always enough to find one of the split."""

INSTRUCTIONS = "Think step by step. Then write the final answer, and nothing else, between <answer> and </answer>."


class ReasoningGymEnvironment:
    """One question, one answer."""

    def __init__(self, dataset: Any, *, instructions: str, answer_tag: str) -> None:
        self._dataset = dataset  # a reasoning_gym.ProceduralDataset; the package has no annotations
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
                f"item {task['item']} is not the question of the task: another seed, configuration or version of "
                "reasoning-gym made it"
            )
        self._entry = entry
        system: list[Message] = [{"role": "system", "content": self._instructions}] if self._instructions else []
        return [*system, {"role": "user", "content": task["question"]}]

    async def step(self, reply: Message) -> Step:
        if self._entry is None:
            raise EnvironmentFailure("step before reset: the environment has no task")
        answer = self._answer(str(reply.get("content") or ""))
        if answer is None:
            return Step(done=True, info={"answered": False})
        score = await in_thread(self._dataset.score_answer, answer, self._entry)
        return Step(reward=float(score), done=True, info={"answered": True})

    async def close(self) -> None:
        self._entry = None

    def _answer(self, content: str) -> str | None:
        """The text in the last pair of tags; all of it if no tag is asked for; None if the tags are missing."""
        if not self._answer_tag:
            return content.strip()
        _, opened, rest = content.rpartition(f"<{self._answer_tag}>")
        answer, closed, _ = rest.partition(f"</{self._answer_tag}>")
        return answer.strip() if opened and closed else None


class ReasoningGymFactory:
    """Items of one data set. Every question belongs to one split by the hash of its text: they share none.

    Args:
        dataset: its name in reasoning-gym (``chain_sum``, ``leg_counting`` ...).
        seed: of the data set.
        size: number of its items; task numbers beyond wrap around. Generated when asked for, by most data sets.
        instructions: system message; none if empty.
        answer_tag: tag the answer stands in; the whole reply is the answer if empty.
        config: options of the data set.

    Raises:
        ConfigError: the package is missing, or the data set or its options are unknown.
    """

    def __init__(
        self,
        *,
        dataset: str,
        seed: int = 0,
        size: int = 1_000_000,
        instructions: str = INSTRUCTIONS,
        answer_tag: str = "answer",
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
        self._name = dataset
        self._size = size
        self._instructions = instructions
        self._answer_tag = answer_tag

    def task(self, index: int, *, split: Literal["train", "held_out"]) -> Task:
        start = index * _STRIDE
        for item in (number % self._size for number in range(start, start + self._size)):
            entry = self._dataset[item]
            if _held_out(entry["question"]) == (split == "held_out"):
                return {
                    "dataset": self._name,
                    "item": item,
                    "question": entry["question"],
                    "answer": str(entry["answer"]),
                }
        raise ConfigError(
            f"none of the {self._size} questions of {self._name!r} belongs to the split {split!r}",
            path="env.options.size",
            remedy="a larger size, or harder options: this data set repeats its questions",
        )

    def make(self) -> ReasoningGymEnvironment:
        return ReasoningGymEnvironment(self._dataset, instructions=self._instructions, answer_tag=self._answer_tag)

    def demonstration(self, index: int) -> list[Message]:
        raise ConfigError(
            "the environment reasoning_gym has no demonstrations",
            path="sft",
            remedy="start from a pretrained model, without a supervised warm start",
        )


def _held_out(question: str) -> bool:
    return hashlib.blake2b(question.encode(), digest_size=4).digest()[0] % _HELD_OUT_IN == 0
