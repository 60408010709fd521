from errno import ENOSPC
from pathlib import Path

import pytest

from rollart.core.errors import DiskFull, RollartError
from rollart.core.types import Outcome, Trajectory
from rollart.fleet.ledger_writer import LedgerWriter
from rollart.rollout.ledger import GroupRecord, SqliteLedger


def test_everything_before_a_commit_is_written_with_it_and_the_log_first(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    states: list[dict[str, int]] = []
    ledger = SqliteLedger.open(path)
    writer = LedgerWriter(ledger, lambda: states.append(SqliteLedger.open_readonly(path).group_states()))
    for index in range(2):
        writer.start(GroupRecord(f"g{index}", "t", index, 5, 1, 0))
        writer.add(Trajectory(f"g{index}.0", "t", f"g{index}", 0, 5, Outcome.FINISHED, reward=1.0))
    writer.lease(0, ["g0"])
    writer.commit(1)
    assert SqliteLedger.open_readonly(path).group_states() == {"consumed": 1, "open": 1}
    assert states[0] == {}
    writer.drop("g1", "stale")
    assert [group.record.id for group in writer.recover().groups] == []
    writer.close()
    ledger.close()


def test_a_failed_write_is_raised(tmp_path: Path) -> None:
    writer = LedgerWriter(SqliteLedger.open(tmp_path / "ledger.sqlite"), lambda: None)
    writer.lease(0, ["never started"])
    with pytest.raises(RollartError, match="is not open"):
        writer.commit(1)
    with pytest.raises(RollartError, match="is not open"):
        writer.drop("any", "later")


def test_while_the_disk_is_full_records_wait_and_a_checkpoint_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = SqliteLedger.open(path)
    full = True

    def flush_log() -> None:
        if full:
            raise OSError(ENOSPC, "the disk is full")

    writer = LedgerWriter(ledger, flush_log)
    writer.start(GroupRecord("g0", "t", 0, 5, 1, 0))
    with pytest.raises(DiskFull, match="the disk is full"):
        writer.commit(1)
    writer.lease(0, ["g0"])
    full = False
    writer.commit(1)
    assert SqliteLedger.open_readonly(path).group_states() == {"consumed": 1}
    writer.close()
    ledger.close()


def test_a_transaction_that_finds_no_room_is_written_later(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = SqliteLedger.open(path)
    pages = ledger._db.execute("pragma page_count").fetchone()[0]
    ledger._db.execute(f"pragma max_page_count = {pages}")
    writer = LedgerWriter(ledger, lambda: None)
    groups = [GroupRecord(f"g{index}", "t", index, 5, 1, 0) for index in range(1000)]
    for group in groups:
        writer.start(group)
    with pytest.raises(DiskFull, match="is full"):
        writer.commit(1)
    ledger._db.execute("pragma max_page_count = 100000")
    assert [group.record.id for group in writer.recover().groups] == [group.id for group in groups]
    writer.close()
    ledger.close()
