"""Reward rules: a rule scores an answer, and a rulebook chooses the rule by the row's data source."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Protocol, runtime_checkable

from asyncrl.errors import ConfigError, EnvironmentDeadlineError, EnvironmentFailure, RewardError
from asyncrl.interfaces import Message
from asyncrl.plugins import Part, load_part, make_part, part_names, part_path, part_text
from asyncrl.rewards.scoring import UserFunction
from asyncrl.runtime import run_all


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer to judge: the four arguments of verl's reward functions, and the conversation before the answer."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    prompt: Sequence[Message] = ()

    def as_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of a reward function with verl's signature."""
        return {
            "data_source": self.data_source,
            "solution_str": self.solution_str,
            "ground_truth": self.ground_truth,
            "extra_info": dict(self.extra_info),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A score, and named parts of it; parts are logged, only the score is trained on."""

    score: float
    parts: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of(value: float | Mapping[str, float]) -> Verdict:
        """Make a verdict from a number, or from a table whose numbers besides ``score`` are the parts."""
        if not isinstance(value, Mapping):
            return Verdict(score=value)
        return Verdict(score=value["score"], parts={name: part for name, part in value.items() if name != "score"})


@runtime_checkable
class RewardRule(Protocol):
    """Judges answers. All calls come from one event loop and may overlap.

    A rule with an attribute ``deterministic = True`` judges the same answer alike again; some of its answers are judged
    twice, to check that every row has the reward that it earned.

    >>> class Brief:
    ...     async def judge(self, answer):
    ...         return Verdict(score=1.0 / len(answer.solution_str))
    ...
    ...     async def close(self): ...
    >>> isinstance(Brief(), RewardRule)
    True
    """

    async def judge(self, answer: Answer) -> Verdict:
        """Return the verdict on one answer.

        Raises:
            RewardError: the rule is wrong, or does not apply to such a row; the run ends.
            EnvironmentFailure: infrastructure failed, or a deadline passed; the rollout is dropped and counted.
        """
        ...

    async def close(self) -> None:
        """Free the rule's resources. Idempotent."""
        ...


class FunctionRule:
    """A function of the answer: with verl's signature, ``(data_source, solution_str, ground_truth, extra_info)``.

    It takes any of these by name, ``completion`` (which is ``solution_str``), ``prompt`` (the messages before it), the
    keys of the row's ``extra_info`` (for a function with an attribute ``only_required_columns = True`` those without a
    default alone), and further options; it returns a number, or a table of numbers with ``score``.
    :class:`asyncrl.rewards.scoring.UserFunction` runs it and documents its limits and errors.

    ``deterministic`` declares that the same answer gets the same score again (:class:`RewardRule`).

    A function that raises, or returns no number, ends the run with its traceback. One that passes its deadline or whose
    process dies costs only the rollout, because the answer may have caused that.

        >>> rule = FunctionRule("asyncrl.rewards.match:exact", tag="answer")
        >>> sorted(rule.parameters)
        ['ground_truth', 'ignore_case', 'solution_str', 'tag']
    """

    def __init__(
        self,
        function: Part,
        *,
        deadline_s: float = 10.0,
        processes: int = 1,
        concurrency: int = 64,
        start_deadline_s: float = 60.0,
        deterministic: bool = False,
        **options: Any,
    ) -> None:
        self.deterministic = deterministic
        self._function = UserFunction(
            function,
            deadline_s=deadline_s,
            processes=processes,
            concurrency=concurrency,
            start_deadline_s=start_deadline_s,
        )
        self._options = options

    async def judge(self, answer: Answer) -> Verdict:
        function, columns = self._function, answer.extra_info
        if getattr(function.function, "only_required_columns", False):
            columns = {name: value for name, value in columns.items() if name in function.required}
        arguments = {**columns, **answer.as_arguments(), **self._options}
        arguments |= {"completion": answer.solution_str, "prompt": list(answer.prompt)}
        if lacking := sorted(function.required - arguments.keys()):
            raise RewardError(
                f"{function.name} needs {lacking[0]!r}, and the row has {', '.join(sorted(arguments))}", how="raised"
            )
        if not function.takes_any:
            arguments = {name: value for name, value in arguments.items() if name in function.parameters}
        try:
            return Verdict.of(await function.call(arguments))
        except RewardError as error:
            text = f"{function.name} {error}"
            if error.how == "deadline":
                raise EnvironmentDeadlineError(text) from error
            if error.how == "died":
                raise EnvironmentFailure(text) from error
            raise RewardError(text, how=error.how) from error.__cause__

    @property
    def parameters(self) -> frozenset[str]:
        """Names of the function's parameters."""
        return self._function.parameters

    def missing_options(self, columns: Collection[str]) -> frozenset[str]:
        """Return required parameters that neither an answer with these ``columns`` nor the options provide."""
        return self._function.required - {*_ARGUMENTS, *columns, *self._options}

    @property
    def unknown_options(self) -> frozenset[str]:
        """Options that the function does not take."""
        return frozenset() if self._function.takes_any else frozenset(self._options) - self.parameters

    async def close(self) -> None:
        await self._function.close()


_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info", "completion", "prompt")


class NoRule:
    """Scores every answer 0, for runs that only generate; the part ``judged`` is 0, too."""

    deterministic = True

    async def judge(self, answer: Answer) -> Verdict:
        del answer
        return Verdict(score=0.0, parts={"judged": 0.0})

    async def close(self) -> None:
        """Do nothing."""


class WeightedSum:
    """Combine rules: ``score = sum of weight * score``; each rule's score is a part under the rule's name.

    All rules (name, weight and rule of each) judge concurrently; the first failure is raised.

        >>> class Fixed(NoRule):
        ...     async def judge(self, answer):
        ...         return Verdict(score=1.0)
        >>> asyncio.run(WeightedSum([("right", 0.75, Fixed()), ("brief", 0.25, NoRule())]).judge(answer))
        Verdict(score=0.75, parts={'right': 1.0, 'brief': 0.0, 'brief/judged': 0.0})
    """

    def __init__(self, rules: Sequence[tuple[str, float, RewardRule]]) -> None:
        self._rules = tuple(rules)

    @property
    def deterministic(self) -> bool:
        return all(_is_deterministic(rule) for _, _, rule in self._rules)

    async def judge(self, answer: Answer) -> Verdict:
        verdicts = await run_all(rule.judge(answer) for _, _, rule in self._rules)
        score, parts = 0.0, {}
        for (name, weight, _), verdict in zip(self._rules, verdicts, strict=True):
            score += weight * verdict.score
            parts[name] = verdict.score
            parts |= {f"{name}/{part}": value for part, value in verdict.parts.items()}
        return Verdict(score=score, parts=parts)

    async def close(self) -> None:
        for _, _, rule in self._rules:
            await rule.close()


def _is_deterministic(rule: RewardRule) -> bool:
    return bool(getattr(rule, "deterministic", False))


_GROUP = "asyncrl.reward_rules"

DEFAULT_RULES: Mapping[str, str] = {
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH*": "math",
    "DigitalLearningGmbH/MATH*": "math",
    "HuggingFaceH4/MATH*": "math",
    "HuggingFaceH4/aime*": "math",
    "math_dapo*": "math",
    "math*": "math",
    "aime*": "math",
    "numina*": "math",
    "codecontests": "code",
    "apps": "code",
    "codeforces": "code",
    "taco": "code",
    "reasoning_gym*": "reasoning_gym",
    "searchR1_*": "search_r1",
}
"""Rules of the data sources that verl knows, for runs that name none. The first matching pattern counts."""


class Rulebook:
    """Rules by data source; each is made when a row first needs it.

    A rule is written as its name or dotted path (or is the function itself), as a table with ``rule`` and its options,
    or as a list of such tables, which is a weighted sum.

    ``rewards`` has rules by data source, or by pattern with ``*``, of which the first match counts; ``reward`` is the
    rule of all other rows. Messages name the configuration keys with the prefix ``key``.
    """

    def __init__(self, reward: Any = None, rewards: Mapping[str, Any] | None = None, *, key: str = "") -> None:
        prefix = f"{key}." if key else ""
        self._key = f"{prefix}rewards"
        self._written: dict[str, tuple[Any, str]] = {
            pattern: (rule, f"{prefix}rewards.{pattern}") for pattern, rule in (rewards or {}).items()
        }
        if reward is not None:
            self._written["*"] = (reward, f"{prefix}reward")
        for pattern, rule in DEFAULT_RULES.items():
            self._written.setdefault(pattern, (rule, f"{prefix}rewards.{pattern}"))
        self._rules: dict[str, RewardRule] = {}
        for pattern, (rule, where) in self._written.items():
            if pattern not in DEFAULT_RULES or where.endswith(".reward"):
                _check(rule, key=where)

    def pattern(self, data_source: str) -> str:
        """Return the pattern whose rule judges rows of this source; raise ConfigError if no pattern matches."""
        for pattern in self._written:
            if fnmatchcase(data_source, pattern):
                return pattern
        raise ConfigError(
            f"no rule judges rows of the data source {data_source!r}",
            path=f"{self._key}.{data_source}",
            remedy=f"name one under {self._key}, or one for all as reward: {', '.join(part_names(_GROUP))}, or "
            "package.module:function",
        )

    def check(self, columns: Mapping[str, Collection[str]]) -> None:
        """Make the rules of the sources now, so that a wrong option raises ConfigError before the run starts.

        ``columns`` are, by data source, the keys that ``extra_info`` has in each of its rows.
        """
        shared: dict[str, set[str]] = {}  # by the pattern, of which a rule may judge several sources
        for source in sorted(columns):
            shared.setdefault(self.pattern(source), {*columns[source]}).intersection_update(columns[source])
        for pattern, keys in shared.items():
            self._rule(pattern, keys)

    async def judge(self, answer: Answer) -> Verdict:
        """Judge with the rule of the answer's source; see :meth:`RewardRule.judge`."""
        return await self._rule(self.pattern(answer.data_source)).judge(answer)

    def deterministic(self, data_source: str) -> bool:
        """Return whether the rule of this source declares that it judges the same answer alike again."""
        return _is_deterministic(self._rule(self.pattern(data_source)))

    async def close(self) -> None:
        """Close the rules that were made."""
        for rule in self._rules.values():
            await rule.close()
        self._rules.clear()

    def _rule(self, pattern: str, columns: Collection[str] | None = None) -> RewardRule:
        if pattern not in self._rules:
            written, where = self._written[pattern]
            self._rules[pattern] = _make(written, columns, key=where)
        return self._rules[pattern]


def _tables(written: Any, *, key: str) -> list[dict[str, Any]]:
    """Return one table with the key ``rule`` for each rule in the configuration value ``written``."""
    tables = written if isinstance(written, list) else [written]
    read = [{"rule": each} if isinstance(each, str) or callable(each) else each for each in tables]
    if not read or not all(isinstance(each, dict) and _is_part(each.get("rule")) for each in read):
        raise ConfigError(
            f"{key} names no rule: {str(written)[:80]}",
            path=key,
            remedy='"math", or {rule = "regex", pattern = "..."}, or a list of such tables with weights',
        )
    return read


def _is_part(rule: Any) -> bool:
    return isinstance(rule, str) or callable(rule)


def _check(written: Any, *, key: str) -> None:
    for table in _tables(written, key=key):
        if isinstance(table["rule"], str):
            part_path(_GROUP, table["rule"], path=key)


def _make(written: Any, columns: Collection[str] | None, *, key: str) -> RewardRule:
    tables = _tables(written, key=key)
    if len(tables) == 1 and not {"weight", "name"} & tables[0].keys():
        return _one(tables[0], columns, key=key)
    rules: list[tuple[str, float, RewardRule]] = []
    for table in tables:
        weight = table.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ConfigError(f"{key}.weight is {weight!r}", path=f"{key}.weight", remedy="a finite number")
        name = str(table.get("name") or part_text(table["rule"]).rpartition(":")[2].removesuffix(".<instance>"))
        if any(name == other for other, _, _ in rules):
            raise ConfigError(f"{key} has two rules named {name!r}", path=key, remedy="give one of them another name")
        rules.append((name, float(weight), _one(table, columns, key=key)))
    return WeightedSum(rules)


def _one(table: Mapping[str, Any], columns: Collection[str] | None, *, key: str) -> RewardRule:
    rule: Part = table["rule"]
    name = part_text(rule)
    options = {option: value for option, value in table.items() if option not in {"rule", "weight", "name"}}
    if isinstance(rule, str) and name.rpartition(":")[0].endswith(".py"):
        return _function(name, rule, options, columns, key=key)
    part = load_part(_GROUP, rule, path=key)
    if isinstance(part, type):
        made: RewardRule = make_part(_GROUP, rule, options=options, path=f"{key}.rule", table=key)
        return made
    if (check := getattr(part, "check_options", None)) is not None:
        check(key, **options)
    if getattr(part, "deterministic", False):
        options = {"deterministic": True, **options}
    return _function(name, part if ":" not in name else rule, options, columns, key=key)


def _function(
    name: str, function: Part, options: Mapping[str, Any], columns: Collection[str] | None, *, key: str
) -> RewardRule:
    try:
        rule = FunctionRule(function, **options)
    except TypeError as error:
        raise ConfigError(f"{key}: {name!r} cannot be made from its options: {error}", path=key) from error
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}", path=key, remedy=error.remedy) from error
    if unknown := sorted(rule.unknown_options):
        raise ConfigError(
            f"{key}: {name!r} has no option {unknown[0]!r}",
            path=f"{key}.{unknown[0]}",
            remedy=f"it takes {', '.join(sorted(rule.parameters))}; and deadline_s, processes, deterministic",
        )
    if columns is not None and (missing := sorted(rule.missing_options(columns))):
        raise ConfigError(
            f"{key}: {name!r} needs {missing[0]!r}, which is neither an option nor a column of the rows",
            path=f"{key}.{missing[0]}",
            remedy=f"rules get {', '.join((*_ARGUMENTS, *sorted(columns)))}; all else is an option",
        )
    return rule
