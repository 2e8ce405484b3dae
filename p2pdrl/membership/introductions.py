"""Who comes into the view on somebody else's word, and who has to answer us first.

Records are signed by whom they are about, but anybody who holds the swarm's key can make up nodes. If all
were taken in, a single member could fill the view, and everybody would probe and call what isn't there. So a
member's word is good for a few newcomers at a time (`Introductions.vouch`). Those beyond it wait, a few of
each introducer, and are pinged in turn; who answers is in. Whoever has introduced several that never answered
anybody is believed no more for an hour: all its newcomers are pinged first. A node that brings its own
record has shown that it is there; so many at a time are taken in from one network (an IPv4 address, an IPv6
/64), and more are pinged first.

The welcome into the swarm is believed as a whole: its sender is a seed that somebody chose.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from p2pdrl.membership.parameters import MembershipConfig
from p2pdrl.membership.records import MemberRecord
from p2pdrl.transport.dial import network_of

__all__ = ["Introductions", "itself_from"]

_MAX_INTRODUCERS = 8192
_NETWORK = "network "
_OF_A_NETWORK = 4.0
"""A network's word is good for so many times as many newcomers as a member's."""


def itself_from(host: str) -> str:
    """Return the introducer of nodes that bring their own records, by the address that they call from."""
    return _NETWORK + network_of(host)


@dataclass(slots=True)
class _Introducer:
    """A member, or a network.

    Attributes:
        credit: newcomers that are taken on its word now.
        since: monotonic time of ``credit``.
        failed: monotonic times at which newcomers of its were found never to have been there.
        waiting: those that have to be pinged first.
    """

    credit: float
    since: float
    failed: list[float] = field(default_factory=list)
    waiting: deque[MemberRecord] = field(default_factory=deque)


class Introductions:
    """Newcomers by who introduced them. Times are monotonic seconds."""

    def __init__(self, config: MembershipConfig) -> None:
        self._config = config
        self._introducers: dict[str, _Introducer] = {}
        self._waiting: dict[str, str] = {}
        self._unproven: dict[str, str] = {}

    def __len__(self) -> int:
        """How many wait to be pinged."""
        return len(self._waiting)

    def vouch(self, introducer: str, node_id: str, now: float) -> bool:
        """Tell whether a newcomer is taken in on its introducer's word, which it uses up.

        Args:
            introducer: id of the member that told of it, or `itself_from` where it calls from.
        """
        held = self._introducer(introducer, now)
        in_vain = sum(now - at < self._config.introduced_in_vain_s for at in held.failed)
        if in_vain >= self._config.introduced_in_vain or held.credit < 1.0:
            return False
        held.credit -= 1.0
        self._unproven[node_id] = introducer
        return True

    def wait(self, introducer: str, record: MemberRecord, now: float) -> None:
        """Let a newcomer wait until it has been pinged; `has_room` comes first."""
        if record.id in self._waiting:
            return
        self._waiting[record.id] = introducer
        self._introducer(introducer, now).waiting.append(record)

    def has_room(self, introducer: str, now: float) -> bool:
        """Tell whether one more newcomer of this introducer may wait."""
        waiting = len(self._introducer(introducer, now).waiting)
        config = self._config
        return waiting < config.introduced_waiting and len(self._waiting) < 8 * config.introduced_waiting

    def next(self) -> tuple[str, MemberRecord] | None:
        """Take who is to be pinged now out of those who wait: one of each introducer in turn."""
        for introducer, held in self._introducers.items():
            if held.waiting:
                record = held.waiting.popleft()
                del self._waiting[record.id]
                self._introducers[introducer] = self._introducers.pop(introducer)  # behind the others
                return introducer, record
        return None

    def proven(self, node_id: str) -> None:
        """Note that a member has answered us itself."""
        self._unproven.pop(node_id, None)

    def failed(self, node_id: str, now: float) -> None:
        """Note that a member is gone; if nobody ever heard it, whoever introduced it is believed less."""
        introducer = self._unproven.pop(node_id, None)
        if introducer is not None:
            failed = self._introducer(introducer, now).failed
            failed.append(now)
            del failed[: -self._config.introduced_in_vain]

    def _introducer(self, introducer: str, now: float) -> _Introducer:
        config = self._config
        scale = _OF_A_NETWORK if introducer.startswith(_NETWORK) else 1.0
        most = scale * config.introduced_at_once
        held = self._introducers.get(introducer)
        if held is None:
            if len(self._introducers) >= _MAX_INTRODUCERS:
                self._forget()
            held = self._introducers[introducer] = _Introducer(most, now)
        filled = held.credit + (now - held.since) * scale * config.introduced_per_s
        held.credit, held.since = min(most, filled), now
        return held

    def _forget(self) -> None:
        oldest = min(self._introducers, key=lambda name: self._introducers[name].since)
        for record in self._introducers.pop(oldest).waiting:
            del self._waiting[record.id]
