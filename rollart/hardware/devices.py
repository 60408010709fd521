"""Device classes: what a kind of device is good at.

Vendors print the speed with structured sparsity, twice the dense one; here all speeds are dense. Link speeds are in one
direction, half of what is printed for both. Prices are ratios between classes: only those of H20 and H800 are published
as such; the others are list prices of one public cloud and change every month. The network belongs to the node, not the
device: 25 GB/s is the Ethernet between the clusters of the RollArt paper. Put your own numbers in the run file.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rollart.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """Dense bf16 `tflops`, memory `bandwidth` in GB/s and size `memory` in GB, `link` to other devices of its node in
    GB/s, `network` out of its node in GB/s, and `price` relative to one H20. `source` names where they are from."""

    name: str
    tflops: float
    bandwidth: float
    memory: float
    link: float
    network: float
    price: float
    source: str


_LIST_PRICE = "price: approximate, RunPod's list of March 2026 in proportion to its H100, which counts as an H800"
_RATIO = "price: ratio of MegaScale-Infer, as in RollArt, table 2"

CATALOGUE: dict[str, DeviceClass] = {
    device.name: device
    for device in (
        DeviceClass("H20", 148.0, 4000.0, 96.0, 450.0, 25.0, 1.0, f"RollArt, table 2 (NVLink 900 both ways); {_RATIO}"),
        DeviceClass(
            *("H800", 989.5, 3350.0, 80.0, 200.0, 25.0, 2.85),
            f"RollArt, table 2 (NVLink 400 both ways; 1979 with sparsity); {_RATIO}",
        ),
        DeviceClass(
            *("H100", 989.5, 3350.0, 80.0, 450.0, 25.0, 2.85),
            f"NVIDIA H100 datasheet, SXM5 80 GB (1979 with sparsity; NVLink 900 both ways); {_LIST_PRICE}",
        ),
        DeviceClass(
            *("H200", 989.5, 4800.0, 141.0, 450.0, 25.0, 3.8),
            f"NVIDIA H200 datasheet, SXM (1979 with sparsity; NVLink 900 both ways); {_LIST_PRICE}",
        ),
        DeviceClass(
            *("A100", 312.0, 2039.0, 80.0, 300.0, 25.0, 1.47),
            f"NVIDIA A100 datasheet, SXM4 80 GB (624 with sparsity; NVLink 600 both ways); {_LIST_PRICE}",
        ),
        DeviceClass(
            *("L40S", 362.05, 864.0, 48.0, 32.0, 25.0, 0.84),
            f"NVIDIA L40S datasheet (733 with sparsity; PCIe 4 x16, 64 both ways); {_LIST_PRICE}",
        ),
        DeviceClass(
            *("B200", 2250.0, 8000.0, 180.0, 900.0, 25.0, 6.3),
            f"NVIDIA DGX B200 datasheet, an eighth of it (4500 with sparsity; NVLink 1800 both ways); {_LIST_PRICE}",
        ),
        DeviceClass(
            *("MI300X", 1307.4, 5300.0, 192.0, 448.0, 25.0, 2.1),
            "AMD Instinct MI300X data sheet (2614.9 with sparsity; Infinity Fabric 896 both ways); price: approximate, "
            "from public lists of 2026 around 0.7 of an H100",
        ),
        DeviceClass(
            *("cpu", 0.1, 20.0, 16.0, 10.0, 1.0, 0.01),
            "one core of a server, by order of magnitude; a worker's memory is its node's",
        ),
    )
}


def device_class(name: str, own: Mapping[str, DeviceClass] | None = None) -> DeviceClass:
    """The class of that name, the user's `own` first. Raises ConfigError."""
    known = CATALOGUE | dict(own or {})
    if name not in known:
        raise ConfigError(f"there is no device class {name!r}; known are {', '.join(sorted(known))}")
    return known[name]
