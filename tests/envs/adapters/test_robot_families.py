"""Real episodes of Meta-World and Adroit, in processes such as a run uses."""

import asyncio
import base64
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import rollart
from rollart.config.robots import two_processes
from rollart.core.errors import EnvironmentFailed
from rollart.core.types import Step
from rollart.envs.single import SingleEnvironment, single_environment
from rollart.robots.suites import robot_task, sizes_of

SAME_AS_THE_PACKAGE = """
import json, random
from itertools import product
from scipy.spatial.transform import Rotation
from rollart.envs.adapters.metaworld import FastRotation, MetaWorld, player, touches

square = [Rotation.from_euler("xyz", angles, True) for angles in product((0, 90, 180), repeat=3)]
matrices = [turn.as_matrix() for turn in [*Rotation.random(500, random_state=0), *square]]
pairs = [(FastRotation.from_matrix(one).as_quat(), Rotation.from_matrix(one).as_quat()) for one in matrices]
env, touched = MetaWorld("pick-place-v3"), []
env.reset(1)
for _ in range(60):
    env.step(player(env, random.Random(0)))
    geom = env.env._get_id_main_object()
    touched.append([touches(env.env.data, geom), bool(type(env.env).touching_object(env.env, geom))])
print(json.dumps([max(abs(a - b).max() for a, b in pairs), touched]))
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


async def played(env: SingleEnvironment, seed: int, *, held_out: bool = False) -> tuple[str, Step]:
    """The expert's episode: the first observation and the last step."""
    first = (await env.reset(seed, held_out))[0].content
    while True:
        step = await env.step(await env.scripted(seed))
        if step.done:
            return first, step


def test_a_seed_of_meta_world_is_one_episode_and_held_out_ones_are_others(family: Callable[[str], str]) -> None:
    python = family("metaworld")

    async def episodes() -> list[tuple[str, Step]]:
        async with single_environment(robot_task("metaworld:pick-place-v3"), two_processes(), python=python) as env:
            return [
                await played(env, 5),
                await played(env, 6),
                await played(env, 5),
                await played(env, 5, held_out=True),
            ]

    first, other, again, held_out = asyncio.run(episodes())
    assert first == again
    assert len({first[0], other[0], held_out[0]}) == 3
    assert len(json.loads(first[0])[0]) == sizes_of("metaworld:pick-place-v3")[0]
    assert all(step.info["success"] for _, step in (first, other, held_out))


def test_actions_that_are_not_finite_fail_and_the_next_episode_is_played(
    family: Callable[[str], str],
) -> None:
    python = family("metaworld")

    async def episode() -> Step:
        async with single_environment(robot_task("metaworld:reach-v3"), two_processes(), python=python) as env:
            await env.reset(0, held_out=False)
            with pytest.raises(EnvironmentFailed, match="not a finite number: the policy has diverged"):
                await env.step("[[NaN, 0, 0, 0]]")
            return (await played(env, 0))[1]

    assert asyncio.run(episode()).info["success"]


def test_a_chunk_for_the_hand_moves_it_and_a_seed_is_one_episode(family: Callable[[str], str]) -> None:
    python = family("adroit")
    observations, actions = sizes_of("adroit:door")

    async def episode() -> list[str]:
        async with single_environment(robot_task("adroit:door"), two_processes(), python=python) as env:
            seen = []
            for _ in range(2):
                await env.reset(3, held_out=False)
                seen.append((await env.step(json.dumps([[0.1] * actions] * 8))).messages[0].content)
            return seen

    first, again = asyncio.run(episode())
    assert first == again and np.shape(json.loads(first)) == (8, observations)


def test_an_episode_is_filmed_or_refused_in_a_sentence(family: Callable[[str], str]) -> None:
    """Which of the two depends on the machine: with Mesa's EGL there is a renderer."""
    python = family("metaworld")

    async def episode() -> bytes | str:
        task = robot_task("metaworld:drawer-close-v3", video=64)
        try:
            async with single_environment(task, two_processes(), python=python) as env:
                return base64.b64decode((await played(env, 0))[1].info["video"])
        except EnvironmentFailed as error:
            return str(error)

    found = asyncio.run(episode())
    assert found.startswith(b"GIF89a") if isinstance(found, bytes) else "install Mesa's EGL" in found


def test_what_is_faster_in_meta_world_returns_what_the_package_does(family: Callable[[str], str]) -> None:
    command = [family("metaworld"), "-c", SAME_AS_THE_PACKAGE]
    root = str(Path(rollart.__file__).parents[1])
    done = subprocess.run(command, env={"PYTHONPATH": root}, capture_output=True, text=True, timeout=300, check=True)
    error, touched = json.loads(done.stdout)
    assert error < 1e-12
    assert all(ours == theirs for ours, theirs in touched)
    assert {ours for ours, _ in touched} == {False, True}
