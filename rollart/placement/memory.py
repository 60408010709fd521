"""The memory that a worker needs on its device, and whether it fits."""

from dataclasses import dataclass

from rollart.config import PoolConfig, RunFile
from rollart.hardware.devices import DeviceClass
from rollart.hardware.roofline import ModelShape

USABLE = 0.9  # fraction of a device's memory; the runtime and its temporaries take the rest
_TRAINED_BYTES = 16  # per parameter: weight, gradient and two moments of Adam, in float32
_REFERENCE_BYTES = 4


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Gigabytes of each worker of a pool."""

    gigabytes: float
    what: str

    def fits(self, device: DeviceClass) -> bool:
        """Workers on CPUs always fit: they share the memory of their node."""
        return device.name == "cpu" or self.gigabytes <= USABLE * device.memory

    def shortfall(self, device: DeviceClass) -> str:
        return (
            f"{self.what} take {self.gigabytes:.3g} GB on each, but one {device.name} has {device.memory:g} GB, "
            f"of which {USABLE * device.memory:.3g} can be used"
        )


def need_of(run: RunFile, pool: PoolConfig, model: ModelShape) -> MemoryNeed:
    match pool.role:
        case "train":
            per_parameter = _TRAINED_BYTES + (_REFERENCE_BYTES if run.training.algorithm.kl else 0)
            held = model.parameters * per_parameter / pool.count / 1e9
            over = f", over {pool.count} ranks," if pool.count > 1 else ""
            return MemoryNeed(held, f"weights, gradients and Adam's moments in float32{over}")
        case "generate":
            held = (model.parameters * model.number_bytes / 1e9 + run.engine.kv_megabytes / 1e3) / pool.tensor_parallel
            over = f", over {pool.tensor_parallel} devices," if pool.tensor_parallel > 1 else ""
            return MemoryNeed(held, f"weights in {run.engine.dtype} and {run.engine.kv_megabytes} MB of KV{over}")
    return MemoryNeed(0.0, "environments")
