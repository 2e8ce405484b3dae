"""Processes of this node.

| to … | modules |
|---|---|
| start and end one, and talk to it | `child_process`, on which `learner_link` and `group_process` stand |
| log what it prints | `child_process` |
| keep a learner running | `supervisor`, `restarts`, `hang_watchdog` |
| say how it works | `supervisor` (learner mode, posts), `stage_port` (pipelines), `supervisor` (strategies) |
| run several on one vector | `learner_pool` |
| run torch.distributed beside it | `group_process` |
"""
