"""One rank of a trainer: its shard of the policy, the optimizer and the passes of a step.

Every method runs on all ranks at the same time, on an order of rank 0.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import msgspec
import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from rollart.config import AlgorithmConfig, TrainingConfig
from rollart.core.types import Example
from rollart.models.disk_names import cut
from rollart.training import losses
from rollart.training.algorithms import Algorithms
from rollart.training.block_files import FILES, BlockReader, damaged, file_name, write_blocks
from rollart.training.corrections import CorrectionInputs, correct, measure
from rollart.training.critic import Critic, ValueItem
from rollart.training.metrics import StepTotals
from rollart.training.microbatch import MicroBatch, TrainSample, micro_batch, pack_examples
from rollart.training.model_state import TrainedModel
from rollart.training.optimizers import learning_rate, make_optimizer
from rollart.training.policy import PolicyModel
from rollart.training.ranks import Ranks
from rollart.training.shards import Block, block, is_owner
from rollart.training.strategy import Scorer, Strategy
from rollart.training.value_models import RewardModel
from rollart.weights.publish import Publisher, TensorShard

POLICY = "policy"  # the kind of the weights in a checkpoint; the others are moments of the optimizer


class MiniBatch(Struct, frozen=True):
    """A rank's passes for one update, whose learning rate is multiplied by `evidence`."""

    passes: list[list[TrainSample]]
    evidence: float


class Learn(Struct, frozen=True, tag=True):
    """The updates of an epoch; all ranks have as many, with as many passes in each. `cells` is the number of cells. Not
    `policy`: the critic alone is trained. Not `update`: nothing is, the losses are only measured."""

    step: int
    mini_batches: list[MiniBatch]
    cells: int
    policy: bool = True
    update: bool = True


class Assess(Struct, frozen=True, tag=True):
    """A rank's passes of the critic over a batch with `size` action tokens."""

    passes: list[list[ValueItem]]
    size: int


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
    critic_updates: int = 0


class Heartbeat(Struct, frozen=True, tag=True):
    """Rank 0 is alive."""


class Shutdown(Struct, frozen=True, tag=True):
    """Rank 0 exits normally."""


Order = Learn | Assess | Imitate | Gather | Publish | Save | Verify | Restore | Heartbeat | Shutdown


class Learner:
    """`folder` is the Hugging Face model that RL starts from, and the reference of the KL if `kl` is set. `tasks` has
    the algorithms of those that have one of their own."""

    def __init__(
        self,
        folder: Path,
        config: TrainingConfig,
        ranks: Ranks,
        seed: int = 0,
        publisher: Publisher | None = None,
        tasks: Mapping[str, AlgorithmConfig] | None = None,
    ) -> None:
        torch.set_num_threads(config.thread_count)
        torch.manual_seed(seed)
        if ranks.device.type == "cuda":
            torch.set_float32_matmul_precision("high")  # TF32 where float32 is asked for; never exercised
        self.folder, self.config, self.ranks, self._publisher = folder, config, ranks, publisher
        self.algorithms = Algorithms(config.algorithm, tasks)
        self.policy: Strategy = (RewardModel if self.algorithms.of_scores else PolicyModel)(folder, ranks, config)
        self.state = TrainedModel(POLICY, "", self.policy, make_optimizer(self.policy, config))
        self.critic = Critic(folder, ranks, config) if self.algorithms.needs_critic else None
        self.reference: Scorer | None = None
        if self.algorithms.needs_reference:
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
                    case Assess() as order:
                        self.assess(order)
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
        self._score_before(batches, totals, first=0 if order.policy else -1)
        if not order.update:
            with torch.no_grad():
                for micro in (micro for micros in batches for micro in micros):
                    self._loss(micro, totals)
            totals.merge(self.ranks)
            return totals
        updates = [*zip(batches, order.mini_batches, strict=True)] * self.config.epochs
        for micros, mini_batch in updates if order.policy else ():
            rate = learning_rate(self.config, order.step, self.state.updates) * mini_batch.evidence
            self._update(sum(self._backward(micro, totals) for micro in micros), rate, totals)
            if totals.skipped:
                break
        if self.critic is not None:
            totals.value_loss = self.critic.learn(order.step, batches)
        totals.merge(self.ranks)
        return totals

    def assess(self, order: Assess) -> NDArray[np.float32]:
        """What the critic says before every action token of a batch, on all ranks."""
        assert self.critic is not None
        return self.critic.values(order.passes, order.size)

    @torch.no_grad()
    def _score_before(self, batches: Sequence[Sequence[MicroBatch]], totals: StepTotals, first: int) -> None:
        """Logprobs of the reference, and of the policy before its first update. That update's own forward pass has
        those of its mini-batch, number `first`; the others need one more."""
        for number, micros in enumerate(batches):
            for micro in micros:
                if self.reference is not None:
                    micro.reference = micro.of_targets(self.reference.logprobs(micro.packed)[0])
                if number != first:
                    micro.proximal, entropy, _ = self._scored(micro)
                    self._claim(micro)
                    totals.add_first_pass(entropy, micro)
                    for each in micro.algorithms():
                        totals.add_stale(measure(*self._correct(micro, each)))

    def _scored(self, micro: MicroBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logprob and entropy of every trained token, and the logprobs of the teacher's likeliest tokens there."""
        logprobs, entropy = self.policy.logprobs(micro.packed)
        if micro.teacher_top is None:
            return logprobs, entropy, None
        rows = logprobs.view(-1, 1 + micro.teacher_top.shape[1])
        return rows[:, 0], micro.of_targets(entropy), rows[:, 1:]

    def _claim(self, micro: MicroBatch) -> None:
        """Pairs were sampled by nobody: they count as the policy's own, so that there is neither gap nor staleness."""
        if self.algorithms.of_pairs and micro.proximal is not None:
            micro.behaviour = micro.proximal

    def _correct(self, micro: MicroBatch, number: int) -> tuple[CorrectionInputs, Tensor]:
        """The factor of the loss of each sampled token that one algorithm trains."""
        assert micro.proximal is not None
        algorithm, of = self.algorithms.all[number], micro.selector(number)
        inputs = CorrectionInputs(
            old_logprobs=of(micro.proximal),
            engine_logprobs=of(micro.behaviour),
            advantages=of(micro.advantage),
            sequences=of(micro.sequence),
            turns=of(micro.turn),
            config=algorithm.config.correction,
        )
        return inputs, correct(algorithm.corrections, inputs)

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
        """Update the policy on the gradients of all passes, whose loss on this rank is `loss`."""
        loss, norm, finite = self.state.update(loss, rate, self.config.grad_clip, self.ranks)
        totals.add_update(loss, norm, rate)
        totals.skipped = totals.skipped or not finite

    def _backward(self, micro: MicroBatch, totals: StepTotals) -> float:
        """Add the gradient of one micro-batch and return its share of the loss."""
        share, logprobs = self._loss(micro, totals)
        logprobs.retain_grad()
        share.backward()  # type: ignore[no-untyped-call]
        totals.add_slopes(logprobs.grad, micro)
        return share.item()

    def _loss(self, micro: MicroBatch, totals: StepTotals) -> tuple[Tensor, Tensor]:
        """The share of one micro-batch, and the logprobs that it follows from."""
        current, entropy, top = self._scored(micro)
        first = micro.proximal is None
        if micro.proximal is None:
            micro.proximal = current.detach()
            self._claim(micro)
            totals.add_first_pass(entropy, micro)
        total = current.new_zeros(())
        for number in micro.algorithms():
            stale, factor = self._correct(micro, number)
            total = total + self._policy_loss(micro, number, (current, entropy, top), (stale, factor), totals)
            if first:
                totals.add_stale(measure(stale, factor))
        if micro.imitate is not None:
            total = total - (micro.imitate * current).sum()
        load, balance = self.policy.expert_load(), self.config.algorithm.expert_balance
        if load is not None:
            totals.add_experts(load, empty=not len(micro.behaviour))
            if balance > 0:
                total = total + balance * micro.weight.sum() * load.balance
        return total, current

    def _policy_loss(
        self,
        micro: MicroBatch,
        number: int,
        scored: tuple[Tensor, Tensor, Tensor | None],
        corrected: tuple[CorrectionInputs, Tensor],
        totals: StepTotals,
    ) -> Tensor:
        """The loss of the sampled tokens that one algorithm trains."""
        algorithm, of = self.algorithms.all[number], micro.selector(number)
        config, (current, entropy, top), (stale, factor) = algorithm.config, scored, corrected
        inputs = losses.LossInputs(
            logprobs=of(current),
            old_logprobs=stale.old_logprobs,
            engine_logprobs=stale.engine_logprobs,
            advantages=stale.advantages,
            sequences=stale.sequences,
            config=config,
            reference_logprobs=None if micro.reference is None else of(micro.reference),
            teacher_logprobs=None if micro.teacher is None else of(micro.teacher),
            top_logprobs=None if top is None else of(top),
            teacher_top_logprobs=None if micro.teacher_top is None else of(micro.teacher_top),
        )
        outcome = losses.policy_loss(algorithm.loss, inputs)
        loss = of(micro.weight) * factor * outcome.loss
        kl = None
        if inputs.reference_logprobs is not None and config.kl > 0:
            kl = losses.weighted_kl(inputs, inputs.reference_logprobs, factor)
            loss = loss + config.kl * of(micro.anchor) * kl
        if config.entropy > 0:
            loss = loss - config.entropy * of(micro.weight) * of(entropy)
        totals.add_pass(of(micro.cell), loss, outcome.clipped, kl)
        if outcome.margins is not None:
            totals.add_pairs(outcome.margins)
        return loss.sum()

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

    def models(self) -> list[TrainedModel]:
        """What a checkpoint holds. The reference is the model that training starts from, so it need not be there."""
        return [self.state, *([] if self.critic is None else [self.critic.state])]

    def save(self, order: Save) -> None:
        """Copy what this rank writes to host memory, and write it while training goes on. One save at a time."""
        if self._written is not None:
            wait([self._written])
        blocks = {}
        for name, tensor in (each for model in self.models() for each in model.tensors()):
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

    def restore(self, order: Restore) -> None:
        """Each rank reads only the blocks that it has."""
        with BlockReader(Path(order.folder)) as reader:
            for model, updates in zip(self.models(), (order.updates, order.critic_updates), strict=False):
                model.restore(reader, updates, order.steps)
        self.ranks.meet()


def published(policy: Strategy, ranks: Ranks) -> list[TensorShard]:
    """What this rank publishes: the shares of all ranks have every element exactly once. All ranks call it."""
    shards = []
    for name, tensor in {**policy.parameters(), **policy.buffers()}.items():
        values, start = ranks.local_shard(tensor)
        for part, run, at in cut(policy.on_disk(name, tensor.shape), values, start):
            shards.append(TensorShard(part.name, part.shape, run, at))
    return shards
