"""Crashes in one way of the chaos wrapper. Imported by the host, not by pytest."""

from benchmarks.fault_injection import crash


class Crashing:
    def __init__(self, how):
        self.how = how

    def reset(self, seed):
        crash(self.how)

    def step(self, action):
        return "x", 0.0, True

    def close(self):
        pass
