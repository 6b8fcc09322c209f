"""The defects that benchmarks plant still fit the source: each replaces a text that occurs once."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize("name", ["planted_defects", "mesh_defects"])
def test_each_replaces_a_text_that_occurs_once(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which the programs set for themselves
    defects = importlib.import_module(name).DEFECTS
    assert len(defects) >= 30
    for defect in defects:
        defect.mutant  # noqa: B018 - ends the program where it does not
