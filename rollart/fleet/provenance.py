"""What a run was made with, for those who compare its numbers later."""

import hashlib
import subprocess
from importlib import metadata
from pathlib import Path

from rollart.config import RunFile

_PACKAGES = ("rollart", "torch", "transformers", "numpy", "vllm", "ray")


def packages() -> dict[str, str]:
    """Versions of the installed packages that matter to the numbers of a run."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def commit() -> str:
    """The commit of rollart, with a + if files differ from it; empty outside a checkout."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return ""
    try:
        asked = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--abbrev=12", "--dirty=+"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return asked.stdout.strip()


def price(run: RunFile) -> float:
    """Of all devices per hour, as if every pool got the device class that it wants first."""
    classes = run.device_classes()
    pools = [pool for pool in run.pools.values() if pool.devices and pool.devices[0] in classes]
    return sum(classes[pool.devices[0]].price * pool.workers * pool.tensor_parallel for pool in pools)
