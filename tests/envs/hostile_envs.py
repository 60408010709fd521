"""Environments that misbehave on demand. Imported by the host, not by pytest."""

import os
import random
import sys
import time
from pathlib import Path


class Plain:
    """Answers from the table `answers`, in turn; says who and how old it is."""

    reusable = True

    def __init__(self, answers=(), first="hello", held_out=False):
        self.answers, self.first, self.held_out = list(answers), first, held_out
        self.resets = 0

    def reset(self, seed):
        self.resets += 1
        self.steps = iter(self.answers)
        return self.first

    def step(self, action):
        if action == "who":
            return f"{os.getpid()} {self.resets} {self.held_out} {random.random()}", None, False
        return next(self.steps)

    def close(self):
        pass


class Wrapper(Plain):
    """Says whether the module of `inner` is there, without importing it."""

    def __init__(self, inner, **others):
        super().__init__(first=str(inner.partition(":")[0] in sys.modules))


class Bad:
    """Does `what` in reset or, after `step:`, in a step."""

    def __init__(self, what, marker=""):
        self.what, self.marker = what, marker

    def reset(self, seed):
        if not self.what.startswith("step:"):
            self.act(self.what)
        return "ready"

    def step(self, action):
        self.act(self.what.removeprefix("step:"))
        return "fine", 0.0, False

    def act(self, what):
        if what == "hang":
            time.sleep(3600)
        elif what == "exit":
            os._exit(9)
        elif what == "raise":
            raise KeyError("lost")
        elif what == "once" and not Path(self.marker).exists():
            Path(self.marker).touch()
            os._exit(1)


class Lingering(Plain):
    """A step of `stay` touches the marker and does not return."""

    def step(self, action):
        if action == "stay":
            Path(self.first).touch()
            time.sleep(3600)
        return super().step(action)


class LingeringOnce(Lingering):
    reusable = False


class Closing:
    def __init__(self, marker):
        self.marker = marker

    def reset(self, seed):
        return "x"

    def step(self, action):
        return "x", 0, True

    def close(self):
        Path(self.marker).touch()


class Stuck:
    """Hangs in its reset for `seed`, but only the first `times`; `folder` keeps who did."""

    reusable = True

    def __init__(self, folder, seed, times=1):
        self.folder, self.seed, self.times = Path(folder), seed, times

    def reset(self, seed):
        if seed == self.seed and len(list(self.folder.iterdir())) < self.times:
            (self.folder / str(os.getpid())).touch()
            time.sleep(3600)
        return str(os.getpid())

    def step(self, action):
        return str(os.getpid()), 0.0, True

    def close(self):
        pass


class Single:
    """Does not say that it may be used again. `close` leaves a mark, or hangs."""

    made = 0

    def __init__(self, folder, hang=False):
        self.folder, self.hang = Path(folder), hang

    def reset(self, seed):
        Single.made += 1
        return f"{os.getpid()} {Single.made}"

    def step(self, action):
        return "x", 0.0, True

    def close(self):
        (self.folder / str(os.getpid())).touch()
        if self.hang:
            time.sleep(3600)


class Light:
    """A counter that many episodes may share a process with. Some actions are hostile, but only once per `marker`."""

    reusable = True
    isolation = "shared"

    def __init__(self, marker="", drifts=False):
        self.marker, self.drifts = marker, drifts

    def reset(self, seed):
        self.seed, self.count = seed, 0
        return f"seed {seed}"

    def step(self, action):
        self.count += 1
        if action == "raise":
            raise ValueError("on purpose")
        if action in ("die", "hang") or (action == "die once" and not Path(self.marker).exists()):
            Path(self.marker or os.devnull).touch()
            os._exit(4) if action != "hang" else time.sleep(3600)
        who = f" in {os.getpid()}" if action == "who" or self.drifts else ""
        return f"{self.seed}: {self.count}{who}", 0.0, action == "end"

    def close(self):
        pass
