"""Processes of this node.

| to … | modules |
|---|---|
| start and end a process, talk to it, log what it prints | `child_process` |
| keep a learner running, and carry its requests to the strategy | `supervisor` over `learner_link` |
| notice that one hangs, and when to restart or give up | `hang_watchdog`, `restarts` |
| have it be a rank of a pipeline | `stage_port` |
| run several on one vector (Hogwild) | `learner_pool` |
| run actors | `actors` |
| run torch.distributed beside them | `group_process` |
"""
