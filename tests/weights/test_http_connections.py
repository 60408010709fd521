from contextlib import closing
from pathlib import Path

import pytest
from faulty import Wire, faithful
from published import Origin, same, tensors

from rollart.core.types import Publication
from rollart.weights.reader import WeightReader
from rollart.weights.transports import TransferFailed
from rollart.weights.transports.http import KEPT, Connections


def test_the_next_version_comes_over_the_connections_of_the_last(tmp_path: Path) -> None:
    origin, made = Origin(tmp_path / "origin"), []

    def carry(number: int) -> object:
        made.append(number)
        return faithful

    wire = Wire(origin.server.url, carry)  # type: ignore[arg-type]
    with closing(origin.server), closing(wire), closing(WeightReader(tmp_path / "far", streams=2)) as far:
        for version in (1, 2, 3):
            publication = origin.publish(version, tensors(version))
            held = far.fetch(Publication(version, publication.id, ((wire.url,),)))
            assert same(held.tensors, tensors(version))
            held.release()
        assert len(made) <= 1 + 2 + 1  # manifest, two streams, and one if a version came before the last had left


def test_a_connection_that_its_server_has_closed_is_not_handed_out_again(tmp_path: Path) -> None:
    origin, connections = Origin(tmp_path / "origin"), Connections()
    first = connections.take(origin.server.url, 5.0)
    first.connect()
    connections.give(origin.server.url, first)
    again = connections.take(origin.server.url, 5.0)
    assert again is first
    again.request("GET", "/")
    again.getresponse().read()
    connections.give(origin.server.url, again)
    origin.server.close()
    assert first.sock.recv(1) == b""
    assert connections.take(origin.server.url, 5.0) is not first


def test_who_keeps_a_connection_is_not_served_by_a_server_that_is_closed(tmp_path: Path) -> None:
    origin = Origin(tmp_path / "origin")
    with closing(WeightReader(tmp_path / "far")) as far:
        far.fetch(origin.publish(1, tensors(1))).release()
        publication = origin.publish(2, tensors(2))
        origin.server.close()
        with pytest.raises(TransferFailed):
            far.fetch(publication)


def test_only_so_many_connections_are_kept_and_those_never_made_are_not(tmp_path: Path) -> None:
    origin, connections = Origin(tmp_path / "origin"), Connections()
    with closing(origin.server):
        taken = [connections.take(origin.server.url, 5.0) for _ in range(KEPT + 1)]
        for one in taken:
            one.connect()
        connections.give(origin.server.url, connections.take(origin.server.url, 5.0))
        for one in taken:
            connections.give(origin.server.url, one)
        assert taken[0].sock is None
        assert connections.take(origin.server.url, 5.0) is taken[1]
