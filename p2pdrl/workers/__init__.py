"""Child processes of a node: the learner, and evaluation for the command line.

`protocol` is torch-free and shared with the daemon; everything else here runs in a child.
"""
