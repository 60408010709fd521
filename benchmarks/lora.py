"""SmolLM2-135M learns sums with LoRA, with all weights in bfloat16, and with all weights in float32.

Each setting takes the same supervised steps on the same examples, for three seeds, in a process of its own; settings
take turns, so that what else runs on the machine falls on all of them. Reported for each: the mean cross entropy of
held-out answers before and after, its standard deviation over seeds, CPU seconds of a step, and the peak of anonymous
memory above that of the idle process (see `benchmarks/memory.py`). `worst_gap` is the largest distance of a setting's
final loss from float32's, in standard deviations of the difference: at most 2 is the same learning within noise.

Needs the model: `rollart models smollm2 models/smollm2-135m`.
"""

import argparse
import json
import math
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.memory import peak, reset_peak, status
from benchmarks.parallel import on_processes
from rollart.config import TinyModelConfig, TrainingConfig
from rollart.core.types import Example, ExampleBatch
from rollart.envs.addition import Addition, solution
from rollart.models import tiny
from rollart.training.microbatch import pack_examples
from rollart.training.ranks import RankAddress
from rollart.training.trainer import Trainer

BASELINE = "float32"
LORA = {"rank": 16, "alpha": 32}
SETTINGS: dict[str, dict[str, Any]] = {
    BASELINE: {"lr": 3e-5},
    "bfloat16": {"lr": 3e-5, "dtype": "bfloat16"},
    "lora": {"lr": 6e-4, "lora": LORA},
    "lora bfloat16": {"lr": 6e-4, "lora": LORA, "dtype": "bfloat16"},
}
HELD_OUT = 24
DEADLINE_S = 3600.0


def examples(folder: Path, count: int, seed: int, *, held_out: bool = False) -> list[Example]:
    """Sums as the environment asks for them, each with its solution, whose tokens are learnt."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    draw, env, made = random.Random(seed), Addition(held_out=held_out), []
    for _ in range(count):
        messages = env.reset(draw.randrange(1 << 30))
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        start = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        answer = tokenizer(solution(*env.terms), add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        made.append(Example(start + answer, [0] * len(start) + [1] * len(answer)))
    return made


@torch.no_grad()
def loss(trainer: Trainer, held_out: list[Example]) -> float:
    return -float(trainer.learner.policy.logprobs(pack_examples(held_out))[0].mean())


def _learn(
    folder: Path, setting: str, seed: int, steps: int, batch: int, threads: int, result: Path, place: RankAddress
) -> None:
    values = {"threads": threads, "pack_tokens": 4096, **SETTINGS[setting]}
    config = TrainingConfig.model_validate(values)
    train, held_out = examples(folder, steps * batch, seed), examples(folder, HELD_OUT, 0, held_out=True)
    ready = status("RssAnon")
    reset_peak()
    trainer = Trainer(folder, config, seed=seed)
    model: Any = trainer.learner.policy
    for parameter in model.model.parameters():  # what is not trained would stay pages of the file, which do not count
        parameter.data.add_(0.0)
    before, spent = loss(trainer, held_out), []
    for step in range(steps):
        rate = config.lr * min(1.0, (step + 1) / 3) * (1 - step / steps)
        began = time.process_time()
        trainer.imitate(ExampleBatch(step, rate, tuple(train[step * batch : (step + 1) * batch])))
        spent.append(time.process_time() - began)
    row = {
        "before": before,
        "after": loss(trainer, held_out),
        "step_cpu_s": fmean(spent[1:] or spent),
        "peak_mb": (peak() - ready) / 1e6,
        "trained_parameters": sum(each.numel() for each in trainer.learner.policy.parameters().values()),
    }
    result.write_text(json.dumps(row))


def summary(rows: list[dict[str, float]]) -> dict[str, float]:
    after = [row["after"] for row in rows]
    means = {key: fmean(row[key] for row in rows) for key in rows[0]}
    return {**{key: float(f"{value:.4g}") for key, value in means.items()}, "deviation": _deviation(after)}


def _deviation(values: list[float]) -> float:
    return float(f"{stdev(values):.3g}") if len(values) > 1 else 0.0


def gap(rows: list[dict[str, float]], baseline: list[dict[str, float]]) -> float:
    """The distance of the means in standard deviations of their difference."""
    ours, theirs = ([row["after"] for row in each] for each in (rows, baseline))
    if len(ours) < 2:
        return 0.0
    noise = math.sqrt((stdev(ours) ** 2 + stdev(theirs) ** 2) / len(ours))
    return abs(fmean(ours) - fmean(theirs)) / max(noise, 1e-9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m"), help="its folder")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8, help="sums in a step")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="two burn CPU time waiting on a busy machine")
    parser.add_argument("--only", nargs="*", choices=list(SETTINGS), default=list(SETTINGS), help="settings to run")
    parser.add_argument("--smoke", action="store_true", help="a tiny random model, one seed and two steps")
    arguments = parser.parse_args()
    steps, seeds = (2, 1) if arguments.smoke else (arguments.steps, arguments.seeds)
    with tempfile.TemporaryDirectory() as scratch:
        folder, result = arguments.model, Path(scratch) / "result.json"
        if arguments.smoke:
            folder = tiny.make(TinyModelConfig(hidden=64, layers=2), Path(scratch) / "model", seed=0)
        elif not (folder / "config.json").is_file():
            sys.exit(f"{folder} has no model; run: rollart models smollm2 {folder}")
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in arguments.only}
        for seed in range(seeds):
            for name in arguments.only:
                given = (folder, name, seed, steps, arguments.batch, arguments.threads, result)
                on_processes(1, _learn, *given, deadline_s=DEADLINE_S)
                rows[name].append(json.loads(result.read_text()))
                print(f"seed {seed}, {name}: {rows[name][-1]}", file=sys.stderr, flush=True)
    settings = {name: summary(each) for name, each in rows.items()}
    gaps = {name: round(gap(each, rows[BASELINE]), 2) for name, each in rows.items() if BASELINE in rows}
    print(json.dumps({"worst_gap": max(gaps.values(), default=0.0), "gaps": gaps, "settings": settings}))


if __name__ == "__main__":
    main()
