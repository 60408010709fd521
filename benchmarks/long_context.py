"""The longest context that one rank trains under a memory limit, and what two context-parallel ranks train under it.

Each trial starts processes, limits their memory (RLIMIT_DATA, beyond what they had when a tiny model was trained once
and the ranks had met), loads the model, and makes two updates: a short one, which gives Adam its moments, and one of
two passes, each over a sequence of the given length whose tokens are all trained. A trial fails when an allocation
does. The longest context of one rank is found by bisection, to a twelfth; two ranks then train four times that and what
is a little longer, with the same settings and the same limit for each.

Two ranks have half of the tokens each, which alone would give twice the context. The rest is FSDP: it shards weights,
gradients and optimizer over context-parallel ranks as well. If they take a share s of the limit on one rank, the
ratio is about 2 (1 - s/2) / (1 - s): 2 for a small model, 4 for s = 2/3. `--share` sets s. Settings that save memory
(`--set recompute=full`, the default here, `dtype=bfloat16`, `optimizer=adamw_8bit`) hold for both sides.

`context_ratio` is the longest context that two ranks trained, of those that were tried, over the longest of one.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # read by the processes that the forkserver starts

import torch
import yaml

from benchmarks.memory import status
from benchmarks.parallel import on_processes
from rollart.config import TrainingConfig
from rollart.core.column import Column
from rollart.hardware.layout import Layout
from rollart.hardware.training_memory import Decoder, TrainingSetup, training_memory
from rollart.training.learner import Learn, Learner, MiniBatch
from rollart.training.microbatch import TrainSample
from rollart.training.ranks import RankAddress, Ranks

VOCABULARY = 512
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 384,
    "intermediate_size": 1152,
    "num_hidden_layers": 16,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": True,
    "max_position_embeddings": 1 << 20,
}
SMOKE = MODEL | {"hidden_size": 192, "intermediate_size": 576, "num_attention_heads": 4, "head_dim": 48}
GRAIN = 64  # tokens


def make_model(folder: Path, sizes: dict[str, Any]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes)).save_pretrained(folder)


def update(learner: Learner, tokens: int) -> float:
    """On two passes: gradients of the first are there in the second, as in any batch of several sequences."""
    draw = torch.Generator().manual_seed(1)
    sample = TrainSample(
        tokens=Column.ints(torch.randint(0, VOCABULARY, (tokens,), generator=draw).tolist()),
        mask=Column.flags([0] + [1] * (tokens - 1)),
        behaviour=Column.floats([-6.0] * (tokens - 1)),
        cells=Column.ints([0] * (tokens - 1)),
        advantage=Column.floats([1.0] * (tokens - 1)),
        weight=1 / tokens,
    )
    totals = learner.learn(Learn(step=0, mini_batches=[MiniBatch([[sample], [sample]], evidence=1.0)], cells=1))
    return totals.values()["grad_norm"]


def _rank(folder: Path, settings: dict[str, Any], limit: float, tokens: int, place: RankAddress) -> None:
    update(Learner(folder / "tiny", TrainingConfig(), Ranks.single()), 8)  # what is loaded late does not count
    layout = Layout(context=place.ranks)
    ranks = Ranks.join(place, layout=layout, patience=600.0)
    most = status("VmData") + int(limit)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    config = TrainingConfig.model_validate({**settings, "parallel": {"context": layout.context}})
    before, outcome = status("VmData"), dict[str, Any]()
    try:
        learner = Learner(folder / "model", config, ranks)
        outcome["loaded_mb"] = (status("VmData") - before) // 1_000_000
        update(learner, 16)
        outcome["held_mb"] = (status("VmData") - before) // 1_000_000
        outcome["norm"] = update(learner, tokens)
    except (RuntimeError, MemoryError) as error:
        outcome["fault"] = str(error).splitlines()[0][-120:] or type(error).__name__
    (folder / f"outcome-{place.rank}.json").write_text(json.dumps(outcome))
    os._exit(0)  # what is left of a failed collective would wait for the other rank


def trains(folder: Path, settings: dict[str, Any], limit: float, ranks: int, tokens: int) -> bool:
    for old in folder.glob("outcome-*"):
        old.unlink()
    on_processes(ranks, _rank, folder, settings, limit, tokens)
    outcomes = [json.loads(path.read_text()) for path in folder.glob("outcome-*")]
    fits = len(outcomes) == ranks and all("norm" in one for one in outcomes)
    print(f"{ranks} rank{'s'[: ranks - 1]}, {tokens} tokens: {outcomes}", file=sys.stderr, flush=True)
    faults = [one["fault"] for one in outcomes if "fault" in one]
    if not fits and not any("memory" in fault or "alloc" in fault or "Memory" in fault for fault in faults):
        raise SystemExit(f"a trial failed for another reason than memory: {faults or outcomes}")
    return fits


def longest(fits: Any, low: int, high: int) -> int:
    """The largest multiple of GRAIN for which `fits`, between one that does and one that may not; 0 if none does."""
    if not fits(low):
        return longest(fits, low // 2, low) if low >= 2 * GRAIN else 0
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(GRAIN, low // 12):
        middle = (low + high) // 2 // GRAIN * GRAIN
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def predicted(sizes: dict[str, Any], config: TrainingConfig, ranks: int, limit: float) -> int:
    """By the memory model: the longest context whose training takes less than the limit."""
    tokens = GRAIN
    while tokens < 1 << 20:
        setup = TrainingSetup(
            layout=Layout(context=ranks),
            dtype=config.dtype,
            recompute=config.recompute,
            optimizer=config.optimizer,
            pack_tokens=tokens + GRAIN,
            gloo=True,
        )
        if training_memory(sizes, setup).total > limit:
            return tokens
        tokens += GRAIN
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.85, help="of the limit that weights and optimizer take on one")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="key=value of `training`")
    parser.add_argument("--smoke", action="store_true", help="a smaller model, and no bisection")
    arguments = parser.parse_args()
    # Inherited by the programs that this one starts: the stack of a thread counts whole, used or not.
    resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    sizes = SMOKE if arguments.smoke else MODEL
    settings = {"recompute": "full"} | {
        key: yaml.safe_load(value) for key, _, value in (one.partition("=") for one in arguments.settings)
    }
    config = TrainingConfig.model_validate(settings)
    held = training_memory(sizes, TrainingSetup(optimizer=config.optimizer, dtype=config.dtype, pack_tokens=1))
    limit = (held.parameters + held.gradients + held.optimizer) / arguments.share
    expected = [predicted(sizes, config, ranks, limit) for ranks in (1, 2)]
    print(f"limit {limit / 1e6:.0f} MB, predicted contexts {expected}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_model(folder / "tiny", SMOKE | {"num_hidden_layers": 1})
        make_model(folder / "model", sizes)
        one = cache(lambda tokens: trains(folder, settings, limit, 1, tokens))
        two = cache(lambda tokens: trains(folder, settings, limit, 2, tokens))
        if arguments.smoke:
            alone, together = expected[0] // 2, expected[0]
            if not (one(alone) and two(together)):
                raise SystemExit("half of the predicted context does not fit")
        else:
            guess = expected[0] * 3 // 4 // GRAIN * GRAIN
            alone = longest(one, guess, guess * 7 // 4 // GRAIN * GRAIN)
            if not alone:
                raise SystemExit(f"one rank trains nothing under {limit / 1e6:.0f} MB")
            tried = takewhile(two, (alone * quarters // 4 for quarters in (16, 18, 20)))
            together = max(tried, default=0) or longest(two, 2 * alone, 4 * alone)
    print(
        json.dumps(
            {
                "context_ratio": round(together / alone, 2),
                "context_one_rank": alone,
                "context_two_ranks": together,
                "predicted": expected,
                "limit_mb": round(limit / 1e6),
                "state_share": arguments.share,
                "parameters_million": round(Decoder.of(sizes).parameters / 1e6, 1),
                "settings": settings,
            }
        )
    )


if __name__ == "__main__":
    main()
