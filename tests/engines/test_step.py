import torch
from hypothesis import given
from hypothesis import strategies as st

from rollart.engines.torch.batch import Chunk
from rollart.engines.torch.kernels import kernels_for
from rollart.engines.torch.kv_rows import KVLayout, KVRows
from rollart.engines.torch.step import CALL_COST, AttentionSpan, grouped

LAYOUT = KVLayout(tensors=4, heads=2, dim=8, dtype=torch.float32, device=torch.device("cpu"))


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 200)), max_size=12))
def test_groups_keep_the_order_and_padding_never_costs_more_than_the_calls_it_saves(
    sizes: list[tuple[int, int]],
) -> None:
    chunks = [Chunk(row, start, count) for row, (start, count) in enumerate(sizes)]
    groups = list(grouped(chunks))
    assert [chunk for group in groups for chunk in group] == chunks
    for group in groups:
        padded = len(group) * max(c.count for c in group) * max(c.start + c.count for c in group)
        real = sum(chunk.count * (chunk.start + chunk.count) for chunk in group)
        assert padded <= real + CALL_COST * (len(group) - 1)


def test_a_bias_hides_the_future_and_what_is_behind_the_window() -> None:
    span = AttentionSpan(slice(0, 2), slice(0, 4), 2, 6, torch.tensor([0, 3]), torch.float32)
    seen = torch.isfinite(span.bias(None))[:, 0].int().tolist()
    assert seen == [[[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]], [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]]]
    assert torch.isfinite(span.bias(2))[1, 0].int().tolist() == [[0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 0]]


def test_rows_double_while_cheap_and_come_down_to_the_exact_need_when_memory_is_short() -> None:
    rows = KVRows(LAYOUT, max_rows=64, budget=LAYOUT.token_bytes * 8192)
    assert rows.size_for(1, 10) == (8, 256)
    assert rows.size_for(9, 100) == (16, 256)
    assert rows.size_for(3, 1000) == (4, 1024)
    assert rows.size_for(5, 1000) == (6, 1024)
    assert rows.size_for(8, 1000) == (8, 1024)
    assert rows.size_for(8, 1025) is None
    assert rows.size_for(7, 1160) == (7, 1160)


def test_rows_are_made_for_those_who_wait_as_far_as_memory_allows() -> None:
    rows = KVRows(LAYOUT, max_rows=64, budget=LAYOUT.token_bytes * 8192)
    assert rows.size_for(1, 10, expected=12) == (16, 256)
    assert rows.size_for(1, 10, expected=30) == (32, 128)
    assert rows.size_for(1, 10, expected=1000) == (64, 128)
    assert rows.size_for(1, 1000, expected=1000) == rows.size_for(1, 1000)


@given(st.integers(1, 64), st.integers(1, 3000), st.integers(1, 64), st.integers(1, 3000))
def test_a_size_always_holds_the_need_within_the_budget(rows: int, positions: int, more: int, longer: int) -> None:
    budget = LAYOUT.token_bytes * 3000
    store = KVRows(LAYOUT, max_rows=64, budget=budget)
    for need in ((rows, positions), (more, longer)):
        size = store.size_for(*need)
        if size is None:
            assert need[0] * need[1] * LAYOUT.token_bytes > budget
        else:
            assert size[0] >= need[0] and size[1] >= need[1] and size[0] <= 64
            assert size[0] * size[1] * LAYOUT.token_bytes <= budget
            store.resize(*size, live=0, kept=0)


def test_resizing_keeps_what_the_rows_hold() -> None:
    rows = KVRows(LAYOUT, max_rows=64, budget=1 << 30)
    rows.resize(2, 16, live=0, kept=0)
    kv = torch.randn(4, 2, 10, 8)
    rows.write(1, 0, kv[:, :, :6])
    rows.write(1, 6, kv[:, :, 6:])
    rows.resize(8, 64, live=2, kept=10)
    rows.copy(1, 5, 10)
    rows.resize(6, 12, live=6, kept=10)
    assert torch.equal(rows.read(5, 10), kv)
    assert rows.bytes == sum(tensor.numel() * 4 for tensor in rows.tensors)


def test_rows_are_copied_the_same_by_compiled_code() -> None:
    compiled = kernels_for(LAYOUT, heads=2).copy_heads
    assert compiled is not None
    kv = torch.randn(4, 2, 20, 8)
    made = []
    for copy_heads in (None, compiled):
        rows = KVRows(LAYOUT, max_rows=64, budget=1 << 30, copy_heads=copy_heads)
        rows.resize(4, 32, live=0, kept=0)
        rows.write(1, 0, kv[:, :, :12])
        rows.write(1, 12, kv[:, :, 12:])
        rows.copy(1, 3, 15)
        rows.resize(8, 64, live=4, kept=20)
        rows.write(0, 3, kv.transpose(2, 3).contiguous().transpose(2, 3))
        made.append((rows.read(1, 20), rows.read(3, 20), rows.read(0, 30), torch.stack(rows.tensors)))
    assert torch.equal(made[0][0], kv)
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))
