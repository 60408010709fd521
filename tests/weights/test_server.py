import http.client
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from msgspec.structs import replace
from published import BUCKET, Origin, blank, same, tensors

from rollart.weights import server as serving
from rollart.weights.reader import WeightReader
from rollart.weights.server import WeightServer
from rollart.weights.store import Store
from rollart.weights.transports import TransferFailed
from rollart.weights.transports.http import path_of


def get(server: WeightServer, path: str, **headers: str) -> tuple[int, bytes]:
    url = urlsplit(server.url)
    with closing(http.client.HTTPConnection(url.hostname or "", url.port, timeout=30)) as connection:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()


def test_only_who_shows_the_key_is_served(tmp_path: Path) -> None:
    origin, values = Origin(tmp_path / "origin", key="secret"), tensors(1)
    publication = origin.publish(1, values)
    with closing(origin.server):
        for key in (None, "wrong"):
            with (
                closing(WeightReader(tmp_path / "far")) as far,
                pytest.raises(TransferFailed, match="the key of this run is missing or wrong"),
            ):
                far.fetch(replace(publication, key=key))
        with closing(WeightReader(tmp_path / "far")) as far:
            held = far.fetch(replace(publication, key="secret"))
            assert same(held.tensors, values)
            (relay,) = far._servers.values()
            assert get(relay, f"{path_of(1, publication.id, 0)}/data")[0] == 401
            held.release()


def test_ranges_are_served_as_asked_and_wrong_ones_refused(tmp_path: Path) -> None:
    origin = Origin(tmp_path)
    publication = origin.publish(1, tensors(1))
    path = path_of(1, publication.id, 0)
    shard = origin.store.open(1, publication.id, 0)
    with closing(origin.server):
        assert get(origin.server, f"{path}/data", Range="bytes=10-4999") == (206, bytes(shard.data[10:5000]))
        assert get(origin.server, f"{path}/data", Range="bytes=50-") == (206, bytes(shard.data[50:]))
        size = shard.manifest.size
        assert get(origin.server, f"{path}/data", Range=f"bytes=0-{size}") == (416, f"it has {size} bytes".encode())
        assert get(origin.server, "/../etc/passwd")[0] == 404
        assert get(origin.server, f"{path}/sums?from=3") == (200, shard.sums(3))
    shard.release()


def test_bytes_that_are_not_final_are_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "WAIT_S", 0.0)
    store, manifest = Store(tmp_path), blank(3 * BUCKET)
    path = path_of(1, manifest.id, 0)
    with closing(WeightServer(store)) as server, store.create(manifest) as writing:
        assert get(server, f"{path}/data", Range="bytes=0-9") == (503, b"these bytes are not final yet")
        assert get(server, f"{path}/sums?from=0") == (200, b"")
        writing.data[:BUCKET] = b"x" * BUCKET
        writing.finish(1)
        assert get(server, f"{path}/data", Range="bytes=0-9") == (206, b"x" * 10)
        assert get(server, f"{path}/data", Range=f"bytes=0-{BUCKET}")[0] == 503


def test_memory_that_members_fetch_is_not_reused_until_they_leave_or_fall_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = Origin(tmp_path)
    publication = origin.publish(1, tensors(1))
    path = path_of(1, publication.id, 0)

    def is_there() -> bool:
        return (1, publication.id, 0) in origin.store.shards()

    with closing(origin.server):
        assert get(origin.server, f"{path}/manifest?member=a")[0] == 200
        for version in (2, 3, 4):
            origin.publish(version, tensors(version))
        assert is_there()
        get(origin.server, f"{path}/leave?member=a")
        origin.publish(5, tensors(5))
        assert not is_there()
        publication = origin.publish(1, tensors(1))
        get(origin.server, f"{path_of(1, publication.id, 0)}/manifest?member=b")
        monkeypatch.setattr(serving, "LEASE_S", 0.0)
        origin.server.expire()
        for version in (2, 3):
            origin.publish(version, tensors(version))
        assert not is_there()
