import re
from collections import Counter
from dataclasses import replace as with_

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.launch.launcher import Node, ResourceRequest
from rollart.placement.bindings import Binding, place, replace
from rollart.placement.inventory import Inventory
from rollart.placement.request import PlacementError, PlacementRequest

CLASSES = ("H800", "H20", "cpu")


def node(name: str, **devices: float) -> Node:
    return Node(name, "", devices, devices)


def cluster(*nodes: Node) -> Inventory:
    return Inventory(nodes, "the cluster")


def where(bindings: tuple[Binding, ...], pool: str) -> Counter[tuple[str, str]]:
    return Counter((binding.device, binding.node) for binding in bindings if binding.pool == pool)


@st.composite
def clusters(draw: st.DrawFn) -> Inventory:
    nodes = []
    for number in range(draw(st.integers(1, 5))):
        total = draw(st.dictionaries(st.sampled_from(CLASSES), st.integers(1, 8).map(float), min_size=1))
        free = {name: float(draw(st.integers(0, int(count)))) for name, count in total.items()}
        nodes.append(Node(f"node-{number}", "", total, free))
    return Inventory(tuple(nodes), "the cluster")


requests = st.lists(
    st.builds(
        PlacementRequest,
        pool=st.sampled_from("abcde"),
        role=st.sampled_from(("train", "generate", "environment")),
        workers=st.integers(1, 6),
        choices=st.permutations(CLASSES).flatmap(lambda order: st.integers(1, 3).map(lambda n: tuple(order[:n]))),
        threads=st.integers(1, 3),
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda request: request.pool,
)


@given(requests, clusters())
def test_nothing_is_overcommitted_and_every_worker_is_bound_once_or_the_pool_is_named(
    asked: list[PlacementRequest], there: Inventory
) -> None:
    try:
        bindings = place(asked, there)
    except PlacementError as refusal:
        assert refusal.pool in {request.pool for request in asked}
        assert f"pool {refusal.pool!r} wants" in str(refusal)
        return
    names = [f"{request.pool}-{number}" for request in asked for number in range(request.workers)]
    assert [binding.worker for binding in bindings] == names
    used: Counter[tuple[str, str]] = Counter()
    for binding in bindings:
        used[binding.node, binding.device] += int(binding.units)
        assert binding.device in next(request.choices for request in asked if request.pool == binding.pool)
    for one in there.nodes:
        assert all(used[one.name, device] <= one.free.get(device, 0) for device in CLASSES)


@given(requests, clusters())
def test_a_worker_is_on_a_fallback_only_if_nothing_is_left_for_it_on_a_better_class(
    asked: list[PlacementRequest], there: Inventory
) -> None:
    if len(asked) > 1:
        asked = asked[:1]  # alone, nobody else can have been in its way
    request = asked[0]
    try:
        bindings = place(asked, there)
    except PlacementError:
        return
    free = {one.name: Counter(one.free) for one in there.nodes}
    for binding in bindings:
        free[binding.node][binding.device] -= binding.units
    for binding in bindings:
        for better in request.choices[: request.choices.index(binding.device)]:
            fits = sum(int(left[better] // request.takes(better)) for left in free.values())
            assert fits < (request.workers if request.role == "train" else 1)


@given(requests, clusters(), st.randoms())
def test_the_order_of_the_nodes_does_not_matter(
    asked: list[PlacementRequest], there: Inventory, random: object
) -> None:
    nodes = list(there.nodes)
    random.shuffle(nodes)  # type: ignore[attr-defined]
    try:
        bindings = place(asked, there)
    except PlacementError:
        with pytest.raises(PlacementError):
            place(asked, with_(there, nodes=tuple(nodes)))
    else:
        assert place(asked, with_(there, nodes=tuple(nodes))) == bindings


@given(requests, clusters())
def test_ranks_are_of_one_class(asked: list[PlacementRequest], there: Inventory) -> None:
    try:
        bindings = place(asked, there)
    except PlacementError:
        return
    for request in asked:
        if request.role == "train":
            assert len({binding.device for binding in bindings if binding.pool == request.pool}) == 1


@given(clusters(), st.permutations(CLASSES), st.integers(1, 3))
def test_a_worker_that_lost_its_node_gets_the_best_remaining_device(
    there: Inventory, order: tuple[str, ...], threads: int
) -> None:
    lost = Binding("p", "generate", "p-3", order[0], tuple(order), order[0], "gone", 1.0, threads, "as named")
    takes = PlacementRequest("p", "generate", 1, tuple(order), threads).takes
    left = there.nodes[1:]
    roomy = [device for device in order if any(one.free.get(device, 0) >= takes(device) for one in left)]
    if not roomy:
        with pytest.raises(PlacementError):
            replace(lost, there.nodes, frozenset({there.nodes[0].name}))
        return
    again = replace(lost, there.nodes, frozenset({there.nodes[0].name}))
    assert (again.worker, again.device, again.choices) == ("p-3", roomy[0], tuple(order))
    assert again.node != there.nodes[0].name
    assert again.why.startswith("gone is gone")


def test_a_pool_may_end_up_partly_on_its_second_class_and_says_so() -> None:
    bound = place(
        [PlacementRequest("compute", "generate", 3, ("H800", "H20"))], cluster(node("a", H800=2), node("b", H20=8))
    )
    assert [(binding.device, binding.why) for binding in bound] == [
        ("H800", "as named"),
        ("H800", "as named"),
        ("H20", "fallback: no room for it on H800"),
    ]
    assert bound[2].request(frozenset({"a"})) == ResourceRequest(("H800", "H20"), 1.0, frozenset({"a"}))


def test_engines_are_spread_and_ranks_are_packed() -> None:
    there = cluster(node("a", H800=8), node("b", H800=8), node("c", H800=4))
    bound = place(
        [PlacementRequest("trainer", "train", 4, ("H800",)), PlacementRequest("compute", "generate", 4, ("H800",))],
        there,
    )
    assert where(bound, "trainer") == {("H800", "c"): 4}
    assert where(bound, "compute") == {("H800", "a"): 2, ("H800", "b"): 2}


def test_environment_hosts_avoid_nodes_with_accelerators_while_they_can() -> None:
    there = cluster(node("gpu", H800=8, cpu=64), node("small", cpu=2), node("large", cpu=6))
    assert where(place([PlacementRequest("e", "environment", 4, ("cpu",))], there), "e") == {
        ("cpu", "small"): 1,
        ("cpu", "large"): 3,
    }
    assert where(place([PlacementRequest("e", "environment", 9, ("cpu",))], there), "e")["cpu", "gpu"] == 1


def test_a_pool_with_a_fallback_gives_way_to_one_without() -> None:
    there = cluster(node("a", H800=2, H20=2))
    asked = [
        PlacementRequest("first", "train", 2, ("H800", "H20")),
        PlacementRequest("second", "generate", 2, ("H800",)),
    ]
    bound = place(asked, there)
    assert where(bound, "first") == {("H20", "a"): 2}
    assert where(bound, "second") == {("H800", "a"): 2}


def test_two_pools_with_fallbacks_are_both_placed_if_they_can_be() -> None:
    there = cluster(node("a", H800=1, H20=1))
    asked = [
        PlacementRequest("first", "generate", 1, ("H800", "H20")),
        PlacementRequest("second", "generate", 1, ("H800", "B200")),
    ]
    bound = place(asked, there)
    assert [binding.device for binding in bound] == ["H20", "H800"]


def test_cpus_may_be_shared_on_this_machine_only() -> None:
    asked = [PlacementRequest("engine", "generate", 3, ("cpu",), threads=2)]
    assert len(place(asked, Inventory((node("here", cpu=2),), "this machine", overcommit=True))) == 3
    with pytest.raises(PlacementError, match="room for 1"):
        place(asked, cluster(node("there", cpu=2)))


def test_a_refusal_lists_the_nodes_what_is_taken_and_what_to_do() -> None:
    there = cluster(node("a", H800=8, cpu=64), node("b", H20=8), Node("c", "", {"H800": 8.0}, {"H800": 2.0}))
    asked = [PlacementRequest("trainer", "train", 8, ("H800",)), PlacementRequest("compute", "generate", 4, ("H800",))]
    with pytest.raises(PlacementError) as refusal:
        place(asked, there)
    assert str(refusal.value).splitlines() == [
        "pool 'compute' wants 4 engines on H800, but there is room for 2.",
        "  There is, in the cluster: b: 8 H20; c: 8 H800 (2 free); a: 8 H800, 64 cpu",
        "  Taken already: 8 H800 by trainer.",
        "  What to do: set pools.compute.count to 2; or allow a fallback, pools.compute.device: [H800, H20] (8 H20 are "
        "free); or try it without such devices, pools.compute: {device: H800, emulate: 20000, ...}; or add nodes with "
        "H800.",
    ]


def test_the_count_that_a_refusal_advises_leaves_room_for_the_others() -> None:
    asked = [
        PlacementRequest("p", "generate", 9, ("H800", "H20")),
        PlacementRequest("q", "generate", 3, ("H20", "H800")),
    ]
    with pytest.raises(PlacementError, match=r"pool 'p' wants 9 .* room for 8(.|\n)*set pools\.p\.count to 5"):
        place(asked, cluster(node("a", H800=4, H20=4)))


@given(requests, clusters())
def test_the_advised_count_can_be_placed(asked: list[PlacementRequest], there: Inventory) -> None:
    try:
        place(asked, there)
    except PlacementError as refusal:
        advice = re.search(rf"set pools\.{refusal.pool}\.count to (\d+)", str(refusal))
        if advice:
            less = [with_(one, workers=int(advice[1])) if one.pool == refusal.pool else one for one in asked]
            assert place(less, there)


def test_a_refusal_on_a_laptop_leads_to_emulation_cpus_or_a_cluster() -> None:
    here = Inventory((node("vm", cpu=2),), "this machine", overcommit=True)
    with pytest.raises(PlacementError) as refusal:
        place([PlacementRequest("compute", "generate", 1, ("H800",))], here)
    assert str(refusal.value).splitlines() == [
        "pool 'compute' wants 1 engine on H800, but there is no room for it.",
        "  This machine has: vm: 2 cpu",
        "  What to do: try it without such devices, pools.compute: {device: H800, emulate: 20000, ...}; or use this "
        "machine's CPUs with pools.compute.device: cpu; or name a `cluster` that has H800.",
    ]


def test_nodes_with_the_same_devices_share_a_line() -> None:
    there = cluster(*(node(f"n-{number}", cpu=8) for number in range(200)))
    with pytest.raises(PlacementError, match="200 nodes such as n-0: 8 cpu"):
        place([PlacementRequest("compute", "generate", 4, ("H800",))], there)
