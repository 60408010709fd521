"""Folders of runs for the dashboard, and a server of them in a thread of the test."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from sample_run import sample_run, write_log

from rollart.app.dashboard.runs import Runs
from rollart.app.dashboard.server import make_app
from rollart.core import events as ev
from rollart.core.types import Message, Outcome, Trajectory, Turn
from rollart.rollout.ledger import SqliteLedger

KEY = "a-key-of-the-test"
HOSTILE = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
    "\x00\x07\x1b[31m\u202eright to left\u202c\u2066\ufeff"
)


def finished_run(folder: Path, seed: int = 0, steps: int = 12) -> Path:
    folder.mkdir(parents=True)
    write_log(folder / "events", sample_run(seed=seed, steps=steps))
    (folder / "run.yaml").write_text(f"name: sample\nseed: {seed}\ntraining:\n  steps: {steps}\n  lr: 0.001\n")
    return folder


def imitation_log() -> list[ev.AnyEvent]:
    """As a robot policy leaves it: supervised steps and evaluations, nothing of RL."""
    task, steps = "reach-v3", 200
    started = ev.RunStarted(name="reach", preset="imitation", alpha=0, seed=0, steps=steps, tasks=[task])
    started.work, started.model = "imitation", "meanflow"
    log: list[ev.AnyEvent] = [started]
    for step in range(0, steps + 1, 10):
        log.append(ev.WarmupStep(t=step / 10, step=step, steps=steps, loss=2.0 / (1 + step)))
        if step in (100, 200):
            score = ev.Evaluated(t=step / 10, version=step, task=task, episodes=50, success=0.0, reward=0.0, failed=0)
            score.success = score.reward = {100: 0.4, 200: 0.9}[step]
            score.final = step == steps
            log.append(score)
    return [*log, ev.RunEnded(t=21.0, version=steps, reason="finished")]


def sampling_log() -> list[ev.AnyEvent]:
    """As `rollart sample` leaves it: four attempts at each of three episodes."""
    started = ev.RunStarted(name="samples", preset="rollart", alpha=1, seed=0, steps=0, tasks=["sums"], work="sample")
    log: list[ev.AnyEvent] = [started]
    for number in range(12):
        id, group = f"sample-sums-{number // 4}.{number % 4}", f"sample-sums-{number // 4}"
        log.append(ev.TrajectoryStarted(t=number, trajectory=id, task="sums", group=group, version=0))
        ended = ev.TrajectoryEnded(
            t=number + 0.5,
            trajectory=id,
            task="sums",
            group=group,
            outcome=Outcome.FINISHED,
            turns=1,
            tokens=9,
            seconds=0.5,
        )
        ended.reward, ended.success = float(number % 2), bool(number % 2)
        log.append(ended)
    score = ev.Evaluated(t=13, version=0, task="sums", episodes=12, success=0.5, reward=0.5, failed=0, final=True)
    score.samples, score.passed = 4, 1.0
    return [*log, score, ev.RunEnded(t=13, version=0, reason="finished")]


def hostile_run(folder: Path) -> Path:
    """A run whose names, warnings and messages attack whoever shows them. One message is a line of 10 MB."""
    folder.mkdir(parents=True)
    id, task = "hostile-000000.0", f"task {HOSTILE}"
    started = ev.RunStarted(name="hostile", preset="rollart", alpha=1, seed=0, steps=2, tasks=[task])
    write_log(
        folder / "events",
        [
            started,
            ev.Warned(t=0.5, message=f"careful {HOSTILE}"),
            ev.TrajectoryStarted(t=1, trajectory=id, task=task, group="hostile-000000", version=0),
            ev.TrajectoryEnded(
                t=2,
                trajectory=id,
                task=task,
                group="hostile-000000",
                outcome=Outcome.FINISHED,
                turns=1,
                tokens=4,
                seconds=1.0,
                reward=1.0,
                reason=HOSTILE,
            ),
        ],
    )
    turn = Turn(
        messages=(Message("user", HOSTILE), Message("user", "x" * 10_000_000)),
        prompt=(1, 2),
        action=f"I say {HOSTILE}",
        tokens=(3, 4),
        logprobs=(-0.1, -2.0),
        versions=(0, 1),
        finish="stop",
    )
    ledger = SqliteLedger.open(folder / "ledger.sqlite")
    ledger.add(
        Trajectory(
            id=id,
            task=task,
            group="hostile-000000",
            member=0,
            seed=1,
            outcome=Outcome.FINISHED,
            turns=(turn,),
            reward=1.0,
            parts={HOSTILE: 1.0},
            reason=HOSTILE,
        )
    )
    ledger.close()
    return folder


@contextmanager
def served(root: Path) -> Iterator[str]:
    """Yields the address, without a key."""
    server = uvicorn.Server(uvicorn.Config(make_app(Runs(root), KEY), port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    ready = threading.Event()
    while not server.started:
        ready.wait(0.02)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(timeout=10)
