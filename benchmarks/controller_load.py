"""What the controller costs by itself: its real scheduler, router, renderer, ledger, event log and connections, against
scripted engines and environments in other processes (`benchmarks.scripted_services`), on real sockets.

Every connection is one engine or one environment. A trajectory has `turns` turns; its context grows from `prompt`
tokens by `observation` + `answer` a turn, with a vocabulary of 50,000. Answers and steps take `delay` seconds, so short
that the controller is busy: the less there is to do, the more a turn costs, because every message wakes it up, and
engines are sampled all the time. Without players rewards are modelled; players call real ones.

Counted are, after trajectories of two turns that are not, the CPU seconds, by the kernel, of the controller's process
and of the player processes, their threads included; those of the load generators and of reward hosts are not. With c
and p the CPU seconds that a turn costs the controller and all n players, `turns_per_s` is 1 / max(c, p / n, (c + p) /
2): the rate at which 2 cores are used up, or one process its core. Without players it is 1 / c.

Last line: `turns_per_s` with `--players` at the most engines; `flat`, the cost c + p there over that at the fewest;
`runs`, one for each number of engines, and one for each number of players at the fewest: `controller_ms` and
`players_ms` of CPU a turn, `start_s` and `start_cpu_s` to connect to that many engines, megabytes in use at the end;
with `--profile`, the milliseconds of CPU that each part of a turn takes without players, in a further run.
"""

import argparse
import asyncio
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import wraps
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.modelled import ModelledRewards
from benchmarks.scratch import scratch_folder
from benchmarks.scripted_services import WORDS
from rollart.config import RunFile
from rollart.core import gc_tuning
from rollart.core.event_log import EventLog
from rollart.core.schedule import Schedule
from rollart.engines.client import EngineClient
from rollart.envs.pool import EnvironmentPool
from rollart.fleet.control_services import loop_factory
from rollart.fleet.controller import rollout_tasks
from rollart.fleet.engine_supervisor import EngineSampler
from rollart.fleet.ledger_writer import LedgerWriter
from rollart.launch import rpc
from rollart.launch.local import LocalLauncher
from rollart.models.chat import ChatRenderer
from rollart.models.tiny import SPECIAL, TEMPLATE
from rollart.players.pool import PlayerPool, PlayerSetup, player_count
from rollart.rollout.engine_registry import EngineRegistry
from rollart.rollout.evaluation import EpisodeRunner
from rollart.rollout.ledger import Ledger, SqliteLedger
from rollart.rollout.router import Router
from rollart.rollout.scheduler import Scheduler
from rollart.rollout.trajectory import TrajectoryRunner
from rollart.simulator.services import NullLedger
from rollart.workers.host import KEY
from rollart.workers.host_handle import raise_open_file_limit

GROUP = 8
CONNECTING = 32  # at once
WARM_UP = 2  # turns of other trajectories, before anything is counted


@dataclass(frozen=True, slots=True)
class Load:
    trajectories: int = 160
    turns: int = 37
    prompt: int = 8_000
    observation: int = 450
    answer: int = 200
    delay: float = 0.1

    @property
    def mean_context(self) -> int:
        """Of a request."""
        return self.prompt + (self.observation + self.answer) * (self.turns - 1) // 2


def make_tokenizer(folder: Path) -> Path:
    vocabulary = {
        word: number for number, word in enumerate((*SPECIAL, *(f"w{n}" for n in range(len(SPECIAL), WORDS))))
    }
    words = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[1]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=SPECIAL[0],
        unk_token=SPECIAL[1],
        eos_token=SPECIAL[2],
        additional_special_tokens=list(SPECIAL[3:]),
        chat_template=TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def scripted(kind: str, spec: dict[str, Any]) -> Iterator[str]:
    """The URL of a load generator, while it runs."""
    command = [sys.executable, "-c", f"from benchmarks.scripted_services import serve; serve({kind!r})"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(spec) + "\n")
        process.stdin.flush()
        yield json.loads(process.stdout.readline())["url"]
        process.stdin.close()  # which ends it


@dataclass(frozen=True, slots=True)
class Services:
    """Where the load generators are, and the folder of the tokenizer."""

    engines: str
    environments: str
    key: str
    tokenizer: Path

    def engine_url(self, number: int) -> str:
        """An address of its own for each, so that players connect to each: all of 127.0.0.0/8 is this machine."""
        return f"http://127.1.{number >> 8}.{number & 255}:{self.engines.rpartition(':')[2]}"

    def run_file(self, load: Load, players: int) -> RunFile:
        task = {
            "name": "load",
            "env": "scripted:Environment",
            "isolation": "process",
            "max_turns": load.turns,
            "max_context": 1 << 20,
            "sampling": {"max_tokens": load.answer},
        }
        environments = {"processes": load.trajectories, "hedges": 0, "warm": 0}
        return RunFile.model_validate(
            {
                "model": str(self.tokenizer),
                "tasks": [task],
                "rollout": {"players": players, "trajectory_deadline": 3_600},
                "environments": {**environments, "reset_deadline": 300, "step_deadline": 300},
                "pools": {"hosts": {"role": "environment", "device": "cpu", "urls": [self.environments]}},
            }
        )


async def connect_engines(stack: AsyncExitStack, services: Services, count: int) -> dict[str, EngineClient]:
    room = asyncio.Semaphore(CONNECTING)

    async def connect(number: int) -> tuple[str, EngineClient]:
        async with room:
            client = EngineClient(await rpc.connect(services.engine_url(number), key=services.key, deadline=60.0))
            await client.status()
        stack.push_async_callback(client.close)
        return f"engine-{number}", client

    return dict(await asyncio.gather(*map(connect, range(count))))


async def cancel_all(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# Whose CPU time `--profile` counts; none calls another. The rest of a turn is asyncio and everything that is short.
PARTS: dict[str, list[tuple[type, str]]] = {
    "tokenizing observations": [(ChatRenderer, "_encode")],
    "reading answers": [(ChatRenderer, "read")],
    "routing": [(Router, "_choose"), (Router, "_reserve"), (Router, "record")],
    "packing requests": [(rpc._Outbox, "put")],
    "sending": [(asyncio.selector_events._SelectorSocketTransport, "write")],  # type: ignore[attr-defined]
    "receiving": [(asyncio.selector_events._SelectorSocketTransport, "_read_ready")],  # type: ignore[attr-defined]
    "polling sockets": [(selectors.EpollSelector, "select")],
    "events": [(EventLog, "emit"), (EventLog, "_write_pending")],
    "ledger": [(SqliteLedger, "add")],
    "batches": [(Scheduler, "_lease")],
}


class PartTimes:
    """CPU seconds of all threads within `PARTS`. It is entered before there are connections: they keep their methods.
    Only what runs within `counting` counts."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._counts = False
        self._patches = ExitStack()

    def __enter__(self) -> "PartTimes":
        for part, methods in PARTS.items():
            for owner, name in methods:
                timed = self._timed(part, getattr(owner, name))
                self._patches.enter_context(patch.object(owner, name, timed))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    @contextmanager
    def counting(self) -> Iterator[None]:
        self._counts = True
        yield
        self._counts = False

    def _timed(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                if self._counts:
                    self.seconds[part] += time.thread_time() - began

        return timed

    def per_turn(self, result: Mapping[str, float]) -> dict[str, float]:
        """Milliseconds of each part, and of the rest."""
        parts = {part: 1e3 * seconds / result["turns"] for part, seconds in self.seconds.items()}
        rest = {"everything else": result["controller_ms"] - sum(parts.values())}
        return {part: round(ms, 3) for part, ms in (parts | rest).items()}


def cpu_seconds(pid: int) -> float:
    """Of a process, all its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def megabytes(pid: int | str) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


@asynccontextmanager
async def runner_of(
    run: RunFile, services: Services, router: Router, log: EventLog, folder: Path
) -> AsyncIterator[tuple[EpisodeRunner, PlayerPool | None]]:
    """As a run makes it, with the players that its run file asks for."""
    if run.rollout.players:
        setup = PlayerSetup(run, player_count(run), services.tokenizer, folder)
        players = PlayerPool(setup, launcher=LocalLauncher(), router=router, sink=log)
        try:
            await players.start()
            yield players, players
        finally:
            await players.close()
        return
    pool = EnvironmentPool(run.tasks, run.environments, urls=[services.environments], sink=log)
    try:
        await pool.start()
        rewards = ModelledRewards(Random(0), seconds=lambda rng: 0.0)
        renderer = ChatRenderer(services.tokenizer)
        yield TrajectoryRunner(environments=pool, router=router, renderer=renderer, rewards=rewards, sink=log), None
    finally:
        await pool.close()


async def play(
    load: Load, engines: int, players: int, services: Services, folder: Path, times: PartTimes | None = None
) -> dict[str, float]:
    run = services.run_file(load, players)
    folder.mkdir()
    async with AsyncExitStack() as stack:
        log = stack.enter_context(closing(EventLog(folder / "events", asyncio.get_running_loop().time)))
        records = stack.enter_context(closing(SqliteLedger.open(folder / "ledger.sqlite")))
        ledger = stack.enter_context(closing(LedgerWriter(records, log.flush)))
        began, cpu = time.monotonic(), time.process_time()
        clients = await connect_engines(stack, services, engines)
        start_s, start_cpu_s = time.monotonic() - began, time.process_time() - cpu
        registry = EngineRegistry(clients, sink=log)
        sampler = EngineSampler(registry, log)
        samples = [asyncio.create_task(sampler.sample(*engine)) for engine in clients.items()]
        stack.push_async_callback(cancel_all, samples)
        runner, pool = await stack.enter_async_context(runner_of(run, services, Router(registry), log, folder))
        pids = list(pool.pids.values()) if pool is not None else []

        def schedule(turns: int, seed: int, ledger: Ledger) -> Scheduler:
            return Scheduler(
                tasks=[replace(task, max_turns=turns) for task in rollout_tasks(run)],
                schedule=Schedule(alpha=0, window=1.0),
                batch_groups=load.trajectories // GROUP,
                group_size=GROUP,
                steps=1,
                runner=runner,
                engines=registry,
                ledger=ledger,
                sink=log,
                seed=seed,
            )

        async with asyncio.timeout(600):  # players connect to engines, and everything runs once
            await schedule(WARM_UP, 1, NullLedger()).take_batch()
        scheduler = schedule(load.turns, 2, ledger)
        began, cpu, cpu_players = time.monotonic(), time.process_time(), sum(map(cpu_seconds, pids))
        async with asyncio.timeout(1_800):
            with times.counting() if times is not None else nullcontext():
                batch = await scheduler.take_batch()
        took, took_players = time.process_time() - cpu, sum(map(cpu_seconds, pids)) - cpu_players
        turns = load.trajectories // GROUP * GROUP * load.turns
        assert sum(len(group.samples) for group in batch.groups) * load.turns == turns
        memory = megabytes("self"), sum(map(megabytes, pids))
        await scheduler.stop()
        return {
            "engines": engines,
            "players": players,
            "controller_ms": 1e3 * took / turns,
            "players_ms": 1e3 * took_players / turns,
            "turns": turns,
            "wall_s": time.monotonic() - began,
            "start_s": start_s,
            "start_cpu_s": start_cpu_s,
            "controller_mb": memory[0],
            "players_mb": memory[1],
        }


def turns_per_s(run: Mapping[str, float]) -> float:
    """On two cores: see the top of this file."""
    controller, players, count = run["controller_ms"], run["players_ms"], run["players"]
    return 1e3 / (max(controller, players / count, (controller + players) / 2) if count else controller)


def measure(load: Load, counts: list[int], players: list[int], profile: bool) -> dict[str, Any]:
    """The last of `players` is used with each number of engines."""
    runs: list[dict[str, float]] = []
    key = "load"
    os.environ[KEY] = key
    raise_open_file_limit()
    plan = [(counts[0], count) for count in players[:-1]] + [(count, players[-1]) for count in counts]
    with scratch_folder("controller_load") as scratch:
        tokenizer = make_tokenizer(scratch / "tokenizer")
        end = ChatRenderer(tokenizer).stop[0]
        spec = {"key": key, "seed": 0, "end": end, "bind": "", **asdict(load)}
        with scripted("engines", spec) as engine_url, scripted("environments", spec) as environment_url:
            services = Services(engine_url, environment_url, key, tokenizer)
            for number, (engines, count) in enumerate(plan):
                with asyncio.Runner(loop_factory=loop_factory(services.run_file(load, count))) as runner:
                    run = runner.run(play(load, engines, count, services, scratch / str(number)))
                runs.append(run | {"turns_per_s": turns_per_s(run)})
                print(json.dumps(runs[-1]), flush=True)
            parts: dict[str, float] = {}
            if profile:
                with PartTimes() as times:
                    profiled = asyncio.run(play(load, counts[0], 0, services, scratch / "profile", times))
                parts = times.per_turn(profiled)
    first, last = runs[-len(counts)], runs[-1]
    cost = [run["controller_ms"] + run["players_ms"] for run in (first, last)]
    return {
        "turns_per_s": round(last["turns_per_s"]),
        "mean_context": load.mean_context,
        "flat": round(cost[1] / cost[0], 2),
        "runs": [{name: round(value, 3) for name, value in run.items()} for run in runs],
        **({"profile": parts} if profile else {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="*", default=[100, 1_000, 3_000])
    parser.add_argument(
        "--players", type=int, nargs="*", default=[0, 1, 2], help="processes; the last number is used with all engines"
    )
    parser.add_argument("--trajectories", type=int, default=Load().trajectories, help="in flight")
    parser.add_argument("--turns", type=int, default=Load().turns)
    parser.add_argument("--prompt", type=int, default=Load().prompt, help="tokens before the first turn")
    parser.add_argument("--delay", type=float, default=Load().delay, help="mean seconds of an answer and of a step")
    parser.add_argument("--profile", action="store_true", help="what each part of a turn costs, in a further run")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to check that it runs")
    options = parser.parse_args()
    load = Load(options.trajectories, options.turns, options.prompt, delay=options.delay)
    if options.smoke:
        load, options.engines, options.players, options.profile = Load(16, 3, 100, 20, 40, 0.01), [2, 4], [0, 2], True
    gc_tuning.collect_rarely()  # as every run does
    print(json.dumps(measure(load, options.engines, options.players, options.profile)))


if __name__ == "__main__":
    main()
