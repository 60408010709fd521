"""Robot policies: networks that map observations to chunks of continuous actions, learnt by imitation, tuned by RL.

Actions are numbers, not tokens, so nothing here passes through engines, turns or samples. A policy takes less than a
millisecond, so it lives beside the controller, batched over the environments that wait for it.
"""
