from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def lines(tmp_path: Path) -> Callable[..., Path]:
    """Writes records into a file of JSON lines."""

    def write(records: Iterable[Any], name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        return path

    return write


def problem(number: int, **more: Any) -> dict[str, Any]:
    """A row in verl's columns."""
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{number} + 1 = ?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"index": number, "split": "train"},
        **more,
    }


@pytest.fixture
def problems() -> Callable[[int], list[dict[str, Any]]]:
    return lambda rows: [problem(number) for number in range(rows)]
