"""Whole states: parameters, optimizer, normalisation.

| to … | modules |
|---|---|
| take one from a peer | `adoption`, `state_transfer`, `node.swarm_side` |
| give one | `state_server` |
| keep it on disk | `checkpoints`, `saved_mode`, `atomic` |
"""
