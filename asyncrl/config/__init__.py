"""The typed configuration of a run: a TOML file, dotted overrides, and every mistake told in words."""

from __future__ import annotations

from .config import Config
from .file import load_config
from .overrides import apply_overrides, parse_overrides
from .section import Schedule, Section
from .sections import (
    AlgorithmConfig,
    BufferConfig,
    CheckpointConfig,
    ClusterConfig,
    EnvConfig,
    EvalConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    SftConfig,
    TelemetryConfig,
    TrainerConfig,
    WeightsConfig,
)

__all__ = [
    "AlgorithmConfig",
    "BufferConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "EnvConfig",
    "EvalConfig",
    "ModelConfig",
    "RewardConfig",
    "RolloutConfig",
    "Schedule",
    "Section",
    "SftConfig",
    "TelemetryConfig",
    "TrainerConfig",
    "WeightsConfig",
    "apply_overrides",
    "load_config",
    "parse_overrides",
]
