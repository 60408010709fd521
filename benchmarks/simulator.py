"""How fast the simulator is: the paper's production job, whole and scaled down, for some virtual time on one core.

Seconds are CPU seconds of this process, so a busy machine does not count. An event is a callback that the virtual loop
ran. Last line: virtual seconds per real second and events per second at each size; `hour_at_3000_s`, what a virtual
hour of 3,000 GPUs takes; and `event_cost_growth`, the cost of an event at 3,000 GPUs over that at 128.
"""

import argparse
import json
import resource
from pathlib import Path

from rollart.simulate.result import Result
from rollart.simulate.scenario import Scenario, load
from rollart.simulate.simulation import simulate

SCENARIO = Path(__file__).parents[1] / "examples" / "paper" / "production.yaml"
WHOLE = 3000


def scaled(gpus: int) -> Scenario:
    """The production job with everything in proportion: devices, batch and environments."""
    whole = load(SCENARIO)
    part = gpus / WHOLE

    def count(name: str) -> str:
        return f"pools.{name}.count={max(1, round(whole.pools[name].count * part))}"

    groups = max(len(whole.tasks), round(whole.training.batch_groups * part))
    return load(SCENARIO, [*map(count, whole.pools), f"training.batch_groups={groups}", "training.steps=100000"])


def told(gpus: int, result: Result) -> str:
    return (
        f"{gpus:5} GPUs, {result.running:7.0f} trajectories at once: {result.seconds:6.0f} virtual s in "
        f"{result.cpu_s:6.1f} s, {result.all_turns:8} turns, {result.cpu_s / result.all_turns * 1e6:5.0f} us each, "
        f"{result.steps} steps of {result.step_s:.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0, help="virtual time at each size")
    span = parser.parse_args().seconds
    simulate(scaled(128), until=60.0)  # imports and caches
    results: dict[int, Result] = {}
    for gpus in (128, 1000, WHOLE):
        results[gpus] = simulate(scaled(gpus), until=span)
        print(told(gpus, results[gpus]), flush=True)
    cost = {gpus: result.cpu_s / result.events for gpus, result in results.items()}
    print(
        json.dumps(
            {
                "hour_at_3000_s": round(results[WHOLE].cpu_s * 3600 / span, 1),
                "event_cost_growth": round(cost[WHOLE] / cost[128], 3),
                "virtual_per_real_s": {gpus: round(span / result.cpu_s, 1) for gpus, result in results.items()},
                "events_per_s": {gpus: round(1 / each) for gpus, each in cost.items()},
                "trajectories_at_once": {gpus: round(result.running) for gpus, result in results.items()},
                "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
            }
        )
    )


if __name__ == "__main__":
    main()
