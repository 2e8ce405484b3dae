"""The node as its strategies see it: who lives, what we are, whose state to take, whom to blame.

`training` makes one and hands it to each strategy in turn, as `strategies.protocol.Swarm`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from p2pdrl.clock import Clock
from p2pdrl.config.node import LimitsConfig
from p2pdrl.ids import short
from p2pdrl.node.events import EventLog
from p2pdrl.node.states.adoption import Adoptions
from p2pdrl.node.states.quarantine import Quarantine
from p2pdrl.strategies.judgement import Summary
from p2pdrl.strategies.protocol import RoundReport
from p2pdrl.transport.protocol import Address

__all__ = ["SwarmSide"]


class SwarmSide:
    """Implements `strategies.protocol.Swarm`; see there.

    Args:
        me: own node id.
        limits: when peers are quarantined.
        clock: time.
        events: what is told.
        adoptions: takes states over.
        alive: the living members, without ourselves.
        named: from a member's id to its name.
        summary: what we say of ourselves.
        env_steps: of this node, so far.
        observed: told how each exchange that we began has ended, and its seconds.
        rounds: each is told how a round has ended.

    Attributes:
        quarantine: members that sent poison lately.
    """

    def __init__(
        self,
        *,
        me: str,
        limits: LimitsConfig,
        clock: Clock,
        events: EventLog,
        adoptions: Adoptions,
        alive: Callable[[], dict[str, Address]],
        named: Callable[[str], str],
        summary: Callable[[], Summary | None],
        env_steps: Callable[[], int],
        observed: Callable[[str, float], None],
        rounds: Sequence[Callable[[RoundReport], None]],
    ) -> None:
        self._me = me
        self._rest_s = limits.quarantine_s
        self._clock = clock
        self._events = events
        self._adoptions = adoptions
        self._alive = alive
        self._named = named
        self._summary = summary
        self._env_steps = env_steps
        self._observed = observed
        self._rounds = rounds
        self._steps_told = 0
        self.quarantine = Quarantine(limits.strikes, limits.quarantine_s)

    @property
    def node_id(self) -> str:
        """Own id."""
        return self._me

    def alive(self) -> dict[str, Address]:
        """Members that exchanges may begin with."""
        now_s = self._clock.monotonic()
        return {
            peer: address for peer, address in self._alive().items() if not self.quarantine.holds(peer, now_s)
        }

    def summary(self) -> Summary | None:
        """What we say of ourselves; None without a state, or while adopting one."""
        return self._summary()

    def adopt(self, donor: str, lineage: str, why: str) -> None:
        """Begin to take the state of ``donor``, or of another member of ``lineage``, in the background."""
        self._adoptions.begin(donor, lineage, why)

    def heal(self, why: str) -> None:
        """Begin to take the best donor's state in the background: our own is unusable."""
        self._adoptions.begin("", None, why)

    def strike(self, peer: str, why: str) -> None:
        """Note that ``peer`` sent something poisoned."""
        if self.quarantine.strike(peer, self._clock.monotonic()):
            why += f"; refused for {self._rest_s:.0f} s"
        self._events.emit("strike", f"{short(peer)} sent a bad vector: {why}", level="warning", peer=peer)

    def quarantined(self, peer: str) -> bool:
        """Tell whether ``peer`` is to be refused."""
        return self.quarantine.holds(peer, self._clock.monotonic())

    def observed(self, outcome: str, seconds: float) -> None:
        """Note how an exchange that we began has ended."""
        self._observed(outcome, seconds)

    def round(self, report: RoundReport) -> None:
        """Note how a round has ended."""
        for told in self._rounds:
            told(report)

    def tell(
        self, kind: str, message: str, *, warning: bool = False, facts: Mapping[str, int] | None = None
    ) -> None:
        """Tell people something; ``facts`` of it are for programs."""
        self._events.emit(kind, message, level="warning" if warning else "info", **(facts or {}))

    def name_of(self, peer: str) -> str:
        """The name that people gave a member; its id when it is unknown."""
        return self._named(peer)

    def steps_since(self) -> int:
        """Environment steps that this node made since the last call."""
        steps = self._env_steps()
        before, self._steps_told = self._steps_told, steps
        return steps - before

    async def adopted(self, donor: str, lineage: str, why: str) -> bool:
        """Take the state of ``donor``, or of another member of ``lineage``; False when nobody gave one."""
        self._adoptions.begin(donor, lineage, why)
        return await self._adoptions.ended()
