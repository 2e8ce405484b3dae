"""Whole states: parameters, optimizer, normalisation.

| to … | modules |
|---|---|
| take one from a peer | `state_transfer`, `state_transfer`, `node.swarm_view` |
| give one | `state_transfer` |
| keep it on disk | `checkpoints`, `swarm_memory`, `atomic` |
"""
