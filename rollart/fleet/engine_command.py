"""The command that serves an engine of a pool: the embedded one, or the service in front of a vLLM server."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rollart.config import RunFile
from rollart.hardware.devices import DeviceClass
from rollart.launch.launcher import Command, ResourceRequest, service_command
from rollart.placement.placement import Binding
from rollart.placement.plan import acts_as

START_S = 120.0
_BESIDE = ResourceRequest(count=0.1)  # for a service whose server runs elsewhere


def engine_command(
    run: RunFile, binding: Binding, spec: Mapping[str, Any], devices: Mapping[str, DeviceClass], logs: Path
) -> Command:
    """`spec` is what every engine of the run is told."""
    pool, threads = run.all_pools()[binding.pool], run.engine.threads
    told = {**spec, "config": run.engine.model_dump(mode="json"), "classes": binding.choices}
    if pool.engine == "torch":
        device, slowdown = acts_as(run, binding)
        if slowdown != 1.0:
            told["emulate"] = {"device": asdict(devices[device]), "slowdown": slowdown}
        return service_command("rollart.engines.torch.service", told, name=binding.worker, logs=logs, threads=threads)
    settings = run.vllm.model_dump(mode="json")
    if not run.vllm.container:
        settings["python"] = str(run.vllm.interpreter())
    told |= {"vllm": settings, "tensor_parallel": pool.tensor_parallel, "hand_over": run.routing.hand_over != "never"}
    if pool.urls:
        told["url"] = url_of(run, binding)
    command = service_command("rollart.engines.vllm.service", told, name=binding.worker, logs=logs, threads=threads)
    return replace(command, start_deadline=start_deadline(run))


def start_deadline(run: RunFile) -> float:
    """The longest that an engine may take to start."""
    slow = any(pool.engine == "vllm" for pool in run.pools.values())
    return START_S + (run.vllm.start_deadline if slow else 0.0)


def wish_of(run: RunFile, binding: Binding) -> ResourceRequest:
    return _BESIDE if run.all_pools()[binding.pool].urls else binding.wish()


def url_of(run: RunFile, binding: Binding) -> str:
    """Where an engine that someone else runs is to be found."""
    return run.all_pools()[binding.pool].urls[int(binding.worker.rpartition("-")[2])]
