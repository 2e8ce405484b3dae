"""Whole states: parameters, optimizer, normalisation.

| to … | modules |
|---|---|
| take one from a peer | `adoption`, `state_transfer`, `quarantine` |
| give one | `giving` |
| keep it on disk | `saving`, `checkpoints`, `saved_mode`, `atomic` |
"""
