"""The cost of environments that hang, crash and reset slowly, in real processes, to the other episodes.

    python benchmarks/env_faults.py [--processes 200] [--seconds 80]

Three pools play the same episodes at the same time, so that a busy machine slows all of them equally: `calm` without
faults, `faulty` with them, and `unhedged` with them but without hedged resets. Faults are per episode: 2% hang and 2%
crash, in a reset or a step; 2.1% of resets are in the second mode that the RollArt paper measured (380 s and more,
where the median is 22 s). Seconds are scaled down; resets and steps without faults have the paper's distributions.

Expected resets: a hedge starts at the p90 of ordinary resets, 34 s, and takes 22 s like any other, so the p99, in the
middle of the slow ones, is about 57 s, 2.55 times the p50 (2.75 from the p95 on). With 3,000 resets the error of that
is 0.09; processes that wait for a core add to it.

The last line is one JSON object: `kept` is the throughput (finished episodes) of `faulty` relative to `calm`, and
`reset_p99_over_p50` is for its resets, each also for `unhedged`; `blocked_others` counts episodes that waited for a
process (there is one per player, so only a failure of another could take it); `left_behind` counts processes that
outlive their pool; `uncounted` are episodes without an outcome, and failures that pool and players count differently.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections import Counter
from dataclasses import asdict, dataclass, field

import psutil

from rollart.config import EnvironmentsConfig, TaskConfig
from rollart.core.errors import EnvironmentFailed
from rollart.envs.pool import EnvironmentPool

STEPS = 10
HANG = CRASH = 0.02
SLOW, SLOW_S = 0.021, 400.0
RESET_DEADLINE_S, STEP_DEADLINE_S = 600.0, 100.0
START_S = 150.0  # all episodes begin at once: until they are well mixed, and their processes have started
PROMPT_S = 1.0  # for claiming a free process


@dataclass
class Played:
    """What one pool did. All outcomes are kept; the rest is of the time after the start."""

    started: int = 0
    finished: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    resets: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)


def pool(name: str, scale: float, processes: int, faults: bool = True, hedged: bool = True) -> EnvironmentPool:
    calls = STEPS + 1
    chaos = {"hang": HANG / calls, "crash": CRASH / calls, "slow": SLOW, "slow_reset": SLOW_S * scale} if faults else {}
    task = TaskConfig(
        name=name,
        env="benchmarks.fault_injection:Chaos",
        args={"env": "benchmarks.paced:Paced", "args": {"steps": STEPS, "scale": scale}, **chaos},
    )
    config = EnvironmentsConfig(
        processes=processes,
        reset_deadline=RESET_DEADLINE_S * scale,
        step_deadline=STEP_DEADLINE_S * scale,
        hedges=processes // 10 if hedged else 0,
        warm=8,
    )
    return EnvironmentPool([task], config)


async def play(environments: EnvironmentPool, name: str, processes: int, begin: float, end: float) -> Played:
    """Episode after episode in each process until the end, when the rest is cancelled; measured from `begin` on."""
    played = Played()
    clock = asyncio.get_running_loop().time

    async def player() -> None:
        while clock() < end:
            played.started += 1
            outcome = "cancelled at the end"
            try:
                asked = clock()
                async with environments.claim(name, held_out=False) as environment:
                    given = clock()
                    await environment.reset(played.started)
                    if asked >= begin:
                        played.waits.append(given - asked)
                        played.resets.append(clock() - given)
                    while not (await environment.step("go")).done:
                        pass
                    outcome = "finished"
                    played.finished += clock() >= begin
            except EnvironmentFailed as failure:
                outcome = "failed in a step" if "in a step" in str(failure) else "failed in a reset"
            finally:
                played.outcomes[outcome] += 1

    tasks = [asyncio.create_task(player()) for _ in range(processes)]
    await asyncio.sleep(end - clock())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return played


async def run(processes: int, seconds: float, scale: float) -> dict[str, object]:
    pools = {
        "calm": pool("calm", scale, processes, faults=False),
        "faulty": pool("faulty", scale, processes),
        "unhedged": pool("unhedged", scale, processes, hedged=False),
    }
    try:
        await asyncio.gather(*(each.start() for each in pools.values()))
        begin = asyncio.get_running_loop().time() + START_S * scale
        results = await asyncio.gather(
            *(play(each, name, processes, begin, begin + seconds) for name, each in pools.items())
        )
    finally:
        await asyncio.gather(*(each.close() for each in pools.values()))
    played = dict(zip(pools, results, strict=True))
    counts = {name: each.counts[name] for name, each in pools.items()}
    finished = {name: each.finished for name, each in played.items()}
    uncounted = 0
    for name, each in played.items():
        uncounted += abs(each.started - sum(each.outcomes.values()))
        uncounted += abs(each.outcomes["failed in a step"] - counts[name].failed_steps)
        uncounted += abs(each.outcomes["failed in a reset"] - counts[name].failed_resets)
    return {
        "kept": round(finished["faulty"] / finished["calm"], 3),
        "kept_unhedged": round(finished["unhedged"] / finished["calm"], 3),
        "reset_p99_over_p50": p99_over_p50(played["faulty"].resets),
        "reset_p99_over_p50_unhedged": p99_over_p50(played["unhedged"].resets),
        "reset_p50_s": round(statistics.median(played["faulty"].resets), 3),
        "resets": {name: len(each.resets) for name, each in played.items()},
        "blocked_others": sum(wait > PROMPT_S for each in played.values() for wait in each.waits),
        "left_behind": len(psutil.Process().children(recursive=True)),
        "uncounted": uncounted,
        "episodes_per_s": {name: round(count / seconds, 1) for name, count in finished.items()},
        "outcomes": {name: dict(each.outcomes) for name, each in played.items()},
        "counts": {name: asdict(each) for name, each in counts.items()},
        "processes": processes,
        "scale": scale,
        "cpu_seconds": round(time.process_time(), 1),
    }


def p99_over_p50(values: list[float]) -> float:
    cuts = statistics.quantiles(values, n=100)
    return round(cuts[98] / cuts[49], 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--scale", type=float, default=0.08, help="of the paper's seconds")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to check that it runs")
    options = parser.parse_args()
    if options.smoke:
        options.processes, options.seconds, options.scale = 8, 4.0, 0.01
    print(json.dumps(asyncio.run(run(options.processes, options.seconds, options.scale))))


if __name__ == "__main__":
    main()
