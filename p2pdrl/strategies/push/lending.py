"""Pushes beyond the graph: who gets nothing from its in-peers asks somebody else to push to it as well. Pure.

On a ring each node has one in-peer. Where that one is down, refuses to push to us, or sends what we refuse,
the node before it doesn't know that we go without. So we ask, each time somebody further down the ring, until
pushes come. Who was asked goes on while its pushes are the only ones that come, as the answers to them say.
All is counted in our own pushes, for learners' paces differ much from task to task.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Lending"]

HUNGRY = 8
"""So many pushes of ours, and nothing that came and was good: we ask."""
LENT = 16
"""So many of our pushes also go to a node that asked; and again so many when it says so in an answer."""
MOST_LENT = 4
"""So many nodes that asked are pushed to at once; more are told no."""


class Lending:
    """What one node asks for and gives.

    Args:
        me: own node id.
    """

    def __init__(self, me: str) -> None:
        self._me = me
        self._pushes = 0
        self._fed: dict[str, int] = {}
        """How many pushes we had made when a push of each peer came."""
        self._fed_last = 0
        self._asked, self._asked_last = 0, 0
        self._lent: dict[str, int] = {}

    def pushed(self) -> None:
        """We push once more."""
        self._pushes += 1
        self._lent = {peer: left - 1 for peer, left in self._lent.items() if left > 1}
        self._fed = {peer: at for peer, at in self._fed.items() if at + LENT > self._pushes}

    # As the one who takes

    def came(self, peer: str) -> None:
        """A push of ``peer`` came, and was good."""
        self._fed[peer] = self._fed_last = self._pushes
        self._asked = 0

    def only(self, peer: str) -> bool:
        """Whether nobody but ``peer`` gave us anything of late."""
        return not self._fed.keys() - {peer}

    def whom_to_ask(self, alive: Iterable[str]) -> str | None:
        """Whom to ask now for pushes, each time somebody further down the ring of ids; None for nobody."""
        ring = sorted({*alive, self._me})
        if len(ring) < 2 or self._pushes < max(self._fed_last, self._asked_last) + HUNGRY:
            return None
        step = 1 + self._asked % (len(ring) - 1)
        self._asked, self._asked_last = self._asked + 1, self._pushes
        return ring[ring.index(self._me) - step]

    # As the one who gives

    def lend(self, peer: str) -> bool:
        """``peer`` asks for our pushes; whether it gets them."""
        if peer not in self._lent and len(self._lent) >= MOST_LENT:
            return False
        self._lent[peer] = LENT
        return True

    def renew(self, peer: str) -> None:
        """``peer`` gets nothing from anybody else: if it asked, it goes on getting our pushes."""
        if peer in self._lent:
            self._lent[peer] = LENT

    @property
    def lent(self) -> set[str]:
        """Who gets our pushes because it asked."""
        return set(self._lent)
