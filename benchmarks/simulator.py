"""How fast the simulator is: the paper's production job, whole and scaled down, for some virtual time on one core.

As shipped, training and the push of the weights hold the job up, and few trajectories run at once. Here both are quick
and more batches may be under way, so that it waits for engines, and about 20,000 trajectories have an environment at a
time. `--shipped` takes the scenario as it is.

Seconds are CPU seconds of this process, so a busy machine does not count. An event is a callback that the virtual loop
ran. Last line: virtual seconds per real second and events per second at each size; `hour_at_3000_s`, what a virtual
hour of 3,000 GPUs takes; and `event_cost_growth`, the cost of an event at 3,000 GPUs over that at 128.

`--day` simulates a day of the job as shipped, one engine and group in eight, and its first four hours whole too: of
fewer, a step of twenty minutes differs by chance alone. Last line: `day_at_3000_s`, and by how much the numbers of the
part differ from those of the whole, as a share. At alpha 1 that job has a long and a short step by turns, so the
difference of `step_s` is over the same, even number of steps of both.
"""

import argparse
import json
import resource
from collections.abc import Sequence
from pathlib import Path

from rollart.simulator.result import SimulationResult
from rollart.simulator.scenario import Scenario, load
from rollart.simulator.simulation import simulate

SCENARIO = Path(__file__).parents[1] / "examples" / "paper" / "production.yaml"
WHOLE = 3000
DAY_S = 86400.0
COMPARED_S = 14400.0
COMPARED = ("train_s", "answers_per_s", "turns", "running")  # what is trained in a second follows from the step


FULL = (
    "training.batch_groups=3200",
    "rollout.alpha=3",
    "environments.processes=8000",
    "simulate.train={fixed: 100, token: 0}",
    "simulate.links={ethernet: 1000, infiniband: 1000}",
)


def scaled(gpus: int, changes: Sequence[str]) -> Scenario:
    """The production job with everything in proportion: devices, batch and environments."""
    whole = load(SCENARIO, [*changes])
    part = gpus / WHOLE

    def count(name: str) -> str:
        return f"pools.{name}.count={max(1, round(whole.pools[name].count * part))}"

    groups = max(len(whole.tasks), round(whole.training.batch_groups * part))
    processes = max(1, round(whole.environments.processes * part))
    return load(
        SCENARIO,
        [
            *changes,
            *map(count, whole.pools),
            f"training.batch_groups={groups}",
            f"environments.processes={processes}",
            "training.steps=100000",
            "simulate.warmup=0",
        ],
    )


def at_once(scenario: Scenario, result: SimulationResult) -> int:
    """Trajectories that have an environment, on the average."""
    return round(result.environments_use * scenario.environments.processes * len(scenario.tasks))


def line(gpus: int, running: int, result: SimulationResult) -> str:
    return (
        f"{gpus:5} GPUs, {running:6} trajectories at once: {result.seconds:6.0f} virtual s in "
        f"{result.cpu_s:6.1f} s, {result.all_turns:8} turns, {result.cpu_s / result.all_turns * 1e6:5.0f} us each, "
        f"{result.steps} steps of {result.step_s:.0f} s"
    )


def step_difference(part: SimulationResult, whole: SimulationResult) -> float:
    """Of the mean step, over as many pairs of steps as both have after the first."""
    last = (min(part.steps, whole.steps) - 1) // 2 * 2
    if not last:
        return part.step_s / whole.step_s - 1
    spans = [each.step_times[last] - each.step_times[0] for each in (part, whole)]
    return spans[0] / spans[1] - 1


def day(gpus: int, one_in: int, span: float, compared: float) -> None:
    part = scaled(gpus, [f"simulate.one_in={one_in}"])
    whole, same_time = simulate(scaled(gpus, ()), until=compared), simulate(part, until=compared)
    print(line(gpus, at_once(part, whole), whole), flush=True)
    result = simulate(part, until=span)
    print(line(gpus, at_once(part, result), result), flush=True)
    print(
        json.dumps(
            {
                "day_at_3000_s": round(result.cpu_s * DAY_S / span, 1),
                "day_whole_s": round(whole.cpu_s * DAY_S / compared, 1),
                "one_in": one_in,
                "differences": {"step_s": round(step_difference(same_time, whole), 3)}
                | {key: round(getattr(same_time, key) / (getattr(whole, key) or 1.0) - 1, 3) for key in COMPARED},
                "staleness": {"whole": whole.staleness, "part": same_time.staleness},
                "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
            }
        )
    )


def hours(sizes: Sequence[int], span: float, changes: Sequence[str]) -> None:
    results: dict[int, SimulationResult] = {}
    running: dict[int, int] = {}
    for gpus in sizes:
        scenario = scaled(gpus, changes)
        results[gpus] = simulate(scenario, until=span)
        running[gpus] = at_once(scenario, results[gpus])
        print(line(gpus, running[gpus], results[gpus]), flush=True)
    cost = {gpus: result.cpu_s / result.events for gpus, result in results.items()}
    print(
        json.dumps(
            {
                "hour_at_3000_s": round(results[sizes[-1]].cpu_s * 3600 / span, 1),
                "event_cost_growth": round(cost[sizes[-1]] / cost[sizes[0]], 3),
                "virtual_per_real_s": {gpus: round(span / result.cpu_s, 1) for gpus, result in results.items()},
                "events_per_s": {gpus: round(1 / each) for gpus, each in cost.items()},
                "trajectories_at_once": running,
                "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, help="virtual time at each size, or of --day that is simulated whole")
    parser.add_argument("--shipped", action="store_true", help="the scenario as it is, with fewer trajectories at once")
    parser.add_argument("--day", action="store_true", help="a day as shipped, in part, compared with the whole")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to check that it runs")
    options = parser.parse_args()
    sizes = (16, 32, 64) if options.smoke else (128, 1000, WHOLE)
    span = 60.0 if options.smoke else options.seconds or (COMPARED_S if options.day else 3600.0)
    changes = () if options.shipped else FULL
    simulate(scaled(sizes[0], changes), until=60.0)  # imports and caches
    if not options.day:
        hours(sizes, span, changes)
    elif options.smoke:
        day(750, 2, 60.0, 30.0)
    else:
        day(WHOLE, 8, DAY_S, span)


if __name__ == "__main__":
    main()
