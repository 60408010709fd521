"""The command line and the environment of a vLLM server."""

import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollart.config import EngineConfig, VllmConfig
from rollart.engines.vllm.kv_transfer import LEASE_S

INSIDE = Path(__file__).parent / "inside"
MODULE = "vllm.entrypoints.openai.api_server"  # the entry point that works in the CPU build
EXTENSION = "rollart_extension.Workers"
NAME = "policy"
ADAPTER = "adapter"  # what requests ask for where adapters are published, and its folder
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has room for
_FOREVER = 1_000_000_000
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


def argv(spec: Mapping[str, Any], socket: Path) -> list[str]:
    """The server listens on `socket`: no port to race for, and only this user can connect."""
    settings = VllmConfig.model_validate(spec["vllm"])
    adapter = ["--lora-modules", f"{ADAPTER}={socket.parent / ADAPTER}"] if spec.get("lora") else []
    server = ["-m", MODULE, *arguments(spec), "--uds", str(socket), *adapter, *settings.args]
    if not settings.container:
        return [str(settings.interpreter()), *server]
    words = []
    for word in shlex.split(settings.container):
        if word == "{mounts}":
            folders = {socket.parent, INSIDE, Path(spec["model"]), Path(spec["weights"])}
            words += [item for folder in sorted(folders) for item in ("--volume", f"{folder}:{folder}")]
        elif word == "{environment}":
            words += [item for key, value in environment(spec).items() for item in ("--env", f"{key}={value}")]
        else:
            words.append(word)
    return [*words, *server]


def arguments(spec: Mapping[str, Any]) -> list[str]:
    """What our service needs, and the `engine` section of the run file."""
    config = EngineConfig.model_validate(spec["config"])
    ranks = int(spec.get("tensor_parallel", 1))
    options: dict[str, object] = {
        "--model": spec["model"],
        "--served-model-name": NAME,
        "--seed": spec["seed"],
        "--dtype": config.dtype,
        "--tensor-parallel-size": ranks,
        "--max-num-seqs": config.max_batch,
        "--max-num-batched-tokens": config.max_batch + config.prefill_chunk,
        "--kv-cache-memory-bytes": (config.kv_megabytes << 20) // ranks,
        "--logprobs-mode": "processed_logprobs",  # of the distribution that tokens are sampled from
        "--generation-config": "vllm",
        "--worker-extension-cls": EXTENSION,
    }
    flags = ["--enable-scale-out", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    if on_cpu(spec):
        options["--block-size"] = 32
        # On CPUs vLLM cannot chunk the prefill of a request with a seed: its generator cannot be rewound.
        options["--max-num-batched-tokens"] = max(
            config.max_batch + config.prefill_chunk, _context(Path(spec["model"]))
        )
        flags += ["--enforce-eager", "--no-enable-chunked-prefill"]
    if lora := spec.get("lora"):
        flags.append("--enable-lora")
        options |= {"--max-loras": 1, "--max-lora-rank": min(size for size in LORA_RANKS if size >= lora["rank"])}
    if spec.get("record_experts"):
        flags.append("--enable-return-routed-experts")
        if on_cpu(spec):
            flags.append("--no-async-scheduling")  # `inside/rollart_experts.py` follows each step
    if spec.get("kv_transfer"):
        options["--kv-transfer-config"] = json.dumps(_connector(on_cpu(spec)))
    return [*flags, *(str(word) for option in options.items() for word in option)]


def environment(spec: Mapping[str, Any]) -> dict[str, str]:
    """Variables set for the server, besides the inherited ones."""
    settings = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # pause, resume and new weights are behind it
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(_FOREVER),
        "PYTHONPATH": str(INSIDE),
    }
    if spec.get("record_experts"):
        # vLLM itself returns them from its second model runner only, which needs Triton.
        settings |= {"ROLLART_RECORD_EXPERTS": "1"} if on_cpu(spec) else {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    if on_cpu(spec):
        # Engines share the cores; compiling takes longer than it saves in eager mode.
        settings |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}
        settings["OMP_NUM_THREADS"] = str(EngineConfig.model_validate(spec["config"]).thread_count)
        if int(spec.get("tensor_parallel", 1)) == 1:
            settings["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process less
    elif "CUDA_VISIBLE_DEVICES" in os.environ:
        settings["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]
    if spec.get("kv_transfer"):
        settings |= {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": str(spec.get("bind", "127.0.0.1")),
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(spec["side_channel"]),
        }
        if on_cpu(spec):
            settings["UCX_TLS"] = "tcp,self,sm"
    return settings


def inherited() -> dict[str, str]:
    """Without the variables of our own Python."""
    return {key: value for key, value in os.environ.items() if key not in _OURS}


def _connector(cpu: bool) -> dict[str, object]:
    common = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    extra = {"kv_connector_extra_config": {"kv_lease_duration": LEASE_S}}
    return {**common, **extra, **({"kv_buffer_device": "cpu"} if cpu else {})}


def _context(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text()).get("max_position_embeddings", 0))


def on_cpu(spec: Mapping[str, Any]) -> bool:
    return spec["config"].get("device") == "cpu" or list(spec.get("classes") or ["cpu"]) == ["cpu"]
