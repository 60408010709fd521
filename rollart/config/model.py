"""`model`: where the policy comes from."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from rollart.config.base import Conflict, Positive, Section


class TinyModelConfig(Section):
    """A causal LM made from scratch, with a character tokenizer and a chat template."""

    architecture: Literal["qwen3", "llama", "qwen3_moe"] = "qwen3"
    hidden: Positive = 128
    layers: Positive = 4
    heads: Positive = 4
    kv_heads: Positive = 2
    context: Positive = 1024

    @model_validator(mode="after")
    def _grouped_heads(self) -> "TinyModelConfig":
        if self.heads % self.kv_heads:
            raise Conflict(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})", "kv_heads")
        return self


class WarmupConfig(Section):
    """Supervised start on demonstrations from each task's scripted player."""

    demonstrations: Positive = Field(3000, description="conversations per task")
    steps: Positive = 600
    batch: Positive = Field(32, description="conversations per step")
    lr: float = Field(3e-3, gt=0)


class ModelConfig(Section):
    path: Path | None = Field(None, description="a Hugging Face folder to start from")
    tiny: TinyModelConfig | None = Field(None, description="or make a tiny model from scratch")
    warmup: WarmupConfig | None = Field(None, description="supervised start before RL")

    @model_validator(mode="after")
    def _one_source(self) -> "ModelConfig":
        if (self.path is None) == (self.tiny is None):
            raise ValueError("give either `path` (a Hugging Face folder) or `tiny` (made from scratch), not both")
        return self
