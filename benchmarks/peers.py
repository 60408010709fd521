"""rollart against TRL, each at its best on the same two cores: same start model, task, batch, reward and learning rate.

TRL 1.16 runs in an environment of its own (`make trl`). Three cases, one after the other:
  single_turn  column_sum, one turn, no latency: TRL's home ground
  multi_turn   guess_number, three turns, resets and steps as slow as in the paper, scaled to a mean step of 50 ms
  smollm2      SmolLM2-135M on sums of one turn: seconds of a step only
The start model of the first two is that of examples/quickstart.yaml after its warmup. Run on an idle machine: both
sides use all cores, one after the other, in rounds. Times are of training alone, without start-up. TRL evaluates
between two steps, and its clock stands still meanwhile; rollart evaluates while it trains, on the same cores. So
`step_time_vs_trl` compares steps during which no evaluation was played; `with_evaluations` has rollart's mean over all
steps. `time_to_success_vs_trl`: seconds until held-out success reaches `level`, the best that both reach, TRL's over
rollart's; rollart's include its evaluations. rollart's trainer computes the first two cases with bfloat16 products, as
the quickstart does, TRL with float32: its own bfloat16 (`--trl-bf16`) was no faster. Last line: one JSON object.
`--smoke` leaves SmolLM2 out; its numbers mean nothing.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml

from benchmarks.peer_tasks import score_written_sum
from benchmarks.scratch import scratch_folder
from rollart.config import RunFile
from rollart.core.event_log import read_events
from rollart.core.events import AnyEvent, Evaluated, StepDone, WorkStarted
from rollart.core.types import Episode, EpisodeTurn
from rollart.envs.column_sum import ColumnSum, player
from rollart.fleet import controller
from rollart.models import smollm2
from rollart.rewards.functions import column_sum

ROOT = Path(__file__).resolve().parent.parent
TRL_PYTHON = "ROLLART_TRL_PYTHON"  # default: the environment of `make trl`
MEAN_STEP_S = 4.7  # of the paper's distribution
Curve = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Size:
    """Of one case. TRL splits a batch into `passes`, so that padded logits fit into memory; it has all cores, or
    `trl_threads`."""

    steps: int
    groups: int
    every: int
    episodes: int
    lr: float
    passes: int = 1
    delay: float = 0.0
    trl_threads: int | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """`task` is the run file's, `env` and `env_args` the same for TRL's side."""

    name: str
    size: Size
    smoke: Size
    task: dict[str, Any]
    env_args: dict[str, Any]
    rollout: dict[str, Any]
    dtype: str = "bfloat16"
    learns: bool = True


GUESSES = {"top": 23, "min_width": 5, "max_width": 8, "guesses": 3}
CASES = (
    Case(
        "single_turn",
        Size(steps=60, groups=36, every=6, episodes=200, lr=4.5e-4),
        Size(steps=2, groups=2, every=1, episodes=4, lr=4.5e-4, trl_threads=1),
        {
            "name": "column_sum",
            "env": "rollart.envs.column_sum:ColumnSum",
            "reward": "rollart.rewards.functions:column_sum",
            "max_context": 200,
            "sampling": {"max_tokens": 40},
        },
        {},
        {},
    ),
    Case(
        "multi_turn",
        Size(steps=40, groups=36, every=5, episodes=200, lr=4.5e-4, delay=0.05),
        Size(steps=2, groups=2, every=1, episodes=4, lr=4.5e-4, delay=0.005, trl_threads=1),
        {
            "name": "guess_number",
            "env": "rollart.envs.guess_number:GuessNumber",
            "max_turns": 3,
            "max_context": 200,
            "sampling": {"max_tokens": 6},
        },
        GUESSES,
        {"extra_members": 1},
    ),
    Case(
        "smollm2",
        Size(steps=6, groups=8, every=0, episodes=0, lr=2e-5, passes=2),
        Size(steps=1, groups=1, every=0, episodes=0, lr=2e-5, trl_threads=1),
        {
            "name": "addition",
            "env": "rollart.envs.addition:Addition",
            "max_context": 128,
            "sampling": {"max_tokens": 12},
        },
        {},
        {},
        dtype="float32",
        learns=False,
    ),
)


def quickstart(smoke: bool) -> dict[str, Any]:
    run: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "quickstart.yaml").read_text())
    if smoke:
        run["model"]["warmup"] |= {"demonstrations": 40, "steps": 2}
    return run


def start_model(scratch: Path, smoke: bool) -> Path:
    """The quickstart's, after its warmup."""
    run = RunFile.model_validate(quickstart(smoke) | {"output": scratch})
    asyncio.run(controller.train(run, scratch / "warm", stage="sft"))
    return scratch / "warm" / "model"


def ours(case: Case, size: Size, model: Path, folder: Path, rollout: dict[str, Any], threads: int) -> dict[str, Any]:
    task = case.task | {"args": case.env_args}
    at_once = max(128, size.groups * 8)  # the whole batch, as TRL does
    if size.delay:
        args = {"env": task["env"], "args": case.env_args, "delay": size.delay / MEAN_STEP_S}
        task |= {"env": "benchmarks.fault_injection:Chaos", "args": args}
    run = RunFile.model_validate(
        {
            "name": case.name,
            "output": folder.parent,
            "model": {"path": model},
            "tasks": [task],
            "rollout": rollout,
            "environments": {"processes": 384 if size.delay else at_once},
            "engine": {"max_batch": at_once, "threads": threads, "kv_megabytes": 1024},
            "training": {
                "steps": size.steps,
                "batch_groups": size.groups,
                "group_size": 8,
                "lr": size.lr,
                "dtype": case.dtype,
                "algorithm": {"aggregate": "group"},
            },
            "evaluation": {"every": size.every, "episodes": size.episodes or 1, "final_episodes": size.episodes or 1},
            "checkpoint": {"every": 1000},
        }
    )
    summary = asyncio.run(controller.train(run, folder))
    events = list(read_events(folder / "events"))
    done = [event.t for event in events if isinstance(event, StepDone)]
    start = done[-1] - summary["rl_seconds"]
    # Later versions may play the rest of an evaluation, so it counts when it ends; after the last step there are none.
    curve = [
        (max(0.0, min(event.t, done[-1]) - start), event.success) for event in events if isinstance(event, Evaluated)
    ]
    apart = [after - before for before, after in pairwise(done)] or [summary["rl_seconds"]]
    spans = evaluation_spans(events)
    alone = [
        after - before
        for before, after in pairwise(done)
        if not any(began < after and ended > before for began, ended in spans)
    ]
    return {
        "curve": curve,
        "step_s": fmean(alone or apart),
        "with_evaluations": fmean(apart),
        "seconds": summary["rl_seconds"],
    }


def evaluation_spans(events: Sequence[AnyEvent]) -> list[tuple[float, float]]:
    """When each began and ended."""
    began = [event for event in events if isinstance(event, WorkStarted) and event.work == "evaluation"]
    ended = {event.version: event.t for event in events if isinstance(event, Evaluated)}
    return [(event.t, ended[event.version]) for event in began]


def trls(case: Case, size: Size, model: Path, folder: Path, python: Path, bf16: bool) -> dict[str, Any]:
    name, env = case.task["name"], case.task["env"]
    spec = {
        "model": str(model),
        "task": name,
        "env": env,
        "env_args": case.env_args,
        "delay": size.delay / MEAN_STEP_S,
        "steps": size.steps,
        "groups": size.groups,
        "group_size": 8,
        "passes": size.passes,
        "every": size.every or size.steps,
        "episodes": size.episodes,
        "lr": size.lr,
        "beta2": 0.95,
        "max_tokens": case.task["sampling"]["max_tokens"],
        "max_turns": case.task.get("max_turns", 1),
        "threads": size.trl_threads or os.cpu_count() or 1,
        "bf16": bf16,
        "seed": 0,
        "rows": written_sums(size.steps * size.groups, False) if name == "column_sum" else [],
        "held_out_rows": written_sums(size.episodes, True) if name == "column_sum" else [],
    }
    folder.mkdir()
    (folder / "spec.json").write_text(json.dumps(spec))
    log = folder / "trl.log"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    with log.open("w") as errors:
        made = subprocess.run(
            [str(python), "-c", "from benchmarks.peers_trl import main; main()", str(folder / "spec.json")],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    if made.returncode:
        raise SystemExit(f"TRL failed; the end of {log}:\n{log.read_text()[-2000:]}")
    lines = [json.loads(line) for line in made.stdout.splitlines()]
    steps = [line["step_s"] for line in lines if "step_s" in line]
    curve = [(line["seconds"], line["success"]) for line in lines if "success" in line]
    return {"curve": curve, "step_s": sum(steps[1:] or steps) / len(steps[1:] or steps), "seconds": sum(steps)}


def written_sums(count: int, held_out: bool) -> list[dict[str, Any]]:
    env, rows = ColumnSum(held_out=held_out), []
    for seed in range(count):
        prompt = env.reset(seed)
        *columns, answer = player(env, random.Random(0), skill=1.0).split(";")
        rows.append({"prompt": prompt, "columns": columns, "answer": answer})
    return rows


def check_reward(count: int = 200) -> None:
    """That both sides are paid the same for the same answers, right and wrong ones."""
    rng = random.Random(0)
    for row in written_sums(count, False):
        words = [*row["columns"], row["answer"]]
        for at in range(len(words)):
            if rng.random() < 0.3:
                words[at] = rng.choice((words[at][:-1], words[at] + "1", "", "x"))
        action = ";".join(words)
        info = {"expression": row["prompt"].removesuffix("="), "answer": row["answer"]}
        expected = column_sum(Episode("check", "column_sum", 0, (EpisodeTurn((), action),), info=info))
        if score_written_sum(action, row["columns"], row["answer"]) != (expected.value, expected.success):
            raise SystemExit(f"TRL's side scores {action!r} otherwise than rollart's; fix benchmarks/peer_tasks.py")


def seconds_to(curve: Curve, level: float) -> float | None:
    """When success first reaches the level, linear between evaluations."""
    for (before, low), (after, high) in pairwise(curve):
        if high >= level:
            return after if high == low else before + (after - before) * max(0.0, (level - low) / (high - low))
    return None


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Of rounds that evaluate at the same steps."""
    count = len(curves)
    return [
        (sum(s for s, _ in points) / count, sum(y for _, y in points) / count) for points in zip(*curves, strict=True)
    ]


def compare(case: Case, made: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    step_s = {side: median(one["step_s"] for one in rounds) for side, rounds in made.items()}
    result: dict[str, Any] = {
        "step_time_vs_trl": round(step_s["trl"] / step_s["rollart"], 2),
        "step_s": {side: round(seconds, 3) for side, seconds in step_s.items()},
        "with_evaluations": round(median(one["with_evaluations"] for one in made["rollart"]), 3),
    }
    if not case.learns:
        return result
    curves = {side: mean_curve([one["curve"] for one in rounds]) for side, rounds in made.items()}
    level = min(max(success for _, success in curve) for curve in curves.values())
    reached = {side: seconds_to(curve, level) for side, curve in curves.items()}
    if all(reached.values()):
        result["time_to_success_vs_trl"] = round((reached["trl"] or 0.0) / (reached["rollart"] or 1.0), 2)
    result["level"] = round(level, 3)
    result["seconds_to_level"] = reached
    result["curves"] = {side: [[round(s, 1), round(y, 3)] for s, y in curve] for side, curve in curves.items()}
    return result


def play(case: Case, options: argparse.Namespace, model: Path, scratch: Path) -> dict[str, Any]:
    size = case.smoke if options.smoke else case.size
    if options.lr:
        size = replace(size, lr=options.lr)
    rollout = case.rollout | ({"preset": options.preset} if options.preset else {})
    made: dict[str, list[dict[str, Any]]] = {"trl": [], "rollart": []}
    for number in range(options.rounds):
        folder = scratch / f"{case.name}-{number}"
        sides: dict[str, Callable[[], dict[str, Any]]] = {
            "trl": lambda folder=folder: trls(
                case, size, model, folder.with_name(f"{folder.name}-trl"), options.python, options.trl_bf16
            ),  # type: ignore[misc]
            "rollart": lambda folder=folder: ours(case, size, model, folder, rollout, options.threads),  # type: ignore[misc]
        }
        for side, run in sides.items():
            made[side].append(run())
            print(f"{case.name} {side} {json.dumps(made[side][-1])}", flush=True)
    return compare(case, made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="*", default=None, choices=names, help="default: all")
    parser.add_argument("--rounds", type=int, default=1, help="each side once a round; curves are averaged")
    parser.add_argument("--preset", default=None, help="rollart's rollout.preset; default: that of run files")
    parser.add_argument("--threads", type=int, default=1, help="of rollart's engine")
    parser.add_argument("--lr", type=float, default=None, help="learning rate of both sides")
    parser.add_argument("--trl-bf16", action="store_true", help="TRL computes with bfloat16 autocast")
    parser.add_argument("--python", type=Path, default=None, help=f"TRL's Python; ${TRL_PYTHON}, else .venv-trl")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to check that it runs")
    options = parser.parse_args()
    options.python = options.python or Path(os.environ.get(TRL_PYTHON) or ROOT / ".venv-trl" / "bin" / "python")
    if not options.python.exists():
        print(json.dumps({"skipped": "no environment with TRL; run: make trl"}))
        sys.exit(0)
    options.cases = options.cases or (names[:2] if options.smoke else names)
    check_reward()
    result: dict[str, Any] = {}
    with scratch_folder("peers") as scratch:
        warm: Path | None = None
        for case in (case for case in CASES if case.name in options.cases):
            if case.name == "smollm2":
                result[case.name] = play(case, options, smollm2.save(scratch / "smollm2"), scratch)
            else:
                warm = warm or start_model(scratch, options.smoke)
                result[case.name] = play(case, options, warm, scratch)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
