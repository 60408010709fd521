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
