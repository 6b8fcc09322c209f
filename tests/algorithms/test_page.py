"""The page of the algorithms names what is installed, says what it needs and refuses, and points at what is there."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from asyncrl.algorithms import PolicyObjective, load_estimator
from asyncrl.algorithms.losses import PolicyTokens
from asyncrl.algorithms.objective import Anchor
from asyncrl.algorithms.soundness import Setting, config_issues
from asyncrl.config import Config, check_algorithm
from asyncrl.errors import ConfigError, SchemaError
from asyncrl.plugins import load_part, part_names

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")


def rows_under(heading: str) -> dict[str, dict[str, str]]:
    """The first table of a section: its other cells by column, by the name in the first one."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = re.findall(r"^\| .*$", section.split("\n\n## ")[0], re.MULTILINE)
    table = [[cell.strip() for cell in line.strip("|").split(" |")] for line in lines if "---" not in line]
    (head, *rows) = table
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        if (name := re.fullmatch(r"(?:anchor )?`(\w+)`", row[0])) and len(row) == len(head):
            found[name[1] if row[0][0] == "`" else row[0].replace("`", "")] = dict(zip(head[1:], row[1:], strict=True))
    return found


def named_under(heading: str) -> set[str]:
    return {name for name in rows_under(heading) if " " not in name}


def refusals(row: dict[str, str]) -> set[str]:
    """Phrases of the last column, without the reasons that some give."""
    return {re.split(r":| \(", phrase)[0] for phrase in row["refused"].split("; ") if phrase}


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


def test_what_an_advantage_needs_is_what_its_function_takes() -> None:
    for name, row in rows_under("Advantages").items():
        assert tuple(row["needs"].split(", ")) == load_estimator(name).needs, name


def test_what_a_loss_needs_is_what_it_asks_for() -> None:
    draw = torch.Generator().manual_seed(0)
    columns = {
        name: -torch.rand(6, generator=draw, dtype=torch.float64)
        for name in ("current", "anchor", "proximal", "behaviour")
    }
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, -2.0], dtype=torch.float64)
    for name, row in rows_under("Policy losses").items():
        loss = load_part("asyncrl.policy_losses", name)()
        tokens: dict[str, Any] = {**columns, "advantages": advantages, "mask": torch.ones(6, dtype=torch.bool)}
        needs = {"batch", "before"} if loss.prepares else set()
        prepared = loss.prepare(PolicyTokens(**tokens), seed=0) if loss.prepares else {}
        try:
            loss(PolicyTokens(**tokens, prepared=prepared))
        except SchemaError:
            needs.add("rows")
        assert set(filter(None, row["needs"].split(", "))) == needs, name


def test_every_combination_of_loss_anchor_and_correction_is_refused_where_the_page_says_so() -> None:
    losses = {name: refusals(row) for name, row in rows_under("Policy losses").items()}
    others = {name: refusals(row) for name, row in rows_under("Anchors and corrections").items()}
    estimator = load_estimator("reinforce_plus_plus")
    loss_named = {name: load_part("asyncrl.policy_losses", name) for name in losses}
    correction_named = {name: load_part("asyncrl.corrections", name) for name in part_names("asyncrl.corrections")}
    assert set().union(*losses.values(), *others.values()) == {
        "with a correction",
        "one optimizer step a batch",
        "max_staleness above 1",
        "max_staleness above 0, unless the anchor is `behaviour`",
    }
    sound = 0
    for loss, anchor, correction, stale, steps in itertools.product(
        losses, get_args(Anchor), correction_named, (0, 1, 2, 4), (1, 2)
    ):
        corrects_itself = "with a correction" in losses[loss]
        said = set(losses[loss])
        if not corrects_itself:
            said |= others[f"anchor {anchor}"] | others[correction]
        expected = {
            "with a correction": correction != "none",
            "one optimizer step a batch": steps == 1,
            "max_staleness above 1": stale > 1,
            "max_staleness above 0, unless the anchor is `behaviour`": stale > 0 and anchor != "behaviour",
        }
        objective = PolicyObjective(loss=loss_named[loss](), correction=correction_named[correction](), anchor=anchor)
        found = list(
            config_issues(objective, estimator, Setting(max_staleness=stale, optimizer_steps=steps, group_size=2))
        )
        assert len(found) == sum(expected[phrase] for phrase in said), (loss, anchor, correction, stale, steps, found)
        sound += not found
    assert sound > 100


def test_every_advantage_is_refused_where_the_page_says_so() -> None:
    tries: dict[str, dict[str, Any]] = {
        "group_size 1": {"trainer": {"group_size": 1}},
        "group_size < k": {"trainer": {"group_size": 3}},
        "`sequence_mean`": {"algorithm": {"loss_agg_mode": "sequence_mean"}},
        "a penalty in the reward": {"algorithm": {"kl_placement": "reward", "kl_coef": 0.1}},
        "groups that are used more than once": {"buffer": {"options": {"max_uses": 2}}},
    }
    smallest = {
        "name": "page",
        "steps": 10,
        "max_staleness": 2,
        "model": {"source": "scratch"},
        "env": {"name": "calculator"},
    }
    for name, row in rows_under("Advantages").items():
        found = set()
        for phrase, settings in tries.items():
            algorithm = {"advantage": name, **settings.get("algorithm", {})}
            try:
                check_algorithm(Config.from_mapping({**smallest, **settings, "algorithm": algorithm}))
            except ConfigError:
                found.add(phrase)
        assert found == refusals(row), name
