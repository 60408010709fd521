"""Binds workers to nodes and device classes: pure functions of the requests and the inventory.

A pool gets its first class while that has room, then the next of its list. Engines are spread over the nodes, so that a
dead node costs few of them; the trainer's ranks are packed on devices of one class, because they wait for each other at
every step. Workers on CPUs avoid nodes with accelerators while others have room. The order of the nodes is irrelevant.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

from rollart.core.events import Placed
from rollart.launch.launcher import Node, ResourceRequest, ServiceHandle
from rollart.placement.inventory import Inventory
from rollart.placement.request import ROLES, PlacementError, PlacementRequest, refusal_of

_AS_NAMED = "as named"


@dataclass(frozen=True, slots=True)
class Binding:
    """One worker on one node. `choices` are the classes it may use, best first, `wanted` the first of them; it takes
    `units` of the class `device`, and `devices` share its work. With a `url`, someone else runs it there."""

    pool: str
    role: str
    worker: str
    wanted: str
    choices: tuple[str, ...]
    device: str
    node: str
    units: float
    threads: int
    why: str
    devices: int = 1
    url: str = ""

    def request(self, avoid: frozenset[str] = frozenset()) -> ResourceRequest:
        return ResourceRequest(self.choices, self.units, avoid)

    def placed(self, handle: ServiceHandle, pool: str | None = None) -> Placed:
        """The event of where the worker really runs; `pool` is the router's name of its pool."""
        return Placed(
            role=self.role,
            pool=pool or self.pool,
            name=handle.name,
            wanted=self.wanted,
            device=handle.device,
            node=handle.node,
            why=self.why,
        )


def place(requests: Sequence[PlacementRequest], inventory: Inventory) -> tuple[Binding, ...]:
    """One binding for each worker, in the order of the requests. Raises PlacementError."""
    placed = _bind_all(requests, inventory)
    if not isinstance(placed, _NoRoom):
        return placed
    refused, fitting, too_many = placed.request, 0, placed.request.workers
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        fewer = [dataclasses.replace(one, workers=middle) if one.pool == refused.pool else one for one in requests]
        fits = not isinstance(_bind_all(fewer, inventory), _NoRoom)
        fitting, too_many = (middle, too_many) if fits else (fitting, middle)
    raise PlacementError(refusal_of(refused, placed.placed, fitting, inventory, placed.taken), refused.pool)


def _bind_all(requests: Sequence[PlacementRequest], inventory: Inventory) -> "tuple[Binding, ...] | _NoRoom":
    """Pools with fewer choices go first. A pool without room is moved to the front, once: the others may have a
    fallback. If that does not help, returns the first refusal."""
    order = sorted(requests, key=lambda request: (len(request.choices), list(ROLES).index(request.role)))
    first: _NoRoom | None = None
    for _ in range(len(order) + 1):
        free = _FreeDevices(inventory)
        try:
            bound = {request.pool: free.bind(request) for request in order}
        except _NoRoom as error:
            first, refused = first or error, error.request
            if refused is order[0]:  # no other pool was before it
                break
            order = [refused, *(request for request in order if request is not refused)]
        else:
            return tuple(binding for request in requests for binding in bound[request.pool])
    assert first is not None
    return first


def replace(
    binding: Binding, nodes: Iterable[Node], avoid: frozenset[str] = frozenset(), *, overcommit: bool = False
) -> Binding:
    """A new binding on the remaining `nodes` for a worker whose node is gone. Raises PlacementError."""
    left = Inventory(tuple(node for node in nodes if node.name not in avoid), "the remaining nodes", overcommit)
    request = PlacementRequest(binding.pool, binding.role, 1, binding.choices, binding.threads, devices=binding.devices)
    new = place([request], left)[0]
    why = f"{binding.node} is gone" if new.why == _AS_NAMED else f"{binding.node} is gone; {new.why}"
    return dataclasses.replace(new, worker=binding.worker, wanted=binding.wanted, choices=binding.choices, why=why)


class _NoRoom(Exception):
    """Only `placed` workers of the request fit, after other pools have `taken` devices."""

    def __init__(self, request: PlacementRequest, placed: int, taken: Mapping[str, Counter[str]]) -> None:
        super().__init__(request.pool)
        self.request, self.placed, self.taken = request, placed, taken


class _FreeDevices:
    """What is free on each node while pools are bound one after the other."""

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._nodes = sorted(inventory.nodes, key=lambda node: node.name)
        self._free = {node.name: dict(node.free) for node in self._nodes}
        self._taken: dict[str, Counter[str]] = {}

    def bind(self, request: PlacementRequest) -> list[Binding]:
        places = self._pack(request) if request.role == "train" else self._spread(request)
        if len(places) < request.workers:
            raise _NoRoom(request, len(places), self._taken)
        bindings = []
        for number, (device, node) in enumerate(places):
            bindings.append(
                Binding(
                    pool=request.pool,
                    role=request.role,
                    worker=f"{request.pool}-{number}",
                    wanted=request.choices[0],
                    choices=request.choices,
                    device=device,
                    node=node,
                    units=request.takes(device),
                    threads=request.threads,
                    why=_why(request, device),
                    devices=request.devices,
                )
            )
            self._taken.setdefault(device, Counter())[request.pool] += math.ceil(request.takes(device))
        return bindings

    def _spread(self, request: PlacementRequest) -> list[tuple[str, str]]:
        """As many workers as fit, each on the best node of the first class with room."""
        places: list[tuple[str, str]] = []
        own: Counter[str] = Counter()

        def rank(node: Node, device: str) -> tuple[bool, int, float, str]:
            wasteful = device == "cpu" and _accelerated(node)
            used = 1 - (self._free[node.name].get(device, 0.0) - request.takes(device)) / node.total[device]
            return wasteful, own[node.name] if request.role == "generate" else 0, used, node.name

        for device in request.choices:
            able = [node for node in self._nodes if self._holds(node, device, request)]
            heap = [(rank(node, device), at) for at, node in enumerate(able)]
            heapify(heap)
            while heap and len(places) < request.workers:
                node = able[heap[0][1]]
                self._take(node, device, request)
                own[node.name] += 1
                places.append((device, node.name))
                if self._holds(node, device, request):  # only its own rank has changed
                    heapreplace(heap, (rank(node, device), heap[0][1]))
                else:
                    heappop(heap)
        return places

    def _pack(self, request: PlacementRequest) -> list[tuple[str, str]]:
        """All ranks on the first class with room, on few nodes; else as many as one class holds."""
        best: list[tuple[str, Node]] = []
        for device in request.choices:
            holds = {node.name: self._holds(node, device, request) for node in self._nodes}
            enough = [node for node in self._nodes if holds[node.name] >= request.workers]
            fullest = sorted(self._nodes, key=lambda node: (device == "cpu" and _accelerated(node), -holds[node.name]))
            nodes = [min(enough, key=lambda node: holds[node.name])] if enough else fullest
            places = [(device, node) for node in nodes for _ in range(min(holds[node.name], request.workers))]
            if len(places) >= request.workers:
                for _, node in places[: request.workers]:
                    self._take(node, device, request)
                return [(device, node.name) for _, node in places[: request.workers]]
            best = max(best, places, key=len)
        return [(device, node.name) for device, node in best]

    def _holds(self, node: Node, device: str, request: PlacementRequest) -> int:
        """How many workers fit on the node."""
        if device == "cpu" and self._inventory.overcommit and node.total.get("cpu", 0.0):
            return 1 << 30
        return int((self._free[node.name].get(device, 0.0) + 1e-9) // request.takes(device))

    def _take(self, node: Node, device: str, request: PlacementRequest) -> None:
        self._free[node.name][device] = self._free[node.name].get(device, 0.0) - request.takes(device)


def _accelerated(node: Node) -> bool:
    return any(number for name, number in node.total.items() if name != "cpu")


def _why(request: PlacementRequest, got: str) -> str:
    if got == request.choices[0]:
        return request.why or _AS_NAMED
    full = " and ".join(request.choices[: request.choices.index(got)])
    return f"fallback: no room for it on {full}" + (f"; {request.why}" if request.why else "")
