"""The ranks of one trainer: the processes that shard its weights, and the messages between them.

Invariants: rank 0 leads and the others follow; a follower acts only on an order of rank 0, so that every rank runs the
same collectives in the same sequence. Between orders rank 0 sends heartbeats, which bound the wait of a follower.
A failure between an order and its end leaves the ranks out of step: it is `RanksLost`, and the process must exit.
A rank that dies closes its connections, which its neighbours see at once; the deadline is for machines that vanish.
Weights are sharded with FSDP2: gloo carries orders, and tensors on CPUs; NCCL carries tensors on GPUs, which has not
been exercised. A single rank has no process group and no overhead.
"""

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from rollart.core.errors import RollartError

JOIN_DEADLINE = 60.0
COLLECTIVE_DEADLINE = 60.0  # ranks run passes over about the same number of tokens: one a minute late is lost
HEARTBEAT_SECONDS = 10.0


class RanksLost(RollartError):
    """The ranks are out of step, or some are gone; they must restart from a checkpoint."""


class RankAddress(msgspec.Struct, frozen=True):
    """Which rank a process is, the number of ranks, and the host:port where rank 0 awaits the others."""

    rank: int
    ranks: int
    address: str


@dataclass(frozen=True, slots=True)
class _Group:
    mesh: DeviceMesh
    orders: distributed.ProcessGroup
    store: Store  # served by rank 0


class Ranks:
    """Made by `single` or `join`."""

    def __init__(self, rank: int, size: int, device: torch.device, group: _Group | None) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._group = group

    @classmethod
    def single(cls, device: str = "cpu") -> "Ranks":
        return cls(0, 1, torch.device(device), None)

    @classmethod
    def join(
        cls, address: RankAddress, device: str = "cpu", *, patience: float, deadline: float = JOIN_DEADLINE
    ) -> "Ranks":
        """Wait for all ranks. `patience` is how long rank 0 may be busy on its own, for instance with a save."""
        if address.ranks == 1:
            return cls.single(device)
        where = torch.device(device)
        if where.type == "cuda":
            torch.cuda.set_device(where)
        store = _rendezvous(address, deadline)
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo",
            store=store,
            rank=address.rank,
            world_size=address.ranks,
            timeout=timedelta(seconds=COLLECTIVE_DEADLINE),
        )
        quiet = timedelta(seconds=patience + 2 * HEARTBEAT_SECONDS)
        orders = distributed.new_group(backend="gloo", timeout=quiet)
        mesh = init_device_mesh(where.type, (address.ranks,))
        return cls(address.rank, address.ranks, where, _Group(mesh, orders, store))

    def lost(self, error: Exception) -> RanksLost:
        reason = (str(error) or type(error).__name__).splitlines()[0]  # torch adds stack traces of its own
        return RanksLost(f"rank {self.rank} of {self.size} of the trainer failed, or lost the others: {reason}")

    @property
    def mesh(self) -> DeviceMesh | None:
        return self._group.mesh if self._group else None

    @contextmanager
    def dispatch(self, orders: Sequence[msgspec.Struct]) -> Iterator[None]:
        """On rank 0: send each rank its order; the block is rank 0's own part."""
        if self._group is None:
            yield
            return
        try:
            self._send([msgspec.msgpack.encode(order) for order in orders], self._group)
            yield
        except Exception as error:
            raise self.lost(error) from error

    def _send(self, messages: Sequence[bytes], group: _Group) -> None:
        parts = []
        for rank, message in enumerate(messages):
            if rank != self.rank:
                body = torch.frombuffer(bytearray(message), dtype=torch.uint8)
                parts += [(torch.tensor([len(body)]), rank), (body, rank)]
        for work in [distributed.isend(part, rank, group.orders) for part, rank in parts]:
            assert work is not None
            work.wait()

    def receive(self) -> bytes:
        """On a follower: the next order of rank 0."""
        assert self._group is not None
        size = torch.zeros(1, dtype=torch.int64)
        distributed.recv(size, 0, self._group.orders)
        body = torch.empty(int(size), dtype=torch.uint8)
        distributed.recv(body, 0, self._group.orders)
        return body.numpy().tobytes()

    # Collectives: all ranks call them at the same time

    def all_reduce(self, values: Sequence[float], how: Any = distributed.ReduceOp.SUM) -> list[float]:
        if self._group is None:
            return list(values)
        reduced = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(reduced, how)
        return reduced.tolist()

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """All of a tensor that may be sharded; if it is, the result is a copy."""
        tensor = tensor.detach()
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def local_shard(self, tensor: Tensor) -> tuple[Tensor, int]:
        """What this rank publishes of a tensor, and its offset in the tensor's flat order: its own rows if the tensor
        is sharded by rows. Of what all ranks have, rank 0 publishes all and the others nothing."""
        tensor = tensor.detach()
        if isinstance(tensor, DTensor):
            if list(tensor.placements) == [Shard(0)]:
                local = tensor.to_local()
                rows = -(-tensor.shape[0] // self.size) * self.rank
                return local, min(rows, tensor.shape[0]) * (tensor.numel() // max(1, tensor.shape[0]))
            tensor = tensor.full_tensor()
        return (tensor, 0) if self.rank == 0 else (tensor.new_empty(0), 0)

    def all_gather_text(self, key: str, text: str) -> list[str]:
        if self._group is None:
            return [text]
        self._group.store.set(f"{key} {self.rank}", text)
        return [self._group.store.get(f"{key} {rank}").decode() for rank in range(self.size)]

    def shard(self, tensor: Tensor | None, like: Tensor) -> Tensor:
        """Shard a tensor as `like` is. Only rank 0 needs to have it."""
        if not isinstance(like, DTensor):
            assert tensor is not None
            return tensor.to(self.device)
        whole = torch.empty(like.shape, dtype=like.dtype) if tensor is None else tensor
        return distribute_tensor(whole.to(self.device), like.device_mesh, like.placements)


def _rendezvous(address: RankAddress, deadline: float) -> Store:
    """A store that all ranks have joined. Raises RollartError, naming the rank that is missing."""
    host, _, port = address.address.rpartition(":")
    who, began = f"rank {address.rank} of {address.ranks}", time.monotonic()
    try:
        _use_loopback(host)
        store = TCPStore(
            host,
            int(port),
            is_master=address.rank == 0,
            wait_for_workers=False,
            timeout=timedelta(seconds=deadline),
            master_listen_fd=socket.create_server((host, int(port))).detach() if address.rank == 0 else None,
        )
    except OSError as error:
        raise RollartError(f"{who} cannot use the address {address.address}: {error}") from error
    except distributed.DistError as error:
        raise RollartError(f"{who} found no rank 0 at {address.address} within {deadline:g} s") from error
    store.set(f"rank {address.rank}", "here")
    for rank in range(address.ranks):
        left = max(0.001, began + deadline - time.monotonic())
        try:
            store.wait([f"rank {rank}"], timedelta(seconds=left))
        except distributed.DistNetworkError as error:
            raise RollartError(f"rank 0 at {address.address} went away before all ranks had joined") from error
        except distributed.DistStoreError as error:
            raise RollartError(
                f"rank {rank} of {address.ranks} did not join at {address.address} within {deadline:g} s; see its log"
            ) from error
    return store


def _use_loopback(host: str) -> None:
    """Gloo resolves this machine's name, which may not work; for a local address it need not."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None and socket.gethostbyname(host).startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
