"""The last look at a suspect whose time has run out: whoever answers isn't dead.

A suspicion may outlive its refutation when the news got lost on the way to one node. So before that
node gives the suspect up it pings it once more; a refused connection settles it at once. If the
ping times out it asks twice the usual number of relays, who answer at once when they have heard of a
newer incarnation, and pings again.
"""

from __future__ import annotations

from dataclasses import dataclass

from p2pdrl.membership.events import Answered, Failed, proves_absence, shows_life
from p2pdrl.membership.kernel import Kernel, Outcome
from p2pdrl.membership.messages import Ack, Nack, Ping, PingReq
from p2pdrl.membership.rumours import Rumours
from p2pdrl.membership.table import Member

__all__ = ["LastLooks"]


@dataclass(slots=True)
class _Look:
    """One last look under way: answers still to come, and whether any showed life."""

    node_id: str
    generation: int
    open: int = 0
    over: bool = False


class LastLooks:
    """Looks at suspects before they are given up.

    Args:
        kernel: what the core's parts share.
        rumours: takes the verdict, and the records that ride on answers.
    """

    def __init__(self, kernel: Kernel, rumours: Rumours) -> None:
        self._kernel = kernel
        self._rumours = rumours

    def start(self, member: Member) -> None:
        """Look at ``member``, whose suspicion has run out."""
        look = _Look(member.record.id, member.generation)
        self._ping(member, lambda result: self._first(look, member, result))

    def _ping(self, member: Member, outcome: Outcome) -> None:
        kernel = self._kernel
        evidence = self._rumours.evidence(member)
        ping = Ping(kernel.me.incarnation, member.record.incarnation, kernel.load(*evidence))
        kernel.send(member, ping, self._deadline_s(), outcome)

    def _deadline_s(self) -> float:
        return self._kernel.awareness.scale(self._kernel.config.probe_timeout_s)

    def _first(self, look: _Look, member: Member, result: Answered | Failed) -> None:
        self._learn(result)
        if shows_life(result) or self._is_our_trouble(result):
            self._end(look, found=True)
        elif isinstance(result, Failed) and proves_absence(result):
            self._end(look, found=False)
        else:
            self._ask_around(look, member)

    def _ask_around(self, look: _Look, member: Member) -> None:
        kernel = self._kernel
        relays = kernel.table.sample(
            2 * kernel.config.indirect_probes, kernel.rng, lambda other: other.state == "alive"
        )
        look.open = len(relays) + 1
        self._ping(member, lambda result: self._second(look, result))
        for relay in relays:
            request = PingReq(look.node_id, member.record.incarnation, kernel.load())
            kernel.send(relay, request, self._deadline_s(), lambda result: self._second(look, result))

    def _second(self, look: _Look, result: Answered | Failed) -> None:
        self._learn(result)
        look.open -= 1
        if isinstance(result, Answered) and isinstance(result.message, Ack):
            self._end(look, found=True)
        elif look.open == 0:
            self._end(look, found=False)

    def _learn(self, result: Answered | Failed) -> None:
        if isinstance(result, Answered) and isinstance(result.message, Ack | Nack):
            self._rumours.apply(result.message.records, result.told_by)

    @staticmethod
    def _is_our_trouble(result: Answered | Failed) -> bool:
        return isinstance(result, Failed) and result.kind == "local"

    def _end(self, look: _Look, found: bool) -> None:
        if not look.over:
            look.over = True
            self._rumours.looked(look.node_id, look.generation, found)
