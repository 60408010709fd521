"""Which part of a tensor a rank has, whatever the layout: the basis of publications, checkpoints and norms."""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@dataclass(frozen=True, slots=True)
class Block:
    """`values` are at `offset`, one number per dimension, of a tensor of `shape`."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: Tensor


def block(tensor: Tensor) -> Block:
    """What this rank has of a tensor: all of it, if it is not sharded."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return Block(tuple(tensor.shape), (0,) * tensor.ndim, tensor)
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Block(tuple(tensor.shape), tuple(offset), tensor.to_local())


def copies(tensor: Tensor, ranks: int) -> int:
    """How many of the ranks have this rank's part of a tensor."""
    if not isinstance(tensor, DTensor):
        return ranks
    mesh = tensor.device_mesh
    sizes = [mesh.size(dim) for dim, placement in enumerate(tensor.placements) if placement.is_replicate()]
    return prod(sizes) * (ranks // mesh.size())


def is_owner(tensor: Tensor, rank: int, tensor_parallel: int) -> bool:
    """Whether this rank is the one that writes what it has of a tensor: of several copies, the first.

    A mesh smaller than the number of ranks is one of those that tensor-parallel ranks have each for themselves.
    """
    if not isinstance(tensor, DTensor):
        return rank == 0
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    first = all(coordinate[dim] == 0 for dim, placement in enumerate(tensor.placements) if placement.is_replicate())
    return first and (mesh.size() == distributed.get_world_size() or rank % tensor_parallel == 0)


def rows(tensor: Tensor) -> tuple[Tensor, int]:
    """What this rank has of a tensor when it is cut into runs of its flat order: the values and where they start.
    Ranks that split other dimensions than the first exchange parts, so all ranks of the tensor's mesh call this."""
    part = block(tensor)
    if isinstance(tensor, DTensor) and any(getattr(placement, "dim", 0) for placement in tensor.placements):
        wanted = [placement if placement.is_replicate() else Shard(0) for placement in tensor.placements]
        part = block(tensor.redistribute(placements=wanted))
    return part.values, part.offset[0] * prod(part.shape[1:]) if part.values.numel() and part.shape else 0


def squares(tensor: Tensor, ranks: int) -> Tensor:
    """This rank's share of the sum of squares of a tensor; the shares of all ranks add up to it."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    total: Tensor = torch.linalg.vector_norm(local, dtype=torch.float32).double().square()
    return total / copies(tensor, ranks)
