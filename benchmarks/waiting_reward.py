"""A reward that waits for something else, as judges and test runs do."""

import time

SCORE_S = 0.05


def waits(episode: object) -> float:
    time.sleep(SCORE_S)
    return 1.0
