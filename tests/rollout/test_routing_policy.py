"""The routing decisions, driven with thousands of random states."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.modelled import ModelledEngine
from rollart.hardware.devices import DeviceClass
from rollart.hardware.roofline import ModelShape, Roofline, decode, prefill
from rollart.rollout.engine_state import EnginePool, EngineState
from rollart.rollout.prediction import Predictor
from rollart.rollout.routing_policy import RoutingChoice, RoutingPolicy, RoutingQuery, predict, routing_policy

SHAPE = ModelShape(dense=8_000_000_000, layers=36, heads=32, kv_heads=8, head_dim=128)
MOE = ModelShape(
    dense=10**9, layers=36, heads=32, kv_heads=4, head_dim=128, expert=10**8, experts=64, experts_per_token=4
)
STRONG = DeviceClass("strong", 989.5, 3350.0, 80.0, 200.0, 25.0, 2.85, "test")
WIDE = DeviceClass("wide", 148.0, 4000.0, 96.0, 450.0, 25.0, 1.0, "test")


def fleet(compute: int = 1, bandwidth: int = 3) -> list[EnginePool]:
    pools = [EnginePool("compute", Roofline(STRONG, SHAPE)), EnginePool("bandwidth", Roofline(WIDE, SHAPE))]
    for pool, count in zip(pools, (compute, bandwidth), strict=True):
        for number in range(count):
            pool.engines.append(EngineState(f"{pool.name}-{number}", pool, ModelledEngine(random.Random(0)), 0))
    return pools


def ask(tokens: int = 500, decoded: float = 20.0, **more: Any) -> RoutingQuery:
    return RoutingQuery(
        tokens=tokens, decoded=decoded, max_tokens=int(decoded * 2), **({"now": 0.0, "floor": 0} | more)
    )


def chosen(rule: RoutingPolicy, query: RoutingQuery, pools: list[EnginePool]) -> RoutingChoice:
    choice = rule.choose(query, pools)
    assert choice is not None
    return choice


@st.composite
def states(draw: st.DrawFn) -> tuple[list[EnginePool], RoutingQuery]:
    pools = fleet(draw(st.integers(0, 3)), draw(st.integers(0, 12)))
    engines = [engine for pool in pools for engine in pool.engines]
    for engine in engines:
        engine.alive = draw(st.booleans())
        engine.draining = draw(st.booleans())
        engine.version = draw(st.integers(0, 3))
        engine.open = draw(st.integers(0, 200))
        engine.context = engine.open * draw(st.integers(1, 5000))
        engine.reserved = engine.context + draw(st.integers(0, 10_000))
        engine.pool.reserved += engine.reserved
        engine.prefill_until = draw(st.floats(0, 100))
    for pool in pools:
        pool.kv_tokens = draw(st.sampled_from([1000, 1 << 40]))
        pool.mean_s = draw(st.floats(0, 100))
    some = st.sampled_from([None, *engines]) if engines else st.none()
    names = st.sampled_from(["auto", "prefill", "decode", "compute", "bandwidth", ("bandwidth", "compute"), ("gone",)])
    tokens = draw(st.integers(1, 30_000))
    query = RoutingQuery(
        tokens=tokens,
        decoded=draw(st.floats(1, 1000)),
        max_tokens=1000,
        now=draw(st.floats(0, 100)),
        floor=draw(st.integers(0, 4)),
        affinity=draw(names),
        cached_at=draw(some),
        cached=draw(st.integers(0, tokens - 1)),
        shared_at=draw(some),
    )
    return pools, query


RULES = [
    ("measured", "never"),
    ("measured", "auto"),
    ("measured", "always"),
    ("measured", ["compute", "bandwidth"]),
    ("declared", "never"),
    ("declared", "auto"),
    ("round_robin", "never"),
]


@pytest.mark.parametrize(("name", "disaggregate"), RULES)
@settings(max_examples=150)
@given(state=states())
def test_a_request_goes_only_where_it_may_and_somewhere_if_it_can(
    name: str, disaggregate: Any, state: tuple[list[EnginePool], RoutingQuery]
) -> None:
    pools, query = state
    usable = [engine for pool in pools for engine in pool.engines if engine.usable(query.floor)]
    choice = routing_policy(name, disaggregate).choose(query, pools)
    assert (choice is None) == (not usable)
    if choice is None:
        return
    assert choice.engine in usable
    assert choice.prefill_at is None or choice.prefill_at in usable
    assert 0 <= choice.cached < query.tokens
    assert choice.prediction.cost >= 0
    assert choice.prediction.seconds >= 0
    wanted = (query.affinity,) if isinstance(query.affinity, str) else query.affinity
    first = next((n for n in wanted if any(engine.pool.name == n for engine in usable)), None)
    if first and name != "round_robin" and disaggregate == "never":
        assert choice.engine.pool.name == first


@given(state=states())
def test_a_decision_changes_nothing(state: tuple[list[EnginePool], RoutingQuery]) -> None:
    pools, query = state

    def facts() -> list[tuple[object, ...]]:
        return [(p.name, p.open, p.context, p.reserved, p.prefill_until) for pool in pools for p in pool.engines]

    before = facts()
    routing_policy("measured").choose(query, pools)
    assert facts() == before


def test_long_prompts_go_to_the_strong_device_and_long_answers_to_the_wide_ones() -> None:
    rule = routing_policy("measured")
    load: dict[tuple[str, str], int] = {}
    pools = fleet()
    for _ in range(60):  # both kinds of work at once, until all engines have some
        for kind, query in (("prefill", ask(4000, 4.0, task="p")), ("decode", ask(50, 400.0, task="d"))):
            choice = chosen(rule, query, pools)
            load[kind, choice.engine.pool.name] = load.get((kind, choice.engine.pool.name), 0) + 1
            choice.engine.reserve(query.tokens, query.max_tokens)
            choice.engine.prefill_until += choice.prediction.prefill
    assert load["prefill", "compute"] > 5 * load.get(("prefill", "bandwidth"), 0)
    assert load["decode", "bandwidth"] > 5 * load.get(("decode", "compute"), 0)


def test_a_small_pool_of_the_same_class_gets_its_part_of_a_task() -> None:
    pools = [EnginePool(name, Roofline(STRONG, SHAPE)) for name in ("small", "large")]
    for pool, count in zip(pools, (1, 4), strict=True):
        for number in range(count):
            pool.engines.append(EngineState(f"{pool.name}-{number}", pool, ModelledEngine(random.Random(0)), 0))
    rule = routing_policy("measured")
    to_small = sum(chosen(rule, ask(task="t"), pools).engine.pool.name == "small" for _ in range(100))
    assert 10 <= to_small <= 30


def test_a_conversation_leaves_its_prefix_only_for_something_clearly_better() -> None:
    pools = fleet(2, 0)
    here, there = pools[0].engines
    assert chosen(routing_policy("measured"), ask(cached_at=here, cached=480), pools).why == "prefix"
    here.open, here.context, here.reserved, here.prefill_until = 100, 400_000, 400_000, 5.0
    choice = chosen(routing_policy("measured"), ask(cached_at=here, cached=480), pools)
    assert (choice.engine, choice.why, choice.cached) == (there, "moved", 0)


def test_members_of_a_group_go_where_their_prompt_is() -> None:
    pools = fleet(2, 0)
    pools[0].engines[1].open = 1
    choice = chosen(routing_policy("measured"), ask(3000, 20.0, shared_at=pools[0].engines[1]), pools)
    assert (choice.engine, choice.why) == (pools[0].engines[1], "group")


def test_a_full_engine_is_passed_over() -> None:
    pools = fleet(2, 0)
    for pool in pools:
        pool.kv_tokens, pool.mean_s = 10_000, 30.0
    pools[0].engines[0].reserved = 9_990
    assert chosen(routing_policy("measured"), ask(), pools).engine is pools[0].engines[1]
    pools[0].engines[1].open = 3
    pools[0].engines[1].context = pools[0].engines[1].reserved = 300
    held = ask(cached_at=pools[0].engines[0], cached=100)
    assert chosen(routing_policy("measured"), held, pools).engine is pools[0].engines[1]


def test_a_declared_tag_decides_alone() -> None:
    pools = fleet()
    pools[0].engines[0].open = 500
    assert chosen(routing_policy("declared"), ask(affinity="prefill"), pools).engine.pool.name == "compute"
    assert chosen(routing_policy("declared"), ask(affinity="decode"), pools).engine.pool.name == "bandwidth"
    pools[0].engines[0].alive = False
    choice = chosen(routing_policy("declared"), ask(affinity="prefill"), pools)
    assert (choice.engine.pool.name, choice.why) == ("bandwidth", "fallback")


def test_prefill_is_disaggregated_when_that_should_pay() -> None:
    pools = fleet()
    for engine in pools[0].engines:
        engine.open, engine.context = 20, 400_000
    for engine in pools[1].engines:
        engine.open, engine.context = 10, 100_000
    choice = chosen(routing_policy("measured", "auto"), ask(20_000, 500.0), pools)
    assert choice.why == "disaggregated"
    assert choice.prefill_at is not None
    assert (choice.prefill_at.pool.name, choice.engine.pool.name) == ("compute", "bandwidth")
    short = chosen(routing_policy("measured", "auto"), ask(10, 2.0), fleet())
    assert short.prefill_at is None


PAIRS = ["compute", "bandwidth"]


def test_a_conversation_is_prefilled_where_its_prefix_was_prefilled_before() -> None:
    pools = fleet(compute=3)
    before, decoding = pools[0].engines[2], pools[1].engines[0]
    for engine in pools[1].engines:
        engine.open, engine.context = 30, 300_000  # a prefill there would hold up many
    query = ask(20_000, 100.0, cached_at=decoding, cached=9_000, prefilled_at=before, prefilled=8_000)
    choice = chosen(routing_policy("measured", PAIRS), query, pools)
    assert (choice.prefill_at, choice.engine) == (before, decoding)


def test_a_turn_with_little_that_is_new_is_prefilled_where_it_is_decoded() -> None:
    pools = fleet()
    decoding = pools[1].engines[1]
    query = ask(20_000, 100.0, cached_at=decoding, cached=19_990)
    choice = chosen(routing_policy("measured", PAIRS), query, pools)
    assert (choice.prefill_at, choice.engine, choice.why) == (None, decoding, "prefix")


def test_tags_decide_nothing_where_prefill_and_decode_have_engines_of_their_own() -> None:
    choice = chosen(routing_policy("declared", PAIRS), ask(20_000, 100.0, affinity="prefill"), fleet())
    assert choice.prefill_at is not None
    assert (choice.prefill_at.pool.name, choice.engine.pool.name) == ("compute", "bandwidth")


@pytest.mark.parametrize("lost", [0, 1])
def test_a_pair_of_which_one_pool_has_no_usable_engine_falls_back_to_the_other(lost: int) -> None:
    pools = fleet()
    for engine in pools[lost].engines:
        engine.version = 0
    for engine in pools[1 - lost].engines:
        engine.version = 1
    choice = chosen(routing_policy("measured", PAIRS), ask(floor=1), pools)
    assert (choice.engine.pool, choice.why, choice.prefill_at) == (pools[1 - lost], "fallback", None)


@pytest.mark.parametrize("shape", [SHAPE, MOE])
@given(
    new=st.integers(1, 5000), context=st.integers(0, 20_000), sequences=st.integers(1, 500), each=st.integers(1, 20_000)
)
def test_the_predictor_is_the_roofline(shape: ModelShape, new: int, context: int, sequences: int, each: int) -> None:
    roofline = Roofline(WIDE, shape, slowdown=3.0, devices=2)
    predictor = Predictor(roofline)
    assert predictor.decode(sequences, sequences * each) == pytest.approx(
        roofline.seconds(decode(sequences, sequences * each))
    )
    assert predictor.prefill(new, context)[1] == pytest.approx(roofline.seconds(prefill(new, context)), rel=1e-3)


def test_a_loaded_engine_is_predicted_to_be_slower() -> None:
    pools = fleet(1, 0)
    engine = pools[0].engines[0]
    idle = predict(engine, ask(), 0)
    engine.open, engine.context, engine.prefill_until = 50, 100_000, 1.0
    busy = predict(engine, ask(), 0)
    assert busy.wait == 1.0
    assert busy.token > idle.token
    assert busy.delay > idle.delay
