"""Meta-World: fifty manipulation tasks of a robot arm, with the scripted experts of the package.

Its physics take a tenth of a step, so two of its Python functions are replaced by ones that return the same faster.
"""

from __future__ import annotations

import json
import random
import sys
import warnings
from functools import partial
from typing import Any

import numpy

from rollart.envs.adapters.continuous import ContinuousEnvironment

warnings.filterwarnings("ignore", message="Constant.*may be too high")  # experts aim beyond 1, which is clipped

from metaworld.env_dict import ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE  # noqa: E402
from metaworld.policies import ENV_POLICY_MAP  # noqa: E402


class FastRotation:
    """What the package uses of scipy's Rotation: from one matrix to one quaternion, of the same sign."""

    def __init__(self, matrix: Any) -> None:
        self.matrix = matrix

    @classmethod
    def from_matrix(cls, matrix: Any) -> FastRotation:
        return cls(matrix)

    def as_quat(self) -> Any:
        rows = self.matrix.tolist()
        trace = rows[0][0] + rows[1][1] + rows[2][2]
        i = max(range(3), key=lambda axis: rows[axis][axis])
        quaternion = numpy.empty(4)
        if trace > rows[i][i]:
            turned = (rows[2][1] - rows[1][2], rows[0][2] - rows[2][0], rows[1][0] - rows[0][1])
            quaternion[:] = (*turned, 1 + trace)
        else:
            j, k = (i + 1) % 3, (i + 2) % 3
            quaternion[i] = 1 - trace + 2 * rows[i][i]
            quaternion[j], quaternion[k] = rows[j][i] + rows[i][j], rows[k][i] + rows[i][k]
            quaternion[3] = rows[k][j] - rows[j][k]
        return quaternion / numpy.sqrt(quaternion @ quaternion)


def touches(data: Any, geom: int) -> bool:
    """Whether both pads of the gripper press on a geom, over all contacts at once."""
    pairs = data.contact.geom
    of_geom = (pairs == geom).any(1)
    if not of_geom.any():
        return False
    forces = data.efc_force[data.contact.efc_address]
    pads = (data.geom(name).id for name in ("leftpad_geom", "rightpad_geom"))
    return all(forces[of_geom & (pairs == pad).any(1)].sum() > 0 for pad in pads)


class MetaWorld(ContinuousEnvironment):
    """`task` is a name of version 3, for example `pick-place-v3`."""

    actions = 4
    camera = "corner2"
    depth_camera = "corner3"
    workspace = ((-0.6, 0.3, 0.01), (0.6, 1.1, 0.7))  # above the table

    def __init__(
        self, task: str, *, horizon: int = 200, tail: int = 0, video: int = 0, points: int = 0, held_out: bool = False
    ) -> None:
        super().__init__(horizon, tail, video, held_out, points)
        if task not in ENV_POLICY_MAP:
            raise ValueError(f"Meta-World has no task {task!r}; its tasks are {', '.join(sorted(ENV_POLICY_MAP))}")
        self.env = ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE[f"{task}-goal-observable"](seed=0)
        # Without these, every reset draws the same positions, or ignores its seed.
        self.env._freeze_rand_vec, self.env.seeded_rand_vec = False, True
        self.env.max_path_length = 10**9  # the horizon is ours
        self.expert = ENV_POLICY_MAP[task]()
        self.env.touching_object = partial(touches, self.env.data)
        for kind in type(self.env).__mro__:
            module = sys.modules[kind.__module__]
            if "Rotation" in vars(module):
                vars(module)["Rotation"] = FastRotation

    def _reset(self, seed: int) -> Any:
        self.env.seed(seed)
        return self.env.reset(seed=seed)[0]

    def _step(self, command: Any) -> tuple[Any, float, bool, bool]:
        seen, reward, _, _, info = self.env.step(numpy.clip(command, -1, 1).astype(numpy.float32))
        return seen, reward, info["success"] >= 1, False

    def _proprioception(self) -> Any:
        """The hand, how far it is open, and the goal, which no camera sees."""
        return numpy.concatenate([self.seen[:4], self.seen[-3:]])

    def _frame(self) -> Any:
        return numpy.ascontiguousarray(super()._frame()[::-1, ::-1])  # the package's camera hangs upside down


def player(env: MetaWorld, rng: random.Random) -> str:
    """The expert's action."""
    action = numpy.clip(env.expert.get_action(numpy.asarray(env.seen, float)), -1, 1)
    return json.dumps([action.astype(numpy.float32).tolist()])
