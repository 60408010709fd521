import socket
from pathlib import Path

import pytest

from rollart.config import RunFile
from rollart.core.errors import ConfigError, ServiceError
from rollart.placement import inventory
from rollart.placement.inventory import inventory_of, nodes_of, read


def run(**changes: object) -> RunFile:
    return RunFile.model_validate({"model": {"tiny": {}}, "tasks": [{"name": "a", "env": "json:loads"}], **changes})


def test_without_a_cluster_it_is_this_machine_whose_cpus_may_be_shared() -> None:
    here = inventory_of(run())
    assert (len(here.nodes), here.where, here.overcommit) == (1, "this machine", True)
    assert here.total("cpu") >= 1
    assert here.classes[-1] == "cpu"


def test_a_file_of_nodes_needs_no_cluster_and_is_never_overcommitted(tmp_path: Path) -> None:
    file = tmp_path / "nodes.yaml"
    file.write_text("- {name: big, count: 2, devices: {H800: 8, cpu: 96}}\n- {name: plain, devices: {cpu: 64}}\n")
    planned = inventory_of(run(cluster="ray://nowhere:10001"), file)
    assert [node.name for node in planned.nodes] == ["big-0", "big-1", "plain"]
    assert (planned.free("H800"), planned.total("cpu"), planned.overcommit) == (16, 256, False)
    assert planned.classes == ["H800", "cpu"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- {name: a, devices: {H800: many}}", r"nodes.yaml:1: a\.devices\.H800"),
        ("- {name: a}", "devices: Field required"),
        ("name: a", "write a list of nodes such as"),
        ("- {name: a, devices: {}}\n- {name: a, devices: {}}", "two nodes are named 'a'"),
    ],
)
def test_a_mistake_in_a_file_of_nodes_is_an_error_with_line_and_example(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "nodes.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read(file)


def test_a_missing_file_of_nodes_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the nodes"):
        read(tmp_path / "nothing.yaml")


def test_a_cluster_that_does_not_answer_is_an_error_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(
        ServiceError, match=f"no Ray cluster answers at ray://127.0.0.1:{port}; start one with `ray start"
    ):
        nodes_of(f"ray://127.0.0.1:{port}")


def test_a_server_that_is_no_cluster_is_an_error_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"ray://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ServiceError, match=r"did not list its nodes within 0\.5 s.*--patience 2"):
            nodes_of(address, patience=0.5)


def test_without_ray_the_package_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "find_spec", lambda name: None)
    with pytest.raises(ServiceError, match=r"needs Ray, which is not installed: pip install 'rollart\[ray\]'"):
        nodes_of("auto")
