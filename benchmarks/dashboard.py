"""What looking costs: a run folder with 1,000,000 turns in a real headless Chromium.

Prints, on its last line: `first_paint_s` from opening the page until the overview shows steps and curves, with a server
that has not seen the run; `complete_s` until every event is read; `server_mb`, the server's peak of resident memory;
`live_lag_ms_p50` and `_p95` from an event to the pixel that shows it; `now_fps`, frames per second of the Now view with
20,000 trajectories that all change their phase twice a second, through the log, and `now_frame_ms_p95`; and
`run_slowdown`, the CPU time of a rollout with a watcher over that of the same one without, minus 1, alternating in one
run: the server is stopped in every other part, and reads what it missed in the next. `watcher_cpu` is the server's CPU
time over that of the rollout. Needs chromium and playwright.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks import control_plane
from rollart.app.dashboard.phase_lanes import PHASES
from rollart.core import events as ev
from rollart.core.event_log import EventLog
from rollart.core.types import Outcome
from rollart.simulator.clock import run

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
FLAGS += ["--disable-sync", "--disable-dev-shm-usage"]
TASKS = ("frozen_lake", "swe", "webshop", "column_sum")
TURNS, GROUP = 10, 8


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def synthetic(folder: Path, turns: int, batch: int = 512) -> int:
    """A finished run with that many turns; returns the number of its steps."""
    folder.mkdir(parents=True)
    clock, rng = Clock(), random.Random(0)
    log = EventLog(folder / "events", clock)
    steps = max(2, turns // TURNS // batch)
    log.emit(ev.RunStarted(name="big", preset="rollart", alpha=1, seed=0, steps=steps, tasks=list(TASKS), wall=1.7e9))
    for step in range(steps):
        ids = _rollout(log, clock, rng, step, batch)
        log.emit(_taken(step, ids, batch))
        clock.now += 4.0
        values = {"loss": rng.gauss(0.1, 0.02), "grad_norm": rng.random(), "entropy": 1 / (1 + step / 50)}
        log.emit(ev.StepDone(version=step + 1, seconds=3.8, tokens=batch * 900, values=values, tasks={}))
        log.emit(ev.Published(version=step + 1, seconds=0.2, bytes=10**9))
        for engine in range(4):
            log.emit(ev.EngineSwapped(engine=f"engine-{engine}", version=step + 1, seconds=0.8, bytes=10**9))
        if step % 20 == 0:
            for task in TASKS:
                success = 1 - 0.8 ** (1 + step / 20)
                result = ev.Evaluated(version=step, task=task, episodes=100, success=success, reward=0.5, failed=0)
                log.emit(result)
    log.emit(ev.RunEnded(version=steps, reason="finished"))
    log.close()
    return steps


def _taken(step: int, ids: list[str], batch: int) -> ev.BatchTaken:
    return ev.BatchTaken(
        step=step,
        ids=ids,
        groups=dict.fromkeys(TASKS, 1),
        trajectories=batch,
        tokens=batch * 900,
        waited_s=1.0,
        staleness={0: batch // 2, 1: batch - batch // 2},
    )


def _rollout(log: EventLog, clock: Clock, rng: random.Random, step: int, batch: int) -> list[str]:
    """The trajectories of one batch, a turn of each after the other; returns the ids of their groups."""
    names = [(f"s{step:06d}-{n // GROUP:04d}", n % GROUP, TASKS[n // GROUP % len(TASKS)]) for n in range(batch)]
    for group, member, task in names:
        id = f"{group}.{member}"
        log.emit(ev.TrajectoryStarted(trajectory=id, task=task, group=group, version=max(0, step - member % 2)))
        log.emit(ev.EnvironmentReset(trajectory=id, task=task, seconds=0.2))
        clock.now += 0.001
    for turn in range(TURNS):
        for number, (group, member, task) in enumerate(names):
            clock.now += 0.0008
            log.emit(
                ev.TurnDone(
                    trajectory=f"{group}.{member}",
                    task=task,
                    turn=turn,
                    engine=f"engine-{number % 4}",
                    prompt=200 * (turn + 1),
                    cached=200 * turn,
                    tokens=40,
                    version=step,
                    queue_s=rng.random() * 0.05,
                    generate_s=rng.random(),
                    env_s=rng.random() * 0.5,
                    pool="h20",
                    why="lowest predicted time",
                )
            )
        log.emit(ev.PipelineSample(running=batch, scoring=0, ready=0, training=0, environments=batch, processes=batch))
        for engine in range(4):
            log.emit(_engine_sample(f"engine-{engine}", clock.now, step))
    for group, member, task in names:
        clock.now += 0.0005
        log.emit(_ended(f"{group}.{member}", group, task, rng))
    return sorted({group for group, _, _ in names})


def _engine_sample(engine: str, t: float, version: int) -> ev.EngineSample:
    return ev.EngineSample(
        engine=engine,
        version=version,
        running=100,
        waiting=4,
        kv_bytes=10**9,
        prefilled=1000,
        generated=1000,
        busy_s=t * 0.8,
        kv_budget=4 * 10**9,
    )


def _ended(id: str, group: str, task: str, rng: random.Random) -> ev.TrajectoryEnded:
    return ev.TrajectoryEnded(
        trajectory=id,
        task=task,
        group=group,
        outcome=Outcome.FINISHED,
        turns=TURNS,
        tokens=900,
        seconds=8.0,
        reward=rng.random(),
        success=rng.random() > 0.5,
    )


@contextmanager
def dashboard(root: Path) -> Iterator[tuple[str, int]]:
    """The real command; yields its address and process id."""
    command = [sys.executable, "-m", "rollart", "dashboard", str(root), "--with-parent"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None
    try:
        yield child.stdout.readline().strip().removeprefix("dashboard: "), child.pid
    finally:
        child.stdin.close()
        child.wait(timeout=20)


def peak_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


@contextmanager
def page_of(url: str) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        browser = driver.chromium.launch(executable_path=path, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 860})
        page.set_default_timeout(300_000)
        page.goto("about:blank")
        yield page
        browser.close()


def paint(root: Path) -> dict[str, float]:
    with dashboard(root) as (url, pid), page_of(url) as page:
        began = time.perf_counter()
        page.goto(f"{url}#/overview/big-1")
        page.locator(".chart path.line").first.wait_for(state="attached")
        first = time.perf_counter() - began
        page.locator("#status:empty").wait_for(state="attached")
        whole = time.perf_counter() - began
        for view in ("now", "trajectories", "time", "freshness", "hardware"):
            page.evaluate(f"location.hash = '#/{view}/big-1'")
            page.locator("h1", has_text=view.capitalize()).wait_for()
        return {"first_paint_s": first, "complete_s": whole, "server_mb": peak_mb(pid)}


def lag(root: Path, samples: int) -> list[float]:
    """From `emit` to the text on the page, in milliseconds, while other events go on."""
    (root / "live-1").mkdir()
    log = EventLog(root / "live-1" / "events", time.monotonic)
    log.emit(ev.RunStarted(name="live", preset="rollart", alpha=1, seed=0, steps=10**6, tasks=["a"]))
    log.flush()
    found = []
    with dashboard(root) as (url, _), page_of(url) as page:
        page.goto(f"{url}#/overview/live-1")
        page.locator("h1", has_text="live-1").wait_for()
        for version in range(1, samples + 1):
            time.sleep(random.random() * 0.7)
            began = time.perf_counter()
            log.emit(ev.StepDone(version=version, seconds=0.1, tokens=1, values={}, tasks={}))
            page.locator(".stat .value", has_text=f"{version}of").first.wait_for()
            found.append((time.perf_counter() - began) * 1000)
    log.close()
    return found


def frames(root: Path, trajectories: int, seconds: float) -> dict[str, float]:
    """How smooth the page is while every trajectory changes its phase twice a second."""
    (root / "now-1").mkdir()
    log = EventLog(root / "now-1" / "events", time.monotonic)
    log.emit(ev.RunStarted(name="now", preset="rollart", alpha=1, seed=0, steps=10, tasks=list(TASKS)))
    ids = [f"g{n // 8}.{n % 8}" for n in range(trajectories)]
    for n, id in enumerate(ids):
        task = TASKS[n // 8 % len(TASKS)]
        log.emit(ev.TrajectoryStarted(trajectory=id, task=task, group=f"g{n // 8}", version=0))
    with dashboard(root) as (url, _), page_of(url) as page, _moving(log, ids):
        page.goto(f"{url}#/now/now-1")
        page.locator(f"canvas[aria-label^='{trajectories} trajectories']").wait_for()
        script = """seconds => new Promise(done => {
            const times = [];
            const tick = now => {
                times.push(now);
                now - times[0] < seconds * 1000 ? requestAnimationFrame(tick) : done(times);
            };
            requestAnimationFrame(tick);
        })"""
        times: list[float] = page.evaluate(script, seconds)
        labels = {page.locator("canvas").get_attribute("aria-label") for _ in _every(0.3, 5)}
        assert len(labels) > 1, "the view stands still"
    gaps = [after - before for before, after in pairwise(times)]
    return {"now_fps": len(gaps) / (times[-1] - times[0]) * 1000, "now_frame_ms_p95": quantiles(gaps, n=20)[-1]}


@contextmanager
def _moving(log: EventLog, ids: list[str]) -> Iterator[None]:
    """Twice a second, as in a run, every trajectory goes to its next phase."""
    over = threading.Event()

    def move() -> None:
        step = 0
        while not over.wait(0.5):
            step += 1
            parts = [ids[len(ids) * n * n // 25 : len(ids) * (n + 1) ** 2 // 25] for n in range(5)]
            # Parts of different sizes; the phases after the first five are reached by ends and batches.
            log.emit(ev.PhasesChanged(phases={PHASES[(n + step) % 5]: part for n, part in enumerate(parts)}))

    thread = threading.Thread(target=move)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        log.close()


def _every(seconds: float, times: int) -> Iterator[None]:
    for _ in range(times):
        time.sleep(seconds)
        yield


def slowdown(root: Path, trajectories: int, rounds: int) -> dict[str, float]:
    """The rollout's own CPU time, watched and not, in turns; the watcher is a real server with a client."""
    folder = root / "watched-1"
    folder.mkdir()
    run(control_plane.rollout(trajectories, folder))  # imports and caches
    ratios, spent = [], 0.0
    with _watcher(root, folder.name) as pid:
        before = _cpu_s(pid)
        for number in range(rounds):
            took = {}
            for watched in (number % 2 == 0, number % 2 == 1):
                os.kill(pid, signal.SIGCONT if watched else signal.SIGSTOP)
                (folder / "ledger.sqlite").unlink()
                took[watched] = run(control_plane.rollout(trajectories, folder))
            ratios.append(took[True] / took[False])
            spent += sum(took.values())
        os.kill(pid, signal.SIGCONT)
        time.sleep(1.0)  # what is left to read belongs to the rollouts too
        watcher = _cpu_s(pid) - before
    return {"run_slowdown": median(ratios) - 1, "watcher_cpu": watcher / spent}


@contextmanager
def _watcher(root: Path, name: str) -> Iterator[int]:
    """A server whose view Now is streamed to a client, after it has read the log; yields its process id."""
    with dashboard(root) as (url, pid):
        base, _, key = url.partition("/?")
        code = (
            "import sys, urllib.request\nfor line in urllib.request.urlopen(sys.argv[1]): print(len(line), flush=True)"
        )
        client = subprocess.Popen(
            [sys.executable, "-c", code, f"{base}/api/stream?run={name}&view=now&{key}"], stdout=subprocess.PIPE
        )
        assert client.stdout is not None
        try:
            client.stdout.readline()
            drain = threading.Thread(target=client.stdout.read, daemon=True)
            drain.start()
            yield pid
        finally:
            os.kill(pid, signal.SIGCONT)
            client.kill()
            client.wait()


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="20,000 turns, a few samples: does it run?")
    parser.add_argument("--turns", type=int, default=1_000_000, help="turns of the big run")
    parser.add_argument("--rounds", type=int, default=15, help="pairs of rollouts with and without a watcher")
    args = parser.parse_args()
    try:
        import playwright
    except ImportError:
        playwright = None
    if playwright is None or not (shutil.which("chromium") or shutil.which("google-chrome")):
        print(json.dumps({"skipped": "chromium or playwright is missing: `make chromium`"}))
        return
    turns, live, rounds = (20_000, 3, 1) if args.smoke else (args.turns, 40, args.rounds)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        began = time.perf_counter()
        synthetic(root / "big-1", turns)
        print(f"a log of {turns:,} turns, {_size(root / 'big-1'):.1f} MB, made in {time.perf_counter() - began:.0f} s")
        found: dict[str, float] = {"turns": turns, "log_mb": _size(root / "big-1"), **paint(root)}
        print({name: round(value, 2) for name, value in found.items()})
        lags = lag(root, live)
        found |= {"live_lag_ms_p50": median(lags), "live_lag_ms_p95": quantiles(lags, n=20)[-1]}
        found |= frames(root, 20_000, 2.0 if args.smoke else 6.0)
        found |= slowdown(root, 40 if args.smoke else 400, rounds)
    print(json.dumps({name: round(value, 4) for name, value in found.items()}))


def _size(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
