"""How busy this machine is: cores and memory from /proc, GPUs from NVIDIA's library if it is installed."""

import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollart.core.events import HostSample


def processor() -> str:
    """The model of this machine's CPU, or its architecture."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _cpu_times() -> tuple[float, float]:
    """Busy and all seconds of all cores since boot, in ticks."""
    fields = [float(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return sum(fields) - idle, sum(fields)


def _memory() -> tuple[int, int]:
    """In use and in all, in bytes."""
    found = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, value = line.split(":")
        found[name] = int(value.split()[0]) * 1024
    return found["MemTotal"] - found["MemAvailable"], found["MemTotal"]


def _nvml() -> Any:
    """NVIDIA's management library, or None. Never exercised: no machine with a GPU has run this."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # not installed, no driver, no device: there is nothing to sample
        return None
    return pynvml


@dataclass(slots=True)
class HostStats:
    """`sample` returns what happened since the call before."""

    _last: tuple[float, float] = field(default_factory=_cpu_times)
    _nvml: Any = field(default_factory=_nvml)

    def sample(self) -> HostSample:
        busy, total = _cpu_times()
        before, self._last = self._last, (busy, total)
        memory, memory_total = _memory()
        return HostSample(
            node=platform.node(),
            cpu=round((busy - before[0]) / max(1.0, total - before[1]), 4),
            cores=os.cpu_count() or 1,
            memory=memory,
            memory_total=memory_total,
            gpus=self._gpus(),
        )

    def _gpus(self) -> list[tuple[float, int, int]]:
        if self._nvml is None:
            return []
        found = []
        for index in range(self._nvml.nvmlDeviceGetCount()):
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
            busy = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
            found.append((busy, int(memory.used), int(memory.total)))
        return found
