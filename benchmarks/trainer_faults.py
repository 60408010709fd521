"""A node of the trainer dies for good under a run on Ray, and the run goes on with fewer ranks in another layout.

The policy is a small mixture of experts, its engine a vLLM server on CPUs (`make vllm`), and the trainer has four
ranks, data 2 x tensor 2, experts over 2, on two nodes. The nodes are processes of this machine. One of the trainer's is
killed after a few steps and nothing replaces it: once the trainer has waited for that, the two ranks that are left load
the newest checkpoint, which four wrote, as tensor 2, and the engine gets their weights.

Last line: `layouts` of the trainer in turn, `recovery_s` from the kill to the next training step, the steps that were
trained again, `lost_trajectories`, `trained_twice` and the outcomes.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from benchmarks import ray_faults
from benchmarks.scratch import scratch_folder
from rollart.config import RunFile
from rollart.core.events import AnyEvent, Placed, RolledBack, StepDone, Warned

KILL_AT = 5
START_S = 900.0  # beside other work; half a minute alone


def run_file(address: str, steps: int, engine: dict[str, Any]) -> RunFile:
    return RunFile.model_validate(
        {
            "name": "trainer-faults",
            "cluster": address,
            "model": {
                "tiny": {
                    "architecture": "qwen3_moe",
                    "hidden": 64,
                    "layers": 2,
                    "heads": 2,
                    "kv_heads": 2,
                    "context": 256,
                }
            },
            "tasks": [
                {
                    "name": "guess_number",
                    "env": "rollart.envs.guess_number:GuessNumber",
                    "max_turns": 4,
                    "max_context": 200,
                    "sampling": {"max_tokens": 6},
                }
            ],
            "pools": {
                "learning": {"role": "train", "device": "H800", "count": 4},
                "talking": {"role": "generate", "device": "H20", **engine},
                "playing": {"role": "environment", "device": "cpu"},
            },
            "engine": {"device": "cpu", "kv_megabytes": 64, "start_deadline": START_S},
            "training": {
                "steps": steps,
                "batch_groups": 4,
                "group_size": 4,
                "device": "cpu",
                "parallel": {"tensor": 2, "expert": 2},
                "start_deadline": START_S,
            },
            "environments": {"processes": 8},
            "evaluation": {"every": 0, "final_episodes": 2},
            "checkpoint": {"every": 2},
        }
    )


class Observer:
    """Kills a node of the trainer at its fifth step, and takes down what happens then."""

    def __init__(self, cluster: Any, nodes: dict[str, list[Any]]) -> None:
        self._cluster, self._nodes = cluster, nodes
        self._killed_at: float | None = None
        self._ranks: set[str] = set()
        self.recovery: float | None = None
        self.sizes: list[int] = []
        self.warnings: list[str] = []
        self.trained_again = 0
        self._version = 0

    def see(self, event: AnyEvent) -> None:
        match event:
            case Placed() if event.role == "train":
                self._ranks.add(event.name)
            case Warned() if self._killed_at is not None:
                self.warnings.append(event.message)
                print(event.message, flush=True)
            case RolledBack():
                self.trained_again = self._version - event.version
            case StepDone():
                self._version = event.version
                if self._ranks:
                    self.sizes.append(len(self._ranks))
                    self._ranks = set()
                if self._killed_at is None and event.version >= KILL_AT:
                    self._kill()
                elif self._killed_at is not None and self.recovery is None and len(self.sizes) > 1:
                    self.recovery = round(time.monotonic() - self._killed_at, 1)

    def _kill(self) -> None:
        print(f"killing a node of the trainer at version {self._version}", flush=True)
        self._killed_at = time.monotonic()
        self._cluster.remove_node(self._nodes["H800"].pop(), allow_graceful=False)


def faults(steps: int, scratch: Path, engine: dict[str, Any]) -> dict[str, Any]:
    with ray_faults.cluster_of(("H800", "H800", "H20", "cpu")) as (cluster, nodes):
        observer = Observer(cluster, nodes)
        run = run_file(cluster.address, steps, engine)
        ray_faults.train(run, scratch, observer.see)
    return {
        "layouts": [str(run.training.parallel.layout(ranks)) for ranks in observer.sizes],
        "recovery_s": observer.recovery,
        "trained_again": observer.trained_again,
        **ray_faults.accounts(scratch / "run", steps),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--smoke", action="store_true", help="few steps, and the embedded engine in place of vLLM")
    options = parser.parse_args()
    steps, engine = (8, {}) if options.smoke else (options.steps, {"engine": "vllm"})
    with scratch_folder("trainer-faults") as folder:
        print(json.dumps(faults(steps, folder, engine)))
