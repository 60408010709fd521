"""Rewards with every invoker that runs locally, and elastic workers against a pool sized for the peak.

    python benchmarks/rewards.py [--without-ray]

The last line is one JSON object. For each invoker: `cold_ms` of the first score without workers, `warm_ms` (median),
`burst_s` for 500 concurrent scores, and `idle_workers` some time after the last. http is a real functions-framework
service; lambda and fc are the real SDKs against a local endpoint that implements their protocol, so they measure our
side and the SDK's, not the platform; ray is Ray Serve on a cluster of one node.

`trace` is bursty training: in each step 128 episodes end within a second, each takes 50 ms to score, and then the
trainer works for 4 s. `elastic` stops workers that were idle for a second, `dedicated` keeps as many as the peak needs.
`worker_s` is the lifetime of reward processes, `utilisation` the share of it that they spent scoring.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from rollart.config import RewardsConfig as Config
from rollart.config import TaskConfig
from rollart.core.types import Episode, EpisodeTurn, Message
from rollart.rewards.invokers import Rewards
from rollart.rewards.runtime import Runtime

FUNCTION = "rollart.rewards.functions:env_return"
IDLE_S, ENDING_S, START_S = 1.0, 1.0, 60.0
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "ALIBABA_CLOUD_ACCESS_KEY_ID", "ALIBABA_CLOUD_ACCESS_KEY_SECRET")
ids = itertools.count()


@dataclass(frozen=True, slots=True)
class Load:
    """Scores in a burst and one after the other; steps, episodes, seconds of training and peak workers of the trace."""

    burst: int = 500
    warm: int = 50
    steps: int = 4
    episodes: int = 128
    train_s: float = 4.0
    peak: int = 16


SMOKE = Load(burst=8, warm=3, steps=1, episodes=8, train_s=0.2, peak=2)


def episode() -> Episode:
    """Never the same twice, so that no cache of scores helps."""
    return Episode(f"e-{next(ids)}", "t", 1, (EpisodeTurn((Message("user", "hi"),), "act", 0.25),))


def rewards(idle_s: float = IDLE_S, workers: int = 2, cluster: str | None = None, **reward: Any) -> Rewards:
    task = TaskConfig.model_validate({"name": "t", "env": "a:B", "reward": {"function": FUNCTION, **reward}})
    return Rewards([task], Config(workers=workers, deadline=60.0), cluster=cluster, idle_s=idle_s)


# Each invoker


async def measured(load: Load, made: Rewards, idle: Callable[[], Awaitable[int | None]]) -> dict[str, Any]:
    clock = time.perf_counter

    async def one() -> float:
        began = clock()
        await made.score("t", episode())
        return clock() - began

    cold = await one()
    warm = statistics.median([await one() for _ in range(load.warm)])
    began = clock()
    await asyncio.gather(*(one() for _ in range(load.burst)))
    burst = clock() - began
    return {
        "cold_ms": round(cold * 1000, 1),
        "warm_ms": round(warm * 1000, 2),
        "burst_s": round(burst, 2),
        "idle_workers": await idle(),
    }


async def pool(load: Load) -> dict[str, Any]:
    made = rewards()

    async def idle() -> int:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(20 * IDLE_S):
                while made.processes:  # noqa: ASYNC110 (state without an event of its own)
                    await asyncio.sleep(IDLE_S / 10)
        return made.processes

    try:
        return await measured(load, made, idle)  # not started before: the first score starts all that it needs
    finally:
        await made.close()


@contextlib.contextmanager
def process(*argv: str) -> Iterator[int]:
    """A server on a port of its own, `{port}` in its arguments; ended with all that it started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, *(word.format(port=port) for word in argv)]
    child = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield port
    finally:
        os.killpg(child.pid, signal.SIGTERM)
        child.wait(START_S)


async def answers(url: str) -> None:
    async with asyncio.timeout(START_S), aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(url):
                    return
            await asyncio.sleep(0.02)


async def served(load: Load, argv: tuple[str, ...], **reward: Any) -> dict[str, Any]:
    """Cold is from no process at all: the time until the service is there, and its first score."""
    began = time.perf_counter()
    with process(*argv) as port:
        url = f"http://127.0.0.1:{port}"
        await answers(url)
        started = time.perf_counter() - began
        made = rewards(url=url, **reward)
        try:
            await made.start()
            result = await measured(load, made, unknown)
        finally:
            await made.close()
    return {**result, "cold_ms": round(result["cold_ms"] + started * 1000, 1)}


async def unknown() -> None:
    """The platform ends idle workers of a service."""
    return


def endpoint(port: int) -> None:
    """Implements the invoke protocols of Lambda and Function Compute, with the function in the runtime of packages."""
    runtime = Runtime(FUNCTION, "")

    async def invoke(request: web.Request) -> web.Response:
        return web.json_response(runtime.event(await request.read()))

    async def alive(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.add_routes([web.post("/{path:.*}", invoke), web.get("/", alive)])
    web.run_app(app, host="127.0.0.1", port=port, print=lambda *_: None)


@contextlib.contextmanager
def ray_cluster() -> Iterator[str]:
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "object_store_memory": 80_000_000, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        yield cluster.address
    finally:
        cluster.shutdown()


async def ray(load: Load) -> dict[str, Any]:
    from ray import serve

    def replicas() -> int:
        apps = serve.status().applications.values()
        return sum(sum(each.replica_states.values()) for app in apps for each in app.deployments.values())

    async def idle() -> int:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(60):
                while await asyncio.to_thread(replicas):  # noqa: ASYNC110
                    await asyncio.sleep(0.5)
        return await asyncio.to_thread(replicas)

    with ray_cluster() as address:
        made = rewards(invoker="ray", cluster=address)
        try:
            await made.start()
            return await measured(load, made, idle)
        finally:
            await made.close()


# Elastic and dedicated workers under the same bursts


async def trace(load: Load, idle_s: float, warm: bool) -> dict[str, float]:
    made = rewards(idle_s, load.peak, function="benchmarks.waiting_reward:waits")
    rng = random.Random(0)
    clock = time.perf_counter
    alive = 0.0
    late: list[float] = []

    async def watch() -> None:
        nonlocal alive
        before = clock()
        while True:
            await asyncio.sleep(0.02)
            before, passed = clock(), clock() - before
            alive += made.processes * passed

    async def one(after: float) -> None:
        await asyncio.sleep(after)
        began = clock()
        await made.score("t", episode())
        late.append(clock() - began)

    try:
        await made.start()
        if warm:
            await asyncio.gather(*(made.score("t", episode()) for _ in range(load.peak)))
        busy = made.totals["pool"].billed_s
        watching = asyncio.create_task(watch())
        began = clock()
        for _ in range(load.steps):
            await asyncio.gather(*(one(rng.uniform(0, ENDING_S)) for _ in range(load.episodes)))
            await asyncio.sleep(load.train_s)
        seconds = clock() - began
        watching.cancel()
        busy = made.totals["pool"].billed_s - busy
    finally:
        await made.close()
    return {
        "seconds": round(seconds, 2),
        "rollout_s": round(seconds - load.steps * load.train_s, 2),
        "score_ms": round(statistics.mean(late) * 1000, 1),
        "worker_s": round(alive, 1),
        "utilisation": round(busy / alive, 3),
    }


async def run(load: Load, with_ray: bool) -> dict[str, Any]:
    for key in KEYS:
        os.environ.setdefault(key, "local")
    serve = ("-m", "rollart.app.cli", "reward", "serve", FUNCTION, "--port", "{port}")
    local = ("-m", "benchmarks.rewards", "--endpoint", "{port}")
    invokers: dict[str, Callable[[], Awaitable[dict[str, Any]]]] = {
        "pool": lambda: pool(load),
        "http": lambda: served(load, serve, invoker="http"),
        "lambda": lambda: served(load, local, invoker="lambda", name="mine", region="eu-west-1"),
        "fc": lambda: served(load, local, invoker="fc", name="mine"),
    }
    if with_ray:
        invokers["ray"] = lambda: ray(load)
    result: dict[str, Any] = {}
    for name, measure in invokers.items():
        result[name] = await measure()
        print(name, result[name], file=sys.stderr, flush=True)
    elastic = await trace(load, IDLE_S, warm=False)
    dedicated = await trace(load, 3600.0, warm=True)
    saved = round(1 - elastic["worker_s"] / dedicated["worker_s"], 3)
    slower = round(elastic["rollout_s"] / dedicated["rollout_s"], 3)
    result["trace"] = {"elastic": elastic, "dedicated": dedicated, "worker_s_saved": saved, "rollout_ratio": slower}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--without-ray", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to check that it runs")
    parser.add_argument("--endpoint", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.endpoint:
        endpoint(options.endpoint)
    else:
        load = SMOKE if options.smoke else Load()
        print(json.dumps(asyncio.run(run(load, not options.without_ray))))


if __name__ == "__main__":
    main()
