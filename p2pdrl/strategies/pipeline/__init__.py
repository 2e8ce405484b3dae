"""Pipelines over the peers of a swarm: who holds which stage, formed anew whenever somebody comes or goes.

| to … | look at |
|---|---|
| follow a node from view to view, and within one | `strategy` |
| see who is in which pipeline, and which options it can't have | `layout` (pure) |
| see who holds which blocks, and whether a pipeline pays | `planning` (pure) |
| see what carries activations, and what becomes of that | `backend` (pure) |
| form one: the coordinator (rank 0) and every other rank | `forming` |
| see how ranks are called, and their pipes opened | `connections` |
| follow one generation, the learner in it, and what state copies move | `generation` |
| have several pipelines agree | `rank0_gossip` |
| know how fast links are | `link_probe` |
| see what is said between nodes, and what is asked of the node | `messages`, `port` |
| see what people are told | `events` |
"""
