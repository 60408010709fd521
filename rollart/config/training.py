"""`model`, `training`, `evaluation` and `checkpoint`: the policy and how it is trained."""

import math
import re
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, model_validator

from rollart.config.algorithm import AlgorithmConfig, CriticConfig
from rollart.config.base import Conflict, Natural, Positive, Seconds, Section, TorchDevice
from rollart.config.yaml_tree import did_you_mean
from rollart.hardware.layout import Layout

# Learning rates at which RL usually works, by the number of parameters of a pretrained model; its adapters take more.
USUAL_LR = ((3e8, 2e-5), (1e9, 1e-5), (2e10, 3e-6), (math.inf, 1e-6))
UNKNOWN_SIZE = 1e9
ADAPTER_LR = 10
MODELS: dict[str, dict[str, int]] = yaml.safe_load((files("rollart.config") / "models.yaml").read_text())


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
        if self.hidden % (2 * self.heads):
            wrong = f"hidden ({self.hidden}) must be an even multiple of heads ({self.heads})"
            raise Conflict(f"{wrong}: each head has an even size, for rotary positions", "hidden")
        return self


DEMONSTRATIONS = 3000


class WarmupConfig(Section):
    """Supervised training, by the trainer of the run with its optimizer settings, on demonstrations by each task's
    scripted player, on a file of conversations, or on both."""

    demonstrations: Natural | None = Field(
        None, description=f"conversations per task by its `player`; default: {DEMONSTRATIONS}, with `conversations` 0"
    )
    conversations: Path | None = Field(
        None,
        description='a file with a JSON object per line, {"messages": [{"role": ..., "content": ...}, ...]}; the '
        "messages of the assistant are learnt, up to the longest `max_context` of the tasks",
    )
    steps: Positive = Field(600, description="optimizer steps")
    batch: Positive = Field(32, description="conversations per step")
    lr: float = Field(3e-3, gt=0, description="peak learning rate; it rises in a twentieth of the steps, then falls")
    checkpoint_every: Positive = Field(100, description="steps between the checkpoints of the warmup")

    @property
    def per_task(self) -> int:
        """Demonstrations of each task."""
        default = DEMONSTRATIONS if self.conversations is None else 0
        return default if self.demonstrations is None else self.demonstrations

    @model_validator(mode="after")
    def _some_examples(self) -> "WarmupConfig":
        if not self.per_task and self.conversations is None:
            raise Conflict("the warmup has nothing to learn from: give demonstrations or conversations")
        return self


class ModelConfig(Section):
    """Where the policy comes from: `path`, `id` or `tiny`. `model: NAME` is short for a folder or a hub id. `name` and
    `config` give the sizes of a model without its weights, for `rollart check`, `simulate` and `plan`."""

    path: Path | None = Field(None, description="a Hugging Face folder to start from")
    id: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$",
        description="a model of the Hugging Face hub, owner/name; downloaded unless it is in the cache",
    )
    revision: str | None = Field(None, description="branch, tag or commit of `id`")
    tiny: TinyModelConfig | None = Field(None, description="a tiny model with random weights")
    name: str | None = Field(None, description=f"a model without its weights: one of {', '.join(MODELS)}")
    config: dict[str, int] | None = Field(None, description="or the numbers of a model's config.json")
    warmup: WarmupConfig | None = Field(None, description="supervised training before RL")
    enable_thinking: bool | None = Field(
        None, description="whether a hybrid model reasons before it answers; default: as its chat template does"
    )
    chat_template_kwargs: dict[str, Any] = Field({}, description="other variables for the chat template")

    @model_validator(mode="after")
    def _one_source(self) -> "ModelConfig":
        """A resolved run file has the `path` of an `id` beside it."""
        folder = self.path is not None or self.id is not None
        if sum((folder, self.tiny is not None, self.name is not None, self.config is not None)) != 1:
            raise ValueError(
                "give one of `path` (a Hugging Face folder), `id` (a hub id) and `tiny` (random weights); or, to check "
                "and simulate only, `name` or `config` (sizes without weights)"
            )
        if self.revision is not None and self.id is None:
            raise Conflict("`revision` is for a model with an `id`", "revision")
        if self.name is not None and self.name not in MODELS:
            raise Conflict(f"no model is called {self.name!r}{did_you_mean(self.name, list(MODELS))}", "name")
        return self

    @property
    def template_args(self) -> dict[str, Any]:
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        return {**self.chat_template_kwargs, **thinking}

    @property
    def has_weights(self) -> bool:
        return self.name is None and self.config is None


def model_source(value: Any) -> Any:
    """`model: owner/name` is a hub id unless there is such a folder; any other text is a folder."""
    if not isinstance(value, str):
        return value
    hub = value.count("/") == 1 and not value.startswith((".", "/", "~")) and not Path(value).exists()
    return {"id" if hub else "path": value}


class ParallelConfig(Section):
    """How the trainer's ranks divide the model. Data parallelism (FSDP) takes the ranks that are left. `parallel: auto`
    is short for `{auto: true}`."""

    auto: bool = Field(
        False,
        description="the smallest tensor, then context, then expert that fits into the memory of the devices",
    )
    context: Positive = Field(1, description="ranks that share each sequence")
    tensor: Positive = Field(1, description="ranks that share each matrix product")
    expert: Positive = Field(1, description="ranks over which the experts of a mixture are spread")

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"auto": True} if value == "auto" else value

    @model_validator(mode="after")
    def _auto_alone(self) -> "ParallelConfig":
        if self.auto and (self.context, self.tensor, self.expert) != (1, 1, 1):
            raise Conflict("`auto` chooses context, tensor and expert; leave them out", "auto")
        return self

    def layout(self, ranks: int) -> Layout:
        """Of that many ranks; `auto` is data parallelism until the placement has chosen. Raises RollartError."""
        return Layout.over(ranks, context=self.context, tensor=self.tensor, expert=self.expert)


class LoraConfig(Section):
    """Train small matrices beside the model's own, which stay as they are: `x W + alpha / rank x A B`. The trainer's
    ranks may be data or context parallel."""

    rank: Positive = Field(16, description="rows of A and columns of B: how much can be learnt, and its memory")
    alpha: float = Field(32.0, gt=0, description="scale of what is added, times `rank`")
    targets: Literal["all"] | tuple[str, ...] = Field(
        "all",
        description="the linear layers that get adapters, by the last part of their names, as in [q_proj, v_proj]; "
        "all: every one of the decoder's layers, but neither the experts of a mixture nor its gates",
    )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @model_validator(mode="after")
    def _some_targets(self) -> "LoraConfig":
        if not self.targets:
            raise Conflict("name at least one linear layer, or leave it out for all", "targets")
        return self


class TrainingConfig(Section):
    """The optimizer, its batches and its process."""

    steps: Positive = Field(100, description="training steps of the run, one batch each")
    batch_groups: Positive = Field(16, description="groups in a batch, split over the tasks by their weights")
    group_size: int = Field(8, ge=2, description="trajectories in a group")
    optimizer: str = Field("adamw", description="adamw, muon, adamw_8bit, or module:function")
    lr: float = Field(
        3e-4,
        gt=0,
        description="peak learning rate; default: 3e-4 for a tiny model; for a pretrained one by its parameters, 2e-5 "
        "up to 0.3 billion, 1e-5 up to 1, 3e-6 up to 20, then 1e-6, and ten times that for its adapters; updates of "
        "Muon are scaled to the size of AdamW's",
    )
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="how the learning rate falls from `lr` at the first step to `lr_end` at the last"
    )
    lr_warmup: Natural = Field(5, description="optimizer updates in which the learning rate rises to `lr`")
    lr_end: float | None = Field(
        None, ge=0, le=1, description="fraction of `lr` at the last step of a linear or cosine schedule; null: 0"
    )
    weight_decay: float = Field(0.0, ge=0, description="weight decay, of matrices")
    betas: tuple[float, float] = Field((0.9, 0.95), description="beta 1 and 2 of AdamW")
    momentum: float = Field(0.95, ge=0, lt=1, description="momentum of Muon")
    grad_clip: float = Field(1.0, gt=0, description="maximum norm of the gradient of an update")
    epochs: Positive = Field(1, description="passes over a batch")
    updates: Positive = Field(
        1, description="optimizer updates in an epoch, each on a mini-batch of whole groups; at most `batch_groups`"
    )
    pack_tokens: Positive = Field(
        8192,
        description="tokens in one forward pass of a rank; an update accumulates the gradients of as many passes as "
        "its mini-batch takes (gradient accumulation)",
    )
    parallel: ParallelConfig = ParallelConfig()
    lora: LoraConfig | None = Field(None, description="train adapters instead of the model's own weights (LoRA)")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="of computation, and with `lora` of the frozen weights; master weights, gradients and their sums "
        "are float32 in any case",
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="activations computed again in the backward pass: all (full), or what is cheap (selective)"
    )
    replay_experts: bool = Field(
        False, description="mixtures: train with the experts that the engine used for each token, not with a new choice"
    )
    offload: tuple[Literal["optimizer", "activations"], ...] = Field(
        (),
        description="what GPUs keep in the host's memory: `optimizer` (with the master weights), `activations`; "
        "on CPUs it changes nothing",
    )
    threads: Positive | None = Field(
        None, description="CPU threads of each rank; default: its share of this machine's cores, 1 for tiny models"
    )
    device: TorchDevice = "auto"
    transport: str = Field(
        "http", description="how weights reach other machines: http, nixl or mooncake://host:port; http is the fallback"
    )
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    deadline: Seconds = Field(600.0, description="seconds for one step; a trainer that takes longer is restarted")
    start_deadline: Seconds = Field(
        300.0, description="seconds until the trainer must have started, in addition to reading the model's files"
    )

    @property
    def thread_count(self) -> int:
        return self.threads or 1

    @model_validator(mode="after")
    def _consistent_updates(self) -> "TrainingConfig":
        if self.updates > self.batch_groups:
            message = f"updates ({self.updates}) must not exceed batch_groups ({self.batch_groups})"
            raise Conflict(f"{message}: a mini-batch has at least one group", "updates")
        if self.lr_end is not None and self.lr_schedule == "constant":
            raise Conflict("lr_end needs lr_schedule: linear or lr_schedule: cosine", "lr_end")
        return self

    @model_validator(mode="after")
    def _adapters_whole(self) -> "TrainingConfig":
        for name in ("tensor", "expert"):
            if self.lora is not None and (size := getattr(self.parallel, name)) > 1:
                message = f"lora trains on data and context parallel ranks, but parallel.{name} is {size}"
                raise Conflict(f"{message}; set it to 1, and give the ranks to context or data", "lora")
        return self

    @model_validator(mode="after")
    def _known_transport(self) -> "TrainingConfig":
        if not re.fullmatch(r"http|nixl|mooncake://[^/]+:\d+(\?.*)?", self.transport):
            message = f"transport must be http, nixl or mooncake://host:port, not {self.transport!r}"
            raise Conflict(message, "transport")
        return self

    def usual_lr(self, parameters: float) -> float:
        """Of a pretrained model of that size."""
        return next(lr for size, lr in USUAL_LR if parameters <= size) * (ADAPTER_LR if self.lora is not None else 1)


class PreferenceConfig(Section):
    """`rollart dpo` and `rollart reward-model`: pairs of conversations, of which one is better. A step takes
    `training.batch_groups` of them."""

    pairs: Path | None = Field(
        None,
        description='a file with a JSON object per line, {"chosen": [{"role": ..., "content": ...}, ...], "rejected": '
        "[...]}, with `prompt` before both if it is given; or the samples.jsonl of `rollart sample`, whose attempts at "
        "an episode are paired by reward",
    )
    min_margin: float = Field(0.0, ge=0, description="samples: the rewards of a pair differ by more than this")
    per_episode: Positive = Field(4, description="samples: pairs of one episode, at most")
    held_out: float = Field(
        0.1, ge=0, lt=1, description="reward-model: share of the pairs that is never trained, to measure with"
    )


class EvaluationConfig(Section):
    """Episodes with held-out seeds, which are never trained."""

    every: Natural = Field(20, description="steps between evaluations; 0: only before and after training")
    episodes: Positive = Field(64, description="episodes per task during training")
    final_episodes: Positive = Field(200, description="episodes per task before and after training")
    samples: Positive = Field(
        1,
        description="attempts at each episode; with several, pass@k is reported beside their mean",
    )


class LedgerConfig(Section):
    """The record of trajectories. What is not trained yet is always kept, as are held-out episodes."""

    keep: Natural | Literal["all"] = Field(
        100,
        description="steps whose trained or dropped trajectories stay, to read or for `rollart replay`; all: it grows",
    )
    control: bool = Field(
        False,
        description="record all that scheduler and router get from outside, for `rollart replay --control`; it grows",
    )


class CheckpointConfig(Section):
    """Checkpoints of the trainer, from which a run resumes."""

    every: Positive = Field(10, description="steps between checkpoints")
    keep: Positive = Field(2, description="newest checkpoints kept; older ones are deleted")
    best: bool = Field(
        False, description="keep the checkpoint with the best evaluation too: mean success of the tasks, then reward"
    )
