"""Rules that compare texts. All are functions with verl's signature."""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any

__all__ = ["exact", "gsm8k", "json_schema", "regex"]

_FENCE = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)
_GSM8K = re.compile(r"####\s*(-?[0-9][0-9,]*(?:\.[0-9]+)?)")
_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?")


def exact(solution_str: str, ground_truth: Any, *, tag: str = "", ignore_case: bool = False) -> float:
    """1 if the answer is the ground truth, else 0; white space around and between words does not count.

        >>> exact("so <answer> forty  two </answer>", "Forty two", tag="answer", ignore_case=True)
        1.0

    Args:
        solution_str: the answer.
        ground_truth: a text or number, or a list of which any will do.
        tag: the text in the last pair ``<tag>...</tag>`` is the answer; 0 where there is none.
        ignore_case: whether capitals are as good as small letters.
    """
    answer = _tagged(solution_str, tag) if tag else solution_str
    if answer is None:
        return 0.0
    rights = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    return float(_normal(answer, ignore_case=ignore_case) in {_normal(str(r), ignore_case=ignore_case) for r in rights})


def regex(solution_str: str, ground_truth: Any, *, pattern: str, group: int | str | None = None) -> float:
    r"""1 if ``pattern`` is found in the answer, else 0; with a ``group``, if its last match there is the ground truth.

        >>> regex("x = 3, y = 4", "4", pattern=r"= (\d)", group=1)
        1.0

    Args:
        solution_str: the answer.
        ground_truth: what the group must be; not looked at without one.
        pattern: a regular expression of Python; ``(?s)`` in front lets dots match line ends.
        group: number or name.
    """
    matches = list(re.finditer(pattern, solution_str))
    if group is None or not matches:
        return float(bool(matches))
    return exact(matches[-1].group(group) or "", ground_truth)


def json_schema(
    solution_str: str, ground_truth: Any, extra_info: dict[str, Any], *, schema: dict[str, Any] | None = None
) -> float:
    """1 if the answer is JSON of a schema, else 0. It may stand in a fenced block, of which the last counts.

        >>> json_schema('{"age": 7}', None, {}, schema={"type": "object", "required": ["age"]})
        1.0

    Args:
        solution_str: the answer.
        ground_truth: not looked at.
        extra_info: its ``schema`` (a table, or JSON text) is the row's own.
        schema: of all rows.

    Raises:
        ValueError: there is no schema.
    """
    from jsonschema.validators import validator_for

    wanted = extra_info.get("schema", schema)
    if isinstance(wanted, str):
        wanted = json.loads(wanted)
    if not isinstance(wanted, dict):
        raise ValueError("json_schema needs a schema: give one in the options, or in the row's extra_info.schema")
    validator: Any = validator_for(wanted)
    validator.check_schema(wanted)
    fenced = _FENCE.findall(solution_str)
    try:
        value = json.loads(fenced[-1] if fenced else solution_str)
    except (json.JSONDecodeError, RecursionError):
        return 0.0
    return float(validator(wanted).is_valid(value))


def gsm8k(solution_str: str, ground_truth: Any, *, strict: bool = True) -> float:
    r"""1 if the number behind the last ``####`` is the ground truth, as GSM8K's own answers are written.

        >>> gsm8k("6 times 7 is 42\n#### 42", "42"), gsm8k("it is 42", "42"), gsm8k("it is 42", "42", strict=False)
        (1.0, 0.0, 1.0)

    Args:
        solution_str: the answer.
        ground_truth: a number, also as text.
        strict: otherwise, the last number of the answer counts where there is no ``####``.
    """
    found = _GSM8K.findall(solution_str) or ([] if strict else _NUMBER.findall(solution_str))
    return float(bool(found) and _same_number(found[-1], str(ground_truth)))


def _tagged(text: str, tag: str) -> str | None:
    _, opened, rest = text.rpartition(f"<{tag}>")
    inside, closed, _ = rest.partition(f"</{tag}>")
    return inside if opened and closed else None


def _normal(text: str, *, ignore_case: bool) -> str:
    text = " ".join(unicodedata.normalize("NFC", text).split())
    return text.casefold() if ignore_case else text


def _same_number(one: str, other: str) -> bool:
    try:
        return float(one.replace(",", "")) == float(other.replace(",", "").strip())
    except ValueError:
        return False
