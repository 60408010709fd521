"""Makes the pictures of docs/dashboard.md: every view of a run, in the system's Chromium.

    python docs/screenshots.py RUNS_DIR RUN [--simulated RUN] [--out docs/dashboard]

RUNS_DIR is the folder of the runs, RUN the name of a trained one; `--simulated` is one for the views that show more
with many engines. The view Now is of a busy moment: of a copy of its log that ends there. A plan.json in
RUNS_DIR, from `rollart plan --json`, is drawn too.
"""

import argparse
import math
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from rollart.app.dashboard.phase_lanes import PhaseLanes
from rollart.core.event_log import EventLog, read_events
from rollart.core.run_folder import events_of

WAIT_MS = 120_000
MOMENTS = 60  # of a run that are looked at for a busy one


def shoot(page: Page, view: str, run: str, path: Path, query: str = "", heading: str = "h1", top: str = "h1") -> None:
    """`heading` is what it waits for, `top` what the picture begins with."""
    page.evaluate(f"location.hash = '#/{view}/{run}{query}'")
    page.locator(heading).first.wait_for()
    page.locator("#status:empty").wait_for(state="attached")
    page.wait_for_timeout(1500)  # moving squares come to rest
    page.locator(top).first.evaluate("node => scrollTo(0, node.getBoundingClientRect().top + scrollY - 12)")
    page.screenshot(path=path, full_page=False)
    print(path)


def first_trajectory(page: Page, run: str) -> str:
    """A long held-out one, which has the same episode at other versions beside it."""
    page.evaluate(f"location.hash = '#/plans/{run}'")  # away from the list, whose rows are others
    page.locator("h1", has_text="Simulate").wait_for()
    page.evaluate(f"location.hash = '#/trajectories/{run}?split=held_out&success=yes&sort=turns&order=desc'")
    page.locator("tr.link").first.wait_for()
    return page.locator("tr.link").first.get_attribute("data-id") or ""


def busy_moment(run: Path) -> float:
    """When trajectories are in the most phases, with many in each."""
    end = max(event.t for event in read_events(events_of(run)))
    lanes, best, found, next_look = PhaseLanes(), -1.0, end, 0.0
    for event in read_events(events_of(run)):
        lanes.fold(event)
        if event.t < next_look:
            continue
        next_look += end / MOMENTS
        phases = sum((Counter(counts) for counts in lanes.counts().values()), Counter[str]())
        value = sum(math.log1p(count) for count in phases.values())
        if value > best:
            best, found = value, event.t
    return found


def copy_until_busy(run: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    end = busy_moment(run)
    now = [0.0]
    log = EventLog(folder / "events", lambda: now[0])
    for event in read_events(events_of(run)):
        if event.t <= end:
            now[0] = event.t
            log.emit(event)
    log.close()


@contextmanager
def dashboard(root: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "rollart", "dashboard", str(root), "--with-parent"]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None and server.stdout is not None
    try:
        yield server.stdout.readline().strip().removeprefix("dashboard: ")
    finally:
        server.stdin.close()
        server.wait(timeout=20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("run")
    parser.add_argument("--simulated", default="")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "dashboard")
    args = parser.parse_args()
    args.out.mkdir(exist_ok=True)
    many = args.simulated or args.run
    with tempfile.TemporaryDirectory() as scratch, dashboard(args.runs) as all_runs, sync_playwright() as driver:
        copy_until_busy(args.runs / many, Path(scratch) / many)
        flags = ["--no-sandbox", "--disable-gpu"]
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        with dashboard(Path(scratch)) as middle:
            for theme, width, suffix in (("light", 1280, ""), ("dark", 1280, "-dark"), ("light", 390, "-narrow")):
                page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=theme)
                page.set_default_timeout(WAIT_MS)
                page.goto(middle)
                shoot(page, "now", many, args.out / f"now{suffix}.png", heading="canvas")
                page.goto(all_runs)
                shoot(page, "overview", args.run, args.out / f"overview{suffix}.png")
                if not suffix:
                    rest(page, args.run, many, args.out)
        browser.close()


def rest(page: Page, run: str, many: str, out: Path) -> None:
    shoot(page, "time", run, out / "time.png")
    shoot(page, "trajectories", run, out / "trajectories.png", "?sort=reward", "tr.link")
    shoot(page, "trajectories", run, out / "reader.png", f"?open={first_trajectory(page, run)}", ".tok, .empty")
    shoot(page, "freshness", run, out / "freshness.png")
    shoot(page, "freshness", run, out / "metrics.png", heading="h2.section", top="h2.section")
    shoot(page, "hardware", many, out / "hardware.png")
    shoot(page, "compare", run, out / "compare.png")
    shoot(page, "plans", run, out / "plans.png")


if __name__ == "__main__":
    main()
