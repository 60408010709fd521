import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from rollart.engines.torch.kv_cache import FetchedKV, KVCache
from rollart.engines.torch.prefix_cache import BLOCK, PrefixIndex, chain, common_prefix


def kv(tokens: list[int]) -> torch.Tensor:
    """KV that says which tokens it belongs to: [1, 1, length, 1] of float32, so 4 bytes a token."""
    return torch.tensor(tokens, dtype=torch.float32).view(1, 1, -1, 1)


def find(cache: KVCache, session: str, tokens: list[int]) -> tuple[list[int] | None, int]:
    entry, length, _ = cache.find(session, tokens, chain(tokens))
    return (None if entry is None else entry.kv.flatten()[:length].long().tolist()), length


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_the_common_prefix_is_that_of_comparing_one_by_one(left: list[int], right: list[int]) -> None:
    same = 0
    while same < min(len(left), len(right)) and left[same] == right[same]:
        same += 1
    assert common_prefix(left, right) == same


def test_a_session_finds_what_it_stored_up_to_where_its_tokens_differ() -> None:
    cache = KVCache()
    cache.store("a", [1, 2, 3, 4], kv([1, 2, 3, 4]))
    assert find(cache, "a", [1, 2, 3, 4, 5, 6]) == ([1, 2, 3, 4], 4)
    assert find(cache, "a", [1, 2, 9, 9]) == ([1, 2], 2)
    assert find(cache, "b", [1, 2, 3, 4]) == (None, 0)


def test_another_session_finds_a_shared_prompt_by_its_blocks() -> None:
    cache = KVCache()
    prompt = list(range(3 * BLOCK))
    cache.store("a", [*prompt, 7, 7], kv([*prompt, 7, 7]))
    assert find(cache, "b", [*prompt, 7, 8, 9]) == ([*prompt, 7], len(prompt) + 1)
    assert find(cache, "b", [99, *prompt]) == (None, 0)


def test_the_least_recently_used_goes_first_and_bytes_are_exact() -> None:
    cache = KVCache()
    for name in "abc":
        cache.store(name, [1] * 10, kv([1] * 10))
    assert cache.bytes == 120
    find(cache, "a", [1] * 10)
    cache.shrink(80)
    assert find(cache, "b", [1] * 10) == (None, 0) and find(cache, "a", [1] * 10)[1] == 10
    cache.store("a", [2], kv([2]))
    assert cache.bytes == 44
    cache.clear()
    assert cache.bytes == 0 and len(cache) == 0


@given(st.integers(0, 10_000))
def test_what_is_found_is_always_kv_of_the_asked_tokens_and_the_index_leaks_nothing(seed: int) -> None:
    rng = random.Random(seed)
    cache = KVCache()
    for _ in range(40):
        tokens = [rng.randrange(2) // 2 for _ in range(BLOCK)] + [rng.randrange(2) for _ in range(rng.randrange(40))]
        session = str(rng.randrange(5))
        found, length = find(cache, session, tokens)
        assert (found or []) == tokens[:length]
        cache.store(session, tokens, kv(tokens))
        cache.shrink(rng.randrange(100, 800))
    cache.clear()
    assert cache._index._holders == {} and cache._index._blocks == {}


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


def test_fetched_kv_waits_for_its_request_and_belongs_to_no_session() -> None:
    cache = KVCache(version=3)
    cache.store_fetched("a", FetchedKV(3, 2, kv([1, 2, 3])))
    assert cache.bytes == 12 and find(cache, "a", [1, 2, 3]) == (None, 0)
    cache.store("a", [7], kv([7]))
    part = cache.fetched("a")
    assert part is not None and (part.start, part.stop) == (2, 5)
    cache.drop_fetched("a")
    cache.drop_fetched("a")
    assert cache.fetched("a") is None and cache.bytes == 4
    cache.store_fetched("b", part)
    cache.shrink(12)
    assert find(cache, "a", [7]) == (None, 0) and cache.fetched("b") is part


def test_a_new_version_clears_the_cache_or_keeps_it() -> None:
    cache = KVCache(version=3)
    cache.store("a", [1], kv([1]))
    cache.set_version(4, keep=True)
    assert cache.find("a", [1], ())[1:] == (1, 4)
    cache.set_version(5, keep=False)
    assert cache.find("a", [1], ())[1:] == (0, 5) and cache.bytes == 0
