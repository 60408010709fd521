from pathlib import Path

import msgspec
import pytest

from rollart.core.errors import RollartError
from rollart.core.types import Message, Outcome, Trajectory, Turn
from rollart.rollout.ledger import GroupRecord, SqliteLedger


def trajectory(group: str, member: int, outcome: Outcome = Outcome.FINISHED) -> Trajectory:
    turn = Turn((Message("user", "hi"),), (1, 2), "yes", (3,), (-0.5,), (7,), "stop", 1.0)
    return Trajectory(f"{group}.{member}", "t", group, member, 5, outcome, (turn,), reward=1.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    ledger = SqliteLedger.open(tmp_path / "ledger.sqlite")
    for index in range(3):
        ledger.start(GroupRecord(f"g{index}", "t", index, 5, 2, 0))
        for member in range(2):
            ledger.add(trajectory(f"g{index}", member))
    return tmp_path / "ledger.sqlite"


def test_a_trajectory_comes_back_as_it_was(path: Path) -> None:
    assert SqliteLedger.open_readonly(path).trajectory("g1.1") == trajectory("g1", 1)


def test_the_latest_are_listed_by_success_and_failures_are_left_out(path: Path) -> None:
    ledger = SqliteLedger.open(path)
    for member, success in enumerate((True, False, None, True)):
        ledger.add(msgspec.structs.replace(trajectory("more", member), success=success, started_s=10.0 + member))
    ledger.add(msgspec.structs.replace(trajectory("more", 9, Outcome.ENV_FAILED), started_s=99.0))

    assert [row.id for row in ledger.latest(2)] == ["more.3", "more.0", "more.2", "more.1"]
    assert len(ledger.latest(100)) == 10


def test_leases_without_a_checkpoint_are_open_again_after_a_crash(path: Path) -> None:
    SqliteLedger.open(path).lease(0, ["g0", "g1"])
    recovery = SqliteLedger.open(path).recover()
    assert recovery.version == 0
    assert [group.record.id for group in recovery.groups] == ["g0", "g1", "g2"]


def test_a_checkpoint_consumes_exactly_the_steps_that_it_contains(path: Path) -> None:
    ledger = SqliteLedger.open(path)
    ledger.lease(0, ["g0"])
    ledger.lease(1, ["g1"])
    ledger.commit(1)
    recovery = SqliteLedger.open(path).recover()
    assert recovery.version == 1
    assert [group.record.id for group in recovery.groups] == ["g1", "g2"]
    assert recovery.next_index == {"t": 3}


def test_a_group_is_leased_once(path: Path) -> None:
    ledger = SqliteLedger.open(path)
    ledger.lease(0, ["g0"])
    with pytest.raises(RollartError, match="g0 is not open"):
        ledger.lease(1, ["g1", "g0"])
    assert ledger.group_states() == {"leased": 1, "open": 2}


def test_a_recovered_group_never_reuses_the_id_of_a_member(path: Path) -> None:
    ledger = SqliteLedger.open(path)
    ledger.start(GroupRecord("g9", "t", 9, 5, 4, 0))
    ledger.add(trajectory("g9", 0))
    ledger.add(trajectory("g9", 3, Outcome.ENV_FAILED))
    [group] = [group for group in ledger.recover().groups if group.record.id == "g9"]
    assert group.launched == 4
    assert [t.id for t in group.trajectories] == ["g9.0"]


def test_an_id_may_be_cut_short_if_it_stays_unambiguous(path: Path) -> None:
    ledger = SqliteLedger.open_readonly(path)
    ledger_full = ledger.trajectory("g2.0")
    assert ledger_full.member == 0
    with pytest.raises(RollartError, match="several ids"):
        ledger.trajectory("g2")
    with pytest.raises(RollartError, match="no trajectory"):
        ledger.trajectory("x")


def test_a_missing_ledger_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RollartError, match="run folder"):
        SqliteLedger.open_readonly(tmp_path / "ledger.sqlite")


def test_trajectories_of_old_steps_are_forgotten_but_never_what_may_be_trained_or_was_held_out(tmp_path: Path) -> None:
    ledger = SqliteLedger.open(tmp_path / "ledger.sqlite", keep=1)
    for index in range(5):
        ledger.start(GroupRecord(f"g{index}", "t", index, 5, 1, index))
        ledger.add(trajectory(f"g{index}", 0))
    ledger.add(trajectory("eval", 0), held_out=True)
    ledger.drop("g0", "stale")
    for step in range(3):
        ledger.lease(step, [f"g{step + 1}"])
    ledger.commit(2)
    ledger.forget(2)
    kept = {each.id for each in ledger.trajectories()}
    assert kept == {"g2.0", "g3.0", "g4.0", "eval.0"}  # the last step, a lease, an open group
    assert ledger.group_states() == {"consumed": 2, "dropped": 1, "leased": 1, "open": 1}
    assert ledger.recover().next_index == {"t": 5}


def test_reading_a_ledger_leaves_no_files(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = SqliteLedger.open(path)
    ledger.add(trajectory("g1", 1))
    ledger.close()
    before = {each.name for each in path.parent.iterdir()}
    reader = SqliteLedger.open_readonly(path)
    assert reader.trajectory("g1.1").member == 1
    reader.close()
    assert before == {"ledger.sqlite"} == {each.name for each in path.parent.iterdir()}
