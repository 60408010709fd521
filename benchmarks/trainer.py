"""A training step against a plain padded one and against TRL's, on the same batch, in the same run.

    make trl && python benchmarks/trainer.py

The sides take turns, and medians of their CPU time are compared (a process that waits for a busy machine uses none);
the wall time is printed too. All three compute the same loss of the same tokens in float32: the norms of their first
gradients must agree. TRL runs in an environment of its own; without it, `vs_trl` is null.

Two batches: `agents` has lengths with a long tail, as multi-turn episodes have, and a vocabulary whose head takes a
fifth of the model's matrix products, as in models below a billion parameters. `uniform` has lengths between 30 and 400
and a vocabulary of 100 characters, which leaves little to win beyond the padding. The headline is `agents`.

Then the scorer against its former version (chunks with activation checkpointing), the peak memory of a step with
each way to recompute, and the achieved share of the speed of a large matrix product on the same threads.
The last line is one JSON object.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from benchmarks.fresh_process import Work, measure
from rollart.config import TrainingConfig
from rollart.core.types import Batch, Sample, SampleGroup
from rollart.training.advantages import ADVANTAGES, UNSEEN, group_advantages
from rollart.training.score import LOGITS_AT_ONCE, score
from rollart.training.trainer import Trainer

ROOT = Path(__file__).parents[1]
GROUP = 8
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 128, 384, 4, 4, 2, 32
ALGORITHM = {"importance_cap": None}  # as the other sides: no weight for stale tokens


@dataclass(frozen=True)
class Workload:
    """Sequences of one step, and the vocabulary of the model."""

    vocabulary: int
    longest: int
    length: Callable[[random.Random], float]

    def groups(self, sequences: int) -> tuple[SampleGroup, ...]:
        draw = random.Random(0)
        samples = [self._sample(number, draw) for number in range(sequences)]
        return tuple(
            SampleGroup(str(at), "bench", tuple(samples[at : at + GROUP])) for at in range(0, sequences, GROUP)
        )

    def _sample(self, number: int, draw: random.Random) -> Sample:
        """Turns of 20 observed and 8 generated tokens."""
        length = min(self.longest, max(30, int(self.length(draw))))
        return Sample(
            id=str(number),
            task="bench",
            tokens=[draw.randrange(self.vocabulary) for _ in range(length)],
            mask=[int(position % 28 >= 20) for position in range(length)],
            logprobs=[-4.6] * length,
            versions=[0] * length,
            reward=draw.random(),
        )


WORKLOADS = {
    "agents": Workload(2048, 1000, lambda draw: draw.lognormvariate(5.0, 0.8)),
    "uniform": Workload(100, 400, lambda draw: draw.randint(30, 400)),
}


def make_model(folder: Path, vocabulary: int) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


@dataclass(frozen=True)
class Took:
    cpu: float
    wall: float
    norm: float


def timed(step: Callable[[], float]) -> Took:
    cpu, wall = time.process_time(), time.perf_counter()
    norm = step()
    return Took(time.process_time() - cpu, time.perf_counter() - wall, norm)


def advantages_of(groups: tuple[SampleGroup, ...]) -> list[float]:
    rewards = [list(group.rewards.values()) for group in groups]
    ranges = [UNSEEN.including([value for row in rewards for value in row])] * len(groups)
    scores, _ = group_advantages(ADVANTAGES.find("grpo"), rewards, ranges, 0.0)
    return [value for row in scores for value in row]


class RollartStep:
    def __init__(self, folder: Path, groups: tuple[SampleGroup, ...], config: TrainingConfig) -> None:
        self._trainer, self._groups = Trainer(folder, config), groups

    def __call__(self) -> Took:
        return timed(self._step)

    def _step(self) -> float:
        return self._trainer.step(Batch(self._trainer.version, self._groups)).values["grad_norm"]


class PlainStep:
    """What one writes first: pad to the longest in the micro-batch, mask, take the logits of every position."""

    def __init__(self, folder: Path, groups: tuple[SampleGroup, ...], rows: int) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._samples, self._rows = [sample for group in groups for sample in group.samples], rows
        self._advantages = advantages_of(groups)

    def __call__(self) -> Took:
        return timed(self._step)

    def _step(self) -> float:
        total = sum(sum(sample.mask) for sample in self._samples)
        for start in range(0, len(self._samples), self._rows):
            part = self._samples[start : start + self._rows]
            width = max(len(sample.tokens) for sample in part)
            tokens = torch.tensor([sample.tokens + [0] * (width - len(sample.tokens)) for sample in part])
            seen = torch.tensor([[1] * len(sample.tokens) + [0] * (width - len(sample.tokens)) for sample in part])
            mask = torch.tensor([sample.mask + [0] * (width - len(sample.mask)) for sample in part])[:, 1:]
            logits = self._model(input_ids=tokens, attention_mask=seen).logits[:, :-1]
            logprobs = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
            advantage = torch.tensor(self._advantages[start : start + self._rows])[:, None]
            ratio = (logprobs - logprobs.detach()).exp()
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            torch.autograd.backward((loss * mask).sum() / total)
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(norm)


class TrlStep:
    """TRL's step in its own process: `trl_step.py`."""

    def __init__(self, python: Path, folder: Path, groups: tuple[SampleGroup, ...], rows: int, threads: int) -> None:
        samples = [sample for group in groups for sample in group.samples]
        given = [
            {"tokens": sample.tokens, "mask": sample.mask, "advantage": advantage}
            for sample, advantage in zip(samples, advantages_of(groups), strict=True)
        ]
        (folder / "batch.json").write_text(json.dumps(given))
        call = f"serve({str(folder)!r}, {str(folder / 'batch.json')!r}, {rows}, {threads})"
        self._log = (folder / "trl.log").open("w+")
        self._process = subprocess.Popen(
            [python, "-c", f"from benchmarks.trl_step import serve; {call}"],
            cwd=ROOT,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def __call__(self) -> Took:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise SystemExit(f"TRL failed: {self._log.read()[-3000:]}")
        reply = json.loads(line)
        return Took(reply["cpu"], reply["wall"], reply["norm"])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def step_flops(groups: tuple[SampleGroup, ...], vocabulary: int) -> float:
    """Of the useful work: matrix products of every token, attention below the diagonal, the head for generated tokens;
    the backward pass counts twice."""
    width = HEADS * HEAD_DIM
    layer = HIDDEN * (2 * width + 2 * KV_HEADS * HEAD_DIM + 3 * INTERMEDIATE)
    samples = [sample for group in groups for sample in group.samples]
    tokens, actions = sum(len(s.tokens) for s in samples), sum(sum(s.mask) for s in samples)
    pairs = sum(len(s.tokens) ** 2 for s in samples) / 2
    return 3 * (2 * LAYERS * layer * tokens + 4 * LAYERS * width * pairs + 2 * HIDDEN * vocabulary * actions)


def matmul_flops_per_s() -> float:
    """Per second of CPU time, the best of several large products."""
    size = 2048
    left, right = torch.randn(size, size), torch.randn(size, size)
    times = [timed(lambda: float((left @ right)[0, 0])).cpu for _ in range(5)]
    return 2 * size**3 / min(times)


def compare(name: str, *, sequences: int, rounds: int, rows: int, config: TrainingConfig, trl: Path | None) -> Any:
    workload, threads = WORKLOADS[name], config.threads
    groups = workload.groups(sequences)
    tokens = sum(len(sample.tokens) for group in groups for sample in group.samples)
    took: dict[str, list[Took]] = {side: [] for side in ("rollart", "padded", *(["trl"] if trl else []))}
    peaks = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_model(folder, workload.vocabulary)
        sides: dict[str, Callable[[], Took]] = {
            "rollart": RollartStep(folder, groups, config),
            "padded": PlainStep(folder, groups, rows),
        }
        other = TrlStep(trl, folder, groups, rows, threads) if trl else None
        if other:
            sides["trl"] = other
        for number in range(rounds + 1):
            for side, step in sides.items():
                took[side].append(step())
            peaks.append(matmul_flops_per_s())
            seconds = {side: round(steps[-1].cpu, 2) for side, steps in took.items()}
            print(f"{name}, round {number}: {seconds}", file=sys.stderr, flush=True)
        if other:
            other.close()
    norms = {side: steps[0].norm for side, steps in took.items()}
    if max(norms.values()) > 1.01 * min(norms.values()):
        raise SystemExit(f"the sides compute different gradients: norms {norms}")
    cpu = {side: statistics.median(one.cpu for one in steps[1:]) for side, steps in took.items()}
    wall = {side: statistics.median(one.wall for one in steps[1:]) for side, steps in took.items()}
    return {
        "packed_vs_padded": round(cpu["padded"] / cpu["rollart"], 2),
        "vs_trl": round(cpu["trl"] / cpu["rollart"], 2) if trl else None,
        "tokens": tokens,
        "tokens_per_cpu_s": {side: round(tokens / value) for side, value in cpu.items()},
        "wall_s": {side: round(value, 2) for side, value in wall.items()},
        "gradient_norms": norms,
        "roofline_share": round(step_flops(groups, workload.vocabulary) / cpu["rollart"] / max(peaks), 3),
        "matmul_gflops": round(max(peaks) / 1e9, 1),
    }


def _former_scores(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The scorer before: chunks of logits, computed again in the backward pass by activation checkpointing."""

    def part(hidden: Tensor, targets: Tensor) -> Tensor:
        logprobs = functional.linear(hidden, weight).log_softmax(-1)
        with torch.no_grad():
            (logprobs.exp() * logprobs).sum(-1)  # the entropy, which is reported
        return -functional.nll_loss(logprobs, targets, reduction="none")

    size = max(1, LOGITS_AT_ONCE // len(weight))
    starts = range(0, len(hidden), size)
    parts = [checkpoint(part, hidden[at : at + size], targets[at : at + size], use_reentrant=False) for at in starts]
    return torch.cat(parts)


def prepare_scorer(former: bool, rows: int, vocabulary: int, threads: int) -> Work:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    hidden = torch.randn(rows, 256, requires_grad=True)
    weight = torch.randn(vocabulary, 256).mul_(0.05).requires_grad_()
    targets = torch.randint(vocabulary, (rows,))

    def work() -> None:
        logprobs = _former_scores(hidden, weight, targets) if former else score(hidden, weight, targets)[0]
        torch.autograd.backward(logprobs.mean())
        hidden.grad = weight.grad = None

    return work


def prepare_step(folder: str, tokens: int, settings: dict[str, Any]) -> Work:
    """One pass over sequences of 512 tokens."""
    workload = Workload(2048, 512, lambda draw: 512)
    config = TrainingConfig.model_validate({"pack_tokens": tokens, **settings})
    return RollartStep(Path(folder), workload.groups(max(GROUP, tokens // 512)), config)


def memory(threads: int, smoke: bool) -> dict[str, Any]:
    rows, vocabulary, repeats = (256, 4096, 1) if smoke else (4096, 16384, 3)
    former, now = (measure(prepare_scorer, old, rows, vocabulary, threads, repeats=repeats) for old in (True, False))
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), 2048)
        modes = {
            mode: measure(prepare_step, folder, 8192, {"recompute": mode, "threads": threads}, repeats=1)
            for mode in (("none", "full") if smoke else ("none", "selective", "full"))
        }
    return {
        "scorer": {
            "time_vs_former": round(former.cpu_s / now.cpu_s, 2),
            "memory_vs_former": round(former.peak_mb / now.peak_mb, 2),
            "cpu_s": [round(former.cpu_s, 2), round(now.cpu_s, 2)],
            "peak_mb": [round(former.peak_mb), round(now.peak_mb)],
        },
        "recompute_peak_mb": {mode: round(cost.peak_mb) for mode, cost in modes.items()},
        "recompute_cpu_s": {mode: round(cost.cpu_s, 2) for mode, cost in modes.items()},
    }


def find_trl(python: Path | None) -> Path | None:
    python = python or ROOT / ".venv-trl/bin/python"
    if not python.exists():
        print(f"no TRL at {python}: `make trl` installs it", file=sys.stderr)
        return None
    return python


def main(
    sequences: int = 128,
    rounds: int = 5,
    threads: int = 1,
    pack_tokens: int = 2048,
    rows: int = 16,
    trl_python: Annotated[Path | None, typer.Option(envvar="ROLLART_TRL_PYTHON", help="a Python with TRL")] = None,
    smoke: bool = False,
) -> None:
    if smoke:  # tiny sizes, to check that it runs
        sequences, rounds, rows = 16, 1, 8
    torch.set_num_threads(threads)
    config = TrainingConfig.model_validate({"threads": threads, "pack_tokens": pack_tokens, "algorithm": ALGORITHM})
    one = partial(compare, sequences=sequences, rounds=rounds, rows=rows, config=config, trl=find_trl(trl_python))
    results = {}
    for name in WORKLOADS:
        results[name] = one(name)
        print(f"{name}: {json.dumps(results[name])}", file=sys.stderr, flush=True)
    headline = results["agents"]
    print(
        json.dumps(
            {
                **{name: headline[name] for name in ("packed_vs_padded", "vs_trl", "roofline_share")},
                **memory(threads, smoke),
                "batches": results,
                "sequences": sequences,
                "pack_tokens": pack_tokens,
                "rows": rows,
                "threads": threads,
            }
        )
    )


if __name__ == "__main__":
    typer.run(main)
