"""How docstrings become Markdown: doctests are code blocks, and roles of reStructuredText are plain code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":\w+:`~?(?:[\w.]+\.)*(\w+)`")


class Docstrings(griffe.Extension):
    """Rewrites the docstring of every object before it is rendered."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Put doctests into code blocks, whatever their indentation, and replace roles."""
    lines: list[str] = []
    in_example = False
    for line in _ROLE.sub(r"`\1`", text).replace("``", "`").splitlines():
        begins = line.lstrip().startswith(">>>")
        if begins and not in_example:
            lines += ["", "```pycon"]
        elif in_example and not line.strip():
            lines.append("```")
        in_example = begins or (in_example and bool(line.strip()))
        lines.append(line.strip() if begins else line.removeprefix("    ") if in_example else line)
    return "\n".join([*lines, "```"] if in_example else lines)
