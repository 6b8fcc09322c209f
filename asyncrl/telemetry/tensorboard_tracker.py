"""Metrics as TensorBoard's event files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["TensorBoardTracker"]


class TensorBoardTracker:
    """Event files under ``tensorboard/`` of the run's folder, through torch's writer: ``tensorboard --logdir RUN``."""

    package = "tensorboard"

    def __init__(self, folder: Path, *, name: str, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(log_dir=str(folder / "tensorboard"))
        self._writer.add_text("config", f"```\n{name}: {json.dumps(config, indent=2, default=str)}\n```", 0)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        for metric, value in metrics.items():
            self._writer.add_scalar(metric, value, step)

    def log_text(self, name: str, text: str, *, step: int) -> None:
        self._writer.add_text(name, f"```\n{text}\n```", step)

    def close(self) -> None:
        self._writer.close()
