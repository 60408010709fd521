"""The run file: its sections, keys and defaults. Imports no torch, so that checking a file is instant."""

from rollart.config.algorithm import AlgorithmConfig, CorrectionConfig, CriticConfig
from rollart.config.base import Section
from rollart.config.hardware import AFFINITIES, EngineConfig, PoolConfig, VllmConfig
from rollart.config.rollout import EnvironmentsConfig, ProcessLimitsConfig, RewardsConfig
from rollart.config.run import RunFile
from rollart.config.task import INVOKERS, AgentConfig, RewardConfig, TaskConfig
from rollart.config.training import (
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    PreferenceConfig,
    TinyModelConfig,
    TrainingConfig,
    WarmupConfig,
)

__all__ = [
    "AFFINITIES",
    "INVOKERS",
    "AgentConfig",
    "AlgorithmConfig",
    "CorrectionConfig",
    "CriticConfig",
    "EngineConfig",
    "EnvironmentsConfig",
    "LoraConfig",
    "ModelConfig",
    "ParallelConfig",
    "PoolConfig",
    "PreferenceConfig",
    "ProcessLimitsConfig",
    "RewardConfig",
    "RewardsConfig",
    "RunFile",
    "Section",
    "TaskConfig",
    "TinyModelConfig",
    "TrainingConfig",
    "VllmConfig",
    "WarmupConfig",
]
