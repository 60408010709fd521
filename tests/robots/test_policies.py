"""The losses and samplers of the policies, against exact derivatives and flows whose solution is known."""

import math

import pytest
import torch
from torch import Tensor

from rollart.config.robots import (
    AnyPolicyConfig,
    ConsistencyConfig,
    DiffusionConfig,
    FlowConfig,
    MeanFlowConfig,
    RegressionConfig,
)
from rollart.robots.network import PolicyNetwork
from rollart.robots.policies import policy_of
from rollart.robots.policies.base import Draws, adaptive, integrate
from rollart.robots.policies.meanflow import MeanFlow, direction_loss, dispersive_loss

ALL: list[AnyPolicyConfig] = [
    MeanFlowConfig(),
    MeanFlowConfig(derivative="jvp", predict="velocity", cosine=0.1, dispersive=0.5, guidance=2.0),
    ConsistencyConfig(),
    FlowConfig(),
    DiffusionConfig(),
    RegressionConfig(),
]
every_policy = pytest.mark.parametrize("config", ALL, ids=lambda config: config.name)


class DoubleDraws(Draws):
    def normal(self, *shape: int) -> Tensor:
        return super().normal(*shape).double()


def network(members: int = 2, condition: int = 3, chunk: int = 4, *, trained: bool = True) -> PolicyNetwork:
    """Of double precision, with a last layer that is not zero, as if it were trained."""
    generators = [torch.Generator().manual_seed(seed) for seed in range(members)]
    made = PolicyNetwork(condition, chunk, 16, 2, generators).double()
    if trained:
        torch.nn.init.normal_(made.leave.weight, generator=generators[0])
    return made


def points(members: int = 2, rows: int = 5, condition: int = 3, chunk: int = 4) -> tuple[Tensor, ...]:
    """z, r, t, a tangent and a condition."""
    draws = Draws(range(members))
    one, two = draws.uniform(rows).double(), draws.uniform(rows).double()
    z, tangent, seen = (draws.normal(rows, size).double() for size in (chunk, chunk, condition))
    return z, torch.minimum(one, two), torch.maximum(one, two).clamp_min(0.1), tangent, seen


@pytest.mark.parametrize("predict", ["chunk", "velocity"])
def test_dde_and_jvp_give_the_same_derivative(predict: str) -> None:
    made, at = network(), points()
    exact, differences = (
        MeanFlow(MeanFlowConfig(derivative=kind, predict=predict)).time_derivative(made, *at) for kind in ("jvp", "dde")
    )
    assert exact.abs().mean() > 0.1
    assert (exact - differences).norm() / exact.norm() < 1e-3


@pytest.mark.parametrize("predict", ["chunk", "velocity"])
def test_jvp_is_the_limit_of_finite_differences(predict: str) -> None:
    made, at = network(), points()
    exact = MeanFlow(MeanFlowConfig(derivative="jvp", predict=predict)).time_derivative(made, *at)
    errors = []
    for epsilon in (1e-2, 1e-3):
        near = MeanFlow(MeanFlowConfig(predict=predict, epsilon=epsilon)).time_derivative(made, *at)
        errors.append(((near - exact).norm() / exact.norm()).item())
    assert errors[1] < errors[0] / 50, "central differences converge with the square of the step"
    assert errors[1] < 1e-3


def test_the_gradient_of_the_meanflow_loss_is_that_of_finite_differences() -> None:
    made = network(members=1)
    policy = MeanFlow(MeanFlowConfig(flow_share=1.0, adaptive_power=0.0, cosine=0.1))  # no part without gradient
    x, seen = DoubleDraws([5]).normal(6, 4), DoubleDraws([6]).normal(6, 3)

    def loss() -> Tensor:  # with the same draws each time
        return policy.loss(made, x, seen, DoubleDraws([7])).sum()

    weight = made.blocks[0].up.weight
    (gradient,) = torch.autograd.grad(loss(), weight)
    direction, step = torch.randn_like(weight), 1e-5
    with torch.no_grad():
        weight += step * direction
        above = loss()
        weight -= 2 * step * direction
        below = loss()
    assert ((above - below) / (2 * step)).item() == pytest.approx((gradient * direction).sum().item(), rel=1e-5)


DEVIATION = 0.5


def _spread(t: Tensor) -> Tensor:
    """The deviation at time t; a point keeps its quantile, so it moves in proportion to this."""
    return (((1 - t) * DEVIATION) ** 2 + t**2).sqrt()


def known_mean_velocity(z: Tensor, r: Tensor, t: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
    apart = torch.where(t > r, t - r, 1.0)
    mean = (1 - _spread(r) / _spread(t)) / apart
    marginal = (t - (1 - t) * DEVIATION**2) / _spread(t) ** 2
    return torch.where(t > r, mean, marginal)[..., None] * z, z


def test_one_step_with_the_mean_velocity_is_many_small_steps_with_the_velocity() -> None:
    noise, seen = Draws([0]).normal(64, 3).double(), torch.zeros(1, 64, 1)
    one = integrate(known_mean_velocity, "velocity", seen, noise, 1, mean=True)
    many = integrate(known_mean_velocity, "velocity", seen, noise, 2000, mean=False)
    assert torch.allclose(one, noise * DEVIATION, atol=1e-12)
    assert (one - many).abs().max() < 2e-3


@pytest.mark.parametrize("kind", ["jvp", "dde"])
def test_the_known_mean_velocity_fulfils_the_meanflow_identity(kind: str) -> None:
    z, r, t, _, seen = points(condition=1)
    u = known_mean_velocity(z, r, t, seen)[0]
    marginal = known_mean_velocity(z, t, t, seen)[0]
    policy = MeanFlow(MeanFlowConfig(predict="velocity", derivative=kind))
    change = policy.time_derivative(known_mean_velocity, z, r, t, marginal, seen)
    assert torch.allclose(u, marginal - (t - r)[..., None] * change, atol=1e-5)


@pytest.mark.parametrize("predict", ["chunk", "velocity"])
def test_x_and_velocity_prediction_describe_the_same_flow(predict: str) -> None:
    def chunk(z: Tensor, r: Tensor, t: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        return z - t[..., None] * known_mean_velocity(z, r, t, condition)[0], z

    made = chunk if predict == "chunk" else known_mean_velocity
    noise = Draws([0]).normal(8, 3).double()
    assert torch.allclose(integrate(made, predict, noise, noise, 1, mean=True), noise * DEVIATION)


@every_policy
def test_every_policy_gives_each_member_its_own_loss(config: AnyPolicyConfig) -> None:
    """Without the other member, the first has the same loss and gradient."""
    policy, x, seen = policy_of(config), Draws([1, 2]).normal(8, 4), Draws([3, 4]).normal(8, 3)
    both, alone = network().float(), network(members=1, trained=False).float()
    alone.load_state_dict({name: value[:1] for name, value in both.state_dict().items()})
    losses = policy.loss(both, x, seen, Draws([5, 6]))
    loss = policy.loss(alone, x[:1], seen[:1], Draws([5]))
    assert losses.shape == (2,) and losses[0] != losses[1]
    assert loss.item() == pytest.approx(losses[0].item(), rel=1e-4)
    losses.sum().backward()
    loss.sum().backward()
    ours, mine = both.enter.weight.grad, alone.enter.weight.grad
    assert ours is not None and mine is not None
    assert torch.allclose(ours[:1], mine, atol=1e-5)


@every_policy
def test_every_policy_samples_a_chunk_of_the_shape_of_its_noise(config: AnyPolicyConfig) -> None:
    noise = Draws([0, 1]).normal(5, 4).double()
    made = policy_of(config).sample(network(), Draws([2, 3]).normal(5, 3).double(), noise)
    assert made.shape == noise.shape and made.isfinite().all()


def test_ddim_with_a_perfect_network_returns_the_clean_chunk() -> None:
    x = torch.tensor([[[0.3, -0.7]]])
    found = policy_of(DiffusionConfig()).sample(lambda z, r, t, seen: (x, z), x, torch.randn(1, 1, 2))
    assert torch.allclose(found, x, atol=1e-6)


def test_consistency_vanishes_for_straight_paths() -> None:
    """One chunk for all noise: the velocity (z - x) / t is the same along each path."""
    x = torch.full((1, 16, 2), 0.5)

    def exact(z: Tensor, r: Tensor, t: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        return (z - x) / t.clamp_min(1e-6)[..., None], z

    assert policy_of(ConsistencyConfig(velocity_weight=1.0)).loss(exact, x, x, Draws([0])).item() < 1e-6


def test_the_direction_loss_does_not_depend_on_the_speed() -> None:
    v = torch.tensor([[[1.0, 0.0]]])
    across = torch.tensor([[[0.0, 1e-3]]])
    assert direction_loss(1e-3 * v, v).item() == pytest.approx(0.0, abs=1e-5)
    assert direction_loss(across, v).item() == pytest.approx(math.log(2), rel=1e-4)


@pytest.mark.parametrize("temperature", [1.0, "adaptive"])
def test_the_dispersive_loss_gains_nothing_from_larger_states(temperature: float | str) -> None:
    """Else hidden states grow with every step, and drown what the policy learns."""
    rows = torch.tensor([[[0.0, 1.0], [0.1, 0.3], [0.2, -1.0], [5.0, 0.5]]], dtype=torch.double, requires_grad=True)
    (pull,) = torch.autograd.grad(dispersive_loss(rows, temperature).sum(), rows)
    assert pull.norm() > 1e-3
    assert (pull * rows).sum().item() == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("temperature", [1.0, "adaptive"])
def test_the_dispersive_loss_pushes_near_rows_apart(temperature: float | str) -> None:
    rows = torch.tensor([[[-1.0], [-0.1], [0.1], [1.0]]], requires_grad=True)
    (pull,) = torch.autograd.grad(dispersive_loss(rows, temperature).sum(), rows)
    assert pull[0, 1].item() > 0 > pull[0, 2].item()


def test_the_adaptive_temperature_spreads_near_rows_more_than_a_fixed_one() -> None:
    rows = torch.tensor([[[0.0], [0.1], [0.2], [5.0]]], requires_grad=True)
    pulls = [
        torch.autograd.grad(dispersive_loss(rows, kind).sum(), rows)[0][0, 2].abs().item() for kind in (1.0, "adaptive")
    ]
    assert pulls[1] > 2 * pulls[0]


def test_the_adaptive_weight_bounds_the_pull_of_large_errors() -> None:
    error = torch.tensor([[[100.0]]], requires_grad=True)
    (pull,) = torch.autograd.grad(adaptive(error, 0.5).sum(), error)
    assert pull.abs().item() == pytest.approx(2.0, rel=1e-3)
    assert adaptive(error, 0.0).item() == pytest.approx(1e4)
