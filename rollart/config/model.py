"""`model`: where the policy comes from."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from rollart.config.base import Conflict, Positive, Section


class TinyModelConfig(Section):
    """A causal LM with random weights, a character tokenizer and a chat template."""

    architecture: Literal["qwen3", "llama", "qwen3_moe"] = Field("qwen3", description="its Hugging Face architecture")
    hidden: Positive = Field(128, description="size of the hidden states")
    layers: Positive = Field(4, description="decoder layers")
    heads: Positive = Field(4, description="attention heads")
    kv_heads: Positive = Field(2, description="heads of keys and values; `heads` must be a multiple")
    context: Positive = Field(1024, description="maximum context, in tokens")

    @model_validator(mode="after")
    def _grouped_heads(self) -> "TinyModelConfig":
        if self.heads % self.kv_heads:
            raise Conflict(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})", "kv_heads")
        return self


class WarmupConfig(Section):
    """Supervised training on demonstrations by each task's scripted player."""

    demonstrations: Positive = Field(3000, description="conversations per task")
    steps: Positive = Field(600, description="optimizer steps")
    batch: Positive = Field(32, description="conversations per step")
    lr: float = Field(3e-3, gt=0, description="peak learning rate")


class ModelConfig(Section):
    """Where the policy comes from: `path` or `tiny`."""

    path: Path | None = Field(None, description="a Hugging Face folder to start from")
    tiny: TinyModelConfig | None = Field(None, description="a tiny model with random weights")
    warmup: WarmupConfig | None = Field(None, description="supervised training before RL")

    @model_validator(mode="after")
    def _one_source(self) -> "ModelConfig":
        if (self.path is None) == (self.tiny is None):
            raise ValueError("give either `path` (a Hugging Face folder) or `tiny` (random weights), not both")
        return self
