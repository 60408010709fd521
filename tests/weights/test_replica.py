import os
import subprocess
import threading
from contextlib import closing
from pathlib import Path

import pytest
from faulty import Wire, cut_after, faithful, flipping
from published import BUCKET, DEADLINE_S, Origin, line, process, same, shares, tensors

from rollart.core.types import Publication
from rollart.weights.loaded_version import CorruptWeights
from rollart.weights.publish import Publisher
from rollart.weights.reader import WeightReader
from rollart.weights.server import FAN_OUT
from rollart.weights.shm_file import NoRoom
from rollart.weights.store import MissingVersion
from rollart.weights.transports import TransferFailed

pytestmark = pytest.mark.slow

HOST = """
from pathlib import Path
import msgspec
from rollart.core.types import Publication
from rollart.weights.reader import WeightReader
weights = WeightReader(Path(args[0]))
publication = msgspec.convert(args[1], Publication)
for name, tensor in weights.stream(publication):
    print(name, flush=True)
held = weights.fetch(publication)
print("all", flush=True)
sys.stdin.readline()
"""


class Gate:
    """A sender that lets the publisher go beyond a bucket only when it is opened."""

    url = "gate:"

    def __init__(self, bucket: int) -> None:
        self._bucket = bucket
        self.reached, self.opened = threading.Event(), threading.Event()

    def start(self, manifest: object, data: object) -> None: ...

    def update(self, bucket: int) -> None:
        if bucket == self._bucket:
            self.reached.set()
            assert self.opened.wait(DEADLINE_S)

    def finish(self) -> None: ...

    def close(self) -> None: ...


def through(publication: Publication, *urls: str) -> Publication:
    return Publication(publication.version, publication.id, (urls,))


def test_a_host_without_the_version_fetches_it_and_others_on_it_find_it_there(tmp_path: Path) -> None:
    origin, values = Origin(tmp_path / "origin"), tensors(1)
    publication = origin.publish(1, values)
    with (
        closing(origin.server),
        closing(WeightReader(tmp_path / "far")) as first,
        closing(WeightReader(tmp_path / "far")) as second,
    ):
        held = first.fetch(publication)
        assert held.transport == "http" and same(held.tensors, values)
        assert [(hop.source, hop.bytes) for hop in held.hops] == [(origin.server.url, held.bytes)]
        assert origin.server.served == held.bytes
        beside = second.fetch(publication)
        assert beside.transport == "shared memory" and same(beside.tensors, values)
        assert beside.hops == () and beside.relay == ""
        assert origin.server.served == held.bytes
        held.release()
        beside.release()
    assert not (tmp_path / "far").exists()


def test_fetching_begins_before_the_last_bucket_is_published(tmp_path: Path) -> None:
    origin, values, gate = Origin(tmp_path / "origin"), tensors(1), Gate(bucket=4)
    publisher = Publisher(origin.store, bucket_bytes=BUCKET, senders=[gate])
    publishing = threading.Thread(target=publisher.publish, args=(1, "ab", shares(values)))
    with closing(origin.server), closing(WeightReader(tmp_path / "far")) as far:
        publishing.start()
        assert gate.reached.wait(DEADLINE_S)
        arriving = far.stream(Publication(1, "ab", ((origin.server.url,),)))
        seen = [next(arriving) for _ in range(4)]
        assert [name for name, _ in seen] == ["embed", "head", "odd", "count"]
        gate.opened.set()
        assert [name for name, _ in arriving] == ["long"]
        publishing.join(DEADLINE_S)


def test_a_byte_changed_on_the_wire_is_noticed_and_the_bucket_fetched_again(tmp_path: Path) -> None:
    origin, values = Origin(tmp_path / "origin"), tensors(1)
    publication = origin.publish(1, values)
    wire = Wire(origin.server.url, lambda number: flipping(5000) if number == 1 else faithful)
    with closing(origin.server), closing(wire), closing(WeightReader(tmp_path / "far", streams=1)) as far:
        held = far.fetch(through(publication, wire.url))
        assert same(held.tensors, values)
        assert origin.server.served == held.bytes + BUCKET
        held.release()


def test_a_wire_that_changes_every_bucket_is_given_up_and_nothing_of_it_is_loaded(tmp_path: Path) -> None:
    origin = Origin(tmp_path / "origin")
    publication = origin.publish(1, tensors(1))

    def carry(number: int) -> object:
        def changed(total: int, data: bytes) -> bytes:
            inside = len(data) == 1024 and b"HTTP/1.1" not in data  # of a bucket, not its head
            return bytes(byte ^ 1 for byte in data) if inside else data

        return changed

    wire = Wire(origin.server.url, carry)  # type: ignore[arg-type]
    with closing(origin.server), closing(wire), closing(WeightReader(tmp_path / "far", streams=2)) as far:
        with pytest.raises(CorruptWeights, match=r"of version 1 came 3 times with a wrong checksum"):
            far.fetch(through(publication, wire.url))
        with pytest.raises(MissingVersion):
            far.store.open(1, publication.id, 0).sum(0, 0.0)


def test_a_connection_cut_half_way_goes_on_where_it_was(tmp_path: Path) -> None:
    origin, values = Origin(tmp_path / "origin"), tensors(1)
    publication = origin.publish(1, values)
    # The first connection is for the manifest, the second for the buckets of the only stream.
    wire = Wire(origin.server.url, lambda number: cut_after(6000) if number in (1, 2) else faithful)
    with closing(origin.server), closing(wire), closing(WeightReader(tmp_path / "far", streams=1)) as far:
        held = far.fetch(through(publication, wire.url))
        assert same(held.tensors, values)
        starts = [request.split(b"bytes=")[1].split(b"-")[0] for request in wire.requests if b"bytes=" in request]
        assert any(int(start) % BUCKET for start in starts)
        held.release()


def test_a_publisher_that_is_gone_is_a_sentence_within_a_deadline(tmp_path: Path) -> None:
    origin = Origin(tmp_path / "origin")
    publication = origin.publish(1, tensors(1))
    origin.server.close()
    with closing(WeightReader(tmp_path / "far")) as far, pytest.raises(TransferFailed, match="Connection refused"):
        far.fetch(publication)


def test_a_version_that_is_retired_is_a_sentence(tmp_path: Path) -> None:
    origin = Origin(tmp_path / "origin")
    publications = [origin.publish(version, tensors(version)) for version in (1, 2, 3)]
    with closing(origin.server), closing(WeightReader(tmp_path / "far")) as far:
        with pytest.raises(TransferFailed, match=r"version 1 .* is not in"):
            far.fetch(publications[0])
        far.fetch(publications[2]).release()


def test_the_publisher_is_asked_a_few_times_however_many_hosts_there_are(tmp_path: Path) -> None:
    origin, values = Origin(tmp_path / "origin"), tensors(1)
    publication = origin.publish(1, values)
    # A lease that stays, so that the hosts, which come one after the other here, are one tree.
    origin.server.join((1, publication.id, 0), "test", "")
    hosts = [WeightReader(tmp_path / f"host-{number}") for number in range(7)]
    held = [host.fetch(publication) for host in hosts]
    assert all(same(one.tensors, values) for one in held)
    assert origin.server.served == FAN_OUT * held[0].bytes
    given = [server.served // held[0].bytes for host in hosts for server in host._servers.values()]
    assert max(given) <= FAN_OUT and sum(given) == len(hosts) - FAN_OUT
    sources = [one.hops[0].source for one in held]  # each host has all of it from one place, which is in its report
    assert sources == [origin.server.url] * FAN_OUT + [held[above].relay for above in (0, 0, 1, 1, 2)]
    for one in held:
        one.release()
    for host in hosts:
        host.close()
    origin.server.close()


def test_who_loses_its_relay_half_way_goes_on_with_the_publisher(tmp_path: Path) -> None:
    origin, values, gate = Origin(tmp_path / "origin"), tensors(1), Gate(bucket=4)
    origin.publisher = Publisher(origin.store, bucket_bytes=BUCKET, senders=[gate])
    publication = Publication(1, "ab", ((origin.server.url,),))
    publishing = threading.Thread(target=origin.publisher.publish, args=(1, "ab", shares(values)))
    reported = [publication.version, publication.id, publication.sources]
    named = dict(zip(("version", "id", "sources"), reported, strict=True))
    with closing(origin.server), closing(WeightReader(tmp_path / "far")) as far:
        publishing.start()
        assert gate.reached.wait(DEADLINE_S)
        with process(HOST, str(tmp_path / "relay"), named) as relay:
            assert line(relay) == "embed"
            origin.server.join((1, "ab", 0), "test", "http://127.0.0.1:9")  # so that the next one is fed by the relay
            arriving = far.stream(publication)
            assert next(arriving)[0] == "embed"
            assert origin.server.served <= 5 * BUCKET  # all of it went to the relay
        gate.opened.set()
        rest = dict(arriving)
        publishing.join(DEADLINE_S)
        assert rest["long"].equal(values["long"])


def test_when_the_process_that_fetches_for_a_host_dies_another_takes_over(tmp_path: Path) -> None:
    origin, values, gate = Origin(tmp_path / "origin"), tensors(1), Gate(bucket=4)
    publisher = Publisher(origin.store, bucket_bytes=BUCKET, senders=[gate])
    publication = Publication(1, "ab", ((origin.server.url,),))
    publishing = threading.Thread(target=publisher.publish, args=(1, "ab", shares(values)))
    named = {"version": 1, "id": "ab", "sources": publication.sources}
    got = []
    with closing(origin.server), closing(WeightReader(tmp_path / "far")) as second:
        publishing.start()
        assert gate.reached.wait(DEADLINE_S)
        with process(HOST, str(tmp_path / "far"), named) as first:
            assert line(first) == "embed"
            fetching = threading.Thread(target=lambda: got.append(second.fetch(publication)))
            fetching.start()
        gate.opened.set()
        fetching.join(DEADLINE_S)
        publishing.join(DEADLINE_S)
        assert same(got[0].tensors, values)
        got[0].release()


def test_a_publisher_killed_half_way_is_never_taken_for_complete(tmp_path: Path) -> None:
    origin = Origin(tmp_path / "origin")
    writer = """
from pathlib import Path
import torch
from published import shares, tensors, BUCKET
from rollart.weights.publish import Publisher
from rollart.weights.store import Store
class Stop:
    url = ""
    def start(self, manifest, data): pass
    def update(self, bucket):
        if bucket == 4:
            print("half", flush=True)
            sys.stdin.readline()
    def finish(self): pass
Publisher(Store(Path(args[0])), bucket_bytes=BUCKET, senders=[Stop()]).publish(1, "ab", shares(tensors(1)))
"""
    publication = Publication(1, "ab", ((origin.server.url,),))
    with closing(origin.server), closing(WeightReader(tmp_path / "far")) as far:
        with process(writer, str(tmp_path / "origin")) as child:
            assert line(child) == "half"
            arriving = far.stream(publication)
            assert next(arriving)[0] == "embed"
        for reader in (far, WeightReader(tmp_path / "origin")):
            with pytest.raises(TransferFailed, match="will never be complete: its publisher ended half-way"):
                reader.fetch(publication)
        arriving.close()


def test_a_host_without_room_says_so_and_the_publisher_is_not_harmed(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(tmp_path / "far")]
    if os.geteuid() != 0 or subprocess.run(mount).returncode:
        pytest.skip("a file system of 16 kB can only be mounted by root")
    origin, values = Origin(tmp_path / "origin"), tensors(1)
    publication = origin.publish(1, values)
    try:
        with closing(origin.server), closing(WeightReader(tmp_path / "far")) as far:
            with pytest.raises(NoRoom, match=r"version 1 of the weights needs 0\.1 MB"):
                far.fetch(publication)
            held = WeightReader(tmp_path / "origin").fetch(publication)
            assert same(held.tensors, values)
            held.release()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path / "far")], check=True)
