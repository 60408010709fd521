"""Robot policies: what one step costs and gains, and every policy on every task.

    python -m benchmarks.robots                          # needs the family metaworld: rollart envs add metaworld
    python -m benchmarks.robots --adroit FOLDER          # with Adroit too: adroit-door.npz, -hammer, -pen in FOLDER
    python -m benchmarks.robots --only costs multimodal  # seconds and a minute, without a simulator
    python -m benchmarks.robots --only rl --keep DIR --minutes 6    # again until nothing is missing

`dde_vs_jvp_time`: a training step of MeanFlow with central differences, over one with forward-mode differentiation.
`one_step_vs_ten_latency`: a chunk by MeanFlow, over one by flow matching in ten steps. `multimodal_gain`: success with
two ways around an obstacle, one-step MeanFlow less regression. `table`: the mean success of each policy over the tasks
of examples/robots/benchmark.yaml and five seeds, with half of its 95% interval; `groups` has it by how hard they are,
`tasks` by task, `differences` MeanFlow with cosine loss and DDE less each other policy, seed by seed, `policy_costs`
what a chunk and a training step take. In a table that is not complete, only pairs of task and seed count that every
policy has (`in_common`). With --keep, it is drawn too (success.png).
`table_train_cpu_s`: the CPU seconds of the training of all policies, those that were kept included; `cpu_s`: what this
command took in all, its processes included.
`dde_vs_jvp_success`: success with central differences less that with forward-mode differentiation, all else alike, on
some of the tasks: the mean over seeds, and half of its 95% interval. `rl_gain`: success on pick-place after `rollart
robots tune` less that before it, the mean over seeds, and half of its 95% interval; `obstacle_rl_gain` on the obstacle.
With --keep, every result is kept as soon as it is there, and a benchmark that was stopped goes on with what is missing.
"""

import argparse
import asyncio
import hashlib
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks.cells import Cells, add_options, kept_cells
from rollart.config.robots import (
    AnyPolicyConfig,
    ComparisonFile,
    FlowConfig,
    MeanFlowConfig,
    RobotEvaluationConfig,
    RobotRunFile,
)
from rollart.observe.draw import table
from rollart.robots import comparison, imitation, tuning
from rollart.robots.chunks import ImitationData
from rollart.robots.comparison import ComparedPolicy
from rollart.robots.demonstrations import Demonstration
from rollart.robots.learner import ImitationLearner, LearnerConfig, TrainedPolicy
from rollart.robots.report import comparison_table, grouped, in_common, seed_differences, seed_means, write_bars
from rollart.simulator.result import interval

PLAN = Path(__file__).parents[1] / "examples" / "robots" / "benchmark.yaml"
PARTS = ("costs", "multimodal", "rl", "table")
RL: dict[str, dict[str, Any]] = {
    "pick-place": {
        "task": "metaworld:pick-place-v3",
        "demonstrations": {"episodes": 8},
        "training": {"steps": 3000, "batch": 64, "deadline": 3600},  # for one call, which is a whole update
        "tuning": {
            "steps": 6,
            "groups": 100,
            "group_size": 6,
            "optimizer_steps": 3000,
            "lr": 1e-3,
            "ema": 0.999,
            "explore": 0.2,
        },
        "evaluation": {"episodes": 100},
    },
    "obstacle": {
        "task": "toy:obstacle",
        "demonstrations": {"episodes": 50},
        "control": {"history": 1, "chunk": 8, "execute": 8},
        "network": {"width": 64, "layers": 2},
        "training": {"steps": 900, "batch": 64},
        "tuning": {"steps": 25, "optimizer_steps": 30, "imitate": False},
        "evaluation": {"episodes": 100},
    },
}
RL_SEEDS = {"pick-place": 10, "obstacle": 5}  # policies of few demonstrations start from 0.3 to 0.9
RL_SMOKE = {
    "training": {"steps": 20},
    "evaluation": {"episodes": 4},
    "tuning": {"steps": 2, "groups": 2, "group_size": 2, "optimizer_steps": 5},
}
COSTS = ("p50_ms", "p99_ms", "step_ms")  # of a chunk, and the CPU time of a training step
DDE, JVP = "MeanFlow+cos+DDE", "MeanFlow+cos+JVP"
DERIVATIVE_TASKS = [  # on which policies neither always nor never succeed
    f"metaworld:{task}-v3" for task in ("hammer", "push-wall", "pick-place", "push", "shelf-place", "stick-pull")
]
ADROIT = ("adroit:door", "adroit:hammer", "adroit:pen")
OBSERVATIONS, ACTIONS, STEPS = 39, 4, 1000  # as in Meta-World


def learner(policy: AnyPolicyConfig) -> ImitationLearner:
    rng = np.random.default_rng(0)
    shown = [rng.normal(size=(STEPS, size)).astype(np.float32) for size in (OBSERVATIONS, ACTIONS)]
    config = LearnerConfig.model_validate({"policy": policy, "control": {}, "network": {}, "training": {}})
    return ImitationLearner(config, [ImitationData.of([Demonstration(*shown)], config.control)], [0])


def alternated(calls: Sequence[Callable[[], object]], rounds: int, repeats: int = 1) -> list[float]:
    """The median CPU milliseconds of each, measured in turns of `repeats` calls: a control loop's caches are warm."""
    taken: list[list[float]] = [[] for _ in calls]
    for number in range(rounds + 2):
        for times, call in zip(taken, calls, strict=True):
            began = time.thread_time()
            for _ in range(repeats):
                call()
            if number >= 2:
                times.append(1e3 * (time.thread_time() - began) / repeats)
    return [statistics.median(times) for times in taken]


def costs(rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    dde, jvp = (learner(MeanFlowConfig(derivative=kind)) for kind in ("dde", "jvp"))
    dde_ms, jvp_ms = alternated([lambda: dde.train(1), lambda: jvp.train(1)], rounds)
    with tempfile.TemporaryDirectory() as made:
        acting = []
        for name, policy in (("one", MeanFlowConfig()), ("ten", FlowConfig(steps=10))):
            learner(policy).export([Path(made) / name], ["metaworld:reach-v3"])
            acting.append(TrainedPolicy(Path(made) / name))
    seen, noise = torch.zeros(1, 2, OBSERVATIONS), torch.zeros(1, acting[0].noise_size)
    one_ms, ten_ms = alternated([lambda: acting[0].act(seen, noise), lambda: acting[1].act(seen, noise)], rounds, 10)
    return {
        "dde_vs_jvp_time": round(dde_ms / jvp_ms, 3),
        "dde_ms": round(dde_ms, 2),
        "jvp_ms": round(jvp_ms, 2),
        "one_step_vs_ten_latency": round(one_ms / ten_ms, 3),
        "one_step_ms": round(one_ms, 3),
        "ten_steps_ms": round(ten_ms, 3),
    }


def multimodal(folder: Path, *, smoke: bool) -> dict[str, Any]:
    plan = ComparisonFile.model_validate(
        {
            "tasks": ["toy:obstacle"],
            "policies": {name: name for name in ("meanflow", "regression", *(() if smoke else ("flow",)))},
            "seeds": 1 if smoke else 5,
            "demonstrations": {"episodes": 10 if smoke else 50},
            "control": {"history": 1, "chunk": 8, "execute": 8},
            "training": {"steps": 20 if smoke else 1500, "batch": 64},
            "evaluation": {"episodes": 4 if smoke else 100},
        }
    )
    results = asyncio.run(comparison.compare(plan, folder, report))
    Console().print(comparison_table(results))
    success = intervals({policy: seed_means(results, policy) for policy in plan.policies})
    gain = success["meanflow"][0] - success["regression"][0]
    return {"multimodal_gain": round(gain, 3), "multimodal": success}


def tuned(cells: Cells, *, smoke: bool) -> dict[str, Any]:
    """Imitate, then tune, with few demonstrations, so that there is room to improve."""
    found: dict[str, Any] = {}
    rows = table("task", "demonstrations", "seeds", "imitated", "after RL", "gain, 95%")
    for name, settings in RL.items():
        if smoke and not settings["task"].startswith("toy:"):
            continue
        run = {**settings, **(RL_SMOKE if smoke else {})}
        seeds = range(1 if smoke else RL_SEEDS[name])
        made = [cells.get(partial(gain, run, seed), part="rl", run=run, seed=seed) for seed in seeds]
        gains = [one["after"] - one["before"] for one in made if one is not None]
        if gains:
            key = "rl_gain" if name == "pick-place" else f"{name}_rl_gain"
            found |= intervals({key: gains})
            found[f"{key}_runs"] = made
            rows.add_row(*after_rl(settings, [one for one in made if one is not None], gains))
    Console(width=100).print(rows)
    return found


def after_rl(settings: dict[str, Any], made: Sequence[dict[str, float]], gains: Sequence[float]) -> list[str]:
    """A row: apart from the table of policies, because there are fewer demonstrations."""
    before, after = (statistics.fmean(one[when] for one in made) for when in ("before", "after"))
    mean, half = interval(gains)
    change = f"{mean:+.2f}" if half != half else f"{mean:+.2f} ± {half:.2f}"  # NaN for a single seed
    shown = str(settings["demonstrations"]["episodes"])
    return [settings["task"], shown, str(len(made)), f"{before:.2f}", f"{after:.2f}", change]


def gain(run: dict[str, Any], seed: int) -> dict[str, float]:
    plan = RobotRunFile.model_validate({**run, "seed": seed})
    with tempfile.TemporaryDirectory() as made:
        imitated, folder = Path(made) / "imitated", Path(made) / "tuned"
        unscored = plan.model_copy(update={"evaluation": RobotEvaluationConfig(episodes=1)})  # the tuning does that
        asyncio.run(imitation.train(unscored, imitated, resume=False, on_log=lambda log: None))
        result = asyncio.run(tuning.tune(plan, folder, start=imitated, on_log=lambda log: None))
    print(f"rl, {plan.task}, seed {seed}: {result.before:.2f} to {result.after:.2f}", flush=True)
    return {"before": result.before, "after": result.after}


def whole_table(cells: Cells, adroit: Path | None) -> dict[str, Any]:
    plan = comparison.load(PLAN, [])
    if adroit is not None:
        more = {"tasks": [*plan.tasks, *ADROIT]}
        shown = plan.demonstrations.model_copy(update={"path": adroit})
        plan = plan.model_copy(update={**more, "demonstrations": shown})
    began = time.monotonic()
    folder = cells.folder / f"table-{settings_digest(plan)}"
    results = asyncio.run(comparison.compare(plan, folder, report, cells.seconds_left))
    Console(width=100).print(comparison_table(results))
    write_bars(results, folder / "success.png")
    minutes = round((time.monotonic() - began) / 60, 1)
    return {**summary(plan, results), "table_minutes": minutes, **derivatives(cells, plan, results)}


def summary(plan: ComparisonFile, results: Sequence[ComparedPolicy]) -> dict[str, Any]:
    tasks: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in results:
        tasks[one.task][one.policy].append(one.success)
    groups, common = grouped(results), in_common(results)
    done = {(one.policy, one.task, one.seed) for one in results}
    others = [policy for policy in plan.policies if policy != DDE and common]
    by_policy = {policy: [one for one in results if one.policy == policy] for policy in plan.policies}
    return {
        "table": intervals(list(groups.values())[-1]),
        "groups": {group: intervals(means) for group, means in groups.items()},
        "tasks": {task: intervals(of_policy) for task, of_policy in tasks.items()},
        "differences": intervals({policy: seed_differences(common, DDE, policy) for policy in others}),
        "policy_costs": {
            policy: {name: round(statistics.median(getattr(one, name) for one in some), 3) for name in COSTS}
            for policy, some in by_policy.items()
            if some
        },
        "policies": len(results),
        "in_common": len(common),
        "table_train_cpu_s": round(sum(one.step_ms for one in results) * plan.training.steps / 1e3),
        "table_missing": sum(
            (policy, task, seed) not in done
            for policy, task, seed in product(plan.policies, plan.tasks, range(plan.seed, plan.seed + plan.seeds))
        ),
    }


def derivatives(cells: Cells, plan: ComparisonFile, results: Sequence[ComparedPolicy]) -> dict[str, Any]:
    """The policy of the table that takes the derivative by central differences, and its twin that does not."""
    twin = {JVP: plan.policies[DDE].model_copy(update={"derivative": "jvp"})}
    plan = plan.model_copy(update={"tasks": DERIVATIVE_TASKS, "policies": twin})
    folder = cells.folder / f"table-{settings_digest(plan)}"
    made = asyncio.run(comparison.compare(plan, folder, report, cells.seconds_left))
    found: dict[str, Any] = {"derivative_missing": len(plan.tasks) * plan.seeds - len(made)}
    both = in_common([*(one for one in results if one.policy == DDE), *made]) if made else []
    if both:
        found["derivatives"] = intervals({policy: seed_means(both, policy) for policy in (DDE, JVP)})
        found |= intervals({"dde_vs_jvp_success": seed_differences(both, DDE, JVP)})
    return found


def settings_digest(plan: ComparisonFile) -> str:
    """Results of other settings are kept apart; more tasks, seeds or jobs are not other settings."""
    settings = plan.model_dump(mode="json", exclude={"tasks", "seeds", "jobs", "stack"})
    del settings["demonstrations"]["path"]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]


def intervals(values: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Means, each with half of its 95% interval, if that is known: JSON has no NaN."""
    pairs = {name: interval(some) for name, some in values.items() if some}
    return {name: [round(number, 3) for number in pair if number == number] for name, pair in pairs.items()}


def report(one: ComparedPolicy) -> None:
    print(f"{one.policy}, {one.task}, seed {one.seed}: {one.success:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, no simulator")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--adroit", type=Path, metavar="FOLDER", help="demonstrations of Adroit")
    add_options(parser)
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    with kept_cells("robots", arguments) as cells:
        if "costs" in arguments.only:
            found |= costs(3 if arguments.smoke else 60)
        if "multimodal" in arguments.only:
            found |= multimodal(cells.folder / "multimodal", smoke=arguments.smoke)
        if "rl" in arguments.only:
            found |= tuned(cells, smoke=arguments.smoke)
        if "table" in arguments.only and not arguments.smoke:
            found |= whole_table(cells, arguments.adroit)
        if cells.missing:
            found["missing"] = len(cells.missing)
    found["cpu_s"] = round(sum(os.times()[:4]), 1)  # of this process and of those that it waited for
    print(json.dumps(found))


if __name__ == "__main__":
    main()
