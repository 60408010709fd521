"""Environments with continuous actions, over the protocol of all environments: numbers travel as JSON.

An action is a chunk, a list of actions; the reply has the observation after each of them. Runs in the Python of the
package's family: standard library and numpy only.
"""

from __future__ import annotations

import base64
import ctypes.util
import io
import json
import os
from abc import ABC, abstractmethod
from typing import Any

import numpy

FRAME_EVERY, FRAME_MS, MAX_FRAMES = 4, 80, 60
NO_RENDERER = (
    "videos and point clouds need an offscreen renderer, and there is none here; install Mesa's EGL "
    "(apt-get install libegl1 libgl1-mesa-dri) and set MUJOCO_GL=egl, or leave out --video and observe states"
)
DEPTH_PIXELS = 128
DISABLED = "disable"


def _choose_renderer() -> None:
    """MUJOCO_GL is read when mujoco is imported, which fails without that renderer: states need none."""
    if ctypes.util.find_library("EGL"):
        os.environ.setdefault("MUJOCO_GL", "egl")
    try:
        import mujoco  # noqa: F401
    except ModuleNotFoundError:  # not all environments here are of mujoco
        return
    except Exception:  # drivers raise all kinds of things
        os.environ["MUJOCO_GL"] = DISABLED


_choose_renderer()


class ContinuousEnvironment(ABC):
    """Subclasses define `_reset`, `_step` and the number of `actions`; of mujoco, also its `env` and a `camera`.

    An episode ends `tail` steps after its first success, or after `horizon` steps. With `video`, the last reply has
    an animated GIF of that many pixels in `info`, in base64. With `points`, an observation is what `_proprioception`
    returns and that many points of the `workspace`, seen by `depth_camera`."""

    reusable = True
    actions = 0
    camera: str | int | None = None
    depth_camera: str | None = None
    workspace: tuple[tuple[float, float, float], tuple[float, float, float]] = ((0, 0, 0), (0, 0, 0))
    env: Any = None

    def __init__(self, horizon: int, tail: int, video: int, held_out: bool, points: int = 0) -> None:
        if horizon < 1 or tail < 0:
            raise ValueError("horizon must be at least 1, and tail at least 0")
        self.horizon, self.tail, self.video, self.held_out = horizon, tail, video, held_out
        self.seen: Any = None
        self.steps = 0
        self.succeeded_at: int | None = None
        self.failed = False
        self._frames: list[Any] = []
        self.points = points
        self._renderer: Any = None
        self._depth_renderer: Any = None

    def reset(self, seed: int) -> str:
        self.seen = self._reset(2 * seed + self.held_out)  # even seeds train, odd ones evaluate
        self.steps, self.succeeded_at, self.failed, self._frames = 0, None, False, []
        self._film()
        return _json([self._observation()])

    def step(self, action: str) -> dict[str, Any]:
        seen, reward = [], 0.0
        for command in self._parse(action):
            self.seen, gained, success, self.failed = self._step(command)
            self.steps += 1
            seen.append(self._observation())
            reward += float(gained)
            if success and self.succeeded_at is None:
                self.succeeded_at = self.steps
            if self.steps % FRAME_EVERY == 0:
                self._film()
            if self._over():
                break
        done = (self.succeeded_at is not None and self._over()) or self.failed
        info: dict[str, Any] = {"success": self.succeeded_at is not None, "steps": self.steps}
        if self.video and self._over():
            self._film()
            info["video"] = _gif(self._frames)
        truncated = self._over() and not done
        return {"messages": _json(seen), "reward": reward, "done": done, "truncated": truncated, "info": info}

    def close(self) -> None:
        for renderer in (self._renderer, self._depth_renderer):
            if renderer is not None:
                renderer.close()

    def _over(self) -> bool:
        ended = self.succeeded_at is not None and self.steps >= self.succeeded_at + self.tail
        return ended or self.failed or self.steps >= self.horizon

    def _parse(self, action: str) -> Any:
        try:
            chunk = numpy.array(json.loads(action), dtype=float)
        except (ValueError, TypeError):
            raise ValueError(f"an action chunk is a JSON list of lists of numbers, not {action[:60]!r}") from None
        if chunk.ndim != 2 or chunk.shape[1] != self.actions or not len(chunk):
            raise ValueError(f"an action chunk is [steps, {self.actions}] numbers, not {list(chunk.shape)}")
        if not numpy.isfinite(chunk).all():
            raise ValueError("an action is not a finite number: the policy has diverged")
        return chunk

    def _film(self) -> None:
        if self.video and len(self._frames) < MAX_FRAMES:
            self._frames.append(self._frame())

    @abstractmethod
    def _reset(self, seed: int) -> Any:
        """The first observation."""

    @abstractmethod
    def _step(self, command: Any) -> tuple[Any, float, bool, bool]:
        """Observation, reward, whether it succeeds now, and whether it has failed for good."""

    def _proprioception(self) -> Any:
        """What is observed beside a point cloud."""
        return numpy.zeros(0)

    def _observation(self) -> Any:
        if not self.points:
            return self.seen
        if self._depth_renderer is None:
            self._depth_renderer = self._open_renderer(self.depth_camera, DEPTH_PIXELS)
            self._depth_renderer.enable_depth_rendering()
        self._depth_renderer.update_scene(self.env.data, self.depth_camera)
        model, data = self.env.model, self.env.data
        camera = model.camera(self.depth_camera).id
        seen = unprojected(
            self._depth_renderer.render(), model.cam_fovy[camera], data.cam_xpos[camera], data.cam_xmat[camera]
        )
        low, high = self.workspace
        inside = seen[((seen > low) & (seen < high)).all(1)]
        return numpy.concatenate([self._proprioception(), spread_points(inside, self.points).ravel()])

    def _frame(self) -> Any:
        if self._renderer is None:
            self._renderer = self._open_renderer(self.camera, self.video)
        self._renderer.update_scene(self.env.data, self.camera)
        return numpy.ascontiguousarray(self._renderer.render())

    def _open_renderer(self, camera: str | int | None, pixels: int) -> Any:
        """Raises ValueError if there is none."""
        if camera is None or os.environ.get("MUJOCO_GL", DISABLED) == DISABLED:
            raise ValueError(NO_RENDERER)
        import mujoco

        try:
            return mujoco.Renderer(self.env.model, pixels, pixels)
        except Exception as error:  # drivers raise all kinds of things
            raise ValueError(f"{NO_RENDERER} ({error})") from error


def unprojected(depth: Any, fovy: float, position: Any, rotation: Any) -> Any:
    """The points [N, 3] in the world that a camera sees at `depth` [H, W]. It looks along its negative z axis, and its
    vertical field of view is `fovy` degrees."""
    height, width = depth.shape
    focal = 0.5 * height / numpy.tan(numpy.deg2rad(fovy) / 2)
    rows, columns = numpy.mgrid[:height, :width] + 0.5
    x, y = (columns - width / 2) / focal * depth, (height / 2 - rows) / focal * depth
    seen = numpy.stack([x, y, -depth], -1).reshape(-1, 3)
    return seen @ numpy.asarray(rotation).reshape(3, 3).T + position


def spread_points(points: Any, count: int) -> Any:
    """`count` of them, each the one that is farthest from those before it, so small things are seen too. If there are
    fewer, they are repeated; without any, all are 0."""
    if not len(points):
        return numpy.zeros((count, 3))
    chosen, distance = [0], numpy.full(len(points), numpy.inf)
    for _ in range(count - 1):
        distance = numpy.minimum(distance, ((points - points[chosen[-1]]) ** 2).sum(1))
        chosen.append(int(distance.argmax()))
    return points[chosen]


def _json(observations: list[Any]) -> str:
    return json.dumps(numpy.asarray(observations, dtype=numpy.float32).tolist())


def _gif(frames: list[Any]) -> str:
    from PIL import Image

    images = [Image.fromarray(frame) for frame in frames]
    buffer = io.BytesIO()
    images[0].save(buffer, "GIF", save_all=True, append_images=images[1:], duration=FRAME_MS, loop=0)
    return base64.b64encode(buffer.getvalue()).decode()
