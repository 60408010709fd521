"""How far engine and trainer are apart on a mixture of experts, with and without replay of the engine's experts.

The embedded engine samples conversations of two turns, whose prompts share a prefix, in bfloat16 and in float32; the
trainer scores them in float32 and in bfloat16. Per pair: mean and largest gap of the logprobs of sampled tokens, the
same with replay, and the share of choices of experts in which the two differ by themselves. `gap_ratio` is the mean gap
without replay over that with it, engine bfloat16 and trainer float32.

Then `runs`: whole training runs of the same model with engines in bfloat16, embedded and vLLM (`make vllm`), without
and with `training.replay_experts`: the mean gap that their steps reported, and the share of tokens whose experts were
replayed. Without a Python with vLLM, its two are left out.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from msgspec import structs
from torch import Tensor

from benchmarks.scratch import scratch_folder
from rollart.config import EngineConfig, RunFile, TrainingConfig, VllmConfig, loading
from rollart.core.column import Column
from rollart.core.event_log import read_events
from rollart.core.events import StepDone
from rollart.core.expert_choice import join
from rollart.core.types import Completion, GenerationRequest, Sampling
from rollart.engines.torch.model import EngineModel
from rollart.engines.torch.stepper import Stepper
from rollart.models import tiny
from rollart.training.microbatch import MicroBatch, TrainSample, micro_batch
from rollart.training.policy import PolicyModel

VOCABULARY = len(tiny.SPECIAL) + len(tiny.CHARACTERS)
CONTEXT = 512
RUN_DEADLINE_S = 900.0  # half a minute alone


def make_model(folder: Path) -> None:
    """Random weights of the scale that each layer keeps."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM has on CPUs
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=96,
        norm_topk_prob=True,
        max_position_embeddings=CONTEXT,
        pad_token_id=tiny.SPECIAL.index(tiny.PAD),
        eos_token_id=tiny.SPECIAL.index(tiny.END),
        tie_word_embeddings=False,
    )
    model = Qwen3MoeForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0.0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    tiny.tokenizer(CONTEXT).save_pretrained(folder)


def generate(stepper: Stepper, asked: list[GenerationRequest]) -> list[Completion]:
    for request in asked:
        stepper.add(stepper.accept(request))
    while stepper.busy:
        stepper.step()
    made = {sequence.id: sequence.completion() for sequence in stepper.ended()}
    return [made[request.id] for request in asked]


def conversations(folder: Path, dtype: str, count: int, tokens: int) -> list[TrainSample]:
    """Two turns each; the second uses the cached KV of the first, and all share the first half of their prompt."""
    draw = random.Random(0)
    model = EngineModel.open(folder, getattr(torch, dtype), record_experts=True)
    stepper = Stepper(model, EngineConfig(max_batch=16))
    shared = [draw.randrange(VOCABULARY) for _ in range(tokens)]

    def observed() -> list[int]:
        return [draw.randrange(VOCABULARY) for _ in range(tokens // 2)]

    sampling = Sampling(max_tokens=tokens)
    first = [
        GenerationRequest(f"{n}/0", str(n), "gap", 0, [*shared, *observed()], structs.replace(sampling, seed=n))
        for n in range(count)
    ]
    answers = generate(stepper, first)
    second = [
        replace(
            request,
            id=f"{request.session}/1",
            turn=1,
            tokens=[*request.tokens, *answer.tokens, *observed()],
            experts_known=0 if answer.experts is None else answer.experts.stop,
        )
        for request, answer in zip(first, answers, strict=True)
    ]
    more = generate(stepper, second)
    samples = []
    for one, answer, two, last in zip(first, answers, second, more, strict=True):
        whole = [*two.tokens, *last.tokens]
        between = len(two.tokens) - len(one.tokens) - len(answer.tokens)
        mask = [0] * len(one.tokens) + [1] * len(answer.tokens) + [0] * between + [1] * len(last.tokens)
        samples.append(
            TrainSample(
                tokens=Column.ints(whole),
                mask=Column.flags(mask),
                behaviour=Column.floats([*answer.logprobs, *last.logprobs]),
                cells=Column.ints([0] * sum(mask)),
                advantage=Column.floats([1.0] * sum(mask)),
                weight=1.0,
                experts=join([answer.experts, last.experts], len(whole)),
            )
        )
    return samples


def own_choice(policy: PolicyModel, micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """Logprobs of the trainer without replay, and the experts that it chose."""
    seen: list[Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, args, output: seen.append(output[2]))
        for layer in policy.model.model.layers
    ]
    logprobs, _ = policy.logprobs(micro.packed)
    for hook in hooks:
        hook.remove()
    return logprobs, torch.stack(seen, 1)


@torch.no_grad()
def compare(folder: Path, samples: list[TrainSample], dtype: str) -> dict[str, Any]:
    settings = {"dtype": dtype}
    plain = PolicyModel(folder, config=TrainingConfig.model_validate(settings))
    replaying = PolicyModel(folder, config=TrainingConfig.model_validate(settings | {"replay_experts": True}))
    gaps, replayed, differ, known = [], [], [], []
    for sample in samples:
        micro = micro_batch([sample])
        logprobs, chosen = own_choice(plain, micro)
        assert micro.packed.experts is not None
        sure = (micro.packed.experts >= 0).all(-1).all(-1)
        known.append(sure.float().mean())
        engine, trainer = (ids[sure].sort(-1).values for ids in (micro.packed.experts, chosen))
        differ.append((engine != trainer).any(-1).float().mean())
        gaps.append((logprobs - micro.behaviour).abs())
        replayed.append((replaying.logprobs(micro.packed)[0] - micro.behaviour).abs())
    without, with_replay = torch.cat(gaps), torch.cat(replayed)
    return {
        "tokens": len(without),
        "known": float(torch.stack(known).mean()),
        "other_experts": float(torch.stack(differ).mean()),
        "gap": float(without.mean()),
        "gap_replayed": float(with_replay.mean()),
        "gap_max": float(without.max()),
        "gap_max_replayed": float(with_replay.max()),
    }


def trained(model: Path, scratch: Path, engine: str, replay: bool, steps: int) -> dict[str, Any]:
    """What the steps of a run report, as a user starts it."""
    run = RunFile.model_validate(
        {
            "name": "experts",
            "model": {"path": str(model)},
            "vllm": {"start_deadline": RUN_DEADLINE_S},
            "tasks": [
                {
                    "name": "talk",
                    "env": "benchmarks.paced:Shaped",
                    "args": {"turns": 3, "characters": 40},
                    "reward": "benchmarks.waiting_reward:letters",
                    "max_turns": 3,
                    "max_context": 320,
                    "sampling": {"max_tokens": 32},
                }
            ],
            "pools": {"policy": {"role": "generate", "device": "cpu", "engine": engine}},
            "engine": {"dtype": "bfloat16", "kv_megabytes": 64, "max_batch": 32},
            "training": {"steps": steps, "batch_groups": 4, "group_size": 4, "lr": 1e-5, "replay_experts": replay},
            "environments": {"processes": 16},
            "evaluation": {"every": 0, "final_episodes": 2},
            "checkpoint": {"every": steps},
        }
    )
    file, folder = scratch / "run.yaml", scratch / f"{engine}-{replay}"
    file.write_text(loading.dump(run))
    command = [sys.executable, "-m", "rollart.app.cli", "train", str(file), "--run-dir", str(folder), "--json"]
    with open(scratch / f"{folder.name}.log", "wb") as log:
        subprocess.run(command, stdout=log, stderr=log, timeout=RUN_DEADLINE_S, check=True)
    done = [event.values for event in read_events(folder / "events", StepDone)]
    means = {key: fmean(values[key] for values in done) for key in ("logprob_gap", "experts_replayed")}
    return {"engine": engine, "replay": replay, "steps": len(done)} | means


def runs(model: Path, steps: int, engines: list[str]) -> list[dict[str, Any]]:
    rows = []
    with scratch_folder("experts") as scratch:
        for engine in engines:
            for replay in (False, True):
                rows.append(trained(model, scratch, engine, replay, steps))
                print(rows[-1], file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="of each run")
    parser.add_argument("--smoke", action="store_true", help="two short conversations, and runs of two steps")
    arguments = parser.parse_args()
    count, tokens, steps = (2, 16, 2) if arguments.smoke else (16, 64, arguments.steps)
    engines = ["torch"] if arguments.smoke or not VllmConfig().interpreter().exists() else ["torch", "vllm"]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_model(folder)
        rows = []
        for engine in ("bfloat16", "float32"):
            samples = conversations(folder, engine, count, tokens)
            rows += [
                {"engine": engine, "trainer": trainer} | compare(folder, samples, trainer)
                for trainer in ("float32", "bfloat16")
            ]
        ratio = rows[0]["gap"] / rows[0]["gap_replayed"]
        print(json.dumps({"gap_ratio": ratio, "pairs": rows, "runs": runs(folder, steps, engines)}))


if __name__ == "__main__":
    main()
