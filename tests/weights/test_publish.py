from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from published import BUCKET, same, shares, tensors

from rollart.core.types import Publication
from rollart.weights.publish import CHUNK, Publisher, TensorShard, new_id, publish
from rollart.weights.reader import WeightReader
from rollart.weights.store import Store


def test_what_is_published_is_read_as_it_was_with_every_name(tmp_path: Path) -> None:
    values = tensors(1)
    held = WeightReader(tmp_path).fetch(publish(tmp_path, 3, values, bucket_bytes=BUCKET))
    assert same(held.tensors, values)
    assert held.tensors["head"].data_ptr() == held.tensors["embed"].data_ptr()
    assert held.bytes < sum(tensor.nbytes for name, tensor in values.items() if name != "head") + 5 * 64
    held.release()


def test_tensors_larger_than_a_chunk_and_a_bucket_are_whole(tmp_path: Path) -> None:
    values = {"a": torch.randn(3), "b": torch.randn(CHUNK), "c": torch.randn(CHUNK // 4 + 1)}
    for bucket in (CHUNK // 2, 3 * CHUNK, 1 << 26):
        held = WeightReader(tmp_path).fetch(publish(tmp_path, 1, values, bucket_bytes=bucket))
        assert same(held.tensors, values)
        held.release()


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(st.integers(1, 300), st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 5),
)
def test_any_mixture_of_sizes_and_types_survives(
    tmp_path: Path, kinds: list[tuple[int, torch.dtype]], lines: int
) -> None:
    values = {f"t{i}": torch.randn(size).to(dtype) for i, (size, dtype) in enumerate(kinds)}
    held = WeightReader(tmp_path).fetch(publish(tmp_path, 1, values, bucket_bytes=64 * lines))
    assert same(held.tensors, values)
    held.release()


def test_floating_point_is_published_in_the_type_that_engines_compute_in(tmp_path: Path) -> None:
    values = tensors(1)
    held = WeightReader(tmp_path).fetch(publish(tmp_path, 1, values, dtype="bfloat16"))
    assert torch.equal(held.tensors["long"], values["long"].to(torch.bfloat16))
    assert torch.equal(held.tensors["count"], values["count"])
    held.release()


def test_rows_that_several_ranks_hold_make_whole_tensors(tmp_path: Path) -> None:
    rows, norm, id = torch.randn(7, 33), torch.randn(40), new_id()
    for rank, (start, stop) in enumerate([(0, 3), (3, 6), (6, 7)]):
        mine = [TensorShard("rows", (7, 33), rows[start:stop], start * 33)]
        publisher = Publisher(Store(tmp_path), shard=rank, shards=3, bucket_bytes=256)
        publisher.publish(5, id, mine + ([TensorShard("norm", (40,), norm)] if rank == 0 else []), {"again": "rows"})
    held = WeightReader(tmp_path).fetch(Publication(5, id, ((), (), ())))
    assert same(held.tensors, {"rows": rows, "norm": norm, "again": rows})
    held.release()


def test_the_base_is_the_last_publication_of_the_same_layout(tmp_path: Path) -> None:
    publisher = Publisher(Store(tmp_path))
    first = publisher.publish(1, "1", shares(tensors(1)))
    second = publisher.publish(2, "2", shares(tensors(2)))
    other = publisher.publish(3, "3", shares(tensors(3, rows=51)))
    assert (first.base, second.base, other.base) == (None, "1", None)


def test_padding_is_the_same_whatever_the_pages_held_before(tmp_path: Path) -> None:
    sums = []
    for version in range(4):
        id = publish(
            tmp_path, version, {"a": torch.ones(3), "b": torch.ones(70)} if version % 2 else tensors(version)
        ).id
        shard = Store(tmp_path).open(version, id, 0)
        sums.append(shard.sums(0))
        shard.release()
    assert sums[1] == sums[3]


def test_buckets_must_be_whole_lines(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        Publisher(Store(tmp_path), bucket_bytes=100)


def test_the_newest_version_stays_until_there_is_a_newer_one(tmp_path: Path) -> None:
    publisher, reader = Publisher(Store(tmp_path)), WeightReader(tmp_path)
    for version in (1, 2):
        publisher.publish(version, f"{version}", shares(tensors(version)))
        reader.close()  # the last engine of a host that leaves removes what nobody holds
    held = reader.fetch(Publication(2, "2", ((),)))
    assert same(held.tensors, tensors(2))
    held.release()
    publisher.close()
    reader.close()
    assert not list(tmp_path.glob("*"))
