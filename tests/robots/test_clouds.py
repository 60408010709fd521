"""Point clouds: from a depth image to points, and a policy that sees them."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rollart.config.robots import ControlConfig, ImitationConfig, MeanFlowConfig, NetworkConfig
from rollart.envs.adapters.continuous import ContinuousEnvironment, spread_points, unprojected
from rollart.robots.chunks import ImitationData
from rollart.robots.demonstrations import Demonstration, DemonstrationError
from rollart.robots.learner import ImitationLearner, LearnerConfig, TrainedPolicy
from rollart.robots.network import CloudShape, PointEncoder
from rollart.robots.suites import robot_task

CONTROL = ControlConfig(observation="points", points=5, history=2, chunk=4, execute=2)


def demonstration(steps: int = 20, seed: int = 0) -> Demonstration:
    """Two numbers of state and five points; the action is the height of the highest point."""
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(steps, 5, 3))
    seen = np.concatenate([rng.normal(size=(steps, 2)), points.reshape(steps, 15)], 1).astype(np.float32)
    return Demonstration(seen, points[:, :, 2].max(1, keepdims=True).astype(np.float32))


def learner(steps: int = 100) -> ImitationLearner:
    training = ImitationConfig(steps=steps, batch=32, lr=1e-2, lr_warmup=10)
    config = LearnerConfig(
        policy=MeanFlowConfig(), control=CONTROL, network=NetworkConfig(width=16, layers=1), training=training
    )
    return ImitationLearner(config, [ImitationData.of([demonstration()], CONTROL)], [0])


def test_a_depth_image_becomes_points_in_the_world() -> None:
    """A camera 2 above the origin that looks straight down, with x to its right: it sees a floor at height 0."""
    seen = unprojected(np.full((4, 4), 2.0), 90.0, np.array([0.0, 0.0, 2.0]), np.eye(3))
    assert np.allclose(seen[:, 2], 0)
    assert np.allclose(sorted(set(seen[:, 0].round(6))), [-1.5, -0.5, 0.5, 1.5])
    assert np.allclose(seen[0], [-1.5, 1.5, 0])  # the first pixel is at the top left
    turned = unprojected(np.full((4, 4), 2.0), 90.0, np.zeros(3), np.array([[0, -1, 0], [1, 0, 0], [0, 0, 1.0]]))
    assert np.allclose(turned[0], [-1.5, -1.5, -2])


def test_points_are_spread_repeated_and_never_missing() -> None:
    crowd = np.concatenate([np.zeros((50, 3)), [[9.0, 0, 0]], [[0, 9.0, 0]]])
    assert {tuple(point) for point in spread_points(crowd, 3)} == {(0, 0, 0), (9, 0, 0), (0, 9, 0)}
    assert spread_points(crowd[:1], 4).shape == (4, 3)
    assert (spread_points(crowd[:0], 4) == np.zeros((4, 3))).all()


def test_the_order_of_points_does_not_matter_and_their_place_does() -> None:
    generators = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
    encoder = PointEncoder(CloudShape(history=2, state=2, points=5), 8, generators)
    seen = torch.randn(2, 3, 2, 17, generator=generators[0])
    shuffled, moved = seen.clone(), seen.clone()
    shuffled[..., 2:] = seen[..., 2:].reshape(2, 3, 2, 5, 3).flip(-2).flatten(-2)
    moved[..., 2:] += 1.0
    one, two, three = (encoder(values.flatten(-2)) for values in (seen, shuffled, moved))
    assert one.shape == (2, 3, encoder.size) and encoder.size == 2 * (2 + 8)
    assert torch.allclose(one, two, atol=1e-6) and not torch.allclose(one, three, atol=1e-2)
    assert torch.equal(one.reshape(2, 3, 2, 10)[..., :2], seen[..., :2])


def test_a_policy_learns_from_clouds_which_have_one_scale_by_coordinate(tmp_path: Path) -> None:
    trained = learner()
    gains = trained.data[0].scaling.observation_gain[2:].reshape(5, 3)
    assert torch.equal(gains, gains[:1].expand(5, 3)) and len(set(gains[0].tolist())) == 3
    early, late = trained.train(20), trained.train(80)
    assert late[0] < early[0]
    trained.export([tmp_path / "policy"], ["metaworld:reach-v3"])
    policy = TrainedPolicy(tmp_path / "policy")
    assert policy.act(torch.zeros(3, 2, 17), torch.zeros(3, policy.noise_size)).shape == (3, 4, 1)


def test_demonstrations_without_points_are_refused() -> None:
    state = Demonstration(np.zeros((9, 4), np.float32), np.eye(9, 1, dtype="f"))
    with pytest.raises(DemonstrationError, match="observe 4 numbers, too few for 5 points; record them with"):
        ImitationData.of([state], CONTROL)


def test_a_task_takes_points_only_where_a_camera_is() -> None:
    assert robot_task("metaworld:reach-v3", points=7).args["points"] == 7
    assert "points" not in robot_task("metaworld:reach-v3").args


def test_without_a_renderer_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    class Blind(ContinuousEnvironment):
        depth_camera = "corner3"

        def _reset(self, seed: int) -> np.ndarray:
            return np.zeros(3)

        def _step(self, command: object) -> tuple[np.ndarray, float, bool, bool]:
            return np.zeros(3), 0.0, False, False

    monkeypatch.delenv("MUJOCO_GL", raising=False)
    with pytest.raises(ValueError, match="point clouds need an offscreen renderer, and there is none here"):
        Blind(10, 0, 0, False, points=4).reset(0)
