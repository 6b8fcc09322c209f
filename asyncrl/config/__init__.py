"""The typed configuration of a run: a TOML file, dotted overrides, and every mistake told in words."""

from __future__ import annotations

from .algorithm import AlgorithmConfig, check_algorithm
from .config import Config
from .file import load_config, load_document
from .overrides import apply_overrides, parse_overrides
from .reward_training import RewardTrainingConfig
from .section import Schedule, Section
from .sections import (
    BufferConfig,
    CheckpointConfig,
    ClusterConfig,
    CriticConfig,
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
    "CriticConfig",
    "EnvConfig",
    "EvalConfig",
    "LedgerConfig",
    "ModelConfig",
    "RewardConfig",
    "RewardTrainingConfig",
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
    "load_document",
    "parse_overrides",
]
