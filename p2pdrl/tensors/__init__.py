"""Flat float32 vectors: their layout, how they mix, travel, and pass between processes. Torch-free.

| module | noun |
|---|---|
| `layout` | names and shapes of the parameters inside one flat vector, and their hash |
| `sidecar` | typed state beside the vector (optimizer, normaliser), each item with its merge rule |
| `moments` | running count, mean and M2, merged from cumulative per-node counters |
| `mix` | pair averaging, norms and the poison check, in place and chunked |
| `wire` | float32 and bfloat16 on the wire; how long vectors are walked in cache-sized pieces |
| `compression` | fewer bytes on the wire, with error feedback: int8, top-k, threshold |
| `positions` | where the entries of a sparse message lie |
| `robust` | several nodes' vectors become one: mean, centered clipping, trimmed mean |
| `optimizers` | update rules, and what a parameter server steps its shard with |
| `shared_memory` | anonymous shared memory: sequence lock, gradients, one vector for several learners |
| `board` | the one meeting point of learner and daemon: the delta rule |
| `shared_policy`, `unroll_ring` | the policy for actor processes, and unrolls from them |
| `checkpoint` | vector, sidecar and metadata as one safetensors file |

Used by the learner process, the strategies and their exchanges, the state transfer and checkpoints.
Modules are imported by their own names: this package exports nothing.
"""

from __future__ import annotations

__all__: list[str] = []
