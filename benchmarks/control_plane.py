"""What the control plane costs: thousands of concurrent trajectories of 20 turns on virtual time.

Engines, environments, rewards and trainer are modelled (they only sleep); ledger and event log are real files. So the
CPU time that remains is the scheduler's, the router's, the trajectory coroutines' and the event loop's own. Last line:
`us_per_turn` at 10,000 trajectories, `vs_asyncio`, how many bare switches of as many tasks that takes, and `exponent`,
the growth of the total with the number of trajectories. `exponent_vs_asyncio` is its growth relative to bare switches:
more tasks fill more of the caches, whatever they do.
`tape_us_per_turn` is what `ledger.control` adds: all threads, in real time, answers of `TOKENS` tokens, without sleeps.
"""

import argparse
import asyncio
import gc
import json
import math
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.modelled import ModelledEngine, ModelledEnvironments, ModelledRenderer, ModelledRewards
from rollart.core import gc_tuning
from rollart.core.event_log import EventLog
from rollart.core.events import NULL_SINK
from rollart.core.schedule import Schedule
from rollart.core.types import Completion, GenerationRequest, Sampling, TokenPart
from rollart.fleet.control_engines import RecordedRegistry
from rollart.fleet.control_services import TapedEnvironments, TapedRenderer, TapedRewards
from rollart.fleet.control_tape import RecordingLoop, Tape
from rollart.rollout.engine_registry import EngineRegistry
from rollart.rollout.engine_state import EnginePool
from rollart.rollout.ledger import SqliteLedger
from rollart.rollout.router import Router
from rollart.rollout.scheduler import Scheduler
from rollart.rollout.trajectory import Attempt, RolloutTask, TrajectoryRunner
from rollart.simulator.clock import run

TURNS = 20
TOKENS = 64
GROUP = 8


async def rollout(trajectories: int, folder: Path) -> float:
    """CPU seconds for one batch of that many trajectories, all in flight at once."""
    rng = random.Random(0)
    log = EventLog(folder / "events", asyncio.get_running_loop().time)
    ledger = SqliteLedger.open(folder / "ledger.sqlite")
    engines = {f"engine-{n}": ModelledEngine(rng, seconds=lambda rng: rng.expovariate(1.0)) for n in range(8)}
    router = Router(EngineRegistry(engines, sink=log))
    environments = ModelledEnvironments(
        rng, turns=lambda rng: TURNS, reset_seconds=lambda rng: rng.uniform(1, 5), step_seconds=lambda rng: rng.random()
    )
    runner = TrajectoryRunner(
        environments=environments,
        router=router,
        renderer=ModelledRenderer(),
        rewards=ModelledRewards(rng),
        sink=log,
    )
    scheduler = Scheduler(
        tasks=[RolloutTask(name, 1.0, TURNS, 1 << 20, Sampling(), deadline=10_000) for name in ("a", "b")],
        schedule=Schedule(alpha=0, window=1.0),
        batch_groups=trajectories // GROUP,
        group_size=GROUP,
        steps=1,
        retries=3,
        seed=0,
        runner=runner,
        engines=router.engines,
        ledger=ledger,
        sink=log,
    )
    gc.collect()
    began = time.process_time()
    batch = await scheduler.take_batch()
    took = time.process_time() - began
    assert sum(len(group.samples) for group in batch.groups) == trajectories // GROUP * GROUP
    assert environments.in_use == 0
    log.close()
    ledger.close()
    return took


def measure(trajectories: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        return run(rollout(trajectories, Path(folder)))


class StreamingEngine(ModelledEngine):
    """Whose answers are one part."""

    async def generate_in_parts(
        self, request: GenerationRequest, every: int, on_part: Callable[[TokenPart], bool]
    ) -> Completion:
        return await self.generate(request)


async def play(attempts: int, tape: Tape | None) -> float:
    """CPU seconds for that many attempts, one after the other, of all threads."""
    rng = random.Random(0)
    engine = StreamingEngine(rng, seconds=lambda rng: 0.0, tokens=TOKENS)
    environments = ModelledEnvironments(rng, turns=lambda rng: TURNS, step_seconds=lambda rng: 0.0)
    rewards, renderer = ModelledRewards(rng, lambda rng: 0.0), ModelledRenderer()
    if tape is None:
        router = Router(EngineRegistry({"engine": engine}))
        runner = TrajectoryRunner(environments=environments, router=router, rewards=rewards, renderer=renderer)
    else:
        registry = RecordedRegistry(tape, version=0, sink=NULL_SINK, on_lost=lambda name: None)
        registry.add("engine", engine, 0, EnginePool("engine"))
        runner = TrajectoryRunner(
            environments=TapedEnvironments(tape, environments),
            router=Router(registry),
            rewards=TapedRewards(tape, rewards),
            renderer=TapedRenderer(tape, renderer, renderer.stop),
            sink=tape.sink(NULL_SINK),
        )
    task = RolloutTask("a", 1.0, TURNS, 1 << 20, Sampling())

    async def all_attempts() -> None:
        for number in range(attempts):
            await runner.run(Attempt(f"a.{number}", task, "a", number, number, 0))

    began = time.process_time()
    await (all_attempts() if tape is None else tape.run(all_attempts, "stop"))
    if tape is not None:
        tape.close()
    return time.process_time() - began


def tape_cost(attempts: int) -> float:
    """Microseconds a turn."""
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=RecordingLoop) as runner:
        plain = runner.run(play(attempts, None))
        loop = runner.get_loop()
        assert isinstance(loop, RecordingLoop)
        loop.tape = Tape(Path(folder) / "tape")
        return (runner.run(play(attempts, loop.tape)) - plain) / attempts / TURNS * 1e6


def bare_switch(tasks: int) -> float:
    """CPU seconds that asyncio alone takes to switch to a task by a timer, of which there are as many as tasks."""
    rng = random.Random(0)

    async def sleeper() -> None:
        for _ in range(TURNS):
            await asyncio.sleep(1e-3 * rng.random())

    async def all_sleepers() -> None:
        await asyncio.gather(*(sleeper() for _ in range(tasks)))

    began = time.process_time()
    asyncio.run(all_sleepers())
    return (time.process_time() - began) / tasks / TURNS


def slope(points: dict[int, float]) -> float:
    """Least squares of log seconds over log trajectories."""
    xs, ys = [math.log(n) for n in points], [math.log(s) for s in points.values()]
    mx, my = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True)) / sum((x - mx) ** 2 for x in xs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="of each size; the best counts")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to check that it runs")
    options = parser.parse_args()
    sizes, repeats = ((80, 160, 240), 1) if options.smoke else ((1_000, 3_000, 10_000, 30_000), options.repeats)
    gc_tuning.collect_rarely()  # as every run does
    measure(200)  # imports and caches
    seconds: dict[int, float] = {}
    for trajectories in sizes:
        seconds[trajectories] = min(measure(trajectories) for _ in range(repeats))
        each = seconds[trajectories] / trajectories / TURNS * 1e6
        print(f"{trajectories:6} trajectories: {seconds[trajectories]:6.2f} CPU s, {each:5.1f} us per turn", flush=True)
    per_turn = seconds[sizes[-2]] / sizes[-2] / TURNS
    switch = {trajectories: min(bare_switch(trajectories) for _ in range(repeats)) for trajectories in sizes}
    print(
        json.dumps(
            {
                "us_per_turn": round(per_turn * 1e6, 1),
                "vs_asyncio": round(per_turn / switch[sizes[-2]], 1),
                "exponent": round(slope(seconds), 3),
                "exponent_vs_asyncio": round(slope({n: s / switch[n] for n, s in seconds.items()}), 3),
                "tape_us_per_turn": round(min(tape_cost(sizes[0] // 10) for _ in range(repeats)), 1),
                "us_per_turn_by_trajectories": {n: round(s / n / TURNS * 1e6, 1) for n, s in seconds.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
