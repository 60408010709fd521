"""Engines that span several devices of one node."""

from pathlib import Path

import pytest

from rollart.app import preflight
from rollart.config import RunFile
from rollart.launch.launcher import Node
from rollart.placement.bindings import replace
from rollart.placement.inventory import Inventory
from rollart.placement.plan import PlacementPlan, plan
from rollart.placement.request import PlacementError

RUN = """
model: {tiny: {hidden: 4096, layers: 32, heads: 32, kv_heads: 8, context: 4096}}
tasks: [{name: t, env: "benchmarks.paced:Shaped", max_context: 4096}]
vllm: {container: podman run vllm}
engine: {dtype: bfloat16, kv_megabytes: 20000}
"""


def run_with(folder: Path, pool: str) -> RunFile:
    path = folder / "run.yaml"
    path.write_text(f"{RUN}pools: {{policy: {pool}}}\n")
    return preflight.load_run(path)


def planned(run: RunFile, *gpus: int, device: str = "H800") -> PlacementPlan:
    nodes = [{device: float(count), "cpu": 16.0} for count in gpus]
    return plan(run, Inventory(tuple(Node(f"n{i}", "", has, has) for i, has in enumerate(nodes)), "a cluster"))


def test_an_engine_gets_all_its_devices_on_one_node(tmp_path: Path) -> None:
    run = run_with(tmp_path, "{role: generate, device: H800, count: 3, engine: vllm, tensor_parallel: 2}")
    bindings = planned(run, 3, 4).of("policy")
    assert sorted(binding.node for binding in bindings) == ["n0", "n1", "n1"]
    assert all(binding.request().count == 2 for binding in bindings)


def test_devices_that_are_left_on_different_nodes_do_not_make_an_engine(tmp_path: Path) -> None:
    run = run_with(tmp_path, "{role: generate, device: H800, count: 2, engine: vllm, tensor_parallel: 2}")
    with pytest.raises(PlacementError, match="2 engines on H800, 2 of one node for each, but there is room for 1"):
        planned(run, 3, 1)


def test_memory_is_needed_for_a_share_on_each_device(tmp_path: Path) -> None:
    def holding(pool: str) -> RunFile:
        run = run_with(tmp_path, pool)
        return run.model_copy(update={"engine": run.engine.model_copy(update={"kv_megabytes": 100_000})})

    with pytest.raises(PlacementError, match="MB of KV take 1"):
        planned(holding("{role: generate, device: H800, engine: vllm}"), 8)
    shared = holding("{role: generate, device: H800, engine: vllm, tensor_parallel: 4}")
    assert len(planned(shared, 8).of("policy")) == 1


def test_an_engine_that_lost_its_node_asks_for_as_many_devices_again(tmp_path: Path) -> None:
    run = run_with(tmp_path, "{role: generate, device: H800, engine: vllm, tensor_parallel: 2}")
    lost = planned(run, 2).of("policy")[0]
    left = [Node("small", "", {"H800": 1.0}, {"H800": 1.0}), Node("big", "", {"H800": 2.0}, {"H800": 2.0})]
    assert replace(lost, left).node == "big"
    with pytest.raises(PlacementError):
        replace(lost, left[:1])
