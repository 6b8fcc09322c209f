"""The calculator's tasks."""

from __future__ import annotations

import pytest

from asyncrl.envs.calculator import CalculatorFactory


@pytest.fixture(scope="session")
def factory() -> CalculatorFactory:
    return CalculatorFactory()
