"""Rules that compare an answer's text with the ground truth: functions with verl's signature.

``math_score`` compares mathematics with the package math-verify; ``reasoning_gym_score`` calls reasoning-gym's scorers.
"""

from __future__ import annotations

import contextlib
import json
import re
import string
import unicodedata
from typing import Any

from asyncrl.errors import ConfigError

_FENCES = (
    re.compile(r"^[ \t]*```[^`\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE),
    re.compile(r"```[^`\n]+```|```[^`\n]*\n(.*?)```", re.DOTALL),  # within a line it is no block
)
"""Fenced blocks as Markdown has them, and as models write them."""
_GSM8K = re.compile(r"####\s*(-?[0-9][0-9,]*(?:\.[0-9]+)?)")
_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?")
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact(solution_str: str, ground_truth: Any, *, tag: str = "", ignore_case: bool = False) -> float:
    """Return 1 if the answer equals the ground truth, else 0; runs of white space count as one space.

        >>> exact("so <answer> forty  two </answer>", "Forty two", tag="answer", ignore_case=True)
        1.0

    Args:
        solution_str: the answer.
        ground_truth: a text or number, or a list of accepted ones.
        tag: compare only the text in the last pair ``<tag>...</tag>``; an answer without one scores 0.
        ignore_case: whether upper and lower case are equal.

    Raises:
        ValueError: there is no ground truth; the row is wrong, not the answer.
    """
    if ground_truth is None or ground_truth == []:
        raise ValueError("exact needs a ground truth, and the row has none: name its column in columns.ground_truth")
    answer = _tagged(solution_str, tag) if tag else solution_str
    if answer is None:
        return 0.0
    accepted = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    return float(
        _normal(answer, ignore_case=ignore_case) in [_normal(str(a), ignore_case=ignore_case) for a in accepted]
    )


def regex(solution_str: str, ground_truth: Any, *, pattern: str, group: int | str | None = None) -> float:
    r"""Return 1 if ``pattern`` is found, else 0; with a ``group``, 1 if its last match is the ground truth.

        >>> regex("x = 3, y = 4", "4", pattern=r"= (\d)", group=1)
        1.0

    Args:
        solution_str: the answer.
        ground_truth: the expected text of the group; unused without a group.
        pattern: a Python regular expression; ``(?s)`` in front lets dots match line ends.
        group: number or name.
    """
    matches = list(re.finditer(pattern, solution_str))
    if group is None or not matches:
        return float(bool(matches))
    return exact(matches[-1].group(group) or "", ground_truth)


def _check_pattern(key: str, *, pattern: object = "", **others: object) -> None:
    del others
    try:
        re.compile(str(pattern))
    except re.error as error:
        remedy = "write a Python regular expression"
        raise ConfigError(
            f"{key}.pattern = {pattern!r}: {error}; {remedy}", path=f"{key}.pattern", remedy=remedy
        ) from error


regex.check_options = _check_pattern  # type: ignore[attr-defined]


def json_schema(
    solution_str: str, ground_truth: Any, extra_info: dict[str, Any], *, schema: dict[str, Any] | None = None
) -> float:
    """Return 1 if the answer, or its last fenced block, is JSON that matches a schema, else 0.

        >>> json_schema('{"age": 7}', None, {}, schema={"type": "object", "required": ["age"]})
        1.0

    The row's ``extra_info["schema"]`` (a table, or JSON text) overrides ``schema``; without both it raises ValueError.
    """
    from jsonschema.validators import validator_for

    wanted = extra_info.get("schema", schema)
    if isinstance(wanted, str):
        wanted = json.loads(wanted)
    if not isinstance(wanted, dict):
        raise ValueError("json_schema needs a schema: give one in the options, or in the row's extra_info.schema")
    validator: Any = validator_for(wanted)
    validator.check_schema(wanted)
    blocks = [[each for each in fence.finditer(solution_str) if each[1] is not None] for fence in _FENCES]
    last = sorted((found[-1] for found in blocks if found), key=lambda each: -each.end(1))
    for text in (solution_str, *(each[1] for each in last)):
        with contextlib.suppress(ValueError, ArithmeticError, RecursionError):  # no JSON; too many digits, too deep
            return float(validator(wanted).is_valid(json.loads(text)))
    return 0.0


def gsm8k(solution_str: str, ground_truth: Any, *, strict: bool = True) -> float:
    r"""Return 1 if the number after the last ``####`` equals the ground truth, else 0.

        >>> gsm8k("6 times 7 is 42\n#### 42", "42"), gsm8k("it is 42", "42"), gsm8k("it is 42", "42", strict=False)
        (1.0, 0.0, 1.0)

    Args:
        solution_str: the answer.
        ground_truth: a number, or its text; or a solution that ends with ``#### NUMBER``, as in the rows of the hub.
            No answer equals another text.
        strict: False compares the last number of an answer without ``####``.

    Raises:
        ValueError: there is no ground truth; the row is wrong, not the answer.
    """
    expected = str(ground_truth).rpartition("####")[2].strip()
    if ground_truth in (None, []) or not expected:
        given = str(ground_truth)[-80:]
        raise ValueError(
            f"gsm8k needs a number as ground truth, not {given!r}: name its column in columns.ground_truth"
        )
    found = _GSM8K.findall(solution_str) or ([] if strict else _NUMBER.findall(solution_str))
    try:
        return float(bool(found) and _number(found[-1]) == _number(expected))
    except ValueError:  # a fraction, a unit
        return 0.0


def search_r1(solution_str: str, ground_truth: Any) -> float:
    """Return 1 if the text in the last pair of answer tags is an accepted one, else 0: Search-R1's rule, as in verl.

        >>> search_r1("<answer> The Eiffel Tower! </answer>", {"target": ["Tour Eiffel", "Eiffel tower"]})
        1.0

    Case, English articles, ASCII punctuation and white space do not count. A right answer with more than ten opening
    or more than ten closing tags scores 0.25.

    Args:
        solution_str: the answer.
        ground_truth: a table whose ``target`` is the accepted text, or a list of them.

    Raises:
        ValueError: the ground truth has no ``target``; the row is wrong, not the answer.
    """
    if not isinstance(ground_truth, dict) or "target" not in ground_truth:
        raise ValueError(f'search_r1 needs a ground truth like {{"target": [TEXT]}}, not {str(ground_truth)[:80]!r}')
    target = ground_truth["target"]
    closed = solution_str.split("</answer>")[:-1]
    answers = [inside for _, tag, inside in (part.partition("<answer>") for part in closed) if tag]
    if not answers or _words(answers[-1]) not in map(_words, target if isinstance(target, list) else [target]):
        return 0.0
    return 0.25 if max(len(closed), solution_str.count("<answer>")) > 10 else 1.0


def _words(text: Any) -> list[str]:
    """Return the words that count: in lower case, without punctuation and articles."""
    return _ARTICLE.sub(" ", str(text).lower().translate(_NO_PUNCTUATION)).split()


def _tagged(text: str, tag: str) -> str | None:
    _, opened, rest = text.rpartition(f"<{tag}>")
    inside, closed, _ = rest.partition(f"</{tag}>")
    return inside if opened and closed else None


def _normal(text: str, *, ignore_case: bool) -> str:
    text = " ".join(unicodedata.normalize("NFC", text).split())
    return text.casefold() if ignore_case else text


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def math_score(solution_str: str, ground_truth: Any, *, boxed: bool = False, float_rounding: int = 6) -> float:
    r"""Return 1 if the result equals the ground truth, else 0: ``\frac12`` is ``0.5``, ``{1,2}`` is ``{2,1}``.

    It must run in the main thread of a separate process: math-verify limits its time with alarms, and sympy may still
    not terminate.

        >>> math_score(r"that is \boxed{\frac{1}{2}}", "0.5")
        1.0

    Args:
        solution_str: the answer; the last ``\boxed{}`` is preferred, then LaTeX, then plain expressions.
        ground_truth: LaTeX or a plain expression, or a list of accepted ones.
        boxed: whether an answer without ``\boxed{}`` scores 0.
        float_rounding: decimals to which numbers are compared.

    Raises:
        ValueError: the ground truth cannot be parsed; the row is wrong, not the answer.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    readers = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    golds = []
    for right in ground_truth if isinstance(ground_truth, list) else [ground_truth]:
        text = str(right)
        gold = parse(f"\\boxed{{{text}}}", readers) or parse(text, readers)
        if not gold:
            raise ValueError(f"math-verify cannot parse the ground truth {text!r}: write LaTeX or a plain expression")
        golds.append(gold)
    at = solution_str.rfind("\\boxed")
    if boxed and at < 0:
        return 0.0
    answer = parse(solution_str[max(at, 0) :], readers)  # text before the last box is ignored
    return float(any(verify(gold, answer, float_rounding=float_rounding) for gold in golds))


def reasoning_gym_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], *, tag: str = "answer"
) -> float:
    """Return the data set's own score (0..1) of the text in the last pair of tags; 0 without tags.

    Args:
        data_source: ``reasoning_gym/NAME``; ``extra_info.dataset`` overrides the name.
        solution_str: the answer.
        ground_truth: the entry's answer.
        extra_info: ``entry`` is the data set's entry (``question``, ``answer``, ``metadata``), or its JSON.
        tag: empty scores the whole text.

    Raises:
        ValueError: the data set is unknown, or the row has no entry.
    """
    from reasoning_gym.factory import DATASETS

    from asyncrl.rewards.gym import score

    name = str(extra_info.get("dataset") or data_source.rpartition("/")[2])
    if name not in DATASETS:
        raise ValueError(f"reasoning-gym has no data set {name!r}: the row's data_source is {data_source!r}")
    entry = extra_info.get("entry")
    if isinstance(entry, str):
        entry = json.loads(entry)
    if not isinstance(entry, dict):
        raise ValueError("reasoning_gym needs the row's extra_info.entry: the data set's entry, or its JSON")
    answer = _tagged(solution_str, tag) if tag else solution_str
    if answer is None:
        return 0.0
    return score(answer.strip(), {"answer": ground_truth, "metadata": {}, **entry}, dataset=name)


_deterministic: tuple[Any, ...] = (exact, regex, json_schema, gsm8k, search_r1)
for _rule in _deterministic:  # math_score and reasoning_gym_score limit the scorer's time
    _rule.deterministic = True
_with_options: tuple[Any, ...] = (*_deterministic, math_score, reasoning_gym_score)
for _rule in _with_options:  # a column with the name of an option is no option
    _rule.only_required_columns = True
