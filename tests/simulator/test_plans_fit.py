"""No plan is shown that `rollart check --nodes` would refuse."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.config import RunFile, loading
from rollart.config.yaml_tree import Tree
from rollart.launch.launcher import Node
from rollart.placement.inventory import Inventory
from rollart.placement.plan import plan as place
from rollart.simulator.plans import applied, as_values, splits, variations
from rollart.simulator.scenario import Scenario

_NODE = 8


def fleet(counts: dict[str, int]) -> Inventory:
    """Nodes by class."""
    devices = {kind: {kind: float(_NODE), "cpu": 128.0} for kind in counts}
    nodes = [
        Node(f"{kind}-{n}", "", devices[kind], devices[kind]) for kind, count in counts.items() for n in range(count)
    ]
    return Inventory(tuple(nodes), "a test")


KINDS = ["H800", "H20", "A100", "L40S", "H200"]
TRAINING = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["float32", "bfloat16"]),
        "recompute": st.sampled_from(["none", "selective", "full"]),
        "parallel": st.sampled_from(["auto", {"tensor": 2}, {"context": 4}, {"tensor": 8}]),
        "pack_tokens": st.sampled_from([2048, 8192, 32768]),
    },
)


@pytest.mark.slow
@settings(max_examples=500)
@given(
    model=st.sampled_from(["qwen3-8b", "qwen3-14b", "qwen3-32b", "qwen3-30b-a3b", "qwen3-235b-a22b"]),
    trainer=st.sampled_from(KINDS),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3, unique=True),
    nodes=st.fixed_dictionaries({kind: st.integers(1, 12) for kind in KINDS}),
    budget=st.floats(5, 200),
    context=st.sampled_from([4096, 32768, 65536]),
    training=TRAINING,
    pick=st.randoms(use_true_random=False),
)
def test_a_plan_that_check_would_refuse_is_never_shown(
    model: str,
    trainer: str,
    kinds: list[str],
    nodes: dict[str, int],
    budget: float,
    context: int,
    training: dict[str, Any],
    pick: Any,
) -> None:
    scenario = Scenario.model_validate(
        {
            "model": {"name": model},
            "pools": {
                "trainer": {"role": "train", "device": trainer, "count": 8},
                "first": {"role": "generate", "device": kinds[0], "engine": "vllm", "tensor_parallel": 8},
            },
            "tasks": [{"name": "maths", "max_context": context, "sampling": {"max_tokens": 1024}}],
            "training": {"batch_groups": 8, "group_size": 8, **training},
        }
    )
    shown = list(splits(scenario, budget, kinds, {kind: _NODE * count for kind, count in nodes.items()}))
    for plan in pick.sample(shown, min(1, len(shown))):
        _, other_use = pick.choice([*variations(plan)])
        for each in (plan, other_use):
            place(as_run_file(applied(each, scenario)), fleet(nodes))  # raises if a pool does not fit


def as_run_file(scenario: Scenario) -> RunFile:
    """As `rollart check` reads what `rollart plan -o` wrote."""
    return loading.validated(Tree(as_values(scenario)), RunFile)
