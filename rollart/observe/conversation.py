"""One trajectory as a conversation: messages, rewards, policy versions and timings."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from rollart.core import events as ev
from rollart.core.types import Trajectory, Turn
from rollart.observe.draw import clock, span

_ROLES = {"system": "yellow", "user": "cyan", "assistant": "green", "tool": "magenta"}


def conversation(trajectory: Trajectory, log: Iterable[ev.AnyEvent] = ()) -> RenderableType:
    """Events of this trajectory in `log` add the timings that the ledger does not keep."""
    turns: dict[int, ev.TurnDone] = {}
    started: float | None = None
    for event in log:
        if isinstance(event, ev.TurnDone) and event.trajectory == trajectory.id:
            turns[event.turn] = event
        elif isinstance(event, ev.TrajectoryStarted) and event.trajectory == trajectory.id:
            started = event.t
    parts: list[RenderableType] = list(_head(trajectory, started))
    for index, turn in enumerate(trajectory.turns):
        parts += [Text(), *_turn(index, turn, turns.get(index))]
    return Group(*parts, Text(), _end(trajectory))


def _head(trajectory: Trajectory, started: float | None) -> Iterator[Text]:
    yield Text.assemble((trajectory.id, "bold"), f"  {trajectory.task}, seed {trajectory.seed}")
    about = f"group {trajectory.group}, member {trajectory.member}"
    when = "" if started is None else f", started {clock(started)} into the run"
    yield Text(f"{about}{when}; {trajectory.action_tokens} action tokens of {trajectory.total_tokens}", style="dim")


def _turn(index: int, turn: Turn, event: ev.TurnDone | None) -> Iterator[RenderableType]:
    for message in turn.messages:
        yield from _message(message.role, message.content)
    if turn.reasoning:
        yield from _message("reasoning", turn.reasoning)
    yield from _message("assistant", turn.action)
    notes = [f"turn {index + 1}", f"{len(turn.tokens)} tokens", _versions(turn.versions)]
    if turn.finish != "stop":
        notes.append(f"ended by {turn.finish}")
    notes.append(f"generate {span(turn.generate_s)}")
    if event and event.queue_s >= 0.0005:
        notes.append(f"queued {span(event.queue_s)}")
    if event:
        notes.append(f"cached {event.cached} of {event.prompt}")
    notes.append(f"env {span(turn.env_s)}")
    line = Text(" · ".join(note for note in notes if note), style="dim")
    if turn.reward is not None:
        line.append(f" · reward {turn.reward:g}", style="bold")
    yield Padding(line, (0, 0, 0, 2))


def _message(role: str, content: str) -> Iterator[RenderableType]:
    yield Text(role, style=f"bold {_ROLES.get(role, 'white')}")
    yield Padding(Text(content.rstrip() or "(nothing)"), (0, 0, 0, 2))


def _versions(versions: Sequence[int]) -> str:
    if not versions:
        return ""
    low, high = min(versions), max(versions)
    return f"version {low}" if low == high else f"versions {low} to {high}"


def _end(trajectory: Trajectory) -> Text:
    text = Text.assemble((trajectory.outcome.value, "bold"), f" after {span(trajectory.seconds)}")
    if trajectory.reward is not None:
        text.append(f", reward {trajectory.reward:g}", style="bold")
    if trajectory.parts:
        text.append(" (" + ", ".join(f"{name} {value:g}" for name, value in trajectory.parts.items()) + ")")
    if trajectory.success is not None:
        text.append(
            ", success" if trajectory.success else ", no success", style="green" if trajectory.success else "red"
        )
    return text.append(f": {trajectory.reason}" if trajectory.reason else "")
