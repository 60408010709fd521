"""RL of an imitated policy: it learns which latent noise to act from, and imitates its own successes.

The policy makes several candidates for a chunk, each from a latent noise of its own, in one pass. A scorer gives each a
logit, and the chunk is drawn from their softmax: the log-probability of a choice is exact, the policy gradient moves
the scorer alone, and the tuned policy starts as the imitated one. Losses and advantages are those for language, with a
choice of a chunk in place of a token.

Successes of the policy join its demonstrations, and the network goes on imitating both. That is no policy gradient, so
it has no staleness bound: an episode that succeeded remains one that succeeds.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from safetensors.torch import load, save
from torch import Tensor

from rollart.config import AlgorithmConfig
from rollart.config.robots import RobotRunFile, TuningConfig
from rollart.core.errors import ConfigError
from rollart.core.seeds import seed_of
from rollart.robots.chunks import ImitationData
from rollart.robots.learner import SCORER, DivergedError, ImitationLearner, LearnerConfig, TrainedPolicy
from rollart.robots.network import CandidateScorer
from rollart.training.losses import LOSSES, LossInputs, Traits, policy_loss

_LR_WARMUP = 10  # optimizer steps: Adam knows no gradients yet


@dataclass(frozen=True)
class ChunkBatch:
    """What an update learns from. One row for each chunk: `conditions` [N, C], `candidates` [N, K, D], the one that was
    `chosen`, its `logprobs` by the policy that acted, `advantages`, and the number of its episode in `sequences`. Of
    the successes, one row for each step: `imitated` conditions and `imitated_chunks`. All scaled."""

    conditions: Tensor
    candidates: Tensor
    chosen: Tensor
    logprobs: Tensor
    advantages: Tensor
    sequences: Tensor
    imitated: Tensor
    imitated_chunks: Tensor

    def encode(self) -> bytes:
        data: bytes = save({field.name: getattr(self, field.name).contiguous() for field in fields(self)})
        return data

    @classmethod
    def decode(cls, data: bytes) -> "ChunkBatch":
        return cls(**load(data))


def learner_config(run: RobotRunFile) -> LearnerConfig:
    """That of the imitation, with the optimizer's numbers of the tuning."""
    tuning = run.tuning
    changes = {
        "steps": tuning.optimizer_steps,
        "lr": tuning.lr,
        "lr_warmup": _LR_WARMUP,
        "ema": tuning.ema,
        "checkpoint_every": tuning.checkpoint_every,
    }
    training = run.training.model_copy(update=changes)
    return LearnerConfig(policy=run.policy, control=run.control, network=run.network, training=training)


def check_loss(name: str) -> None:
    """Raises ConfigError if it is unknown, or needs what chunks do not have."""
    found = LOSSES.find(name)
    if found in Traits.of_pairs | Traits.needs_teacher | Traits.needs_reference:
        raise ConfigError(f"tuning.loss: {name} needs a teacher, a reference or pairs, and there are none; use ppo")


class TuningLearner(ImitationLearner):
    """Starts from `policy`, in a stack of one."""

    def __init__(
        self, config: LearnerConfig, tuning: TuningConfig, policy: TrainedPolicy, data: ImitationData, seed: int
    ) -> None:
        super().__init__(config, [data], [seed_of(seed, "tuning")])
        self.tuning = tuning
        with torch.no_grad():
            for name, value in policy.network.named_parameters():
                self.network.get_parameter(name).copy_(value)
                self.averaged[name].copy_(value)
        sizes = data.conditions.shape[1], data.chunks.shape[1]
        self.scorer = CandidateScorer(*sizes, config.network.width, self.draws.generators[0])
        self.scorer_optimizer = torch.optim.AdamW(
            self.scorer.parameters(), lr=tuning.scorer_lr, weight_decay=tuning.scorer_decay, fused=True
        )
        self._demonstrated = len(data.chunks)
        self._loss = LOSSES.find(tuning.loss)
        self._algorithm = AlgorithmConfig(loss=tuning.loss, clip_low=tuning.clip, clip_high=tuning.clip)

    def update(self, batch: ChunkBatch) -> dict[str, float]:
        """One version. Raises DivergedError."""
        self._imitate(batch.imitated, batch.imitated_chunks)
        totals = dict.fromkeys(("imitation_loss", "policy_loss", "clipped", "kl"), 0.0)
        for _ in range(self.tuning.optimizer_steps):
            imitation = self._train_step().item() if self.tuning.imitate else self._skip_step()
            values = (imitation, *self._steer(batch))
            totals = {name: total + value for (name, total), value in zip(totals.items(), values, strict=True)}
        if not all(map(math.isfinite, totals.values())):
            raise DivergedError(f"the loss was not finite before step {self.step}; lower tuning.lr or tuning.scorer_lr")
        return {name: total / self.tuning.optimizer_steps for name, total in totals.items()}

    @property
    def _rate_step(self) -> int:
        """The schedule is that of one update: every version that acts has been annealed."""
        return self.step % self.tuning.optimizer_steps

    def logprobs(self, conditions: Tensor, candidates: Tensor, chosen: Tensor) -> Tensor:
        """Of choices [N] among candidates [N, K, D], by the current scorer, with gradient."""
        scores: Tensor = self.scorer(conditions, candidates)
        return scores.log_softmax(-1).gather(-1, chosen[:, None])[:, 0]

    def _skip_step(self) -> float:
        self.step += 1
        return 0.0

    def _steer(self, batch: ChunkBatch) -> tuple[float, float, float]:
        """One step of the scorer on some chunks of the batch: the loss, the share that was clipped, and the KL to the
        policy that acted."""
        (rows,) = self.draws.rows([len(batch.chosen)], self.config.training.batch)
        old = batch.logprobs[rows]
        inputs = LossInputs(
            logprobs=self.logprobs(batch.conditions[rows], batch.candidates[rows], batch.chosen[rows]),
            old_logprobs=old,
            engine_logprobs=old,
            advantages=batch.advantages[rows],
            sequences=batch.sequences[rows],
            config=self._algorithm,
        )
        found = policy_loss(self._loss, inputs)
        loss = found.loss.mean()
        self.scorer_optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.scorer.parameters(), self.config.training.clip)
        self.scorer_optimizer.step()
        drift = inputs.logprobs.detach() - old
        return loss.item(), found.clipped.float().mean().item(), (drift.exp() - 1 - drift).mean().item()

    def _imitate(self, conditions: Tensor, chunks: Tensor) -> None:
        """From now on; beyond `keep`, the oldest successes are forgotten, demonstrations never."""
        start = self._demonstrated + max(0, len(self._chunks) + len(chunks) - self._demonstrated - self.tuning.keep)
        shown = slice(self._demonstrated)
        kept = torch.cat([self._conditions, conditions]), torch.cat([self._chunks, chunks])
        self._conditions, self._chunks = (torch.cat([rows[shown], rows[start:]]) for rows in kept)
        self._counts = [len(self._chunks)]

    def _about(self) -> dict[str, int]:
        return {"candidates": self.tuning.candidates}

    def _scorer_tensors(self) -> dict[str, Tensor]:
        return {f"{SCORER}{name}": value.detach() for name, value in self.scorer.named_parameters()}

    def _more_tensors(self) -> dict[str, Tensor]:
        own = slice(self._demonstrated, None)
        tensors = {"own.conditions": self._conditions[own].clone(), "own.chunks": self._chunks[own].clone()}
        for name, value in self.scorer.named_parameters():
            moments = {f"{SCORER}{kind}.{name}": moment for kind, moment in self.scorer_optimizer.state[value].items()}
            tensors |= {f"{SCORER}{name}": value.detach(), **moments}
        return tensors

    def _restore_more(self, tensors: Mapping[str, Tensor]) -> None:
        self._imitate(tensors["own.conditions"], tensors["own.chunks"])
        with torch.no_grad():
            for name, value in self.scorer.named_parameters():
                value.copy_(tensors[f"{SCORER}{name}"])
                kinds = ("step", "exp_avg", "exp_avg_sq")
                found = {kind: tensors[f"{SCORER}{kind}.{name}"].clone() for kind in kinds}
                self.scorer_optimizer.state[value] = found
