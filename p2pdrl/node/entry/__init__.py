"""To come up, and to find or found a swarm.

| to … | modules |
|---|---|
| have a place, a port and a swarm | `datadir`, `endpoint`, `opening` |
| judge joins, and join | `gate`, `joining` (rules) |
| begin with a state | `first_state` |
"""
