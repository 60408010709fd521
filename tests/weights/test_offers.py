"""Another transport beside HTTP, with a real publisher in another process and real NIXL between the two."""

import importlib.util
import os
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from published import line, process, same, tensors

from rollart.config import TrainingConfig
from rollart.core.types import Publication
from rollart.weights.manifest import Manifest
from rollart.weights.reader import WeightReader
from rollart.weights.transports import TransferFailed, sender
from rollart.weights.transports.offers import SenderGroup

os.environ.setdefault("UCX_NET_DEVICES", "lo")

PUBLISHER = """
import os
os.environ["UCX_NET_DEVICES"] = "lo"
from pathlib import Path
import msgspec
from published import BUCKET, Origin, tensors
from rollart.weights.publish import Publisher
from rollart.weights.transports import sender
from rollart.weights.transports.nixl import NixlAddress
from rollart.weights.transports.offers import SenderGroup

root, fault = args
origin = Origin(Path(root))

def tell(manifest, urls):
    if fault == "wrong":  # bytes that are there, but not the right ones
        card = NixlAddress.of(urls[0])
        urls = (NixlAddress(card.agent, card.address + 64, card.size).url,)
    origin.server.offer(manifest, ("nixl:nobody",) if fault == "nobody" else urls)

origin.publisher = Publisher(origin.store, bucket_bytes=BUCKET, senders=[SenderGroup([sender("nixl")], tell)])
for version in range(1, 4):
    print(msgspec.json.encode(origin.publish(version, tensors(version))).decode(), flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def _nixl() -> None:
    if importlib.util.find_spec("nixl_cu12") is None:
        pytest.skip("NIXL is not installed: pip install 'rollart[nixl]'")


@pytest.mark.slow
def test_versions_come_by_the_offered_transport(tmp_path: Path) -> None:
    with (
        process(PUBLISHER, str(tmp_path / "origin"), "") as publisher,
        closing(WeightReader(tmp_path / "far")) as weights,
    ):
        for version in range(1, 4):
            held = weights.fetch(msgspec.json.decode(line(publisher), type=Publication))
            assert held.transport == "nixl"
            assert same(held.tensors, tensors(version))
            held.release()
            assert publisher.stdin is not None
            publisher.stdin.write("\n")
            publisher.stdin.flush()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["nobody", "wrong"])
def test_what_the_offered_transport_does_not_bring_comes_by_http(tmp_path: Path, fault: str) -> None:
    with (
        process(PUBLISHER, str(tmp_path / "origin"), fault) as publisher,
        closing(WeightReader(tmp_path / "far")) as weights,
    ):
        held = weights.fetch(msgspec.json.decode(line(publisher), type=Publication))
        assert same(held.tensors, tensors(1))
        assert held.transport == ("http" if fault == "nobody" else "nixl")
        held.release()


class Failing:
    """A transport whose store is full at the second bucket."""

    url = "full://"

    def __init__(self) -> None:
        self.asked: list[int] = []

    def start(self, manifest: Manifest, data: memoryview) -> None: ...

    def update(self, bucket: int) -> None:
        self.asked.append(bucket)
        if bucket == 1:
            raise TransferFailed("the store is full")

    def finish(self) -> None:
        raise AssertionError("a version that it did not take is not finished")

    def close(self) -> None: ...


def test_a_sender_that_fails_sits_out_the_version_and_the_publication_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    failing, reported = Failing(), []
    offers = SenderGroup([failing], lambda manifest, urls: reported.append(urls))
    manifest = Manifest(1, "a", 0, 1, 300, 100, ())
    for _ in range(2):
        offers.start(manifest, memoryview(bytearray(300)))
        for bucket in range(3):
            offers.update(bucket)
        offers.finish()
    assert failing.asked == [0, 1, 0, 1]
    assert reported == [("full://",)] * 2
    assert "the store is full" in caplog.text


def test_a_transport_that_nobody_knows_is_refused() -> None:
    with pytest.raises(TransferFailed, match="choose http, nixl or mooncake"):
        sender("pigeon")
    with pytest.raises(ValueError, match="transport must be http, nixl or mooncake"):
        TrainingConfig(transport="pigeon")
    assert TrainingConfig(transport="mooncake://10.0.0.1:50051?protocol=rdma").transport.startswith("mooncake")
