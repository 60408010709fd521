"""The faults of `benchmarks/chaos.py`: what each does to the processes, connections, disk and clock of a run.

A fault takes the run and a random generator, and returns what it did, or None if there was nothing to hit. It undoes
what would last (a stopped process, a full disk, a black hole) before it returns.
"""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

OWN_WORLD = "CHAOS_FOLDER"  # environment variable: the folder of runs in a network and with mounts of their own
FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
MARK = "ROLLART_CHAOS"  # environment variable of every process of a run
MODULES = {
    "rollart.engines.torch.service": "engine",
    "rollart.training.service": "trainer",
    "rollart.gateway.service": "gateway",
    "rollart.players.service": "player",
}
HOSTS = {"environments.log": "environments", "rewards.log": "rewards", "agents.log": "agents"}
STOPPED_S = (0.5, 8.0)
CUT_S = (1.0, 10.0)
FULL_S = (2.0, 12.0)
SLOW_S, SLICE_S = 6.0, 0.05
JUMPS = ("+3600s", "-86400s", "+0s", "+30s")


@dataclass
class Target:
    """A run under faults: its controller, its folder, and where the clock of its processes is set."""

    controller: subprocess.Popen[bytes]
    folder: Path
    clock: Path

    def processes(self) -> dict[str, list[psutil.Process]]:
        """By role; `... process` are the forked processes of a host. Players have hosts of their own."""
        found: dict[str, list[psutil.Process]] = {}
        parents = [psutil.Process(self.controller.pid)] if self.controller.poll() is None else []
        for parent in parents:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in parent.children():
                    if (role := _role(child)) is None:
                        continue
                    found.setdefault(role, []).append(child)
                    if role == "player":
                        parents.append(child)
                    elif role in HOSTS.values():
                        with contextlib.suppress(psutil.NoSuchProcess):
                            found.setdefault(f"{role} process", []).extend(child.children())
        return found

    def ports(self, role: str) -> list[int]:
        """On which processes of the role listen."""
        found: list[int] = []
        for process in self.processes().get(role, ()):
            with contextlib.suppress(psutil.Error):
                found += [each.laddr.port for each in process.net_connections("tcp") if each.status == "LISTEN"]
        return found


def _role(process: psutil.Process) -> str | None:
    try:
        words = process.cmdline()
        errors = Path(f"/proc/{process.pid}/fd/2").readlink().name
    except (psutil.Error, OSError):
        return None
    if any(word.endswith("workers/host.py") for word in words):
        return HOSTS.get(errors.partition(".")[2] if errors.startswith("player-") else errors)
    return next((role for module, role in MODULES.items() if module in words), None)


def _pick(target: Target, role: str, rng: random.Random) -> psutil.Process | None:
    there = target.processes().get(role, ())
    return rng.choice(there) if there else None


def kill(role: str) -> "Fault":
    def fault(target: Target, rng: random.Random) -> str | None:
        victim = _pick(target, role, rng)
        if victim is None:
            return None
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
            return f"killed {role} {victim.pid}"
        return None

    return fault


@contextlib.contextmanager
def _stopped(victim: psutil.Process) -> Iterator[None]:
    victim.suspend()
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.resume()


def stop(role: str) -> "Fault":
    """SIGSTOP for a while, then SIGCONT."""

    def fault(target: Target, rng: random.Random) -> str | None:
        victim, seconds = _controller_or(target, role, rng), rng.uniform(*STOPPED_S)
        if victim is None:
            return None
        with contextlib.suppress(psutil.NoSuchProcess), _stopped(victim):
            time.sleep(seconds)
        return f"stopped {role} {victim.pid} for {seconds:.1f} s"

    return fault


def slow(role: str) -> "Fault":
    """Half of the time stopped, in short slices."""

    def fault(target: Target, rng: random.Random) -> str | None:
        victim = _controller_or(target, role, rng)
        if victim is None:
            return None
        until = time.monotonic() + SLOW_S
        with contextlib.suppress(psutil.NoSuchProcess):
            while time.monotonic() < until:
                with _stopped(victim):
                    time.sleep(SLICE_S)
                time.sleep(SLICE_S)
        return f"slowed {role} {victim.pid}"

    return fault


def _controller_or(target: Target, role: str, rng: random.Random) -> psutil.Process | None:
    return psutil.Process(target.controller.pid) if role == "controller" else _pick(target, role, rng)


def reset(role: str) -> "Fault":
    """Resets every connection to a service; it goes on listening."""

    def fault(target: Target, rng: random.Random) -> str | None:
        ports = target.ports(role)
        if not ports:
            return None
        port = rng.choice(ports)
        subprocess.run(["ss", "-K", "-t", "sport", "=", f":{port}"], check=False, capture_output=True)
        return f"reset the connections to {role} at port {port}"

    return fault


def black_hole(role: str) -> "Fault":
    """Drops every packet to and from a port for a while."""

    def fault(target: Target, rng: random.Random) -> str | None:
        ports, seconds = target.ports(role), rng.uniform(*CUT_S)
        if not ports:
            return None
        port = rng.choice(ports)
        chain = "add table inet chaos; add chain inet chaos in { type filter hook input priority 0; };"
        rules = "".join(f" add rule inet chaos in tcp {side} {port} drop;" for side in ("dport", "sport"))
        subprocess.run(["nft", chain + rules], check=True)
        try:
            time.sleep(seconds)
        finally:
            subprocess.run(["nft", "delete table inet chaos"], check=True)
        return f"dropped the packets of {role} at port {port} for {seconds:.1f} s"

    return fault


def slow_link(target: Target, rng: random.Random) -> str | None:
    """All connections share a narrow link for a while."""
    rate, seconds = rng.choice(("500kbit", "4mbit")), rng.uniform(*CUT_S)
    link = ["dev", "lo", "root"]
    subprocess.run(["tc", "qdisc", "add", *link, "tbf", "rate", rate, "burst", "64kb", "latency", "300ms"], check=True)
    try:
        time.sleep(seconds)
    finally:
        subprocess.run(["tc", "qdisc", "del", *link], check=True)
    return f"all connections had {rate}/s for {seconds:.1f} s"


def fill_disk(target: Target, rng: random.Random) -> str | None:
    """No byte is free in the file system of the run for a while."""
    filler, seconds = target.folder.parent / "filler", rng.uniform(*FULL_S)
    with open(filler, "wb") as file:
        try:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        except OSError:
            pass  # full
    try:
        time.sleep(seconds)
    finally:
        with contextlib.suppress(OSError):
            filler.unlink()
    return f"the disk was full for {seconds:.1f} s"


def jump_clock(target: Target, rng: random.Random) -> str | None:
    """The wall clock of every process of the run jumps."""
    jump = rng.choice(JUMPS)
    target.clock.write_text(jump + "\n")
    return f"the clock jumped to {jump}"


Fault = Callable[[Target, random.Random], str | None]


@dataclass(frozen=True)
class Kind:
    """`weight`: how often. `heavy`: the run goes back to its last checkpoint; another one must come before the next."""

    fault: Fault
    weight: float = 1.0
    heavy: bool = False


def kinds() -> dict[str, Kind]:
    """Those that this machine allows, by name."""
    services = ("engine", "trainer", "gateway")
    found = {
        "kill engine": Kind(kill("engine"), 2),
        "kill player": Kind(kill("player"), 1),
        "kill trainer": Kind(kill("trainer"), 2, heavy=True),
        "kill gateway": Kind(kill("gateway"), 1),
        **{f"kill {role}": Kind(kill(role), weight) for role, weight in _HOST_WEIGHTS.items()},
        **{f"stop {role}": Kind(stop(role), 1) for role in (*services, "player", "controller", "environments")},
        **{f"slow {role}": Kind(slow(role), 0.5) for role in (*services, "player", "controller")},
    }
    if separate_network():
        found |= {f"reset {role}": Kind(reset(role), 1, heavy=role == "trainer") for role in services}
        if shutil.which("tc"):
            found["slow link"] = Kind(slow_link, 1)
        if shutil.which("nft"):
            found |= {f"black hole {role}": Kind(black_hole(role), 0.7) for role in ("engine", "gateway")}
        found["disk full"] = Kind(fill_disk, 1.5, heavy=True)
    if FAKETIME:
        found["clock jump"] = Kind(jump_clock, 1)
    return found


_HOST_WEIGHTS = {
    "environments": 1.0,
    "environments process": 2.0,
    "rewards": 1.0,
    "rewards process": 2.0,
    "agents": 1.0,
    "agents process": 2.0,
}


def separate_network() -> bool:
    """Whether this process has a network and mounts of its own, so that nothing else on the machine is hit."""
    return OWN_WORLD in os.environ


def left_processes(mark: str, *, kill: bool = True) -> list[str]:
    """The processes whose environment has the mark: all that the run started. They are killed."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"process {process.pid}: {' '.join(process.cmdline())[:100]}")
                if kill:
                    process.send_signal(signal.SIGKILL)
    return found
