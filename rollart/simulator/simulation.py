"""One simulation: the scheduler, router and training loop of real runs, on virtual time, against simulated services.

Nothing here makes decisions. It builds the simulated services of a scenario, runs the control plane on them, and
samples every few seconds what they are doing.
"""

import asyncio
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rollart.core import gc_tuning
from rollart.core.errors import ConfigError
from rollart.core.event_log import EventLog
from rollart.core.events import EngineSample, EventSink, Placed, RunEnded, RunStarted
from rollart.core.types import Sampling
from rollart.hardware.devices import DeviceClass
from rollart.hardware.roofline import Roofline
from rollart.rollout.engine_registry import EngineRegistry
from rollart.rollout.engine_state import EnginePool
from rollart.rollout.evaluation import Evaluator
from rollart.rollout.lockstep import Lockstep
from rollart.rollout.router import Router
from rollart.rollout.routing_policy import routing_policy
from rollart.rollout.scheduler import Scheduler
from rollart.rollout.training_loop import LoopPlan, TrainingLoop
from rollart.rollout.trajectory import RolloutTask, TrajectoryRunner
from rollart.simulator import clock
from rollart.simulator.constants import EMULATED
from rollart.simulator.contention import Contention
from rollart.simulator.engine import SimulatedEngine
from rollart.simulator.environments import RequestLengths, SimulatedEnvironments, SimulatedRenderer
from rollart.simulator.pass_cost import PassCost
from rollart.simulator.result import SimulationResult, Tally, price_per_hour, result_of
from rollart.simulator.scenario import Scenario, engine_defaults
from rollart.simulator.services import (
    NullLedger,
    SimulatedRewards,
    SimulatedTrainer,
    to_samples,
    training_seconds,
)
from rollart.simulator.weight_transfer import WeightTransfer

OnProgress = Callable[[int, float], None]


def simulate(
    scenario: Scenario,
    *,
    folder: Path | None = None,
    until: float | None = None,
    seed: int | None = None,
    on_progress: OnProgress | None = None,
) -> SimulationResult:
    """Run the scenario to its last step, or for `until` virtual seconds. With a `folder`, write the event log there.
    `on_progress` gets the number of steps done and the virtual time."""
    if seed is not None:
        scenario = scenario.model_copy(update={"seed": seed})
    with gc_tuning.disabled():  # a simulation makes no reference cycles
        return clock.run(Simulation(scenario, folder, until, on_progress).run())


class Simulation:
    def __init__(
        self, scenario: Scenario, folder: Path | None, until: float | None, on_progress: OnProgress | None = None
    ) -> None:
        self._whole, self._scenario = scenario, scenario.thinned()
        self._folder, self._until, self._on_progress = folder, until, on_progress
        self._classes = scenario.device_classes()
        self._samples: defaultdict[str, float] = defaultdict(float)
        self._engines: dict[str, SimulatedEngine] = {}
        self._pools: dict[str, EnginePool] = {}

    async def run(self) -> SimulationResult:
        scenario = self._scenario
        now = asyncio.get_running_loop().time
        began = time.process_time()
        self._tally = Tally(now, scenario.warmup, self._totals)
        log = None
        sink: EventSink = self._tally
        if self._folder is not None and scenario.simulate.log == "full":
            self._folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(self._folder / "events", ignore_errors=True)
            sink = log = EventLog(self._folder / "events", now)
            log.subscribe(self._tally.fold)
        try:
            self._build(sink)
            self._emit_start(sink)
            sampling = asyncio.create_task(self._sample(sink, log is not None))
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._until):
                        await self._training_loop.run()
            finally:
                sampling.cancel()
                await self._scheduler.stop()
            sink.emit(RunEnded(version=self._trainer.version, reason="finished"))
        finally:
            if log is not None:
                log.close()
        loop, took = asyncio.get_running_loop(), time.process_time() - began
        return result_of(
            scenario=self._whole,
            tally=self._tally,
            classes=self._classes,
            pools=self._pools,
            seconds=now(),
            cpu_s=took,
            events=getattr(loop, "handled", 0),
        )

    # Construction

    def _build(self, sink: EventSink) -> None:
        scenario, schedule = self._scenario, self._scenario.schedule
        self._weights = WeightTransfer.of(scenario)
        self._environments = SimulatedEnvironments(scenario)
        self._rewards = SimulatedRewards(scenario)
        (train,) = scenario.pools_of("train").values()
        seconds = training_seconds(scenario, self._device(train.devices[0]), train.count)
        router = self._make_router(sink)
        self._trainer = SimulatedTrainer(seconds, self._weights, self._contention().train, scenario.simulate.one_in)
        runner = TrajectoryRunner(
            environments=self._environments,
            router=router,
            renderer=SimulatedRenderer(),
            rewards=self._rewards,
            sink=sink,
            lockstep=Lockstep() if schedule.lockstep else None,
        )
        self._phases, self._router = runner.phases, router
        tasks = [
            RolloutTask(
                name=task.name,
                weight=task.weight,
                max_turns=task.max_turns,
                max_context=task.max_context,
                sampling=Sampling(max_tokens=task.sampling.max_tokens),
                deadline=scenario.rollout.trajectory_deadline,
                group_size=task.group_size or 0,
                plan=None if task.schedule is None else task.schedule.plan(),
            )
            for task in scenario.tasks
        ]
        ledger = NullLedger()
        self._scheduler = Scheduler(
            tasks=tasks,
            schedule=schedule,
            batch_groups=scenario.training.batch_groups,
            group_size=scenario.training.group_size,
            steps=scenario.training.steps if scenario.simulate.finite else sys.maxsize,
            retries=scenario.rollout.retries,
            seed=scenario.seed,
            runner=runner,
            engines=router.engines,
            ledger=ledger,
            sink=sink,
            quarantine=scenario.environments.quarantine.rule(),
            to_samples=to_samples,
        )
        self._training_loop = TrainingLoop(
            plan=LoopPlan(scenario.training.steps, scenario.checkpoint.every, 0, 0),
            version=0,
            source=self._scheduler,
            trainer=self._trainer,
            engines=router.engines,
            evaluator=Evaluator(tasks, runner, ledger, sink),
            ledger=ledger,
            sink=sink,
            checkpoints=Path("checkpoints"),
            on_saved=lambda version: None,
        )

    def _contention(self) -> Contention:
        """Between the engines that compute and training; emulated ones mostly sleep."""
        section, pools = self._scenario.simulate, self._scenario.pools_of("generate")
        computing = [self._pools[name] for name, pool in pools.items() if not pool.emulate]
        engines = [self._engines[each.name] for pool in computing for each in pool.engines]
        return Contention(section.contention, engines, section.cores)

    def _make_router(self, sink: EventSink) -> Router:
        scenario, lengths = self._scenario, RequestLengths(self._scenario)
        pools: dict[str, EnginePool] = {}
        for name, pool in scenario.pools_of("generate").items():
            device, shape, constants = self._device(pool.devices[0]), scenario.shape, scenario.simulate.constants
            if pool.emulate:  # the pace is given by a roofline in bfloat16, the memory by the engine that is paced
                shape, constants = replace(shape, number_bytes=2), EMULATED
            roofline = Roofline(device, shape, pool.emulate or 1.0, pool.tensor_parallel)
            cost = PassCost(roofline, scenario.simulate.engines.get(name), constants)
            max_batch, chunk, kv_tokens = self._limits(name, device, pool.tensor_parallel)
            kind = self._pools[name] = EnginePool(name, roofline, max_batch, kv_tokens)
            for number in range(pool.workers):
                engine = self._engines[f"{name}-{number}"] = SimulatedEngine(
                    f"{name}-{number}",
                    cost,
                    self._weights,
                    lengths,
                    context=lengths.context,
                    max_batch=max_batch,
                    chunk=chunk,
                    kv_tokens=kv_tokens,
                    keeps_kv=scenario.engine.on_swap == "keep",
                )
                pools[engine.url] = kind
        return Router(
            EngineRegistry(self._engines, sink=sink, pools=pools),
            policy=routing_policy(scenario.routing.policy, scenario.routing.disaggregate),
            affinity={
                task.name: task.affinity if isinstance(task.affinity, str) else tuple(task.affinity)
                for task in scenario.tasks
            },
            keeps_kv=scenario.engine.on_swap == "keep",
        )

    def _limits(self, pool: str, device: DeviceClass, count: int) -> tuple[int, int, int]:
        """Maximum batch, tokens of a prefill pass and tokens of KV: as configured, or the defaults of the device."""
        config, shape = self._scenario.engine, self._scenario.shape
        defaults = engine_defaults(device.name)
        megabytes = config.kv_megabytes or defaults.get("kv_megabytes")
        if megabytes:
            kv_bytes = float(megabytes << 20)
        else:
            kv_bytes = device.memory * 1e9 * count * self._scenario.simulate.constants.kv_memory
            kv_bytes -= shape.parameters * shape.number_bytes
        kv_tokens = int(kv_bytes // shape.kv_bytes)
        longest = max(task.max_context for task in self._scenario.tasks)
        if kv_tokens < longest:
            raise ConfigError(
                f"an engine of pool {pool!r} has room for {max(0, kv_tokens)} tokens of KV, but max_context is "
                f"{longest}; give it more devices (tensor_parallel), a larger class, or a smaller model"
            )
        return config.max_batch or defaults["max_batch"], config.prefill_chunk or defaults["prefill_chunk"], kv_tokens

    def _device(self, name: str) -> DeviceClass:
        if name == "auto":
            raise ConfigError("a simulation needs to know the hardware: give every pool a device class, not auto")
        return self._classes[name]

    # Sampling

    async def _sample(self, sink: EventSink, log: bool) -> None:
        """Every few seconds, record what engines and the trainer are doing or waiting for."""
        samples = self._samples
        while True:
            why = self._why_idle()
            for pool, kind in self._pools.items():
                idle = sum(self._engines[engine.name].idle for engine in kind.engines)
                if idle:
                    samples[f"idle {pool} {why}"] += idle
            for part, share in self._parts().items():
                samples[f"part {part}"] += share
            samples["samples"] += 1
            samples["environments"] += self._environments.in_use
            samples["running"] += self._scheduler.running
            if log:
                await self._emit_samples(sink)
            if self._on_progress is not None:
                self._on_progress(self._trainer.version, asyncio.get_running_loop().time())
            await asyncio.sleep(self._scenario.simulate.sample_s)

    def _why_idle(self) -> str:
        if self._environments.resetting:
            return "reset"
        if self._environments.stepping:
            return "step"
        if self._rewards.active:
            return "reward"
        return "training" if self._trainer.busy else "weights"

    def _parts(self) -> dict[str, float]:
        """The parts of the step that this moment belongs to, with their shares: those of the trajectories under way.
        Where a batch starts as a whole, its resets are a phase of their own, whatever the first of them already do."""
        environments, training = self._environments, self._trainer.busy
        if training and not self._scheduler.running:
            return {"train": 1.0}
        if self._scheduler.schedule.one_batch and environments.resetting:
            return {"reset": 1.0}
        doing = {"reset": environments.resetting, "step": environments.stepping, "reward": self._rewards.active}
        doing["generate"] = environments.in_use - environments.resetting - environments.stepping
        if not (under_way := sum(doing.values())):
            return {"train" if training else "weights": 1.0}
        return {part: count / under_way for part, count in doing.items()}

    async def _emit_samples(self, sink: EventSink) -> None:
        sink.emit(self._scheduler.sample(self._environments.in_use, self._environments.capacity))
        self._phases.sample(sink, self._router.pool_of)
        for name, engine in self._engines.items():
            sink.emit(EngineSample.of(name, await engine.status()))

    def _emit_start(self, sink: EventSink) -> None:
        scenario = self._scenario
        sink.emit(
            RunStarted(
                name=scenario.name,
                preset=scenario.rollout.preset,
                alpha=scenario.schedule.alpha,
                seed=scenario.seed,
                steps=scenario.training.steps,
                tasks=[task.name for task in scenario.tasks],
                emulated=["all of it is simulated"],
                price=price_per_hour(self._whole, self._classes),
            )
        )
        for name, kind in self._pools.items():
            device = kind.roofline.device.name
            for engine in kind.engines:
                placed = Placed(
                    role="generate", pool=name, name=engine.name, wanted=device, device=device, node="", why="simulated"
                )
                sink.emit(placed)

    def _totals(self) -> dict[str, float]:
        """Totals that the services count themselves."""
        totals: defaultdict[str, float] = defaultdict(float, self._samples)
        for name, kind in self._pools.items():
            for each in kind.engines:
                engine = self._engines[each.name]
                for key in ("prefill", "decode", "weights"):
                    totals[f"{key} {name}"] += getattr(engine.times, key)
        totals["blocked"] = self._trainer.blocked_s
        totals["reward calls"], totals["reward cold"] = self._rewards.calls, self._rewards.cold
        totals["reward busy"] = self._rewards.busy_s
        return totals
