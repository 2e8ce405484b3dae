"""Child processes of a node: the learner, the group process, and evaluation for the command line.

`protocol` (learner) and `group_protocol` (torch.distributed) are torch-free and shared with the daemon;
everything else here runs in a child.
"""
