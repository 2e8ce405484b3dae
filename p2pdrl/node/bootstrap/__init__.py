"""To come up, and to find or found a swarm.

| to … | modules |
|---|---|
| have a place, a port and a swarm | `datadir`, `startup` |
| judge joins, and join | `node.admission`, `joining` (rules) |
| begin with a state | `first_state` |
"""
