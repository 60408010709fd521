"""The ranks of one trainer: the processes that share its weights, and what they say to each other.

Invariants: rank 0 leads and the others follow; a follower acts only on an order of rank 0, so that every rank runs the
same collectives in the same sequence. Between orders rank 0 gives a sign of life, which bounds the wait of a follower.
Whatever goes wrong between an order and its end leaves the ranks out of step: it is `RanksLost`, and the process has
to end. A rank that dies closes its connections, which its neighbours see at once; a deadline is for machines that
vanish. Weights are spread with FSDP2: gloo carries orders, and tensors on CPUs; NCCL carries tensors on GPUs, which has
not been exercised. One rank alone has no process group and pays nothing.
"""

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import msgspec
import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from rollart.core.errors import RollartError

JOIN_DEADLINE = 60.0
COLLECTIVE_DEADLINE = 60.0
"""Ranks run the same passes over about as many tokens: one that is a minute late in a collective is lost."""

BEAT_SECONDS = 10.0


class RanksLost(RollartError):
    """The ranks are out of step, or some are gone; they have to start again from a checkpoint."""


class RankAddress(msgspec.Struct, frozen=True):
    """Which rank a process is, of how many, and the host:port at which rank 0 awaits the others."""

    rank: int
    ranks: int
    address: str


@dataclass(frozen=True, slots=True)
class _Group:
    mesh: DeviceMesh
    orders: distributed.ProcessGroup
    store: Store  # rank 0 serves it as long as it lives


class Ranks:
    """Make it with `alone` or `join`."""

    def __init__(self, rank: int, size: int, device: torch.device, group: _Group | None) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._group = group

    @classmethod
    def alone(cls, device: str = "cpu") -> "Ranks":
        return cls(0, 1, torch.device(device), None)

    @classmethod
    def join(
        cls, place: RankAddress, device: str = "cpu", *, patience: float, deadline: float = JOIN_DEADLINE
    ) -> "Ranks":
        """Meet the other ranks. `patience` is how long rank 0 may be busy on its own, for instance with a save."""
        if place.ranks == 1:
            return cls.alone(device)
        where = torch.device(device)
        if where.type == "cuda":
            torch.cuda.set_device(where)
        store = _meet(place, deadline)
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo",
            store=store,
            rank=place.rank,
            world_size=place.ranks,
            timeout=timedelta(seconds=COLLECTIVE_DEADLINE),
        )
        quiet = timedelta(seconds=patience + 2 * BEAT_SECONDS)
        orders = distributed.new_group(backend="gloo", timeout=quiet)
        return cls(place.rank, place.ranks, where, _Group(init_device_mesh(where.type, (place.ranks,)), orders, store))

    def lost(self, error: Exception) -> str:
        return f"rank {self.rank} of {self.size} of the trainer failed, or lost the others: {_sentence(error)}"

    @property
    def mesh(self) -> DeviceMesh | None:
        return self._group.mesh if self._group else None

    # Orders

    @contextmanager
    def together(self, orders: Sequence[msgspec.Struct]) -> Iterator[None]:
        """On rank 0: send each rank its order, of which the block is rank 0's own part."""
        if self._group is None:
            yield
            return
        try:
            self._tell([msgspec.msgpack.encode(order) for order in orders], self._group)
            yield
        except Exception as error:
            raise RanksLost(self.lost(error)) from error

    def _tell(self, messages: Sequence[bytes], group: _Group) -> None:
        parts = []
        for rank, message in enumerate(messages):
            if rank != self.rank:
                body = torch.frombuffer(bytearray(message), dtype=torch.uint8)
                parts += [(torch.tensor([len(body)]), rank), (body, rank)]
        for work in [distributed.isend(part, rank, group.orders) for part, rank in parts]:
            assert work is not None
            work.wait()

    def listen(self) -> bytes:
        """On a follower: the next order of rank 0."""
        assert self._group is not None
        size = torch.zeros(1, dtype=torch.int64)
        distributed.recv(size, 0, self._group.orders)
        body = torch.empty(int(size), dtype=torch.uint8)
        distributed.recv(body, 0, self._group.orders)
        return body.numpy().tobytes()

    # What all ranks do at the same time

    def sums(self, values: Sequence[float]) -> list[float]:
        """Each value, added up over the ranks."""
        if self._group is None:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(total)
        return total.tolist()

    def largest(self, values: Sequence[float]) -> list[float]:
        """Of each value, the largest among the ranks."""
        if self._group is None:
            return list(values)
        most = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(most, distributed.ReduceOp.MAX)
        return most.tolist()

    def whole(self, tensor: Tensor) -> Tensor:
        """All of a tensor that may be spread over the ranks; where it is, the result is a copy."""
        tensor = tensor.detach()
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def share(self, tensor: Tensor) -> tuple[Tensor, int]:
        """What this rank has to tell of a tensor: its own rows if it is spread by rows, and the first of their elements
        in the tensor's flat order. Of what all ranks have, rank 0 tells all and the others nothing."""
        tensor = tensor.detach()
        if isinstance(tensor, DTensor):
            if list(tensor.placements) == [Shard(0)]:
                local = tensor.to_local()
                rows = -(-tensor.shape[0] // self.size) * self.rank
                return local, min(rows, tensor.shape[0]) * (tensor.numel() // max(1, tensor.shape[0]))
            tensor = tensor.full_tensor()
        return (tensor, 0) if self.rank == 0 else (tensor.new_empty(0), 0)

    def told(self, what: str, text: str) -> list[str]:
        """What each rank said about `what`."""
        if self._group is None:
            return [text]
        self._group.store.set(f"{what} {self.rank}", text)
        return [self._group.store.get(f"{what} {rank}").decode() for rank in range(self.size)]

    def spread(self, tensor: Tensor | None, like: Tensor) -> Tensor:
        """What rank 0 holds whole, and the others need not have, spread over the ranks as `like` is."""
        if not isinstance(like, DTensor):
            assert tensor is not None
            return tensor.to(self.device)
        whole = torch.empty(like.shape, dtype=like.dtype) if tensor is None else tensor
        return distribute_tensor(whole.to(self.device), like.device_mesh, like.placements)


def _meet(place: RankAddress, deadline: float) -> Store:
    """A store that all ranks have signed. Raises RollartError, naming the rank that did not come."""
    host, _, port = place.address.rpartition(":")
    who, began = f"rank {place.rank} of {place.ranks}", time.monotonic()
    try:
        _stay_local(host)
        store = TCPStore(
            host,
            int(port),
            is_master=place.rank == 0,
            wait_for_workers=False,
            timeout=timedelta(seconds=deadline),
            master_listen_fd=socket.create_server((host, int(port))).detach() if place.rank == 0 else None,
        )
    except OSError as error:
        raise RollartError(f"{who} cannot use the address {place.address}: {error}") from error
    except distributed.DistError as error:
        raise RollartError(f"{who} found no rank 0 at {place.address} within {deadline:g} s") from error
    store.set(f"rank {place.rank}", "here")
    for rank in range(place.ranks):
        left = max(0.001, began + deadline - time.monotonic())
        try:
            store.wait([f"rank {rank}"], timedelta(seconds=left))
        except distributed.DistNetworkError as error:
            raise RollartError(f"rank 0 at {place.address} went away before all ranks were there") from error
        except distributed.DistStoreError as error:
            raise RollartError(
                f"rank {rank} of {place.ranks} did not come to {place.address} within {deadline:g} s; its log says why"
            ) from error
    return store


def _stay_local(host: str) -> None:
    """Gloo asks for the address of this machine's name, which need not be one that works; here it need not ask."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None and socket.gethostbyname(host).startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def _sentence(error: Exception) -> str:
    """The first line: torch adds stack traces of its own."""
    return (str(error) or type(error).__name__).splitlines()[0]
