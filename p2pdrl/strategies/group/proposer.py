"""The proposer's part in group views: to ask, to propose, to hand out, and to go on asking. Pure.

Whatever is lost is made good by asking: a ping's answer shows who restarted, who missed that a view is in
force, and who acknowledged somebody else's, so no message need arrive and none is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from p2pdrl.strategies.group.member import Member
from p2pdrl.strategies.group.order import Succession
from p2pdrl.strategies.group.roster import Roster
from p2pdrl.strategies.group.view import (
    MAX_GENERATION,
    MAX_MEMBERS,
    Accept,
    Activate,
    GroupView,
    Invite,
    Ping,
    Pong,
    Refuse,
    Request,
    Response,
    Timing,
    ViewKey,
)

__all__ = ["Proposer"]

FOREVER = float("inf")
AGAIN_S = 0.1
"""A message that was refused or not delivered at all is sent again after this, and not as soon as the network
allows: that helps nobody who has too much to do."""


@dataclass(slots=True)
class _Proposal:
    """A view that isn't acknowledged by all."""

    view: GroupView
    until_s: float
    notes: dict[str, bytes]
    due_s: dict[str, float]
    """When each other member is to be invited (again); infinite while an invitation is on its way."""
    beaten: bool = False
    """Somebody acknowledged a greater view."""


class Proposer:
    """What a node does while it is its turn to propose.

    Args:
        me: own node id.
        epoch: mode epoch.
        order: whose turn it is.
        member: our own acknowledgements.
        first_generation: proposals are greater.
        timing: how long things take.
        send: sends a message.
    """

    def __init__(
        self,
        me: str,
        epoch: int,
        *,
        order: Succession,
        member: Member,
        first_generation: int,
        timing: Timing,
        send: Callable[[str, Request], None],
    ) -> None:
        self._me = me
        self._epoch = epoch
        self._order = order
        self._member = member
        self._top = first_generation
        self._timing = timing
        self._send = send
        self._roster = Roster(timing)
        self._acting = False
        self._proposal: _Proposal | None = None
        self._stale = False
        """The view in force is so no longer for all of its members: a new one is needed."""
        self._untold: dict[str, float] = {}
        """Members that may not know that the view is in force, and when to tell them (again)."""

    def learn(self, key: ViewKey | None) -> None:
        """Propose greater ones than ``key`` from now on."""
        if key is not None and key.generation < MAX_GENERATION:
            self._top = max(self._top, key.generation)

    def give_way(self) -> None:
        """It isn't our turn: drop what isn't finished."""
        if self._acting:
            self._acting = False
            self._proposal = None
            self._untold.clear()

    def step(self, now_s: float) -> None:
        """It is our turn: do what is due."""
        if not self._acting:
            self._acting = True
            self._stale = False
            self._roster.begin()
        self._roster.living(self._order.others, now_s)
        for peer in self._roster.due(now_s):
            self._send(peer, Ping(self._epoch, proposes=True, active=self._member.active_key))
        proposal = self._proposal
        if proposal is not None and now_s >= proposal.until_s:
            for peer in set(proposal.view.members) - proposal.notes.keys():
                self._roster.leave_out(peer, now_s)
        wanted = self._wanted(now_s)
        if wanted is not None and self._top + 1 < MAX_GENERATION:
            self._propose(wanted, now_s)
        self._invite(now_s)
        self._tell(now_s)

    def doubted(self, peer: str, seen_in: ViewKey | None, now_s: float, *, leaves: bool) -> None:
        """Leave ``peer`` out; a doubt from a view before the present one is no longer of interest."""
        present = self._member.acknowledged
        if present is None or peer not in present.members or (seen_in is not None and seen_in < present.key):
            return
        self._roster.leave_out(peer, now_s, doubted=not leaves)

    def renewed(self, key: ViewKey | None) -> None:
        """The members of view ``key`` want a new one, of whoever is fit; of interest while it is the last."""
        present = self._member.acknowledged
        self._stale |= present is not None and present.key == key

    # Answers

    def pong(self, peer: str, pong: Pong, sent_s: float, now_s: float) -> None:
        """A ping of ours, sent at ``sent_s``, was answered."""
        self._roster.answered(peer, now_s, takes=pong.takes)
        active = self._member.active
        if active is None or peer not in active.view.members or sent_s < self._member.entered_s:
            return
        if pong.acknowledged != active.view.key:
            self._stale = True  # it restarted, or acknowledged somebody else's
        elif pong.active is None:
            self._untold.setdefault(peer, now_s)

    def invitation_answered(self, peer: str, view: GroupView, response: Response, now_s: float) -> None:
        """An invitation of ours was answered."""
        proposal = self._proposal
        if proposal is None or proposal.view.key != view.key:
            return
        if isinstance(response, Accept) and response.key == view.key:
            proposal.notes[peer] = response.note
            self._roster.acknowledged(peer, now_s)
            return
        proposal.due_s[peer] = now_s + AGAIN_S
        if isinstance(response, Refuse):
            self.learn(response.acknowledged)
            if response.acknowledged is not None and response.acknowledged >= view.key:
                proposal.beaten = True
            if not response.takes:
                self._roster.reluctant(peer, now_s)

    def activation_answered(self, peer: str, key: ViewKey, response: Response) -> None:
        """A member was told that the view is in force."""
        if self._member.active_key != key:
            return
        self._untold.pop(peer, None)
        if isinstance(response, Refuse):
            self.learn(response.acknowledged)
            self._stale = True

    def failed(self, peer: str, message: Request, why: str, now_s: float) -> None:
        """A message of ours wasn't answered."""
        again_s = now_s + (0.0 if why == "timeout" else AGAIN_S)
        if isinstance(message, Ping):
            self._roster.failed(peer, why, now_s)
        elif isinstance(message, Invite):
            if self._proposal is not None and self._proposal.view.key == message.view.key:
                self._roster.failed(peer, why, now_s)
                self._proposal.due_s[peer] = again_s
        elif isinstance(message, Activate) and self._untold and self._member.active_key == message.key:
            self._untold[peer] = again_s

    # What follows

    def _wanted(self, now_s: float) -> tuple[str, ...] | None:
        """The members of the view to propose now; None while there is nothing to change, or to wait for."""
        others = self._order.first(self._roster.fit(now_s), MAX_MEMBERS - 1)
        wanted = tuple(sorted([self._me, *others]))
        proposal, active = self._proposal, self._member.active
        if proposal is not None:
            if not proposal.beaten and set(proposal.view.members) <= set(wanted):
                return None
        elif active is not None and not self._stale:
            members = active.view.members
            calm = now_s >= self._member.entered_s + self._timing.gather_s
            if wanted == members or (set(members) < set(wanted) and not calm):
                return None
        present = self._member.acknowledged
        if self._roster.must_wait(() if present is None else present.members, now_s):
            return None
        return wanted

    def _propose(self, members: tuple[str, ...], now_s: float) -> None:
        self._top += 1
        view = GroupView(ViewKey(self._epoch, self._top, self._me), members)
        self._member.acknowledge(view)
        self._stale = False
        self._untold.clear()
        due_s = dict.fromkeys((peer for peer in members if peer != self._me), now_s)
        until_s = now_s + self._timing.acknowledge_s
        self._proposal = _Proposal(view, until_s, {self._me: self._member.noted}, due_s)

    def _invite(self, now_s: float) -> None:
        """Invite those who haven't acknowledged; once all have, the view is in force."""
        proposal = self._proposal
        if proposal is None:
            return
        for peer, due_s in proposal.due_s.items():
            if due_s <= now_s and peer not in proposal.notes:
                proposal.due_s[peer] = FOREVER
                self._send(peer, Invite(proposal.view))
        if len(proposal.notes) == len(proposal.view.members):
            self._proposal = None
            self._member.enter(dict(proposal.notes), now_s)
            self._untold = dict.fromkeys(proposal.due_s, now_s)

    def _tell(self, now_s: float) -> None:
        """Tell the members that may not know it that the view is in force."""
        active = self._member.active
        for peer, due_s in self._untold.items():
            if due_s <= now_s and active is not None:
                self._untold[peer] = FOREVER
                self._send(peer, Activate(active.view.key, active.notes))
