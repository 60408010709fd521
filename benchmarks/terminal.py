"""What a shell in a sandbox costs: time to start it, time of a command, an episode with its verification, memory.

    python benchmarks/terminal.py [--rounds 40] [--processes 20] [--image NAME [--pause 3]]

The last line is one JSON object. Times are medians: `start_ms` until the first command could be sent, `plain_bash_ms`
the same for a bash without a sandbox, `command_ms` of `true`, `process_ms` of a command that is a program,
`episode_ms` of a scripted episode in this process, verification included. `mb_per_process` is the private memory of all
that one more sandbox adds. With `--image`, which must be on this machine, `image_cold_ms` is the start of a sandbox in
it, and `image_warm_ms` that of one whose container was started ahead, `--pause` seconds after the one before.
"""

import argparse
import json
import random
import re
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from rollart.envs.terminal import Terminal, player
from rollart.sandbox.shell import Sandbox
from rollart.sandbox.start import SandboxStarter, start_sandbox


def median_ms(rounds: int, do: Callable[[], object]) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        do()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1000


def private_mb(pid: int) -> float:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(value) for value in re.findall(r"Private_\w+:\s+(\d+) kB", text)) / 1024


def starts(rounds: int) -> tuple[float, float]:
    """Of a sandbox and of a bash alone, interleaved."""
    boxed, plain = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        with Sandbox():
            boxed.append(time.perf_counter() - began)
        began = time.perf_counter()
        subprocess.run(["bash", "--norc", "--noprofile", "-c", ":"], check=True, timeout=60)
        plain.append(time.perf_counter() - began)
    return statistics.median(boxed) * 1000, statistics.median(plain) * 1000


def image_starts(image: str, rounds: int, pause: float) -> dict[str, float]:
    cold, warm = [], []
    starter = SandboxStarter(image=image)
    for _ in range(rounds):
        began = time.perf_counter()
        with start_sandbox(image=image):
            cold.append(time.perf_counter() - began)
        time.sleep(pause)  # the episode that the container ahead has time to start in
        began = time.perf_counter()
        with starter.start():
            warm.append(time.perf_counter() - began)
    starter.close()
    medians = {"image_cold_ms": statistics.median(cold), "image_warm_ms": statistics.median(warm)}
    return {name: round(value * 1000, 1) for name, value in medians.items()}


def memory(processes: int) -> float:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    made = [Sandbox() for _ in range(processes)]
    try:
        added = [child.pid for child in psutil.Process().children(recursive=True) if child.pid not in before]
        return sum(map(private_mb, added)) / processes
    finally:
        for sandbox in made:
            sandbox.close()


def episode(environment: Terminal, seed: int) -> None:
    environment.reset(seed)
    done = False
    while not done:
        step = environment.step(player(environment, random.Random(0), skill=1.0))
        done = step["done"]
    assert step["reward"] == 1.0, environment.problem


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--processes", type=int, default=20)
    parser.add_argument("--image", metavar="NAME", help="an OCI image, to measure its starts too")
    parser.add_argument("--pause", type=float, default=3.0, help="seconds of an episode in the image")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to check that it runs")
    options = parser.parse_args()
    if options.smoke:
        options.rounds, options.processes = 2, 2
    start, plain = starts(options.rounds)
    with Sandbox() as sandbox:
        command = median_ms(10 * options.rounds, lambda: sandbox.run("true"))
        process = median_ms(2 * options.rounds, lambda: sandbox.run("/bin/true"))
    environment, seeds = Terminal(), iter(range(options.rounds))
    played = median_ms(options.rounds, lambda: episode(environment, next(seeds)))
    print(
        json.dumps(
            {
                "start_ms": round(start, 1),
                "plain_bash_ms": round(plain, 1),
                "command_ms": round(command, 2),
                "process_ms": round(process, 2),
                "episode_ms": round(played, 1),
                "mb_per_process": round(memory(options.processes), 2),
                **(image_starts(options.image, max(2, options.rounds // 4), options.pause) if options.image else {}),
            }
        )
    )


if __name__ == "__main__":
    main()
