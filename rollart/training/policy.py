"""The policy: a transformers causal LM that answers with the log-probabilities of the tokens it is asked about."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from rollart.core.errors import RollartError
from rollart.training.kernels import use_fast_norms
from rollart.training.packing import ATTENTION, Packed, pack
from rollart.training.ranks import Ranks

LOGITS_AT_ONCE = 1 << 25
"""Logits held at one time: a vocabulary of 50,000 and a long micro-batch would take gigabytes."""

WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf")

# A service talks to a log, not to a terminal.
disable_progress_bar()


class PolicyModel:
    """In evaluation mode even in training: dropout would make its probabilities differ from the engine's.

    It remembers what lay beside the weights in its folder (tokenizer, chat template), and saves that with them.
    """

    def __init__(self, folder: Path, ranks: Ranks | None = None, *, trained: bool = True) -> None:
        """Spread over `ranks`, if there are several. One that is not `trained` gives no gradients."""
        try:
            self.model = AutoModelForCausalLM.from_pretrained(
                folder, attn_implementation=ATTENTION, dtype=torch.float32, local_files_only=True
            ).eval()
        except (OSError, ValueError) as error:
            raise RollartError(f"no causal language model can be loaded from {folder}: {error}") from error
        self._companions = {
            file.name: file.read_bytes()
            for file in folder.iterdir()
            if file.is_file() and not file.name.endswith(WEIGHT_FILES)
        }
        use_fast_norms(self.model)
        _check_head(self.model)
        self._scorer = _Scorer(self.model)
        if ranks is not None:
            self.model.to(ranks.device)
            self._shard(ranks, trained)

    def parameters(self) -> dict[str, nn.Parameter]:
        """By name, tied ones once. Spread over the ranks they are DTensors."""
        return dict(self.model.named_parameters())

    def names(self) -> dict[str, str]:
        """Every name that the model knows its parameters by, and that of parameters() for it."""
        owners = {id(parameter): name for name, parameter in self.parameters().items()}
        state = self.model.state_dict(keep_vars=True)
        return {name: owners[id(value)] for name, value in state.items() if id(value) in owners}

    def buffers(self) -> dict[str, Tensor]:
        """What the model keeps besides its parameters. The same on every rank."""
        known = self.names()
        return {name: value for name, value in self.model.state_dict().items() if name not in known}

    def tied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`tensors` by the names of parameters(), given under every name that the model knows them by."""
        return {name: tensors[owner] for name, owner in self.names().items()} | self.buffers()

    def save(self, folder: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Make `folder` a Hugging Face folder that can be used as it is. `tensors`: the weights, if they are spread."""
        self.model.save_pretrained(folder, state_dict=None if tensors is None else self.tied(tensors))
        for name, content in self._companions.items():
            if not (folder / name).exists():
                (folder / name).write_bytes(content)

    def logprobs(self, packed: Packed, entropy: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probability of every trained token, and the entropy where it was drawn.

        Logits are computed only where they are needed. Gradients flow through the entropy only if `entropy`.
        """
        values: tuple[Tensor, Tensor] = self._scorer(packed, entropy)
        return values

    def _shard(self, ranks: Ranks, trained: bool) -> None:
        """Each decoder layer is gathered when its turn comes; embedding, head and last norm for the whole pass."""
        if ranks.mesh is None:
            return
        layers = [module for module in self.model.modules() if type(module).__name__ in self.model._no_split_modules]
        for module in (*layers, self._scorer):
            fully_shard(module, mesh=ranks.mesh, reshard_after_forward=module is not self._scorer or not trained)
        for module in self._scorer.modules():
            if isinstance(module, FSDPModule):
                # Token weights are shares of the whole batch, so gradients are added up; gloo knows only sums anyway.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)


class _Scorer(nn.Module):
    """The forward pass that training needs, as one module: FSDP gathers the weights of a module around its forward."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, packed: Packed, entropy: bool) -> tuple[Tensor, Tensor]:
        head = self.model.get_output_embeddings()
        hidden = _hidden(self.model, packed)[0].index_select(0, packed.predict)
        chunk = max(1, LOGITS_AT_ONCE // head.weight.shape[0])
        if len(hidden) <= chunk:
            return _score(head, hidden, packed.targets, packed.temperature, entropy)
        heats = packed.temperature
        parts = [
            checkpoint(
                _score,
                head,
                hidden[at : at + chunk],
                packed.targets[at : at + chunk],
                None if heats is None else heats[at : at + chunk],
                entropy,
                use_reentrant=False,
            )
            for at in range(0, len(hidden), chunk)
        ]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _hidden(model: Any, packed: Packed) -> Tensor:
    states: Tensor = model.base_model(
        input_ids=packed.tokens, position_ids=packed.positions, use_cache=False, packed=packed
    ).last_hidden_state
    return states


def _score(
    head: nn.Module, hidden: Tensor, targets: Tensor, temperature: Tensor | None, entropy: bool
) -> tuple[Tensor, Tensor]:
    logits = head(hidden)
    logprobs = torch.log_softmax(logits if temperature is None else logits / temperature[:, None], dim=-1)
    with torch.set_grad_enabled(entropy and torch.is_grad_enabled()):
        spread = -(logprobs.exp() * logprobs).sum(-1)
    return -functional.nll_loss(logprobs, targets, reduction="none"), spread


@torch.no_grad()
def _check_head(model: Any) -> None:
    """Some models scale or cap their logits after the head, which would silently train something else."""
    packed = pack([[0, 1, 2]], [[0, 1, 1]])
    whole = model(input_ids=packed.tokens, position_ids=packed.positions, packed=packed).logits
    if not torch.allclose(whole, model.get_output_embeddings()(_hidden(model, packed)), atol=1e-5):
        raise RollartError(
            f"{type(model).__name__} changes its logits after the output head; "
            "such models cannot be trained: choose one whose logits are the head's output"
        )
