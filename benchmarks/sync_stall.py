"""What weight updates cost generation: updates in flight, against updates that drain the engines first.

`python benchmarks/sync_stall.py [--steps 6] [--hidden 128] [--groups 32]` trains the same tiny model on the same tasks
three times, with real processes and the same asynchronous schedule. Only what an engine does with its requests at a
swap differs (`engine.on_swap`):

- rollart: they continue with the new weights, and their KV is recomputed;
- keep: they continue on KV of the old weights, which costs nothing and is not exact;
- drain: the swap waits for them to end, and nothing new begins before it, as where updates block.

From the event logs, as shares of the time in which engines generated:

- stalled: no step could run because the engine was swapping, or a step was emptier because the engine was draining;
- recompute: KV from before a swap was recomputed, of requests in flight and of sessions between two turns: what steps
  took for it beyond the tokens decoded in them;
- exposed_fraction: both together. `stalled_vs_transfer` is what stalled as a share of the time that the weights took.

A batch is several times the trajectories in flight (256 against 32): with tiny batches, swaps would come faster than in
any real run. The share that is recomputed grows as that ratio shrinks, which `--groups` shows. Answers are long enough
that generation, not training, limits a step: else engines would be idle when new weights come. Recomputing KV costs
more here than usual: on a CPU a token of prefill costs a fifth to half of one that is decoded, on a GPU far less. The
last line is one JSON object.
"""

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from benchmarks.scratch import scratch_folder
from rollart.config import RunFile
from rollart.core.event_log import read_events
from rollart.core.events import AnyEvent, BatchTaken, EngineSample, EngineSwapped, StepDone
from rollart.fleet import controller as controller

WAYS = {"rollart": "recompute", "keep": "keep", "drain": "drain"}
GAMES = "rollart.envs"
GROUP = 8


def run_file(folder: Path, on_swap: str, steps: int, hidden: int, groups: int) -> RunFile:
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
            "tasks": [task("frozen_lake", "FrozenLake", 10, 16), task("guess_number", "GuessNumber", 4, 64)],
            "environments": {"processes": 2 * GROUP},
            "engine": {"max_batch": 32, "on_swap": on_swap},
            "training": {"steps": steps, "batch_groups": groups, "group_size": GROUP},
            "evaluation": {"every": 0, "episodes": 1, "final_episodes": 1},
            "checkpoint": {"every": 1000},
        }
    )


def generating(events: list[AnyEvent], engine: str, begin: float, end: float) -> float:
    """The seconds that an engine spent in its steps."""
    samples = [event for event in events if isinstance(event, EngineSample) and event.engine == engine]
    inside = [sample.busy_s for sample in samples if begin <= sample.t <= end]
    return inside[-1] - inside[0]


def cost(events: list[AnyEvent]) -> dict[str, float]:
    begin = next(event.t for event in events if isinstance(event, BatchTaken))
    steps = [event for event in events if isinstance(event, StepDone)]
    end = max(step.t for step in steps)
    swaps = [event for event in events if isinstance(event, EngineSwapped) and event.t <= end]
    busy = sum(generating(events, engine, begin, end) for engine in {swap.engine for swap in swaps})
    stalled, transfer = sum(swap.exposed_s for swap in swaps), sum(swap.transfer_s for swap in swaps)
    # Each event has the recomputation of the swap before it, so the last one's is not known.
    recompute = sum(swap.recompute_s for swap in swaps) * len(swaps) / (len(swaps) - 1)
    period = busy + stalled
    return {
        "exposed_fraction": (stalled + recompute) / period,
        "stalled": stalled / period,
        "recompute": recompute / period,
        "stalled_vs_transfer": stalled / transfer,
        "stalled_ms": 1000 * stalled / len(swaps),
        "recompute_ms": 1000 * recompute / len(swaps),
        "transfer_ms": 1000 * transfer / len(swaps),
        "megabytes": swaps[-1].bytes / 2**20,
        "swaps": len(swaps),
        "busy": busy / (end - begin),
        "step_s": (end - begin) / len(steps),
        "tokens_per_step": sum(step.tokens for step in steps) / len(steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--groups", type=int, default=32, help=f"in a batch, of {GROUP} trajectories each")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to check that it runs")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.hidden, options.groups = 3, 32, 2
        WAYS.pop("keep")
    costs: dict[str, dict[str, float]] = {}
    with scratch_folder("sync-stall") as scratch:
        for way, on_swap in WAYS.items():
            folder = scratch / way
            run = run_file(scratch, on_swap, options.steps, options.hidden, options.groups)
            asyncio.run(controller.train(run, folder))
            costs[way] = cost(list(read_events(folder / "events")))
            print(f"{way:8}", ", ".join(f"{key} {value:.4g}" for key, value in costs[way].items()), flush=True)
    shown = ("exposed_fraction", "stalled", "recompute", "stalled_vs_transfer")
    print(json.dumps({key: {way: round(one[key], 5) for way, one in costs.items()} for key in shown}))


if __name__ == "__main__":
    main()
