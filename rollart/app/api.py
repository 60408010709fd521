"""What the commands do, as functions: load a run file, train, evaluate, simulate. `rollart` re-exports them.

The functions are synchronous: each runs its own event loop, and returns when the work is done and all services have
ended. Errors that are meant for users are RollartErrors.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from rollart.app import preflight
from rollart.app.run_reader import RunFolder
from rollart.config import RunFile
from rollart.config.robots import RobotRunFile
from rollart.core import run_folder
from rollart.core.errors import RollartError
from rollart.core.event_log import EventLog, read_events
from rollart.core.events import AnyEvent
from rollart.models.folder import is_adapter, model_problem

if TYPE_CHECKING:
    from rich.console import Console

    from rollart.observe.exporters import Exporter
    from rollart.simulator.result import SimulationResult
    from rollart.simulator.scenario import Scenario

T = TypeVar("T")
AnyPath = str | PathLike[str]
OnEvent = Callable[[AnyEvent], None]


def load_run(
    path: AnyPath,
    overrides: Sequence[str] = (),
    *,
    need_model: bool = True,
    weights: bool = True,
    here: bool = True,
) -> RunFile:
    """Read a run file and check that what it names exists on this machine: model, modules, packages, families.

    Args:
        path: The run file.
        overrides: Keys to change, as with `--set`: `["training.steps=50", "tasks.frozen_lake.weight=2"]`.
        need_model: Whether `model.path` must exist; an evaluation brings its own model.
        weights: Whether to download the weights of a model of the hub that is not in the cache, not only its config.
        here: Whether the run is for this machine; else what only other machines need is not checked.

    Raises:
        ConfigError: With one sentence for each problem, which names the file, the line and the key.
    """
    return preflight.load_run(Path(path), overrides, need_model=need_model, weights=weights, here=here)


def train(
    run: RunFile | AnyPath,
    *,
    folder: AnyPath | None = None,
    resume: bool = False,
    console: "Console | None" = None,
    on_event: OnEvent | None = None,
    stage: str = "train",
) -> RunFolder:
    """Train an agent, and leave model, checkpoints, event log, ledger, curves and TensorBoard files in a
    run folder. A run that ends early can be resumed: nothing is lost or trained twice.

    Args:
        run: The run file, loaded or as a path.
        folder: The run folder; it must be new or empty, unless `resume`. By default `<output>/<name>-<n>`.
        resume: Continue the run in `folder`; by default the newest of this name.
        console: Show the live view and the results here; by default nothing is printed.
        on_event: Called with each event as it happens, from the event loop's thread. It must return quickly; if it
            raises, the run continues without it.
        stage: `train` for RL, after the supervised training of `model.warmup` if there is one; `sft` for that training
            alone, without engines and environments but the players': resumed as `train`, the run continues with RL;
            `dpo` and `reward-model` for pairs of `preference`.

    Raises:
        RollartError: If the run cannot start, or ends early.

    Example:
        >>> run = rollart.train("examples/quickstart.yaml")  # doctest: +SKIP
        >>> summary = run.summary()  # doctest: +SKIP
    """
    from rollart.fleet import controller
    from rollart.fleet.control_services import loop_factory
    from rollart.observe import curves
    from rollart.observe.exporters import EXPORTERS, ExportTarget
    from rollart.observe.metrics import Metrics

    metrics = Metrics()
    run = run if isinstance(run, RunFile) else load_run(run)
    preflight.check_stage(run, stage)
    path = folder_for(run, folder, resume=resume)
    with contextlib.ExitStack() as stack:
        attach = stack.enter_context(_watched(run, console, on_event))

        def watch(log: EventLog) -> None:
            target = ExportTarget(path, path.name, metrics, run.observe.prometheus_port)
            for exporter in [EXPORTERS[name](target) for name in run.observe.export]:
                stack.enter_context(_closed(exporter))
                log.subscribe(exporter.on_event)
            attach(log, read_events(path / "events"))

        work = lambda: controller.train(run, path, stage=stage, resume=resume, on_log=watch, metrics=metrics)  # noqa: E731
        _run(work, loop_factory(run))
    curves.write(metrics.snapshot(), path / "curves.png")
    return RunFolder(path)


def folder_for(run: RunFile | RobotRunFile, folder: AnyPath | None = None, *, resume: bool = False) -> Path:
    """The folder that `train` uses: `folder` if it is given, else the newest of the run's name, or a new one.

    Raises:
        RollartError: If there is nothing to resume, or `folder` holds files already.
    """
    if folder is None:
        return run_folder.newest(run.output, run.name) if resume else run_folder.create(run.output, run.name)
    path = Path(folder)
    if not resume and path.exists() and any(path.iterdir()):
        raise RollartError(f"{path} is not empty; choose another run folder, or resume the run in it")
    return path


@dataclass(frozen=True, slots=True)
class TaskScore:
    """Results of held-out episodes. `failed` could not be played and are not in `success` and `reward`. With several
    `samples` of each episode, `success` is their mean and `passed` the share of episodes with one that succeeded."""

    success: float
    reward: float
    episodes: int
    failed: int
    samples: int = 1
    passed: float | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What `evaluate` returns: the scores by task, and the run folder with the trajectories."""

    model: str
    folder: str
    tasks: dict[str, TaskScore]


def evaluate(
    run: RunFile | AnyPath,
    model: AnyPath,
    *,
    endpoint: str | None = None,
    folder: AnyPath | None = None,
    console: "Console | None" = None,
    on_event: OnEvent | None = None,
) -> Evaluation:
    """Play the held-out episodes of every task with a saved model, or with one that someone else serves.

    Args:
        run: The run file, loaded or as a path; its own model is not used.
        model: A model folder in Hugging Face format, for example `run.model` of a trained run, or a checkpoint; with
            an `endpoint`, the name of a model there.
        endpoint: The URL of an OpenAI-compatible API, up to `/v1`. The environment variable OPENAI_API_KEY may hold
            its key.
        folder: The run folder. By default `<output>/<name>-eval-<n>`.
        console: Show the live view here; by default nothing is printed.
        on_event: Called with each event as it happens.

    Raises:
        RollartError: If the model is not there, or the evaluation ends early.
    """
    if endpoint is None:
        check_model(model)
    from rollart.fleet import evaluation
    from rollart.fleet.endpoint import ModelEndpoint

    run = run if isinstance(run, RunFile) else load_run(run, need_model=False)
    path = Path(folder) if folder else run_folder.create(run.output, f"{run.name}-eval")
    with _watched(run, console, on_event) as attach:
        played = Path(model) if endpoint is None else ModelEndpoint(endpoint, str(model))
        found = _run(lambda: evaluation.evaluate(run, played, directory=path, on_log=attach))
    return msgspec.convert({**found, "folder": str(path)}, Evaluation)


def sample(
    run: RunFile | AnyPath,
    *,
    model: AnyPath | None = None,
    endpoint: str | None = None,
    folder: AnyPath | None = None,
    resume: bool = False,
    console: "Console | None" = None,
    on_event: OnEvent | None = None,
) -> Path:
    """Play episodes of every task without training, as `sample` of the run file says, and return the file of
    trajectories with their rewards: `samples.jsonl` or `samples.parquet` in the run folder.

    Args:
        run: The run file, loaded or as a path.
        model: A model folder, a checkpoint or an adapter; by default the model that the run starts from, after its
            warmup. With an `endpoint`, the name of a model there.
        endpoint: The URL of an OpenAI-compatible API, up to `/v1`.
        folder: The run folder. By default `<output>/<name>-sample-<n>`.
        resume: Play what is missing in `folder`; by default the newest of this name.
        console: Show the live view here; by default nothing is printed.
        on_event: Called with each event as it happens.

    Raises:
        RollartError: If the model is not there, or the sampling ends early.
    """
    from rollart.fleet import sampling

    if endpoint is not None and model is None:
        raise RollartError("an endpoint serves several models; name one of them with --model")
    if endpoint is None and model is not None:
        check_model(model)
    run = run if isinstance(run, RunFile) else load_run(run, need_model=model is None)
    path = folder_for(run.model_copy(update={"name": f"{run.name}-sample"}), folder, resume=resume)
    source = sampling.SampleSource(str(model or ""), endpoint or "")
    with _watched(run, console, on_event) as attach:
        return _run(lambda: sampling.sample(run, path, source, resume=resume, on_log=attach))


def check_model(model: AnyPath) -> None:
    """Raises RollartError if it is neither a model folder nor an adapter."""
    if (problem := model_problem(Path(model))) and not is_adapter(Path(model)):
        raise RollartError(f"{model} {problem}")


def load_scenario(
    path: AnyPath, overrides: Sequence[str] = (), *, preset: str | None = None, workload: AnyPath | None = None
) -> "Scenario":
    """Read a scenario: a run file, whose `simulate` section says how long everything takes.

    Args:
        path: The run file.
        overrides: Keys to change, as with `--set`.
        preset: Use this preset of the scheduler: sync, sync_plus, one_off, start_bound or rollart.
        workload: A file whose keys replace those of the `simulate` section.

    Raises:
        ConfigError: With one sentence for each problem.
    """
    from rollart.simulator import scenario as scenarios

    loaded = scenarios.load(Path(path), overrides, Path(workload) if workload else None)
    return loaded.with_preset(preset) if preset else loaded


def simulate(
    scenario: "Scenario | AnyPath",
    *,
    seed: int | None = None,
    seeds: int = 1,
    uncertain: bool = False,
    folder: AnyPath | None = None,
    on_progress: Callable[[int, float], None] | None = None,
) -> "list[SimulationResult]":
    """Predict step time, throughput, idle times and cost of a run, without its hardware.

    Args:
        scenario: A scenario, loaded or as a path.
        seed: The first seed; by default the scenario's.
        seeds: How many seeds to simulate, one after the other.
        uncertain: Simulate each seed with other constants, drawn from their uncertainty.
        folder: Write the event log of the first seed there; by default none is written.
        on_progress: Called now and then with the steps done and the seconds simulated.

    Returns:
        One result for each seed.
    """
    from rollart.simulator.scenario import Scenario
    from rollart.simulator.simulation import simulate as run

    scenario = scenario if isinstance(scenario, Scenario) else load_scenario(scenario)
    first = scenario.seed if seed is None else seed
    path = Path(folder) if folder else None
    if path:
        path.mkdir(parents=True, exist_ok=True)
        scenario = scenario.model_copy(update={"simulate": scenario.simulate.model_copy(update={"log": "full"})})
    return [
        run(
            scenario.with_other_constants(first + number) if uncertain else scenario,
            folder=None if number else path,
            seed=first + number,
            on_progress=on_progress,
        )
        for number in range(seeds)
    ]


def _run(
    work: Callable[[], Coroutine[Any, Any, T]],
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> T:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(work())
    raise RollartError(
        "an event loop is running in this thread, as in a notebook or a coroutine; "
        "call this in a thread of its own: await asyncio.to_thread(rollart.train, run)"
    )


@contextlib.contextmanager
def _closed(exporter: "Exporter") -> Iterator[None]:
    """Whatever ended the run is the error, not what follows from it when a view is closed."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            exporter.close()
        raise
    exporter.close()


@contextlib.contextmanager
def _watched(run: RunFile, console: "Console | None", on_event: OnEvent | None) -> Iterator[Callable[..., None]]:
    """Yields what attaches the live view and the callback to an event log, after the events of a run that resumes."""
    from rollart.observe import live

    with (
        live.view(console, {task.name: task.weight for task in run.tasks})
        if console
        else contextlib.nullcontext() as view
    ):

        def attach(log: EventLog, past: Iterable[AnyEvent] = ()) -> None:
            if view:
                view.remember(past)
                log.subscribe(view.on_event)
            if on_event:
                log.subscribe(on_event)

        yield attach
