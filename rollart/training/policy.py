"""The policy: a transformers causal LM that answers with the log-probabilities of the tokens it is asked about."""

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from rollart.errors import RollartError
from rollart.training.kernels import use_fast_norms
from rollart.training.packing import ATTENTION, Packed, pack

LOGITS_AT_ONCE = 1 << 25
"""Logits held at one time: a vocabulary of 50,000 and a long micro-batch would take gigabytes."""

WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf")

# A service talks to a log, not to a terminal.
disable_progress_bar()


class Policy:
    """In evaluation mode even in training: dropout would make its probabilities differ from the engine's.

    It remembers what lay beside the weights in its folder (tokenizer, chat template), and saves that with them.
    """

    def __init__(self, folder: Path) -> None:
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
        self._head = self.model.get_output_embeddings()
        self._check_head()

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """By name, tied ones once."""
        return dict(self.model.named_parameters())

    def tensors(self) -> dict[str, Tensor]:
        """The weights as they are, tied ones under each of their names."""
        return {name: tensor.detach() for name, tensor in self.model.state_dict(keep_vars=True).items()}

    def save(self, folder: Path) -> None:
        """Make `folder` a Hugging Face folder that can be used as it is."""
        self.model.save_pretrained(folder)
        for name, content in self._companions.items():
            if not (folder / name).exists():
                (folder / name).write_bytes(content)

    def logprobs(self, packed: Packed, entropy: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probability of every trained token, and the entropy where it was drawn.

        Logits are computed only where they are needed. Gradients flow through the entropy only if `entropy`.
        """
        hidden = self._hidden(packed)[0].index_select(0, packed.predict)
        chunk = max(1, LOGITS_AT_ONCE // self._head.weight.shape[0])
        if len(hidden) <= chunk:
            return self._score(hidden, packed.targets, packed.temperature, entropy)
        heats = packed.temperature
        parts = [
            checkpoint(
                self._score,
                hidden[at : at + chunk],
                packed.targets[at : at + chunk],
                None if heats is None else heats[at : at + chunk],
                entropy,
                use_reentrant=False,
            )
            for at in range(0, len(hidden), chunk)
        ]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def _hidden(self, packed: Packed) -> Tensor:
        states: Tensor = self.model.base_model(
            input_ids=packed.tokens, position_ids=packed.positions, use_cache=False, packed=packed
        ).last_hidden_state
        return states

    def _score(
        self, hidden: Tensor, targets: Tensor, temperature: Tensor | None, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        logits = self._head(hidden)
        logprobs = torch.log_softmax(logits if temperature is None else logits / temperature[:, None], dim=-1)
        with torch.set_grad_enabled(entropy and torch.is_grad_enabled()):
            spread = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, targets[:, None]).squeeze(-1), spread

    @torch.no_grad()
    def _check_head(self) -> None:
        """Some models scale or cap their logits after the head, which would silently train something else."""
        packed = pack([[0, 1, 2]], [[0, 1, 1]])
        whole = self.model(input_ids=packed.tokens, position_ids=packed.positions, packed=packed).logits
        if not torch.allclose(whole, self._head(self._hidden(packed)), atol=1e-5):
            raise RollartError(
                f"{type(self.model).__name__} changes its logits after the output head; "
                "such models cannot be trained: choose one whose logits are the head's output"
            )
