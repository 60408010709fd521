"""Which nodes offer what, and how Ray is asked for them; no cluster needed."""

from typing import Any

import pytest

from rollart.launch.launcher import ResourceRequest
from rollart.launch.ray_nodes import choices, described, ray_nodes


def listed(name: str, labels: dict[str, str] | None = None, alive: bool = True, **resources: float) -> dict[str, Any]:
    identity = name * 8
    labels = {"ray.io/node-id": identity, **(labels or {})}
    return {
        "NodeID": identity,
        "NodeName": name,
        "NodeManagerAddress": "10.0.0.1",
        "NodeManagerPort": 1,
        "Alive": alive,
        "Labels": labels,
        "Resources": resources,
    }


CLUSTER = [
    listed("a", {"rollart.io/device": "H800"}, CPU=64.0, GPU=8.0),
    listed("b", {"ray.io/accelerator-type": "H20"}, CPU=64.0, GPU=4.0),
    listed("c", {"rollart.io/device": "H20"}, CPU=2.0),
    listed("d", {"rollart.io/device": "cpu"}, CPU=32.0),
    listed("e", CPU=16.0),
    listed("f", {"rollart.io/device": "H800"}, alive=False, GPU=8.0),
    listed("g", {"rollart.io/device": "mine", "ray.io/accelerator-type": "H20"}, GPU=1.0),
]
FREE = {"a" * 8: {"GPU": 2.0}, "b" * 8: {"GPU": 4.0}, "c" * 8: {"CPU": 2.0}, "e" * 8: {"CPU": 16.0}}


def selectors(request: ResourceRequest) -> list[tuple[str, dict[str, str]]]:
    return [(choice.resource, dict(choice.selector)) for choice in choices(request, ray_nodes(CLUSTER, FREE))]


def test_our_label_wins_over_that_of_ray_and_the_cpus_of_gpu_nodes_are_offered_too() -> None:
    offers = {node.name[0]: dict(node.total) for node in described(ray_nodes(CLUSTER, FREE))}
    assert offers == {
        "a": {"H800": 8, "cpu": 64},
        "b": {"H20": 4, "cpu": 64},
        "c": {"H20": 2},
        "d": {"cpu": 32},
        "e": {"cpu": 16},
        "g": {"mine": 1},
    }


def test_classes_are_selected_by_label_in_order_of_preference() -> None:
    assert selectors(ResourceRequest(("H20", "H800", "cpu", "H9"))) == [
        ("GPU", {"ray.io/accelerator-type": "H20", "ray.io/node-id": "!in(gggggggg)"}),
        ("CPU", {"rollart.io/device": "H20"}),
        ("GPU", {"rollart.io/device": "H800"}),
        ("CPU", {"rollart.io/device": "cpu"}),
        ("CPU", {"ray.io/node-id": "in(eeeeeeee)"}),
        ("CPU", {"ray.io/node-id": "in(aaaaaaaa,bbbbbbbb)"}),
    ]


def test_nodes_to_avoid_are_left_out() -> None:
    assert selectors(ResourceRequest(("H800",), avoid=frozenset({"a-aaaaaa"}))) == []
    cluster = [*CLUSTER, listed("h", {"rollart.io/device": "H800"}, GPU=8.0)]
    (choice,) = choices(ResourceRequest(("H800",), avoid=frozenset({"a-aaaaaa"})), ray_nodes(cluster, FREE))
    assert choice.selector == {"rollart.io/device": "H800", "ray.io/node-id": "!in(aaaaaaaa)"}


@pytest.mark.parametrize(
    ("count", "times", "ever", "now"),
    [
        (2, 1, True, True),
        (3, 1, True, False),
        (9, 1, False, False),
        (1, 8, True, False),
        (3, 3, False, False),
        (0.5, 4, True, True),
    ],
)
def test_busy_devices_differ_from_missing_ones(count: float, times: int, ever: bool, now: bool) -> None:
    (choice,) = choices(ResourceRequest(("H800",)), ray_nodes(CLUSTER, FREE))
    assert (choice.holds(count, times), choice.has_room(count, times)) == (ever, now)
