"""Every layout of the trainer against one process: gradients, publications and checkpoints.

Each layout runs as that many processes with gloo. Largest relative error of any gradient (`worst_gradient_error`, at
most 1e-5), whether every element of the weights is published exactly once (`export_exact`), and whether a checkpoint,
weights and both moments, goes exactly from each layout to the next one of the list (`reshard_exact`).
"""

import argparse
import json
import multiprocessing
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from zlib import crc32

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollart.config import TrainingConfig
from rollart.core.column import Column
from rollart.core.expert_choice import ChoiceShape, ExpertChoices
from rollart.hardware.layout import Layout
from rollart.models.adapters import file_name
from rollart.training import losses
from rollart.training.block_files import BlockReader
from rollart.training.learner import Learner, Restore, Save, published
from rollart.training.microbatch import TrainSample, micro_batch
from rollart.training.policy import PolicyModel
from rollart.training.ranks import RankAddress, Ranks
from rollart.training.shards import block
from rollart.training.strategy import Strategy
from rollart.weights.publish import TensorShard

DEADLINE_S = 300.0
PROMPT = 5
VOCABULARY = 131  # no multiple of anything
PASSES = 2
LAYERS, EXPERTS, EXPERTS_PER_TOKEN = 4, 8, 2
LORA: dict[str, Any] = {"lora": {"rank": 3, "alpha": 5}}


@dataclass(frozen=True)
class Case:
    """A layout, and what is on beside it."""

    model: str
    layout: Layout
    loss: str = "ppo"
    empty: bool = False
    replay: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def weights(self) -> str:
        """What is trained: cases with the same weights pass one checkpoint on."""
        return f"{self.model}-adapters" if "lora" in self.settings else self.model

    def __str__(self) -> str:
        extra = [
            *(f"{key} {value}" for key, value in self.settings.items()),
            *(["an empty pass"] if self.empty else []),
            *(["replayed experts"] if self.replay else []),
        ]
        return ", ".join([f"{self.model}: {self.layout}", self.loss, *extra])


CASES = [
    Case("dense", Layout(data=2)),
    Case("dense", Layout(context=2), "dpo"),
    Case("dense", Layout(tensor=2), "topr"),
    Case("untied", Layout(tensor=2), "gspo"),
    Case("moe", Layout(data=2, expert=2), "gspo"),
    Case("dense", Layout(data=2), "sapo", empty=True),
    Case("dense", Layout(context=2), "cispo", settings={"recompute": "full"}),
    Case("dense", Layout(data=2), "reinforce", settings={"recompute": "selective"}),
    Case("dense", Layout(context=4), "gspo_token"),
    Case("dense", Layout(data=2, tensor=2), "squared"),
    Case("untied", Layout(context=2, tensor=2), "gspo", settings={"recompute": "full"}),
    Case("dense", Layout(data=2, context=2), "raft_pp"),
    Case("moe", Layout(data=4, expert=2)),
    Case("moe", Layout(data=2, tensor=2, expert=4), "opd"),
    Case("moe", Layout(data=2, context=2, expert=4), settings={"recompute": "full"}),
    Case("moe", Layout(context=4, expert=2), "ipo"),
    Case("moe", Layout(data=2, tensor=2, expert=2), empty=True),
    Case("moe", Layout(data=2, context=2, tensor=2, expert=4)),
    Case("moe", Layout(data=2, expert=2), "sft", replay=True),
    Case("moe", Layout(data=2, expert=2), "gspo", empty=True, settings={"expert_balance": 0.5}),
    Case("moe", Layout(context=2, expert=2), replay=True, settings={"recompute": "full", "expert_balance": 0.5}),
    Case("moe", Layout(data=2, tensor=2, expert=4), replay=True, settings={"expert_balance": 0.5}),
    Case("dense", Layout(data=2), settings=LORA),
    Case("dense", Layout(context=2), "gspo", settings=LORA),
    Case("untied", Layout(data=2, context=2), empty=True, settings=LORA),
    Case("dense", Layout(data=2, context=2), settings=LORA | {"recompute": "full"}),
    Case("dense", Layout(data=2), "cispo", settings=LORA | {"recompute": "selective"}),
    Case("moe", Layout(data=2), settings=LORA),
    Case("moe", Layout(data=2, context=2), "gspo", replay=True, settings=LORA | {"expert_balance": 0.5}),
]
SMOKE = [CASES[1], CASES[2], CASES[4], CASES[22]]


def make_models(folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": EXPERTS_PER_TOKEN, "moe_intermediate_size": 48}
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "dense": ("qwen3", {"tie_word_embeddings": True}),
        "untied": ("qwen3", {"tie_word_embeddings": False}),
        "moe": ("qwen3_moe", {"tie_word_embeddings": False, **experts}),
    }
    for name, (architecture, more) in kinds.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **sizes, **more))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.1)
        model.save_pretrained(folder / name)


def batch(case: Case) -> list[list[TrainSample]]:
    """Six sequences for each pass of each data-parallel rank; they mask, weigh and heat differently. The first three
    begin with the same prompt."""
    draw = torch.Generator().manual_seed(3)

    def numbers(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=draw).tolist()

    passes: list[list[TrainSample]] = []
    for number in range(case.layout.data * PASSES):
        samples: list[TrainSample] = []
        prompt = numbers(0, VOCABULARY, PROMPT)
        for length, heat in zip(numbers(PROMPT + 3, 40, 6), (0.7, 1.0, 1.0, 0.9, 1.0, 1.0), strict=True):
            mask = [*[0] * PROMPT, 1, *numbers(0, 2, length - PROMPT - 1)]
            start = prompt if len(samples) < 3 else numbers(0, VOCABULARY, PROMPT)
            behaviour = torch.rand(sum(mask), generator=draw).neg().sub(4.0).tolist()
            advantage, weight = torch.randn(2, generator=draw).tolist()
            samples.append(
                TrainSample(
                    tokens=Column.ints([*start, *numbers(0, VOCABULARY, length - PROMPT)]),
                    mask=Column.flags(mask),
                    behaviour=Column.floats(behaviour),
                    cells=Column.ints([0] * sum(mask)),
                    temperature=heat,
                    advantage=Column.floats([advantage] * sum(mask)),
                    weight=abs(weight) / 100,
                    experts=chosen(length, draw) if case.replay else None,
                )
            )
        passes.append([] if case.empty and number == len(passes) == case.layout.data * PASSES - 1 else samples)
    return passes


def chosen(tokens: int, draw: torch.Generator) -> ExpertChoices:
    """Experts as an engine might have used them: any, and for one token in four not known."""
    shape = ChoiceShape.of(LAYERS, EXPERTS_PER_TOKEN, EXPERTS)
    rows = [
        torch.randperm(EXPERTS, generator=draw)[:EXPERTS_PER_TOKEN].tolist() if at // LAYERS % 4 else [255, 255]
        for at in range(tokens * LAYERS)
    ]
    return ExpertChoices(0, shape, bytes(expert for row in rows for expert in row))


def accumulate_gradients(
    policy: Strategy, passes: Sequence[list[TrainSample]], config: TrainingConfig, *, share: bool = False
) -> None:
    loss = losses.LOSSES.find(config.algorithm.loss)
    for samples in passes:
        micro = micro_batch(samples, share=share)
        logprobs, entropy = policy.logprobs(micro.packed)
        old = logprobs.detach() + 0.05 * torch.sin(torch.arange(len(logprobs)))  # so that some tokens are clipped
        inputs = losses.LossInputs(
            logprobs=logprobs,
            old_logprobs=old,
            engine_logprobs=micro.behaviour,
            advantages=micro.advantage,
            sequences=micro.sequence,
            config=config.algorithm,
            reference_logprobs=old - 0.1,
            teacher_logprobs=micro.behaviour,
        )
        value = losses.policy_loss(loss, inputs).loss
        total = (micro.weight * (value - 0.01 * entropy)).sum()
        load = policy.expert_load()
        if load is not None:
            total = total + config.algorithm.expert_balance * micro.weight.sum() * load.balance
        total.backward()  # type: ignore[no-untyped-call]


def config_of(case: Case) -> TrainingConfig:
    parallel = {name: getattr(case.layout, name) for name in ("context", "tensor", "expert")}
    settings = dict(case.settings)
    algorithm = {"loss": case.loss, "expert_balance": settings.pop("expert_balance", 0.0)}
    return TrainingConfig.model_validate(
        {"parallel": parallel, "algorithm": algorithm, "replay_experts": case.replay, **settings}
    )


def one_process(folder: Path, case: Case) -> dict[str, Tensor]:
    config = config_of(case)
    policy = PolicyModel(folder / case.model, config=config.model_copy(update={"recompute": "none"}))
    if config.lora is not None:
        train_adapters(policy)
        weights = {file_name(name): parameter.detach() for name, parameter in policy.parameters().items()}
        save_file(weights, folder / f"{case.weights}.safetensors")
    accumulate_gradients(policy, batch(case), config)
    return {name: parameter.grad for name, parameter in policy.parameters().items() if parameter.grad is not None}


@torch.no_grad()
def train_adapters(policy: Strategy) -> None:
    """As if they had been: new ones have a B of zeros, and A then has no gradient."""
    for name, parameter in policy.parameters().items():
        part = block(parameter)
        whole = torch.randn(part.shape, generator=torch.Generator().manual_seed(crc32(name.encode())))
        where = tuple(slice(at, at + size) for at, size in zip(part.offset, part.values.shape, strict=True))
        part.values.copy_(0.1 * whole[where])


def gradient_error(expected: dict[str, Tensor], policy: Strategy) -> float:
    """Of this rank's part of every gradient, relative to the largest element of that gradient."""
    worst = 0.0
    for name, parameter in policy.parameters().items():
        assert parameter.grad is not None, name
        part = block(parameter.grad)
        where = tuple(slice(at, at + size) for at, size in zip(part.offset, part.values.shape, strict=True))
        if part.values.numel():
            difference = (part.values - expected[name][where]).abs().max() / expected[name].abs().max()
            worst = max(worst, float(difference))
    return worst


def is_exact(file: Path, shares: Sequence[list[TensorShard]]) -> bool:
    """Whether the ranks publish every element of a file exactly once, under the names that it has there."""
    weights = load_file(file)
    flat = {name: torch.zeros(weight.numel()) for name, weight in weights.items()}
    count = {name: torch.zeros(weight.numel()) for name, weight in weights.items()}
    for share in [share for rank in shares for share in rank if share.values.numel()]:
        if share.name not in weights or share.shape != tuple(weights[share.name].shape):
            return False
        where = slice(share.start, share.start + share.values.numel())
        flat[share.name][where] += share.values.reshape(-1)
        count[share.name][where] += 1
    wrong = [n for n in weights if not (torch.equal(flat[n], weights[n].reshape(-1)) and bool((count[n] == 1).all()))]
    for name in wrong:
        print(f"{name} is not published exactly once: {sorted(set(count[name].tolist()))}", file=sys.stderr)
    return not wrong


def _rank(case: Case, folder: Path, place: RankAddress) -> None:
    torch.set_num_threads(1)
    ranks = Ranks.join(place, layout=case.layout, patience=DEADLINE_S)
    config = config_of(case)
    learner = Learner(folder / case.model, config, ranks)
    policy = learner.policy
    if config.lora is not None:
        train_adapters(policy)
    share = [replace(each, values=each.values.clone()) for each in published(policy, ranks)]
    passes = batch(case)
    mine = passes[ranks.data * PASSES : (ranks.data + 1) * PASSES]
    accumulate_gradients(policy, mine, config, share=policy.shares_prompts)
    expected = torch.load(folder / "expected.pt")
    result = {
        "error": gradient_error(expected, policy),
        "share": share,
        "norm": ranks.grad_norm(policy.parameters().values()),
    }
    torch.save(result, folder / f"result-{place.rank}.pt")
    source, steps = folder / f"{case.weights}-source", torch.load(folder / f"{case.weights}-steps.pt")
    learner.restore(Restore(str(source), 0, steps))
    save_blocks(learner, folder / f"{case.weights}-target")


def save_blocks(learner: Learner, folder: Path) -> None:
    learner.save(Save(str(folder), "saved"))
    if learner.ranks.rank == 0:
        learner.disk.submit(int).result()  # after its own file
        assert not any(learner.ranks.collect("saved"))


def make_checkpoint(folder: Path, case: Case) -> None:
    """Of one process, with moments of both kinds: what the layouts load and save, one after the other."""
    config = TrainingConfig(lora=config_of(case).lora)
    learner = Learner(folder / case.model, config, Ranks.single())
    model = case.weights
    torch.manual_seed(1)
    for _ in range(2):
        for parameter in learner.policy.parameters().values():
            parameter.grad = torch.randn_like(parameter)
        learner.state.optimizer.step()
    torch.save(learner.state.steps(), folder / f"{model}-steps.pt")
    (folder / f"{model}-original").mkdir()
    save_blocks(learner, folder / f"{model}-original")
    (folder / f"{model}-source").symlink_to(folder / f"{model}-original")


def reshard_exact(folder: Path, model: str) -> bool:
    """Whether the last layout saved exactly what one process did. The next one loads its checkpoint."""
    original, source, target = (folder / f"{model}-{name}" for name in ("original", "source", "target"))
    with BlockReader(original) as expected, BlockReader(target) as found:
        exact = expected.shapes == found.shapes and not [*found.incomplete()]
        exact = exact and all(torch.equal(expected.whole(name), found.whole(name)) for name in expected.shapes)
    source.unlink() if source.is_symlink() else shutil.rmtree(source)
    target.rename(source)
    return exact


def on_processes(ranks: int, work: Callable[..., None], *args: Any, deadline_s: float = DEADLINE_S) -> None:
    """`work(*args, address)` in as many processes as `ranks`. Raises SystemExit if one fails or they take too long."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rollart.training.service", "transformers.models.auto.modeling_auto"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    processes = [context.Process(target=work, args=(*args, RankAddress(rank, ranks, address))) for rank in range(ranks)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + deadline_s
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        if any(process.exitcode != 0 for process in processes):
            raise SystemExit(f"ranks ended with {[process.exitcode for process in processes]}")
    finally:
        for process in processes:
            process.kill()


def run(case: Case, folder: Path) -> dict[str, Any]:
    expected = one_process(folder, case)
    torch.save(expected, folder / "expected.pt")
    if not (folder / f"{case.weights}-source").exists():
        make_checkpoint(folder, case)
    shutil.rmtree(folder / f"{case.weights}-target", ignore_errors=True)
    (folder / f"{case.weights}-target").mkdir()
    on_processes(case.layout.ranks, _rank, case, folder)
    results = [torch.load(folder / f"result-{rank}.pt", weights_only=False) for rank in range(case.layout.ranks)]
    weights = folder / (f"{case.weights}.safetensors" if "lora" in case.settings else f"{case.model}/model.safetensors")
    norm = float(torch.stack([grad.norm() for grad in expected.values()]).norm())
    return {
        "case": str(case),
        "gradient_error": max(result["error"] for result in results),
        "norm_error": max(abs(result["norm"] - norm) for result in results) / norm,
        "export_exact": is_exact(weights, [result["share"] for result in results]),
        "reshard_exact": reshard_exact(folder, case.weights),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="three layouts of two processes")
    parser.add_argument("--only", default="", help="only cases whose name has this in it")
    arguments = parser.parse_args()
    cases = [case for case in (SMOKE if arguments.smoke else CASES) if arguments.only in str(case)]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_models(folder)
        rows = []
        for number, case in enumerate(cases):
            row = run(case, folder)
            rows.append(row)
            print(f"{number + 1}/{len(cases)} {row['case']}: {row['gradient_error']:.1e}", file=sys.stderr, flush=True)
    print(
        json.dumps(
            {
                "worst_gradient_error": max(row["gradient_error"] for row in rows),
                "worst_norm_error": max(row["norm_error"] for row in rows),
                "export_exact": all(row["export_exact"] for row in rows),
                "reshard_exact": all(row["reshard_exact"] for row in rows),
                "layouts": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
