"""The view: every other member this node knows of, tombstones included.

The core's parts share one `MemberTable`. It is bounded; a full one gives up its oldest tombstone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from p2pdrl.membership.events import MemberView, State
from p2pdrl.membership.records import MemberRecord, Suspicion
from p2pdrl.membership.suspicion import SuspicionTimer

__all__ = ["Member", "MemberTable", "view_of"]

RTT_WEIGHT = 0.2
"""Weight of the newest round trip in the running mean."""


@dataclass(slots=True)
class Member:
    """One other member.

    Attributes:
        since: when it came into its state.
        reason: plain words for that state, without the age.
        evidence: the accusations held against it while suspect or dead; told to it, so that it
            can refute them.
        generation: counts suspicions; a timer of an earlier one is stale.
        looking: the last probe before it is given up is under way.
    """

    record: MemberRecord
    state: State
    since: float
    reason: str
    timer: SuspicionTimer | None = None
    evidence: list[Suspicion] = field(default_factory=list)
    generation: int = 0
    looking: bool = False
    rtt_s: float | None = None
    last_seen: float | None = None

    @property
    def living(self) -> bool:
        """Alive or suspect."""
        return self.state in ("alive", "suspect")

    def measured(self, rtt_s: float) -> None:
        """Fold a round trip into the running mean."""
        held = self.rtt_s
        self.rtt_s = rtt_s if held is None else held + RTT_WEIGHT * (rtt_s - held)


class MemberTable:
    """The other members, by id.

    Args:
        max_members: bound on their number.
    """

    def __init__(self, max_members: int) -> None:
        self._members: dict[str, Member] = {}
        self._max_members = max_members
        self._living: list[Member] | None = None
        self.version = 0

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def get(self, node_id: str) -> Member | None:
        """The member with that id."""
        return self._members.get(node_id)

    @property
    def living(self) -> list[Member]:
        """The living others; don't change the list."""
        if self._living is None:
            self._living = [member for member in self._members.values() if member.living]
        return self._living

    @property
    def living_total(self) -> int:
        """The living, ourselves included: N of every formula."""
        return len(self.living) + 1

    def add(self, member: Member) -> bool:
        """Add a member that isn't there; False when there is no room for it."""
        if len(self._members) >= self._max_members:
            tombstones = [held for held in self._members.values() if not held.living]
            if not tombstones:
                return False
            self.remove(min(tombstones, key=lambda held: held.since).record.id)
        self._members[member.record.id] = member
        self.touch()
        return True

    def remove(self, node_id: str) -> None:
        """Forget a member."""
        del self._members[node_id]
        self.touch()

    def touch(self) -> None:
        """Note that some member's state or incarnation changed."""
        self._living = None
        self.version += 1

    def sample(self, count: int, rng: random.Random, keep: Callable[[Member], bool]) -> list[Member]:
        """Up to ``count`` of the living that ``keep`` accepts, drawn without replacement."""
        fit = [member for member in self.living if keep(member)]
        return fit if len(fit) <= count else rng.sample(fit, count)


def view_of(member: Member, now: float) -> MemberView:
    """``member`` as told outside the core."""
    record = member.record
    reason = member.reason
    if member.state in ("suspect", "dead"):
        reason = f"{reason} ({max(0.0, now - member.since):.0f} s ago)"
    return MemberView(
        id=record.id,
        name=record.name,
        address=record.address,
        state=member.state,
        state_reason=reason,
        incarnation=record.incarnation,
        rtt_s=member.rtt_s,
        last_seen_s=None if member.last_seen is None else max(0.0, now - member.last_seen),
        tags=dict(record.tags),
        suspected_by=member.timer.accusers if member.timer is not None and member.state == "suspect" else (),
        protocol=record.protocol,
        public_key=record.public_key,
    )
