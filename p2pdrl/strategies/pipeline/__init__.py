"""Pipelines over the peers of a swarm: who holds which stage, formed anew whenever somebody comes or goes.

| to … | look at |
|---|---|
| follow a node from view to view | `strategy`, and `view_work` within one view |
| see who is in which pipeline | `layout` (pure) |
| see what of the options can't be had | `limits` (pure) |
| see who holds which blocks, and whether a pipeline pays | `planning` (pure) |
| see what carries activations, and what becomes of that | `backend` (pure), `trial` |
| form one | `lead` (the head), `recruit` (every other rank), `calls`, `joints` (their pipes), `orders` |
| find the newest state | `state` |
| follow one generation, and the learner in it | `term` |
| have several pipelines agree | `heads` |
| know how fast links are | `probe`, `links` |
| see what is said between nodes, and what is asked of the node | `messages`, `port` |
| know what stages may take, and what state copies move | `memory`, `copies` |
| see what people are told | `telling`, `figures` |
"""
