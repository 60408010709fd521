"""Constants that are neither in a scenario nor in a data sheet, each set once for all scenarios.

Sections and tables are those of the RollArt paper. The roofline's own two, `COMPUTE_EFFICIENCY` and
`MEMORY_EFFICIENCY`, are in `rollart.hardware.roofline`, as the router predicts with them too.
"""

PASS_S = 0.0015
"""Overhead of a forward pass: scheduling, sampling, launching. An order of magnitude, for an engine with CUDA graphs;
too small to show in the paper's figures."""

ALL_REDUCE_S = 15e-6
"""Latency of one all-reduce between the devices of one engine; there are two a layer."""

MEMORY_FOR_KV = 0.9
"""Share of a device's memory that weights and KV may fill together: the engine's default."""

TRAINING_EFFICIENCY = 0.1
"""Of the peak FLOP/s, for all that a training step does (logprobs of policy and reference, forward, backward,
optimizer), counted as forward and backward once. The step breakdown gives 0.09: 84 s, of which weights take 5, for a
batch of 128 software-engineering trajectories, Qwen3-8B on 32 H800. One-off's gain over Sync+ gives 0.11 to 0.19."""

STORE_PUSH_EFFICIENCY = 0.0195
"""Of the link's rate, from the trainer into a store in another cluster. From the weight transfer table: 16, 30 and 66
GB of Qwen3 8B, 14B and 32B in 32, 68 and 127 s on a link of 25 GB/s."""

STORE_PULL_EFFICIENCY = 0.0445
"""Of the link's rate, from the store into the engines. The same table: 6.2, 16.3 and 29.7 s on a link of 50 GB/s."""

PULL_EXPOSED = 0.3
"""Share of the pull for which engines stand still; the rest overlaps with the push and generation. The same table says
0.23 to 0.33."""

COLLECTIVE_EFFICIENCY = 0.12
"""Of the link's rate, when trainer and engines stop and exchange weights directly. From the comparison of transports:
66 GB in 9.4 s by RDMA on a link of 50 GB/s, in 29.6 s by TCP on one of 25 GB/s."""

LINKS = {"ethernet": 25.0, "infiniband": 50.0}
"""GB/s: 200 Gbit/s between clusters and 400 Gbit/s within one, as in the paper's set-up."""
