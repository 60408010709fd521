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

if ctypes.util.find_library("EGL"):
    os.environ.setdefault("MUJOCO_GL", "egl")  # read when mujoco is imported

FRAME_EVERY, FRAME_MS, MAX_FRAMES = 4, 80, 60
NO_RENDERER = (
    "videos need an offscreen renderer, and there is none here; install Mesa's EGL "
    "(apt-get install libegl1 libgl1-mesa-dri) and set MUJOCO_GL=egl, or leave out --video"
)


class ContinuousEnvironment(ABC):
    """Subclasses define `_reset`, `_step` and the number of `actions`; of mujoco, also its `env` and a `camera`.

    An episode ends `tail` steps after its first success, or after `horizon` steps. With `video`, the last reply has
    an animated GIF of that many pixels in `info`, in base64."""

    reusable = True
    actions = 0
    camera: str | int | None = None
    env: Any = None

    def __init__(self, horizon: int, tail: int, video: int, held_out: bool) -> None:
        if horizon < 1 or tail < 0:
            raise ValueError("horizon must be at least 1, and tail at least 0")
        self.horizon, self.tail, self.video, self.held_out = horizon, tail, video, held_out
        self.seen: Any = None
        self.steps = 0
        self.succeeded_at: int | None = None
        self.failed = False
        self._frames: list[Any] = []
        self._renderer: Any = None

    def reset(self, seed: int) -> str:
        self.seen = self._reset(2 * seed + self.held_out)  # even seeds train, odd ones evaluate
        self.steps, self.succeeded_at, self.failed, self._frames = 0, None, False, []
        self._film()
        return _json([self.seen])

    def step(self, action: str) -> dict[str, Any]:
        seen, reward = [], 0.0
        for command in self._parse(action):
            self.seen, gained, success, self.failed = self._step(command)
            self.steps += 1
            seen.append(self.seen)
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
        if self._renderer is not None:
            self._renderer.close()

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

    def _frame(self) -> Any:
        if self._renderer is None:
            self._renderer = self._open_renderer()
        self._renderer.update_scene(self.env.data, self.camera)
        return numpy.ascontiguousarray(self._renderer.render())

    def _open_renderer(self) -> Any:
        """Raises ValueError if there is none."""
        if self.camera is None or os.environ.get("MUJOCO_GL") is None:
            raise ValueError(NO_RENDERER)
        import mujoco

        try:
            return mujoco.Renderer(self.env.model, self.video, self.video)
        except Exception as error:  # drivers raise all kinds of things
            raise ValueError(f"{NO_RENDERER} ({error})") from error


def _json(observations: list[Any]) -> str:
    return json.dumps(numpy.asarray(observations, dtype=numpy.float32).tolist())


def _gif(frames: list[Any]) -> str:
    from PIL import Image

    images = [Image.fromarray(frame) for frame in frames]
    buffer = io.BytesIO()
    images[0].save(buffer, "GIF", save_all=True, append_images=images[1:], duration=FRAME_MS, loop=0)
    return base64.b64encode(buffer.getvalue()).decode()
