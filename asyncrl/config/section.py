"""What all sections of the configuration share: strict types, no unknown keys, immutable."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from .toml import nested_deeper

__all__ = [
    "DEEPEST_TABLE",
    "Cores",
    "FilePath",
    "Files",
    "LearningRate",
    "PartName",
    "Schedule",
    "Section",
    "Table",
    "Texts",
    "Threads",
    "is_there_by_default",
    "list_to_tuple",
]

DEEPEST_TABLE = 16
"""Levels of tables and arrays in a configuration: more than anybody writes, far less than Python's stack holds."""


class Section(BaseModel):
    """One table of the configuration. A field's docstring is its description in messages and in the reference."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,  # "3" is no number and 1 is no truth value: a typing slip is told, not repaired
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _none_is_a_word(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        fields = cls.model_fields
        return {
            key: None if value == "none" and key in fields and is_there_by_default(fields[key]) else value
            for key, value in data.items()
        }


def is_there_by_default(field: FieldInfo) -> bool:
    """Whether an optional field has a value unless it is taken away: by the text ``none``, as TOML has no null."""
    return field.default_factory is None and not field.is_required() and field.default is not None and _optional(field)


def _optional(field: FieldInfo) -> bool:
    return get_origin(field.annotation) in {Union, types.UnionType} and type(None) in get_args(field.annotation)


def _path(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if not value or "\0" in value:
        raise PydanticCustomError("path", "must be a path: text that is not empty and holds no NUL")
    try:
        return Path(value).expanduser()
    except RuntimeError as error:  # "~nobody/..."
        raise PydanticCustomError("path", "names a home folder that does not exist") from error


def list_to_tuple(value: Any) -> Any:
    """TOML's arrays as tuples: a section cannot be changed."""
    return tuple(value) if isinstance(value, list) else value


def _files(value: Any) -> Any:
    """One path, or several."""
    return (str(value),) if isinstance(value, str | Path) else list_to_tuple(value)


def _shallow(table: dict[str, Any]) -> dict[str, Any]:
    if nested_deeper(table, DEEPEST_TABLE):
        raise PydanticCustomError("table", "must be nested at most {deepest} levels deep", {"deepest": DEEPEST_TABLE})
    return table


FilePath: TypeAlias = Annotated[Path, BeforeValidator(_path)]
Files: TypeAlias = Annotated[
    tuple[Annotated[str, Field(min_length=1, pattern=r"^[^\x00]+$")], ...], Field(min_length=1), BeforeValidator(_files)
]
Texts: TypeAlias = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(list_to_tuple)]
Table: TypeAlias = Annotated[dict[str, Any], AfterValidator(_shallow)]
PartName: TypeAlias = Annotated[
    str, Field(min_length=1, max_length=200, pattern=r"^[A-Za-z_][\w.\-]*(:[A-Za-z_][\w.]*)?$")
]
Cores: TypeAlias = Annotated[float, Field(ge=0, le=4096)]
Threads: TypeAlias = Annotated[int, Field(ge=1, le=1024)]
LearningRate: TypeAlias = Annotated[float, Field(gt=0, le=1)]
Schedule: TypeAlias = Literal["constant", "linear", "cosine"]
