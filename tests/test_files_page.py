"""docs/files.md names every file of the three packages with the first sentence of its docstring.

python tests/test_files_page.py    writes the page anew
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "files.md"
PACKAGES = ("asyncrl", "engines", "buffers")
HEAD = """# Every file

What each file of the three packages is, in the words of its own docstring; [the README](../README.md#the-house) has the
rooms, [architecture.md](architecture.md) says how they fit together. This page is written by
`python tests/test_files_page.py`.
"""


def clause(module: Path) -> str:
    """The first paragraph of a module's docstring, on one line, in Markdown."""
    docstring = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8")))
    assert docstring, f"{module} does not say what it is"
    line = " ".join(docstring.partition("\n\n")[0].split())
    line = re.sub(r":\w+:`~(?:\w+\.)*(\w+)`", r"`\1`", line)  # a reference shows its last name
    return re.sub(r":\w+:`(.+?)`", r"`\1`", line).replace("``", "`")


def folders() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted(file.parent for file in (ROOT / package).rglob("__init__.py"))


def page() -> str:
    lines = [HEAD]
    for folder in folders():
        lines += [f"## {folder.relative_to(ROOT)}/", "", clause(folder / "__init__.py"), ""]
        for path in sorted(folder.glob("*.py")):
            if path.name != "__init__.py":
                lines.append(f"- [{path.name}](../{path.relative_to(ROOT)}): {clause(path)}")
        lines.append("")
    return "\n".join(lines)


def test_the_page_names_every_file_in_its_own_words():
    assert PAGE.read_text(encoding="utf-8") == page(), "python tests/test_files_page.py writes it anew"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
