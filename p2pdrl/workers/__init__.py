"""Child processes of a node: the learner, the group process, and evaluation for the command line.

`protocol` and `pipeline.protocol` (learner) and `torch_group.protocol` (torch.distributed) are torch-free and
shared with the daemon; everything else here runs in a child.

| child | modules |
|---|---|
| `learner` | `mailbox` (its end of the socket), `replica`, `learner_modes`, `requests`, `child` |
| as a stage | `pipeline.stage_runner`, `pipeline.rank`, `pipeline.pipe_carrier`, `pipeline.measure` |
| over torch.distributed | `pipeline.torch_stages` |
| `torch_group.process` | `torch_group.process`, `torch_group.rendezvous` |
| `evaluator`, `pipeline.measure` (for the command line) | |
| all | `child` |
"""
