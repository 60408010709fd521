"""What the controller costs by itself: its real scheduler, router, renderer, ledger, event log and connections, against
scripted engines and environments in other processes (`benchmarks.scripted_services`), on real sockets.

Every connection is one engine or one environment. A trajectory has `turns` turns; its context grows from `prompt`
tokens by `observation` + `answer` a turn, with a vocabulary of 50,000. Rewards are modelled. Counted are CPU seconds of
the controller's process, its threads included; those of the load generator are not. Answers and steps take `delay`
seconds, so short that the controller is busy: the less there is to do, the more a turn costs, because every message
wakes it up, and engines are sampled all the time.

Last line: `turns_per_s`, turns per CPU second of the controller, at the most engines; `ms_per_turn` for each number of
engines and `flat`, the largest of them over the first; `start_s` and `start_cpu_s` to connect to that many; memory;
with `--profile`, the milliseconds of CPU that each part of a turn takes, in a further run.
"""

import argparse
import asyncio
import json
import os
import resource
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass
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
from rollart.config import EnvironmentsConfig, TaskConfig
from rollart.core import gc_tuning
from rollart.core.event_log import EventLog
from rollart.core.schedule import Schedule
from rollart.core.types import Sampling
from rollart.engines.client import EngineClient
from rollart.envs.pool import EnvironmentPool
from rollart.fleet.engine_supervisor import EngineSampler
from rollart.fleet.ledger_writer import LedgerWriter
from rollart.launch import rpc
from rollart.models.chat import ChatRenderer
from rollart.models.tiny import SPECIAL, TEMPLATE
from rollart.rollout.engine_registry import EngineRegistry
from rollart.rollout.ledger import SqliteLedger
from rollart.rollout.router import Router
from rollart.rollout.scheduler import Scheduler
from rollart.rollout.trajectory import RolloutTask, TrajectoryRunner
from rollart.workers.host import KEY

GROUP = 8
CONNECTING = 32  # at once


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


async def connect_engines(stack: AsyncExitStack, url: str, key: str, count: int) -> dict[str, EngineClient]:
    room = asyncio.Semaphore(CONNECTING)

    async def connect(number: int) -> tuple[str, EngineClient]:
        async with room:
            client = EngineClient(await rpc.connect(url, key=key, deadline=60.0))
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
    "routing": [(Router, "_choose"), (Router, "_reserve"), (Router, "_record")],
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
        rest = {"everything else": result["ms_per_turn"] - sum(parts.values())}
        return {part: round(ms, 3) for part, ms in (parts | rest).items()}


async def play(
    load: Load, engines: int, urls: tuple[str, str], key: str, folder: Path, times: PartTimes | None = None
) -> dict[str, float]:
    task = TaskConfig.model_validate({"name": "load", "env": "scripted:Environment", "isolation": "process"})
    config = EnvironmentsConfig(processes=load.trajectories, hedges=0, warm=0, reset_deadline=300, step_deadline=300)
    folder.mkdir()
    async with AsyncExitStack() as stack:
        log = stack.enter_context(closing(EventLog(folder / "events", asyncio.get_running_loop().time)))
        records = stack.enter_context(closing(SqliteLedger.open(folder / "ledger.sqlite")))
        ledger = stack.enter_context(closing(LedgerWriter(records, log.flush)))
        began, cpu = time.monotonic(), time.process_time()
        clients = await connect_engines(stack, urls[0], key, engines)
        environments = EnvironmentPool([task], config, urls=[urls[1]], sink=log)
        stack.push_async_callback(environments.close)
        await environments.start()
        start_s, start_cpu_s = time.monotonic() - began, time.process_time() - cpu
        registry = EngineRegistry(clients, sink=log)
        sampler = EngineSampler(registry, log)
        samples = [asyncio.create_task(sampler.sample(*engine)) for engine in clients.items()]
        stack.push_async_callback(cancel_all, samples)
        runner = TrajectoryRunner(
            environments=environments,
            router=Router(registry),
            renderer=ChatRenderer(folder.parent / "tokenizer"),
            rewards=ModelledRewards(Random(0), seconds=lambda rng: 0.0),
            sink=log,
        )
        sampling = Sampling(max_tokens=load.answer)
        scheduler = Scheduler(
            tasks=[RolloutTask("load", 1.0, load.turns, 1 << 20, sampling, deadline=3_600)],
            schedule=Schedule(alpha=0, window=1.0),
            batch_groups=load.trajectories // GROUP,
            group_size=GROUP,
            steps=1,
            runner=runner,
            ledger=ledger,
            sink=log,
        )
        began, cpu = time.monotonic(), time.process_time()
        async with asyncio.timeout(1_800):
            with times.counting() if times is not None else nullcontext():
                batch = await scheduler.take_batch()
        took = time.process_time() - cpu
        turns = sum(len(sample.turns) for group in batch.groups for sample in group.samples)
        assert turns == load.trajectories // GROUP * GROUP * load.turns
        await scheduler.stop()
        return {
            "ms_per_turn": 1e3 * took / turns,
            "turns": turns,
            "wall_s": time.monotonic() - began,
            "start_s": start_s,
            "start_cpu_s": start_cpu_s,
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }


def measure(load: Load, counts: list[int], profile: bool) -> dict[str, Any]:
    results: dict[int, dict[str, float]] = {}
    parts: dict[str, float] = {}
    key = "load"
    os.environ[KEY] = key
    with scratch_folder("controller_load") as scratch:
        tokenizer = make_tokenizer(scratch / "tokenizer")
        end = ChatRenderer(tokenizer).stop[0]
        spec = {"key": key, "seed": 0, "end": end, **asdict(load)}
        with scripted("engines", spec) as engine_url, scripted("environments", spec) as environment_url:
            for count in counts:
                urls = (engine_url, environment_url)
                results[count] = asyncio.run(play(load, count, urls, key, scratch / str(count)))
                print(count, "engines", json.dumps(results[count]), flush=True)
            if profile:
                with PartTimes() as times:
                    profiled = asyncio.run(play(load, counts[0], urls, key, scratch / "profile", times))
                parts = times.per_turn(profiled)
    first, last = results[counts[0]], results[counts[-1]]
    return {
        "turns_per_s": round(1e3 / last["ms_per_turn"]),
        "mean_context": load.mean_context,
        "flat": round(max(result["ms_per_turn"] for result in results.values()) / first["ms_per_turn"], 2),
        "engines": {count: {name: round(value, 3) for name, value in r.items()} for count, r in results.items()},
        **({"profile": parts} if profile else {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="*", default=[100, 1_000, 3_000])
    parser.add_argument("--trajectories", type=int, default=Load().trajectories, help="in flight")
    parser.add_argument("--turns", type=int, default=Load().turns)
    parser.add_argument("--prompt", type=int, default=Load().prompt, help="tokens before the first turn")
    parser.add_argument("--delay", type=float, default=Load().delay, help="mean seconds of an answer and of a step")
    parser.add_argument("--profile", action="store_true", help="what each part of a turn costs, in a further run")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to check that it runs")
    options = parser.parse_args()
    load = Load(options.trajectories, options.turns, options.prompt, delay=options.delay)
    if options.smoke:
        load, options.engines, options.profile = Load(16, 3, 100, 20, 40, 0.01), [2, 4], True
    gc_tuning.collect_rarely()  # as every run does
    print(json.dumps(measure(load, options.engines, options.profile)))


if __name__ == "__main__":
    main()
