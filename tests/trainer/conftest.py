from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _worlds(worlds: None) -> None:
    """Every test here may name worlds."""
