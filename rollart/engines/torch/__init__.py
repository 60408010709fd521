"""The embedded engine: continuous batching around any transformers decoder.

From the outside in: `engine` (asyncio and the stepping thread), `stepper` (one step, synchronous), `batch` (who runs,
who waits), `sequence` (one request), `model` (the transformers model and its weights), `step` and `attention` (one
forward pass over a flat row of tokens), `sampler`, `kv_rows` and `kv_cache` (KV of running and of kept sequences),
`prefix_cache` (index of shared prefixes), `kv_transfer` (KV for and from other engines), `swap_cost`, `pace` (emulation
of another device).
"""
