"""Child processes of a node: the learner, the group process, and evaluation for the command line.

`protocol` and `stage_protocol` (learner) and `group_protocol` (torch.distributed) are torch-free and shared
with the daemon; everything else here runs in a child.

| child | modules |
|---|---|
| `learner` | `mailbox` (its end of the socket), `replica`, `regimes`, `posts`, `stepping`, `crash` |
| as a stage of a pipeline | `staging`, `seats`, `pipe_carrier`, `block_measuring`, `gpu` |
| over torch.distributed | `torch_stages`, `order_watch` |
| `group` | `torch_group`, `torch_meeting` |
| `evaluator`, `block_lister` (for the command line) | |
| all | `parent`, `output` |
"""
