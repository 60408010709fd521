"""Imitation: one optimizer for a stack of policies, each with its own data, seed and moving average.

Everything is per member: batches, noise, the clipped norm of the gradient. So a member learns what it would alone, up
to rounding, and a checkpoint holds all that the next step depends on.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollart.config.base import Section
from rollart.config.robots import ControlConfig, ImitationConfig, NetworkConfig, PolicyChoice
from rollart.core.errors import RollartError
from rollart.core.seeds import seed_of
from rollart.models.folder import atomic_folder
from rollart.robots.chunks import ImitationData, Scaling
from rollart.robots.network import CandidateScorer, CloudShape, PolicyNetwork
from rollart.robots.policies import policy_of
from rollart.robots.policies.base import Draws, RobotPolicy

SCORER = "scorer."  # before the names of a scorer's weights
MANIFEST, STATE, POLICY = "checkpoint.json", "state.safetensors", "policy.json"
_BETAS = (0.95, 0.999)


class LearnerConfig(Section):
    """What all members of a stack have in common."""

    policy: PolicyChoice
    control: ControlConfig
    network: NetworkConfig
    training: ImitationConfig


def cloud_shape(control: ControlConfig, condition: int) -> CloudShape | None:
    """What a condition of this size has."""
    state = condition // control.history - 3 * control.cloud
    return CloudShape(control.history, state, control.cloud) if control.cloud else None


class DivergedError(RollartError):
    """The loss is not finite."""


class ImitationLearner:
    def __init__(self, config: LearnerConfig, data: Sequence[ImitationData], seeds: Sequence[int]) -> None:
        """One entry of `data` and `seeds` for each member."""
        self.config, self.data, self.step = config, data, 0
        self.draws = Draws([seed_of(seed, "imitation") for seed in seeds])
        self.policy: RobotPolicy = policy_of(config.policy)
        sizes = data[0].conditions.shape[1], data[0].chunks.shape[1]
        layers = config.network.width, config.network.layers
        self.network = PolicyNetwork(*sizes, *layers, self.draws.generators, cloud_shape(config.control, sizes[0]))
        self.averaged = {name: value.detach().clone() for name, value in self.network.named_parameters()}
        self.parameters = list(self.network.parameters())
        training = config.training
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=training.lr, weight_decay=training.weight_decay, betas=_BETAS, fused=True
        )
        self._counts = [len(one.chunks) for one in data]
        self._offsets = torch.tensor([0, *self._counts[:-1]]).cumsum(0)
        self._conditions = torch.cat([one.conditions for one in data])
        self._chunks = torch.cat([one.chunks for one in data])

    def train(self, steps: int) -> list[float]:
        """Returns the mean loss of each member. Raises DivergedError."""
        total = torch.zeros(len(self.data))
        for _ in range(steps):
            total += self._train_step()
        if not total.isfinite().all():
            raise DivergedError(f"the loss was not finite before step {self.step}; lower training.lr")
        return (total / max(1, steps)).tolist()

    def _train_step(self) -> Tensor:
        losses = self._imitation_losses()
        self._optimize(losses)
        return losses.detach()

    def _imitation_losses(self) -> Tensor:
        rows = torch.stack(self.draws.rows(self._counts, self.config.training.batch)) + self._offsets[:, None]
        return self.policy.loss(self.network, self._chunks[rows], self._conditions[rows], self.draws)

    def _optimize(self, losses: Tensor) -> None:
        """One step of the optimizer, from the loss of each member."""
        training = self.config.training
        for group in self.optimizer.param_groups:
            group["lr"] = training.lr * _rate(self._rate_step, training)
        self.optimizer.zero_grad()
        torch.autograd.backward(losses.sum())
        self._clip(training.clip)
        self.optimizer.step()
        self.step += 1
        decay = min(training.ema, self.step / (self.step + 9))
        torch._foreach_lerp_(list(self.averaged.values()), [one.detach() for one in self.parameters], 1 - decay)

    @property
    def _rate_step(self) -> int:
        """Where in the schedule of the learning rate it is."""
        return self.step

    def _clip(self, most: float) -> None:
        gradients = [one.grad for one in self.parameters if one.grad is not None]
        parts = torch.stack([torch.linalg.vector_norm(gradient.flatten(1), dim=1) for gradient in gradients])
        norms = torch.linalg.vector_norm(parts, dim=0)
        if bool((norms <= most).all()):
            return
        scale = (most / norms.clamp_min(most))[:, None, None]
        for gradient in gradients:
            gradient.mul_(scale)

    def save(self, path: Path) -> None:
        """A checkpoint: a folder that is complete or does not exist."""
        tensors = {f"network.{name}": value.detach() for name, value in self.network.named_parameters()}
        tensors |= {f"averaged.{name}": value for name, value in self.averaged.items()}
        for (name, _), moments in zip(self.network.named_parameters(), self._moments(), strict=True):
            tensors |= {f"{kind}.{name}": value for kind, value in moments.items()}
        tensors |= self._more_tensors()
        with atomic_folder(path) as folder:
            save_file({**tensors, "draws": self.draws.state()}, folder / STATE)
            about = {"step": self.step, "members": len(self.data), "config": self.config.model_dump(mode="json")}
            (folder / MANIFEST).write_bytes(msgspec.json.encode(about))

    def load(self, path: Path) -> None:
        """Go on from a checkpoint. Raises RollartError."""
        try:
            about = msgspec.json.decode((path / MANIFEST).read_bytes())
            tensors = load_file(path / STATE)
        except (OSError, ValueError, SafetensorError) as error:
            raise RollartError(f"the checkpoint {path} cannot be read: {error}") from error
        mine = self.config.model_dump(mode="json")
        changed = [key for key in ("policy", "control", "network") if about["config"][key] != mine[key]]
        if changed:
            raise RollartError(f"the checkpoint {path} was made with another `{changed[0]}`; start a new run")
        with torch.no_grad():
            for name, value in self.network.named_parameters():
                value.copy_(tensors[f"network.{name}"])
                self.averaged[name].copy_(tensors[f"averaged.{name}"])
                kinds = {kind: tensors[f"{kind}.{name}"].clone() for kind in ("step", "exp_avg", "exp_avg_sq")}
                self.optimizer.state[value] = kinds if about["step"] else {}
        self.step = about["step"]
        self.draws.restore(tensors["draws"])
        self._restore_more(tensors)

    def _about(self) -> dict[str, int]:
        """What else an exported policy says of itself."""
        return {}

    def _scorer_tensors(self) -> dict[str, Tensor]:
        """What else an exported policy has."""
        return {}

    def _more_tensors(self) -> dict[str, Tensor]:
        """What else a checkpoint holds."""
        return {}

    def _restore_more(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `_more_tensors`."""

    def _moments(self) -> list[dict[str, Tensor]]:
        return [dict(self.optimizer.state[one]) for one in self.parameters]

    def export(self, folders: Sequence[Path], tasks: Sequence[str]) -> None:
        """The policy of each member, by its moving average, as a folder that `TrainedPolicy` reads."""
        for member, (path, task) in enumerate(zip(folders, tasks, strict=True)):
            tensors = {name: value[member : member + 1].contiguous() for name, value in self.averaged.items()}
            tensors |= {**self.data[member].scaling.tensors(), **self._scorer_tensors()}
            about = {**self.config.model_dump(mode="json"), "task": task, "step": self.step, **self._about()}
            with atomic_folder(path) as folder:
                save_file(tensors, folder / STATE)
                (folder / POLICY).write_bytes(msgspec.json.encode(about))


@dataclass(frozen=True, slots=True)
class Proposal:
    """Chunks to choose from, scaled: the `condition` [..., C], `candidates` [..., K, D], made from as many latents, and
    their `scores` [..., K], which are logits. A policy that was not tuned has one candidate."""

    condition: Tensor
    candidates: Tensor
    scores: Tensor


class TrainedPolicy:
    """A policy that acts: histories of observations in, chunks of commands out. Raises RollartError."""

    def __init__(self, path: Path) -> None:
        try:
            about: dict[str, Any] = msgspec.json.decode((path / POLICY).read_bytes())
            tensors = load_file(path / STATE)
        except (OSError, ValueError, SafetensorError) as error:
            raise RollartError(f"{path} holds no policy of `rollart robots train`: {error}") from error
        self.task, self.step = str(about.pop("task")), int(about.pop("step"))
        self.count = int(about.pop("candidates", 1))
        self.config = LearnerConfig.model_validate(about)
        self.scaling = Scaling.restore(tensors)
        self.policy = policy_of(self.config.policy)
        self.actions = len(self.scaling.action_gain)
        self.observations = len(self.scaling.observation_gain)
        control, network = self.config.control, self.config.network
        sizes = control.history * self.observations, control.chunk * self.actions
        cloud = cloud_shape(control, sizes[0])
        self.network = PolicyNetwork(*sizes, network.width, network.layers, [torch.Generator()], cloud)
        self.network.load_state_dict({name: tensors[name] for name, _ in self.network.named_parameters()})
        self.network.requires_grad_(False)
        self.scorer = CandidateScorer(*sizes, network.width, torch.Generator()) if self.count > 1 else None
        if self.scorer is not None:
            named = {name: tensors[f"{SCORER}{name}"] for name, _ in self.scorer.named_parameters()}
            self.scorer.load_state_dict(named)
            self.scorer.requires_grad_(False)

    @torch.inference_mode()
    def propose(self, histories: Tensor, noise: Tensor) -> Proposal:
        """[B, history, O] and noise [B, `noise_size`] to what may be done, in one pass over all candidates."""
        condition = self.scaling.observations(histories).flatten(1)
        latents = noise.reshape(len(noise) * self.count, -1)
        rows = condition.repeat_interleave(self.count, 0)
        made = self.policy.sample(self.network, rows[None], latents[None])[0]
        candidates = made.reshape(len(noise), self.count, -1)
        scores = candidates.new_zeros(candidates.shape[:2])
        return Proposal(condition, candidates, scores if self.scorer is None else self.scorer(condition, candidates))

    def commands(self, chunk: Tensor) -> Tensor:
        """A scaled chunk [..., D] to commands [..., chunk, A]."""
        return self.scaling.commands(chunk.reshape(*chunk.shape[:-1], self.config.control.chunk, self.actions))

    def act(self, histories: Tensor, noise: Tensor) -> Tensor:
        """[B, history, O] and noise [B, `noise_size`] to the commands of the best candidate, [B, chunk, A]."""
        proposal = self.propose(histories, noise)
        best = proposal.scores.argmax(-1)
        return self.commands(proposal.candidates[torch.arange(len(best)), best])

    @property
    def noise_size(self) -> int:
        return self.count * self.config.control.chunk * self.actions


def _rate(step: int, training: ImitationConfig) -> float:
    """The learning rate's share: linear warmup, then a cosine to 0."""
    warm = min(1.0, (step + 1) / max(1, training.lr_warmup))
    return warm * (0.5 + 0.5 * math.cos(math.pi * min(1.0, step / training.steps)))
