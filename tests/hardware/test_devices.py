from pathlib import Path

import pytest

from rollart.config import RunFile
from rollart.core.errors import ConfigError
from rollart.hardware.devices import CATALOGUE, device_class


def run(**changes: object) -> RunFile:
    return RunFile.model_validate({"model": {"tiny": {}}, "tasks": [{"name": "a", "env": "json:loads"}], **changes})


def test_the_catalogue_has_the_classes_people_use_each_with_its_source() -> None:
    assert set(CATALOGUE) == {"H20", "H800", "H100", "H200", "A100", "L40S", "B200", "MI300X", "cpu"}
    assert all(device.source and device.name == name for name, device in CATALOGUE.items())


def test_the_table_in_the_docs_is_the_catalogue() -> None:
    text = (Path(__file__).parents[2] / "docs" / "hardware.md").read_text()
    for device in CATALOGUE.values():
        numbers = (device.tflops, device.bandwidth, device.memory, device.link, device.price)
        assert f"| {device.name} | {' | '.join(f'{number:g}' for number in numbers)} |" in text


def test_speeds_are_dense_and_links_one_way() -> None:
    speeds = {name: (CATALOGUE[name].tflops, CATALOGUE[name].link) for name in ("H100", "H800", "A100", "L40S", "B200")}
    assert speeds == {
        "H100": (989.5, 450),
        "H800": (989.5, 200),
        "A100": (312, 300),
        "L40S": (362.05, 32),
        "B200": (2250, 900),
    }


def test_a_run_file_changes_one_number_and_keeps_the_others() -> None:
    changed = run(devices={"H20": {"price": 1.2}}).device_classes()["H20"]
    assert (changed.price, changed.tflops) == (1.2, CATALOGUE["H20"].tflops)
    assert changed.source.startswith("the run file (price); RollArt")


def test_a_user_defined_class_has_defaults() -> None:
    own = run(devices={"X1": {"tflops": 50, "bandwidth": 500, "memory": 24}}).device_classes()["X1"]
    assert (own.tflops, own.link, own.network, own.price, own.source) == (50, 10, 1, 1, "the run file")


def test_a_user_defined_class_needs_speed_bandwidth_and_memory() -> None:
    with pytest.raises(ValueError, match="'X1' is not in the catalogue: it needs bandwidth and memory"):
        run(devices={"X1": {"tflops": 50}})


def test_an_unknown_class_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no device class 'H9'; known are .*H100"):
        device_class("H9")
    with pytest.raises(ValueError, match="no device class 'H80'; did you mean 'H800'"):
        run(pools={"compute": {"role": "generate", "device": "H80"}})


@pytest.mark.parametrize(
    ("pool", "words"),
    [
        ({"role": "generate", "device": "auto", "emulate": 10}, "name the device class to emulate"),
        ({"role": "generate", "urls": ["http://a"]}, "name the device class of the engines that someone else runs"),
        ({"role": "generate", "device": "H20", "urls": ["http://a", "http://b"], "count": 3}, "there are 2 urls"),
        ({"role": "generate", "device": ["H20", "H20"]}, "different ones in order of preference"),
        ({"role": "generate", "device": ["auto", "H20"]}, "or auto alone"),
        ({"role": "generate", "device": ["H800", "H20"], "emulate": 10}, "without fallbacks"),
        ({"role": "train", "device": "H20", "emulate": 10}, "`emulate` is for pools of role generate"),
    ],
)
def test_pools_that_make_no_sense_are_refused(pool: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run(pools={"odd": pool})


def test_the_default_names_are_reserved_for_their_role() -> None:
    with pytest.raises(ValueError, match="'engine' is reserved for pools of role generate"):
        run(pools={"engine": {"role": "environment"}})
