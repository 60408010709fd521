"""What a worker must hold in the memory of its device, and whether it fits."""

from dataclasses import dataclass

from rollart.config import PoolConfig, RunFile
from rollart.hardware.devices import DeviceClass
from rollart.hardware.roofline import ModelShape

USABLE = 0.9  # of a device's memory; the rest is for the runtime and its temporaries
_TRAINED = 16  # bytes of a parameter: weight, gradient and two moments of Adam, each in float32
_REFERENCE = 4


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Gigabytes that each worker of a pool holds."""

    gigabytes: float
    what: str

    def fits(self, device: DeviceClass) -> bool:
        """A worker on CPUs shares the memory of its node, which is not ours to count."""
        return device.name == "cpu" or self.gigabytes <= USABLE * device.memory

    def told(self, device: DeviceClass) -> str:
        return (
            f"{self.what} take {self.gigabytes:.3g} GB on each, but one {device.name} has {device.memory:g} GB, "
            f"of which {USABLE * device.memory:.3g} can be used"
        )


def need_of(run: RunFile, pool: PoolConfig, model: ModelShape) -> MemoryNeed:
    match pool.role:
        case "train":
            number = _TRAINED + (_REFERENCE if run.training.algorithm.kl else 0)
            held = model.parameters * number / pool.count / 1e9
            over = f", over {pool.count} ranks," if pool.count > 1 else ""
            return MemoryNeed(held, f"weights, gradients and Adam's moments in float32{over}")
        case "generate":
            held = (model.parameters * model.number_bytes / 1e9 + run.engine.kv_megabytes / 1e3) / pool.tensor_parallel
            over = f", over {pool.tensor_parallel} devices," if pool.tensor_parallel > 1 else ""
            return MemoryNeed(held, f"weights in {run.engine.dtype} and {run.engine.kv_megabytes} MB of KV{over}")
    return MemoryNeed(0.0, "environments")
