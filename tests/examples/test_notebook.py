"""The notebook runs from top to bottom in a kernel of its own, and says what its text promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "single_controller.ipynb"


def test_it_is_stored_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    codes = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in codes)


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """What each cell of code shows."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=100, kernel_name="python3", resources={}).execute()
    return [shown(cell) for cell in notebook.cells if cell.cell_type == "code"]


def shown(cell: Any) -> str:
    texts: list[str] = []
    for output in cell.outputs:
        texts.append(output.text if output.output_type == "stream" else str(dict(output.get("data", {}))))
    return "\n".join(texts)


@pytest.mark.slow
def test_it_shows_what_it_says(printed: list[str]) -> None:
    everything = "\n".join(printed)
    assert "actor: 2 workers, I am rank 0" in everything
    assert "range(0, 3)" in everything
    assert "range(3, 5)" in everything
    assert "'100 tokens on rank 1'" in everything
    assert "actor.update: pending" in everything
    assert "from reward.score" in everything
    assert "'image/png'" in everything
    assert "WorkerError - " in everything
    assert "ValueError" in everything
    assert "([[(1, 900), (3, 300)], [(2, 500), (0, 100)]],)" in everything
    assert "actor.generate did not finish within 0.01 s" in everything
    assert "True <DataProtoFuture actor.generate: cancelled>" in everything
    assert "[3, 3]" in printed[-1]
