import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
from published import BUCKET, blank, line, process

from rollart.weights import store
from rollart.weights.shm_file import NoRoom
from rollart.weights.store import BeingWritten, MissingVersion, Store

WRITER = """
from pathlib import Path
from published import blank
from rollart.weights.store import Store
manifest = blank(20_000, id="aa")
with Store(Path(args[0])).create(manifest) as writing:
    writing.data[:] = bytes([7]) * len(writing.data)
    for bucket in range(args[1]):
        writing.finish(bucket)
    print("written", flush=True)
    sys.stdin.readline()
"""


def written(store: Store, version: int, fill: int = 1, size: int = 20_000) -> tuple[int, str, int]:
    """A complete shard, with checksums that are only numbers."""
    manifest = blank(size, version)
    with store.create(manifest) as writing:
        writing.data[:] = bytes([fill]) * len(writing.data)
        for bucket in range(manifest.buckets):
            writing.finish(bucket)
    return version, manifest.id, 0


def files(store: Store) -> set[int]:
    return {path.stat().st_ino for path in store.root.glob("*.data")}


def test_a_reader_sees_each_bucket_when_it_is_final_and_not_before(tmp_path: Path) -> None:
    store, manifest = Store(tmp_path), blank(3 * BUCKET)
    with store.create(manifest) as writing:
        reader = Store(tmp_path).open(1, manifest.id, 0)
        assert reader.ready == 0 and not reader.wait(0, 0.0)
        writing.data[:BUCKET] = b"x" * BUCKET
        writing.finish(99)
        assert reader.sum(0, 1.0) == 99 and bytes(reader.data[:2]) == b"xx"
        with pytest.raises(MissingVersion, match="bucket 1 of version 1 was not published within 0 s"):
            reader.sum(1, 0.0)
        reader.release()


def test_what_is_read_cannot_be_written(tmp_path: Path) -> None:
    store = Store(tmp_path)
    shard = store.open(*written(store, 1))
    with pytest.raises(TypeError):
        shard.data[0] = 1
    shard.release()


def test_a_version_takes_the_pages_of_the_last_but_one_and_never_those_of_a_reader(tmp_path: Path) -> None:
    store = Store(tmp_path)
    names = [written(store, 1), written(store, 2)]
    two = files(store)
    names.append(written(store, 3))
    assert files(store) == two
    with pytest.raises(MissingVersion):
        store.open(*names[0])
    held = Store(tmp_path).open(*names[1])
    names += [written(store, 4, fill=4), written(store, 5, fill=5)]
    assert bytes(held.data) == bytes([1]) * len(held.data)
    assert len(files(store)) == 3
    held.release()
    written(store, 6)
    assert len(files(store)) == 2


def test_a_held_version_in_another_process_is_left_alone_until_that_process_ends(tmp_path: Path) -> None:
    store = Store(tmp_path)
    name = written(store, 1, fill=1)
    reader = """
from pathlib import Path
from rollart.weights.store import Store
shard = Store(Path(args[0])).open(*args[1])
print("held", flush=True)
sys.stdin.readline()
print(set(bytes(shard.data)), flush=True)
sys.stdin.readline()
"""
    with process(reader, str(tmp_path), name) as child:
        assert line(child) == "held" and child.stdin is not None
        for version in (2, 3, 4):
            written(store, version, fill=version)
        child.stdin.write("\n")
        child.stdin.flush()
        assert line(child) == "{1}"
    written(store, 5)
    assert len(files(store)) == 2


def test_a_publisher_killed_half_way_is_found_out_at_once_and_its_pages_are_used_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with process(WRITER, str(tmp_path), 2) as child:
        assert line(child) == "written"
        shard = store.open(1, "aa", 0)
        assert shard.sum(1, 1.0) == 1
        assert not shard.wait(2, 0.0)
    with pytest.raises(MissingVersion, match="will never be complete: its publisher ended half-way"):
        shard.sum(2, 60.0)
    shard.release()
    before = files(store)
    written(store, 2)
    assert files(store) == before
    with pytest.raises(MissingVersion):
        store.open(1, "aa", 0)


def test_two_processes_do_not_write_the_same_shard(tmp_path: Path) -> None:
    with process(WRITER, str(tmp_path), 5) as child:
        assert line(child) == "written"
        with pytest.raises(BeingWritten):
            Store(tmp_path).create(blank(20_000, id="aa"))


def test_what_is_complete_is_never_begun_again(tmp_path: Path) -> None:
    """Who looked a moment too early wants to bring it here, and finds that its writer has been faster."""
    store = Store(tmp_path)
    version, id, shard = written(store, 3, fill=5)
    with pytest.raises(BeingWritten):
        store.create(blank(20_000, version, id=id))
    opened = store.open(version, id, shard)
    assert opened.ready == opened.manifest.buckets
    assert set(opened.data) == {5}
    opened.release()


def test_shards_of_several_ranks_never_take_each_others_pages(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for version in range(1, 4):
        id = f"{version}" * 4
        for shard in range(2):
            manifest = blank(5000, version, shard, 2, id)
            with store.create(manifest) as writing:
                for bucket in range(manifest.buckets):
                    writing.finish(bucket)
    assert sorted(store.shards()) == [(version, f"{version}" * 4, shard) for version in (2, 3) for shard in (0, 1)]


def test_a_full_file_system_is_a_sentence_and_leaves_what_was_there(tmp_path: Path) -> None:
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", tmp_path]).returncode:
        pytest.skip("a file system of 64 kB can only be mounted by root")
    try:
        store = Store(tmp_path)
        name = written(store, 1)
        with pytest.raises(NoRoom, match=r"version 2 of the weights needs 0\.1 MB in .*; free some, or name"):
            written(store, 2, size=100_000)
        shard = store.open(*name)
        assert set(bytes(shard.data)) == {1}
        assert store.shards() == [name]
        shard.release()
        written(store, 3)
        assert len(store.shards()) == 2
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


def test_the_last_to_leave_a_folder_removes_it(tmp_path: Path) -> None:
    store, other = Store(tmp_path / "w"), Store(tmp_path / "w")
    held = other.open(*written(store, 1))
    store.tidy()
    assert (tmp_path / "w").exists()
    held.release()
    other.tidy()
    assert not (tmp_path / "w").exists()


def test_a_mapping_is_kept_while_its_file_comes_back_and_dropped_when_it_is_removed(tmp_path: Path) -> None:
    store, reader = Store(tmp_path), Store(tmp_path)
    mapped = []
    for version in range(1, 7):
        shard = reader.open(*written(store, version, fill=version))
        assert set(bytes(shard.data)) == {version}
        mapped.append(shard._file)
        shard.release()
    assert len(set(mapped)) == 2
    assert isinstance(mapped[0].view.obj, mmap.mmap)
    store.clear()
    reader.open(*written(store, 9)).release()
    assert len(reader.cache._files) == 1


def test_who_reads_what_a_dead_writer_left_never_takes_the_next_writers_checksums_for_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with process(WRITER, str(tmp_path), 2) as child:
        assert line(child) == "written"
        old = Store(tmp_path).open(1, "aa", 0)
    manifest = blank(20_000, id="aa")
    with store.create(manifest) as writing:
        writing.data[:] = bytes([9]) * len(writing.data)
        for bucket in range(manifest.buckets):
            writing.finish(bucket)
    with pytest.raises(MissingVersion, match="will never be complete"):
        old.sum(4, 60.0)
    new = Store(tmp_path).open(1, "aa", 0)
    assert new.sum(4, 1.0) == 4 and set(bytes(new.data)) == {9}
    old.release()
    new.release()


KILLED = """
import os, signal, sys
from pathlib import Path
from rollart.weights import store
store.SHARED_MEMORY = Path(sys.argv[1])
store.shared_folder("killed").mkdir()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_folders_of_processes_that_are_gone_are_swept_and_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "SHARED_MEMORY", tmp_path)
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    mine = store.shared_folder("mine")
    assert list(tmp_path.iterdir()) == []
    mine.mkdir()
    (tmp_path / "rollart-elsewhere.another-host.1.2").mkdir()
    (tmp_path / "of-somebody-else").mkdir()
    assert store.sweep(tmp_path) == []
    assert store.shared_folder("mine") == mine
