"""`training`, `evaluation` and `checkpoint`."""

import re
from typing import Literal

from pydantic import Field, model_validator

from rollart.config.base import Conflict, Natural, Positive, Seconds, Section, TorchDevice


class AlgorithmConfig(Section):
    advantage: str = Field("grpo", description="grpo, another that rollart ships, or module:function")
    solved_advantage: float = Field(
        0.15, ge=0, description="advantage of groups whose members all got the top reward: keeps them learnt"
    )
    evidence_power: float = Field(
        1.0, ge=0, description="power of the share of groups with spread that scales the learning rate; 0: off"
    )
    loss: str = Field("ppo", description="ppo, another that rollart ships, or module:function")
    clip_low: float = Field(0.2, gt=0)
    clip_high: float = Field(0.28, gt=0)
    dual_clip: float | None = Field(None, gt=1)
    importance_cap: float | None = Field(2.0, gt=0, description="truncated importance sampling; null: off")
    kl: float = Field(0.0, ge=0, description="weight of the KL to the reference, the policy at the start of RL")
    entropy: float = Field(0.0, ge=0)
    aggregate: Literal["token", "sequence", "group"] = "token"


class TrainingConfig(Section):
    steps: Positive = 100
    batch_groups: Positive = Field(16, description="groups in a batch, split over the tasks by their weights")
    group_size: int = Field(8, ge=2)
    lr: float = Field(1e-3, gt=0)
    lr_warmup: Natural = 5
    lr_end: float = Field(1.0, gt=0, le=1, description="share of lr at the last step, approached in a straight line")
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    grad_clip: float = Field(1.0, gt=0)
    epochs: Positive = Field(1, description="optimizer updates on one batch")
    pack_tokens: Positive = Field(8192, description="tokens in one forward pass")
    threads: Positive = 1
    device: TorchDevice = "auto"
    transport: str = Field(
        "http",
        description="how weights reach other machines: http, nixl or mooncake://host:port; with http to fall back to",
    )
    algorithm: AlgorithmConfig = AlgorithmConfig()
    deadline: Seconds = Field(600.0, description="seconds for one step")

    @model_validator(mode="after")
    def _known_transport(self) -> "TrainingConfig":
        if not re.fullmatch(r"http|nixl|mooncake://[^/]+:\d+(\?.*)?", self.transport):
            message = f"transport must be http, nixl or mooncake://host:port, not {self.transport!r}"
            raise Conflict(message, "transport")
        return self


class EvaluationConfig(Section):
    every: Natural = Field(20, description="steps; 0: only before and after")
    episodes: Positive = Field(64, description="per task, on held-out seeds")
    final_episodes: Positive = Field(200, description="per task, before and after RL")


class CheckpointConfig(Section):
    every: Positive = 10
    keep: Positive = 2
