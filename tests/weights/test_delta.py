from contextlib import suppress

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.weights.delta import (
    CHUNK,
    Codec,
    Link,
    WrongDelta,
    break_even,
    changed_shares,
    decode,
    encode,
    measured_codec,
    predicted_bytes,
)

DTYPES = {torch.bfloat16: 2, torch.float32: 4}
FAST = Codec(encode=1e9, decode=1e9)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def applied(delta: bytes, base: bytes) -> bytes:
    into = bytearray(len(base))
    assert decode(delta, base, memoryview(into)) == xxhash.xxh3_64_digest(bytes(into))
    return bytes(into)


@st.composite
def buckets(draw: st.DrawFn) -> tuple[bytes, bytes, int]:
    """A base, and the same with changes of any density, alone and in a run; sizes at the edges of blocks and chunks."""
    item = draw(st.sampled_from([1, 2, 4, 8]))
    items = draw(st.sampled_from([0, 1, 7, 255, 256, 257, 1000, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 300]))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    extra = draw(st.integers(0, item - 1))
    base = random.integers(0, 256, items * item + extra, dtype=np.uint8)
    new = base.copy()
    density = draw(st.sampled_from([0.0, 0.001, 0.02, 0.1, 0.5, 0.9, 1.0]))
    new[random.random(len(new)) < density] ^= draw(st.sampled_from([1, 0x80, 0xFF]))
    start = draw(st.integers(0, len(new)))
    new[start : start + draw(st.sampled_from([0, 256, 5000]))] += 3
    return base.tobytes(), new.tobytes(), item


@settings(max_examples=150)
@given(buckets())
def test_whatever_changed_comes_back_bit_for_bit(bucket: tuple[bytes, bytes, int]) -> None:
    base, new, item = bucket
    delta = encode(base, new, item)
    if delta is not None:
        assert len(delta) < len(new)
        assert applied(delta, base) == new


@settings(max_examples=30)
@given(
    st.sampled_from(list(DTYPES)),
    st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=50),
    st.integers(0, 99),
)
def test_numbers_that_are_not_numbers_are_bytes_like_any_other(dtype: torch.dtype, odd: list[float], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(2000, generator=generator).to(dtype)
    new = base.clone()
    at = torch.randint(2000, (len(odd),), generator=generator)
    new[at] = torch.tensor(odd, dtype=torch.float32).to(dtype)
    new[0] = -0.0
    delta = encode(raw(base), raw(new), DTYPES[dtype])
    assert delta is not None and applied(delta, raw(base)) == raw(new)


def test_a_bucket_that_did_not_change_costs_next_to_nothing() -> None:
    base = raw(torch.randn(1 << 18))
    delta = encode(base, base, 4)
    assert delta is not None and len(delta) < len(base) / 1000


def test_a_bucket_that_changed_altogether_is_not_sent_as_a_delta() -> None:
    assert encode(bytes(1 << 16), bytes([255]) * (1 << 16), 2) is None


def test_small_updates_leave_most_high_bytes_alone() -> None:
    base = torch.randn(1 << 16) * 0.02
    new = base + 1e-6 * torch.randn(1 << 16).sign()
    elements, planes = changed_shares(raw(base), raw(new), 4)
    assert elements > 0.99 and planes[3] < 0.01 < planes[2] < 0.2 < planes[0]
    delta = encode(raw(base), raw(new), 4)
    assert delta is not None and len(delta) < 0.6 * len(raw(new))


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 255), st.data())
def test_a_damaged_delta_never_passes(at: int, flip: int, data: st.DataObject) -> None:
    base = torch.randn(3000).to(torch.bfloat16)
    new = base.clone()
    new[:: data.draw(st.sampled_from([2, 30, 500]))] += 1
    delta = encode(raw(base), raw(new), 2)
    assert delta is not None
    broken = bytearray(delta)
    broken[at % len(broken)] ^= flip
    with suppress(WrongDelta):
        assert applied(bytes(broken), raw(base)) == raw(new)  # padding of a header may change unseen


@pytest.mark.parametrize("cut", [0, 3, 30, -1])
def test_a_delta_that_is_cut_short_is_refused(cut: int) -> None:
    base, new = raw(torch.zeros(500)), raw(torch.eye(25)[:20].flatten())
    delta = encode(base, new, 4)
    assert delta is not None
    with pytest.raises(WrongDelta, match="too short"):
        applied(delta[:cut], base)
    with pytest.raises(WrongDelta, match="left over"):
        applied(delta + b"x", base)


def test_a_delta_against_another_base_is_refused() -> None:
    base, new = torch.randn(5000), torch.randn(5000)
    new[:4000] = base[:4000]
    delta = encode(raw(base), raw(new), 4)
    assert delta is not None
    with pytest.raises(WrongDelta, match="the base is wrong"):
        applied(delta, raw(base + 1))
    with pytest.raises(WrongDelta, match="not a delta of a bucket of 40 bytes"):
        applied(delta, raw(base[:10]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-7, 1e-5, 1e-3])
def test_the_predicted_size_is_about_the_real_one(dtype: torch.dtype, size: float) -> None:
    base = torch.randn(1 << 20) * 0.02
    new = base + size * torch.randn(1 << 20)
    old, made = raw(base.to(dtype)), raw(new.to(dtype))
    delta = encode(old, made, DTYPES[dtype])
    assert delta is not None
    assert predicted_bytes(old, made, DTYPES[dtype]) == pytest.approx(len(delta), rel=0.1)


def test_a_delta_pays_on_slow_links_and_not_on_fast_ones() -> None:
    base = torch.randn(1 << 16).to(torch.bfloat16)
    new = base.clone()
    new[::20] += 1
    bucket = raw(base), raw(new), 2
    assert Link(1e7, FAST).pays(*bucket)
    assert not Link(1e10, FAST).pays(*bucket)


def test_a_delta_of_everything_pays_nowhere() -> None:
    base, new = bytes(1 << 16), bytes([255]) * (1 << 16)
    assert not Link(1e3, FAST).pays(base, new, 2)


@given(st.integers(1, 10**9), st.floats(0, 1), st.floats(1e6, 1e11), st.floats(1e6, 1e11))
def test_below_the_break_even_speed_the_delta_is_faster(size: int, share: float, coding: float, link: float) -> None:
    codec = Codec(coding, coding)
    delta_bytes = int(size * share)
    limit = break_even(size, delta_bytes, codec)
    speed = Link(link, codec)
    if link < limit * 0.999:
        assert speed.seconds(size, delta_bytes) < speed.seconds(size)
    if link > limit * 1.001:
        assert speed.seconds(size, delta_bytes) > speed.seconds(size)


def test_the_codec_of_this_machine_is_measured_once() -> None:
    assert measured_codec() is measured_codec()
    assert 1e6 < measured_codec().encode < 1e12
    assert 1e6 < measured_codec().decode < 1e12
