"""Policies by name: each is one module, with its section of the run file in `rollart.config.robots`."""

from collections.abc import Callable
from typing import Any

from rollart.config.robots import AnyPolicyConfig
from rollart.robots.policies.base import RobotPolicy
from rollart.robots.policies.consistency import ConsistencyFlow
from rollart.robots.policies.ddim import Diffusion
from rollart.robots.policies.flow import FlowMatching
from rollart.robots.policies.meanflow import MeanFlow
from rollart.robots.policies.regression import Regression

POLICIES: dict[str, Callable[[Any], RobotPolicy]] = {
    "meanflow": MeanFlow,
    "consistency": ConsistencyFlow,
    "flow": FlowMatching,
    "ddim": Diffusion,
    "regression": Regression,
}


def policy_of(config: AnyPolicyConfig) -> RobotPolicy:
    return POLICIES[config.name](config)
