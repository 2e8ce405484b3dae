"""Every constant of the membership protocol, with its formula and its trade-off.

The daemon takes `MembershipConfig.lan` or `MembershipConfig.wan`; tests and the simulator
change single fields with ``dataclasses.replace``. Durations are in seconds.

Papers: SWIM (Das, Gupta, Motivala 2002); Lifeguard (Dadgar, Phillips, Currey 2018,
arXiv 1707.00788), section IV.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["MembershipConfig"]


@dataclass(frozen=True, slots=True)
class MembershipConfig:
    """Parameters of one node's failure detector and dissemination.

    The defaults are those of a local network.
    """

    probe_interval_s: float = 1.0
    """Time between two probes of one node. Each member is probed once an interval on average,
    so shorter finds deaths sooner and costs two messages a member each time."""
    probe_jitter: float = 0.1
    """Each interval is drawn from ±this fraction, so that nodes don't beat in step. 0: none."""
    probe_timeout_s: float = 0.5
    """How long the probed node may take before others are asked to try. Above the 99th percentile
    of the round trip; longer delays detection, shorter asks relays needlessly."""
    indirect_probes: int = 3
    """Relays asked when a probe times out (SWIM's k). 0 trusts each node's own path alone."""
    nack_fraction: float = 0.8
    """A relay that had no answer says so after this fraction of the probe timeout: a relay that
    says nothing at all points at ourselves (Lifeguard, local health)."""
    suspicion_multiplier: float = 4.0
    """Minimum suspicion = multiplier · max(1, log10 N) · probe interval. Longer survives longer
    pauses, shorter buries the dead sooner."""
    suspicion_max_factor: float = 6.0
    """Maximum suspicion = this · minimum; reached when nobody else confirms. 1 switches the
    dependence on confirmations off."""
    suspicion_confirmations: int = 2
    """Accusers besides the first that bring the timer down to its minimum (Lifeguard's K)."""
    second_opinions: int = 4
    """How many members, on average, probe a newly suspected one at once: confirms a death within
    one gossip round, and lets a living one refute. 0 leaves it to the usual round."""
    awareness_max: int = 7
    """Worst local health; interval and deadline of probes are multiplied by (health + 1)."""
    lag_s: float = 0.25
    """A timer later than this means that this node itself was held up."""
    piggyback_records: int = 16
    """Most records that ride on one message."""
    piggyback_bytes: int = 32_768
    """Most bytes of records that ride on one message."""
    retransmit_multiplier: float = 4.0
    """Each record is sent multiplier · ⌈log10(N + 1)⌉ times by each node that learns it."""
    gossip_interval_s: float = 0.5
    """Time between rounds of event gossip; only while there is something to tell."""
    gossip_fanout: int = 3
    """Members told in each round."""
    sync_interval_s: float = 30.0
    """Time between two push-pulls up to 32 members; above, times 1 + ⌈log2(N / 32)⌉."""
    reconnect_interval_s: float = 10.0
    """Time between tries to reach one dead member, made with probability dead / alive."""
    dead_tombstone_s: float = 24 * 3600.0
    """How long a dead member is remembered, and tried again."""
    left_tombstone_s: float = 3600.0
    """How long one that left is remembered."""
    max_members: int = 4096
    """Most members in the view, tombstones included; the oldest tombstone gives way first."""
    introduced_at_once: float = 32.0
    """Newcomers that are taken in on one member's word at once, or from one network (four times as many)
    on their own; those beyond answer a ping first. More lets a liar show more members that aren't there."""
    introduced_per_s: float = 1.0
    """How many more each second."""
    introduced_waiting: int = 64
    """Most newcomers of one member that wait to be pinged (eight times as many of all); who finds no room
    is passed over, and comes again with the next push-pull."""
    introduced_in_vain: int = 4
    """So many that never answered, within ``introduced_in_vain_s``, and whomever a member introduces is
    pinged first."""
    introduced_in_vain_s: float = 3600.0
    max_records_per_answer: int = 1024
    """Most records in one answer to a join or push-pull; the rest follows in the next one."""
    future_s: float = 600.0
    """An incarnation further in the future than this is refused."""
    leave_fanout: int = 3
    """Members told directly of our leaving."""

    @classmethod
    def lan(cls) -> MembershipConfig:
        """Round trips of milliseconds."""
        return cls()

    @classmethod
    def wan(cls) -> MembershipConfig:
        """Round trips of up to a second or two."""
        return cls(
            probe_interval_s=5.0,
            probe_timeout_s=3.0,
            suspicion_multiplier=6.0,
            suspicion_confirmations=4,
            gossip_interval_s=1.0,
            gossip_fanout=4,
            sync_interval_s=60.0,
            reconnect_interval_s=30.0,
        )

    def suspicion_min_s(self, living: int) -> float:
        """Shortest suspicion among ``living`` members, ourselves included."""
        return self.suspicion_multiplier * max(1.0, math.log10(max(1, living))) * self.probe_interval_s

    def suspicion_max_s(self, living: int) -> float:
        """Longest suspicion among ``living`` members."""
        return self.suspicion_max_factor * self.suspicion_min_s(living)

    def transmissions(self, living: int) -> int:
        """How often a node sends each record."""
        return math.ceil(self.retransmit_multiplier * math.ceil(math.log10(living + 1)))

    def sync_every_s(self, living: int) -> float:
        """Time between two push-pulls of one node."""
        stretch = 1 if living <= 32 else 1 + math.ceil(math.log2(living / 32))
        return self.sync_interval_s * stretch
