"""Suites of robot tasks, by the first part of a task's name: which environment plays it, in which family."""

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


@dataclass(frozen=True, slots=True)
class Suite:
    """`player`: the scripted expert, empty if there is none. `horizons` of tasks that are not 200 steps long. Without
    a `family` it runs in our own Python. `single`: it is one task, so the environment takes no name. `clouds`: it can
    show point clouds."""

    env: str
    tasks: tuple[str, ...]
    family: str | None = None
    player: str = ""
    horizons: tuple[tuple[str, int], ...] = ()
    single: bool = False
    clouds: bool = False


SUITES = {
    "metaworld": Suite(
        env="rollart.envs.adapters.metaworld:MetaWorld",
        tasks=tuple(f"{name}-v3" for name in META_WORLD),
        family="metaworld",
        player="rollart.envs.adapters.metaworld:player",
        clouds=True,
    ),
    "adroit": Suite(
        env="rollart.envs.adapters.adroit:Adroit",
        tasks=("door", "hammer", "pen", "relocate"),
        family="adroit",
        horizons=(("pen", 100),),
    ),
    "toy": Suite(
        env="rollart.envs.obstacle:Obstacle",
        tasks=("obstacle",),
        player="rollart.envs.obstacle:player",
        horizons=(("obstacle", 60),),
        single=True,
    ),
}


def robot_task(name: str, *, points: int = 0, tail: int = 0, video: int = 0) -> TaskConfig:
    """The environment of `suite:task`, for our environment pool; `points`: of the cloud that it shows, 0: the state.
    Raises ConfigError."""
    suite, _, task = name.partition(":")
    if suite not in SUITES or not task:
        near = did_you_mean(suite, sorted(SUITES)) or f"; the suites are {', '.join(SUITES)}"
        raise ConfigError(f"a robot task is `suite:task`, as `metaworld:pick-place-v3`, not {name!r}{near}")
    found = SUITES[suite]
    if task not in found.tasks:
        near = did_you_mean(task, found.tasks) or f"; its tasks are {', '.join(found.tasks)}"
        raise ConfigError(f"the suite {suite} has no task {task!r}{near}")
    if points and not found.clouds:
        raise ConfigError(f"the suite {suite} shows no point clouds; use `control.observation: state`")
    horizon = dict(found.horizons).get(task, 200)
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
