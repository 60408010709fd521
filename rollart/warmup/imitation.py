"""Supervised training: cross entropy on the masked tokens of demonstrations, with the trainer's packing."""

import random
from collections.abc import Callable, Iterator, Sequence
from math import cos, pi
from pathlib import Path

import torch

from rollart.config import WarmupConfig
from rollart.models.folder import atomic_folder
from rollart.training.packing import pack, plan
from rollart.training.policy import PolicyModel

Example = tuple[Sequence[int], Sequence[int]]  # tokens, and a mask that is 1 where a token is learnt
PACK_TOKENS = 4096


def imitate(
    model: Path,
    output: Path,
    examples: Sequence[Example],
    config: WarmupConfig,
    *,
    seed: int = 0,
    threads: int = 1,
    on_step: Callable[[int, int, float], None] = lambda step, steps, loss: None,
) -> float:
    """Train the model in `model`, save it as the Hugging Face folder `output`, which may be the same, and return the
    last loss. `on_step(step, steps, loss)` is called after every step."""
    if not any(any(mask) for _, mask in examples):
        raise ValueError("the warmup has nothing to learn: no example has a token whose mask is 1")
    torch.set_num_threads(threads)
    policy = PolicyModel(model)
    parameters = list(policy.parameters().values())
    optimizer = torch.optim.AdamW(parameters, lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    loss = 0.0
    for step, chosen in zip(range(config.steps), _batches(examples, config.batch, seed), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = config.lr * schedule(step, config.steps)
        loss = _accumulate(policy, chosen)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        on_step(step + 1, config.steps, loss)
    with atomic_folder(output) as folder:
        policy.save(folder)
    return loss


def schedule(step: int, steps: int) -> float:
    """The share of the learning rate: a linear rise over the first twentieth, then half a cosine down to a tenth."""
    rise = max(1, steps // 20)
    if step < rise:
        return (step + 1) / rise
    return 0.1 + 0.45 * (1 + cos(pi * (step - rise) / max(1, steps - rise)))


def _batches(examples: Sequence[Example], size: int, seed: int) -> Iterator[list[Example]]:
    """Endless: every example once per round, in an order drawn from `seed`."""
    draw = random.Random(seed)
    waiting: list[int] = []
    while True:
        while len(waiting) < size:
            waiting += draw.sample(range(len(examples)), len(examples))
        yield [examples[index] for index in waiting[:size]]
        del waiting[:size]


def _accumulate(policy: PolicyModel, examples: Sequence[Example]) -> float:
    """Add the gradient of the mean over all trained tokens of the examples, and return the mean."""
    total = max(1, sum(sum(mask) for _, mask in examples))
    loss = 0.0
    for part in plan([len(tokens) for tokens, _ in examples], PACK_TOKENS):
        logprobs, _ = policy.logprobs(pack([examples[i][0] for i in part], [examples[i][1] for i in part]))
        share = -logprobs.sum() / total
        share.backward()  # type: ignore[no-untyped-call]
        loss += share.item()
    return loss
