"""What `rollart show` prints: results, learning curves, where the time went, what was dropped, what was slow."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rollart.observe.draw import (
    bar,
    clock,
    colour,
    count,
    fill,
    label,
    number,
    percent,
    span,
    sparkline,
    stacked,
    table,
)
from rollart.observe.metric_table import metrics_of
from rollart.observe.snapshot import (
    AGENT,
    STAGES,
    DurationQuantiles,
    EndedTrajectory,
    EnvironmentSummary,
    RewardSummary,
    RouteSummary,
    Snapshot,
    StepPoint,
    SwapSummary,
    WorkerPlacement,
    failure_ratio,
    words_of,
)

_STAGE_STYLES = dict(zip(STAGES, ("red", "blue", "bright_black", "cyan", "magenta", "yellow", "white"), strict=True))


def report(shot: Snapshot, width: int = 100) -> RenderableType:
    """The whole page, at most `width` columns."""
    parts: list[RenderableType] = [_head(shot)]
    words = words_of(shot.work)
    if any(task.held_out for task in shot.tasks):
        rows = results(shot) if words.trains else scores(shot)
        parts += [Text(), _title(f"Success on {words.episodes}"), rows]
    if shot.history:
        parts += [Text(), _title("Learning curves"), *_curves(shot, width)]
        parts += [Text(), _title(f"Machinery during {words.training}"), *_machinery(shot, width)]
    if shot.swaps:
        parts += [Text(), _title("New weights, while generation went on"), swaps(shot.swaps)]
    if any(point.gaps for point in shot.history):
        parts += [Text(), _title("Logprobs of the engine against the trainer's"), logprob_gaps(shot.history)]
    if any(sum(task.stages.values()) for task in shot.tasks):
        parts += [Text(), _title("Where the time of a trajectory went"), *_stages(shot, width)]
    pools = {place.pool for place in shot.places if place.role == "generate"} | {route.pool for route in shot.routes}
    if len(pools) > 1 or len({place.node for place in shot.places}) > 1:
        parts += [Text(), _title("Where it ran"), places(shot.places)]
    if len(pools) > 1:
        parts += [Text(), _title("Routing of requests"), routing(shot.routes)]
    if any(task.agent for task in shot.tasks):
        parts += [Text(), _title("What agents did with their history"), agents(shot)]
    if shot.environments:
        parts += [Text(), _title("Environments"), environments(shot.environments)]
    if shot.rewards:
        parts += [Text(), _title("Rewards"), rewards(shot.rewards)]
    if shot.work not in ("imitation", "eval"):  # their episodes are played to the end, or reported as unplayed
        parts += [Text(), _title("Dropped, never trained" if words.trains else "Failed"), _drops(shot)]
    if shot.slowest:
        parts += [Text(), _title("Slowest trajectories"), trajectories(shot.slowest)]
    parts += [Text(f"! {message}", style="yellow") for message in shot.warnings]
    return Group(*parts)


def _title(text: str) -> Text:
    return Text(text, style="bold")


def _head(shot: Snapshot) -> Text:
    resumes = f", resumed {shot.resumes} times" if shot.resumes > 1 else ", resumed once" if shot.resumes else ""
    words = words_of(shot.work)
    about = f"{shot.preset}, alpha {shot.alpha}" if words.training == "RL" else shot.work
    about = f"{about} of {shot.model}" if shot.model and not words.trains else about
    at = f" at step {shot.step} of {shot.steps}" if shot.steps else ""
    state = f"{shot.phase}{at} after {clock(shot.t)}{resumes}"
    return Text.assemble((shot.name, "bold"), f" ({about}, seed {shot.seed}): {state}", emulation(shot))


def emulation(shot: Snapshot) -> Text:
    """A warning wherever a run is shown: its times are not those of the hardware that it names."""
    return Text(f"\nEMULATED devices: {', '.join(shot.emulated)}" if shot.emulated else "", style="bold yellow")


def results(shot: Snapshot) -> Table:
    """Before and after training, per task, with the 95% interval of the latter. Tasks that are out stay in it, with
    why. Imitation is not evaluated before it begins."""
    training = words_of(shot.work).training
    short = len(training) <= 4  # longer headers leave no room for the names of tasks at 80 columns
    ends = (f"before {training}", f"after {training}") if short else ("first", "last")
    rows = table("task", *ends, "95% interval", "failures", "episodes", "unplayed")
    out = [f"task {task.name} is out of the mixture: {task.out}" for task in shot.tasks if task.out]
    rows.caption, rows.caption_justify = Text("\n".join(out), style="bold yellow") if out else None, "left"
    for index, task in enumerate(shot.tasks):
        before, after = task.before, task.now
        if before is None or after is None:
            rows.add_row(Text(task.name, style=colour(index)), *["-"] * 6)
            continue
        low, high = wilson(after.success, max(1, after.episodes // after.samples))
        same = after is before
        ratio = None if same else failure_ratio(task)
        better = after.success > before.success
        rows.add_row(
            Text(task.name, style=colour(index)),
            f"{before.success:.3f}",
            Text("-" if same else f"{after.success:.3f}", style="bold green" if better else "bold"),
            "-" if same else f"{low:.2f} to {high:.2f}",
            "-" if ratio is None else f"x {ratio:.2f}",
            str(after.episodes),
            str(after.failed),
        )
    return rows


def scores(shot: Snapshot) -> Table:
    """One evaluation, with the 95% interval for its number of episodes. Attempts at the same episode are alike, so
    they count as one."""
    points = [(index, task, task.now) for index, task in enumerate(shot.tasks) if task.now]
    attempts = max((point.samples for _, _, point in points), default=1)
    several = (f"pass@{attempts}",) if attempts > 1 else ()
    rows = table("task", "success", "95% interval", *several, "reward", "episodes", "unplayed")
    for index, task, point in points:
        low, high = wilson(point.success, point.episodes // point.samples)
        rows.add_row(
            Text(task.name, style=colour(index)),
            f"{point.success:.3f}",
            f"{low:.3f} to {high:.3f}",
            *(f"{point.passed or 0.0:.3f}" for _ in several),
            f"{point.reward:.3f}",
            str(point.episodes // point.samples),
            str(point.failed),
        )
    return rows


def wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share of `count` trials; it stays within 0 and 1.

    >>> [round(end, 3) for end in wilson(0.5, 100)]
    [0.404, 0.596]
    """
    if count == 0:
        return 0.0, 1.0
    centre = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def _curves(shot: Snapshot, width: int) -> Iterator[Text]:
    name = max(len(task.name) for task in shot.tasks)
    room = max(10, min(60, width - name - 34))
    for index, task in enumerate(shot.tasks):
        held_out = [point.success for point in task.held_out]
        rewards = [point.rewards[task.name] for point in shot.history if task.name in point.rewards]
        for kind, values in (("held-out success", held_out), ("training reward", rewards)):
            if not values:
                continue
            low, high = min(0.0, *values), max(1.0, *values)
            ends = f"{number(values[0])} to {number(values[-1])}"
            title = (task.name if kind == "held-out success" else "").ljust(name)
            line = Text.assemble((title, f"bold {colour(index)}"), (f" {kind:<17}", "dim"))
            yield line.append(sparkline(values, room, low, high), style=colour(index)).append(f" {ends}")


def _machinery(shot: Snapshot, width: int) -> Iterator[Text]:
    shown = metrics_of(shot.work)
    for name, share in (
        *([("engine busy", shot.use.engine)] if words_of(shot.work).tokens else []),
        ("trainer busy", shot.use.trainer),
        *((metric.bar, shot.metrics[metric.name].overall or 0.0) for metric in shown if metric.bar),
        ("environments", shot.use.environments),
    ):
        yield (
            Text(f"{name:<16}", style="dim")
            .append(bar(share, min(30, width - 30), "cyan"))
            .append(f" {percent(share)}")
        )
    overall = ((metric, shot.metrics[metric.name].overall) for metric in shown if not metric.bar)
    speed = ", ".join(metric.show(value) for metric, value in overall if value is not None)
    yield label("speed", 16).append(f"{speed} over {clock(shot.rl_s)}")
    ages = ", ".join(f"{percent(n / max(1, shot.trained))} of age {age}" for age, n in shot.staleness.items())
    trained = label("trained", 16).append(f"{shot.trained} trajectories")
    yield trained.append(f": {ages} (bound {shot.alpha})" if ages else "")


def _stages(shot: Snapshot, width: int) -> Iterator[Text]:
    name = max(len(task.name) for task in shot.tasks)
    for task in shot.tasks:
        total = sum(task.stages.values())
        if total:
            line = Text(f"{task.name:<{name}} ").append(stacked(task.stages, _STAGE_STYLES, max(10, width - name - 18)))
            yield line.append(f" {number(task.seconds)} s each", style="dim")
    legend = Text()
    total = sum(sum(task.stages.values()) for task in shot.tasks)
    for index, stage in enumerate(STAGES):
        share = sum(task.stages[stage] for task in shot.tasks) / total
        legend.append(f"{fill(index)}{stage} ", style=_STAGE_STYLES[stage]).append(f"{percent(share)}  ", style="dim")
    yield legend


def _drops(shot: Snapshot) -> RenderableType:
    ended = sum(sum(task.outcomes.values()) for task in shot.tasks)
    if not shot.drops:
        return Text(f"nothing, of {ended} trajectories", style="dim")
    rows = table("reason", "trajectories", "share")
    for reason, dropped in shot.drops.items():
        rows.add_row(reason, str(dropped), f"{dropped / max(1, ended) * 100:.1f}%")
    return rows


def agents(shot: Snapshot) -> Table:
    """How often agents continued their conversations unchanged, and how often not."""
    rows = table("task", *AGENT)
    for task in shot.tasks:
        if task.agent:
            rows.add_row(task.name, *(str(task.agent.get(name, 0)) for name in AGENT))
    return rows


def environments(use: Sequence[EnvironmentSummary]) -> Table:
    """By task: resets, hedged resets and those that won, retries, processes lost, quarantines."""
    rows = table("task", "resets", "p50", "p95", "p99", "hedged", "won", "retried", "killed", "out")
    for each in use:
        counts = (each.hedged, each.won, each.retried, each.killed, each.quarantined)
        rows.add_row(each.task, str(each.resets), *_spans(each.reset_s), *map(str, counts))
    return rows


def rewards(use: Sequence[RewardSummary]) -> Table:
    """By function: calls, how long they took, what went wrong, and what the platform charges for."""
    rows = table("name", "by", "calls", "p50", "p95", "cold", "hedged", "retried", "failed", "billed")
    for each in use:
        counts = (each.cold, each.hedged, each.retried, each.failed)
        name = each.function.rpartition(":")[2]
        times = _spans(each.call_s)[:2]
        rows.add_row(name, each.invoker, str(each.calls), *times, *map(str, counts), span(each.billed_s))
    return rows


def _spans(times: DurationQuantiles) -> tuple[str, str, str]:
    return span(times.p50), span(times.p95), span(times.p99)


def places(where: Sequence[WorkerPlacement]) -> Table:
    """Workers by pool, device class and node."""
    rows = table("role", "pool", "device", "node", "n", "about")
    alike = Counter((each.role, each.pool, each.device, each.node, each.why) for each in where)
    for (role, pool, device, node, why), workers in sorted(alike.items()):
        name, _, label = pool.partition(": ")
        rows.add_row(role, name, label or device, node, str(workers), why)
    return rows


def routing(routes: Sequence[RouteSummary]) -> Group:
    """By pool and task: requests, tokens, predicted and actual times, and the most frequent reason."""
    parts: list[RenderableType] = []
    for pool in sorted({route.pool for route in routes}):
        rows = table("task", "requests", "prefill", "cached", "fetched", "decoded", "predicted", "actual", "mostly")
        for route in (route for route in routes if route.pool == pool):
            why, times = max(route.why.items(), key=lambda item: item[1])
            tokens = (route.prefilled, route.cached, route.fetched, route.decoded)
            rows.add_row(
                route.task,
                str(route.requests),
                *(count(float(n)) for n in tokens),
                span(route.predicted_s),
                span(route.actual_s),
                f"{why} {percent(times / route.requests)}",
            )
        parts += [Text(pool, style="bold cyan"), rows]
    return Group(*parts)


class ListedTrajectory(Protocol):
    """What a list says of a trajectory, wherever it is from: the event log or the ledger."""

    @property
    def id(self) -> str: ...
    @property
    def outcome(self) -> str: ...
    @property
    def reward(self) -> float | None: ...
    @property
    def turns(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def seconds(self) -> float: ...


_TRAJECTORY = ("trajectory", "outcome", "reward", "turns", "tokens", "time")


def _figures(row: ListedTrajectory) -> tuple[str, ...]:
    return row.id, row.outcome, number(row.reward), str(row.turns), str(row.tokens), span(row.seconds)


def trajectory_list(found: Iterable[ListedTrajectory]) -> Table:
    """One row each."""
    rows = table(*_TRAJECTORY)
    for each in found:
        rows.add_row(*_figures(each))
    return rows


def trajectories(ended: Sequence[EndedTrajectory]) -> Table:
    """The same, with the stage that took longest."""
    rows = table(*_TRAJECTORY, "mostly")
    for each in ended:
        stage, seconds = max(each.stages.items(), key=lambda item: item[1])
        rows.add_row(*_figures(each), f"{stage} {percent(seconds / max(each.seconds, 1e-9))}")
    return rows


def swaps(found: Sequence[SwapSummary]) -> Table:
    """New weights, by engine and transport; the tokens in flight needed their KV again."""
    rows = table("name", "by", "swaps", "MB", "transfer", "exposed", "KV again", "in flight")
    for swap in found:
        times = (f"{1000 * each:.3g} ms" for each in (swap.transfer_s, swap.exposed_s, swap.recompute_s))
        size = f"{swap.bytes / 2**20:.1f}"
        rows.add_row(swap.engine, swap.transport, str(swap.number), size, *times, f"{swap.recomputed:.0f}")
    return rows


@dataclass(slots=True)
class _GapTotal:
    tokens: int = 0
    size: float = 0.0
    most: float = 0.0
    last: float = 0.0


def logprob_gaps(history: Sequence[StepPoint]) -> Table:
    """By task and age: the mean over all trained tokens, the largest, and the mean in the last step."""
    cells: dict[tuple[str, int], _GapTotal] = {}
    for point in history:
        for gap in point.gaps:
            whole = cells.setdefault((gap.task, gap.age), _GapTotal())
            whole.tokens += gap.tokens
            whole.size += gap.mean * gap.tokens
            whole.most = max(whole.most, gap.max)
            whole.last = gap.mean
    rows = table("task", "versions old", "tokens", "mean gap", "largest", "last step")
    for (task, age), whole in sorted(cells.items()):
        sizes = (whole.size / whole.tokens, whole.most, whole.last)
        rows.add_row(task, str(age), count(float(whole.tokens)), *(f"{size:.2g}" for size in sizes))
    return rows
