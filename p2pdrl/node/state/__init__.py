"""Whole states: parameters, optimizer, normalisation.

| to … | modules |
|---|---|
| adopt a peer's, and give ours | `state_transfer` |
| keep it on disk | `checkpoints` |
| remember the swarm: task, lineage, mode, stop condition | `swarm_memory` |
"""
