"""The page of the algorithms names what is installed, and what it points at is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asyncrl.parts import load_part, part_names

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")


def named_under(heading: str) -> set[str]:
    """Names in the first column of the tables of a section."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))


@pytest.mark.parametrize(
    ("group", "heading"),
    [
        ("asyncrl.advantages", "Advantages"),
        ("asyncrl.policy_losses", "Policy losses"),
        ("asyncrl.corrections", "Anchors and corrections"),
    ],
)
def test_it_names_every_installed_part_and_no_other(group: str, heading: str) -> None:
    assert named_under(heading) == set(part_names(group))
    for name in part_names(group):
        assert "arXiv:" in (load_part(group, name).__doc__ or "") or group == "asyncrl.corrections"


def test_its_files_are_there() -> None:
    for path in re.findall(r"`((?:asyncrl|tests|examples)/[\w./]+)`", PAGE):
        assert (ROOT / path).exists(), path
    for name in re.findall(r"`(test_\w+\.py)`", PAGE):
        assert list((ROOT / "tests").rglob(name)), name
    for name in re.findall(r"\| `(\w+\.py)` \|", PAGE):
        assert (ROOT / "asyncrl" / "algorithms" / name).exists(), name
