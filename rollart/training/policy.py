"""The policy: a transformers causal LM that returns the log-probabilities of given tokens."""

from collections.abc import Mapping
from functools import partial
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
from rollart.training.packing import ATTENTION, Packed, pack
from rollart.training.ranks import Ranks

LOGITS_AT_ONCE = 1 << 25  # with a vocabulary of 50,000, a long micro-batch would take gigabytes
WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf")

disable_progress_bar()  # a service writes to a log, not to a terminal


class PolicyModel:
    """In evaluation mode even in training: dropout would make its probabilities differ from the engine's.

    It keeps the other files of its folder (tokenizer, chat template), and saves them with the weights.
    """

    def __init__(self, folder: Path, ranks: Ranks | None = None, *, trained: bool = True) -> None:
        """Sharded over `ranks`, if there are several. Not `trained`: no gradients."""
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
        """By name, tied ones once. They are DTensors if they are sharded."""
        return dict(self.model.named_parameters())

    def names(self) -> dict[str, str]:
        """Every name of a parameter in the model, tied ones included, to its name in parameters()."""
        owners = {id(parameter): name for name, parameter in self.parameters().items()}
        state = self.model.state_dict(keep_vars=True)
        return {name: owners[id(value)] for name, value in state.items() if id(value) in owners}

    def buffers(self) -> dict[str, Tensor]:
        """The same on every rank."""
        known = self.names()
        return {name: value for name, value in self.model.state_dict().items() if name not in known}

    def state_dict(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`tensors`, named as in parameters(), under every name that the model has for them, and the buffers."""
        return {name: tensors[owner] for name, owner in self.names().items()} | self.buffers()

    def save(self, folder: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Write a complete Hugging Face folder. `tensors`: the weights, if they are sharded."""
        self.model.save_pretrained(folder, state_dict=None if tensors is None else self.state_dict(tensors))
        for name, content in self._companions.items():
            if not (folder / name).exists():
                (folder / name).write_bytes(content)

    def logprobs(self, packed: Packed, entropy: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probability of every trained token, and the entropy of the distribution it was sampled from. Gradients
        flow through the entropy only if `entropy`."""
        values: tuple[Tensor, Tensor] = self._scorer(packed, entropy)
        return values

    def _shard(self, ranks: Ranks, trained: bool) -> None:
        """Decoder layers are gathered one by one; embedding, head and last norm for the whole pass."""
        if ranks.mesh is None:
            return
        layers = [module for module in self.model.modules() if type(module).__name__ in self.model._no_split_modules]
        for module in (*layers, self._scorer):
            fully_shard(module, mesh=ranks.mesh, reshard_after_forward=module is not self._scorer or not trained)
        for module in self._scorer.modules():
            if isinstance(module, FSDPModule):
                # Token weights are shares of the whole batch, so gradients are summed; gloo has only sums anyway.
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


class _RMSNorm(torch.autograd.Function):
    """transformers writes RMS norm as six elementwise operations, with a dozen more in the backward pass; on a small
    model they take more time than some of the matrix products. This is one function with a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        norm = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
        scale = norm.square_().div_(states.shape[-1]).add_(epsilon).rsqrt_()
        unit: Tensor = states * scale
        ctx.save_for_backward(unit, scale, weight)
        return unit * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        unit, scale, weight = ctx.saved_tensors
        size = weight.shape[0]
        product = (grads[0] * unit).reshape(-1, size)
        along = (product @ weight).div_(size).view(scale.shape)
        to_states = torch.addcmul(grads[0] * weight, unit, along, value=-1).mul_(scale)
        return to_states, product.sum(0), None


def rms_norm(module: nn.Module, states: Tensor) -> Tensor:
    out: Tensor = _RMSNorm.apply(states, module.weight, module.variance_epsilon)  # type: ignore[no-untyped-call]
    return out


@torch.no_grad()
def use_fast_norms(model: nn.Module) -> int:
    """Replace the RMS norms of `model`, each only if it computes the same thing; returns how many."""
    replaced = 0
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not hasattr(module, "variance_epsilon") or not isinstance(weight, Tensor) or weight.ndim != 1:
            continue
        probe = torch.linspace(-2, 3, 3 * len(weight)).view(3, -1)
        if torch.allclose(module(probe), rms_norm(module, probe), atol=1e-5):
            module.forward = partial(rms_norm, module)
            replaced += 1
    return replaced
