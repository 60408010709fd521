import subprocess
import sys
from pathlib import Path

from sample_run import sample_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rollart.core import events as ev
from rollart.observe.metrics import Metrics
from rollart.observe.tensorboard import TensorBoard, write


def read(folder: Path) -> EventAccumulator:
    board = EventAccumulator(str(folder))
    board.Reload()
    return board


def test_tensorboard_reads_back_the_curves(tmp_path: Path) -> None:
    log = sample_run(steps=20)
    write(log, tmp_path)
    board = read(tmp_path)
    success = [
        (event.version, event.success) for event in log if isinstance(event, ev.Evaluated) and event.task == "sokoban"
    ]
    scalars = board.Scalars("held_out_success/sokoban")
    assert [(scalar.step, round(scalar.value, 3)) for scalar in scalars] == success
    assert scalars[0].wall_time > 1.7e9
    assert [scalar.step for scalar in board.Scalars("trainer/loss")] == list(range(1, 21))
    assert {"reward/arithmetic", "rollout/staleness", "speed/tokens_per_s"} <= set(board.Tags()["scalars"])
    assert [round(scalar.value, 3) for scalar in board.Scalars("logprob_gap/sokoban, 1 old")] == [0.01] * 20


def test_a_resume_hides_the_steps_that_are_made_again(tmp_path: Path) -> None:
    def steps(first: int, last: int) -> list[ev.AnyEvent]:
        return [
            ev.StepDone(t=float(version), version=version, seconds=1, tokens=1, values={"loss": 1.0}, tasks={})
            for version in range(first, last + 1)
        ]

    for number, (first, last) in enumerate(((1, 5), (4, 9))):
        metrics = Metrics()
        board = TensorBoard(tmp_path, metrics)
        start = ev.RunStarted(name="x", preset="rollart", alpha=1, seed=0, steps=9, tasks=["a"], version=first - 1)
        start.t, start.resumed, start.wall = float(first), number > 0, 100.0 * (number + 1)
        for event in [start, *steps(first, last)]:
            metrics.fold(event)
            board.on_event(event)
        board.close()
    assert [scalar.step for scalar in read(tmp_path).Scalars("trainer/loss")] == list(range(1, 10))


def test_writing_needs_no_torch() -> None:
    code = "import sys, rollart.observe.tensorboard; sys.exit('torch' in sys.modules or 'tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
