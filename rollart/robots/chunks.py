"""Demonstrations as training data: windows of observations and the chunks of actions that follow, scaled to [-1, 1]."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from rollart.config.robots import ControlConfig
from rollart.robots.demonstrations import Demonstration, DemonstrationError, Floats

_CONSTANT = (
    2.5e-3  # half the span: observations that vary less than this carry no information, only noise to be amplified
)
_MAX_SCALED = 3.0  # what was never demonstrated stays within sight


@dataclass(frozen=True)
class Scaling:
    """From numbers of the environment to about [-1, 1] and back, by gain and bias. Constant observations become 0."""

    observation_gain: Tensor
    observation_bias: Tensor
    action_gain: Tensor
    action_bias: Tensor

    @classmethod
    def fit(cls, demonstrations: Sequence[Demonstration], cloud: int = 0) -> Self:
        """`cloud`: points at the end of an observation, which have one scale for each of their three coordinates."""
        seen = torch.from_numpy(np.concatenate([one.observations for one in demonstrations]))
        done = torch.from_numpy(np.concatenate([one.actions for one in demonstrations]))
        (seen_middle, seen_half), (done_middle, done_half) = _range(seen), _range(done)
        if cloud:
            middle, half = _range(seen[:, -3 * cloud :].reshape(-1, 3))
            seen_middle = torch.cat([seen_middle[: -3 * cloud], middle.repeat(cloud)])
            seen_half = torch.cat([seen_half[: -3 * cloud], half.repeat(cloud)])
        gain = torch.where(seen_half < _CONSTANT, 0.0, 1 / seen_half)
        half = torch.where(done_half < _CONSTANT, 1.0, done_half)
        return cls(gain, -seen_middle * gain, half, done_middle)

    @property
    def spans(self) -> Tensor:
        """Half the range of each observation that was demonstrated; 0 of one that is constant."""
        return torch.where(self.observation_gain > 0, 1 / self.observation_gain, 0.0)

    def observations(self, values: Tensor) -> Tensor:
        """[..., O] to the policy's numbers."""
        return torch.addcmul(self.observation_bias, values, self.observation_gain).clamp_(-_MAX_SCALED, _MAX_SCALED)

    def actions(self, values: Tensor) -> Tensor:
        """[..., A] to the policy's numbers."""
        return (values - self.action_bias) / self.action_gain

    def commands(self, values: Tensor) -> Tensor:
        """The inverse of `actions`."""
        return torch.addcmul(self.action_bias, values, self.action_gain)

    def tensors(self) -> dict[str, Tensor]:
        return {f"scaling.{field.name}": getattr(self, field.name) for field in fields(self)}

    @classmethod
    def restore(cls, tensors: Mapping[str, Tensor]) -> Self:
        return cls(*(tensors[f"scaling.{field.name}"] for field in fields(cls)))


@dataclass(frozen=True)
class ImitationData:
    """`conditions` [N, history x O] and `chunks` [N, chunk x A], both scaled."""

    conditions: Tensor
    chunks: Tensor
    scaling: Scaling

    @classmethod
    def of(
        cls, demonstrations: Sequence[Demonstration], control: ControlConfig, scaling: Scaling | None = None
    ) -> Self:
        """One row for each step. The past before the start is the first observation; the last action goes on.
        Default: scaled by what was demonstrated. Raises DemonstrationError if there can be no points in it."""
        numbers = demonstrations[0].observations.shape[1]
        if numbers < 3 * control.cloud:
            raise DemonstrationError(
                f"the demonstrations observe {numbers} numbers, too few for {control.cloud} points; record them with "
                "`control.observation: points`"
            )
        scaling = scaling or Scaling.fit(demonstrations, control.cloud)
        seen, done = list[Floats](), list[Floats]()
        for one in demonstrations:
            before = np.repeat(one.observations[:1], control.history - 1, 0)
            after = np.repeat(one.actions[-1:], control.chunk - 1, 0)
            seen.append(_windows(np.concatenate([before, one.observations]), control.history))
            done.append(_windows(np.concatenate([one.actions, after]), control.chunk))
        conditions = scaling.observations(torch.from_numpy(np.concatenate(seen))).flatten(1)
        chunks = scaling.actions(torch.from_numpy(np.concatenate(done))).flatten(1)
        return cls(conditions, chunks, scaling)


def _range(values: Tensor) -> tuple[Tensor, Tensor]:
    """The middle of each column, and half of its span."""
    low, high = values.amin(0), values.amax(0)
    return (low + high) / 2, (high - low) / 2


def _windows(values: Floats, length: int) -> Floats:
    """[T, size] to [T - length + 1, length, size]."""
    return np.ascontiguousarray(sliding_window_view(values, length, axis=0).swapaxes(1, 2))
