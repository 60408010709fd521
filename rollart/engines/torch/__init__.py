"""The embedded engine: continuous batching around any transformers decoder.

From the outside in: `engine` (asyncio and the stepping thread), `stepper` (one step, synchronous), `batch` (who runs,
who waits), `sequence` (one request), `model` (the transformers model and its weights), `step` and `attention` (one
forward pass over a flat row of tokens), `sampler`, `rows` and `kv_cache` (KV of running and of kept sequences),
`prefixes` (who already has the beginning of a prompt), `handover` and `fetch` (KV for and from other engines), `pace`
(emulation of another device).
"""
