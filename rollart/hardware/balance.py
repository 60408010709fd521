"""The split of tasks over pools that keeps all pools busy and finishes first (multiplicative weights).

Every pool has a price, which grows with its load. In each round every task goes to the pool where its work is cheapest
at the current prices; the share of rounds on each pool converges to the best split. So a pool serves what it is best at
compared with the others, not everything it is fast at.
"""

import math
from collections.abc import Mapping

_ROUNDS = 400
_RATE = 0.05


def balanced(seconds: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """From the seconds that each pool would need for all of a task, the share of the task that it should get.

    >>> balanced({"read": {"new": 1.0, "old": 4.0}, "write": {"new": 1.5, "old": 1.0}})
    {'read': {'new': 1.0, 'old': 0.0}, 'write': {'new': 0.0, 'old': 1.0}}
    """
    prices = dict.fromkeys({pool for task in seconds.values() for pool in task}, 1.0)
    rounds = {task: dict.fromkeys(pools, 0) for task, pools in seconds.items()}
    scale = sum(min(pools.values()) for pools in seconds.values())
    tasks = [(list(pools.items()), rounds[task]) for task, pools in seconds.items()]
    for _ in range(_ROUNDS):
        load = dict.fromkeys(prices, 0.0)
        for pools, counts in tasks:
            cheapest, work = pools[0]
            lowest = prices[cheapest] * work
            for pool, each in pools:
                if prices[pool] * each < lowest:
                    cheapest, work, lowest = pool, each, prices[pool] * each
            counts[cheapest] += 1
            load[cheapest] += work
        for pool, seconds_given in load.items():
            prices[pool] *= math.exp(_RATE * seconds_given / scale)
    return {task: {pool: number / _ROUNDS for pool, number in counts.items()} for task, counts in rounds.items()}
