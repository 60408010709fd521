"""A training step against a plain padded one and against TRL's, on the same batch, in the same run.

    make trl && python benchmarks/trainer.py

The sides take turns, and medians of their CPU time are compared (a process that waits for a busy machine uses none);
the wall time is printed too. All three compute the same loss of the same tokens in float32: the norms of their first
gradients must agree. TRL runs in an environment of its own; without it, `vs_trl` is null.

Three batches. `quickstart`, the headline, is one of `examples/quickstart.yaml`: its model, and episodes of its three
tasks as their players play them. `agents` has the long tail of the RollArt paper: eight families of tasks whose mean
number of turns goes from 1 to 47, and a vocabulary whose head takes a fifth of the matrix products, as in models below
a billion parameters. `uniform` has lengths between 30 and 400, so that plain padding costs 1.8 and no more.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from benchmarks.fresh_process import Work, measure
from rollart import load_run
from rollart.config import TrainingConfig
from rollart.core.column import Column
from rollart.core.types import Batch, Sample, SampleGroup
from rollart.hardware.training_memory import Decoder
from rollart.models.chat import ChatRenderer
from rollart.training.advantages import ADVANTAGES
from rollart.training.score import score
from rollart.training.trainer import Trainer
from rollart.warmup.prepare import demonstration_tokens, prepare_model

ROOT = Path(__file__).parents[1]
GROUP = 8
ALGORITHM: dict[str, list[str]] = {"correction": []}  # as the other sides: no weight for stale tokens


Groups = tuple[SampleGroup, ...]


def sample(draw: random.Random, tokens: Sequence[int], mask: Sequence[int]) -> Sample:
    return Sample(
        id=str(draw.random()),
        task="bench",
        tokens=Column.ints(tokens),
        roles=Column.flags(mask),
        logprobs=Column.floats([-4.6] * sum(mask)),
        versions=Column.ints([0] * sum(mask)),
        reward=draw.random(),
    )


def grouped(samples: Sequence[Sample]) -> Groups:
    starts = range(0, len(samples), GROUP)
    return tuple(SampleGroup(str(at), "bench", tuple(samples[at : at + GROUP])) for at in starts)


def made_up(vocabulary: int, lengths: Sequence[int], turn: int, draw: random.Random) -> Groups:
    """Random tokens; of each turn the last two sevenths are generated."""
    observed = turn - 2 * turn // 7
    masks = [[int(at % turn >= observed) for at in range(length)] for length in lengths]
    return grouped([sample(draw, [draw.randrange(vocabulary) for _ in mask], mask) for mask in masks])


def quickstart(folder: Path, sequences: int) -> Groups:
    run, draw = load_run(ROOT / "examples/quickstart.yaml"), random.Random(0)
    prepare_model(run, folder)
    each = -(-sequences // (GROUP * len(run.tasks))) * GROUP
    played = list(demonstration_tokens(run, each, ChatRenderer(folder), lambda news: None))
    samples = [sample(draw, tokens, mask) for tokens, mask in played]
    by_task = [grouped(samples[at : at + each]) for at in range(0, len(samples), each)]
    return tuple(group for turn in zip(*by_task, strict=True) for group in turn)[: sequences // GROUP]


TURNS = (1.0, 1.0, 2.7, 5.8, 23, 33, 39, 47)  # on average, by family of tasks
MOST_TURNS, TURN = 96, 12


def agents(folder: Path, sequences: int) -> Groups:
    make_model(folder, 2048)
    draw = random.Random(0)
    families = [TURNS[(3 + 5 * number) % len(TURNS)] for number in range(sequences // GROUP)]  # few differ too
    draw.shuffle(families)
    turns = [1 + int(draw.expovariate(1 / mean)) if mean > 1 else 1 for mean in families for _ in range(GROUP)]
    return made_up(2048, [20 + TURN * min(MOST_TURNS, one) for one in turns], TURN, draw)


def uniform(folder: Path, sequences: int) -> Groups:
    make_model(folder, 100)
    draw = random.Random(0)
    return made_up(100, [draw.randint(30, 400) for _ in range(sequences)], 28, draw)


# Each makes a model in a folder, and a batch for it of the given number of sequences
WORKLOADS = {"quickstart": (quickstart, 144), "agents": (agents, 64), "uniform": (uniform, 128)}


def make_model(folder: Path, vocabulary: int) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
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


def advantages_of(groups: Groups) -> list[float]:
    rewards = [list(group.rewards.values()) for group in groups]
    return [value for row in ADVANTAGES.find("grpo")(rewards) for value in row]


class RollartStep:
    def __init__(self, folder: Path, groups: Groups, config: TrainingConfig) -> None:
        self._trainer, self._groups = Trainer(folder, config), groups

    def __call__(self) -> Took:
        return timed(self._step)

    def _step(self) -> float:
        return self._trainer.step(Batch(self._trainer.version, self._groups)).values["grad_norm"]


class PlainStep:
    """What one writes first: pad to the longest in the micro-batch, mask, take the logits of every position."""

    def __init__(self, folder: Path, groups: Groups, rows: int) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._samples, self._rows = [sample for group in groups for sample in group.samples], rows
        self._advantages = advantages_of(groups)

    def __call__(self) -> Took:
        return timed(self._step)

    def _step(self) -> float:
        total = sum(sample.actions for sample in self._samples)
        for start in range(0, len(self._samples), self._rows):
            part = self._samples[start : start + self._rows]
            lengths = [len(sample.tokens) for sample in part]
            tokens = pad_sequence([torch.tensor(sample.tokens.array).long() for sample in part], batch_first=True)
            seen = pad_sequence([torch.ones(length, dtype=torch.long) for length in lengths], batch_first=True)
            mask = pad_sequence([torch.tensor(sample.mask) for sample in part], batch_first=True)[:, 1:]
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

    def __init__(self, python: Path, folder: Path, groups: Groups, rows: int, threads: int) -> None:
        samples = [sample for group in groups for sample in group.samples]
        given = [
            {"tokens": sample.tokens.array.tolist(), "mask": sample.mask.astype(int).tolist(), "advantage": advantage}
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


def step_flops(folder: Path, groups: Groups) -> float:
    """Of the useful work: matrix products of every token, attention below the diagonal, the head for generated tokens;
    the backward pass counts twice."""
    model = Decoder.of(json.loads((folder / "config.json").read_text()))
    samples = [sample for group in groups for sample in group.samples]
    tokens, actions = sum(len(s.tokens) for s in samples), sum(s.actions for s in samples)
    pairs = sum(len(s.tokens) ** 2 for s in samples) / 2
    layers = 2 * model.matrices * tokens + 4 * model.query * pairs
    return 3 * (model.layers * layers + 2 * model.table * actions)


def matmul_flops_per_s() -> float:
    """Per second of CPU time, the best of several large products."""
    size = 2048
    left, right = torch.randn(size, size), torch.randn(size, size)
    times = [timed(lambda: float((left @ right)[0, 0])).cpu for _ in range(5)]
    return 2 * size**3 / min(times)


def compare(name: str, *, fraction: float, rounds: int, rows: int, config: TrainingConfig, trl: Path | None) -> Any:
    threads, (make, sequences) = config.thread_count, WORKLOADS[name]
    took: dict[str, list[Took]] = {side: [] for side in ("rollart", "padded", *(["trl"] if trl else []))}
    peaks = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        groups = make(folder, int(fraction * sequences))
        flops = step_flops(folder, groups)
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
    lengths = [len(sample.tokens) for group in groups for sample in group.samples]
    tokens = sum(lengths)
    slots = sum(rows * max(lengths[at : at + rows]) for at in range(0, len(lengths), rows))
    norms = {side: steps[0].norm for side, steps in took.items()}
    if max(norms.values()) > 1.01 * min(norms.values()):
        raise SystemExit(f"the sides compute different gradients: norms {norms}")
    cpu = {side: statistics.median(one.cpu for one in steps[1:]) for side, steps in took.items()}
    wall = {side: statistics.median(one.wall for one in steps[1:]) for side, steps in took.items()}
    return {
        "packed_vs_padded": round(cpu["padded"] / cpu["rollart"], 2),
        "vs_trl": round(cpu["trl"] / cpu["rollart"], 2) if trl else None,
        "tokens": tokens,
        "slots_per_token_padded": round(slots / tokens, 2),
        "tokens_per_cpu_s": {side: round(tokens / value) for side, value in cpu.items()},
        "wall_s": {side: round(value, 2) for side, value in wall.items()},
        "gradient_norms": norms,
        "roofline_share": round(flops / cpu["rollart"] / max(peaks), 3),
        "matmul_gflops": round(max(peaks) / 1e9, 1),
    }


def _former_scores(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The scorer before: chunks of logits, computed again in the backward pass by activation checkpointing."""

    def part(hidden: Tensor, targets: Tensor) -> Tensor:
        logprobs = functional.linear(hidden, weight).log_softmax(-1)
        with torch.no_grad():
            (logprobs.exp() * logprobs).sum(-1)  # the entropy, which is reported
        return -functional.nll_loss(logprobs, targets, reduction="none")

    size = max(1, (1 << 25) // len(weight))
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
    groups = made_up(2048, [512] * max(GROUP, tokens // 512), 28, random.Random(0))
    config = TrainingConfig.model_validate({"pack_tokens": tokens, **settings})
    return RollartStep(Path(folder), groups, config)


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
    rounds: int = 3,
    threads: int = 1,
    pack_tokens: int = 2048,
    rows: int = 16,
    trl_python: Annotated[Path | None, typer.Option(envvar="ROLLART_TRL_PYTHON", help="a Python with TRL")] = None,
    smoke: bool = False,
) -> None:
    if smoke:  # tiny sizes, to check that it runs
        rounds, rows = 1, 8
    torch.set_num_threads(threads)
    config = TrainingConfig.model_validate({"threads": threads, "pack_tokens": pack_tokens, "algorithm": ALGORITHM})
    one = partial(
        compare, fraction=0.25 if smoke else 1.0, rounds=rounds, rows=rows, config=config, trl=find_trl(trl_python)
    )
    results = {}
    for name in WORKLOADS:
        results[name] = one(name)
        print(f"{name}: {json.dumps(results[name])}", file=sys.stderr, flush=True)
    headline = results["quickstart"]
    print(
        json.dumps(
            {
                **{name: headline[name] for name in ("packed_vs_padded", "vs_trl", "roofline_share")},
                **memory(threads, smoke),
                "batches": results,
                "pack_tokens": pack_tokens,
                "rows": rows,
                "threads": threads,
            }
        )
    )


if __name__ == "__main__":
    typer.run(main)
