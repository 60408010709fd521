"""The embedded engine: continuous batching around any transformers decoder.

From the outside in: `engine` (asyncio and the stepping thread), `stepper` (one step, synchronous), `batch` (who runs,
who waits), `model` (the transformers model and its weights), `step` and `attention` (one forward pass over a flat row
of tokens), `rows` and `parked` (KV of running and of kept sequences), `sampler`.
"""
