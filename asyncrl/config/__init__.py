"""The typed configuration of a run: a TOML file, dotted overrides, and every mistake told in words."""

from __future__ import annotations

from .algorithm import AlgorithmConfig, check_algorithm
from .config import Config
from .file import load_config
from .overrides import apply_overrides, parse_overrides
from .section import Schedule, Section
from .sections import (
    BufferConfig,
    CheckpointConfig,
    ClusterConfig,
    EnvConfig,
    EvalConfig,
    LedgerConfig,
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
    "LedgerConfig",
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
    "check_algorithm",
    "load_config",
    "parse_overrides",
]
