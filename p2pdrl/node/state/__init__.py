"""Whole states: parameters, optimizer, normalisation.

| to … | modules |
|---|---|
| adopt a peer's, and give ours | `state_transfer` |
| keep it on disk | `checkpoints`, `atomic` (files written whole or not at all) |
| remember the swarm: task, lineage, mode, stop condition | `swarm_memory` |
"""
