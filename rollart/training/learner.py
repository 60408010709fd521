"""One rank of a trainer: its shard of the policy, the optimizer and the passes of a step.

Every method runs on all ranks at the same time, on an order of rank 0.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from math import isfinite
from pathlib import Path

import msgspec
import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rollart.config import TrainingConfig
from rollart.core.types import Example
from rollart.models.disk_names import cut
from rollart.training import losses
from rollart.training.block_files import FILES, BlockReader, damaged, file_name, write_blocks
from rollart.training.corrections import CorrectionInputs, correct, find, measure
from rollart.training.matrix_optimizers import moments, read_state, write_state
from rollart.training.metrics import StepTotals
from rollart.training.microbatch import MicroBatch, TrainSample, micro_batch, pack_examples
from rollart.training.optimizers import learning_rate, make_optimizer
from rollart.training.policy import PolicyModel
from rollart.training.ranks import Ranks
from rollart.training.shards import Block, block, is_owner
from rollart.training.strategy import Scorer, Strategy
from rollart.weights.publish import Publisher, TensorShard

POLICY = "policy"  # the kind of the weights in a checkpoint; the others are moments of the optimizer


class MiniBatch(Struct, frozen=True):
    """A rank's passes for one update, whose learning rate is multiplied by `evidence`."""

    passes: list[list[TrainSample]]
    evidence: float


class Learn(Struct, frozen=True, tag=True):
    """The updates of an epoch; all ranks have as many, with as many passes in each. `cells` is the number of cells."""

    step: int
    mini_batches: list[MiniBatch]
    cells: int


class Imitate(Struct, frozen=True, tag=True):
    """A rank's passes of a supervised step. `weight` is that of each trained token, one over their number on all
    ranks; `rate` is the learning rate."""

    passes: list[list[Example]]
    rate: float
    weight: float


class Gather(Struct, frozen=True, tag=True):
    """Bring the weights to rank 0."""


class Publish(Struct, frozen=True, tag=True):
    """Write the policy to the weight store, as `version`; `id` is unique to this publication of it."""

    version: int
    id: str


class Save(Struct, frozen=True, tag=True):
    """Copy the state and write it to a file in `folder`, in the background; post the outcome under `id`."""

    folder: str
    id: str


class Verify(Struct, frozen=True, tag=True):
    """Compare the checksums of this rank's share of the files of a checkpoint; post the outcome under `id`."""

    folder: str
    id: str


class Restore(Struct, frozen=True, tag=True):
    """Load a checkpoint. `steps` of the optimizer, by name of the parameters that it has updated."""

    folder: str
    updates: int
    steps: dict[str, float]


class Heartbeat(Struct, frozen=True, tag=True):
    """Rank 0 is alive."""


class Shutdown(Struct, frozen=True, tag=True):
    """Rank 0 exits normally."""


Order = Learn | Imitate | Gather | Publish | Save | Verify | Restore | Heartbeat | Shutdown


class Learner:
    """`folder` is the Hugging Face model that RL starts from, and the reference of the KL if `kl` is set."""

    def __init__(
        self, folder: Path, config: TrainingConfig, ranks: Ranks, seed: int = 0, publisher: Publisher | None = None
    ) -> None:
        torch.set_num_threads(config.threads)
        torch.manual_seed(seed)
        if ranks.device.type == "cuda":
            torch.set_float32_matmul_precision("high")  # TF32 where float32 is asked for; never exercised
        self.folder, self.config, self.ranks, self._publisher = folder, config, ranks, publisher
        algorithm = config.algorithm
        self._loss = losses.LOSSES.find(algorithm.loss)
        whole = self._loss in losses.Traits.one_ratio_per_sequence
        found = find(algorithm.correction, one_ratio_per_sequence=whole)
        self._corrections = [] if self._loss in losses.Traits.corrects_itself else found
        self.updates = 0
        self.policy: Strategy = PolicyModel(folder, ranks, config)
        self.optimizer = make_optimizer(self.policy, config)
        self.reference: Scorer | None = None
        if algorithm.kl > 0 or self._loss in losses.Traits.needs_reference:
            self.reference = self.policy.base() or PolicyModel(folder, ranks, config, trained=False)
        self.disk = ThreadPoolExecutor(1, "checkpoint")
        self._written: Future[None] | None = None

    def follow(self) -> None:
        """On a rank other than 0: carry out orders of rank 0 until it shuts down. Raises RanksLost."""
        try:
            while True:
                match msgspec.msgpack.decode(self.ranks.receive(), type=Order):
                    case Learn() as order:
                        self.learn(order)
                    case Imitate() as order:
                        self.imitate(order)
                    case Gather():
                        self.gather()
                    case Publish() as order:
                        self.publish(order)
                    case Save() as order:
                        self.save(order)
                    case Verify() as order:
                        self.verify(order)
                    case Restore() as order:
                        self.restore(order)
                    case Heartbeat():
                        pass
                    case Shutdown():
                        return
        except Exception as error:
            raise self.ranks.lost(error) from error

    def learn(self, order: Learn) -> StepTotals:
        """One update per mini-batch, in every epoch; the first that is not finite is the last."""
        totals = StepTotals(order.cells, self.ranks.device)
        with self.ranks.device:
            share = self.policy.shares_prompts
            batches = [[micro_batch(items, share=share) for items in one.passes] for one in order.mini_batches]
        self._score_before(batches, totals)
        updates = [*zip(batches, order.mini_batches, strict=True)] * self.config.epochs
        for micros, mini_batch in updates:
            rate = learning_rate(self.config, order.step, self.updates) * mini_batch.evidence
            self._update(sum(self._backward(micro, totals) for micro in micros), rate, totals)
            if totals.skipped:
                break
        totals.merge(self.ranks)
        return totals

    @torch.no_grad()
    def _score_before(self, batches: Sequence[Sequence[MicroBatch]], totals: StepTotals) -> None:
        """Logprobs of the reference, and of the policy before its first update. That update's own forward pass has
        those of its mini-batch; the others need one more."""
        for number, micros in enumerate(batches):
            for micro in micros:
                if self.reference is not None:
                    micro.reference = micro.of_targets(self.reference.logprobs(micro.packed)[0])
                if number > 0:
                    micro.proximal, entropy, _ = self._scored(micro)
                    self._claim(micro)
                    totals.add_first_pass(entropy, micro, measure(*self._correct(micro)))

    def _scored(self, micro: MicroBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logprob and entropy of every trained token, and the logprobs of the teacher's likeliest tokens there."""
        logprobs, entropy = self.policy.logprobs(micro.packed)
        if micro.teacher_top is None:
            return logprobs, entropy, None
        rows = logprobs.view(-1, 1 + micro.teacher_top.shape[1])
        return rows[:, 0], micro.of_targets(entropy), rows[:, 1:]

    def _claim(self, micro: MicroBatch) -> None:
        """Pairs were sampled by nobody: they count as the policy's own, so that there is neither gap nor staleness."""
        if self._loss in losses.Traits.of_pairs and micro.proximal is not None:
            micro.behaviour = micro.proximal

    def _correct(self, micro: MicroBatch) -> tuple[CorrectionInputs, Tensor]:
        """The factor of each sampled token's loss."""
        assert micro.proximal is not None
        inputs = CorrectionInputs(
            old_logprobs=micro.of_sampled(micro.proximal),
            engine_logprobs=micro.of_sampled(micro.behaviour),
            advantages=micro.of_sampled(micro.advantage),
            sequences=micro.of_sampled(micro.sequence),
            turns=micro.of_sampled(micro.turn),
            config=self.config.algorithm.correction,
        )
        return inputs, correct(self._corrections, inputs)

    def imitate(self, order: Imitate) -> StepTotals:
        """One update on the cross entropy of the trained tokens."""
        totals, loss = StepTotals(device=self.ranks.device), 0.0
        for examples in order.passes:
            with self.ranks.device:
                packed = pack_examples(examples)
            share = -order.weight * self.policy.logprobs(packed)[0].sum()
            share.backward()  # type: ignore[no-untyped-call]
            loss += share.item()
        self._update(loss, order.rate, totals)
        return totals

    def _update(self, loss: float, rate: float, totals: StepTotals) -> None:
        """Update on the gradients of all passes, whose loss on this rank is `loss`. Loss and norm are those of all
        ranks, so an update that is not finite on one is skipped by all."""
        (loss,) = self.ranks.all_reduce([loss])
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
        current, entropy, top = self._scored(micro)
        first = micro.proximal is None
        if micro.proximal is None:
            micro.proximal = current.detach()
            self._claim(micro)
        stale, factor = self._correct(micro)
        of = micro.of_sampled
        inputs = losses.LossInputs(
            logprobs=of(current),
            old_logprobs=stale.old_logprobs,
            engine_logprobs=stale.engine_logprobs,
            advantages=stale.advantages,
            sequences=stale.sequences,
            config=algorithm,
            reference_logprobs=None if micro.reference is None else of(micro.reference),
            teacher_logprobs=micro.teacher,
            top_logprobs=top,
            teacher_top_logprobs=micro.teacher_top,
        )
        outcome = losses.policy_loss(self._loss, inputs)
        loss = of(micro.weight) * factor * outcome.loss
        kl = None
        if inputs.reference_logprobs is not None and algorithm.kl > 0:
            kl = losses.weighted_kl(inputs, inputs.reference_logprobs, factor)
            loss = loss + algorithm.kl * of(micro.anchor) * kl
        if algorithm.entropy > 0:
            loss = loss - algorithm.entropy * of(micro.weight) * of(entropy)
        total = loss.sum()
        if micro.imitate is not None:
            total = total - (micro.imitate * current).sum()
        load = self.policy.expert_load()
        if load is not None:
            totals.add_experts(load, empty=not len(micro.behaviour))
            if algorithm.expert_balance > 0:
                total = total + algorithm.expert_balance * micro.weight.sum() * load.balance
        total.backward()  # type: ignore[no-untyped-call]
        totals.add_pass(outcome.clipped, kl)
        if outcome.margins is not None:
            totals.add_pairs(outcome.margins)
        if first:
            totals.add_first_pass(entropy, micro, measure(stale, factor))
        return total.item()

    def gather(self) -> dict[str, Tensor]:
        """On rank 0 all weights, as copies if they are sharded; on other ranks none: each is dropped at once."""
        whole = ((name, self.ranks.full_tensor(tensor)) for name, tensor in self.policy.parameters().items())
        return {name: tensor for name, tensor in whole if self.ranks.rank == 0}

    def publish(self, order: Publish) -> None:
        """Each rank writes its shard, at the same time as the others, under the names that the weights have on disk."""
        assert self._publisher is not None
        aliases = {
            self._disk_name(name): self._disk_name(owner)
            for name, owner in self.policy.names().items()
            if name != owner
        }
        self._publisher.publish(order.version, order.id, published(self.policy, self.ranks), aliases)
        self.ranks.post(order.id, msgspec.json.encode(self._publisher.digests).decode())

    def _disk_name(self, name: str) -> str:
        """Of a tensor that is the same on disk and in memory, as tied ones are."""
        (one,) = self.policy.on_disk(name, ())
        return one.name

    def steps(self) -> dict[str, float]:
        """Optimizer steps of each parameter that has any."""
        state = self.optimizer.state
        return {name: state[p]["step"].item() for name, p in self.policy.parameters().items() if p in state}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What a checkpoint holds, under `kind/name of the parameter`. The reference is the model that training starts
        from, so it need not be in there."""
        for name, tensor in {**self.policy.parameters(), **self.policy.buffers()}.items():
            yield f"{POLICY}/{name}", tensor
        for name, parameter in self.policy.parameters().items():
            for kind, moment in read_state(self.optimizer, parameter).items():
                if kind != "step":
                    yield f"{kind}/{name}", moment

    def save(self, order: Save) -> None:
        """Copy what this rank writes to host memory, and write it while training goes on. One save at a time."""
        if self._written is not None:
            wait([self._written])
        blocks = {}
        for name, tensor in self.tensors():
            part = block(tensor)
            if part.values.numel() and is_owner(tensor, self.ranks.rank, self.ranks.layout.tensor):
                copied = part.values.to("cpu", copy=True, memory_format=torch.contiguous_format)
                blocks[name] = Block(part.shape, part.offset, copied)
        self._written = self.disk.submit(self._write, order, blocks)

    def _write(self, order: Save, blocks: dict[str, Block]) -> None:
        fault = ""
        try:
            write_blocks(Path(order.folder) / file_name(self.ranks.rank), blocks)
        except Exception as error:  # rank 0 waits for the outcome, whatever it is
            fault = f"rank {self.ranks.rank}: {error or type(error).__name__}"
        self.ranks.post(order.id, fault)

    def verify(self, order: Verify) -> None:
        files = sorted(Path(order.folder).glob(FILES))
        self.ranks.post(order.id, damaged(files[self.ranks.rank :: self.ranks.size]))

    @torch.no_grad()
    def restore(self, order: Restore) -> None:
        """Each rank reads only the blocks that it has."""
        with BlockReader(Path(order.folder)) as reader:
            for name, tensor in {**self.policy.parameters(), **self.policy.buffers()}.items():
                reader.fill(f"{POLICY}/{name}", tensor)
            self.updates = order.updates
            self.optimizer.state.clear()
            for name, parameter in self.policy.parameters().items():
                if name in order.steps:
                    state = {"step": torch.tensor(order.steps[name])}
                    for kind in moments(self.optimizer, parameter):
                        state[kind] = reader.fill(f"{kind}/{name}", torch.zeros_like(parameter))
                    write_state(self.optimizer, parameter, state)
        self.ranks.meet()


def published(policy: Strategy, ranks: Ranks) -> list[TensorShard]:
    """What this rank publishes: the shares of all ranks have every element exactly once. All ranks call it."""
    shards = []
    for name, tensor in {**policy.parameters(), **policy.buffers()}.items():
        values, start = ranks.local_shard(tensor)
        for part, run, at in cut(policy.on_disk(name, tensor.shape), values, start):
            shards.append(TensorShard(part.name, part.shape, run, at))
    return shards


def clip_grads(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Scale the gradients by `factor`, if it is below 1."""
    if factor < 1.0:
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_([grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads], factor)
