"""What a strategy asks of its node, and what it told: a node without membership or disk."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from p2pdrl.strategies.judgement import Summary
from p2pdrl.strategies.protocol import RoundReport
from p2pdrl.transport.protocol import Address

__all__ = ["FakeSwarm"]


class FakeSwarm:
    """What a strategy asks of its node, and what it told.

    Args:
        node_id: own id.
        epoch: mode epoch that the node is in.
    """

    def __init__(self, node_id: str, epoch: int = 1) -> None:
        self._id = node_id
        self.peers: dict[str, Address] = {}
        self.says: Summary | None = Summary(node_id, "task", "layout", epoch, "aa", 100, 10)
        self.adoptions: list[tuple[str, str]] = []
        self.heals: list[str] = []
        self.strikes: list[str] = []
        self.held: set[str] = set()
        self.seen: list[tuple[str, float]] = []
        self.rounds: list[RoundReport] = []
        self.told: list[tuple[str, str]] = []
        self.facts: list[Mapping[str, int]] = []
        """One for each that was told."""
        self.take: Callable[[str], Awaitable[bool]] | None = None
        """What an adoption does; `SimSwarm` copies the donor's vector."""
        self.steps = 0

    @property
    def node_id(self) -> str:
        """Own id."""
        return self._id

    def alive(self) -> dict[str, Address]:
        """Members that exchanges may begin with."""
        return {peer: address for peer, address in self.peers.items() if peer not in self.held}

    def name_of(self, peer: str) -> str:
        """Its id."""
        return peer

    def steps_since(self) -> int:
        """Steps since the last call."""
        steps, self.steps = self.steps, 0
        return steps

    def summary(self) -> Summary | None:
        """What we say of ourselves."""
        return self.says

    def adopt(self, donor: str, lineage: str, why: str) -> None:
        """Note it."""
        self.adoptions.append((donor, why))

    async def adopted(self, donor: str, lineage: str, why: str) -> bool:
        """Note it, and take the donor's vector where the test says how."""
        self.adoptions.append((donor, why))
        return self.take is not None and await self.take(donor)

    def heal(self, why: str) -> None:
        """Note it."""
        self.heals.append(why)

    def strike(self, peer: str, why: str) -> None:
        """Note it."""
        self.strikes.append(peer)

    def quarantined(self, peer: str) -> bool:
        """Whether the test holds that peer in quarantine."""
        return peer in self.held

    def observed(self, outcome: str, seconds: float) -> None:
        """Note it."""
        self.seen.append((outcome, seconds))

    def round(self, report: RoundReport) -> None:
        """Note it."""
        self.rounds.append(report)

    def tell(
        self, kind: str, message: str, *, warning: bool = False, facts: Mapping[str, int] | None = None
    ) -> None:
        """Note it."""
        self.told.append((kind, message))
        self.facts.append(facts or {})
