"""Weights from a trainer to two engine processes, against plain copies of the same bytes.

`python benchmarks/weights.py [--sizes 100,1000,4000] [--rounds 5]` publishes versions of these megabytes and lets two
engine processes fetch them: by shared memory, where each checks every byte and then computes with the memory as it is,
and by HTTP, as if each were a host of its own, the second fed by the first. In the same rounds the same processes do
what it is measured against: a memcpy of the same bytes in each, at the same time, and a copy of them through a bare
loopback socket. Rates are wall-clock GB/s, ratios are medians over the rounds; the first two versions, whose pages are
new, are reported separately. `cpu` has the same ratios in CPU seconds of all processes that take part, which other work
on the machine disturbs less. The last line is one JSON object.

A publisher and each host keep two versions in memory: 20 GB for 4 GB of weights. So the trainer's tensors are cut from
half a gigabyte, and copies go to as much, which is more than caches hold. Sizes and hosts for which there is not enough
free memory are left out, and shared memory is cleaned up at the end.
"""

import argparse
import json
import multiprocessing
import shutil
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor

from rollart.core.types import Publication
from rollart.weights.loaded_version import LoadedVersion
from rollart.weights.publish import Publisher, TensorShard, new_id
from rollart.weights.reader import WeightReader
from rollart.weights.server import WeightServer
from rollart.weights.store import Store, shared_folder

MB = 1 << 20
WINDOW = 512 * MB  # of a private buffer that copies go to: more would not fit with 4 GB of weights
POOL = 512 * MB  # of what tensors are cut from, for the same reason
TENSOR = 16 * MB
SHIFT = 16  # elements between tensors that are cut from the same place
CHUNK = 8 * MB
STREAMS = (1, 4)
FRESH = 2
MARGIN = 512 * MB
DEADLINE_S = 600.0


class Cost(NamedTuple):
    """Seconds."""

    wall: float
    cpu: float


def timed(work: Callable[[], object]) -> Cost:
    began = time.perf_counter(), time.process_time()
    work()
    return Cost(time.perf_counter() - began[0], time.process_time() - began[1])


class Window:
    """A memcpy of any number of bytes, to private memory that has been touched before."""

    def __init__(self, size: int) -> None:
        self._bytes = torch.ones(min(size, WINDOW), dtype=torch.uint8)

    def copy(self, sources: list[Tensor]) -> None:
        at = 0
        for source in sources:
            flat = source.view(-1).view(torch.uint8)
            if at + len(flat) > len(self._bytes):
                at = 0
            self._bytes[at : at + len(flat)].copy_(flat)
            at += len(flat)

    def receive(self, port: int, size: int) -> None:
        """Its share of a bare socket copy."""
        into, got = self._bytes.numpy().data, 0
        with socket.create_connection(("127.0.0.1", port)) as connection:
            while got < size:
                at = got % len(into)
                count = connection.recv_into(into[at : at + min(CHUNK, size - got)])
                if not count:
                    raise OSError("the sender has gone")
                got += count


def anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    return 0


class Engine:
    """One engine process: it keeps the version that it computes with until it has the next."""

    def __init__(self, near: Path, far: Path, size: int) -> None:
        self.near, self.far, self.size = WeightReader(near), WeightReader(far), size
        self.held: LoadedVersion | None = None
        self.window = Window(size)
        self.private = anonymous()

    def take(self, publication: Publication, far: bool) -> Cost:
        cost = timed(lambda: self._hold((self.far if far else self.near).fetch(publication)))
        if self.held is None or self.held.transport != ("http" if far else "shared memory"):
            raise RuntimeError(f"it came by {self.held and self.held.transport}")
        return cost

    def _hold(self, held: LoadedVersion) -> None:
        before, self.held = self.held, held
        if before is not None:
            before.release()

    def memcpy(self) -> Cost:
        held = self.held
        assert held is not None
        return timed(lambda: self.window.copy(list(held.tensors.values())))

    def receive(self, port: int, streams: int) -> Cost:
        part = self.size // streams
        threads = [threading.Thread(target=self.window.receive, args=(port, part)) for _ in range(streams)]

        def run() -> None:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        return timed(run)

    def grown(self) -> int:
        return anonymous() - self.private

    def close(self) -> None:
        if self.held is not None:
            self.held.release()
            self.held = None
        self.far.close()


def engine_process(connection: Connection, near: Path, far: Path, size: int) -> None:
    torch.set_num_threads(1)
    engine = Engine(near, far, size)
    while True:
        name, arguments = connection.recv()
        connection.send(getattr(engine, name)(*arguments))
        if name == "close":
            return


class Bench:
    def __init__(self, size: int, stack: ExitStack) -> None:
        self.size = size - size % TENSOR or size
        root = shared_folder(f"bench-{new_id()}")
        folders = [root, *(root.with_name(f"{root.name}-host-{number}") for number in range(2))]
        for folder in folders:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        self.store = Store(root)
        self.server = WeightServer(self.store)
        stack.callback(self.server.close)
        self.publisher = Publisher(self.store)
        self.pool, self.tensors = cut(self.size)
        self.window = Window(self.size)
        self.engines = [self._start(root, folder, stack) for folder in folders[1:]]
        self.version = 0
        self.peak = 0

    def _start(self, near: Path, far: Path, stack: ExitStack) -> Connection:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=engine_process, args=(theirs, near, far, self.size), daemon=True)
        process.start()
        theirs.close()
        stack.callback(process.join, 10)
        stack.callback(process.kill)
        return ours

    def ask(self, name: str, *arguments: Any, only: int | None = None) -> list[Any]:
        """All engines at the same time, or one."""
        asked = self.engines if only is None else [self.engines[only]]
        for engine in asked:
            engine.send((name, arguments))
        answers = []
        for engine in asked:
            if not engine.poll(DEADLINE_S):
                raise TimeoutError(f"{name} was not answered")
            answers.append(engine.recv())
        return answers

    def publish(self) -> tuple[Cost, Publication]:
        self.version, id = self.version + 1, new_id()
        # Every byte, so that a delta saves nothing.
        self.pool.view(torch.int32).bitwise_xor_(0x01020304 * (1 + self.version % 7))
        shares = [TensorShard(f"t{i}", tuple(tensor.shape), tensor) for i, tensor in enumerate(self.tensors)]
        cost = timed(lambda: self.publisher.publish(self.version, id, shares))
        self.peak = max(self.peak, sum(path.stat().st_size for path in self.store.root.glob("*.data")))
        return cost, Publication(self.version, id, ((self.server.url,),))

    def near(self) -> dict[str, Cost]:
        """One round in shared memory."""
        copied = timed(lambda: self.window.copy(self.tensors))
        published, publication = self.publish()
        fetched = slowest(self.ask("take", publication, False))
        theirs = slowest(self.ask("memcpy"))
        return {"memcpy": copied, "publish": published, "engine_memcpy": theirs, "fetch": fetched}

    def far(self, relayed: bool) -> dict[str, Cost]:
        """One round over HTTP: to one engine from the publisher, then to the other, which the first relays to."""
        _, publication = self.publish()
        bare = [self._together(partial(self._bare, streams)) for streams in STREAMS]
        first = self._together(lambda: self.ask("take", publication, True, only=0)[0])
        costs = {"socket": Cost(min(one.wall for one in bare), min(one.cpu for one in bare)), "http": first}
        return costs | {"relayed": self.ask("take", publication, True, only=1)[0]} if relayed else costs

    @staticmethod
    def _together(work: Callable[[], Cost]) -> Cost:
        """What `work` cost the engine, and this process meanwhile."""
        began = time.process_time()
        theirs = work()
        return Cost(theirs.wall, theirs.cpu + time.process_time() - began)

    def _bare(self, streams: int) -> Cost:
        part = self.size // streams
        with socket.create_server(("127.0.0.1", 0)) as listener:
            threads = [
                threading.Thread(target=self._send, args=(listener, part, number), daemon=True)
                for number in range(streams)
            ]
            for thread in threads:
                thread.start()
            cost: Cost = self.ask("receive", listener.getsockname()[1], streams, only=0)[0]
            for thread in threads:
                thread.join(DEADLINE_S)
        return cost

    def _send(self, listener: socket.socket, size: int, number: int) -> None:
        connection, _ = listener.accept()
        with connection:
            sent = 0
            while sent < size:
                piece = self.tensors[(number + sent // TENSOR) % len(self.tensors)].numpy().data.cast("B")
                piece = piece[: size - sent]
                connection.sendall(piece)
                sent += len(piece)


def cut(size: int) -> tuple[Tensor, list[Tensor]]:
    """Tensors of `size` bytes in all, and what they are cut from; no two of them are the same."""
    count = max(1, size // TENSOR)
    elements, apart = size // count // 4, min(count, POOL // TENSOR)
    pool = torch.randn(apart * elements + count // apart * SHIFT)
    places = [index % apart * elements + index // apart * SHIFT for index in range(count)]
    return pool, [pool[at : at + elements] for at in places]


def slowest(costs: list[Cost]) -> Cost:
    """Of engines that work at the same time."""
    return Cost(max(cost.wall for cost in costs), max(cost.cpu for cost in costs))


def rates(size: int, rounds: list[dict[str, Cost]]) -> dict[str, float]:
    return {key: size / statistics.median(one[key].wall for one in rounds) / 1e9 for key in rounds[0]}


def ratio(rounds: list[dict[str, Cost]], ours: str, theirs: str) -> Cost:
    """How many times as fast as `theirs`."""
    return Cost(
        statistics.median(one[theirs].wall / one[ours].wall for one in rounds),
        statistics.median(one[theirs].cpu / one[ours].cpu for one in rounds),
    )


def measure(size: int, count: int) -> dict[str, Any]:
    with ExitStack() as stack:
        bench = Bench(size, stack)
        first = [bench.near() for _ in range(FRESH)]
        rounds = [bench.near() for _ in range(count)]
        result: dict[str, Any] = {
            "megabytes": bench.size // MB,
            "first_GBps": rates(bench.size, first[:1]),
            "GBps": rates(bench.size, rounds),
            "publish_vs_memcpy": ratio(rounds, "publish", "memcpy"),
            "fetch_vs_memcpy": ratio(rounds, "fetch", "engine_memcpy"),
            "peak_extra_bucket_sets": bench.peak / bench.size - 1,
            "engine_private_growth_MB": max(bench.ask("grown")) / MB,
        }
        result |= over_http(bench, count)
        bench.ask("close")
        return result


def over_http(bench: Bench, count: int) -> dict[str, Any]:
    """As far as there is memory for it: a host keeps the version that it computes with and the one that comes."""
    host = 2 * bench.size + MARGIN
    hosts = min(2, available() // host)
    for left_out in ("over HTTP", "to a second host")[hosts:]:
        print(f"{bench.size // MB} MB {left_out} needs {host / 1e9:.0f} GB of free memory; left out")
    if not hosts:
        return {}
    for _ in range(FRESH):
        bench.far(relayed=hosts > 1)
    far = [bench.far(relayed=hosts > 1) for _ in range(count)]
    result: dict[str, Any] = {"http_GBps": rates(bench.size, far), "http_vs_socket": ratio(far, "http", "socket")}
    return result | {"relayed_vs_socket": ratio(far, "relayed", "socket").wall} if hosts > 1 else result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="100,1000,4000", help="megabytes of weights")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to check that it runs")
    options = parser.parse_args()
    if options.smoke:
        options.sizes, options.rounds = "16", 1
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that shared memory is cleaned up
    results = {}
    for megabytes in map(int, options.sizes.split(",")):
        if (missing := needed(megabytes * MB) - available()) > 0:
            print(f"{megabytes} MB needs {missing / 1e9:.1f} GB more of free memory; left out", flush=True)
            continue
        results[megabytes] = result = measure(megabytes * MB, options.rounds)
        for key, value in result.items():
            print(f"{megabytes:>5} MB  {key:<26} {shown(value)}", flush=True)
    if not results:
        raise SystemExit("there is not enough free memory for any size; name smaller ones with --sizes")
    print(json.dumps(worst(results) | {"megabytes": {str(size): bars(result) for size, result in results.items()}}))


def needed(size: int) -> int:
    """Bytes without HTTP: two versions in shared memory, and private buffers of this process and two engines."""
    return 2 * size + min(size, POOL) + 3 * min(size, WINDOW) + MARGIN


def available() -> int:
    """Bytes of memory, as far as shared memory may use it."""
    free = shutil.disk_usage(shared_folder("bench").parent).free
    return min(int(psutil.virtual_memory().available), free)


def worst(results: dict[int, dict[str, Any]]) -> dict[str, float]:
    """Of all sizes."""
    ratios = ("publish_vs_memcpy", "fetch_vs_memcpy", "http_vs_socket")
    values_of = {key: [one[key].wall for one in results.values() if key in one] for key in ratios}
    return {key: round(min(values), 3) for key, values in values_of.items() if values} | {
        "peak_extra_bucket_sets": round(max(one["peak_extra_bucket_sets"] for one in results.values()), 3)
    }


def shown(value: Any) -> str:
    if isinstance(value, Cost):
        return f"{value.wall:.2f} (cpu {value.cpu:.2f})"
    return ", ".join(f"{k} {v:.2f}" for k, v in value.items()) if isinstance(value, dict) else f"{value:.2f}"


def bars(result: dict[str, Any]) -> dict[str, Any]:
    ratios = {key: value for key, value in result.items() if isinstance(value, Cost)}
    return {
        **{key: round(value.wall, 3) for key, value in ratios.items()},
        "cpu": {key: round(value.cpu, 3) for key, value in ratios.items()},
        "peak_extra_bucket_sets": round(result["peak_extra_bucket_sets"], 3),
    }


if __name__ == "__main__":
    main()
