"""Arithmetic with a calculator: a small environment of several turns with a verified reward.

The user asks ``(31+45)-8``. The tool computes one binary operation, so most questions need several calls, each with the
result of the previous one. The reward is 1 if the last integer of the assistant's final message is the answer, else 0;
the calls are not rewarded.

Demonstrations are *imperfect on purpose*: they model a warm start that knows how to call the tool but not when.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Sequence
from typing import Any, Literal

from asyncrl.envs.tools import Toolbox, tool
from asyncrl.errors import ConfigError, EnvironmentFailure
from asyncrl.interfaces import Message, Step, Task, Tool

_HELD_OUT_IN = 5
"""One question in five, by the hash of its text, is held out."""

_INTEGER = re.compile(r"-?\d+")
_OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


@tool
async def calculator(a: int, operator: Literal["+", "-", "*"], b: int) -> int:
    """Compute one operation on two integers.

    Args:
        a: left operand
        operator: the operation
        b: right operand
    """
    return int(_OPERATIONS[operator](a, b))


class CalculatorEnvironment:
    """One episode: it answers tool calls, and the first message without a call is the final answer.

    >>> environment = CalculatorEnvironment()
    >>> asyncio.run(environment.reset({"question": "2+2", "answer": 4}))
    [{'role': 'user', 'content': '2+2'}]
    >>> asyncio.run(environment.step({"role": "assistant", "content": "It is 4."})).reward
    1.0
    """

    deterministic = True

    def __init__(self, *, instructions: str = "") -> None:
        self._instructions = instructions
        self._toolbox = Toolbox([calculator])
        self._task: Task | None = None
        self._calls = 0
        self._mistakes = 0

    @property
    def tools(self) -> Sequence[Tool]:
        return self._toolbox.declarations

    async def reset(self, task: Task) -> Sequence[Message]:
        self._task, self._calls, self._mistakes = task, 0, 0
        return question_messages(task["question"], instructions=self._instructions)

    async def step(self, reply: Message) -> Step:
        if self._task is None:
            raise EnvironmentFailure("step before reset: the environment has no task")
        answers = await self._toolbox.answer_all(reply)
        self._calls += len(answers)
        self._mistakes += sum(answer.mistake for answer in answers)
        info = {"calls": self._calls, "mistakes": self._mistakes}
        if answers:
            return Step(messages=tuple(answer.message for answer in answers), info=info)
        numbers = _INTEGER.findall(reply.get("content") or "")
        right = bool(numbers) and numbers[-1] == str(self._task["answer"])
        return Step(reward=float(right), done=True, info=info)

    async def close(self) -> None:
        self._task = None


class CalculatorFactory:
    """Questions by number; the hash of its text assigns each question to one split, so that the splits are disjoint.

        >>> factory = CalculatorFactory(operation_shares=[1.0], operators=["+"])
        >>> first, operator, second, result = factory.task(0, split="train")["steps"][0]
        >>> (operator, result) == ("+", first + second)
        True

    Args:
        min_operand, max_operand: range of the operands, both included. Numbers of equal length are easier to copy for
            a tiny model.
        operation_shares: shares of the questions with one, two, three ... operations; they sum to 1.
        negative: whether results below zero may appear (otherwise such a ``-`` becomes a ``+``).
        guess_share: share of the demonstrations that answer without the tool.
        early_stop_share: probability that a demonstration stops after a call that does not complete the question.
        misread_share: share of the demonstrations with calls that answer with the last left operand.
        instructions: system message; none if empty.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        min_operand: int = 10,
        max_operand: int = 99,
        operators: Sequence[str] = ("+", "-"),
        operation_shares: Sequence[float] = (0.3, 0.7),
        negative: bool = False,
        guess_share: float = 0.15,
        early_stop_share: float = 0.7,
        misread_share: float = 0.1,
        instructions: str = "",
    ) -> None:
        if not operators or not set(operators) <= _OPERATIONS.keys():
            raise ConfigError(
                f"operators is {list(operators)}",
                path="env.options.operators",
                remedy=f"some of {list(_OPERATIONS)}",
            )
        if not 0 <= min_operand <= max_operand - 8:
            raise ConfigError(
                f"operands go from {min_operand} to {max_operand}",
                path="env.options.max_operand",
                remedy="min_operand >= 0 and max_operand >= min_operand + 8: both splits need questions",
            )
        for name, share in (
            ("guess_share", guess_share),
            ("early_stop_share", early_stop_share),
            ("misread_share", misread_share),
        ):
            if not 0.0 <= share <= 1.0:
                raise ConfigError(f"{name} is {share}", path=f"env.options.{name}", remedy="a number from 0 to 1")
        if not operation_shares or min(operation_shares) < 0 or abs(sum(operation_shares) - 1.0) > 1e-6:
            raise ConfigError(
                f"operation_shares is {list(operation_shares)}",
                path="env.options.operation_shares",
                remedy="shares of questions with 1, 2, ... operations, which sum to 1",
            )
        self._seed = seed
        self._operands = (min_operand, max_operand)
        self._operators = tuple(operators)
        self._operation_shares = tuple(operation_shares)
        self._negative = negative
        self._guess_share = guess_share
        self._early_stop_share = early_stop_share
        self._misread_share = misread_share
        self._instructions = instructions

    def task(self, index: int, *, split: Literal["train", "held_out"]) -> Task:
        """Return a question with its ``answer`` and the ``steps`` to it: (left, operator, right, result)."""
        return self._draw(f"task/{split}/{index}", held_out=split == "held_out")

    def difficulty(self, task: Task) -> str:
        """Return the number of operations."""
        return f"{len(task['steps'])} operations"

    def make(self) -> CalculatorEnvironment:
        return CalculatorEnvironment(instructions=self._instructions)

    def demonstration(self, index: int) -> list[Message]:
        """Return a conversation about a training question, with the mistakes that the constructor's shares set."""
        task = self._draw(f"demonstration/{index}", held_out=False)
        draw = random.Random(f"{self._seed}/outcome/{index}")  # noqa: S311 (reproducible, not secret)
        messages = question_messages(task["question"], instructions=self._instructions)
        steps: list[list[Any]] = task["steps"]
        if draw.random() < self._guess_share:
            return [*messages, {"role": "assistant", "content": str(draw.randint(*self._operands))}]
        calls = 1
        while calls < len(steps) and draw.random() >= self._early_stop_share:
            calls += 1
        steps = steps[:calls]
        for number, (a, operator, b, result) in enumerate(steps):
            call_id = f"call_{number}"
            function = {"name": calculator.name, "arguments": {"a": a, "operator": operator, "b": b}}
            call = {"id": call_id, "type": "function", "function": function}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            answer = {"role": "tool", "tool_call_id": call_id, "name": calculator.name, "content": str(result)}
            messages.append(answer)
        left, _, _, result = steps[-1]
        answered = left if draw.random() < self._misread_share else result
        return [*messages, {"role": "assistant", "content": str(answered)}]

    def _draw(self, stream: str, *, held_out: bool) -> Task:
        draw = random.Random(f"{self._seed}/{stream}")  # noqa: S311 (reproducible, not secret)
        while True:
            task = self._question(draw)
            if is_held_out(task["question"]) == held_out:
                return task

    def _question(self, draw: random.Random) -> Task:
        value = draw.randint(*self._operands)
        question = str(value)
        steps: list[list[Any]] = []
        operations = draw.choices(range(1, len(self._operation_shares) + 1), self._operation_shares)[0]
        for number in range(operations):
            operator = draw.choice(self._operators)
            operand = draw.randint(*self._operands)
            result = _OPERATIONS[operator](value, operand)
            if result < 0 and not self._negative:
                operator, result = "+", value + operand
            steps.append([value, operator, operand, result])
            question = f"{f'({question})' if number else question}{operator}{operand}"
            value = result
        return {"question": question, "answer": value, "steps": steps}


def question_messages(question: str, *, instructions: str) -> list[Message]:
    """Return the messages that open an episode: the instructions, unless they are empty, and the question."""
    system: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    return [*system, {"role": "user", "content": question}]


def is_held_out(question: str) -> bool:
    """Return whether the hash of a question's text assigns it to the held-out split."""
    return hashlib.blake2b(question.encode(), digest_size=4).digest()[0] % _HELD_OUT_IN == 0
