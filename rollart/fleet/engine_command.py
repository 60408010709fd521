"""The command that serves an engine of a pool, by the backend of the pool."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rollart.config import RunFile
from rollart.engines.backends import backend_of
from rollart.hardware.devices import DeviceClass
from rollart.launch.launcher import Command, ResourceRequest, service_command
from rollart.placement.bindings import Binding
from rollart.placement.plan import acts_as

_FRONT = ResourceRequest(count=0.1)  # for a service in front of a server that someone else runs


def engine_command(
    run: RunFile, binding: Binding, spec: Mapping[str, Any], devices: Mapping[str, DeviceClass], logs: Path
) -> Command:
    """`spec` is what all engines of the run have in common."""
    pool = run.all_pools()[binding.pool]
    backend, (device, slowdown) = backend_of(pool), acts_as(run, binding)
    full = {**spec, "config": run.engine.model_dump(mode="json"), "classes": binding.choices, **backend.spec(run, pool)}
    if slowdown != 1.0:
        full["emulate"] = {"device": asdict(devices[device]), "slowdown": slowdown}
    if binding.url:
        full["url"] = binding.url
    command = service_command(backend.module, full, name=binding.worker, logs=logs, threads=run.engine.threads)
    return replace(command, start_deadline=backend.start_deadline(run))


def request_of(binding: Binding) -> ResourceRequest:
    return _FRONT if binding.url else binding.request()
