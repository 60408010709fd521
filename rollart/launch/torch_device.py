"""The torch device of a service that was placed on a device class."""

from collections.abc import Mapping
from typing import Any

from rollart.core.errors import RollartError


def torch_device(asked: str, spec: Mapping[str, Any]) -> str:
    """`asked` as it is, or for `auto` what the `classes` in the spec are: a CPU, or the GPU that torch can see."""
    import torch

    if asked != "auto":
        return asked
    classes = spec.get("classes") or ["cpu"]
    if classes == ["cpu"]:
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if "cpu" in classes:
        return "cpu"
    raise RollartError(
        f"this process was placed on a node of class {' or '.join(classes)}, but torch finds no GPU here; install a "
        "build of torch for it, or set `device: cpu` in the sections engine and training if CPUs are what you mean"
    )
