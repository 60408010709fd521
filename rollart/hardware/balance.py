"""Which part of each task's work goes to which pool when all pools are kept busy and end together.

Every pool has a price that grows while it is given more than others. Round after round each task goes where its work
is cheapest at the prices of the moment; the share of rounds that it spent on a pool approaches the split that ends
first (multiplicative weights). So a pool serves what it is best at compared with the others, not all it is fast at.
"""

import math
from collections.abc import Mapping

_ROUNDS = 400
_RATE = 0.05


def balanced(seconds: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """From the seconds that each pool would take for all of a task, the share of the task that it should get.

    >>> balanced({"read": {"new": 1.0, "old": 4.0}, "write": {"new": 1.5, "old": 1.0}})
    {'read': {'new': 1.0, 'old': 0.0}, 'write': {'new': 0.0, 'old': 1.0}}
    """
    prices = dict.fromkeys({pool for task in seconds.values() for pool in task}, 1.0)
    rounds = {task: dict.fromkeys(pools, 0) for task, pools in seconds.items()}
    scale = sum(min(pools.values()) for pools in seconds.values())
    tasks = [(list(pools.items()), rounds[task]) for task, pools in seconds.items()]
    for _ in range(_ROUNDS):
        load = dict.fromkeys(prices, 0.0)
        for pools, told in tasks:
            cheapest, work = pools[0]
            least = prices[cheapest] * work
            for pool, each in pools:
                if prices[pool] * each < least:
                    cheapest, work, least = pool, each, prices[pool] * each
            told[cheapest] += 1
            load[cheapest] += work
        for pool, given in load.items():
            prices[pool] *= math.exp(_RATE * given / scale)
    return {task: {pool: number / _ROUNDS for pool, number in told.items()} for task, told in rounds.items()}
