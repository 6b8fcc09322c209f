"""Metrics for Weights & Biases."""

from __future__ import annotations

import html
import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["WandbTracker"]

_STEP = "trainer/step"


class WandbTracker:
    """A run named like ours, which a resumed run goes on with; the rest (project, mode, key) is of its environment.

    Without a network: ``WANDB_MODE=offline``, and later ``wandb sync RUN/wandb/offline-run-*``.

    Our step is a metric of its own, against which all others are drawn: scores of an evaluation beside training come
    after those of later steps, and wandb drops what goes back by its own step.
    """

    package = "wandb"

    def __init__(self, folder: Path, *, name: str, config: Mapping[str, Any]) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        self._run: Any = self._wandb.init(
            id=re.sub(r"[^\w.\-]", "-", folder.name)[-64:],
            name=folder.name,
            group=name,
            dir=str(folder),
            config=dict(config),
            # Offline there is nothing to ask, and wandb 0.31 then writes nothing at all of a run that may be resumed.
            resume="allow" if self._wandb.setup().settings.mode == "online" else None,
        )
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._run.log({**metrics, _STEP: step})

    def log_text(self, name: str, text: str, *, step: int) -> None:
        self._run.log({name: self._wandb.Html(f"<pre>{html.escape(text)}</pre>"), _STEP: step})

    def close(self) -> None:
        self._run.finish()
