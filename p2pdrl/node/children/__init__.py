"""Processes of this node.

| to … | modules |
|---|---|
| start and end one, and talk to it | `process_link`, on which `learner_link` and `group_link` stand |
| log what it prints | `output` |
| keep a learner running | `supervisor`, `deaths`, `hanging` |
| say how it works | `workplace` (regime, posts), `stage_port` (pipelines), `learner_port` (strategies) |
| run several on one vector | `crew`, `helper` |
| run torch.distributed beside it | `group_process` |
"""
