"""Device classes: what a kind of device is good at."""

from collections.abc import Mapping
from dataclasses import dataclass

from rollart.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """Dense bf16 `tflops`, memory `bandwidth` in GB/s and size `memory` in GB, `link` to other devices of its node in
    GB/s, `network` out of its node in GB/s, and `price` relative to one H20. `source` tells where the numbers are from."""

    name: str
    tflops: float
    bandwidth: float
    memory: float
    link: float
    network: float
    price: float
    source: str


CATALOGUE: dict[str, DeviceClass] = {
    device.name: device
    for device in (
        DeviceClass("H20", 148.0, 4000.0, 96.0, 450.0, 25.0, 1.0, "RollArt, table 2"),
        DeviceClass("H800", 989.5, 3350.0, 80.0, 200.0, 25.0, 2.85, "RollArt, table 2"),
        DeviceClass("cpu", 0.1, 20.0, 16.0, 10.0, 1.0, 0.01, "one core of a server, by order of magnitude"),
    )
}


def device_class(name: str, own: Mapping[str, DeviceClass] | None = None) -> DeviceClass:
    """The class of that name, the user's `own` first. Raises ConfigError."""
    known = CATALOGUE | dict(own or {})
    if name not in known:
        raise ConfigError(f"there is no device class {name!r}; known are {', '.join(sorted(known))}")
    return known[name]
