"""What weight updates cost generation: updates in flight, against updates that drain the engines first.

`python benchmarks/sync_stall.py [--steps 20] [--hidden 256]` trains the same tiny model on the same tasks twice, with
real processes: once as `rollart` does it, where engines get and check new weights while they generate and swap between
two steps, and once with the preset `one_off`, which lets all requests end before it swaps. From the event logs:

- pause: the time in which an engine could not step because it was swapping, as a share of the time of RL;
- drained: between the end of a training step and the swap to its weights, the share of the usual number of requests
  that an engine did not have, as time, as a share of the time of RL;
- exposed_fraction: both together; exposed_vs_transfer: pauses, as a share of the time that the weights took to come;
- recomputed: tokens whose KV was made again because they were in flight at a swap, as a share of all tokens computed.

The last line is one JSON object.
"""

import argparse
import asyncio
import json
import tempfile
from bisect import bisect_right
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from rollart import run as controller
from rollart.config import RunFile
from rollart.observe.events import AnyEvent, BatchTaken, EngineSwapped, StepDone, TurnDone
from rollart.observe.log import read_events

WAYS = {"rollart": "rollart", "blocking": "one_off"}
GAMES = "rollart.envs"


def run_file(folder: Path, preset: str, steps: int, hidden: int) -> RunFile:
    def task(name: str, kind: str, turns: int, tokens: int) -> dict[str, Any]:
        game = f"{GAMES}.{name}:{kind}"
        sampling = {"max_tokens": tokens}
        return {"name": name, "env": game, "max_turns": turns, "max_context": 400, "sampling": sampling}

    heads = hidden // 32
    return RunFile.model_validate(
        {
            "name": "sync-stall",
            "output": folder,
            "model": {
                "tiny": {"context": 512, "hidden": hidden, "layers": 4, "heads": heads, "kv_heads": max(1, heads // 4)}
            },
            "tasks": [task("frozen_lake", "FrozenLake", 10, 8), task("guess_number", "GuessNumber", 4, 32)],
            "rollout": {"preset": preset},
            "environments": {"slots": 128},
            "engine": {"max_batch": 64},
            "training": {"steps": steps, "batch_groups": 8, "group_size": 8},
            "evaluation": {"every": 0, "episodes": 1, "final_episodes": 1},
            "checkpoint": {"every": 1000},
        }
    )


class InFlight:
    """How many requests an engine had at any time."""

    def __init__(self, turns: list[TurnDone]) -> None:
        changes: dict[float, int] = defaultdict(int)
        for turn in turns:
            changes[turn.t - turn.env_s - turn.generate_s] += 1
            changes[turn.t - turn.env_s] -= 1
        self.times, self.counts, count = [0.0], [0], 0
        for time in sorted(changes):
            count += changes[time]
            self.times.append(time)
            self.counts.append(count)

    def missing(self, start: float, stop: float, usual: float) -> float:
        """The seconds between `start` and `stop` that were lost, if `usual` requests are none lost."""
        first, last = bisect_right(self.times, start), bisect_right(self.times, stop)
        points = [start, *self.times[first:last], stop]
        counts = self.counts[first - 1 : last]
        return sum(
            (after - before) * max(0.0, 1 - count / usual)
            for (before, after), count in zip(pairwise(points), counts, strict=True)
        )

    def mean(self, start: float, stop: float) -> float:
        whole = 1e9
        return whole * (1 - self.missing(start, stop, whole) / (stop - start))


def cost(events: list[AnyEvent]) -> dict[str, float]:
    begin = next(event.t for event in events if isinstance(event, BatchTaken))
    made = {event.version: event.t for event in events if isinstance(event, StepDone)}
    end = max(made.values())
    swaps = [event for event in events if isinstance(event, EngineSwapped) and event.t <= end]
    turns = [event for event in events if isinstance(event, TurnDone)]
    engines = {swap.engine for swap in swaps}
    drained = 0.0
    for engine in engines:
        flight = InFlight([turn for turn in turns if turn.engine == engine])
        usual = flight.mean(begin, end)
        drained += sum(flight.missing(made[s.version], s.t, usual) for s in swaps if s.engine == engine)
    period = (end - begin) * len(engines)
    pause, transfer = sum(swap.exposed_s for swap in swaps), sum(swap.transfer_s for swap in swaps)
    computed = sum(turn.prompt - turn.cached + turn.tokens for turn in turns if begin <= turn.t <= end)
    recomputed = sum(swap.recomputed for swap in swaps)
    return {
        "pause": pause / period,
        "drained": drained / period,
        "exposed_fraction": (pause + drained) / period,
        "exposed_vs_transfer": pause / transfer,
        "recomputed": recomputed / (computed + recomputed),
        "pause_ms": 1000 * pause / len(swaps),
        "transfer_ms": 1000 * transfer / len(swaps),
        "megabytes": swaps[-1].bytes / 2**20,
        "swaps": len(swaps),
        "rl_seconds": end - begin,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=256)
    given = parser.parse_args()
    costs: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="sync-stall-") as scratch:
        for way, preset in WAYS.items():
            folder = Path(scratch) / way
            asyncio.run(controller.train(run_file(Path(scratch), preset, given.steps, given.hidden), folder))
            costs[way] = cost(list(read_events(folder / "events.jsonl")))
            print(f"{way:9}", ", ".join(f"{key} {value:.4g}" for key, value in costs[way].items()), flush=True)
    shown = ("exposed_fraction", "pause", "drained", "exposed_vs_transfer", "recomputed")
    print(json.dumps({key: {way: round(one[key], 5) for way, one in costs.items()} for key in shown}))


if __name__ == "__main__":
    main()
