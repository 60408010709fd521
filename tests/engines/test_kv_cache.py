import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from rollart.engines.torch.kv_cache import ParkedKV, Part
from rollart.engines.torch.prefix_cache import BLOCK, PrefixIndex, chain, common_prefix


def kv(tokens: list[int]) -> torch.Tensor:
    """KV that says which tokens it belongs to: [1, 1, length, 1] of float32, so 4 bytes a token."""
    return torch.tensor(tokens, dtype=torch.float32).view(1, 1, -1, 1)


def find(store: ParkedKV, session: str, tokens: list[int]) -> tuple[list[int] | None, int]:
    entry, length, _ = store.find(session, tokens, chain(tokens))
    return (None if entry is None else entry.kv.flatten()[:length].long().tolist()), length


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_the_common_prefix_is_that_of_comparing_one_by_one(left: list[int], right: list[int]) -> None:
    same = 0
    while same < min(len(left), len(right)) and left[same] == right[same]:
        same += 1
    assert common_prefix(left, right) == same


def test_a_session_finds_what_it_parked_up_to_where_its_tokens_differ() -> None:
    store = ParkedKV()
    store.park("a", [1, 2, 3, 4], kv([1, 2, 3, 4]))
    assert find(store, "a", [1, 2, 3, 4, 5, 6]) == ([1, 2, 3, 4], 4)
    assert find(store, "a", [1, 2, 9, 9]) == ([1, 2], 2)
    assert find(store, "b", [1, 2, 3, 4]) == (None, 0)


def test_another_session_finds_a_shared_prompt_by_its_blocks() -> None:
    store = ParkedKV()
    prompt = list(range(3 * BLOCK))
    store.park("a", [*prompt, 7, 7], kv([*prompt, 7, 7]))
    assert find(store, "b", [*prompt, 7, 8, 9]) == ([*prompt, 7], len(prompt) + 1)
    assert find(store, "b", [99, *prompt]) == (None, 0)


def test_the_least_recently_used_goes_first_and_bytes_are_exact() -> None:
    store = ParkedKV()
    for name in "abc":
        store.park(name, [1] * 10, kv([1] * 10))
    assert store.bytes == 120
    find(store, "a", [1] * 10)
    store.shrink(80)
    assert find(store, "b", [1] * 10) == (None, 0) and find(store, "a", [1] * 10)[1] == 10
    store.park("a", [2], kv([2]))
    assert store.bytes == 44
    store.clear()
    assert store.bytes == 0 and len(store) == 0


@given(st.integers(0, 10_000))
def test_what_is_found_is_always_kv_of_the_asked_tokens_and_the_index_leaks_nothing(seed: int) -> None:
    rng = random.Random(seed)
    store = ParkedKV()
    for _ in range(40):
        tokens = [rng.randrange(2) // 2 for _ in range(BLOCK)] + [rng.randrange(2) for _ in range(rng.randrange(40))]
        session = str(rng.randrange(5))
        found, length = find(store, session, tokens)
        assert (found or []) == tokens[:length]
        store.park(session, tokens, kv(tokens))
        store.shrink(rng.randrange(100, 800))
    store.clear()
    assert store._index._holders == {} and store._index._blocks == {}


def test_the_index_names_the_first_of_those_who_share_most() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    long, short = chain(list(range(64))), chain(list(range(32)))
    index.add("short", short)
    index.add("long", long)
    index.add("late", long)
    assert index.longest(long) == "long" and index.longest(short) == "short"
    index.remove("long")
    assert index.longest(long) == "late"
    assert index.longest(chain([5] * 64)) is None


def test_a_part_waits_for_its_request_and_is_no_sessions() -> None:
    store = ParkedKV(version=3)
    store.hold("a", Part(3, 2, kv([1, 2, 3])))
    assert store.bytes == 12 and find(store, "a", [1, 2, 3]) == (None, 0)
    store.park("a", [7], kv([7]))
    part = store.part("a")
    assert part is not None and (part.start, part.stop) == (2, 5)
    store.release("a")
    store.release("a")
    assert store.part("a") is None and store.bytes == 4
    store.hold("b", part)
    store.shrink(12)
    assert find(store, "a", [7]) == (None, 0) and store.part("b") is part


def test_a_new_version_clears_what_is_kept_or_takes_it_over() -> None:
    store = ParkedKV(version=3)
    store.park("a", [1], kv([1]))
    store.renew(4, keep=True)
    assert store.find("a", [1], ())[1:] == (1, 4)
    store.renew(5, keep=False)
    assert store.find("a", [1], ())[1:] == (0, 5) and store.bytes == 0
