"""What all configuration files share: they are read and checked as a whole, and every problem is told at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self, TypeAlias

from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from .problem import Problem, dotted, problems_of, raise_problems
from .section import DEEPEST_TABLE, Section, is_there_by_default
from .toml import nested_deeper, table_to_toml

__all__ = ["Document", "RunName", "Seed"]

RunName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._\-]*$", max_length=80)]
Seed: TypeAlias = Annotated[int, Field(ge=0, le=2**32 - 1)]


class Document(Section):
    """The configuration of a command, with its tables."""

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any], *, origin: str = "") -> Self:
        """Check nested tables, as TOML gives them.

        Raises:
            ConfigError: with every problem found; ``origin`` (a file) is named in front.
        """
        deep = [key for key, value in data.items() if nested_deeper(value, DEEPEST_TABLE)]
        if deep:  # first of all: a message about such a value could not be written
            rule = f"must be nested at most {DEEPEST_TABLE} levels deep"
            raise_problems([Problem(dotted([key]), rule) for key in deep], origin=origin)
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            raise_problems(problems_of(error, cls), origin=origin)

    def to_toml(self) -> str:
        """The resolved configuration: every value, also the defaults. Reading it back gives an equal one."""
        tables = self.model_dump(mode="python", exclude_none=True)
        for name, section in tables.items():
            if isinstance(section, dict):
                values = getattr(self, name)
                for key, field in type(values).model_fields.items() if isinstance(values, Section) else ():
                    if getattr(values, key) is None and is_there_by_default(field):
                        section[key] = "none"
                for key in [key for key, value in section.items() if key.endswith("options") and value == {}]:
                    del section[key]
        return table_to_toml(tables)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        problems = list(self._conflicts())
        if problems:
            raise PydanticCustomError("conflicts", "values do not fit together", {"problems": problems})
        return self

    def _conflicts(self) -> Iterator[Problem]:
        """What does not go together."""
        yield from ()
