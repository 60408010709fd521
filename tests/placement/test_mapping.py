import json
from pathlib import Path
from typing import Any

import pytest

from rollart.config import RunFile
from rollart.core.errors import ConfigError
from rollart.launch.launcher import Node
from rollart.placement.inventory import Inventory
from rollart.placement.mapping import Mapper
from rollart.placement.request import DeviceChoice
from rollart.placement.workload import WorkloadShape, model_shape, shape_of

READS = {"name": "reads", "env": "json:loads", "max_turns": 20, "max_context": 16384, "sampling": {"max_tokens": 16}}
WRITES = {"name": "writes", "env": "json:loads", "max_context": 9000, "sampling": {"max_tokens": 8000}}


@pytest.fixture
def model(tmp_path: Path) -> dict[str, str]:
    config = {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8}
    config |= {"head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return {"path": str(tmp_path)}


def run(model: dict[str, Any], *tasks: dict[str, Any], **changes: Any) -> RunFile:
    engine = {"dtype": "bfloat16", "kv_megabytes": 20000}
    lean = {"dtype": "bfloat16", "recompute": "full"}
    settings = {"engine": engine, "training": lean, **changes}
    return RunFile.model_validate({"model": model, "tasks": tasks or (READS, WRITES), **settings})


def there(**devices: float) -> Inventory:
    nodes = tuple(Node(f"node-{name}", "", {name: number}, {name: number}) for name, number in devices.items())
    return Inventory(nodes, "the cluster")


def choices(
    made: RunFile, inventory: Inventory, measured: dict[str, WorkloadShape] | None = None
) -> dict[str, DeviceChoice]:
    return Mapper(made, inventory, made.device_classes(), model_shape(made), measured).choices()


def generate(**more: Any) -> dict[str, Any]:
    return {"role": "generate", "count": 4, **more}


def test_each_class_goes_to_the_pool_whose_tasks_it_suits(model: dict[str, str]) -> None:
    tasks = ({**READS, "affinity": "p"}, {**WRITES, "affinity": "q"})
    chosen = choices(run(model, *tasks, pools={"p": generate(), "q": generate()}), there(H800=8, H20=8))
    assert (chosen["p"].devices, chosen["q"].devices) == (("H800", "H20"), ("H20", "H800"))
    assert chosen["p"].why == (
        "prefill-heavy (402 prompt : 8 decoded tokens per turn): 1.00 per price on H800, 0.52 on H20"
    )


def test_measured_shapes_win_over_the_limits_in_the_run_file(model: dict[str, str]) -> None:
    made = run(model, WRITES, pools={"p": generate()})
    assert choices(made, there(H800=8, H20=8))["p"].devices[0] == "H20"
    reading = {"writes": WorkloadShape(prompt=4000, decode=10)}
    assert choices(made, there(H800=8, H20=8), reading)["p"].devices[0] == "H800"


def test_a_declared_affinity_says_which_half_of_the_work_counts(model: dict[str, str]) -> None:
    for affinity, device in (("prefill", "H800"), ("decode", "H20")):
        made = run(model, {**READS, "affinity": affinity}, pools={"p": generate()})
        assert choices(made, there(H800=8, H20=8))["p"].devices[0] == device


def test_training_gets_flops_per_price_before_generation_takes_them(model: dict[str, str]) -> None:
    pools = {"p": generate(count=8), "t": {"role": "train", "count": 8}}
    chosen = choices(run(model, READS, pools=pools), there(H800=8, H20=8))
    assert chosen["t"].devices[0] == "H800"
    assert chosen["t"].why == "compute-bound: 1.00 per price on H800, 0.43 on H20"
    assert chosen["p"].devices[0] == "H20"  # would rather have the other, which is taken


def test_training_with_no_room_on_the_best_class_takes_one_with_room(model: dict[str, str]) -> None:
    made = run(model, pools={"t": {"role": "train", "count": 8}})
    assert choices(made, there(H800=4, H20=8))["t"].devices == ("H20", "H800")


def test_cheap_flops_behind_a_slow_link_do_not_win_the_training(model: dict[str, str]) -> None:
    made = run(model, pools={"t": {"role": "train", "count": 8}})
    chosen = choices(made, there(L40S=8, H800=8))["t"]
    assert chosen.devices[0] == "H800"
    assert "on L40S bound by its link" in chosen.why


def test_a_class_that_cannot_hold_the_model_is_not_chosen(model: dict[str, str]) -> None:
    made = run(model, WRITES, pools={"p": generate(), "t": {"role": "train", "count": 2}})
    assert choices(made, there(L40S=8, B200=8))["t"].devices == ("B200",)
    tight = made.model_copy(update={"engine": made.engine.model_copy(update={"kv_megabytes": 40000})})
    assert choices(tight, there(L40S=8, B200=8))["p"].devices == ("B200",)
    with pytest.raises(ConfigError, match=r"pool 't': no device of the cluster has enough memory: .*L40S has 48"):
        choices(made, there(L40S=8))


def test_models_run_on_cpus_only_without_accelerators(model: dict[str, str]) -> None:
    made = run(model, pools={"p": generate(), "e": {"role": "environment", "count": 3}})
    assert choices(made, there(H20=8, cpu=64))["p"].devices == ("H20",)
    here = Inventory((Node("vm", "", {"cpu": 2.0}, {"cpu": 2.0}),), "this machine", overcommit=True)
    chosen = choices(made, here)
    assert chosen["p"].devices == chosen["e"].devices == ("cpu",)
    assert chosen["e"].why == "environments run on CPUs"


def test_an_unknown_device_class_is_never_chosen(model: dict[str, str]) -> None:
    made = run(model, pools={"p": generate()})
    assert choices(made, there(TPU=8, H20=8))["p"].devices == ("H20",)
    with pytest.raises(ConfigError, match="it has no known device"):
        choices(made, there(TPU=8))


def test_the_estimate_is_half_of_the_limits() -> None:
    task = run({"tiny": {"context": 16384}}, READS).tasks[0]
    shape = shape_of(task)
    assert (shape.prompt, shape.decode, shape.kind) == ((16384 / 20 - 16) / 2, 8, "prefill-heavy")
    assert shape_of(task, {"reads": WorkloadShape(1, 2)}) == WorkloadShape(1, 2)
