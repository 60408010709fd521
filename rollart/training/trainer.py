"""The trainer: one optimizer, one policy, one `step` per batch. Plain and synchronous; the service gives it a thread.

The same batches give the same weights. A step with nothing to learn from, or with a loss or gradient that is not
finite, leaves the weights alone and says so; the version advances all the same, because the batch has been used.
"""

import time
from collections.abc import Sequence
from math import isfinite
from pathlib import Path

import torch
from torch import Tensor

from rollart.config import Training
from rollart.errors import RollartError
from rollart.training import losses
from rollart.training.advantages import UNSEEN, RewardRange, advantages
from rollart.training.metrics import Totals, task_metrics
from rollart.training.microbatch import MicroBatch, check, micro_batches
from rollart.training.policy import Policy
from rollart.types import Batch, StepMetrics


class Trainer:
    """`folder` is the Hugging Face model that RL starts from, and the reference of the KL if that is asked for."""

    def __init__(self, folder: Path, config: Training, seed: int = 0, version: int = 0) -> None:
        torch.set_num_threads(config.threads)
        torch.manual_seed(seed)
        self.config = config
        self.version = version
        self.updates = 0
        self.ranges: dict[str, RewardRange] = {}
        self.policy = Policy(folder)
        self.optimizer = make_optimizer(self.policy, config)
        self.reference = Policy(folder) if config.algorithm.kl > 0 else None

    def step(self, batch: Batch) -> StepMetrics:
        if batch.step != self.version:
            raise RollartError(f"the batch is for version {batch.step}, but the trainer is at version {self.version}")
        check(batch)
        began = time.perf_counter()
        algorithm = self.config.algorithm
        rewards = [[sample.reward for sample in group.samples] for group in batch.groups]
        for group, values in zip(batch.groups, rewards, strict=True):
            self.ranges[group.task] = self.ranges.get(group.task, UNSEEN).including(values)
        ranges = [self.ranges[group.task] for group in batch.groups]
        scores, solved = advantages(algorithm.advantage, rewards, ranges, algorithm.solved)
        micros = micro_batches(
            batch,
            scores,
            algorithm.aggregate,
            self.config.pack_tokens,
            keep_all=algorithm.kl > 0 or algorithm.entropy > 0,
        )
        informative = [any(group) and not known for group, known in zip(scores, solved, strict=True)]
        totals = self._learn(micros, evidence=sum(informative) / len(informative))
        self.version += 1
        return StepMetrics(
            version=self.version,
            seconds=time.perf_counter() - began,
            tokens=sum(len(sample.tokens) for group in batch.groups for sample in group.samples),
            values=totals.values(),
            tasks=task_metrics(batch, solved),
        )

    def snapshot(self) -> tuple[int, dict[str, Tensor]]:
        """The version and a copy of its weights, which later steps do not touch. Tied weights share one copy."""
        copies: dict[int, Tensor] = {}
        tensors = self.policy.tensors()
        for tensor in tensors.values():
            if tensor.data_ptr() not in copies:
                copies[tensor.data_ptr()] = tensor.clone()
        return self.version, {name: copies[tensor.data_ptr()] for name, tensor in tensors.items()}

    def _learn(self, micros: Sequence[MicroBatch], evidence: float) -> Totals:
        """One update per epoch. The first one's logprobs are the proximal ones of the others: no extra forward."""
        totals = Totals()
        if self.reference is not None:
            with torch.no_grad():
                for micro in micros:
                    micro.reference = self.reference.logprobs(micro.packed)[0]
        for _ in range(self.config.epochs if micros else 0):
            loss = sum(self._backward(micro, totals) for micro in micros)
            rate = self._set_rate(evidence)
            parameters = self.policy.parameters().values()
            norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.grad_clip, foreach=True).item()
            totals.update(loss, norm, rate)
            if isfinite(loss) and isfinite(norm):
                self.optimizer.step()
                self.updates += 1
            else:
                totals.skipped = True
            self.optimizer.zero_grad(set_to_none=True)
            if totals.skipped:
                break
        return totals

    def _backward(self, micro: MicroBatch, totals: Totals) -> float:
        """Add the gradient of one micro-batch and return its share of the loss."""
        algorithm = self.config.algorithm
        current, entropy = self.policy.logprobs(micro.packed, entropy=algorithm.entropy > 0)
        first = micro.proximal is None
        if micro.proximal is None:
            micro.proximal = current.detach()
        outcome = self._policy_loss(current, micro.proximal, micro)
        importance = losses.importance_weight(micro.proximal, micro.behaviour, algorithm.importance_cap)
        loss = importance * outcome.loss
        kl = None
        if micro.reference is not None:
            kl = losses.kl_to_reference(current, micro.reference)
            loss = loss + algorithm.kl * kl
        if algorithm.entropy > 0:
            loss = loss - algorithm.entropy * entropy
        total = (micro.weight * loss).sum()
        total.backward()  # type: ignore[no-untyped-call]
        totals.tokens(outcome.clipped, kl)
        if first:
            totals.first_pass(entropy, micro.proximal - micro.behaviour, importance)
        return total.item()

    def _policy_loss(self, current: Tensor, proximal: Tensor, micro: MicroBatch) -> losses.PolicyLoss:
        algorithm = self.config.algorithm
        low, high, dual = algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip
        match algorithm.loss:
            case "ppo":
                return losses.ppo(current, proximal, micro.advantage, low, high, dual)
            case "gspo":
                return losses.gspo(current, proximal, micro.advantage, micro.sequence, low, high, dual)
            case "cispo":
                return losses.cispo(current, proximal, micro.advantage, low, high)
            case "reinforce":
                return losses.reinforce(current, micro.advantage)

    def _set_rate(self, evidence: float) -> float:
        """Adam makes a full-sized step of however small a gradient; a batch that says little should move little."""
        warm = min(1.0, (self.updates + 1) / max(1, self.config.lr_warm_up))
        decay = 1 - (1 - self.config.lr_end) * min(1.0, self.version / self.config.steps)
        rate: float = self.config.lr * warm * decay * evidence**self.config.algorithm.evidence
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate


def make_optimizer(policy: Policy, config: Training) -> torch.optim.AdamW:
    """Weight decay is for matrices; norms and biases are left alone."""
    parameters = list(policy.parameters().values())
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=config.betas,
        fused=True,
    )
