"""The ranks of one trainer: the processes that divide its model, and the messages between them.

Invariants: rank 0 leads and the others follow; a follower acts only on an order of rank 0, so that every rank runs the
same collectives in the same sequence. Between orders rank 0 sends heartbeats, which bound the wait of a follower.
A failure between an order and its end leaves the ranks out of step: it is `RanksLost`, and the process must exit.
A rank that dies closes its connections, which its neighbours see at once; the deadline is for machines that vanish.
Gloo carries orders, and tensors on CPUs; NCCL carries tensors on GPUs, which has not been exercised. A single rank has
no process group and no overhead.
"""

import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import HashStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from rollart.core.errors import RollartError
from rollart.hardware.layout import Layout
from rollart.training.context import ContextPeers, Peers
from rollart.training.shards import is_owner, rows, squares

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
    """Made by `single` or `join`. `layout` says how they divide the model; `data` is the number of this rank's
    micro-batches among those of each pass, which it shares with the ranks of its `context` and `tensor`."""

    def __init__(
        self, rank: int, device: torch.device, layout: Layout, group: _Group | None, patience: float = 0.0
    ) -> None:
        self.rank, self.size, self.device, self.layout = rank, layout.ranks, device, layout
        self.data = layout.data_index(rank)
        self._group, self._patience, self._meetings = group, patience, 0
        self._posts: dict[str, str] = {}  # of a single rank

    @classmethod
    def single(cls, device: str = "cpu") -> "Ranks":
        return cls(0, torch.device(device), Layout(), None)

    @classmethod
    def join(
        cls,
        address: RankAddress,
        device: str = "cpu",
        *,
        patience: float,
        layout: Layout | None = None,
        deadline: float = JOIN_DEADLINE,
    ) -> "Ranks":
        """Wait for all ranks. `patience` is how long rank 0 may be busy on its own, for instance with a save."""
        if address.ranks == 1:
            return cls.single(device)
        where = torch.device(device)
        if where.type == "cuda":
            torch.cuda.set_device(where)
            os.environ["LOCAL_RANK"] = str(where.index or 0)  # where transformers loads its part
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
        layout = layout or Layout.over(address.ranks)
        names = ("data", "context", "tensor")
        mesh = init_device_mesh(where.type, tuple(getattr(layout, name) for name in names), mesh_dim_names=names)
        return cls(address.rank, where, layout, _Group(mesh, orders, store), patience)

    def lost(self, error: Exception) -> RanksLost:
        reason = (str(error) or type(error).__name__).splitlines()[0]  # torch adds stack traces of its own
        return RanksLost(f"rank {self.rank} of {self.size} of the trainer failed, or lost the others: {reason}")

    @property
    def context(self) -> ContextPeers | None:
        """The ranks that share this one's sequences, if there are several."""
        return ContextPeers(*self._peers("context")) if self.layout.context > 1 else None

    @property
    def tensor(self) -> Peers | None:
        """The ranks that share this one's matrix products, if there are several."""
        return Peers(*self._peers("tensor")) if self.layout.tensor > 1 else None

    def _peers(self, dimension: str) -> tuple[distributed.ProcessGroup, int, int]:
        assert self._group is not None
        mesh = self._group.mesh[dimension]
        return mesh.get_group(), mesh.get_local_rank(), mesh.size()

    def command(self, order: msgspec.Struct) -> AbstractContextManager[None]:
        """On rank 0: send all ranks the same order; the block is rank 0's own part."""
        return self.dispatch([order] * self.layout.data)

    @contextmanager
    def dispatch(self, orders: Sequence[msgspec.Struct]) -> Iterator[None]:
        """On rank 0: send the ranks with the n-th share of the data the n-th order; the block is rank 0's own part. A
        batch is encoded and sent once, to the first rank of each share, which passes it on to those it shares with."""
        if self._group is None:
            yield
            return
        try:
            self._send(orders)
            yield
        except Exception as error:
            raise self.lost(error) from error

    def _send(self, orders: Sequence[msgspec.Struct]) -> None:
        leaders = (rank for rank in range(self.size) if self.layout.leads(rank))
        to = [
            (order, rank)
            for order, leader in zip(orders, leaders, strict=True)
            for rank in ([leader] if leader != self.rank else self._sharing())
        ]
        distinct = {id(order): order for order, _ in to}
        bodies = {key: _encoded(order) for key, order in distinct.items()}
        self._send_bytes((bodies[id(order)], rank) for order, rank in to)

    def _send_bytes(self, messages: Iterable[tuple[Tensor, int]]) -> None:
        """Each to its rank, all at the same time."""
        assert self._group is not None
        parts = [(part, rank) for body, rank in messages for part in (torch.tensor([len(body)]), body)]
        for work in [distributed.isend(part, rank, self._group.orders) for part, rank in parts]:
            assert work is not None
            work.wait()

    def _sharing(self) -> range:
        """On the first rank of those with the same batches: the others."""
        return range(self.rank + 1, self.rank + self.size // self.layout.data)

    def receive(self) -> memoryview:
        """On a follower: the next order of rank 0."""
        assert self._group is not None
        leads = self.layout.leads(self.rank)
        source = 0 if leads else self.data * (self.size // self.layout.data)
        size = torch.zeros(1, dtype=torch.int64)
        distributed.recv(size, source, self._group.orders)
        body = torch.empty(int(size), dtype=torch.uint8)
        distributed.recv(body, source, self._group.orders)
        if leads:
            self._send_bytes((body, rank) for rank in self._sharing())
        return body.numpy().data

    # Collectives: all ranks call them at the same time

    def all_reduce(self, values: Sequence[float], how: Any = distributed.ReduceOp.SUM) -> list[float]:
        """Over the ranks with different micro-batches: of those that share them, the first counts."""
        if self._group is None:
            return list(values)
        counted = how != distributed.ReduceOp.SUM or self.layout.leads(self.rank)
        reduced = torch.tensor(values if counted else [0.0] * len(values), dtype=torch.float64)
        distributed.all_reduce(reduced, how)
        return reduced.tolist()

    def grad_norm(self, parameters: Iterable[Tensor]) -> float:
        """Of the gradients of all ranks: each element counts once, whatever its mesh."""
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        total = sum((squares(grad, self.size) for grad in grads), torch.zeros((), dtype=torch.float64)).cpu()
        if self._group is not None:
            distributed.all_reduce(total)
        return float(total.sqrt())

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """All of a tensor that may be sharded; if it is, the result is a copy."""
        tensor = tensor.detach()
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def local_shard(self, tensor: Tensor) -> tuple[Tensor, int]:
        """What this rank publishes of a tensor, and its offset in the tensor's flat order. Of what several ranks have,
        the first publishes all and the others nothing."""
        values, start = rows(tensor)
        return (values, start) if is_owner(tensor, self.rank, self.layout.tensor) else (values[:0], 0)

    def meet(self) -> None:
        """Wait for the ranks, which may have read files for minutes: longer than a collective would wait."""
        if self._group is None:
            return
        self._meetings += 1
        self._group.store.set(f"meeting {self._meetings} {self.rank}", "here")
        keys = [f"meeting {self._meetings} {rank}" for rank in range(self.size)]
        self._group.store.wait(keys, timedelta(seconds=self._patience))

    def all_gather_text(self, key: str, text: str) -> list[str]:
        if self._group is None:
            return [text]
        self._group.store.set(f"{key} {self.rank}", text)
        return [self._group.store.get(f"{key} {rank}").decode() for rank in range(self.size)]

    # From any thread

    def post(self, key: str, text: str) -> None:
        """Leave a message for rank 0."""
        if self._group is None:
            self._posts[key] = text
        else:
            self._connection().set(f"{key} {self.rank}", text)

    def collect(self, key: str) -> list[str]:
        """On rank 0: wait for the messages of all ranks. Raises DistStoreError if one is late."""
        if self._group is None:
            return [self._posts.pop(key)]
        store, keys = self._connection(), [f"{key} {rank}" for rank in range(self.size)]
        store.wait(keys, timedelta(seconds=self._patience))
        texts = [store.get(each).decode() for each in keys]
        for each in keys:
            store.delete_key(each)
        return texts

    def _connection(self) -> Store:
        """One more to the store: another thread may be waiting on the first."""
        assert self._group is not None
        store: Store = self._group.store.clone()  # type: ignore[attr-defined]
        return store


def _encoded(order: msgspec.Struct) -> Tensor:
    buffer = bytearray()
    msgspec.msgpack.Encoder().encode_into(order, buffer)
    return torch.frombuffer(buffer, dtype=torch.uint8)


def mesh_of_one(device: torch.device) -> DeviceMesh:
    """For a single rank whose weights FSDP casts or offloads."""
    if not distributed.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    return init_device_mesh(device.type, (1,), mesh_dim_names=("fsdp",))


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
