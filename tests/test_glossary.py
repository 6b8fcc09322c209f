"""Names use the words of the glossary: configuration keys, metrics, columns and public names."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

import asyncrl.interfaces
from asyncrl.config import Config, RewardTrainingConfig
from asyncrl.plugins import PART_GROUPS, part_names

ROOT = Path(__file__).parents[1]
GLOSSARY = (ROOT / "docs" / "design" / "glossary.md").read_text(encoding="utf-8")
METRICS = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")


def words_of(text: str) -> set[str]:
    """The words of prose and identifiers, in lower case and singular."""
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1 \2", text))
    return {singular(word.lower()) for word in re.findall(r"[A-Za-z]+", spaced)}


def singular(word: str) -> str:
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(("ches", "shes", "sses", "xes")):
        return word[:-2]
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")) else word


def known_words() -> set[str]:
    """First column of the table, the paragraph of ordinary words, and the names of the parts."""
    rows = [line.split("|")[1] for line in GLOSSARY.splitlines() if line.startswith("| ")]
    ordinary = GLOSSARY.partition("## Ordinary words")[2]
    parts = [name for group in PART_GROUPS for name in part_names(group)]
    return words_of(" ".join([*rows, ordinary, *parts]))


KNOWN = known_words()


def configuration_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        for each in (field.annotation, *get_args(field.annotation)):
            if isinstance(each, type) and issubclass(each, BaseModel):
                yield from configuration_keys(each, f"{prefix}{name}.")


def metrics() -> list[str]:
    named = re.findall(r"^\| (.*?) \|", METRICS, re.MULTILINE)
    return [name for cell in named for name in re.findall(r"`([^`]+)`", cell)]


def columns() -> list[str]:
    page = (asyncrl.interfaces.__doc__ or "").partition("columns of a trajectory batch")[2]
    return re.findall(r"^    (\w+) +(?:ragged|\[B\])", page, re.MULTILINE)


def public_names() -> Iterator[str]:
    for package in ("asyncrl", "asyncrl.algorithms", "asyncrl.config", "asyncrl.data", "asyncrl.single_controller"):
        for name in importlib.import_module(package).__all__:
            yield f"{package}.{name}"
    for name, member in vars(asyncrl.interfaces).items():
        if getattr(member, "__module__", "") == "asyncrl.interfaces" and not name.startswith("_"):
            yield f"asyncrl.interfaces.{name}"


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("configuration key", {*configuration_keys(), *configuration_keys(RewardTrainingConfig)}),
        ("metric", {*metrics()}),
        ("column", {*columns()}),
        ("public name", {*public_names()}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_names_use_the_words_of_the_glossary(kind: str, names: Any) -> None:
    assert names, f"no {kind} was found"
    foreign = {
        word: sorted(name for name in names if word in words_of(name.rpartition(".")[2]))
        for word in set().union(*(words_of(name.rpartition(".")[2]) for name in names)) - KNOWN
    }
    assert foreign == {}, f"each {kind} uses words of docs/design/glossary.md"
