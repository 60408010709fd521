"""The run file: its sections, keys and defaults. Imports no torch, so that checking a file is instant."""

from rollart.config.base import Conflict, Section
from rollart.config.hardware import AFFINITIES, DeviceConfig, EngineConfig, PoolConfig, RoutingConfig, VllmConfig
from rollart.config.model import ModelConfig, TinyModelConfig, WarmupConfig
from rollart.config.rollout import EnvironmentsConfig, QuarantineConfig, RewardsConfig, RolloutConfig
from rollart.config.run import RunFile
from rollart.config.task import INVOKERS, AgentConfig, RewardConfig, TaskConfig
from rollart.config.training import AlgorithmConfig, CheckpointConfig, EvaluationConfig, TrainingConfig

__all__ = [
    "AFFINITIES",
    "INVOKERS",
    "AgentConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "Conflict",
    "DeviceConfig",
    "EngineConfig",
    "EnvironmentsConfig",
    "EvaluationConfig",
    "ModelConfig",
    "PoolConfig",
    "QuarantineConfig",
    "RewardConfig",
    "RewardsConfig",
    "RolloutConfig",
    "RoutingConfig",
    "RunFile",
    "Section",
    "TaskConfig",
    "TinyModelConfig",
    "TrainingConfig",
    "VllmConfig",
    "WarmupConfig",
]
