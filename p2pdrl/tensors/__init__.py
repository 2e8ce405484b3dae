"""Flat float32 vectors: their layout, how they mix, travel, and pass between processes. Torch-free.

| module | noun |
|---|---|
| `layout` | names and shapes of the parameters inside one flat vector, and their hash |
| `sidecar` | typed state beside the vector (optimizer, normaliser), each item with its merge rule |
| `moments` | running count, mean and M2, merged from cumulative per-node counters |
| `mix` | pair averaging, norms and the poison check, in place and chunked |
| `wire` | float32 and bfloat16 on the wire |
| `compression` and its kinds | fewer bytes on the wire, with error feedback: int8, top-k, threshold |
| `positions` | where the entries of a sparse message lie |
| `robust` | several nodes' vectors become one: mean, centered clipping, trimmed mean |
| `optimizers` | what a parameter server applies to its shard |
| `shared_memory` | anonymous shared memory, and a consistent snapshot of it |
| `gradient_ring`, `shared_memory` | gradients for the daemon; one vector for several learners (Hogwild) |
| `board` | the one meeting point of learner and daemon: the delta rule |
| `board_memory`, `board_state`, `learner_board`, `daemon_board` | its parts |
| `checkpoint` | vector, sidecar and metadata as one safetensors file |
| `wire` | how long vectors are walked in cache-sized pieces |

Used by the learner process, the strategies and their exchanges, the state transfer and checkpoints.
Modules are imported by their own names: this package exports nothing.
"""

from __future__ import annotations

__all__: list[str] = []
