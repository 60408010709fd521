"""What our worker costs: time of a step against one in this process, memory of an idle worker, workers at once.

    python benchmarks/env_overhead.py [--processes 1000] [--steps 2000]

The last line is one JSON object: `ms_per_step` is what the worker adds to a step (median, both sides interleaved),
`mb_per_process` the private memory of an idle worker, `mb_per_process_pss` with its share of the common pages added,
`processes` how many were alive and answered at the same time. `ms_per_episode` is a claim with one reset: with a
process that is reused, with a fresh one for each episode, and with a fresh one that was prepared before.
"""

import argparse
import asyncio
import json
import re
import statistics
import time
from pathlib import Path

import psutil

from rollart.config import EnvironmentsConfig, TaskConfig
from rollart.envs.frozen_lake import FrozenLake
from rollart.envs.pool import EnvironmentPool

TASK = TaskConfig(name="lake", env="rollart.envs.frozen_lake:FrozenLake", args={"max_actions": 10**9})
ROUND = 50


async def step_cost(pool: EnvironmentPool, steps: int) -> tuple[float, float]:
    """Milliseconds of one step in this process and in a worker, by an action that ends no episode."""
    inside, outside = [], []
    local = FrozenLake(**TASK.args)
    async with pool.claim("lake", held_out=False) as claimed:
        for _ in range(steps // ROUND):
            local.reset(1)
            await claimed.reset(1)
            begin = time.perf_counter()
            for _ in range(ROUND):
                local.step("?")
            middle = time.perf_counter()
            for _ in range(ROUND):
                await claimed.step("?")
            inside.append(middle - begin)
            outside.append(time.perf_counter() - middle)
    return statistics.median(inside) / ROUND * 1000, statistics.median(outside) / ROUND * 1000


async def episode_cost(episodes: int) -> dict[str, float]:
    """Milliseconds of an episode that does nothing but begin."""
    kinds = {"reused": (True, 0), "fresh": (False, 0), "warm": (False, 8)}
    pools = {}
    for name, (reusable, warm) in kinds.items():
        task = TaskConfig(name=name, env="benchmarks.paced:Paced", args={"scale": 0.0, "reusable": reusable})
        pools[name] = EnvironmentPool([task], EnvironmentsConfig(processes=8, warm=warm))
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    try:
        await asyncio.gather(*(pool.start() for pool in pools.values()))
        for seed in range(episodes):
            for name, pool in pools.items():
                begin = time.perf_counter()
                async with pool.claim(name, held_out=False) as claimed:
                    await claimed.reset(seed)
                taken[name].append(time.perf_counter() - begin)
    finally:
        await asyncio.gather(*(pool.close() for pool in pools.values()))
    return {name: round(statistics.median(times) * 1000, 2) for name, times in taken.items()}


def memory(pid: int) -> tuple[float, float]:
    """Private and proportional megabytes of a process."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    kilobytes = {name: int(value) for name, value in re.findall(r"(\w+):\s+(\d+) kB", text)}
    return (kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]) / 1024, kilobytes["Pss"] / 1024


async def concurrent_processes(pool: EnvironmentPool, count: int) -> tuple[int, float, list[tuple[float, float]]]:
    """How many answered while all were held, the seconds until the last was ready, and the memory of each."""
    ready = asyncio.Barrier(count + 1)
    measured = asyncio.Event()

    async def one() -> bool:
        async with pool.claim("lake", held_out=False) as claimed:
            await claimed.reset(1)
            await ready.wait()
            await measured.wait()
            return bool((await claimed.step("R")).messages)

    begin = time.perf_counter()
    tasks = [asyncio.create_task(one()) for _ in range(count)]
    await ready.wait()
    seconds = time.perf_counter() - begin
    hosts = psutil.Process().children()
    sizes = [memory(process.pid) for host in hosts for process in host.children()]
    measured.set()
    return sum(await asyncio.gather(*tasks)), seconds, sizes


async def run(count: int, steps: int) -> dict[str, object]:
    episode = await episode_cost(steps // 10)
    pool = EnvironmentPool(
        [TASK], EnvironmentsConfig(processes=count, reset_deadline=120, step_deadline=120, retries=0)
    )
    try:
        await pool.start()
        inside, outside = await step_cost(pool, steps)
        alive, seconds, sizes = await concurrent_processes(pool, count)
    finally:
        await pool.close()
    return {
        "ms_per_step": round(outside - inside, 4),
        "ms_in_process": round(inside, 4),
        "ms_in_worker": round(outside, 4),
        "mb_per_process": round(statistics.mean(own for own, _ in sizes), 2),
        "mb_per_process_pss": round(statistics.mean(share for _, share in sizes), 2),
        "ms_per_episode": episode,
        "processes": alive,
        "seconds_to_start": round(seconds, 2),
        "left_behind": len(psutil.Process().children(recursive=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to check that it runs")
    options = parser.parse_args()
    if options.smoke:
        options.processes, options.steps = 8, 100
    print(json.dumps(asyncio.run(run(options.processes, options.steps))))


if __name__ == "__main__":
    main()
