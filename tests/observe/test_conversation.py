from rich.console import Console

from rollart.core import events as ev
from rollart.core.types import Message, Outcome, Trajectory, Turn
from rollart.observe.conversation import conversation


def test_a_conversation_shows_words_rewards_versions_and_timings() -> None:
    first = Turn(
        (Message("system", "Play [bold]well[/bold]."), Message("user", "P _\n_ G")),
        (1,) * 9,
        "Right",
        (1, 2),
        (0, 0),
        (3, 4),
        "stop",
        0.0,
        0.25,
        0.03,
    )
    second = Turn((Message("user", "_ P\n_ G"),), (1,) * 4, "", (1,), (0,), (4,), "length", 1.0, 1.5, 0.0)
    trajectory = Trajectory(
        "lake-000012.3",
        "lake",
        "lake-000012",
        3,
        77,
        Outcome.TRUNCATED,
        (first, second),
        0.9,
        {"speed": -0.1},
        True,
        "too long",
        seconds=4.5,
    )
    log: list[ev.AnyEvent] = [
        ev.TrajectoryStarted(t=65.0, trajectory=trajectory.id, task="lake", group="lake-000012", version=3),
        ev.TurnDone(
            t=66.0,
            trajectory=trajectory.id,
            task="lake",
            turn=0,
            engine="e",
            prompt=9,
            cached=5,
            tokens=2,
            version=4,
            queue_s=0.1,
            generate_s=0.25,
            env_s=0.03,
        ),
    ]
    console = Console(width=120, record=True, file=open("/dev/null", "w"), highlight=False)  # noqa: SIM115
    console.print(conversation(trajectory, log))
    text = console.export_text()
    for words in (
        "started 1:05 into the run",
        "Play [bold]well[/bold].",
        "  P _",
        "turn 1 · 2 tokens · versions 3 to 4 · generate 250 ms · queued 100 ms · cached 5 of 9",
        "env 30 ms · reward 0",
        "(nothing)",
        "version 4 · ended by length · generate 1.5 s",
        "truncated after 4.5 s, reward 0.9 (speed -0.1), success: too long",
    ):
        assert words in text
