"""Reward functions that are served, as users write them: attributes, no imports."""

import threading

calls = []
release = threading.Event()


def counted(episode):
    calls.append(episode.id)
    return float(len(calls))


counted.version = "2"


def lengths(episodes, scale=1.0):
    calls.append([episode.id for episode in episodes])
    if any(episode.info.get("bad") for episode in episodes):
        raise ValueError("a bad one")
    return [scale * len(episode.id) for episode in episodes]


lengths.batch = 4


def too_few(episodes):
    return []


too_few.batch = 4


def slow(episode):
    release.wait(30)
    return 1.0


slow.timeout = 0.05


def loud(episode):
    raise SystemExit("not so fast")


def echo(episode, word=""):
    return {"": 0.0, "one": 1.0}[word]
