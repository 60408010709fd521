"""What looking costs: a run folder with 1,000,000 turns in a real headless Chromium.

Prints, on its last line: `first_paint_s` from opening the page until the overview shows steps and curves, with a server
that has not seen the run; `complete_s` until every event is read; `server_mb`, the server's peak of resident memory;
`live_lag_ms_p50` and `_p95` from an event to the pixel that shows it; `now_fps`, frames per second of the Now view with
20,000 trajectories that all change their phase twice a second, through the log, and `now_frame_ms_p95`; and
`run_slowdown`: in one real training run, the CPU time that all processes of the run (controller, engine, trainer,
environments) spend per trained trajectory while it is watched, over that while it is not, minus 1. The watcher, a
server and a client that streams the view Now, is stopped in every other span, in turns, and reads what it missed in the
next. CPU time, because wall time on a busy machine measures the neighbours; one run, because starts differ more than a
watcher costs; from step to step, without overlap (`sync_plus`) and with a learning rate near 0, so that spans do the
same work. It is the median over the pairs of spans, and `run_slowdown_error` its standard error, which grows with other
load on the machine; `run_cpu_ms` is the CPU time of a trajectory without a watcher, `watcher_cpu` the server's CPU
time over that of the run. Needs chromium and playwright.
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

import numpy as np
import psutil

from benchmarks import crash
from benchmarks.synthetic_run import TASKS, synthetic
from rollart.app.dashboard.phase_lanes import PHASES
from rollart.core import events as ev
from rollart.core.event_log import EventLog, EventReader

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
FLAGS += ["--disable-sync", "--disable-dev-shm-usage"]
TRAINING = f"""
name: watched
{crash.SMALL}
rollout: {{preset: sync_plus}}
training: {{steps: 1000000, batch_groups: 6, group_size: 4, lr: 1.0e-9}}  # learning would change what a step costs
evaluation: {{every: 0, final_episodes: 2}}
checkpoint: {{every: 1000000}}
"""
SPAN_S, SAMPLE_S = 2.0, 0.1
STEPS_S = STOP_S = 60.0


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


def slowdown(root: Path, spans: int, span_s: float) -> dict[str, float]:
    """One real training run; its watcher, a real server with a client, is stopped in every other span of it."""
    costs: dict[bool, list[float]] = {True: [], False: []}
    with _training(root) as run, _watcher(root, run.folder.name) as pid:
        before, began = _cpu_s(pid), run.cpu_s()
        for number in range(spans):
            watched = number % 4 in (0, 3)  # in both orders: the run may change slowly
            os.kill(pid, signal.SIGCONT if watched else signal.SIGSTOP)
            costs[watched].append(run.span(span_s))
        os.kill(pid, signal.SIGCONT)
        time.sleep(1.0)  # what is left to read belongs to the run too
        watcher, spent = _cpu_s(pid) - before, run.cpu_s() - began
    ratios = [watched / alone for watched, alone in zip(costs[True], costs[False], strict=True)]
    middle = median(ratios)
    spread = 1.4826 * median(abs(ratio - middle) for ratio in ratios)  # as a standard deviation
    return {
        "run_slowdown": middle - 1,
        "run_slowdown_error": 1.2533 * spread / len(ratios) ** 0.5,
        "run_trajectories": run.trained,
        "run_cpu_ms": 1000 * median(costs[False]),
        "watcher_cpu": watcher / spent,
    }


class Training:
    """A run, and what its steps cost."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.folder, self.trained = folder, 0
        self._process = psutil.Process(process.pid)
        self._reader = EventReader(folder / "events", ev.RunStarted, ev.BatchTaken, ev.StepDone)
        self._wall, self._taken = 0.0, 0

    def cpu_s(self) -> float:
        processes = (self._process, *self._process.children(recursive=True))
        return sum(_cpu_s(each.pid, ended=True) for each in processes)

    def span(self, seconds: float) -> float:
        """CPU seconds per trained trajectory, from the first to the last step that ends in the next `seconds`."""
        began, samples, steps = time.time(), list[tuple[float, float]](), list[tuple[float, int]]()
        while len(steps) < 3 or time.time() < began + seconds:
            if time.time() > began + seconds + STEPS_S:
                raise SystemExit(f"the run made no three steps in {seconds + STEPS_S:g} s")
            samples.append((time.time(), self.cpu_s()))
            time.sleep(SAMPLE_S)
            steps += [(t, trained) for t, trained in self._steps() if began <= t]
        steps = [(t, trained) for t, trained in steps if t <= samples[-1][0]]
        times, spent = np.array(samples).T
        first, last = np.interp([steps[0][0], steps[-1][0]], times, spent)
        trained = sum(count for _, count in steps[1:])
        self.trained += trained
        return float(last - first) / trained

    def _steps(self) -> Iterator[tuple[float, int]]:
        """When each step since the last call ended, and its trajectories."""
        for event in self._reader.read():
            match event:
                case ev.RunStarted():
                    self._wall = event.wall - event.t
                case ev.BatchTaken():
                    self._taken = event.trajectories
                case ev.StepDone():
                    yield self._wall + event.t, self._taken


@contextmanager
def _training(root: Path) -> Iterator[Training]:
    """Yields when it trains."""
    file, folder = root / "watched.yaml", root / "watched-1"
    file.write_text(TRAINING)
    folder.mkdir()
    process = crash.start(file, folder)
    try:
        crash.Lives(folder).wait_for_rollout(process)
        yield Training(process, folder)
        process.send_signal(signal.SIGINT)
        process.wait(STOP_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


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


def _cpu_s(pid: int, *, ended: bool = False) -> float:
    """Of a process and, with `ended`, of those of its children that are no more."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:  # it ended just now: its parent has its time
        return 0.0
    return sum(int(field) for field in fields[11 : 15 if ended else 13]) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="20,000 turns, a few samples: does it run?")
    parser.add_argument("--turns", type=int, default=1_000_000, help="turns of the big run")
    parser.add_argument("--spans", type=int, default=64, help="of the training run, half of them with a watcher")
    args = parser.parse_args()
    try:
        import playwright
    except ImportError:
        playwright = None
    if playwright is None or not (shutil.which("chromium") or shutil.which("google-chrome")):
        print(json.dumps({"skipped": "chromium or playwright is missing: `make chromium`"}))
        return
    turns, live, spans = (20_000, 3, 2) if args.smoke else (args.turns, 40, args.spans)
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
        found |= slowdown(root, spans, SPAN_S)
    print(json.dumps({name: round(value, 4) for name, value in found.items()}))


def _size(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
