"""The configuration of ``asyncrl train-reward-model``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from .document import Document, RunName, Seed
from .problem import Problem
from .section import FilePath, Files, Section
from .sections import ClusterConfig, ModelConfig, TelemetryConfig, ValueTrainerConfig

__all__ = ["PreferenceConfig", "RewardTrainingConfig"]


class PreferenceConfig(Section):
    """What is compared."""

    files: Files
    """Preferences, in any form that `docs/data.md` names: `prompt`, `chosen`, `rejected`, and `margin` where one is
    better by more than another."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Columns that are called otherwise, `{chosen = "better"}`."""
    held_out_share: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the pairs that are not learned from but asked about, drawn by the seed."""


class RewardTrainingConfig(Document):
    """A reward model from comparisons (Bradley-Terry)."""

    name: RunName
    """Name of the run and of its folder."""
    seed: Seed = 0
    """Seed of the order of pairs, and of weights from scratch."""
    runs: FilePath = Path("runs")
    """Folder in which the run makes its own."""
    epochs: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Passes over the pairs; reward models are overtrained soon."""
    batch_size: Annotated[int, Field(ge=1, le=1_000_000)] = 32
    """Pairs of an optimizer step."""
    centring: Annotated[float, Field(ge=0, le=100)] = 0.01
    """Pull of a pair's scores to a sum of 0, which comparisons alone leave open (arXiv:2312.09244)."""
    max_tokens: Annotated[int, Field(ge=2, le=10_000_000)] = 4096
    """Longest row that is learned from; pairs with a longer one are left out, and counted."""
    max_tokens_per_microbatch: Annotated[int, Field(ge=2, le=100_000_000)] = 8192
    """Tokens one forward and backward pass holds on a rank."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    cluster: ClusterConfig = ClusterConfig()
    """Where the workers run."""
    model: ModelConfig
    """Model to begin with: a policy's (its head is replaced), or a reward model."""
    preferences: PreferenceConfig
    """What is compared."""
    trainer: ValueTrainerConfig = ValueTrainerConfig()
    """The ranks that train it, and how."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """What is told about the run."""

    def _conflicts(self) -> Iterator[Problem]:
        if (self.model.path is None) == (self.model.source is None):
            yield Problem(
                "model",
                "needs one of path and source",
                remedy='give one: path = "some/folder", or source = "scratch"',
            )
        if self.cluster.backend == "local" and self.trainer.world_size > 1:
            yield Problem(
                "trainer.world_size",
                "ranks are processes, and the local backend has one process",
                value=str(self.trainer.world_size),
                remedy='use 1, or cluster.backend = "ray"',
            )
        if self.max_tokens_per_microbatch < self.max_tokens:
            yield Problem(
                "max_tokens_per_microbatch",
                f"the longest row (max_tokens = {self.max_tokens}) would not fit",
                value=str(self.max_tokens_per_microbatch),
                remedy=f"use at least {self.max_tokens}, or lower max_tokens",
            )
