"""Curves and tables of robot runs."""

from pathlib import Path

from rich.console import Console

from rollart.core.event_log import EventLog
from rollart.core.events import Evaluated, StepDone, WarmupStep
from rollart.robots.comparison import ComparedPolicy
from rollart.robots.episodes import RobotEpisode, RobotScore
from rollart.robots.report import (
    comparison_table,
    grouped,
    in_common,
    score_table,
    seed_differences,
    seed_means,
    write_bars,
    write_curves,
)
from rollart.robots.suites import DIFFICULTIES, META_WORLD


def run_folder(path: Path) -> Path:
    path.mkdir()
    log = EventLog(path / "events", lambda: 0.0)
    for step, success in ((50, 0.0), (100, 1.0)):
        log.emit(WarmupStep(step=step, steps=100, loss=1 / step))
        log.emit(Evaluated(version=step, task="toy-obstacle", episodes=50, success=success, reward=1.0, failed=0))
    log.close()
    return path


def compared(policy: str, task: str, seed: int, success: float) -> ComparedPolicy:
    return ComparedPolicy(policy, task, seed, success, episodes=50, unplayed=0, p50_ms=1.0, p99_ms=2.0, step_ms=3.0)


RESULTS = [
    compared(policy, task, seed, success)
    for policy, task, success in (("fast", "a", 1.0), ("fast", "b", 0.5), ("slow", "a", 0.25))
    for seed in (0, 1)
]


def text(table: object) -> str:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def test_curves_are_drawn_also_for_shares_of_none_and_all(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    write_curves(folder)
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_curves_of_a_tuning_are_those_of_its_updates(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    log = EventLog(folder / "events", lambda: 0.0)
    for version in (1, 2):
        log.emit(StepDone(version=version, seconds=1.0, tokens=9, values={"reward": version / 2}, tasks={}))
    log.emit(Evaluated(version=2, task="toy-obstacle", episodes=50, success=0.5, reward=1.0, failed=0))
    log.close()
    write_curves(folder)
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_score_shows_its_interval_and_what_could_not_be_played(tmp_path: Path) -> None:
    played = [RobotEpisode(seed, success=seed < 5, steps=9, reward=0.0) for seed in range(10)]
    lost = RobotEpisode(11, success=False, steps=0, reward=0.0, failure="it crashed")
    shown = text(score_table([("toy:obstacle", run_folder(tmp_path / "run"), RobotScore((*played, lost), (0.5, 2.0)))]))
    assert "0.500" in shown and "0.237 to 0.763" in shown
    assert shown.splitlines()[-1].split()[-5:] == ["10", "of", "11", "0.50,", "2.00"]


def test_a_comparison_shows_each_task_and_the_mean_over_tasks() -> None:
    shown = text(comparison_table(RESULTS))
    assert seed_means(RESULTS, "fast") == [0.75, 0.75]
    rows = {line.split("  ")[0]: line.split() for line in shown.splitlines() if line.strip()}
    assert rows["b"] == ["b", "0.50±.00", "-"]
    assert rows["all, 2 each"][3:] == ["1.00±.00", "0.25±.00"]


def test_a_comparison_without_gaps_is_over_all_tasks() -> None:
    whole = [one for one in RESULTS if one.policy == "fast"]
    assert in_common(whole) == whole
    assert "all tasks" in text(comparison_table(whole))


def test_policies_without_a_run_in_common_are_not_ranked() -> None:
    apart = [compared("fast", "a", 0, 1.0), compared("slow", "b", 0, 0.0)]
    assert in_common(apart) == []
    assert text(comparison_table(apart)).splitlines()[-5].split()[-2:] == ["-", "-"]


def test_tasks_are_grouped_by_how_hard_they_are(tmp_path: Path) -> None:
    tasks = {"metaworld:reach-v3": 1.0, "metaworld:push-v3": 0.5, "metaworld:pick-place-v3": 0.0, "adroit:pen": 0.25}
    results = [compared("fast", task, 0, success) for task, success in tasks.items()]
    groups = grouped(results)
    assert {group: means["fast"] for group, means in groups.items()} == {
        "easy": [1.0],
        "hard": [0.25],
        "adroit": [0.25],
        "all tasks": [0.4375],
    }
    shown = text(comparison_table(results))
    assert "pick-place-v3" in shown and "very hard" not in shown
    write_bars(results, tmp_path / "success.png")
    assert (tmp_path / "success.png").read_bytes().startswith(b"\x89PNG")


def test_means_of_a_comparison_that_is_not_complete_are_over_the_same_tasks_for_every_seed() -> None:
    """A seed that has played easy tasks alone would lift the mean."""
    shares = {("metaworld:reach-v3", 1): 1.0, ("metaworld:reach-v3", 0): 0.5, ("metaworld:push-v3", 0): 0.0}
    groups = grouped([compared("fast", *pair, success) for pair, success in shares.items()])
    assert groups == {"easy": {"fast": [1.0, 0.5]}, "hard": {"fast": [0.0]}, "all, 2 each": {"fast": [0.25]}}


def test_every_task_of_metaworld_that_papers_call_harder_exists() -> None:
    assert {name for names in DIFFICULTIES.values() for name in names} < set(META_WORLD)


def test_six_policies_with_intervals_fit_80_columns() -> None:
    names = ("MP1", "MeanFlow+cos+DDE", "FlowPolicy", "flow, 10 steps", "DDIM, 10 steps", "regression")
    task = "metaworld:button-press-v3"
    shown = text(comparison_table([compared(name, task, seed, seed / 4) for name in names for seed in range(5)]))
    row = next(line for line in shown.splitlines() if line.startswith("button-press-v3 "))
    assert row.count("0.50±.49") == 6
    assert "all tasks" in shown


def test_differences_are_of_seeds_for_which_both_policies_have_the_same_tasks() -> None:
    shares = {("fast", "a", 1): 0.5, ("fast", "a", 0): 1.0, ("fast", "b", 0): 0.0, ("fast", "b", 1): 0.5}
    shares |= {("slow", "a", 0): 0.25, ("slow", "b", 1): 0.25, ("slow", "a", 1): 0.5, ("slow", "b", 0): 0.25}
    shares |= {("slow", "a", 2): 0.0, ("fast", "a", 2): 1.0, ("other", "a", 0): 1.0}
    results = [compared(*key, share) for key, share in shares.items()]
    assert seed_differences(results, "fast", "slow") == [0.25, 0.125]
