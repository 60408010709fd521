"""Real transfers between two processes; see transport_scenario.py."""

import ctypes.util
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollart.weights.transports import TransferFailed, mooncake, nixl

SCENARIO = Path(__file__).with_name("transport_scenario.py")
DEADLINE_S = 200.0


def need(scheme: str) -> None:
    if scheme == "nixl" and importlib.util.find_spec("nixl_cu12") is None:
        pytest.skip("NIXL is not installed: pip install 'rollart[nixl]'")
    if scheme == "mooncake" and importlib.util.find_spec("mooncake") is None:
        pytest.skip("Mooncake is not installed: pip install 'rollart[mooncake]'")
    if scheme == "mooncake" and ctypes.util.find_library("ibverbs") is None:
        pytest.skip("Mooncake needs a library of the system: apt-get install libibverbs1")


def play(scheme: str, **environment: str) -> dict[str, Any]:
    need(scheme)
    alone = ["unshare", "--map-root-user", "--net"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode == 0:
        environment["OWN_NETWORK"] = "1"
    else:
        alone = []
    done = subprocess.run(
        [*alone, sys.executable, str(SCENARIO), scheme],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())} | environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.slow
@pytest.mark.parametrize("lanes", ["all", "tcp,self"], ids=["shared memory", "tcp"])
def test_nixl_brings_every_version_and_outlives_its_publisher(lanes: str) -> None:
    result = play("nixl", UCX_TLS=lanes)
    assert result["came"] == [True] * 4
    assert result["lost"].startswith("failed: NIXL")
    assert result["again"]


@pytest.mark.slow
def test_mooncake_keeps_two_versions_and_outlives_its_publisher() -> None:
    result = play("mooncake")
    assert result["came"] == [True] * 4
    assert result["kept"] == {"2": False, "3": True}
    assert "did not give bucket 0 of version 2" in result["older"]
    assert result["lost"].startswith("failed: the Mooncake store")
    assert result["again"]


def test_without_the_extras_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu12._api", None)
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    nixl._agent.cache_clear()
    with pytest.raises(TransferFailed, match=r"pip install 'rollart\[nixl\]'"):
        nixl.NixlSender()
    with pytest.raises(TransferFailed, match=r"pip install 'rollart\[mooncake\]'"):
        mooncake.MooncakeReceiver("mooncake://127.0.0.1:1")


@pytest.mark.parametrize("url", ["nixl:", "nixl:abc", "nixl:!!!!", "http://x"])
def test_a_url_that_no_publisher_made_is_refused(url: str) -> None:
    with pytest.raises(TransferFailed, match="not the URL of a NIXL publisher"):
        nixl.NixlAddress.of(url)


def test_an_address_survives_its_url() -> None:
    made = nixl.NixlAddress(bytes(range(256)), 1 << 46, 123)
    assert nixl.NixlAddress.of(made.url) == made
    assert made.url.startswith("nixl:")


@pytest.mark.parametrize("url", ["mooncake://", "mooncake://host", "http://host:1"])
def test_a_url_that_names_no_master_is_refused(url: str) -> None:
    need("mooncake")
    with pytest.raises(TransferFailed, match="mooncake://host:port"):
        mooncake.MooncakeReceiver(url)
