"""To come up, and to join or found a swarm.

| to … | modules |
|---|---|
| have a data folder, an identity, a port | `datadir`, `startup` |
| decide whether to join, resume or found | `joining` (pure; `node.admission` runs it) |
| begin with a state | `first_state` |
"""
