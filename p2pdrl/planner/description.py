"""What a swarm is made of, as far as speed goes: machines, links, churn, and what calls cost.

Everything is a frozen struct with strict names, so that a TOML file becomes a description by
`msgspec.convert`. Rates are in bytes per second, times in seconds.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

__all__ = [
    "LAN",
    "LOOPBACK",
    "MAX_NODES",
    "WAN",
    "CallCosts",
    "Churn",
    "Machine",
    "NodeLink",
    "Pair",
    "SwarmDescription",
    "Update",
]

MAX_NODES = 1000
TALKED = 32
"""Members beyond which membership's traffic is taken to grow no further."""
Positive = Annotated[float, Meta(gt=0, le=1e15)]
NonNegative = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(ge=0, lt=1)]


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How fast a node computes."""

    update_s: Positive = 0.1
    """One update of the learner, or one gradient, when nobody disturbs it."""
    jitter: Share = 0.05
    """Each update takes longer or shorter by up to this share, uniformly."""
    factor: Positive = 1.0
    """How many times slower than that this machine is; beyond `SLOW` it is told apart as a straggler."""


class NodeLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A node's connection to all others; between two nodes the delays of both add up."""

    delay_s: NonNegative = 0.0001
    """One way, this node's part."""
    jitter_s: NonNegative = 0.0
    """Up to so much more, uniformly."""
    out_bytes_s: Positive = 1.25e8
    """Upload."""
    in_bytes_s: Positive = 1.25e8
    """Download."""
    loss: Share = 0.0
    """Share of packets lost. TCP sends them again: it costs time, and rate on long ways."""


LOOPBACK = NodeLink(delay_s=0.00002, out_bytes_s=2e9, in_bytes_s=2e9)
"""Processes of one machine."""
LAN = NodeLink(delay_s=0.0001, out_bytes_s=1.25e8, in_bytes_s=1.25e8)
"""Gigabit Ethernet, one switch."""
WAN = NodeLink(delay_s=0.02, jitter_s=0.005, out_bytes_s=2.5e6, in_bytes_s=1.25e7, loss=0.001)
"""Homes: 20 Mbit/s up, 100 down, 40 ms to each other."""


class Update(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a learner's update is made of, and how far it can be divided among several (`task.scaling`)."""

    rows: Annotated[int, Meta(ge=1)] = 256
    """Environment steps of each of its gradients, while it isn't divided."""
    parts: Annotated[int, Meta(ge=1)] = 16
    """Among how many learners it can be divided: each makes 8 steps of 8 environments at least, and
    ``unroll_steps`` of 128 in 8 environments are 16 parts. More learners than that enlarge it."""
    fixed: Share = 0.1
    """Share of ``update_s`` that any part of it takes: what a gradient costs, however few rows it has."""
    critical_rows: NonNegative = 0.0
    """Of a gradient: where it takes twice the least number of updates, and twice the least number of rows
    (McCandlish 2018, arXiv 1812.06162); `p2pdrl status` measures it. 0: nobody knows; half of ``rows`` is
    taken then."""


class Pair(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is special between two nodes, both ways."""

    one: Annotated[int, Meta(ge=0)]
    """Place of a node, from 0."""
    other: Annotated[int, Meta(ge=0)]
    """Place of the other."""
    delay_s: NonNegative
    """One way, in all."""
    bytes_s: Positive = 1e15
    """No faster than this."""


class Churn(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Nodes that come and go, in the whole swarm, at random moments."""

    kills_per_minute: NonNegative = 0.0
    """Nodes that end without a word."""
    joins_per_minute: NonNegative = 0.0
    """Nodes that come, each like one that was there at first."""
    detect_s: Positive = 3.0
    """Until all know that a node is dead."""
    regroup_s: Positive = 1.0
    """How long strategies with a group stand still when its members change."""


class CallCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the daemon's work costs.

    The defaults come from `scripts/check_planner.py` on loopback, two cores of a virtual server of 2026.
    """

    call_s: NonNegative = 0.001
    """Processor time of one call at each of its ends: HTTP and checks."""
    byte_s: NonNegative = 2.5e-9
    """Processor time per byte of payload at each end: encode, copy, decode, check, mix."""
    post_s: NonNegative = 0.002
    """From the learner's request to the daemon's work on it, and the same back."""
    call_bytes: NonNegative = 650.0
    """Bytes of one call beside its payload, both ways together: head, metadata, MACs; half each way."""
    background_bytes_s: NonNegative = 2000.0
    """Each way, for each member of the swarm: probes, rumours and digests. Measured with 4 and with 8 nodes;
    beyond `TALKED` members it is taken to grow no further, which nobody has measured."""
    cores: Annotated[int, Meta(ge=0, le=4096)] = 0
    """Cores that all daemons share, when all nodes run on one machine; 0: each node has one of its own."""


SLOW = 1.5
"""Factor from which on a machine counts as a straggler."""


class SwarmDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A whole swarm: nodes take machines and links in turn, round and round.

    Example:
        >>> SwarmDescription(nodes=3, machines=(Machine(), Machine(), Machine(factor=10))).stragglers
        (2,)
    """

    nodes: Annotated[int, Meta(ge=1, le=MAX_NODES)] = 4
    """How many there are at first."""
    size: Annotated[int, Meta(ge=1, le=10**10)] = 10_000
    """D, parameters."""
    machines: Annotated[tuple[Machine, ...], Meta(min_length=1)] = (Machine(),)
    links: Annotated[tuple[NodeLink, ...], Meta(min_length=1)] = (LAN,)
    update: Update = Update()
    pairs: tuple[Pair, ...] = ()
    churn: Churn = Churn()
    costs: CallCosts = CallCosts()
    moved: Annotated[float, Meta(gt=0, le=1)] = 0.01
    """Share of the entries that one message of a threshold (``strom``, ``compression = threshold``) names."""

    def machine(self, node: int) -> Machine:
        """The machine of node number ``node``; those that join are counted on."""
        return self.machines[node % len(self.machines)]

    def link(self, node: int) -> NodeLink:
        """The same for its link."""
        return self.links[node % len(self.links)]

    @property
    def stragglers(self) -> tuple[int, ...]:
        """Nodes whose machines are slower than `SLOW` times the fastest."""
        speeds = [self.machine(node).update_s * self.machine(node).factor for node in range(self.nodes)]
        bound_s = SLOW * min(speeds)
        return tuple(node for node, update_s in enumerate(speeds) if update_s > bound_s)
