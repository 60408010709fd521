import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from rollart.app import preflight
from rollart.config import TinyModelConfig, VllmConfig
from rollart.core.errors import ConfigError, ServiceError
from rollart.engines.vllm.command import arguments, argv, environment
from rollart.engines.vllm.server import started
from rollart.models.tiny import make

RUN = """
model: {tiny: {hidden: 64, layers: 2, heads: 2, kv_heads: 1, context: 256}}
tasks: [{name: t, env: "benchmarks.paced:Shaped", max_context: 200}]
pools:
  policy: {role: generate, device: cpu, engine: vllm}
"""


def spec(folder: Path, vllm: VllmConfig | None = None, **more: Any) -> dict[str, Any]:
    model = folder / "model"
    if not model.exists():
        make(TinyModelConfig(hidden=64, layers=1, heads=2, kv_heads=1, context=256), model, seed=0)
    settings = (vllm or VllmConfig(python=Path("/opt/vllm/bin/python"))).model_dump(mode="json")
    common = {"model": str(model), "weights": str(folder / "weights"), "seed": 3, "version": 0, "vllm": settings}
    config = {"max_batch": 8, "prefill_chunk": 100, "kv_megabytes": 10}
    return {**common, "config": config, "classes": ["cpu"], **more}


def value(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


def test_on_gpus_the_server_captures_graphs_and_cuts_prefill_and_each_device_holds_its_share_of_kv(
    tmp_path: Path,
) -> None:
    words = arguments(spec(tmp_path, classes=["H800"], tensor_parallel=2))
    assert "--enforce-eager" not in words and "--no-enable-chunked-prefill" not in words
    assert value(words, "--tensor-parallel-size") == "2"
    assert value(words, "--kv-cache-memory-bytes") == str(5 << 20)
    assert value(words, "--max-num-batched-tokens") == "108"
    assert "--enforce-eager" in arguments(spec(tmp_path))


def test_logprobs_are_asked_for_as_sampled_and_the_users_arguments_come_last(tmp_path: Path) -> None:
    words = argv(
        spec(tmp_path, VllmConfig(python=Path("/opt/python"), args=["--max-model-len", "99"])), tmp_path / "socket"
    )
    assert words[:3] == ["/opt/python", "-m", "vllm.entrypoints.openai.api_server"]
    assert value(words, "--logprobs-mode") == "processed_logprobs"
    assert words[-2:] == ["--max-model-len", "99"]


def test_a_server_whose_experts_are_replayed_returns_them(tmp_path: Path) -> None:
    recording = spec(tmp_path, record_experts=True)
    assert "--enable-return-routed-experts" in arguments(recording)
    assert environment(recording)["ROLLART_RECORD_EXPERTS"] == "1"
    assert environment(recording | {"classes": ["H20"]})["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert "--enable-return-routed-experts" not in arguments(spec(tmp_path))


def test_a_server_for_adapters_has_one_with_room_for_its_rank(tmp_path: Path) -> None:
    words = argv(spec(tmp_path, lora={"rank": 24, "alpha": 32}), tmp_path / "socket")
    assert "--enable-lora" in words and value(words, "--max-lora-rank") == "32" and value(words, "--max-loras") == "1"
    assert value(words, "--lora-modules") == f"adapter={tmp_path}/adapter"
    assert "--enable-lora" not in argv(spec(tmp_path), tmp_path / "socket")


def test_a_container_gets_the_folders_and_the_environment_where_its_command_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    command = "docker run --rm {mounts} {environment} --entrypoint python3 'an image'"
    asked = spec(tmp_path, VllmConfig(container=command), classes=["H20"])
    words = argv(asked, tmp_path / "sockets" / "socket")
    assert words[:3] == ["docker", "run", "--rm"]
    for folder in (tmp_path / "sockets", tmp_path / "model", tmp_path / "weights"):
        assert f"{folder}:{folder}" in words
    assert "CUDA_VISIBLE_DEVICES=2,3" in words and "VLLM_SERVER_DEV_MODE=1" in words
    assert words[words.index("an image") + 1 :][:2] == ["-m", "vllm.entrypoints.openai.api_server"]


def test_servers_that_hand_kv_over_get_a_connector_and_a_port_of_their_own(tmp_path: Path) -> None:
    asked = spec(tmp_path, kv_transfer=True, side_channel=5611, bind="10.0.0.7")
    assert "NixlConnector" in value(arguments(asked), "--kv-transfer-config")
    assert environment(asked)["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.7"
    assert environment(asked)["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5611"
    assert "--kv-transfer-config" not in arguments(spec(tmp_path))


@pytest.mark.parametrize(
    ("python", "reported"),
    [("/nowhere/bin/python", r"/nowhere/bin/python cannot be executed.*make vllm"), (sys.executable, "make vllm")],
)
def test_a_python_that_has_no_vllm_is_named_with_what_to_do(tmp_path: Path, python: str, reported: str) -> None:
    async def main() -> None:
        async with started(spec(tmp_path, VllmConfig(python=Path(python)))):
            pass

    with pytest.raises(ServiceError, match=reported):
        asyncio.run(main())


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ("vllm.python=/nowhere/python", "there is no Python at /nowhere/python; `make vllm`"),
        ("model.tiny.heads=4", "those of the model have 16"),
        ("pools.policy.tensor_parallel=3", "cannot be split over tensor_parallel 3"),
        ("pools.policy.engine=torch", ""),
        ("vllm.container=podman run x", ""),
        ('pools.policy.urls=["http://10.0.0.1:8000"]', ""),
    ],
)
def test_what_vllm_lacks_is_reported_when_the_run_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, reported: str
) -> None:
    monkeypatch.delenv("ROLLART_VLLM_PYTHON", raising=False)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    if reported:
        with pytest.raises(ConfigError, match=reported):
            preflight.load_run(path, [change])
    else:
        preflight.load_run(path, [change])


@pytest.mark.parametrize(
    ("pool", "reported"),
    [
        ("{role: train, engine: vllm}", "`engine` is for pools of role generate or judge, not train"),
        ("{role: generate, tensor_parallel: 2}", "`tensor_parallel` needs engine: vllm"),
        ("{role: generate, device: H20, emulate: 100, engine: vllm}", "a vllm engine cannot be paced"),
    ],
)
def test_keys_that_do_not_go_together_are_one_sentence(tmp_path: Path, pool: str, reported: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RUN.replace("{role: generate, device: cpu, engine: vllm}", pool))
    with pytest.raises(ConfigError, match=reported) as refused:
        preflight.load_run(path)
    assert len(str(refused.value).splitlines()) == 1
