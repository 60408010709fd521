"""The run file: what a user may ask for, with the defaults. Imports no torch, so that checking a file is instant."""

from rollart.config.base import Conflict, Section
from rollart.config.hardware import AFFINITIES, Device, Engine, Pool, Routing, Vllm
from rollart.config.model import Model, TinyModel, WarmUp
from rollart.config.rollout import Environments, Quarantine, Rewards, Rollout
from rollart.config.run import RunFile
from rollart.config.task import Agent, Reward, Task
from rollart.config.training import Algorithm, Checkpoint, Evaluation, Training

__all__ = [
    "AFFINITIES",
    "Agent",
    "Algorithm",
    "Checkpoint",
    "Conflict",
    "Device",
    "Engine",
    "Environments",
    "Evaluation",
    "Model",
    "Pool",
    "Quarantine",
    "Reward",
    "Rewards",
    "Rollout",
    "Routing",
    "RunFile",
    "Section",
    "Task",
    "TinyModel",
    "Training",
    "Vllm",
    "WarmUp",
]
