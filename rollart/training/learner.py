"""One rank of a trainer: its shard of the policy, the optimizer and the passes of a step.

Every method runs on all ranks at the same time, on an order of rank 0.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Literal

import msgspec
import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rollart.config import TrainingConfig
from rollart.training import losses
from rollart.training.metrics import StepTotals
from rollart.training.microbatch import MicroBatch, TrainSample, micro_batch
from rollart.training.policy import PolicyModel
from rollart.training.ranks import Ranks
from rollart.training.strategy import Strategy
from rollart.weights.publish import Publisher, TensorShard

TensorKind = Literal["policy", "reference", "exp_avg", "exp_avg_sq"]
MOMENTS: tuple[TensorKind, ...] = ("exp_avg", "exp_avg_sq")


class Learn(Struct, frozen=True, tag=True):
    """A rank's passes. `rate` is the learning rate before warmup; `cells` their number on all ranks."""

    passes: list[list[TrainSample]]
    rate: float
    cells: int


class Gather(Struct, frozen=True, tag=True):
    what: TensorKind


class Publish(Struct, frozen=True, tag=True):
    """Write the policy to the weight store, as `version`; `id` is unique to this publication of it."""

    version: int
    id: str


class Restore(Struct, frozen=True, tag=True):
    """`steps` of the optimizer, by name of the parameters that it has updated."""

    updates: int
    steps: dict[str, float]


class Heartbeat(Struct, frozen=True, tag=True):
    """Rank 0 is alive."""


class Shutdown(Struct, frozen=True, tag=True):
    """Rank 0 exits normally."""


Order = Learn | Gather | Publish | Restore | Heartbeat | Shutdown


class Learner:
    """`folder` is the Hugging Face model that RL starts from, and the reference of the KL if `kl` is set."""

    def __init__(
        self, folder: Path, config: TrainingConfig, ranks: Ranks, seed: int = 0, publisher: Publisher | None = None
    ) -> None:
        torch.set_num_threads(config.threads)
        torch.manual_seed(seed)
        self.config, self.ranks, self._publisher = config, ranks, publisher
        self._loss = losses.LOSSES.find(config.algorithm.loss)
        self.updates = 0
        self.policy: Strategy = PolicyModel(folder, ranks, config)
        self.optimizer = make_optimizer(self.policy, config)
        self.reference = PolicyModel(folder, ranks, config, trained=False) if config.algorithm.kl > 0 else None

    def follow(self) -> None:
        """On a rank other than 0: carry out orders of rank 0 until it shuts down. Raises RanksLost."""
        try:
            while True:
                match msgspec.msgpack.decode(self.ranks.receive(), type=Order):
                    case Learn() as order:
                        self.learn(order)
                    case Gather(what):
                        self.gather(what)
                    case Publish() as order:
                        self.publish(order)
                    case Restore() as order:
                        self.restore(order, {})
                    case Heartbeat():
                        pass
                    case Shutdown():
                        return
        except Exception as error:
            raise self.ranks.lost(error) from error

    def learn(self, order: Learn) -> StepTotals:
        """One update per epoch. The logprobs of the first are the proximal ones of the rest: no extra forward pass."""
        totals = StepTotals(order.cells, self.ranks.device)
        with self.ranks.device:
            micros = [micro_batch(items) for items in order.passes]
        if self.reference is not None:
            with torch.no_grad():
                for micro in micros:
                    micro.reference = self.reference.logprobs(micro.packed)[0]
        for _ in range(self.config.epochs if micros else 0):
            self._update(micros, order.rate, totals)
            if totals.skipped:
                break
        totals.merge(self.ranks)
        return totals

    def _update(self, micros: Sequence[MicroBatch], rate: float, totals: StepTotals) -> None:
        """Loss and norm are those of all ranks, so an update that is not finite on one is skipped by all."""
        (loss,) = self.ranks.all_reduce([sum(self._backward(micro, totals) for micro in micros)])
        rate *= min(1.0, (self.updates + 1) / max(1, self.config.lr_warmup))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        parameters = self.policy.parameters().values()
        norm = self.ranks.grad_norm(parameters)
        clip_grads(parameters, self.config.grad_clip / (norm + 1e-6))
        totals.add_update(loss, norm, rate)
        if isfinite(loss) and isfinite(norm):
            self.optimizer.step()
            self.updates += 1
        else:
            totals.skipped = True
        self.optimizer.zero_grad(set_to_none=True)

    def _backward(self, micro: MicroBatch, totals: StepTotals) -> float:
        """Add the gradient of one micro-batch and return its share of the loss."""
        algorithm = self.config.algorithm
        current, entropy = self.policy.logprobs(micro.packed)
        first = micro.proximal is None
        if micro.proximal is None:
            micro.proximal = current.detach()
        outcome = losses.policy_loss(
            self._loss,
            losses.LossInputs(
                logprobs=current,
                old_logprobs=micro.proximal,
                engine_logprobs=micro.behaviour,
                advantages=micro.advantage,
                sequences=micro.sequence,
                config=algorithm,
            ),
        )
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
        totals.add_pass(outcome.clipped, kl)
        if first:
            totals.add_first_pass(entropy, micro.proximal, micro.behaviour, micro.cell, importance)
        return total.item()

    def gather(self, what: TensorKind) -> dict[str, Tensor]:
        """On rank 0 all of them, as copies if they are sharded; on other ranks none: each is dropped at once."""
        whole = ((name, self.ranks.full_tensor(tensor)) for name, tensor in self._tensors(what).items())
        return {name: tensor for name, tensor in whole if self.ranks.rank == 0}

    def publish(self, order: Publish) -> None:
        """Each rank writes its shard, at the same time as the others."""
        assert self._publisher is not None
        tensors = {**self.policy.parameters(), **self.policy.buffers()}
        shards = [
            TensorShard(name, tuple(tensor.shape), *self.ranks.local_shard(tensor)) for name, tensor in tensors.items()
        ]
        aliases = {name: owner for name, owner in self.policy.names().items() if name != owner}
        self._publisher.publish(order.version, order.id, shards, aliases)

    def steps(self) -> dict[str, float]:
        """Optimizer steps of each parameter that has any."""
        state = self.optimizer.state
        return {name: state[p]["step"].item() for name, p in self.policy.parameters().items() if p in state}

    @torch.no_grad()
    def restore(self, order: Restore, stored: Mapping[TensorKind, Mapping[str, Tensor]]) -> None:
        """Restore from a checkpoint. Only rank 0 needs to have the `stored` tensors."""

        def shard(what: TensorKind, name: str, like: Tensor) -> Tensor:
            return self.ranks.shard(stored[what][name] if self.ranks.rank == 0 else None, like)

        kept: list[tuple[TensorKind, Strategy | None]] = [("policy", self.policy), ("reference", self.reference)]
        for what, policy in kept:
            for name, parameter in policy.parameters().items() if policy else ():
                parameter.copy_(shard(what, name, parameter))
        self.updates = order.updates
        self.optimizer.state.clear()
        for name, parameter in self.policy.parameters().items():
            if name in order.steps:
                state = {kind: shard(kind, name, parameter) for kind in MOMENTS}
                step = torch.tensor(order.steps[name], device=self.ranks.device)
                self.optimizer.state[parameter] = {"step": step, **state}

    def _tensors(self, what: TensorKind) -> Mapping[str, Tensor]:
        if what == "policy":
            return self.policy.parameters()
        if what == "reference":
            return self.reference.parameters() if self.reference is not None else {}
        state = self.optimizer.state
        return {name: state[p][what] for name, p in self.policy.parameters().items() if p in state}


def make_optimizer(policy: Strategy, config: TrainingConfig) -> torch.optim.AdamW:
    """Weight decay is for matrices, not for norms and biases."""
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


def clip_grads(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Scale the gradients by `factor`, if it is below 1."""
    if factor < 1.0:
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_([grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads], factor)
