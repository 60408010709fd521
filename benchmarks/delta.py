"""What sending a version as a delta to the one before saves, for real training steps at several learning rates.

    python benchmarks/delta.py

A model is trained with the trainer of a run, on batches whose rewards are a function of their tokens. Between two
steps it counts which numbers changed, and which of their bytes, as published in bfloat16 and in float32; the delta of
each pair is encoded, applied and compared. Speeds are per CPU second of one core. A link is better served with
the delta if it is slower than `pays below`. The last line is one JSON object.
"""

import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from math import log
from pathlib import Path
from statistics import fmean
from typing import Annotated, TypeVar

import numpy as np
import torch
import typer
from rich.console import Console

from rollart.config import TinyModelConfig, TrainingConfig
from rollart.core.column import Column
from rollart.core.types import Batch, Sample, SampleGroup
from rollart.models import tiny
from rollart.observe.draw import table
from rollart.training.trainer import Trainer
from rollart.weights.delta import Codec, break_even, changed_shares, decode, encode, predicted_bytes

T = TypeVar("T")
RATES = "1e-7,1e-6,1e-5,1e-4,1e-3"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
GROUPS, MEMBERS, LENGTH, VOCABULARY = 4, 4, 48, 64
MOMENTUM = 3  # steps before the first pair: the first ones of Adam are larger than the others
REPEATS = 3


@dataclass(frozen=True, slots=True)
class Pair:
    """Between two versions: shares of elements and bytes that changed, the delta as a share of the whole, GB/s."""

    changed: float
    bytes_changed: float
    delta: float
    predicted: float
    encode: float
    decode: float

    @property
    def pays_below(self) -> float:
        """Megabytes a second."""
        whole = 1 << 30
        return break_even(whole, round(self.delta * whole), Codec(self.encode * 1e9, self.decode * 1e9)) / 1e6


def batches() -> Iterator[Batch]:
    """A sample is rewarded with the share of even tokens in it."""
    draw, step = random.Random(0), 0
    while True:
        yield Batch(step, tuple(group(draw, f"{step}-{number}") for number in range(GROUPS)))
        step += 1


def group(draw: random.Random, name: str) -> SampleGroup:
    mask = [0] * 8 + [1] * (LENGTH - 8)
    samples = []
    for member in range(MEMBERS):
        tokens = [draw.randrange(VOCABULARY) for _ in mask]
        reward = fmean(token % 2 == 0 for token in tokens)
        samples.append(
            Sample(
                id=f"{name}-{member}",
                task="even",
                tokens=Column.ints(tokens),
                roles=Column.flags(mask),
                logprobs=Column.floats([-log(VOCABULARY)] * sum(mask)),
                versions=Column.ints([0] * sum(mask)),
                reward=reward,
            )
        )
    return SampleGroup(name, "even", tuple(samples))


def versions(folder: Path, rate: float) -> Iterator[torch.Tensor]:
    """All weights in one row, after each step."""
    trainer = Trainer(folder, TrainingConfig(lr=rate, lr_warmup=0))
    for number, batch in enumerate(batches(), start=1):
        trainer.step(batch)
        if number >= MOMENTUM:
            weights = trainer.gather().values()
            yield torch.cat([weight.detach().reshape(-1) for weight in weights])


def measure(old: torch.Tensor, new: torch.Tensor) -> Pair:
    base, made = (tensor.view(torch.uint8).numpy().data for tensor in (old, new))
    item, size = old.element_size(), old.nbytes
    changed, planes = changed_shares(base, made, item)
    encoding, delta = timed(lambda: encode(base, made, item))
    if delta is None:
        raise SystemExit("a delta is longer than the version: this should not happen between two steps")
    into = np.zeros(size, np.uint8)
    decoding, _ = timed(lambda: decode(delta, base, into.data))
    assert into.data == made
    return Pair(
        changed,
        fmean(planes),
        len(delta) / size,
        predicted_bytes(base, made, item) / size,
        size / encoding / 1e9,
        size / decoding / 1e9,
    )


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """CPU seconds, the best of several, and the result."""
    times = []
    for _ in range(REPEATS):
        began = time.thread_time()
        result = work()
        times.append(time.thread_time() - began)
    return min(times), result


def mean(pairs: Sequence[Pair]) -> Pair:
    return Pair(**{name: fmean(asdict(pair)[name] for pair in pairs) for name in asdict(pairs[0])})


def main(
    model: Annotated[Path | None, typer.Option(help="A Hugging Face folder; absent: a tiny model.")] = None,
    pairs: Annotated[int, typer.Option(help="Pairs of versions for each learning rate.")] = 2,
    rates: Annotated[str, typer.Option(help="Learning rates, with commas.")] = RATES,
    smoke: Annotated[bool, typer.Option("--smoke", help="Tiny sizes, to check that it runs.")] = False,
) -> None:
    if smoke:
        pairs, rates = 1, "1e-5"
    torch.set_num_threads(1)
    shown = table("name", "lr", "changed", "of bytes", "delta", "predicted", "encode", "decode", "pays below")
    results: dict[str, dict[str, dict[str, float]]] = {name: {} for name in DTYPES}
    parameters = 0
    with tempfile.TemporaryDirectory() as place:
        config = TinyModelConfig(hidden=64, layers=1) if smoke else TinyModelConfig(hidden=256, layers=4)
        folder = model or tiny.make(config, Path(place) / "model", seed=0)
        for rate in rates.split(","):
            made = list(islice(versions(folder, float(rate)), pairs + 1))
            parameters = made[0].numel()
            for name, dtype in DTYPES.items():
                pair = mean([measure(old.to(dtype), new.to(dtype)) for old, new in pairwise(made)])
                results[name][rate] = asdict(pair) | {"pays_below_MB_s": pair.pays_below}
                shares = (pair.changed, pair.bytes_changed, pair.delta, pair.predicted)
                speeds = (f"{pair.encode:.2f} GB/s", f"{pair.decode:.2f} GB/s", f"{pair.pays_below:.0f} MB/s")
                shown.add_row(name, rate, *(f"{share:.1%}" for share in shares), *speeds)
    Console(width=110).print(f"{parameters / 1e6:.1f} M parameters, {pairs} pairs of versions a rate\n", shown)
    print(json.dumps({"parameters": parameters, "pairs": pairs, **results}))


if __name__ == "__main__":
    typer.run(main)
