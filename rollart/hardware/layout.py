"""How the ranks of a trainer divide one model: the layout, and the sentences about those that cannot be."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rollart.core.errors import RollartError


@dataclass(frozen=True, slots=True)
class Layout:
    """The number of ranks is `data` x `context` x `tensor`, the last of them innermost.

    - `data`: each has batches of its own; FSDP shards weights over `data` x `context`, and gathers them by layer
    - `context`: these split each sequence; attention exchanges heads for tokens (Ulysses)
    - `tensor`: these split each matrix product
    - `expert`: these split the experts of a mixture; a second view of the same ranks
    """

    data: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    @classmethod
    def over(cls, ranks: int, *, context: int = 1, tensor: int = 1, expert: int = 1) -> "Layout":
        """The layout in which data parallelism takes the ranks that are left. Raises RollartError."""
        data, left = divmod(ranks, context * tensor)
        if left or not data:
            raise RollartError(
                f"{ranks} ranks cannot be divided into context {context} x tensor {tensor}; "
                f"give the trainer a multiple of {context * tensor} ranks"
            )
        if expert > 1 and (ranks % expert or expert % tensor):
            raise RollartError(
                f"expert {expert} must divide the number of ranks ({ranks}) and be a multiple of tensor ({tensor})"
            )
        return cls(data, context, tensor, expert)

    @property
    def ranks(self) -> int:
        return self.data * self.context * self.tensor

    @property
    def shards(self) -> int:
        """Into how many parts FSDP cuts the weights of a tensor-parallel rank."""
        return self.data * self.context

    def data_index(self, rank: int) -> int:
        """Which batches a rank trains: ranks that share a sequence or a matrix get the same."""
        return rank // (self.context * self.tensor)

    def leads(self, rank: int) -> bool:
        """Whether a rank is the first of those with the same batches: what all of them know, it reports."""
        return rank % (self.context * self.tensor) == 0

    def __str__(self) -> str:
        """For instance `data 2 x tensor 2, experts over 4`.

        >>> str(Layout(2, 1, 2, 4)), str(Layout())
        ('data 2 x tensor 2, experts over 4', 'data 1')
        """
        sizes = {"data": self.data, "context": self.context, "tensor": self.tensor}
        named = [f"{name} {size}" for name, size in sizes.items() if size > 1] or [f"data {self.data}"]
        return " x ".join(named) + (f", experts over {self.expert}" if self.expert > 1 else "")


SINGLE = Layout()


def misfits(layout: Layout, model: Mapping[str, Any]) -> Iterator[str]:
    """Why a model, given by its `config.json`, cannot be laid out so; nothing if it can."""
    heads = int(model.get("num_attention_heads") or 1)
    kv_heads = int(model.get("num_key_value_heads") or heads)
    experts = int(model.get("num_experts") or model.get("num_local_experts") or 0)
    if heads % layout.tensor or kv_heads % layout.tensor:
        yield f"tensor {layout.tensor} must divide the model's {heads} attention heads and its {kv_heads} KV heads"
    elif heads // layout.tensor % layout.context:
        each = f"{heads} attention heads" + (f" / tensor {layout.tensor}" if layout.tensor > 1 else "")
        yield f"context {layout.context} must divide the model's {each}"
    if layout.expert > 1 and not experts:
        yield f"expert {layout.expert} needs a mixture of experts, but the model has none"
    elif experts and layout.tensor > 1 == layout.expert:
        yield f"tensor {layout.tensor} needs an `expert` too, a multiple of it: experts are not cut, but spread"
    elif experts % layout.expert:
        yield f"expert {layout.expert} must divide the model's {experts} experts"
