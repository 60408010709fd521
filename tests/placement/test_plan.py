from dataclasses import replace
from typing import Any

import pytest

from rollart.config import RunFile
from rollart.launch.launcher import Node
from rollart.placement.inventory import Inventory
from rollart.placement.plan import acts_as, plan, with_plan
from rollart.placement.request import PlacementError
from rollart.placement.workload import WorkloadShape

HERE = Inventory((Node("here", "", {"cpu": 2.0}, {"cpu": 2.0}),), "this machine", overcommit=True)
H20 = {"role": "generate", "device": "H20"}
EMULATED = {
    "compute": {"role": "generate", "device": "H800", "emulate": 2000},
    "bandwidth": {**H20, "emulate": 2000, "count": 3},
}


def run(**changes: Any) -> RunFile:
    tasks = [{"name": name, "env": "json:loads", "weight": weight} for name, weight in (("a", 1), ("b", 3))]
    return RunFile.model_validate({"model": {"tiny": {}}, "tasks": tasks, **changes})


def there(**devices: float) -> Inventory:
    return Inventory((Node("node", "", devices, devices),), "the cluster")


def test_what_the_run_file_leaves_out_runs_on_cpus() -> None:
    made = plan(run(engine={"count": 2, "threads": 3}), HERE)
    assert [(one.role, one.worker, one.device, one.threads, one.why) for one in made.bindings] == [
        ("train", "trainer-0", "cpu", 1, "by default"),
        ("generate", "engine-0", "cpu", 3, "by default"),
        ("generate", "engine-1", "cpu", 3, "by default"),
        ("environment", "environments-0", "cpu", 1, "by default"),
    ]


def test_the_batch_follows_the_weights_and_the_pipeline_the_bound() -> None:
    made = plan(run(training={"batch_groups": 8, "group_size": 4}, rollout={"alpha": 2}), HERE)
    assert made.batch == {"a": 2, "b": 6}
    assert made.in_flight == 3 * 8 * 4
    sync = run(training={"batch_groups": 8, "group_size": 4}, rollout={"preset": "sync"})
    assert plan(sync, HERE).in_flight == 8 * 4


def test_more_threads_than_cores_are_a_warning_here_and_an_error_on_a_cluster() -> None:
    assert plan(run(), HERE).warnings == ()
    assert "ask for 5 threads, this machine has 2 cores" in plan(run(engine={"threads": 4}), HERE).warnings[0]
    with pytest.raises(PlacementError, match="pool 'engine' wants 1 engine on cpu of 4 threads each"):
        plan(run(engine={"threads": 4}), there(cpu=3))


def test_processes_that_compute_share_the_cores_of_this_machine() -> None:
    laptop = replace(HERE, nodes=(Node("here", "", {"cpu": 10.0}, {"cpu": 10.0}),))
    large = run(model={"name": "qwen3-8b"}, engine={"count": 2})
    assert {one.worker: one.threads for one in plan(large, laptop).bindings if one.role != "environment"} == {
        "trainer-0": 3,
        "engine-0": 3,
        "engine-1": 3,
    }
    chosen = with_plan(large, plan(large, laptop))
    assert (chosen.engine.threads, chosen.training.threads) == (3, 3)
    assert {one.threads for one in plan(run(), laptop).bindings} == {1}, "a tiny model gains nothing"
    assert {one.threads for one in plan(large, there(cpu=10)).bindings} == {1}, "on a cluster, cores are reserved"


def test_emulated_engines_need_only_cpus_and_are_labelled() -> None:
    made = plan(run(pools=EMULATED), HERE)
    assert made.devices["compute"] == "emulated H800 (1/2000)"
    first = made.of("compute")[0]
    assert (first.device, first.node, acts_as(run(pools=EMULATED), first)) == ("cpu", "here", ("H800", 2000))


def test_engines_that_someone_else_runs_are_bound_to_their_urls_and_take_nothing() -> None:
    made = plan(run(pools={"partner": {**H20, "urls": ["http://a", "http://b"]}}), HERE)
    assert [(one.node, one.device, one.units) for one in made.of("partner")] == [
        ("http://a", "H20", 0),
        ("http://b", "H20", 0),
    ]
    assert made.devices["partner"] == "external H20"


def test_a_named_class_that_cannot_hold_the_model_is_refused_with_numbers() -> None:
    small = {
        "devices": {"toy": {"tflops": 1, "bandwidth": 10, "memory": 0.5}},
        "pools": {"p": {**H20, "device": "toy"}},
    }
    with pytest.raises(
        PlacementError, match=r"pool 'p': weights in float32 and 512 MB of KV take 0\.51\d GB on each, but one"
    ):
        plan(run(**small), there(toy=8, cpu=8))


def test_a_fallback_that_cannot_hold_the_model_is_left_out_with_a_warning() -> None:
    devices = {"toy": {"tflops": 1, "bandwidth": 10, "memory": 0.5}}
    made = plan(run(devices=devices, pools={"p": {**H20, "device": ["toy", "H20"]}}), there(toy=8, H20=8, cpu=8))
    assert made.of("p")[0].device == "H20"
    assert made.warnings[0].endswith("it is not used")


def test_tasks_are_split_over_the_pools_by_what_each_does_best() -> None:
    shapes = {"a": WorkloadShape(prompt=900, decode=1), "b": WorkloadShape(prompt=4, decode=300, context=500)}
    made = plan(run(pools=EMULATED, engine={"max_batch": 16}), HERE, shapes)
    best = {task.task: max(task.pools, key=lambda pool: task.pools[pool]) for task in made.tasks}
    assert best == {"a": "compute", "b": "bandwidth"}


def test_a_pinned_task_stays_on_its_pool() -> None:
    tasks = [{"name": "a", "env": "json:loads", "affinity": ["bandwidth"]}]
    assert plan(run(pools=EMULATED, tasks=tasks), HERE).tasks[0].pools == {"bandwidth": 1.0}


def test_an_unknown_device_class_is_a_warning() -> None:
    assert "the device class TPU is unknown" in plan(run(), there(TPU=4, cpu=8)).warnings[0]
