"""vLLM as the controller sees it before anything starts: the spec of the service, and why it could not start."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollart.config import PoolConfig, RunFile
from rollart.config.training import MODELS
from rollart.models import tiny

INSTALL = "`make vllm` makes a Python with vLLM for CPUs; on GPUs, name one that has vLLM in `vllm.python`"
LORA_RANK_MAX = 512
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # head sizes of vLLM's CPU build


def service_spec(run: RunFile, pool: PoolConfig) -> dict[str, Any]:
    settings = run.vllm.model_dump(mode="json")
    if not run.vllm.container:
        settings["python"] = str(run.vllm.interpreter())
    transfer = run.routing.disaggregate != "never" and pool.role == "generate"
    return {"vllm": settings, "tensor_parallel": pool.tensor_parallel, "kv_transfer": transfer}


def problems(run: RunFile, pools: Mapping[str, PoolConfig]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Of these pools, each with the key of the run file to change."""
    for name, pool in pools.items():
        if wrong := _unfit(run, pool):
            yield ("pools", name, "engine"), f"pools.{name}: {wrong}"
    policy = any(pool.role == "generate" for pool in pools.values())
    if policy and run.training.lora and run.training.lora.rank > LORA_RANK_MAX:
        yield ("training", "lora"), f"training.lora.rank is at most {LORA_RANK_MAX} with vLLM engines"
    if policy and run.training.replay_experts and run.routing.disaggregate != "never":
        yield (
            ("training", "replay_experts"),
            "vLLM does not return the experts that it used if its engines transfer KV; set training.replay_experts to "
            "false or routing.disaggregate to never",
        )
    if pools and run.cluster is None and not run.vllm.container and (wrong := missing_vllm(run.vllm.interpreter())):
        yield ("vllm", "python"), f"pool {next(iter(pools))!r} has engine: vllm, but {wrong}; {INSTALL}"


def missing_vllm(python: Path) -> str | None:
    """Why this Python cannot run vLLM. Only virtual environments are inspected."""
    if not os.access(python, os.X_OK):
        return f"there is no Python at {python}"
    home = python.parent.parent
    if (home / "pyvenv.cfg").exists() and not any(home.glob("lib*/python*/site-packages/vllm")):
        return f"{python} has no vLLM"
    return None


def _unfit(run: RunFile, pool: PoolConfig) -> str | None:
    config = _config(run, pool)
    heads = int(config.get("num_attention_heads") or 1)
    size = int(config.get("head_dim") or config.get("hidden_size", 0) // heads)
    if pool.devices == ("cpu",) and size and size not in CPU_HEADS:
        return f"vLLM on CPUs needs heads of size {', '.join(map(str, CPU_HEADS))}; those of the model have {size}"
    if heads % pool.tensor_parallel:
        return f"the model's {heads} attention heads cannot be split over tensor_parallel {pool.tensor_parallel}"
    return None


def _config(run: RunFile, pool: PoolConfig) -> dict[str, Any]:
    """Of the model that the engines of the pool have."""
    if pool.model is not None:
        return _in_folder(Path(pool.model))
    if run.model.tiny:
        return tiny.sizes(run.model.tiny)
    if not run.model.has_weights:
        return dict(run.model.config or MODELS[str(run.model.name)])
    return _in_folder(run.model.path or Path())


def _in_folder(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    return dict(json.loads(file.read_text())) if file.is_file() else {}
