"""What a strategy needs of the node, and what the node needs of a strategy.

The node hands each strategy one `Swarm`; the strategy owns no membership, learner or disk.
"""

from __future__ import annotations

from typing import Protocol

from p2pdrl.strategies.judgement import Summary
from p2pdrl.transport.protocol import Address

__all__ = ["Strategy", "Swarm"]


class Swarm(Protocol):
    """The node as its strategy sees it."""

    @property
    def node_id(self) -> str:
        """Own id."""
        ...

    def alive(self) -> dict[str, Address]:
        """Members that exchanges may begin with, without ourselves and the quarantined."""
        ...

    def summary(self) -> Summary | None:
        """What we say of ourselves now; None while there is no state to mix."""
        ...

    def adopt(self, donor: str, lineage: str, why: str) -> None:
        """Begin to take the whole state of ``donor``, or else of another member of ``lineage``.

        In the background; once at a time.
        """
        ...

    def heal(self, why: str) -> None:
        """Our own state is unusable: begin to take the best donor's, in the background; once at a time."""
        ...

    def strike(self, peer: str, why: str) -> None:
        """Note that ``peer`` sent something poisoned."""
        ...

    def quarantined(self, peer: str) -> bool:
        """Tell whether ``peer`` is to be refused."""
        ...

    def observed(self, outcome: str, seconds: float) -> None:
        """Note how an exchange that we began has ended, and how long it took."""
        ...


class Strategy(Protocol):
    """One way to agree, from start to stop."""

    @property
    def mode(self) -> str:
        """The word people type for it (``gossip``, ``local``)."""
        ...

    @property
    def consensus_distance(self) -> float | None:
        """Estimate of sqrt(mean over nodes of ‖x_i − x̄‖²); None before the first exchange."""
        ...

    @property
    def outcomes(self) -> dict[str, int]:
        """Exchanges so far by outcome."""
        ...

    async def start(self) -> None:
        """Begin."""
        ...

    async def stop(self, timeout_s: float) -> None:
        """Finish the exchange in flight, at most ``timeout_s`` long, and end."""
        ...

    async def watch(self) -> None:
        """Wait until it is stopped; raise what ended it before: a bug of ours."""
        ...

    def updated(self, updates: int) -> None:
        """The learner made ``updates`` more updates."""
        ...
