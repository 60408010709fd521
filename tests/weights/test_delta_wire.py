from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from published import Origin, same, tensors
from torch import Tensor

from rollart.weights import delta_wire
from rollart.weights.delta import ANCHOR_EVERY
from rollart.weights.delta_wire import FAST_LINK, MIN_MEASURED, LinkSpeeds, most_common_item
from rollart.weights.manifest import Manifest, ShardPiece, TensorPart
from rollart.weights.reader import WeightReader

SLOW = 1e6


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[Origin]:
    made = Origin(tmp_path / "origin")
    with closing(made.server):
        yield made


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WeightReader]:
    monkeypatch.setattr(delta_wire, "speeds", LinkSpeeds())
    monkeypatch.setattr("rollart.weights.transports.http.speeds", delta_wire.speeds)
    with closing(WeightReader(tmp_path / "far")) as weights:
        yield weights


def link(origin: Origin, bytes_per_s: float) -> None:
    delta_wire.speeds.record(origin.server.url, MIN_MEASURED, MIN_MEASURED / bytes_per_s)


def moved(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """One number in fifty of the long tensors is another."""
    new = {name: tensor.clone() for name, tensor in values.items() if name != "head"}
    for name in ("embed", "long"):
        new[name].view(-1)[::50] += 1
    return {**new, "head": new["embed"]}


def fetched(origin: Origin, far: WeightReader, version: int, values: dict[str, Tensor]) -> int:
    """The bytes that crossed the wire for a version that came right."""
    before = origin.server.served
    held = far.fetch(origin.publish(version, values))
    assert same(held.tensors, values)
    held.release()
    return origin.server.served - before


def test_over_a_slow_link_a_version_comes_as_a_delta(origin: Origin, far: WeightReader) -> None:
    values = tensors(1)
    link(origin, SLOW)
    whole = fetched(origin, far, 1, values)
    for version in (2, 3, 4):
        values = moved(values)
        assert fetched(origin, far, version, values) < whole / 4


def test_over_a_fast_link_it_comes_plain(origin: Origin, far: WeightReader) -> None:
    values = tensors(1)
    link(origin, 10 * FAST_LINK)
    assert fetched(origin, far, 1, values) == fetched(origin, far, 2, moved(values))


def test_over_a_link_that_was_never_measured_it_comes_plain(origin: Origin, far: WeightReader) -> None:
    values = tensors(1)
    assert fetched(origin, far, 1, values) == fetched(origin, far, 2, moved(values))


def test_who_has_no_base_gets_it_plain(origin: Origin, far: WeightReader) -> None:
    values = tensors(1)
    link(origin, SLOW)
    origin.publish(1, values)
    assert fetched(origin, far, 2, moved(values)) > sum(tensor.nbytes for tensor in values.values()) / 2


def test_an_anchor_comes_plain(origin: Origin, far: WeightReader) -> None:
    values = tensors(1)
    link(origin, SLOW)
    whole = fetched(origin, far, ANCHOR_EVERY - 1, values)
    assert fetched(origin, far, ANCHOR_EVERY, values) == whole
    assert fetched(origin, far, ANCHOR_EVERY + 1, values) < whole / 4


def test_a_version_that_changed_altogether_comes_plain(origin: Origin, far: WeightReader) -> None:
    link(origin, SLOW)
    values = tensors(1)
    whole = fetched(origin, far, 1, values)
    negative = {name: -tensor for name, tensor in values.items() if name != "head"}
    assert fetched(origin, far, 2, {**negative, "head": negative["embed"]}) > whole / 4


def test_a_base_that_was_damaged_at_the_far_end_costs_a_plain_bucket_and_nothing_else(
    origin: Origin, far: WeightReader, tmp_path: Path
) -> None:
    values = tensors(1)
    link(origin, SLOW)
    fetched(origin, far, 1, values)
    (data,) = (tmp_path / "far").glob("*.data")
    with open(data, "r+b") as file:
        file.seek(5000)
        file.write(b"damage")
    fetched(origin, far, 2, moved(values))


def test_the_elements_of_a_bucket_are_those_of_most_of_its_bytes() -> None:
    small, large = TensorPart("a", "bfloat16", (40,), 0, 40), TensorPart("b", "float32", (100,), 0, 100)
    manifest = Manifest(1, "a", 0, 1, 528, 256, (ShardPiece(small, 0), ShardPiece(large, 128)))
    assert most_common_item(manifest, 0, 128) == 2
    assert most_common_item(manifest, 0, 256) == 4
    assert most_common_item(manifest, 100, 110) == 1


def test_the_speed_of_a_link_follows_what_it_carries() -> None:
    seen = LinkSpeeds()
    assert seen.of("a") is None
    seen.record("a", MIN_MEASURED - 1, 1.0)
    assert seen.of("a") is None
    seen.record("a", MIN_MEASURED, 1.0)
    for _ in range(20):
        seen.record("a", 8 * MIN_MEASURED, 1.0)
    assert seen.of("a") == pytest.approx(8 * MIN_MEASURED, rel=0.01)


def test_bfloat16_versions_come_as_deltas_too(origin: Origin, far: WeightReader) -> None:
    values = {"w": torch.randn(20_000).to(torch.bfloat16)}
    link(origin, SLOW)
    whole = fetched(origin, far, 1, values)
    values = {"w": (values["w"].float() * 1.0005).to(torch.bfloat16)}
    assert fetched(origin, far, 2, values) < whole / 2
