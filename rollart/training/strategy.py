"""What a learner needs of a policy, however its ranks divide it: `PolicyModel` is the one that is built in."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from rollart.models.disk_names import DiskTensor
from rollart.training.experts import ExpertLoad
from rollart.training.packing import Packed


class Scorer(Protocol):
    """A model that is not trained."""

    def logprobs(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """As those of a Strategy, without gradients."""
        ...


class Strategy(Protocol):
    """All ranks call each method at the same time. Parameters and their gradients are torch tensors, DTensors where
    ranks share them, under the names that transformers has for them in memory."""

    @property
    def companions(self) -> Mapping[str, bytes]:
        """The other files of its folder: configuration, tokenizer, chat template."""
        ...

    @property
    def shares_prompts(self) -> bool:
        """Whether a micro-batch may have a prompt once for all sequences that begin with it."""
        ...

    def logprobs(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """Log-probability of every trained token, and the entropy of its distribution, on all ranks that share the
        micro-batch. Gradients of the ranks with other micro-batches are summed by the backward pass."""
        ...

    def expert_load(self) -> ExpertLoad | None:
        """Of the micro-batch of the last logprobs(), if the model is a mixture of experts."""
        ...

    def base(self) -> Scorer | None:
        """The model that training started from, if the policy still has it."""
        ...

    def parameters(self) -> dict[str, nn.Parameter]:
        """Those that are trained, published and kept in checkpoints."""
        ...

    def embeddings(self) -> frozenset[str]:
        """Those of parameters() that are the embeddings of tokens or the output head."""
        ...

    def names(self) -> dict[str, str]:
        """Every name of a parameter in the model, tied ones included, to its name in parameters()."""
        ...

    def buffers(self) -> dict[str, Tensor]: ...

    def on_disk(self, name: str, shape: Sequence[int]) -> list[DiskTensor]:
        """What a parameter or buffer is in files and publications: the runs of its flat order that have names there."""
        ...

    def state_dict(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]: ...
