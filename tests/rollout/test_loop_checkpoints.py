"""Checkpoints beside training, and runs that are stopped: on virtual time."""

import asyncio
from pathlib import Path

import pytest
from world import World, build

from rollart.core.events import Checkpointed, StepDone, Warned
from rollart.core.schedule import preset
from rollart.rollout.ledger import SqliteLedger
from rollart.rollout.training_loop import GRACE_S
from rollart.simulator.clock import run

WRITES_SLOWLY = {"writing": lambda rng: 1.5}


def committed(world: World) -> list[int]:
    return [event.version for event in world.recorder.events if isinstance(event, Checkpointed)]


def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_waits_for_it(tmp_path: Path) -> None:
    """A step takes a second, writing takes 2.5."""
    world = build(
        preset("rollart", 1, 1.0, 0, 0),
        SqliteLedger.open(tmp_path / "ledger.sqlite"),
        checkpoint_every=1,
        steps=4,
        trainer={"writing": lambda rng: 2.5},
    )
    run(world.pipeline.run())
    order = [
        (type(event), event.version) for event in world.recorder.events if isinstance(event, StepDone | Checkpointed)
    ]
    expected = [(StepDone, 1)]
    for version in (1, 2, 3):
        expected += [(StepDone, version + 1), (Checkpointed, version)]
    assert order == [*expected, (Checkpointed, 4)]
    assert world.ledger.recover().version == 4


def test_a_checkpoint_that_cannot_be_written_is_a_warning_and_at_the_end_an_error(tmp_path: Path) -> None:
    def world(faults: dict[int, str], name: str) -> World:
        ledger = SqliteLedger.open(tmp_path / name)
        return build(preset("rollart", 1, 1.0, 0, 0), ledger, steps=6, trainer={"faults": faults})

    middle = world({4: "the disk is full"}, "middle")
    run(middle.pipeline.run())
    assert committed(middle) == [2, 6]
    warnings = [event.message for event in middle.recorder.events if isinstance(event, Warned)]
    assert warnings == ["the disk is full; a restart would go back to the checkpoint before"]
    last = world({6: "the disk is full"}, "last")
    with pytest.raises(ExceptionGroup) as failure:
        run(last.pipeline.run())
    assert str(failure.value.exceptions[0]) == "the disk is full; make room and resume the run"
    assert last.ledger.recover().version == 4


@pytest.mark.parametrize("at", [0.05, 3.0, 5.55, 6.3, 8.05, 11.1])
def test_a_run_that_is_stopped_saves_where_it_is(tmp_path: Path, at: float) -> None:
    """Also in the middle of a step, or while a checkpoint is written. What is resumed is trained once."""

    async def main() -> tuple[World, World, int]:
        ledger = SqliteLedger.open(tmp_path / "ledger.sqlite")
        first = build(preset("rollart", 1, 2.0, 0, 0), ledger, steps=10, checkpoint_every=5, trainer=WRITES_SLOWLY)
        running = asyncio.create_task(first.pipeline.run())
        await asyncio.sleep(at)
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()
        await first.scheduler.stop()
        saved = ledger.recover().version
        second = build(preset("rollart", 1, 2.0, 0, 0), ledger, steps=10, checkpoint_every=5)
        await second.pipeline.run()
        await second.scheduler.stop()
        return first, second, saved

    first, second, saved = run(main())
    assert saved == len(first.trainer.batches) == first.pipeline.version
    assert [event.version for event in first.recorder.of(StepDone)] == list(range(1, saved + 1))
    batches = [*first.trainer.batches, *second.trainer.batches]
    assert [batch.step for batch in batches] == list(range(10))
    ids = [sample.id for batch in batches for group in batch.groups for sample in group.samples]
    assert len(ids) == len(set(ids))


def test_a_run_that_is_stopped_in_a_long_step_says_where_it_will_go_on(tmp_path: Path) -> None:
    async def main() -> tuple[float, World]:
        ledger = SqliteLedger.open(tmp_path / "ledger.sqlite")
        made = build(preset("rollart", 1, 2.0, 0, 0), ledger, steps=10, trainer={"seconds": lambda rng: 500.0})
        running = asyncio.create_task(made.pipeline.run())
        await asyncio.sleep(600.0)
        running.cancel()
        await asyncio.wait([running])
        return asyncio.get_running_loop().time() - 600.0, made

    seconds, made = run(main())
    assert seconds <= GRACE_S
    assert "was not saved" in made.recorder.of(Warned)[-1].message
