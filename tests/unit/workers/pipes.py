"""Pipes between ranks, as the daemons would have opened them."""

from __future__ import annotations

import os

from p2pdrl.transport.pipe.ticket import PipeTicket

from ..transport.pipes import KEYS, tcp_pair


def joined(ranks, circle=False, keys=KEYS):
    """What each rank's learner is given: descriptors and tickets by side."""
    pipes = [{} for _ in range(ranks)]
    for rank in range(ranks if circle else ranks - 1):
        one, other = tcp_pair()
        pipes[rank]["next"] = (one.detach(), PipeTicket(keys, b""))
        pipes[(rank + 1) % ranks]["previous"] = (other.detach(), PipeTicket(keys and keys[::-1], b""))
    return pipes


def close_all(pipes):
    for one in pipes:
        for fd, _ in one.values():
            os.close(fd)
