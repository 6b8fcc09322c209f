"""Messages about a configuration: the key, its value, the rule it breaks, and what was probably meant."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from asyncrl.config.reference import keys_named
from asyncrl.config.sections import PART_PATTERN
from asyncrl.config.toml import key_to_toml, value_to_toml
from asyncrl.errors import ConfigError
from asyncrl.storage import without_secrets

LONGEST_VALUE = 60
MOST_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: the dotted path of a key, its ``value`` as in a file (empty if missing), and the ``rule`` it breaks.

    The ``remedy`` is what is allowed, or the nearest existing key.
    """

    path: str
    rule: str
    value: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        given = f"{self.path} = {without_secrets(self.value)}" if self.value else self.path
        return f"{given}: {self.rule}" + (f"; {self.remedy}" if self.remedy else "")


def raise_problems(problems: Sequence[Problem], *, origin: str = "") -> NoReturn:
    """Raise one :class:`ConfigError` with all problems; its ``path`` and ``remedy`` are the first one's."""
    shown = [str(problem) for problem in problems[:MOST_PROBLEMS]]
    if len(problems) > MOST_PROBLEMS:
        shown.append(f"... and {len(problems) - MOST_PROBLEMS} more")
    prefix = f"{origin}: " if origin else ""
    text = shown[0] if len(shown) == 1 else f"{len(problems)} problems\n" + "\n".join(f"  {line}" for line in shown)
    raise ConfigError(prefix + text, path=problems[0].path, remedy=problems[0].remedy)


def dotted(location: Sequence[str | int]) -> str:
    """Return ``("rollout", "stop", 0)`` as ``rollout.stop[0]``."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + _short(key_to_toml(part))
    return text


def field_at(model: type[BaseModel], path: Sequence[str]) -> FieldInfo | None:
    """Return the field at a dotted path; None if it does not exist or lies inside a free-form table."""
    for depth, key in enumerate(path):
        field = model.model_fields.get(key)
        if field is None or depth == len(path) - 1:
            return field
        section = _section(field)
        if section is None:
            return None
        model = section
    return None


def allowed(field: FieldInfo) -> str:
    """Return the values a field takes: ``a whole number, at least 1 and at most 1024``."""
    return _allowed(field.annotation, field.metadata)


def problems_of(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """Return one :class:`Problem` for each error pydantic found in ``model``."""
    problems: list[Problem] = []
    for detail in error.errors(include_url=False):
        context = detail.get("ctx", {})
        if detail["type"] == "conflicts":
            problems.extend(context["problems"])
            continue
        # Members of a union and the like appear in the location as parts that are not keys: keep what was written.
        location = detail["loc"]
        keys = [part for part in location if isinstance(part, str)]
        field = field_at(model, keys)
        if detail["type"] == "extra_forbidden":
            problems.append(_unknown_key(model, keys))
        elif detail["type"] == "missing":
            remedy = f"give {allowed(field)}" if field is not None else ""
            problems.append(Problem(dotted(location), "is missing", remedy=remedy + _about(field)))
        elif field is None:
            problems.append(Problem(dotted(location), detail["msg"], value=_shown(detail["input"])))
        else:
            near = _nearest_literal(field, detail["input"])
            own = detail["type"] in {"path", "table"}
            rule = detail["msg"] if own else f"must be {allowed(field)}"
            problems.append(Problem(dotted(location), rule + _about(field), value=_shown(detail["input"]), remedy=near))
    return problems


def _unknown_key(model: type[BaseModel], keys: Sequence[str]) -> Problem:
    path = dotted(keys)
    owner, home = model, ""
    for key in keys[:-1]:
        field = owner.model_fields.get(key)
        section = _section(field) if field is not None else None
        if section is None:
            return Problem(path, "no such key")
        owner, home = section, f"{home}{key}."
    wrong = keys[-1]
    near = [home + match for match in get_close_matches(wrong, owner.model_fields, n=1, cutoff=0.6)]
    if not near:  # the right key in the wrong table
        leaves = {candidate: candidate.rpartition(".")[2] for candidate in _paths(model)}
        close = get_close_matches(wrong, leaves.values(), n=1, cutoff=0.8)
        near = [candidate for candidate, leaf in leaves.items() if leaf in close] or _described(wrong, owner, home)
    elsewhere = [key for key in keys_named(path) or keys_named(wrong) if field_at(model, key.split(".")[:2])]
    near = list(dict.fromkeys([*elsewhere, *near]))
    if near:
        return Problem(path, "no such key", remedy=f"did you mean {' or '.join(near[:3])}?")
    where = f"[{home[:-1]}]" if home else "the top level"
    return Problem(path, "no such key", remedy=f"{where} has {', '.join(owner.model_fields)}")


def _described(wrong: str, owner: type[BaseModel], home: str) -> list[str]:
    """Return keys whose description has the words of ``wrong``: `learning_rate` finds `lr`."""
    words = wrong.lower().split("_")
    return [
        home + name
        for name, field in owner.model_fields.items()
        if all(get_close_matches(word, (field.description or "").lower().split(), n=1, cutoff=0.8) for word in words)
    ]


def _paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        section = _section(field)
        if section is None:
            yield prefix + name
        else:
            yield from _paths(section, f"{prefix}{name}.")


def _section(field: FieldInfo) -> type[BaseModel] | None:
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _about(field: FieldInfo | None) -> str:
    description = field.description if field is not None else None
    return f" ({' '.join(description.split()).rstrip('.')})" if description else ""


def _nearest_literal(field: FieldInfo, value: Any) -> str:
    if get_origin(field.annotation) is not Literal or not isinstance(value, str):
        return ""
    near = get_close_matches(value[:100].lower(), [str(choice) for choice in get_args(field.annotation)], n=1)
    return f"did you mean {value_to_toml(near[0])}?" if near else ""


def _allowed(annotation: Any, metadata: Iterable[Any]) -> str:
    metadata = list(metadata)
    origin = get_origin(annotation)
    if hasattr(annotation, "__metadata__"):  # Annotated[...] nested in a union or a tuple
        return _allowed(get_args(annotation)[0], [*_constraints(annotation.__metadata__), *metadata])
    if origin in {Union, types.UnionType}:
        choices = [choice for choice in get_args(annotation) if choice is not type(None)]
        return " or ".join(_allowed(choice, metadata) for choice in choices) + ", or left out"
    if origin is Literal:
        return "one of " + ", ".join(value_to_toml(choice) for choice in get_args(annotation))
    if origin is tuple and get_origin(inner := get_args(annotation)[0]) is Literal:
        return f"a list, each {_allowed(inner, ())}"
    if origin is tuple:
        return 'a list of texts that are not empty, like ["a", "b"]'
    if origin is dict:
        return "a table"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a table with {', '.join(annotation.model_fields)}"
    noun = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}
    return noun.get(annotation, str(annotation)) + _range(_constraints(metadata))


def _constraints(metadata: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for item in metadata:
        found.extend(item.metadata if isinstance(item, FieldInfo) else [item])
    return found


def _range(metadata: Iterable[Any]) -> str:
    parts: list[str] = []
    for item in metadata:
        if isinstance(item, annotated_types.Ge):
            parts.append(f"at least {_number(item.ge)}")
        elif isinstance(item, annotated_types.Gt):
            parts.append(f"above {_number(item.gt)}")
        elif isinstance(item, annotated_types.Le):
            parts.append(f"at most {_number(item.le)}")
        elif isinstance(item, annotated_types.Lt):
            parts.append(f"below {_number(item.lt)}")
        elif isinstance(item, annotated_types.MinLen):
            parts.append("not empty")
        elif isinstance(item, annotated_types.MaxLen):
            parts.append(f"at most {item.max_length} characters")
        elif (pattern := getattr(item, "pattern", None)) is not None:
            parts.append(_PATTERNS.get(str(pattern), f"that matches {pattern}"))
    return (", " + " and ".join(parts)) if parts else ""


_PATTERNS = {
    r"^[^\x00]+$": "without NUL",
    r"^[A-Za-z][A-Za-z0-9+.\-]*://[^\x00]+$": "that is a URL, as in s3://bucket/folder",
    r"^[A-Za-z0-9][A-Za-z0-9._\-]*$": "of letters, digits, '.', '_' and '-'",
    PART_PATTERN: "that is an installed name or package.module:Name",
}


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _shown(value: Any) -> str:
    try:
        return _short(value_to_toml(value))
    except TypeError:  # an object of a program
        return _short(repr(value))


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."
