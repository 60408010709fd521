"""Faults at random, from a seed, in a real training run; then an auditor reads what the run left.

    python benchmarks/chaos.py [--minutes 20] [--seed 0]

The run has four tasks (two plain environments, one with a slow reward, one agent behind the gateway), two engines, two
trainer ranks, two players, hosts of environments, rewards and agents. Its processes are killed, stopped and slowed, its
connections reset, cut off and narrowed, its disk filled and its clock set, and the controller itself is killed and
resumed.
`benchmarks/chaos_faults.py` has the faults, `benchmarks/audit.py` the invariants. The run starts in a network and a
small file system of its own (`unshare`, needs root; without it those faults are left out and named in `left_out`).
A fault that takes the run back to its last checkpoint comes again only after another checkpoint.

This is a benchmark and not a command: it needs root, owns the machine's processes of the run, and shows that rollart
holds its promises, not that a user's environment does; for that, `benchmarks.fault_injection:Chaos` wraps any of them.

Last line: `faults` and their number by `kinds`; `violations` of the invariants of the audit, of keys that were accepted
and of processes left behind; `finished`; `ended`: times that the run ended by itself and had to be resumed; `kept`:
training steps per second, those that were lost with a checkpoint not counted, relative to the same run without faults.
"""

import argparse
import contextlib
import http.client
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.audit import audit
from benchmarks.chaos_faults import FAKETIME, MARK, OWN_WORLD, Kind, Target, kinds, left_processes
from benchmarks.crash import LEFT_S, Lives, kept
from benchmarks.scratch import scratch_folder
from rollart.config import loading
from rollart.fleet.fleet import weights_folder

DISK = "160m"
GAP_S = 3.0  # between faults, on average
STUCK_S = 240.0  # without a batch, however often it was hit
CONTROLLER = 2.0  # the weight of killing it
STOP_S, END_S = 90.0, 300.0
LAST_STEPS = 4
PROBE_S = 1.0
DOORS = ("/rpc", "/v1/models", "/v1/chat/completions")
CALM_PART = 0.2  # of the minutes, for the run without faults

RUN = """
name: chaos
model: {tiny: {hidden: 64, layers: 2, context: 256}}
tasks:
  - {name: guess_number, env: "rollart.envs.guess_number:GuessNumber", max_turns: 4, max_context: 200, weight: 2,
     sampling: {max_tokens: 6}}
  - {name: frozen_lake, env: "rollart.envs.frozen_lake:FrozenLake", max_turns: 4, max_context: 200,
     sampling: {max_tokens: 3}}
  - {name: scored, env: "rollart.envs.guess_number:GuessNumber", max_turns: 2, max_context: 200,
     sampling: {max_tokens: 6}, reward: "benchmarks.waiting_reward:waits"}
  - {name: agent, agent: "rollart.agents.demo:digits", args: {turns: 2}, max_context: 200, sampling: {max_tokens: 6}}
pools:
  learning: {role: train, device: cpu, count: 2}
  talking: {role: generate, device: cpu, count: 2}
  playing: {role: environment, device: cpu}
rollout: {extra_members: 1, players: 2}
environments: {processes: 16}
training: {steps: 100000, batch_groups: 5, group_size: 4}
evaluation: {every: 0, final_episodes: 2}
checkpoint: {every: 4}
ledger: {keep: 50}
"""


@dataclass
class Session:
    """One run and what happened to it."""

    scratch: Path
    logs: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    ready: set[str] = field(default_factory=set)
    left: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)
    target: Target = field(init=False)

    def __post_init__(self) -> None:
        self.folder, self.file, self.clock = self.scratch / "run", self.scratch / "run.yaml", self.scratch / "clock"
        self.temporary = self.scratch / "tmp"
        for folder in (self.folder, self.temporary):
            folder.mkdir(parents=True)
        self.file.write_text(RUN)
        self.clock.write_text("+0s\n")
        self.lives = Lives(self.folder)

    def start(self, *options: str) -> None:
        command = [sys.executable, "-m", "rollart.app.cli", "train", str(self.file), "--run-dir", str(self.folder)]
        if (self.folder / "run.yaml").exists():
            command.append("--resume")
        more = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": str(self.temporary), MARK: self.mark}
        if FAKETIME:
            more |= {"LD_PRELOAD": str(FAKETIME), "FAKETIME_TIMESTAMP_FILE": str(self.clock), "NO_FAKE_STAT": "1"}
            more |= {"FAKETIME_CACHE_DURATION": "2", "DONT_FAKE_MONOTONIC": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
        with open(self.logs / f"{self.scratch.name}.log", "ab") as log:
            process = subprocess.Popen(
                [*command, *options], stdout=log, stderr=log, env=os.environ | more, start_new_session=True
            )
        self.target = Target(process, self.folder, self.clock)

    @property
    def alive(self) -> bool:
        return self.target.controller.poll() is None

    def wait_for_training(self) -> bool:
        """False: it ended."""
        self.lives.wait_for_rollout(self.target.controller)
        return self.alive

    def kill_controller(self) -> str:
        controller = self.target.controller
        controller.kill()
        controller.wait()
        self.after_end()
        self.ready |= kept(self.folder)
        self.start()
        return f"killed controller {controller.pid}"

    def after_end(self) -> None:
        """Nothing may outlive the controller for long."""
        deadline = time.monotonic() + LEFT_S
        while (left := left_processes(self.mark, kill=False)) and time.monotonic() < deadline:
            time.sleep(0.2)
        self.left += left
        left_processes(self.mark)

    def finish(self) -> int:
        """Stop the run as Ctrl-C does, then take a few more steps to its end. Returns the version where it stopped."""
        self.clock.write_text("+0s\n")
        if self.alive:
            self.target.controller.terminate()
        self.target.controller.wait(STOP_S)
        self.after_end()
        self.lives.look()
        stopped = self.lives.trained
        self.start("--set", f"training.steps={stopped + LAST_STEPS}")
        self.target.controller.wait(END_S)
        self.after_end()
        self.lives.look()
        return stopped

    def violations(self) -> list[str]:
        found = [f"{invariant}: {what}" for invariant, what in audit(self.folder, self.ready)]
        memory = weights_folder(loading.load(self.folder / "run.yaml"), self.folder)
        found += [f"left behind: {what}" for what in (*self.left, *([str(memory)] if memory.exists() else ()))]
        return found + [f"key accepted: {what}" for what in self.accepted]


def probe_keys(session: Session) -> None:
    """Strangers try the doors of every service: without a key, and with a wrong one."""
    for role in ("engine", "trainer", "gateway"):
        for port in session.target.ports(role):
            session.accepted += [f"{role} at port {port} {what}" for what in _open_doors(port)]


def _open_doors(port: int) -> Iterator[str]:
    for path, key in itertools.product(DOORS, (None, uuid.uuid4().hex)):
        if (status := _status(port, path, key)) is None:
            return  # no HTTP here, or it is stopped
        if status < 400:
            yield f"answered {path} with the key {key!r}: {status}"


def _status(port: int, path: str, key: str | None) -> int | None:
    """Of the answer to a request, which asks for a WebSocket where there is one."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PROBE_S)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    if path == "/rpc":
        headers |= {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
        headers["Sec-WebSocket-Key"] = "dGhlIHNhbXBsZSBub25jZQ=="
    try:
        connection.request("POST" if path.endswith("completions") else "GET", path, headers=headers)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


class Saboteur:
    """Draws faults until the time is over: those with `only` in their names."""

    def __init__(self, session: Session, seed: int, only: str = "") -> None:
        self.session, self.rng = session, random.Random(f"chaos {seed}")
        killed = Kind(lambda target, rng: session.kill_controller(), CONTROLLER, heavy=True)
        every = {**kinds(), "kill controller": killed}
        self.kinds = {name: kind for name, kind in every.items() if only in name}
        if not self.kinds:
            raise SystemExit(f"no fault has {only!r} in its name; there are {', '.join(every)}")
        self.counts: Counter[str] = Counter()
        self._heavy_at = self._seen = -1
        self._progress = time.monotonic()

    def run(self, seconds: float) -> None:
        began, session = time.monotonic(), self.session
        while time.monotonic() - began < seconds:
            if not session.alive:
                self._resume()
            session.lives.look()
            self._check_progress()
            self._hit(time.monotonic() - began)
            time.sleep(self.rng.expovariate(1 / GAP_S))
            if self.rng.random() < 0.1:
                probe_keys(session)

    def _resume(self) -> None:
        self.session.lives.look()
        self.session.ended.append(self.session.lives.end or f"exit code {self.session.target.controller.returncode}")
        print(f"the run ended by itself: {self.session.ended[-1][:300]}", flush=True)
        self.session.after_end()
        self.session.start()

    def _check_progress(self) -> None:
        if self.session.lives.trained != self._seen:
            self._seen, self._progress = self.session.lives.trained, time.monotonic()
        elif time.monotonic() - self._progress > STUCK_S:
            raise SystemExit(f"the run has not trained for {STUCK_S:g} s")

    def _hit(self, at: float) -> None:
        checkpointed = self.session.lives.checkpointed
        able = [name for name, kind in self.kinds.items() if not kind.heavy or checkpointed > self._heavy_at]
        name = self.rng.choices(able, [self.kinds[name].weight for name in able])[0]
        if (done := self.kinds[name].fault(self.session.target, self.rng)) is None:
            return
        if self.kinds[name].heavy:
            self._heavy_at = checkpointed
        self.counts[name] += 1
        print(f"{at:6.1f} s, version {self.session.lives.trained}: {done}", flush=True)


def rate(session: Session, seconds: float, saboteur: Saboteur | None = None) -> tuple[float, bool]:
    """Steps per second that survive, from the moment the run trains on, and whether it finished."""
    session.start()
    try:
        if not session.wait_for_training():
            raise SystemExit("the run did not start; see its log")
        began = time.monotonic()
        time.sleep(seconds) if saboteur is None else saboteur.run(seconds)
        took = time.monotonic() - began
        return session.finish() / took, session.lives.end == "finished"
    finally:
        left_processes(session.mark)


def chaos(minutes: float, seed: int, scratch: Path, logs: Path, only: str = "") -> dict[str, Any]:
    calm, torn = Session(scratch / "calm", logs), Session(scratch / "chaos", logs)
    without, _ = rate(calm, 60 * minutes * CALM_PART)
    print(f"without faults: {without:.2f} steps/s, {len(calm.violations())} violations", flush=True)
    saboteur = Saboteur(torn, seed, only)
    with_faults, finished = rate(torn, 60 * minutes, saboteur)
    violations = [*calm.violations(), *torn.violations()]
    for violation in violations[:50]:
        print(violation, flush=True)
    if violations or not finished or torn.ended:
        evidence = Path(tempfile.mkdtemp(prefix="chaos-run-"))
        shutil.copytree(torn.folder, evidence / "run")
        shutil.copytree(logs, evidence / "logs", ignore=shutil.ignore_patterns("disk"))
        print(f"the run is in {evidence}", flush=True)
    known = ("reset", "black hole", "slow link", "disk full", "clock jump")
    return {
        "faults": saboteur.counts.total(),
        "kinds": dict(sorted(saboteur.counts.items())),
        "left_out": [name for name in known if not any(kind.startswith(name) for kind in saboteur.kinds)],
        "violations": len(violations),
        "finished": finished,
        "ended": len(torn.ended),
        "steps": torn.lives.trained,
        "resumes": torn.lives.count - 1,
        "kept": round(with_faults / without, 3),
    }


@contextlib.contextmanager
def own_world() -> Iterator[tuple[Path, Path]]:
    """A small file system for the runs, if this process has mounts of its own, else a folder; and one for logs."""
    given = os.environ.get(OWN_WORLD)
    if given is None:
        with scratch_folder("chaos") as scratch:
            yield scratch, scratch
        return
    disk = Path(given) / "disk"
    disk.mkdir()
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(disk)], check=True)
    yield disk, Path(given)


def enter_own_world() -> None:
    """Start again in a network and with mounts of its own, where that is allowed."""
    private = ["unshare", "--net", "--mount"]
    if OWN_WORLD in os.environ or not shutil.which("unshare"):
        return
    if subprocess.run([*private, "true"], check=False, capture_output=True).returncode:
        return
    with scratch_folder("chaos") as scratch:
        again = subprocess.run(
            [*private, sys.executable, "-m", "benchmarks.chaos", *sys.argv[1:]],
            env=os.environ | {OWN_WORLD: str(scratch)},
            check=False,
        )
    sweep_faketime()
    sys.exit(again.returncode)


def sweep_faketime() -> None:
    """Remove the shared memory of libfaketime whose process was killed."""
    for path in Path("/dev/shm").glob("*faketime_s*_*"):
        owner = path.name.rpartition("_")[2]
        if owner.isdigit() and not Path("/proc", owner).exists():
            path.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="faults with this in their names, such as `player`")
    parser.add_argument("--smoke", action="store_true", help="half a minute, to check that it runs")
    parser.add_argument("--audit", type=Path, metavar="RUN_DIR", help="no run: audit this one")
    options = parser.parse_args()
    if options.audit:
        found = audit(options.audit)
        print(*(f"{violation.invariant}: {violation.what}" for violation in found), sep="\n")
        print(json.dumps({"violations": len(found)}))
        return
    enter_own_world()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with own_world() as (scratch, logs):
        minutes = 0.4 if options.smoke else options.minutes
        print(json.dumps(chaos(minutes, options.seed, scratch, logs, options.only)))


if __name__ == "__main__":
    main()
