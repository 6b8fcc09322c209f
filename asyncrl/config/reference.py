"""Every key of a configuration with its type, default, range and description, as the sections declare them."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key.

    Attributes:
        name: dotted, ``trainer.lr``; its unit is part of it.
        table: name of its table (empty for the first keys of a file), ``about`` what that is.
        type: in words; ``default`` as a file has it, ``required`` or ``none``; ``range`` empty without bounds.
        choices: values of a closed list.
        text: what it does.
    """

    name: str
    table: str
    about: str
    type: str
    default: str
    range: str
    choices: tuple[str, ...]
    text: str


def keys_of(model: type[BaseModel], table: str = "") -> Iterator[Key]:
    """Yield the keys of a section, then those of the sections in it.

    >>> from asyncrl.config import Config
    >>> next(key for key in keys_of(Config) if key.name == "max_staleness").default
    '1'
    """
    prefix = f"{table}." if table else ""
    sections: list[tuple[str, type[BaseModel]]] = []
    for name, field in model.model_fields.items():
        section = _section(field.annotation)
        if section is not None:
            sections.append((f"{prefix}{name}", section))
        if section is None or field.default is None:
            yield Key(
                name=f"{prefix}{name}",
                table=table,
                about=_text(model.__doc__),
                type=_type(field.annotation),
                default=_default(field),
                range=_range(field),
                choices=_choices(field.annotation),
                text=_text(field.description),
            )
    for name, section in sections:
        yield from keys_of(section, name)


def _section(annotation: Any) -> type[BaseModel] | None:
    """Return the section behind a field, also of an optional one."""
    for each in (annotation, *get_args(annotation)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            return each
    return None


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin in (Union, types.UnionType):
        return " or ".join("`none`" if each is type(None) else _type(each) for each in arguments)
    if origin is Literal:
        return ", ".join(f"`{each}`" for each in arguments)
    if origin in (tuple, list):
        return f"list of {_type(arguments[0])}"
    if origin is dict or annotation is dict:
        return "table"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    names = {str: "text", bool: "true or false", int: "integer", float: "number", Path: "path"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _choices(annotation: Any) -> tuple[str, ...]:
    if get_origin(annotation) is Literal:
        return tuple(map(str, get_args(annotation)))
    if annotation is bool:
        return ("true", "false")
    return tuple(choice for each in get_args(annotation) for choice in _choices(each))


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return "required"
    if default is None:
        return "none"
    if isinstance(default, tuple):
        default = list(default)
    return str(default).lower() if isinstance(default, bool) else str(default)


def _range(field: FieldInfo) -> str:
    found: dict[str, Any] = {}
    pending: list[Any] = [*field.metadata, field.annotation]
    while pending:
        each = pending.pop()
        found |= {
            name: getattr(each, name) for name in ("ge", "gt", "le", "lt") if getattr(each, name, None) is not None
        }
        pending += [part for part in get_args(each) if not isinstance(part, str)]
        pending += list(getattr(each, "metadata", ()))
    marks = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    return ", ".join(f"{words} {found[name]:g}" for name, words in marks.items() if name in found)


def _text(text: str | None) -> str:
    plain = " ".join((text or "").split())
    return re.sub(r":\w+:`~?(?:\w+\.)*(\w+)`", r"`\1`", plain).replace("``", "`")
