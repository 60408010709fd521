"""Does routing each request to the device class that suits it pay off? Emulated fleets of equal price, in one run.

Scheduler, router, engine processes and environment processes are real; the engines are paced to the roofline of H800
and H20, slowed down. The workload is mixed: `reader` has many turns with long prompts and short answers, `writer`
writes long answers. Two H800, six H20, and one H800 with three H20 cost nearly the same (5.70, 6.00 and 5.85 H20s);
times are compared per price. The model is untrained and never stops by itself, and sampling is seeded, so every policy
generates the same tokens.

`measured` routes by measured shape, `declared` by the tags reader=prefill and writer=decode. In the second part the two
tasks swap their shapes during the run without notifying the router, so its tags are wrong from then on. Last line:
seconds, the ratios, and `late`, the share of emulated time by which engines lagged behind the devices they emulate.
"""

import argparse
import asyncio
import json
import logging
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollart.config import RunFile, TinyModelConfig
from rollart.core.event_log import EventLog, read_events
from rollart.core.protocols import ClaimedEnvironment
from rollart.core.schedule import Schedule
from rollart.core.types import Sampling
from rollart.engines.client import EngineClient
from rollart.envs.pool import EnvironmentPool
from rollart.fleet.engine_supervisor import EngineSupervisor
from rollart.hardware.devices import CATALOGUE
from rollart.hardware.roofline import ModelShape
from rollart.launch.local import LocalLauncher
from rollart.models.chat import ChatRenderer
from rollart.models.tiny import make
from rollart.observe.metrics import measure
from rollart.placement.inventory import Inventory
from rollart.placement.plan import plan
from rollart.rewards.pool import RewardPool
from rollart.rollout.engine_registry import EngineRegistry
from rollart.rollout.ledger import SqliteLedger
from rollart.rollout.router import Router
from rollart.rollout.routing_policy import routing_policy
from rollart.rollout.scheduler import Scheduler
from rollart.rollout.trajectory import RolloutTask, TrajectoryRunner
from rollart.weights.publish import publish
from rollart.weights.store import shared_folder

FLEETS = {
    "compute_only": {"H800": 2},
    "bandwidth_only": {"H20": 6},
    "mixed": {"H800": 1, "H20": 3},
}
POOLS = {"H800": "compute", "H20": "bandwidth"}
TAGS = {"reader": "prefill", "writer": "decode"}
GROUP = 4


@dataclass(frozen=True)
class Work:
    """Turns, characters read and tokens written at each of them, and the share of trajectories."""

    turns: int
    read: int
    write: int
    weight: float

    @property
    def context(self) -> int:
        return self.turns * (self.read + self.write + 4) + 16


SHAPES = {"reader": Work(8, 180, 2, 1.0), "writer": Work(1, 16, 256, 2.0)}


class Endless(ChatRenderer):
    """No token ends an answer: all are as long as they may be."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.stop = ()


@dataclass
class Swapped:
    """The pool of environments, with the tasks taking on each other's names."""

    pool: EnvironmentPool
    names: dict[str, str]

    def claim(self, task: str, held_out: bool) -> AbstractAsyncContextManager[ClaimedEnvironment]:
        return self.pool.claim(self.names[task], held_out)


def run_file(fleet: str, model: Path, slowdown: float) -> RunFile:
    return RunFile.model_validate(
        {
            "name": f"affinity-{fleet}",
            "model": {"path": model},
            "pools": {
                POOLS[device]: {"role": "generate", "device": device, "count": count, "emulate": slowdown}
                for device, count in FLEETS[fleet].items()
            },
            "tasks": [
                {
                    "name": name,
                    "env": "benchmarks.paced:Shaped",
                    "args": {"turns": work.turns, "characters": work.read},
                    "max_turns": work.turns,
                    "max_context": work.context,
                    "sampling": {"max_tokens": work.write},
                    "affinity": TAGS[name],
                }
                for name, work in SHAPES.items()
            ],
            "environments": {"processes": 80},
            "engine": {"max_batch": 64, "kv_megabytes": 256},
            "rewards": {"workers": 1},
        }
    )


class Bench:
    """One fleet, up and running; `play` measures one rollout on it."""

    def __init__(self, run: RunFile, model: Path, folder: Path) -> None:
        self.run, self.model, self.folder = run, model, folder
        self.price = sum(CATALOGUE[pool.devices[0]].price * pool.count for pool in run.pools.values())
        self.weights = shared_folder(f"{run.name}-{time.time_ns()}")
        self.log = EventLog(folder / f"{run.name}.jsonl", time.monotonic)
        self.version = 0

    async def start(self, stack: AsyncExitStack) -> None:
        run, launcher = self.run, LocalLauncher()
        stack.callback(shutil.rmtree, self.weights, ignore_errors=True)
        stack.callback(self.log.close)
        nodes = tuple(await launcher.nodes())
        placed = plan(run, Inventory(nodes, "this machine", overcommit=True))
        spec = {"model": str(self.model), "weights": str(self.weights), "seed": 0, "version": 0}
        self.engines = EngineSupervisor(
            run,
            [binding for binding in placed.bindings if binding.role == "generate"],
            version=0,
            launcher=launcher,
            devices=CATALOGUE,
            shape=ModelShape.of_folder(self.model),
            spec=lambda: spec,
            sink=self.log,
            logs=self.folder,
        )
        stack.push_async_callback(launcher.close)
        stack.push_async_callback(self.engines.stop)
        await self.engines.start()
        self.environments = EnvironmentPool(run.tasks, run.environments)
        self.rewards = RewardPool(run.tasks, run.rewards)
        for pool in (self.environments, self.rewards):
            stack.push_async_callback(pool.close)
            await pool.start()

    def router(self, rule: str, affinity: bool) -> Router:
        tags = {task.name: str(task.affinity) for task in self.run.tasks} if affinity else {}
        clients: dict[str, EngineClient] = self.engines.clients
        for name in clients:
            pool = self.engines.pool_of(name)
            pool.engines.clear()
            pool.prefill_factor = pool.decode_factor = 1.0
            pool.mean_s, pool.reserved = 0.0, 0
        pools = {name: self.engines.pool_of(name) for name in clients}
        registry = EngineRegistry(clients, self.version, self.log, pools=pools)
        return Router(registry, policy=routing_policy(rule), affinity=tags)

    async def clear(self) -> None:
        """A weight swap to the same weights: no engine has any KV left."""
        from safetensors.torch import load_file

        self.version += 1
        weights = load_file(self.model / "model.safetensors")
        publication = publish(self.weights, self.version, weights)
        await asyncio.gather(*(client.load(publication) for client in self.engines.clients.values()))

    async def late(self) -> tuple[float, float]:
        statuses = await asyncio.gather(*(client.status() for client in self.engines.clients.values()))
        return sum(status.late_s for status in statuses), sum(status.busy_s for status in statuses)

    async def play(self, router: Router, groups: int, swapped: bool = False) -> float:
        """Seconds until the scheduler has its batch of that many groups."""
        names = dict(zip(SHAPES, reversed(SHAPES), strict=True)) if swapped else {name: name for name in SHAPES}
        tasks = [
            RolloutTask(name, work.weight, work.turns, work.context, Sampling(max_tokens=work.write))
            for name, work in ((name, SHAPES[names[name]]) for name in SHAPES)
        ]
        ledger = SqliteLedger.open(self.folder / f"{time.time_ns()}.sqlite")
        runner = TrajectoryRunner(
            environments=Swapped(self.environments, names),
            router=router,
            renderer=Endless(self.model),
            rewards=self.rewards,
            sink=self.log,
        )
        scheduler = Scheduler(
            tasks=tasks,
            schedule=Schedule(alpha=0, window=1.0),
            batch_groups=groups,
            group_size=GROUP,
            steps=1,
            retries=0,
            seed=0,
            runner=runner,
            engines=router.engines,
            ledger=ledger,
            sink=self.log,
        )
        began = time.monotonic()
        batch = await scheduler.take_batch()
        took = time.monotonic() - began
        await scheduler.stop()
        ledger.close()
        assert sum(len(group.samples) for group in batch.groups) == groups * GROUP
        return took


@asynccontextmanager
async def bench(fleet: str, model: Path, folder: Path, slowdown: float) -> AsyncIterator[Bench]:
    async with AsyncExitStack() as stack:
        one = Bench(run_file(fleet, model, slowdown), model, folder)
        await one.start(stack)
        yield one


async def main(groups: int, slowdown: float) -> dict[str, Any]:
    seconds: dict[str, float] = {}
    price: dict[str, float] = {}
    flip: dict[str, list[float]] = {}
    late = busy = 0.0
    routes: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tiny = TinyModelConfig(architecture="qwen3", hidden=96, layers=3, heads=3, kv_heads=1, context=2048)

        model = make(tiny, folder / "model", seed=0)
        for fleet in FLEETS:
            async with bench(fleet, model, folder, slowdown) as one:
                rules = ["round_robin"] if fleet != "mixed" else ["round_robin", "declared", "measured"]
                for rule in rules:
                    name = rule if fleet == "mixed" else fleet
                    seconds[name] = await one.play(one.router(rule, affinity=rule == "declared"), groups)
                    price[name] = one.price
                    print(f"{name:15} {seconds[name]:6.1f} s at price {one.price:.2f}", flush=True)
                    await one.clear()
                if fleet == "mixed":
                    for rule in ("declared", "measured"):
                        router = one.router(rule, affinity=rule == "declared")
                        flip[rule] = [await one.play(router, groups, swapped) for swapped in (False, True)]
                        print(
                            f"{rule:15} before the flip {flip[rule][0]:.1f} s, after {flip[rule][1]:.1f} s", flush=True
                        )
                        await one.clear()
                    routes = _table(folder / f"{one.run.name}.jsonl")
                lost, worked = await one.late()
                late, busy = late + lost, busy + worked
    best = min(seconds[name] * price[name] for name in ("compute_only", "bandwidth_only"))
    cost = {name: seconds[name] * price[name] for name in seconds}
    return {
        "measured_vs_best_homogeneous": round(best / cost["measured"], 3),
        "measured_vs_round_robin": round(cost["round_robin"] / cost["measured"], 3),
        "measured_vs_declared": round(cost["declared"] / cost["measured"], 3),
        "flip": {rule: {"before_s": round(a, 1), "after_s": round(b, 1)} for rule, (a, b) in flip.items()},
        "flip_measured_vs_declared": round(flip["declared"][1] / flip["measured"][1], 3),
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "price": {name: round(value, 2) for name, value in price.items()},
        "emulated": {"devices": list(POOLS), "slowdown": slowdown, "late": round(late / max(busy, 1e-9), 4)},
        "requests_of_the_mixed_fleet": routes,
    }


def _table(log: Path) -> dict[str, Any]:
    """All rollouts on the mixed fleet together: what went where."""
    return {
        f"{route.task} on {route.pool}": {"requests": route.requests, "why": route.why}
        for route in measure(read_events(log)).routes
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=60, help=f"of {GROUP} trajectories, in each rollout")
    parser.add_argument("--slowdown", type=float, default=40_000, help="of the emulated devices")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to check that it runs")
    options = parser.parse_args()
    if options.smoke:
        options.groups, options.slowdown = 2, 1_000
        FLEETS.update(compute_only={"H800": 1}, bandwidth_only={"H20": 1}, mixed={"H800": 1, "H20": 1})
    logging.basicConfig(level=logging.WARNING)
    print(json.dumps(asyncio.run(main(options.groups, options.slowdown))))
