"""Whose turn it is to propose a group view, as one node sees it: pure.

The first of the living in rendezvous order proposes. One that isn't heard for `silence_s`, or fails when
it is asked, is *passed over* until it is heard again, and the next takes its turn. A node that follows a
proposer which it heard of late refuses those that come later in the order: a lone node that can't reach the
proposer shall not pull the others out of a view in which all is well (the idea of Raft's pre-vote: Ongaro
2014, section 9.6).
"""

from __future__ import annotations

from collections.abc import Iterable

from p2pdrl.strategies.group.rendezvous import ranked, weight

__all__ = ["Succession"]

NEVER = float("-inf")


class Succession:
    """The living in order, and those among them that are passed over.

    Args:
        me: own node id.
        epoch: mode epoch; each has its own order.
        now_s: monotonic time.
        silence_s: how long a proposer may be silent.
    """

    def __init__(self, me: str, epoch: int, now_s: float, silence_s: float) -> None:
        self._me = me
        self._seed = f"group {epoch}"
        self._silence_s = silence_s
        self._order = [me]
        self._heard_s: dict[str, float] = {}
        self._passed: set[str] = set()
        self._since_s = now_s
        self.others: frozenset[str] = frozenset()
        """The living without ourselves."""
        self.proposer = me
        """Whose turn it is."""

    @property
    def mine(self) -> bool:
        """Whether it is our turn."""
        return self.proposer == self._me

    def living(self, peers: Iterable[str], now_s: float) -> None:
        """Note who lives."""
        others = frozenset(peers) - {self._me}
        if others == self.others:
            return
        self.others = others
        self._order = ranked(self._seed, [self._me, *others])
        self._passed &= others
        self._heard_s = {peer: heard_s for peer, heard_s in self._heard_s.items() if peer in others}
        self._turn(now_s)

    def heard(self, peer: str, now_s: float) -> None:
        """Note that ``peer`` says it proposes."""
        if peer in self.others:
            self._heard_s[peer] = now_s
            self._passed.discard(peer)
            self._turn(now_s)

    def pass_over(self, peer: str, now_s: float) -> None:
        """Let the next one propose, until ``peer`` is heard again."""
        if peer in self.others:
            self._passed.add(peer)
            self._heard_s.pop(peer, None)
            self._turn(now_s)

    def tick(self, now_s: float) -> None:
        """Pass over a proposer that is silent."""
        if not self.mine and now_s > max(self._since_s, self._heard_at(self.proposer)) + self._silence_s:
            self.pass_over(self.proposer, now_s)

    def next_after(self, peer: str) -> str:
        """Whose turn it would be without ``peer``; ourselves when nobody else is left."""
        return next((one for one in self._order if one not in self._passed and one != peer), self._me)

    def before(self, a: str, b: str) -> bool:
        """Tell whether ``a`` comes before ``b`` in the order."""
        return weight(self._seed, a) > weight(self._seed, b)

    def first(self, ids: Iterable[str], count: int) -> list[str]:
        """The first ``count`` of ``ids`` in the order."""
        return ranked(self._seed, ids)[:count]

    def follows(self, now_s: float) -> str:
        """Whom we heard propose of late; ourselves when it is our turn; empty for nobody."""
        fresh = self.mine or now_s <= self._heard_at(self.proposer) + self._silence_s
        return self.proposer if fresh else ""

    def takes(self, inviter: str, now_s: float) -> bool:
        """Tell whether views of ``inviter`` are acknowledged now."""
        followed = self.follows(now_s)
        return followed in ("", inviter) or (inviter in self.others and self.before(inviter, followed))

    def _heard_at(self, peer: str) -> float:
        return self._heard_s.get(peer, NEVER)

    def _turn(self, now_s: float) -> None:
        proposer = next(one for one in self._order if one not in self._passed)
        if proposer != self.proposer:
            self.proposer = proposer
            self._since_s = now_s
