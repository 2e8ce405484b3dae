"""What a proposer knows of those it may propose: who answers, who must wait: pure.

Nobody is invited who didn't answer a ping lately and say that it would come, so that somebody who can't
be reached never costs a view in force. Who failed is asked again with back-off, and who comes and goes
rests longer each time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from p2pdrl.strategies.group.view import Timing

__all__ = ["Roster"]

NEVER = float("-inf")
FOREVER = float("inf")
FORGET_S = 60.0
"""After so long without being left out, all is forgiven."""
MAX_DOUBLINGS = 16


@dataclass(slots=True)
class _Standing:
    """One peer, since ``since_s``."""

    since_s: float
    ping_s: float
    answered_s: float = NEVER
    judged: bool = False
    elsewhere: bool = False
    fit: bool = False
    failures: int = 0


@dataclass(slots=True)
class _Rest:
    """How often somebody was left out of late, and how long it rests."""

    times: int = 0
    last_s: float = NEVER
    until_s: float = NEVER


class Roster:
    """The peers of a proposer.

    Args:
        timing: how long things take.
    """

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._standings: dict[str, _Standing] = {}
        self._rests: dict[str, _Rest] = {}

    def begin(self) -> None:
        """Start anew, as a node does whose turn has come; rests go on."""
        self._standings.clear()

    def living(self, peers: Iterable[str], now_s: float) -> None:
        """Note who lives: newcomers are asked at once, the dead forgotten."""
        alive = set(peers)
        for peer in self._standings.keys() - alive:
            del self._standings[peer]
        for peer in alive - self._standings.keys():
            self._standings[peer] = _Standing(now_s, now_s)
        for peer in [peer for peer, rest in self._rests.items() if rest.last_s + FORGET_S < now_s]:
            del self._rests[peer]

    def due(self, now_s: float) -> list[str]:
        """Who is to be asked now; each is due again once it answered or failed."""
        due = [peer for peer, standing in self._standings.items() if standing.ping_s <= now_s]
        for peer in due:
            self._standings[peer].ping_s = FOREVER
        return due

    def answered(self, peer: str, now_s: float, *, takes: bool) -> None:
        """Note an answer to a ping."""
        standing = self._standings.get(peer)
        if standing is None:
            return
        standing.answered_s = now_s
        standing.elsewhere = False
        standing.judged = True
        standing.fit = takes
        standing.failures = 0
        hesitates_s = 0.1 if now_s < standing.since_s + self._timing.silence_s else self._timing.answer_s
        standing.ping_s = now_s + (self._timing.ping_s if takes else hesitates_s)

    def acknowledged(self, peer: str, now_s: float) -> None:
        """Note a sign of life other than an answer to a ping."""
        standing = self._standings.get(peer)
        if standing is not None:
            standing.answered_s = now_s
            standing.failures = 0

    def failed(self, peer: str, why: str, now_s: float) -> None:
        """Note that a message to ``peer`` failed.

        Args:
            peer: whom.
            why: ``refused``: it is out at once; ``elsewhere``: so it is, for it is in another mode (still, if
                it never answered); ``unreachable``: out when it happens twice in a row, because
                a kept connection may break between two calls; ``timeout``: out after `silence_s` of them;
                ``hindered``: likewise, for it refuses for a reason that may pass, too much to do say.
            now_s: monotonic time.
        """
        standing = self._standings.get(peer)
        if standing is None:
            return
        standing.failures += 1
        silent = now_s > standing.answered_s + self._timing.silence_s
        standing.elsewhere = why == "elsewhere" and standing.answered_s == NEVER
        out = why in ("refused", "elsewhere") or silent or (why == "unreachable" and standing.failures > 1)
        if out and standing.fit:
            self.leave_out(peer, now_s)
        standing.judged = standing.judged or out
        soon = (
            standing.fit
            or not out
            or (standing.elsewhere and now_s < standing.since_s + self._timing.follow_s)
        )
        back_off_s = 0.1 if soon else 0.25 * 2.0 ** min(standing.failures, MAX_DOUBLINGS)
        standing.ping_s = now_s + min(back_off_s, self._timing.ping_s)

    def reluctant(self, peer: str, now_s: float) -> None:
        """Note that it refuses to be invited by us."""
        self.answered(peer, now_s, takes=False)

    def leave_out(self, peer: str, now_s: float, *, doubted: bool = False) -> None:
        """Leave ``peer`` out until it has rested and answers; who is out already rests no longer for it."""
        standing = self._standings.get(peer)
        if standing is None or not standing.fit or not self._rested(peer, now_s):
            return
        standing.fit = False
        standing.judged = True
        rest = self._rests.setdefault(peer, _Rest())
        rest.times = min(rest.times + 1, MAX_DOUBLINGS)
        rest.last_s = now_s
        most_s = self._timing.rest_doubted_s if doubted else self._timing.rest_silent_s
        rest.until_s = now_s + min(self._timing.rest_s * 2.0 ** (rest.times - 1), most_s)
        if standing.ping_s < FOREVER:
            standing.ping_s = now_s + self._timing.gather_s

    def fit(self, now_s: float) -> set[str]:
        """Who may be invited."""
        return {
            peer for peer, standing in self._standings.items() if standing.fit and self._rested(peer, now_s)
        }

    def must_wait(self, members: Iterable[str], now_s: float) -> bool:
        """Tell whether somebody is worth waiting for before a view is proposed.

        That is who hasn't answered at all, for `gather_s`; before the first view, who is still in another
        mode, for `follow_s`; and members of the present view that still follow somebody else, until they
        must have noticed that he is gone.
        """
        timing = self._timing
        present = set(members)
        for peer, standing in self._standings.items():
            if standing.fit or not self._rested(peer, now_s):
                continue
            hesitates = standing.answered_s > NEVER and standing.failures == 0 and peer in present
            if standing.elsewhere and not present and now_s < standing.since_s + timing.follow_s:
                return True
            if not standing.judged and now_s < standing.since_s + timing.gather_s:
                return True
            if hesitates and now_s < standing.since_s + timing.silence_s + timing.gather_s:
                return True
        return False

    def _rested(self, peer: str, now_s: float) -> bool:
        rest = self._rests.get(peer)
        return rest is None or rest.until_s <= now_s
