"""Suites of robot tasks, by the first part of a task's name: which environment plays it, in which family."""

from collections.abc import Mapping
from dataclasses import dataclass

from rollart.config import TaskConfig
from rollart.config.yaml_tree import did_you_mean
from rollart.core.errors import ConfigError

META_WORLD = (
    *("assembly", "basketball", "bin-picking", "box-close", "button-press-topdown", "button-press-topdown-wall"),
    *("button-press", "button-press-wall", "coffee-button", "coffee-pull", "coffee-push", "dial-turn", "disassemble"),
    *("door-close", "door-lock", "door-open", "door-unlock", "hand-insert", "drawer-close", "drawer-open"),
    *("faucet-open", "faucet-close", "hammer", "handle-press-side", "handle-press", "handle-pull-side"),
    *("handle-pull", "lever-pull", "peg-insert-side", "pick-place-wall", "pick-out-of-hole", "reach", "push-back"),
    *("push", "pick-place", "plate-slide", "plate-slide-side", "plate-slide-back", "plate-slide-back-side"),
    *("peg-unplug-side", "soccer", "stick-push", "stick-pull", "push-wall", "reach-wall", "shelf-place"),
    *("sweep-into", "sweep", "window-open", "window-close"),
)

DIFFICULTIES = {  # of Meta-World, as papers group it; all others are easy
    "medium": (
        *("basketball", "bin-picking", "box-close", "coffee-pull", "coffee-push", "hammer", "peg-insert-side"),
        *("push-wall", "soccer", "sweep", "sweep-into"),
    ),
    "hard": ("assembly", "hand-insert", "pick-out-of-hole", "pick-place", "push", "push-back"),
    "very hard": ("shelf-place", "disassemble", "stick-pull", "stick-push", "pick-place-wall"),
}


@dataclass(frozen=True, slots=True)
class TaskShape:
    """Numbers of an observation of the state and of an action, and the most steps of an episode."""

    observations: int
    actions: int
    horizon: int = 200


@dataclass(frozen=True, slots=True)
class Suite:
    """`player`: the scripted expert, empty if there is none. Without a `family` it runs in our own Python. `single`: it
    is one task, so the environment takes no name. `beside_cloud`: numbers that are observed beside a point cloud, 0: it
    shows none."""

    env: str
    tasks: Mapping[str, TaskShape]
    family: str | None = None
    player: str = ""
    single: bool = False
    beside_cloud: int = 0


SUITES = {
    "metaworld": Suite(
        env="rollart.envs.adapters.metaworld:MetaWorld",
        tasks={f"{name}-v3": TaskShape(39, 4) for name in META_WORLD},
        family="metaworld",
        player="rollart.envs.adapters.metaworld:player",
        beside_cloud=7,
    ),
    "adroit": Suite(
        env="rollart.envs.adapters.adroit:Adroit",
        tasks={
            "door": TaskShape(39, 28),
            "hammer": TaskShape(46, 26),
            "pen": TaskShape(45, 24, horizon=100),
            "relocate": TaskShape(39, 30),
        },
        family="adroit",
    ),
    "toy": Suite(
        env="rollart.envs.obstacle:Obstacle",
        tasks={"obstacle": TaskShape(2, 2, horizon=60)},
        player="rollart.envs.obstacle:player",
        single=True,
    ),
}


def _found(name: str) -> tuple[Suite, str]:
    """The suite and the task in it. Raises ConfigError."""
    suite, _, task = name.partition(":")
    if suite not in SUITES or not task:
        near = did_you_mean(suite, sorted(SUITES)) or f"; the suites are {', '.join(SUITES)}"
        raise ConfigError(f"a robot task is `suite:task`, as `metaworld:pick-place-v3`, not {name!r}{near}")
    if task not in SUITES[suite].tasks:
        near = did_you_mean(task, list(SUITES[suite].tasks)) or f"; its tasks are {', '.join(SUITES[suite].tasks)}"
        raise ConfigError(f"the suite {suite} has no task {task!r}{near}")
    return SUITES[suite], task


def group_of(name: str) -> str:
    """What a table puts together: `easy` to `very hard` of Meta-World, or the suite."""
    suite, _, task = name.partition(":")
    if suite != "metaworld":
        return suite
    return next((group for group, tasks in DIFFICULTIES.items() if task.removesuffix("-v3") in tasks), "easy")


def sizes_of(name: str, points: int = 0) -> tuple[int, int]:
    """Numbers of an observation, which has a cloud of `points` or is the state, and of an action. Raises
    ConfigError."""
    suite, task = _found(name)
    shape = suite.tasks[task]
    return suite.beside_cloud + 3 * points if points else shape.observations, shape.actions


def robot_task(name: str, *, points: int = 0, tail: int = 0, video: int = 0) -> TaskConfig:
    """The environment of `suite:task`, for our environment pool; `points`: of the cloud that it shows, 0: the state.
    Raises ConfigError."""
    found, task = _found(name)
    suite = name.partition(":")[0]
    if points and not found.beside_cloud:
        raise ConfigError(f"the suite {suite} shows no point clouds; use `control.observation: state`")
    horizon = found.tasks[task].horizon
    named: dict[str, object] = {} if found.single else {"task": task}
    if points:
        named["points"] = points
    return TaskConfig(
        name=f"{suite}-{task}",
        env=found.env,
        args={**named, "horizon": horizon, "tail": tail, "video": video},
        family=found.family,
        player=found.player or None,
        max_turns=horizon,
    )
