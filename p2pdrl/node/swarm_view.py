"""The node as its strategy sees it, and the quarantine of peers that sent poisoned vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from p2pdrl.clock import Clock
from p2pdrl.config.node import LimitsConfig
from p2pdrl.group.compatibility import Summary
from p2pdrl.ids import short
from p2pdrl.node.drift import DriftWatch
from p2pdrl.node.events import EventLog
from p2pdrl.node.state.state_transfer import Adoptions
from p2pdrl.strategies.protocol import RoundReport
from p2pdrl.transport.protocol import Address

__all__ = ["NodeSwarmView", "Quarantine"]

STRIKE_LIFE_S = 600.0
"""A strike older than this is forgiven."""
MAX_PEERS = 4096
"""Peers remembered, of either kind: made-up ids must not fill the memory."""

V = TypeVar("V")


class Quarantine:
    """Refuses a peer for ``duration_s`` that sent ``strikes`` poisoned vectors within ten minutes. Pure."""

    def __init__(self, strikes: int, duration_s: float) -> None:
        self._limit = strikes
        self._duration_s = duration_s
        self._strikes: dict[str, list[float]] = {}
        self._until_s: dict[str, float] = {}
        self.total = 0
        """Strikes so far, all peers together."""

    def strike(self, peer: str, now_s: float) -> bool:
        """Count one strike; return whether it puts the peer into quarantine."""
        self.total += 1
        recent = [at_s for at_s in self._strikes.pop(peer, []) if at_s > now_s - STRIKE_LIFE_S]
        recent.append(now_s)
        if len(recent) < self._limit:
            _remember(self._strikes, peer, recent)
            return False
        _remember(self._until_s, peer, now_s + self._duration_s)
        return True

    def holds(self, peer: str, now_s: float) -> bool:
        """Tell whether ``peer`` is in quarantine at ``now_s``."""
        until_s = self._until_s.get(peer)
        if until_s is None:
            return False
        if now_s >= until_s:
            del self._until_s[peer]
            return False
        return True

    def held(self, now_s: float) -> tuple[str, ...]:
        """Return the ids in quarantine at ``now_s``, sorted."""
        return tuple(sorted(peer for peer in list(self._until_s) if self.holds(peer, now_s)))


def _remember(table: dict[str, V], peer: str, value: V) -> None:
    """Put ``peer`` at the end of ``table``; the oldest makes room."""
    table.pop(peer, None)
    table[peer] = value
    if len(table) > MAX_PEERS:
        del table[next(iter(table))]


class NodeSwarmView:
    """Implements `strategies.protocol.SwarmView`.

    Args:
        env_steps: tells how many this node made so far.
        observed: told how each exchange that we began has ended, and its seconds.
        rounds: each is told how a round has ended.
        outranks: tells whether a lineage is ours, or stays when it meets ours; no state of another is taken.
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
        outranks: Callable[[str], bool] = lambda lineage: True,
    ) -> None:
        self._me = me
        self._quarantine_s = limits.quarantine_s
        self._clock = clock
        self._events = events
        self._adoptions = adoptions
        self._alive = alive
        self._named = named
        self._summary = summary
        self._env_steps = env_steps
        self._observed = observed
        self._rounds = rounds
        self._outranks = outranks
        self._steps_told = 0
        self.quarantine = Quarantine(limits.strikes, limits.quarantine_s)
        self.drift = DriftWatch()

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
        """Begin to take the state of ``donor``, or of another member of ``lineage``, in the background.

        Nothing happens where ``lineage`` is one that we wouldn't adopt by our own counts.
        """
        if self._outranks(lineage):
            self._adoptions.begin(donor, lineage, why)

    def heal(self, why: str) -> None:
        """Begin to take the best donor's state in the background: our own is unusable."""
        self._adoptions.begin("", None, why)

    def strike(self, peer: str, why: str) -> None:
        """Note that ``peer`` sent something poisoned."""
        if self.quarantine.strike(peer, self._clock.monotonic()):
            why += f"; refused for {self._quarantine_s:.0f} s"
        self._events.emit(
            "strike", f"{self._words(peer)} sent a bad vector: {why}", level="warning", peer=peer
        )

    def trust(self, peer: str) -> float:
        """By which the pull of ``peer`` is multiplied."""
        return self.drift.weight(peer)

    def judged(self, mean_return: float) -> None:
        """Note an evaluation; tell of a peer whose exchanges went before a fall."""
        blame = self.drift.judged(mean_return)
        if blame is not None:
            self._events.emit(
                "drift",
                f"the evaluated return fell from {blame.before:.4g} to {blame.after:.4g} after exchanges "
                f"with {self._words(blame.peer)}, which pulled {blame.times:.1f} times as far as others: "
                f"from now on its pull counts {blame.weight:.2g}",
                level="warning",
                peer=blame.peer,
                weight=blame.weight,
            )

    def quarantined(self, peer: str) -> bool:
        """Tell whether ``peer`` is to be refused."""
        return self.quarantine.holds(peer, self._clock.monotonic())

    def observed(self, outcome: str, seconds: float) -> None:
        """Note how an exchange that we began has ended."""
        self._observed(outcome, seconds)

    def round(self, report: RoundReport) -> None:
        """Note how a round has ended."""
        self.drift.round(report)
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

    def _words(self, peer: str) -> str:
        name = self._named(peer)
        if name == peer:
            return short(peer)
        return name if short(peer) in name else f"{name} ({short(peer)})"

    def steps_since(self) -> int:
        """Environment steps that this node made since the last call."""
        steps = self._env_steps()
        before, self._steps_told = self._steps_told, steps
        return steps - before

    async def adopted(self, donor: str, lineage: str, why: str) -> bool:
        """Take the state of ``donor``, or of another member of ``lineage``; False when nobody gave one.

        Likewise where ``lineage`` is one that we wouldn't adopt by our own counts.
        """
        if not self._outranks(lineage):
            return False
        self._adoptions.begin(donor, lineage, why)
        return await self._adoptions.ended()
