"""Decoders with a head for one number: what a critic says before every token, how a reward model scores a sequence."""

import json
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification

from rollart.config import TrainingConfig
from rollart.core.errors import RollartError
from rollart.models.adapters import HEAD
from rollart.models.folder import is_reward_model
from rollart.training.lora import adapted_class
from rollart.training.packing import Packed
from rollart.training.policy import PolicyModel
from rollart.training.ranks import Ranks


class ValueModel(PolicyModel):
    """The head begins at 0, so nothing is worth anything yet."""

    tensor_plan = None
    what: ClassVar[str] = "critic"
    classes: ClassVar[Any] = AutoModelForTokenClassification

    def _kind(self, folder: Path) -> tuple[Any, dict[str, Any]]:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        known = self.classes._model_mapping
        if type(config) not in known:
            raise RollartError(f"a {self.what} cannot be made of {config.model_type}: transformers has no head for it")
        kind: Any = known[type(config)]
        names = {
            "__module__": kind.__module__,
            "_keys_to_ignore_on_load_missing": [HEAD],
            "_keys_to_ignore_on_load_unexpected": ["lm_head"],
            "_keep_in_fp32_modules_strict": {HEAD},  # beside frozen weights in bfloat16
        }
        kind, options = type(kind.__name__, (kind,), names), {"num_labels": 1}
        if self._lora is None:
            return kind, options
        adapted, mapping = adapted_class(kind, config, self._lora)
        return adapted, {**options, "key_mapping": mapping}

    def parameters(self) -> dict[str, nn.Parameter]:
        """With LoRA the adapters, and the head."""
        found = super().parameters()
        if self._lora is not None:
            found |= {f"{HEAD}.{name}": each for name, each in self.model.score.named_parameters()}
        return found

    @torch.no_grad()
    def _check(self) -> None:
        for parameter in self.model.score.parameters():
            parameter.zero_()

    def _outputs(self, model: Any, hidden: Tensor, targets: Tensor, temperature: Tensor | None) -> tuple[Tensor, ...]:
        head = model.score
        bias = None if head.bias is None else head.bias.float()
        values = functional.linear(hidden.float(), head.weight.float(), bias)[:, 0]
        return (values.clone(),)  # FSDP puts a hook on the result, which a view may lose

    def values(self, packed: Packed) -> Tensor:
        """Before every trained token."""
        outputs: tuple[Tensor, ...] = self.logprobs(packed)
        return outputs[0]


class RewardModel(ValueModel):
    """As transformers classifies sequences, so that others load what is exported: the score is read from the state of
    the last token. The one trained token of a sample comes after that. Scores take the place of logprobs."""

    what = "reward model"
    classes = AutoModelForSequenceClassification

    def __init__(self, folder: Path, ranks: Ranks | None = None, config: TrainingConfig | None = None) -> None:
        self._has_head = is_reward_model(folder)
        super().__init__(folder, ranks, config or TrainingConfig())
        about = json.loads(self.companions["config.json"])
        about |= {"architectures": [self._name], "id2label": {"0": "score"}, "label2id": {"score": 0}}
        about.setdefault("pad_token_id", about.get("eos_token_id"))  # transformers refuses batches without one
        self.companions["config.json"] = json.dumps(about, indent=2).encode()

    def _kind(self, folder: Path) -> tuple[Any, dict[str, Any]]:
        kind, options = super()._kind(folder)
        self._name = kind.__name__
        return kind, options

    def _check(self) -> None:
        if not self._has_head:
            super()._check()

    def logprobs(self, packed: Packed) -> tuple[Tensor, Tensor]:
        scores: Tensor = super().logprobs(packed)[0]
        return scores, torch.zeros_like(scores)
