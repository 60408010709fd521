"""Losses: small functions of flat tensors with one entry per action token.

Three policies meet in them. The *behaviour* policy sampled the token; its logprobs come from the engine and may be some
versions old. The *proximal* policy is the trainer's at the start of the step. The *current* one is being updated. In
decoupled PPO the ratio current / proximal is clipped, and what proximal / behaviour calls for is a factor of its own
(`corrections.py`). On the first update of a step current and proximal are the same, so the ratio is 1 in value and only
its gradient counts.

A loss is added by writing it in `policy.py`, `preference.py` or `distillation.py` under `@LOSSES.register`. `rollart
check` reads the registry, so these modules do not import torch: the methods of tensors are enough.
"""

from rollart.training.losses import distillation, policy, preference
from rollart.training.losses.base import (
    LOSSES,
    Loss,
    LossInputs,
    PolicyLoss,
    Traits,
    kl_to_reference,
    policy_loss,
    token_weights,
    weighted_kl,
)

__all__ = [
    "LOSSES",
    "Loss",
    "LossInputs",
    "PolicyLoss",
    "Traits",
    "distillation",
    "kl_to_reference",
    "policy",
    "policy_loss",
    "preference",
    "token_weights",
    "weighted_kl",
]
