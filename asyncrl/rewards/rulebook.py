"""Which rule judges which row: one for all, or one for each data source."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.parts import load_part, make_part, part_names
from asyncrl.rewards.rule import Answer, FunctionRule, RewardRule, Verdict, WeightedSum

__all__ = ["DEFAULT_RULES", "Rulebook"]

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
    "searchR1_*": "exact",
}
"""Rules of the data sources that verl knows, where a run names none. The first pattern that fits counts."""


class Rulebook:
    """Rules by data source, made when the first row asks for one.

    A rule is written as its name or dotted path, as a table with ``rule`` and its options, or as a list of such tables:
    a weighted sum.

    Args:
        reward: the rule of all rows that ``rewards`` has none for.
        rewards: rules by data source; patterns with ``*`` may stand for many. The first that fits counts.
        key: dotted key of the configuration in front of both, for messages.

    Raises:
        ConfigError: a rule is unknown or has options that it does not take.
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
        """The pattern whose rule judges rows of this source.

        Raises:
            ConfigError: there is none.
        """
        for pattern in self._written:
            if fnmatchcase(data_source, pattern):
                return pattern
        raise ConfigError(
            f"no rule judges rows of the data source {data_source!r}",
            path=f"{self._key}.{data_source}",
            remedy=f"name one under {self._key}, or one for all as reward: {', '.join(part_names(_GROUP))}, or "
            "package.module:function",
        )

    def check(self, data_sources: Iterable[str]) -> None:
        """Make the rules of these sources, so that what is wrong with one is told before anything starts."""
        for source in sorted(set(data_sources)):
            self._rule(source)

    async def judge(self, answer: Answer) -> Verdict:
        """The verdict of the rule for the answer's source; raises as :meth:`RewardRule.judge`."""
        return await self._rule(answer.data_source).judge(answer)

    async def close(self) -> None:
        """Close the rules that were made."""
        for rule in self._rules.values():
            await rule.close()
        self._rules.clear()

    def _rule(self, data_source: str) -> RewardRule:
        pattern = self.pattern(data_source)
        if pattern not in self._rules:
            written, where = self._written[pattern]
            self._rules[pattern] = _make(written, key=where)
        return self._rules[pattern]


def _tables(written: Any, *, key: str) -> list[dict[str, Any]]:
    """One table with ``rule`` for each rule that is written."""
    tables = written if isinstance(written, list) else [written]
    read = [{"rule": each} if isinstance(each, str) else each for each in tables]
    if not read or not all(isinstance(each, dict) and isinstance(each.get("rule"), str) for each in read):
        raise ConfigError(
            f"{key} names no rule: {str(written)[:80]}",
            path=key,
            remedy='"math", or {rule = "regex", pattern = "..."}, or a list of such tables with weights',
        )
    return read


def _check(written: Any, *, key: str) -> None:
    for table in _tables(written, key=key):
        name = table["rule"]
        if ":" not in name and name not in part_names(_GROUP):
            near = get_close_matches(name, part_names(_GROUP), n=1)
            raise ConfigError(
                f"{key}: no reward rule named {name!r}",
                path=key,
                remedy=(f"did you mean {near[0]!r}? " if near else "")
                + f"Installed: {', '.join(part_names(_GROUP))}; others as package.module:function",
            )


def _make(written: Any, *, key: str) -> RewardRule:
    tables = _tables(written, key=key)
    if len(tables) == 1 and not {"weight", "name"} & tables[0].keys():
        return _one(tables[0], key=key)
    rules: list[tuple[str, float, RewardRule]] = []
    for table in tables:
        weight = table.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ConfigError(f"{key}.weight is {weight!r}", path=f"{key}.weight", remedy="a finite number")
        name = str(table.get("name") or table["rule"].rpartition(":")[2])
        if any(name == other for other, _, _ in rules):
            raise ConfigError(f"{key} has two rules called {name!r}", path=key, remedy="give one a name of its own")
        rules.append((name, float(weight), _one(table, key=key)))
    return WeightedSum(rules)


def _one(table: Mapping[str, Any], *, key: str) -> RewardRule:
    name = table["rule"]
    options = {option: value for option, value in table.items() if option not in {"rule", "weight", "name"}}
    if name.rpartition(":")[0].endswith(".py"):
        return _function(name, name, options, key=key)
    part = load_part(_GROUP, name, path=key)
    if isinstance(part, type):
        made: RewardRule = make_part(_GROUP, name, options=options, path=f"{key}.rule", table=key)
        return made
    return _function(name, f"{part.__module__}:{part.__qualname__}" if ":" not in name else name, options, key=key)


def _function(name: str, path: str, options: Mapping[str, Any], *, key: str) -> RewardRule:
    try:
        rule = FunctionRule(path, **options)
    except TypeError as error:
        raise ConfigError(f"{key}: {name!r} cannot be made from its options: {error}", path=key) from error
    if rule.surplus:
        raise ConfigError(
            f"{key}: {name!r} has no option {min(rule.surplus)!r}",
            path=f"{key}.{min(rule.surplus)}",
            remedy=f"it takes {', '.join(sorted(rule.parameters))}; and deadline_s, processes",
        )
    if rule.missing:
        raise ConfigError(
            f"{key}: {name!r} needs the option {min(rule.missing)!r}",
            path=f"{key}.{min(rule.missing)}",
            remedy="rules get data_source, solution_str, ground_truth and extra_info; anything else is an option",
        )
    return rule
