"""What a rule is: an answer in, a verdict out, and no failure that looks like one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from asyncrl.errors import EnvironmentDeadlineError, EnvironmentFailure, RewardError
from asyncrl.interfaces import Message
from asyncrl.rewards.user_function import UserFunction

__all__ = ["Answer", "FunctionRule", "NoRule", "RewardRule", "Verdict", "WeightedSum"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is judged: verl's four arguments, and the conversation before the answer.

    >>> answer = Answer(data_source="sums", solution_str="4", ground_truth="4")

    The examples of the rules are about this answer.
    """

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    prompt: Sequence[Message] = ()

    def as_arguments(self) -> dict[str, Any]:
        """By the names that verl's reward functions have for them.

        >>> answer.as_arguments()
        {'data_source': 'sums', 'solution_str': '4', 'ground_truth': '4', 'extra_info': {}}
        """
        return {
            "data_source": self.data_source,
            "solution_str": self.solution_str,
            "ground_truth": self.ground_truth,
            "extra_info": dict(self.extra_info),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A score, and what it was made of, by name; parts are shown and logged, only the score is trained on.

    >>> Verdict(score=0.5, parts={"right": 1.0, "short": 0.0}).parts["right"]
    1.0
    """

    score: float
    parts: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class RewardRule(Protocol):
    """Judges answers. Used from one event loop; its calls overlap.

    >>> class Brief:
    ...     async def judge(self, answer):
    ...         return Verdict(score=1.0 / len(answer.solution_str))
    ...
    ...     async def close(self): ...
    >>> isinstance(Brief(), RewardRule)
    True
    """

    async def judge(self, answer: Answer) -> Verdict:
        """The verdict on one answer.

            >>> rule: RewardRule = NoRule()
            >>> asyncio.run(rule.judge(answer)).score
            0.0

        Raises:
            RewardError: the rule is wrong, or cannot be used on such a row; the run ends.
            EnvironmentFailure: what it relies on failed, or it took too long; the rollout is dropped and counted.
        """
        ...

    async def close(self) -> None:
        """Free what it holds. Idempotent.

        >>> rule: RewardRule = NoRule()
        >>> asyncio.run(rule.close())
        """
        ...


class FunctionRule:
    """A function with verl's signature: ``(data_source, solution_str, ground_truth, extra_info) -> score``.

    It may take fewer of them, and further options by name; it returns a number, or a table of numbers with ``score``.
    How it is run, and what bounds it: :class:`asyncrl.rewards.user_function.UserFunction`.

    A function that raises, or returns no number, is wrong: the run ends with its traceback. One that passes its
    deadline or takes its processes along was brought there by an answer: that costs the rollout.

        >>> rule = FunctionRule("asyncrl.rewards.match:exact", tag="answer")
        >>> sorted(rule.parameters)
        ['ground_truth', 'ignore_case', 'solution_str', 'tag']

    Args:
        name: ``package.module:name`` or ``path/to/file.py:name``.
        deadline_s, processes, concurrency, start_deadline_s: as for the user function.
        options: passed with every call.

    Raises:
        ConfigError: the function cannot be imported or called like this, or a number is out of range.
    """

    def __init__(
        self,
        name: str,
        *,
        deadline_s: float = 10.0,
        processes: int = 1,
        concurrency: int = 64,
        start_deadline_s: float = 60.0,
        **options: Any,
    ) -> None:
        self._function = UserFunction(
            name,
            deadline_s=deadline_s,
            processes=processes,
            concurrency=concurrency,
            start_deadline_s=start_deadline_s,
        )
        self._options = options

    async def judge(self, answer: Answer) -> Verdict:
        """As :meth:`RewardRule.judge`.

            >>> async def judged():
            ...     rule = FunctionRule("asyncrl.rewards.match:exact")
            ...     try:
            ...         return await rule.judge(answer)
            ...     finally:
            ...         await rule.close()
            >>> asyncio.run(judged())
            Verdict(score=1.0, parts={})

        Raises:
            RewardError: it raised, or returned no number.
            EnvironmentDeadlineError: it passed its deadline.
            EnvironmentFailure: its process exited, or three were killed, one after the other.
        """
        function = self._function
        given = {**answer.as_arguments(), **self._options}
        if not function.takes_others:
            given = {name: value for name, value in given.items() if name in function.wanted}
        try:
            value = await function.call(given)
        except RewardError as error:
            told = f"{function.name} {error}"
            if error.how == "deadline":
                raise EnvironmentDeadlineError(told) from error
            if error.how == "died":
                raise EnvironmentFailure(told) from error
            raise RewardError(told, how=error.how) from error.__cause__
        if isinstance(value, dict):
            return Verdict(score=value["score"], parts={name: part for name, part in value.items() if name != "score"})
        return Verdict(score=value)

    @property
    def missing(self) -> frozenset[str]:
        """Parameters that nobody gives it.

        >>> FunctionRule("asyncrl.rewards.match:regex").missing
        frozenset({'pattern'})
        """
        known = {"data_source", "solution_str", "ground_truth", "extra_info", *self._options}
        return self._function.required - known

    @property
    def surplus(self) -> frozenset[str]:
        """Options that it does not take.

        >>> FunctionRule("asyncrl.rewards.match:exact", tags="answer").surplus
        frozenset({'tags'})
        """
        return frozenset() if self._function.takes_others else frozenset(self._options) - self._function.wanted

    @property
    def parameters(self) -> frozenset[str]:
        """Names it takes.

        >>> sorted(FunctionRule("asyncrl.rewards.match:gsm8k").parameters)
        ['ground_truth', 'solution_str', 'strict']
        """
        return self._function.wanted

    async def close(self) -> None:
        """End its processes.

        >>> asyncio.run(FunctionRule("asyncrl.rewards.match:exact").close())
        """
        await self._function.close()


class NoRule:
    """Judges nothing: every score is 0, for runs that only generate; the part ``judged`` says so.

    >>> asyncio.run(NoRule().judge(answer))
    Verdict(score=0.0, parts={'judged': 0.0})
    """

    async def judge(self, answer: Answer) -> Verdict:
        """As :meth:`RewardRule.judge`.

        >>> asyncio.run(NoRule().judge(answer)).score
        0.0
        """
        del answer
        return Verdict(score=0.0, parts={"judged": 0.0})

    async def close(self) -> None:
        """Nothing to close.

        >>> asyncio.run(NoRule().close())
        """


class WeightedSum:
    """Several rules as one: ``score = sum of weight * score``; each score is a part, under its rule's name.

        >>> class Fixed(NoRule):
        ...     async def judge(self, answer):
        ...         return Verdict(score=1.0)
        >>> asyncio.run(WeightedSum([("right", 0.75, Fixed()), ("brief", 0.25, NoRule())]).judge(answer))
        Verdict(score=0.75, parts={'right': 1.0, 'brief': 0.0, 'brief/judged': 0.0})

    Args:
        rules: name, weight and rule of each. All are asked at once; the first failure is that of the sum.
    """

    def __init__(self, rules: Sequence[tuple[str, float, RewardRule]]) -> None:
        self._rules = tuple(rules)

    async def judge(self, answer: Answer) -> Verdict:
        """As :meth:`RewardRule.judge`.

        >>> asyncio.run(WeightedSum([]).judge(answer)).score
        0.0
        """
        try:
            async with asyncio.TaskGroup() as asked:
                tasks = [asked.create_task(rule.judge(answer)) for _, _, rule in self._rules]
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group.exceptions[0].__cause__
        score, parts = 0.0, {}
        for (name, weight, _), task in zip(self._rules, tasks, strict=True):
            verdict = task.result()
            score += weight * verdict.score
            parts[name] = verdict.score
            parts |= {f"{name}/{part}": value for part, value in verdict.parts.items()}
        return Verdict(score=score, parts=parts)

    async def close(self) -> None:
        """Close every rule.

        >>> asyncio.run(WeightedSum([("nothing", 1.0, NoRule())]).close())
        """
        for _, _, rule in self._rules:
            await rule.close()
