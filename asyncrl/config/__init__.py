"""The typed configuration of a run: a TOML file, dotted overrides, and a message for every mistake."""

from __future__ import annotations

from asyncrl.config.config import Config, RewardTrainingConfig, check_algorithm
from asyncrl.config.file import apply_overrides, load_config, load_document, parse_overrides
from asyncrl.config.sections import (
    ClusterConfig,
    EnvConfig,
    ModelConfig,
    Section,
    TrainingRanksConfig,
)

__all__ = [
    "ClusterConfig",
    "Config",
    "EnvConfig",
    "ModelConfig",
    "RewardTrainingConfig",
    "Section",
    "TrainingRanksConfig",
    "apply_overrides",
    "check_algorithm",
    "load_config",
    "load_document",
    "parse_overrides",
]
