"""Pipelines over the peers of a swarm: who holds which stage, formed anew whenever somebody comes or goes.

| to … | look at |
|---|---|
| follow a node from view to view | `strategy`, and `strategy` within one view |
| see who is in which pipeline | `layout` (pure) |
| see what of the options can't be had | `layout` (pure) |
| see who holds which blocks, and whether a pipeline pays | `planning` (pure) |
| see what carries activations, and what becomes of that | `backend` (pure), `backend` |
| form one | `coordinator` (the head), `rank_setup` (every other rank), `calls`, `connections` (their pipes) |
| find the newest state | `rank_setup` |
| follow one generation, and the learner in it | `generation` |
| have several pipelines agree | `rank0_gossip` |
| know how fast links are | `link_probe` |
| see what is said between nodes, and what is asked of the node | `messages`, `port` |
| know what stages may take, and what state copies move | `rank_setup`, `generation` |
| see what people are told | `events` |
"""
