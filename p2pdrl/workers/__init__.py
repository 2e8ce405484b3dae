"""Child processes of a node: learners, actors, the group process, and evaluation for the command line.

`protocol` (learners, actors), `pipeline.protocol` and `torch_group.protocol` (torch.distributed) are
torch-free and shared with the daemon; everything else here runs in a child.

| child | modules |
|---|---|
| `learner` | `mailbox` (its end of the socket), `replica`, `learner_modes`, `actor_source` |
| as a stage | `pipeline.stage_runner`, `pipeline.rank`, `pipeline.pipe_carrier`, `pipeline.measure` |
| over torch.distributed | `pipeline.torch_stages` |
| `actor` | |
| `torch_group.process` | `torch_group.process`, `torch_group.rendezvous` |
| `evaluator`, `pipeline.measure` (for the command line) | |
| all | `child` |
"""
