"""Group views as a state machine: messages and time in, messages out. No I/O.

A node is two things here. As a *member* it acknowledges invitations to greater views and enters a view
when its proposer says that all have. As the *proposer*, when it is its turn, it asks all the living how
they stand, proposes a view of those fit, hands it out, and goes on asking: who restarted, who missed a
message, who acknowledged somebody else's. Whatever was lost is made good by that asking, so no message
need arrive and none is stored.

`group.Group` carries the messages; `group_simulator` does so on invented time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from p2pdrl.strategies.group_order import Succession
from p2pdrl.strategies.group_roster import Roster
from p2pdrl.strategies.group_view import (
    MAX_GENERATION,
    MAX_MEMBERS,
    MAX_NOTE_BYTES,
    Accept,
    Activate,
    ActiveView,
    Done,
    Doubt,
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

__all__ = ["Call", "GroupCore"]

FOREVER = float("inf")
DOUBT_LASTS_S = 3.0
VERIFY_EVERY_S = 0.25


class Call(NamedTuple):
    """A message to send; its end is told to `GroupCore.answered` or `GroupCore.failed`.

    Args:
        number: which call.
        to: node id.
        message: what to send.
        deadline_s: seconds.
    """

    number: int
    to: str
    message: Request
    deadline_s: float


@dataclass(slots=True)
class _Proposal:
    """A view that isn't acknowledged by all."""

    view: GroupView
    until_s: float
    notes: dict[str, bytes]
    due_s: dict[str, float]
    """When each member is to be invited (again); infinite while an invitation is on its way."""
    beaten: bool = False
    """Somebody acknowledged a greater view."""


@dataclass(slots=True)
class _Doubt:
    """A doubt of ours, until the proposer has heard it."""

    message: Doubt
    until_s: float
    due_s: float = field(default=0.0)


class GroupCore:
    """One node's part in its group.

    Args:
        me: own node id.
        epoch: mode epoch; the caller refuses messages of another.
        note: gives what to note when a view is acknowledged.
        now_s: monotonic time.
        first_generation: proposals are greater. Something that grows from life to life keeps a node that
            restarted from giving an old view's key to a new one.
        timing: how long things take.
    """

    def __init__(
        self,
        me: str,
        epoch: int,
        note: Callable[[], bytes],
        now_s: float,
        *,
        first_generation: int = 0,
        timing: Timing | None = None,
    ) -> None:
        self._me = me
        self._epoch = epoch
        self._note = note
        self._timing = timing if timing is not None else Timing()
        self._order = Succession(me, epoch, now_s, self._timing.silence_s)
        self._roster = Roster(self._timing)
        self._top = first_generation
        self.acknowledged: GroupView | None = None
        """The greatest view that we acknowledged."""
        self._noted = b""
        self.active: ActiveView | None = None
        """The view in force here."""
        self._active_s = now_s
        self._proposing = False
        self._proposal: _Proposal | None = None
        self._stale = False
        self._untold: dict[str, float] = {}
        self._doubts: dict[str, _Doubt] = {}
        self._verified_s = float("-inf")
        self._calls: dict[int, tuple[Call, float]] = {}
        self._number = 0
        self._out: list[Call] = []

    @property
    def proposer(self) -> str:
        """Whose turn it is to propose, as far as we know."""
        return self._order.proposer

    # What happens

    def tick(self, peers: Iterable[str], now_s: float) -> list[Call]:
        """Time passed; ``peers`` live."""
        self._order.living(peers, now_s)
        return self._step(now_s)

    def request(self, sender: str, message: Request, now_s: float) -> tuple[Response, list[Call]]:
        """A peer's message came: return what to answer."""
        answer: Response
        if isinstance(message, Ping):
            self._heard(sender, now_s, proposes=message.proposes)
            acknowledged = None if self.acknowledged is None else self.acknowledged.key
            active = None if self.active is None else self.active.view.key
            takes = self._order.takes(sender, now_s)
            answer = Pong(acknowledged, active, self._order.follows(now_s), takes)
        elif isinstance(message, Invite):
            self._heard(sender, now_s, proposes=True)
            answer = self._invited(sender, message.view, now_s)
        elif isinstance(message, Activate):
            answer = self._activated(sender, message, now_s)
        else:
            self._heed(sender, message, now_s)
            answer = Done()
        return answer, self._step(now_s)

    def answered(self, number: int, response: Response, now_s: float) -> list[Call]:
        """A call of ours was answered."""
        call, sent_s = self._calls.pop(number)
        message = call.message
        if isinstance(message, Ping):
            if isinstance(response, Pong):
                self._pong(call.to, message, response, sent_s, now_s)
        elif isinstance(message, Invite):
            self._invitation_answered(call.to, message.view, response, now_s)
        elif isinstance(message, Activate):
            self._told(call.to, message.key, response, now_s)
        else:
            self._doubts.pop(message.peer, None)
        return self._step(now_s)

    def failed(self, number: int, why: str, now_s: float) -> list[Call]:
        """A call of ours failed: it was ``refused``, the peer is ``unreachable``, or ``timeout``."""
        call, _ = self._calls.pop(number)
        message = call.message
        if isinstance(message, Ping):
            if message.proposes:
                self._roster.failed(call.to, why, now_s)
            elif call.to == self._order.proposer:
                self._order.pass_over(call.to, now_s)
        elif isinstance(message, Invite):
            if self._proposal is not None and self._proposal.view is message.view:
                self._roster.failed(call.to, why, now_s)
                self._proposal.due_s[call.to] = now_s + (0.0 if why == "timeout" else 0.1)
        elif isinstance(message, Activate):
            if self._in_force(message.key) and call.to in self._untold:
                self._untold[call.to] = now_s + (0.0 if why == "timeout" else 0.1)
        elif message.peer in self._doubts:
            self._doubts[message.peer].due_s = now_s + 0.1
        return self._step(now_s)

    def doubt(self, peer: str, why: str, now_s: float) -> list[Call]:
        """Ask for a view without ``peer``, or let the next one propose when it is the proposer."""
        if peer == self._me or peer not in self._order.others:
            return []
        key = None if self.acknowledged is None else self.acknowledged.key
        message = Doubt(self._epoch, key, peer, why[:200])
        if self._order.mine:
            self._heed(self._me, message, now_s)
        else:
            self._doubts[peer] = _Doubt(message, now_s + DOUBT_LASTS_S)
            self._suspect(peer, now_s)
        return self._step(now_s)

    def leave(self) -> list[Call]:
        """Say that we go; nothing is to be handed in afterwards."""
        to = self._order.next_after(self._me) if self._order.mine else self._order.proposer
        if to == self._me or self.acknowledged is None:
            return []
        message = Doubt(self._epoch, self.acknowledged.key, self._me, "it leaves the group")
        self._call(to, message)
        return self._drain()

    # A member's part

    def _heard(self, sender: str, now_s: float, *, proposes: bool) -> None:
        if proposes:
            self._order.heard(sender, now_s)
            if not self._order.takes(sender, now_s):
                self._verify(now_s)

    def _invited(self, sender: str, view: GroupView, now_s: float) -> Response:
        key = view.key
        sound = key.proposer == sender and key.epoch == self._epoch and key.generation < MAX_GENERATION
        if not sound or self._me not in view.members or tuple(sorted(set(view.members))) != view.members:
            return self._refuse(takes=False)
        mine = self.acknowledged
        if mine is not None and mine.key == key:
            return Accept(key, self._noted) if mine == view else self._refuse(takes=False)
        takes = self._order.takes(sender, now_s)
        if not takes or (mine is not None and mine.key > key):
            return self._refuse(takes=takes)
        self._learn(key)
        self._acknowledge(view)
        return Accept(key, self._noted)

    def _refuse(self, *, takes: bool) -> Refuse:
        return Refuse(None if self.acknowledged is None else self.acknowledged.key, takes)

    def _acknowledge(self, view: GroupView) -> None:
        self.acknowledged = view
        self._noted = bytes(self._note())[:MAX_NOTE_BYTES]
        self.active = None

    def _activated(self, sender: str, message: Activate, now_s: float) -> Response:
        view = self.acknowledged
        if view is None or view.key != message.key or sender != message.key.proposer:
            return self._refuse(takes=self._order.takes(sender, now_s))
        if set(message.notes) != set(view.members):
            return self._refuse(takes=False)
        self._order.heard(sender, now_s)
        if self.active is None:
            self._enter(ActiveView(view, dict(message.notes)), now_s)
        return Done()

    def _enter(self, active: ActiveView, now_s: float) -> None:
        self.active = active
        self._active_s = now_s

    def _suspect(self, peer: str, now_s: float) -> None:
        if peer == self._order.proposer and peer != self._me:
            self._verify(now_s)

    def _verify(self, now_s: float) -> None:
        """Ask the proposer whether it still is; it is passed over when it doesn't answer."""
        if not self._order.mine and now_s >= self._verified_s + VERIFY_EVERY_S:
            self._verified_s = now_s
            self._call(self._order.proposer, Ping(self._epoch, proposes=False), now_s)

    def _heed(self, sender: str, doubt: Doubt, now_s: float) -> None:
        """Somebody doubts a member, or says that it leaves itself."""
        if doubt.peer == sender:
            self._order.pass_over(sender, now_s)
        elif not self._order.mine:
            self._suspect(doubt.peer, now_s)
        if not self._order.mine or doubt.peer == self._me:
            return
        present = self._proposal.view if self._proposal is not None else self.acknowledged
        late = present is None or (doubt.key is not None and doubt.key < present.key)
        if not late and present is not None and doubt.peer in present.members:
            self._roster.leave_out(doubt.peer, now_s, doubted=doubt.peer != sender)

    # The proposer's part

    def _learn(self, key: ViewKey | None) -> None:
        if key is not None and key.generation < MAX_GENERATION:
            self._top = max(self._top, key.generation)

    def _pong(self, peer: str, ping: Ping, pong: Pong, sent_s: float, now_s: float) -> None:
        self._learn(pong.acknowledged)
        if pong.follows == peer and self._order.before(peer, self._me):
            self._order.heard(peer, now_s)  # it does propose: we give way
            return
        if not ping.proposes:
            return
        self._roster.answered(peer, now_s, takes=pong.takes)
        active = self.active
        if active is None or peer not in active.view.members or sent_s < self._active_s:
            return
        if pong.acknowledged != active.view.key:
            self._stale = True  # it restarted, or acknowledged somebody else's
        elif pong.active is None:
            self._untold.setdefault(peer, now_s)

    def _invitation_answered(self, peer: str, view: GroupView, response: Response, now_s: float) -> None:
        proposal = self._proposal
        if proposal is None or proposal.view is not view:
            return
        if isinstance(response, Accept) and response.key == view.key:
            proposal.notes[peer] = response.note
            self._roster.acknowledged(peer, now_s)
        elif isinstance(response, Refuse):
            self._learn(response.acknowledged)
            if response.acknowledged is not None and response.acknowledged >= view.key:
                proposal.beaten = True
            if not response.takes:
                self._roster.reluctant(peer, now_s)
            proposal.due_s[peer] = now_s + 0.1

    def _told(self, peer: str, key: ViewKey, response: Response, now_s: float) -> None:
        if not self._in_force(key):
            return
        self._untold.pop(peer, None)
        if isinstance(response, Refuse):
            self._learn(response.acknowledged)
            self._stale = True

    def _in_force(self, key: ViewKey) -> bool:
        return self.active is not None and self.active.view.key == key

    # What follows from it

    def _step(self, now_s: float) -> list[Call]:
        self._order.tick(now_s)
        if self._order.mine:
            self._propose(now_s)
        elif self._proposing:
            self._proposing = False
            self._proposal = None
            self._untold.clear()
        self._pass_doubts_on(now_s)
        return self._drain()

    def _propose(self, now_s: float) -> None:
        if not self._proposing:
            self._proposing = True
            self._stale = False
            self._roster.begin()
        self._doubts.clear()
        self._roster.living(self._order.others, now_s)
        for peer in self._roster.due(now_s):
            self._call(peer, Ping(self._epoch, proposes=True), now_s)
        self._leave_out_the_silent(now_s)
        wanted = self._wanted(now_s)
        if wanted is not None:
            self._begin(wanted, now_s)
        self._invite(now_s)
        self._tell(now_s)

    def _leave_out_the_silent(self, now_s: float) -> None:
        proposal = self._proposal
        if proposal is not None and now_s >= proposal.until_s:
            for peer in set(proposal.view.members) - proposal.notes.keys():
                self._roster.leave_out(peer, now_s)

    def _wanted(self, now_s: float) -> tuple[str, ...] | None:
        """The members of the view to propose now; None while there is nothing to change, or to wait for."""
        fit = {self._me, *self._roster.fit(now_s)}
        others = self._order.first(fit - {self._me}, MAX_MEMBERS - 1)
        wanted = tuple(sorted([self._me, *others]))
        proposal = self._proposal
        if proposal is not None:
            if not proposal.beaten and set(proposal.view.members) <= set(wanted):
                return None
        elif self.active is not None and not self._stale:
            members = self.active.view.members
            calm = now_s >= self._active_s + self._timing.gather_s
            if wanted == members or (set(members) < set(wanted) and not calm):
                return None
        present = self.acknowledged
        if self._roster.awaited(() if present is None else present.members, now_s):
            return None
        return wanted

    def _begin(self, members: tuple[str, ...], now_s: float) -> None:
        if self._top + 1 >= MAX_GENERATION:
            return
        self._top += 1
        view = GroupView(ViewKey(self._epoch, self._top, self._me), members)
        self._acknowledge(view)
        self._stale = False
        self._untold.clear()
        due_s = dict.fromkeys((peer for peer in members if peer != self._me), now_s)
        until_s = now_s + self._timing.acknowledge_s
        self._proposal = _Proposal(view, until_s, {self._me: self._noted}, due_s)

    def _invite(self, now_s: float) -> None:
        """Invite those who haven't acknowledged; once all have, the view is in force."""
        proposal = self._proposal
        if proposal is None:
            return
        for peer, due_s in proposal.due_s.items():
            if due_s <= now_s and peer not in proposal.notes:
                proposal.due_s[peer] = FOREVER
                self._call(peer, Invite(proposal.view), now_s)
        if len(proposal.notes) == len(proposal.view.members):
            self._proposal = None
            self._enter(ActiveView(proposal.view, dict(proposal.notes)), now_s)
            self._untold = dict.fromkeys(proposal.due_s, now_s)

    def _tell(self, now_s: float) -> None:
        """Tell the members that don't know it yet that the view is in force."""
        for peer, due_s in self._untold.items():
            if due_s <= now_s and self.active is not None:
                self._untold[peer] = FOREVER
                self._call(peer, Activate(self.active.view.key, self.active.notes), now_s)

    def _pass_doubts_on(self, now_s: float) -> None:
        for peer, doubt in list(self._doubts.items()):
            to = self._order.next_after(peer) if peer == self._order.proposer else self._order.proposer
            if now_s >= doubt.until_s or peer not in self._order.others or to == self._me:
                del self._doubts[peer]
            elif doubt.due_s <= now_s:
                doubt.due_s = FOREVER
                self._call(to, doubt.message, now_s)

    # Calls

    def _call(self, to: str, message: Request, now_s: float = 0.0) -> None:
        self._number += 1
        call = Call(self._number, to, message, self._timing.answer_s)
        self._calls[call.number] = (call, now_s)
        self._out.append(call)

    def _drain(self) -> list[Call]:
        out, self._out = self._out, []
        return out
