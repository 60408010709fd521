"""The page in a real browser: every view draws, changes while a run goes on, and shows hostile text as text."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import chromium
from dashboard_runs import HOSTILE, KEY, finished_run, hostile_run, imitation_log, served
from PIL import Image
from sample_run import sample_run, write_log

from rollart.core import events as ev
from rollart.core.types import Hop

pytestmark = pytest.mark.slow
WAIT_MS = 30_000
VIEWS = {
    "overview": "Held-out success",
    "now": "Trajectories by phase",
    "trajectories": "Filter",
    "time": "Timeline",
    "freshness": "Staleness by step",
    "hardware": "Placement",
    "compare": "Differences of the run files",
    "plans": "No sweep and no plan",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    finished_run(root / "sample-1")
    finished_run(root / "sample-2", seed=1)
    hostile_run(root / "hostile-1")
    return root


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def address(root: Path) -> Iterator[str]:
    with served(root) as url:
        yield url


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """With the problems that the browser reported, which every test checks in the end."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(WAIT_MS)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.goto(f"{address}/?key={KEY}#/overview/sample-1")
    yield page
    page.close()
    assert problems == []


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_draws_and_fits_the_screen(page: Any, view: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.evaluate(f"location.hash = '#/{view}/sample-1'")
    page.get_by_text(VIEWS[view]).first.wait_for()
    page.locator("#status:empty").wait_for(state="attached")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"


def test_the_key_leaves_the_address(page: Any) -> None:
    page.get_by_text("Held-out success").wait_for()
    assert "key" not in page.url


def test_keys_choose_views_and_the_theme(page: Any) -> None:
    page.get_by_text("Held-out success").wait_for()
    page.keyboard.press("3")
    page.get_by_role("heading", name="Trajectories").wait_for()
    before = page.evaluate("document.documentElement.dataset.theme")
    page.keyboard.press("d")
    assert page.evaluate("document.documentElement.dataset.theme") != before


def test_every_number_has_a_definition(page: Any) -> None:
    page.get_by_text("Held-out success").wait_for()
    page.wait_for_selector(".stat .value")
    assert page.locator(".stat:not([data-tip])").count() == 0
    page.locator(".stat").first.hover()
    page.locator("#tip").wait_for()
    assert "steps" in page.locator("#tip").inner_text()


def test_a_filter_narrows_the_list_and_a_row_opens_the_reader(page: Any) -> None:
    page.keyboard.press("3")
    page.locator("tr.link").first.wait_for()
    page.get_by_label("Task").select_option("sokoban")
    page.locator("tr.link td:nth-child(2)", has_text="arithmetic").first.wait_for(state="detached")
    assert {cell.inner_text() for cell in page.locator("tr.link td:nth-child(2)").all()[:5]} == {"sokoban"}
    page.keyboard.press("Tab")
    page.locator("tr.link").first.press("Enter")
    page.get_by_role("heading", name="Conversation").wait_for()
    page.get_by_text("← all").wait_for()


def test_runs_are_compared_and_their_files_too(page: Any) -> None:
    page.keyboard.press("7")
    page.get_by_role("button", name="sample-1", exact=True).wait_for()
    for name in ("sample-1", "sample-2"):
        button = page.get_by_role("button", name=name, exact=True)
        if button.get_attribute("aria-pressed") == "false":
            button.click()
    page.locator(".diff td", has_text="seed").first.wait_for()
    page.get_by_role("button", name="time", exact=True).click()
    page.wait_for_url("**axis=time**")


def test_the_page_follows_a_run_without_being_asked(page: Any, root: Path) -> None:
    log = [event for event in sample_run(steps=12) if not isinstance(event, ev.RunEnded)]
    cut = next(n for n, event in enumerate(log) if isinstance(event, ev.StepDone) and event.version == 4) + 1
    (root / "live-1").mkdir()
    write_log(root / "live-1" / "events", log[:cut])
    page.evaluate("location.hash = '#/overview/live-1'")
    page.locator("h1", has_text="live-1").wait_for()
    page.locator(".stat .value", has_text=re.compile("^4of 12")).wait_for()
    write_log(root / "live-1" / "events", log[cut:])
    page.locator(".stat .value", has_text=re.compile("^12of 12")).wait_for()


def test_a_square_of_the_now_view_opens_its_trajectory(page: Any, root: Path) -> None:
    started = ev.RunStarted(name="now", preset="rollart", alpha=1, seed=0, steps=9, tasks=["a"])
    ids = [f"a-{n:06d}.0" for n in range(400)]
    starts = [ev.TrajectoryStarted(t=1, trajectory=id, task="a", group=id[:-2], version=0) for id in ids]
    (root / "now-1").mkdir()
    pools = {"fast": list(range(60)), "slow": list(range(60, 100))}
    moved = ev.PhasesChanged(t=2, phases={"generating": ids[:100]}, pools=pools)
    write_log(root / "now-1" / "events", [started, *starts, moved])
    page.evaluate("location.hash = '#/now/now-1'")
    page.wait_for_selector("canvas[aria-label^='400 trajectories: 300 waiting, 0 resetting, 100 generating']")
    page.wait_for_selector("canvas[aria-label$='lanes: a on not routed, a on fast, a on slow']")
    page.get_by_role("button", name="pools", exact=True).click()
    page.wait_for_selector("canvas[aria-label$='lanes: not routed, fast, slow']")
    page.locator("canvas").focus()
    page.keyboard.press("ArrowRight")
    page.get_by_text(re.compile(r"^a-\d+\.0 · a · waiting")).wait_for()
    page.locator("canvas").press("Enter")
    page.wait_for_url("**open=a-**")
    page.get_by_role("heading", name="Conversation").wait_for()


def test_relays_are_in_the_tree_of_the_weights(page: Any, root: Path) -> None:
    started = ev.RunStarted(name="tree", preset="rollart", alpha=1, seed=0, steps=9, tasks=["a"])
    near = ev.EngineSwapped(t=3, engine="near", version=1, seconds=1, hops=(Hop("http://trainer", 9000, 0.5),))
    near.relay = "http://near"
    far = ev.EngineSwapped(t=4, engine="far", version=1, seconds=2, hops=(Hop("http://near", 9000, 0.25),))
    (root / "tree-1").mkdir()
    write_log(root / "tree-1" / "events", [started, ev.Published(t=2, version=1, seconds=0.5, bytes=9000), near, far])
    page.evaluate("location.hash = '#/hardware/tree-1'")
    page.get_by_text("2 engines swapped to it, 1 by way of a relay").wait_for()
    page.get_by_text("9 kB in 500 ms, then relays it").wait_for()
    page.locator(".branch .branch .node", has_text="far").hover()
    page.get_by_text("9 kB from near (http://near), all there after 250 ms").wait_for()


def test_metrics_are_filtered_and_those_of_tasks_drawn(page: Any) -> None:
    page.evaluate("location.hash = '#/freshness/sample-1'")
    page.get_by_role("heading", name="Loss", exact=True).wait_for()
    page.get_by_label("Metrics that contain").fill("entropy")
    page.get_by_role("heading", name="Loss", exact=True).wait_for(state="hidden")
    page.get_by_role("heading", name="Entropy").wait_for()
    page.get_by_role("button", name="Log scale").click()
    page.get_by_role("img", name=re.compile(r"^entropy: batch 0\.7 at 12, \w+ 0\.5 at 12")).wait_for()


def test_a_robot_policy_is_shown_without_the_words_of_rl(page: Any, root: Path) -> None:
    (root / "reach-1").mkdir()
    write_log(root / "reach-1" / "events", imitation_log())
    page.evaluate("location.hash = '#/overview/reach-1'")
    page.get_by_role("heading", name="First and last evaluation").wait_for()
    page.get_by_role("heading", name="Supervised loss").wait_for()
    page.get_by_text("40.0% ± 13.1").wait_for()
    assert page.get_by_role("heading", name="Training reward").count() == 0


def test_the_films_of_a_robot_policy_play_on_its_page(page: Any, root: Path) -> None:
    (root / "filmed-1" / "videos").mkdir(parents=True)
    write_log(root / "filmed-1" / "events", imitation_log())
    frames = [Image.new("RGB", (40, 30), colour) for colour in ("red", "blue")]
    frames[0].save(root / "filmed-1" / "videos" / "reach-v3.gif", save_all=True, append_images=frames[1:])
    page.evaluate("location.hash = '#/overview/filmed-1'")
    film = page.get_by_role("img", name="an episode of reach-v3")
    film.wait_for()
    page.wait_for_function("image => image.complete && image.naturalWidth === 40", arg=film.element_handle())
    assert page.get_by_role("link", name="MP4").count() == 0, "there is no MP4"


def test_hostile_text_stays_text(page: Any) -> None:
    """Scripts, control characters, marks that turn the reading direction, and a line of 10 MB."""
    page.evaluate("location.hash = '#/overview/hostile-1'")
    page.get_by_text("careful <script>").wait_for()
    page.evaluate("location.hash = '#/trajectories/hostile-1?open=hostile-000000.0'")
    page.get_by_text("I say <script>").first.wait_for()
    page.get_by_text("characters are left out").first.wait_for()
    shown = page.locator(".msg pre").first.evaluate("node => node.textContent")
    assert "<script>" in shown and "\u202e" in HOSTILE
    for view in VIEWS:
        page.evaluate(f"location.hash = '#/{view}/hostile-1'")
        page.get_by_role("heading", level=1).wait_for()
    assert page.evaluate("window.hacked") is None
    assert page.locator("main script, main img").count() == 0
