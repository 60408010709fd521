"""The embedded engine against transformers `generate`: same model, same requests, same threads, interleaved.

`python benchmarks/engine.py` prints what it measures and, on its last line, one JSON object. Ratios are of CPU time
of one thread, best of the rounds on both sides. Both sides sample the same number of tokens for each request;
transformers ends each row of its left-padded batch at that number, makes no logprobs, and its best batch size counts.
`decode_vs_hf_sorted` is against a transformers that knew the output lengths beforehand and sorted by them, which is not
possible: it shows how much of the gain is from not waiting for the longest of a batch.

`fixed` has batches of 1, 16 and 128 requests of one length on three models (the quickstart's, 14M, SmolLM2-135M):
against vLLM on CPU (`make vllm`; compiled unless --vllm-eager), against transformers' continuous batching, and the
share of the roofline, from the speed of a matrix product and of memory in the same run. `vs_vllm_cpu` is the worst.
"""

import argparse
import asyncio
import copy
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.utils import logging

from benchmarks.fixed_batches import Vllm, fixed_batches
from benchmarks.scratch import scratch_folder
from rollart.config import EngineConfig
from rollart.config.hardware import VllmConfig
from rollart.core.types import GenerationRequest, Sampling
from rollart.engines.torch import stepper
from rollart.engines.torch.engine import TorchEngine
from rollart.engines.torch.model import EngineModel
from rollart.engines.torch.stepper import Stepper
from rollart.models import smollm2

Answers = list[tuple[list[int], list[int], list[float]]]


def small() -> Qwen3Config:
    return _config(hidden=128, inner=384, layers=4, heads=4, kv_heads=2, head_dim=32, vocabulary=100)


def medium() -> Qwen3Config:
    return _config(hidden=384, inner=1536, layers=6, heads=6, kv_heads=2, head_dim=64, vocabulary=4096)


def tiny() -> Qwen3Config:
    """The quickstart's."""
    return _config(hidden=96, inner=288, layers=3, heads=3, kv_heads=1, head_dim=32, vocabulary=103)


def _config(
    *, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int, vocabulary: int
) -> Qwen3Config:
    return Qwen3Config(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocabulary,
        max_position_embeddings=2048,
        initializer_range=0.15,  # sharp enough that wrong KV would show in the logprobs
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
    )


@dataclass
class Pair:
    """The same weights twice: for the engine, which changes the model's attention, and for transformers."""

    model: EngineModel
    plain: Any
    vocabulary: int
    parameters: int

    @classmethod
    def make(cls, config: Qwen3Config) -> "Pair":
        torch.manual_seed(0)
        plain = Qwen3ForCausalLM(config).eval()
        model = EngineModel(copy.deepcopy(plain))
        return cls(model, plain, config.vocab_size, sum(weight.numel() for weight in plain.parameters()))


@dataclass(frozen=True)
class Ask:
    prompt: list[int]
    count: int


class Counted(StoppingCriteria):  # type: ignore[misc]
    """Ends each row of a batch at its own number of tokens."""

    def __init__(self, start: int, counts: list[int]) -> None:
        self._ends = torch.tensor([start + count for count in counts])

    def __call__(self, input_ids: torch.Tensor, scores: Any, **extra: Any) -> torch.Tensor:
        return self._ends <= input_ids.shape[1]


def ragged(pair: Pair, seed: int, requests: int = 64) -> list[Ask]:
    """Prompts of 16-128 tokens; outputs of 8-192, most of them short, as answers are."""
    rng = random.Random(seed)
    counts = [min(192, 8 + int(rng.expovariate(1 / 48))) for _ in range(requests)]
    return [Ask(_tokens(rng, pair, rng.randrange(16, 129)), count) for count in counts]


def conversations(pair: Pair, seed: int, number: int, turns: int = 10) -> list[list[Ask]]:
    """Per turn an observation of 32-80 tokens and an action of 4-16: what a grid-world agent sees and says."""
    rng = random.Random(seed)
    return [
        [Ask(_tokens(rng, pair, rng.randrange(32, 81)), rng.randrange(4, 17)) for _ in range(turns)]
        for _ in range(number)
    ]


def _tokens(rng: random.Random, pair: Pair, count: int) -> list[int]:
    return [rng.randrange(1, pair.vocabulary) for _ in range(count)]


def hf_batch(plain: Any, asks: list[Ask]) -> list[list[int]]:
    longest = max(len(ask.prompt) for ask in asks)
    ids = torch.zeros((len(asks), longest), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, ask in enumerate(asks):
        ids[row, longest - len(ask.prompt) :] = torch.tensor(ask.prompt)
        mask[row, longest - len(ask.prompt) :] = 1
    counts = [ask.count for ask in asks]
    settings = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max(counts), pad_token_id=0
    )
    out = plain.generate(
        ids,
        attention_mask=mask,
        generation_config=settings,
        stopping_criteria=StoppingCriteriaList([Counted(longest, counts)]),
    )
    return [out[row, longest : longest + count].tolist() for row, count in enumerate(counts)]


def hf_ragged(pair: Pair, asks: list[Ask], size: int) -> None:
    for start in range(0, len(asks), size):
        hf_batch(pair.plain, asks[start : start + size])


def hf_conversations(pair: Pair, talks: list[list[Ask]]) -> None:
    histories: list[list[int]] = [[] for _ in talks]
    for turn in range(len(talks[0])):
        asks = [
            Ask(history + talk[turn].prompt, talk[turn].count) for history, talk in zip(histories, talks, strict=True)
        ]
        answers = hf_batch(pair.plain, asks)
        histories = [ask.prompt + answer for ask, answer in zip(asks, answers, strict=True)]


def engine_ragged(pair: Pair, asks: list[Ask]) -> Answers:
    return asyncio.run(_engine(pair, [[ask] for ask in asks]))


def engine_conversations(pair: Pair, talks: list[list[Ask]]) -> Answers:
    return asyncio.run(_engine(pair, talks))


async def _engine(pair: Pair, talks: list[list[Ask]]) -> Answers:
    async with TorchEngine(pair.model, EngineConfig(max_batch=64)) as engine:

        async def talk(number: int, asks: list[Ask]) -> Answers:
            history: list[int] = []
            answers = []
            for turn, ask in enumerate(asks):
                context = history + ask.prompt
                request = GenerationRequest(
                    id=f"{number}.{turn}",
                    session=str(number),
                    task="bench",
                    turn=turn,
                    tokens=context,
                    sampling=Sampling(max_tokens=ask.count, seed=number * 1000 + turn),
                )
                completion = await engine.generate(request)
                answers.append((context, completion.tokens, completion.logprobs))
                history = context + completion.tokens
            return answers

        talked = await asyncio.gather(*(talk(number, asks) for number, asks in enumerate(talks)))
        return [answer for answers in talked for answer in answers]


def logprob_diff(pair: Pair, answers: Answers) -> float:
    worst = 0.0
    with torch.inference_mode():
        for context, tokens, logprobs in answers:
            logits = pair.plain(torch.tensor([context + tokens])).logits[0, len(context) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
            worst = max(worst, float((expected - torch.tensor(logprobs)).abs().max()))
    return worst


def interleaved(rounds: int, sides: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Best CPU seconds of each side."""
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(rounds):
        for name, run in sides.items():
            began = time.process_time()
            run()
            best[name] = min(best[name], time.process_time() - began)
    return best


def compare(pair: Pair, rounds: int, talking: int, requests: int = 64) -> dict[str, Any]:
    asks, talks = ragged(pair, 1, requests), conversations(pair, 2, talking)
    answers: Answers = []

    def keep(made: Answers) -> None:
        answers[:] = made

    decode = interleaved(
        rounds,
        {
            "engine": lambda: keep(engine_ragged(pair, asks)),
            **{f"hf_{size}": lambda size=size: hf_ragged(pair, asks, size) for size in (16, 32, 64)},  # type: ignore[misc]
            "sorted": lambda: hf_ragged(pair, sorted(asks, key=lambda ask: ask.count), 16),
        },
    )
    diff = logprob_diff(pair, answers)
    turns = interleaved(
        rounds,
        {"engine": lambda: keep(engine_conversations(pair, talks)), "hf": lambda: hf_conversations(pair, talks)},
    )
    diff = max(diff, logprob_diff(pair, answers))
    made = sum(ask.count for ask in asks)
    said = sum(ask.count for talk in talks for ask in talk)
    hf = min((seconds, name) for name, seconds in decode.items() if name.startswith("hf_"))
    return {
        "parameters": pair.parameters,
        "decode_vs_hf": round(hf[0] / decode["engine"], 2),
        "decode_vs_hf_sorted": round(decode["sorted"] / decode["engine"], 2),
        "decode_hf_batch": int(hf[1].removeprefix("hf_")),
        "decode_tokens_per_s": round(made / decode["engine"]),
        "decode_hf_tokens_per_s": round(made / hf[0]),
        "multi_turn_vs_hf": round(turns["hf"] / turns["engine"], 2),
        "multi_turn_tokens_per_s": round(said / turns["engine"]),
        "multi_turn_hf_tokens_per_s": round(said / turns["hf"]),
        "logprob_max_diff": diff,
    }


def steps(pair: Pair, batch: int, context: int = 128, count: int = 60) -> dict[str, int]:
    """Microseconds of one decode step at a context of about `context`, and where they go (CPU time, means)."""
    engine = Stepper(pair.model, EngineConfig(max_batch=batch))
    rng = random.Random(0)
    for number in range(batch):
        sampling = Sampling(max_tokens=4 * count, seed=number)
        tokens = _tokens(rng, pair, context)
        engine.add(engine.accept(GenerationRequest(str(number), str(number), "bench", 0, tokens, sampling)))
    while engine.batch.decoding < batch:
        engine.step()
    whole = _per_step(engine, count)
    spent = dict.fromkeys(("attention", "forward", "plan", "sampling"), 0.0)
    with (
        _timed(spent, "attention", pair.model.kernels, "attend"),
        _timed(spent, "forward", pair.model, "forward"),
        _timed(spent, "plan", stepper, "step_inputs"),
        _timed(spent, "sampling", stepper, "sample"),
    ):
        timed = _per_step(engine, count)
    parts = {name: 1e6 * seconds / count for name, seconds in spent.items()}
    parts["bookkeeping"] = timed - parts["forward"] - parts["plan"] - parts["sampling"]
    parts["rest_of_forward"] = parts.pop("forward") - parts["attention"]
    return {"step": round(whole), **{name: round(time_us) for name, time_us in parts.items()}}


def _per_step(engine: Stepper, count: int) -> float:
    began = time.process_time()
    for _ in range(count):
        engine.step()
    return 1e6 * (time.process_time() - began) / count


class _timed:
    """Adds up the CPU time spent in `owner.name` while the block runs."""

    def __init__(self, spent: dict[str, float], key: str, owner: Any, name: str) -> None:
        self._spent, self._key, self._owner, self._name = spent, key, owner, name
        self._original = getattr(owner, name)

    def __enter__(self) -> None:
        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.process_time()
            try:
                return self._original(*arguments, **named)
            finally:
                self._spent[self._key] += time.process_time() - began

        setattr(self._owner, self._name, timed)

    def __exit__(self, *exception: object) -> None:
        setattr(self._owner, self._name, self._original)


def fixed(options: argparse.Namespace) -> dict[str, Any]:
    sizes, rounds = ((1, 2), 1) if options.smoke else ((1, 16, 128), options.rounds)
    counts = {name: 4 if options.smoke else count for name, count in (("tiny", 96), ("medium", 48), ("smollm2", 16))}
    result: dict[str, Any] = {}
    with scratch_folder("engine") as scratch:
        for name in options.models:
            folder = scratch / name
            if name == "smollm2":
                smollm2.save(folder)
                plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
                model = EngineModel(copy.deepcopy(plain))
            else:
                pair = Pair.make(tiny() if name == "tiny" else medium())
                model, plain = pair.model, pair.plain
                plain.save_pretrained(folder)
            with_vllm = options.vllm.exists() and not options.smoke
            vllm = Vllm(options.vllm, folder, sizes[-1], options.vllm_eager) if with_vllm else None
            try:
                batching = not options.no_batching
                made = fixed_batches(
                    model, plain, sizes=sizes, count=counts[name], rounds=rounds, vllm=vllm, batching=batching
                )
            finally:
                if vllm is not None:
                    vllm.close()
            result[name] = made
            print(name, json.dumps(made), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of small models; the best counts")
    parser.add_argument("--models", nargs="*", default=["tiny", "medium", "smollm2"], help="of the fixed batches")
    parser.add_argument("--vllm", type=Path, default=None, help="a Python with vLLM; $ROLLART_VLLM_PYTHON, .venv-vllm")
    parser.add_argument("--vllm-eager", action="store_true", help="vLLM without torch.compile")
    parser.add_argument("--no-batching", action="store_true", help="leave out transformers' continuous batching")
    parser.add_argument("--only-fixed", action="store_true", help="leave out the comparison with `generate`")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to check that it runs")
    options = parser.parse_args()
    options.vllm = options.vllm or VllmConfig().interpreter()
    if options.smoke:
        options.models = ["tiny"]
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    if not options.only_fixed:
        sizes, requests, count = ((1, 2), 2, 3) if options.smoke else ((1, 16, 64, 128), 64, 60)
        rounds, talking = (1, 1) if options.smoke else (options.rounds, 24)
        pair = Pair.make(small())
        result = compare(pair, rounds, talking, requests)
        result["step_us"] = {size: steps(pair, size, count=count) for size in sizes}
        show(result)
        pair = Pair.make(small() if options.smoke else medium())
        result["medium"] = compare(pair, 1, talking=min(8, talking), requests=requests)
        result["medium"]["step_us"] = {size: steps(pair, size, count=min(10, count)) for size in sizes}
        show(result["medium"])
    result["fixed"] = fixed(options)
    batches = [batch for model in result["fixed"].values() for batch in model.values() if isinstance(batch, dict)]
    against = [batch["vs_vllm_cpu"] for batch in batches if "vs_vllm_cpu" in batch]
    if against:
        result["vs_vllm_cpu"] = min(against)
    print(json.dumps(result))


def show(result: dict[str, Any]) -> None:
    for key, value in result.items():
        print(f"{key:28} {value}", flush=True)


if __name__ == "__main__":
    main()
