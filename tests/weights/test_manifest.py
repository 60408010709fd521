import itertools

from hypothesis import given
from hypothesis import strategies as st

from rollart.weights.manifest import (
    ALIGN,
    BUCKETS,
    ITEM_BYTES,
    MAX_BUCKET,
    MIN_BUCKET,
    Manifest,
    TensorPart,
    bucket_size,
    lay_out,
)

parts = st.lists(
    st.builds(
        lambda dtype, count: TensorPart("t", dtype, (count,), 0, count),
        st.sampled_from(sorted(ITEM_BYTES)),
        st.integers(1, 999),
    ),
    max_size=8,
)


@given(parts, st.integers(1, 9))
def test_pieces_follow_each_other_aligned_and_buckets_cover_them_all(held: list[TensorPart], lines: int) -> None:
    pieces, size = lay_out(held)
    assert all(piece.offset % ALIGN == 0 for piece in pieces)
    assert all(before.end <= after.offset < before.end + ALIGN for before, after in itertools.pairwise(pieces))
    manifest = Manifest(3, "id", 0, 1, size, lines * ALIGN, pieces)
    cuts = [manifest.bounds(bucket) for bucket in range(manifest.buckets)]
    assert sum(stop - start for start, stop in cuts) == size
    assert all(before[1] == after[0] for before, after in itertools.pairwise(cuts))
    assert Manifest.decode(manifest.encode()) == manifest


@given(size=st.integers(1, 1 << 40))
def test_buckets_suit_their_shard(size: int) -> None:
    bucket = bucket_size(size)
    assert bucket % ALIGN == 0
    assert MIN_BUCKET <= bucket <= MAX_BUCKET
    assert -(-size // bucket) <= BUCKETS or bucket == MAX_BUCKET
