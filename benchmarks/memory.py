"""Predicted memory of a trainer rank against the measured peak of real processes.

Each case makes a model with random weights, starts its ranks with gloo, and trains two passes with the trainer's own
step, once Adam has its moments. The measured peak is that of anonymous memory (`VmHWM` without file-backed pages), less
what the process had when it was ready: imports done and a tiny model trained once. The allocator maps each tensor by
itself (`MALLOC_MMAP_THRESHOLD_`), so what is freed leaves the process at once, as the peak of a device's allocator
would show. Pages of the weight files are not counted, as they are the page cache's; a reference, or weights that LoRA
does not train, would stay such pages, since nothing writes to them, so they are written once. In bfloat16 the matrix
library keeps a kernel of 0.58 MB for each shape of a product, which the prediction has; what remains besides tensors
are buffers of gloo and Python's objects, some megabytes, which it does not have. Nothing is fitted per case.

`worst_error` is the largest |predicted / measured - 1|, at most 0.15.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # read by the processes that the forkserver starts

import torch

from benchmarks.parallel import on_processes
from rollart.config import TrainingConfig
from rollart.core.column import Column
from rollart.hardware.layout import SINGLE, Layout
from rollart.hardware.training_memory import Decoder, TrainingSetup, training_memory
from rollart.training.learner import Learn, Learner, MiniBatch
from rollart.training.microbatch import TrainSample
from rollart.training.policy import PolicyModel
from rollart.training.ranks import RankAddress, Ranks
from rollart.training.shards import block

DEADLINE_S = 600.0
LENGTH = 64  # tokens of a sequence, about: they differ, so that attention needs its grid
PASSES = 2

_SIZES = {"vocab_size": 16384, "head_dim": 64, "max_position_embeddings": 4096}
_SMALL = _SIZES | {
    "hidden_size": 384,
    "intermediate_size": 1152,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
_LARGE = _SIZES | {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "num_hidden_layers": 4}
MODELS: dict[str, dict[str, Any]] = {
    "small": {"model_type": "qwen3", **_SMALL, "tie_word_embeddings": True},
    "large": {"model_type": "qwen3", **_LARGE, "tie_word_embeddings": False},
    "moe": {"model_type": "qwen3_moe", **_SMALL, **_EXPERTS, "tie_word_embeddings": False},
    "deep": {"model_type": "qwen3", **_LARGE, "vocab_size": 512, "tie_word_embeddings": True},
    "tiny": {"model_type": "qwen3", **_SMALL, "hidden_size": 64, "vocab_size": 64, "tie_word_embeddings": True},
}


@dataclass(frozen=True)
class Case:
    """A model, a layout and settings of `training`."""

    model: str
    layout: Layout = SINGLE
    tokens: int = 512
    reference: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        extra = [f"{key} {value}" for key, value in self.settings.items()] + ["reference"] * self.reference
        return ", ".join([f"{self.model}: {self.layout}", f"{self.tokens} tokens", *extra])

    def config(self) -> TrainingConfig:
        parallel = {name: getattr(self.layout, name) for name in ("context", "tensor", "expert")}
        algorithm = {"kl": 0.1 if self.reference else 0.0}
        values = {"parallel": parallel, "pack_tokens": self.tokens, "algorithm": algorithm, **self.settings}
        return TrainingConfig.model_validate(values)

    def predicted(self) -> dict[str, float]:
        config = self.config()
        setup = TrainingSetup(
            layout=self.layout,
            dtype=config.dtype,
            recompute=config.recompute,
            optimizer=config.optimizer,
            pack_tokens=self.tokens,
            reference=self.reference,
            adapters=Decoder.of(MODELS[self.model]).adapters(config.lora.rank) if config.lora else 0,
            gloo=True,
            pass_sizes=2,  # the step that makes Adam's moments, and the measured one
        )
        memory = training_memory(MODELS[self.model], setup)
        return {**asdict(memory), "total": memory.total}


BF16, FULL, SELECTIVE = {"dtype": "bfloat16"}, {"recompute": "full"}, {"recompute": "selective"}
LORA = {"lora": {"rank": 16}}
CASES = [
    Case("small"),
    Case("small", tokens=1024),
    Case("small", tokens=1024, settings=SELECTIVE),
    Case("small", tokens=1024, settings=FULL),
    Case("small", tokens=128, settings=BF16),
    Case("small", reference=True),
    Case("deep", tokens=1024, settings=FULL),
    Case("deep", Layout(data=2), tokens=1024, settings=FULL),
    Case("large", Layout(data=2)),
    Case("large", Layout(data=2), tokens=128, settings=BF16 | SELECTIVE),
    Case("large", Layout(data=2), reference=True, settings=FULL),
    Case("large", Layout(context=2), tokens=1024),
    Case("large", Layout(tensor=2)),
    Case("large", Layout(data=2), tokens=256, settings={"optimizer": "adamw_8bit"}),
    Case("small", Layout(tensor=2), tokens=128, settings=BF16),
    Case("moe", Layout(data=2, expert=2)),
    Case("moe", Layout(data=2), settings=FULL),
    Case("large", Layout(data=4)),
    Case("large", Layout(data=2, context=2), tokens=256, reference=True, settings=BF16 | FULL),
    Case("large", Layout(data=2, tensor=2)),
    Case("moe", Layout(data=2, context=2, expert=4)),
    Case("small", settings=LORA),
    Case("large", Layout(data=2), reference=True, settings=LORA | FULL),
    Case("large", Layout(context=2), tokens=2048, settings=LORA | BF16),
    Case("large", Layout(data=2, context=2), tokens=256, settings=LORA | BF16),
    Case("moe", Layout(data=2), settings=LORA),
]
SMOKE = [Case("small", tokens=256), Case("small", Layout(data=2), tokens=256, settings=FULL)]


def make_model(folder: Path, name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[name])).save_pretrained(folder / name)


def samples(vocabulary: int, tokens: int) -> list[TrainSample]:
    """One pass of `tokens` slots; sequences of nearly one length, all of whose tokens but the first are trained."""
    draw = torch.Generator().manual_seed(1)

    def sequences() -> Iterator[TrainSample]:
        for row in range(max(1, tokens // LENGTH)):
            size = min(LENGTH, tokens) - row % 4
            yield TrainSample(
                tokens=Column.ints(torch.randint(0, vocabulary, (size,), generator=draw).tolist()),
                mask=Column.flags([0] + [1] * (size - 1)),
                behaviour=Column.floats([-8.0] * (size - 1)),
                cells=Column.ints([0] * (size - 1)),
                advantage=Column.floats([1.0] * (size - 1)),
                weight=1e-4,
            )

    return list(sequences())


def status(key: str) -> int:
    """Bytes, from the kernel's account of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def peak() -> int:
    """Of anonymous memory since the last reset; file-backed pages do not come and go within a step."""
    return status("VmHWM") - status("RssFile")


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def step(learner: Learner, case: Case, tokens: int, passes: int) -> None:
    vocabulary = MODELS[case.model]["vocab_size"]
    batch = MiniBatch([samples(vocabulary, tokens) for _ in range(passes)], evidence=1.0)
    learner.learn(Learn(step=0, mini_batches=[batch], cells=1))


def _rank(case: Case, folder: Path, place: RankAddress) -> None:
    torch.set_num_threads(1)
    warm = Case("tiny")
    step(Learner(folder / "tiny", warm.config(), Ranks.single()), warm, 8, 1)
    ranks = Ranks.join(place, layout=case.layout, patience=DEADLINE_S)
    ready = status("RssAnon")
    reset_peak()
    learner = Learner(folder / case.model, case.config(), ranks)
    loading = peak() - ready
    for model in (learner.policy, learner.reference):
        for parameter in model.model.parameters() if isinstance(model, PolicyModel) else ():
            block(parameter).values.add_(0.0)
    step(learner, case, 8, 1)  # from here on Adam has moments
    held = status("RssAnon") - ready
    reset_peak()
    step(learner, case, case.tokens, PASSES)
    result = {"loading": loading, "held": held, "measured": peak() - ready}
    (folder / f"result-{place.rank}.json").write_text(json.dumps(result))


def on_ranks(case: Case, folder: Path) -> list[dict[str, int]]:
    """What each rank measured. Raises SystemExit if one fails."""
    on_processes(case.layout.ranks, _rank, case, folder)
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(case.layout.ranks)]


def run(case: Case, folder: Path) -> dict[str, Any]:
    ranks, predicted = on_ranks(case, folder), case.predicted()
    measured = max(rank["measured"] for rank in ranks)
    return {
        "case": str(case),
        "predicted_mb": round(predicted["total"] / 1e6, 1),
        "measured_mb": round(measured / 1e6, 1),
        "error": round(predicted["total"] / measured - 1, 4),
        "held_mb": round(max(rank["held"] for rank in ranks) / 1e6, 1),
        "loading_mb": round(max(rank["loading"] for rank in ranks) / 1e6, 1),
        "parts_mb": {name: round(size / 1e6, 1) for name, size in predicted.items() if name != "total"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="two small cases")
    parser.add_argument("--only", default="", help="only cases whose name has this in it")
    arguments = parser.parse_args()
    cases = [case for case in (SMOKE if arguments.smoke else CASES) if arguments.only in str(case)]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name in {"tiny", *(case.model for case in cases)}:
            make_model(folder, name)
        rows = []
        for number, case in enumerate(cases):
            row = run(case, folder)
            rows.append(row)
            print(
                f"{number + 1}/{len(cases)} {row['case']}: {row['predicted_mb']} MB predicted, "
                f"{row['measured_mb']} measured, {row['error']:+.1%}; held {row['held_mb']}, parts {row['parts_mb']}",
                file=sys.stderr,
                flush=True,
            )
    print(json.dumps({"worst_error": max(abs(row["error"]) for row in rows), "cases": rows}))


if __name__ == "__main__":
    main()
