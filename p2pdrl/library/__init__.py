"""p2pdrl as a Python library: what ``import p2pdrl`` offers, each name imported when it is first used.

`policy` (a trained policy in this process), `run` (a node that trains, in a child process of this one),
`client` (a running node, wherever it is), `names` (a user's own environments and networks by names).
`node_process` is one node as a child process, also for the command line.
"""
