"""Agreement on group views as one state machine: messages, failures and time in; messages out. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from p2pdrl.group.rendezvous import ranked, weight
from p2pdrl.group.view import (
    MAX_GENERATION,
    MAX_MEMBERS,
    MAX_NOTE_BYTES,
    Accept,
    Acknowledged,
    Activate,
    ActiveView,
    Doubt,
    GroupPing,
    GroupPong,
    GroupView,
    Invite,
    Refuse,
    Request,
    Response,
    Timing,
    ViewKey,
)

__all__ = ["GroupCall", "GroupCore", "Proposer", "Roster", "Succession", "ViewMember"]


class ViewMember:
    """What one node acknowledged, and what is in force.

    Two promises on which everything rests: a member acknowledges only a view greater than any before, and
    from then on acts in none until that view's proposer says that all have acknowledged.
    """

    def __init__(self, me: str, epoch: int, note: Callable[[], bytes]) -> None:
        self._me = me
        self._epoch = epoch
        self._note = note
        self.acknowledged: GroupView | None = None
        """The greatest view that was acknowledged."""
        self.noted = b""
        """Our note of then."""
        self.active: ActiveView | None = None
        """The view in force; never another than the one acknowledged."""
        self.entered_s = float("-inf")
        """Since when."""

    @property
    def acknowledged_key(self) -> ViewKey | None:
        """Key of the greatest view that was acknowledged."""
        return None if self.acknowledged is None else self.acknowledged.key

    @property
    def active_key(self) -> ViewKey | None:
        """Key of the view in force."""
        return None if self.active is None else self.active.view.key

    def acknowledge(self, view: GroupView) -> None:
        """Promise to act in no older view; the caller knows that ``view`` is greater."""
        self.acknowledged = view
        self.noted = bytes(self._note())[:MAX_NOTE_BYTES]
        self.active = None

    def enter(self, notes: dict[str, bytes], now_s: float) -> None:
        """All members acknowledged the view that we acknowledged: it is in force."""
        if self.acknowledged is not None and self.active is None:
            self.active = ActiveView(self.acknowledged, notes)
            self.entered_s = now_s

    def invited(self, sender: str, view: GroupView, *, takes: bool) -> Accept | Refuse:
        """Answer a proposal; ``takes``: whether proposals of ``sender`` are taken now."""
        key = view.key
        sound = key.proposer == sender and key.epoch == self._epoch and key.generation < MAX_GENERATION
        if not sound or self._me not in view.members or tuple(sorted(set(view.members))) != view.members:
            return self.refuse(takes=False)
        mine = self.acknowledged
        if mine is not None and mine.key == key:
            return Accept(key, self.noted) if mine == view else self.refuse(takes=False)
        if not takes or (mine is not None and mine.key > key):
            return self.refuse(takes=takes)
        self.acknowledge(view)
        return Accept(key, self.noted)

    def activated(
        self, sender: str, message: Activate, now_s: float, *, takes: bool
    ) -> Acknowledged | Refuse:
        """Answer a proposer that says that its view is in force."""
        view = self.acknowledged
        if view is None or view.key != message.key or sender != message.key.proposer:
            return self.refuse(takes=takes)
        if set(message.notes) != set(view.members):
            return self.refuse(takes=False)
        self.enter(dict(message.notes), now_s)
        return Acknowledged()

    def superseded(self, key: ViewKey | None) -> None:
        """Our proposer acts in ``key``: an older view in force here was given up by the others."""
        if key is not None and self.active is not None and key > self.active.view.key:
            self.active = None

    def refuse(self, *, takes: bool) -> Refuse:
        """Say no, and what we acknowledged."""
        return Refuse(self.acknowledged_key, takes)


NEVER = float("-inf")


class Succession:
    """Whose turn it is to propose: the living in rendezvous order, without those that are passed over.

    A proposer that isn't heard for ``silence_s``, or fails when it is asked, is passed over until it is heard
    again. A node that follows a proposer which it heard of late refuses those that come later in the order: a
    lone node that can't reach the proposer shall not pull the others out of a view in which all is well (the
    idea of Raft's pre-vote: Ongaro 2014, section 9.6).

    Args:
        epoch: mode epoch; each has its own order.
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
    """The peers of a proposer: who answers, and who must wait.

    Nobody is invited who didn't answer a ping lately and say that it would come, so that somebody who can't
    be reached never costs a view in force. Who failed is asked again with back-off, and who comes and goes
    rests longer each time.
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
        """Note an answer to a ping; ``takes``: whether it would be invited by us."""
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
            why: ``refused``: it is out at once; ``elsewhere``: so it is, for it is in another mode (still, if
                it never answered); ``unreachable``: out when it happens twice in a row, because
                a kept connection may break between two calls; ``timeout``: out after `silence_s` of them;
                ``hindered``: likewise, for it refuses for a reason that may pass, too much to do say.
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

    Whatever is lost is made good by asking: a ping's answer shows who restarted, who missed that a view is in
    force, and who acknowledged somebody else's, so no message need arrive and none is stored.

    Args:
        first_generation: proposals are greater.
    """

    def __init__(
        self,
        me: str,
        epoch: int,
        *,
        order: Succession,
        member: ViewMember,
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
            self._send(peer, GroupPing(self._epoch, proposes=True, active=self._member.active_key))
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

    def pong(self, peer: str, pong: GroupPong, sent_s: float, now_s: float) -> None:
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
                self._roster.answered(peer, now_s, takes=False)

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
        if isinstance(message, GroupPing):
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


DOUBT_LASTS_S = 3.0
VERIFY_EVERY_S = 0.25
NOBODY = ""
"""A doubt of this peer asks for a new view, and says nothing against any member."""
MAX_WHY_CHARS = 200


class GroupCall(NamedTuple):
    """A message to send; its end is told to `GroupCore.answered` or `GroupCore.failed`."""

    number: int
    to: str
    message: Request
    deadline_s: float


@dataclass(slots=True)
class _Doubt:
    """A doubt of ours, until the proposer has heard it."""

    message: Doubt
    until_s: float
    due_s: float


class GroupCore:
    """One node's part in its group.

    Args:
        epoch: mode epoch; the caller refuses messages of another.
        first_generation: proposals are greater. Something that grows from life to life keeps a node that
            restarted from giving an old view's key to a new one.
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
        self._timing = timing if timing is not None else Timing()
        self._now_s = now_s
        self._order = Succession(me, epoch, now_s, self._timing.silence_s)
        self._member = ViewMember(me, epoch, note)
        self._proposer = Proposer(
            me,
            epoch,
            order=self._order,
            member=self._member,
            first_generation=first_generation,
            timing=self._timing,
            send=self._send,
        )
        self._doubts: dict[str, _Doubt] = {}
        self._verified_s = float("-inf")
        self._calls: dict[int, tuple[GroupCall, float]] = {}
        self._number = 0
        self._out: list[GroupCall] = []

    @property
    def proposer(self) -> str:
        """Whose turn it is to propose, as far as we know."""
        return self._order.proposer

    @property
    def acknowledged(self) -> GroupView | None:
        """The greatest view that we acknowledged."""
        return self._member.acknowledged

    @property
    def active(self) -> ActiveView | None:
        """The view in force here."""
        return self._member.active

    def tick(self, peers: Iterable[str], now_s: float) -> list[GroupCall]:
        """Time passed; ``peers`` live."""
        self._now_s = now_s
        self._order.living(peers, now_s)
        return self._step()

    def request(self, sender: str, message: Request, now_s: float) -> tuple[Response, list[GroupCall]]:
        """A peer's message came: return what to answer."""
        self._now_s = now_s
        answer: Response
        if isinstance(message, GroupPing):
            answer = self._pinged(sender, message)
        elif isinstance(message, Invite):
            takes = self._claimed(sender)
            answer = self._member.invited(sender, message.view, takes=takes)
            self._proposer.learn(self._member.acknowledged_key)
        elif isinstance(message, Activate):
            takes = self._claimed(sender)
            answer = self._member.activated(sender, message, now_s, takes=takes)
        else:
            self._heed(sender, message)
            answer = Acknowledged()
        return answer, self._step()

    def answered(self, number: int, response: Response, now_s: float) -> list[GroupCall]:
        """A call of ours was answered."""
        self._now_s = now_s
        call, sent_s = self._calls.pop(number)
        message = call.message
        if isinstance(message, GroupPing):
            if isinstance(response, GroupPong):
                self._ponged(call.to, message, response, sent_s)
        elif isinstance(message, Invite):
            self._proposer.invitation_answered(call.to, message.view, response, now_s)
        elif isinstance(message, Activate):
            self._proposer.activation_answered(call.to, message.key, response)
        else:
            self._doubts.pop(message.peer, None)
        return self._step()

    def failed(self, number: int, why: str, now_s: float) -> list[GroupCall]:
        """A call of ours failed; ``why`` is one of the words that `Roster.failed` knows."""
        self._now_s = now_s
        call, _ = self._calls.pop(number)
        message = call.message
        if isinstance(message, Doubt):
            if message.peer in self._doubts:
                self._doubts[message.peer].due_s = now_s + 0.1
        elif isinstance(message, GroupPing) and not message.proposes:
            if call.to == self._order.proposer:
                self._order.pass_over(call.to, now_s)
        else:
            self._proposer.failed(call.to, message, why, now_s)
        return self._step()

    def doubt(self, peer: str, why: str, now_s: float) -> list[GroupCall]:
        """Ask for a view without ``peer``; the proposer itself is asked whether it lives."""
        self._now_s = now_s
        if peer not in self._order.others:
            return []
        message = Doubt(self._epoch, self._member.acknowledged_key, peer, why[:MAX_WHY_CHARS])
        self._heed(self._me, message)
        if not self._order.mine:
            self._doubts[peer] = _Doubt(message, now_s + DOUBT_LASTS_S, now_s)
        return self._step()

    def renew(self, key: ViewKey, why: str, now_s: float) -> list[GroupCall]:
        """Ask for a view after ``key``, of all who are fit."""
        self._now_s = now_s
        message = Doubt(self._epoch, key, NOBODY, why[:MAX_WHY_CHARS])
        self._heed(self._me, message)
        if not self._order.mine:
            self._doubts[NOBODY] = _Doubt(message, now_s + DOUBT_LASTS_S, now_s)
        return self._step()

    def leave(self) -> list[GroupCall]:
        """Say that we go, to the proposer or the next one; nothing is to be handed in afterwards."""
        to = self._order.next_after(self._me) if self._order.mine else self._order.proposer
        if to != self._me and self._member.acknowledged is not None:
            key = self._member.acknowledged_key
            self._send(to, Doubt(self._epoch, key, self._me, "it leaves the group"))
        return self._drain()

    # What others say

    def _claimed(self, sender: str) -> bool:
        """``sender`` acts as a proposer: tell whether it is taken for one; else see to our own."""
        self._order.heard(sender, self._now_s)
        takes = self._order.takes(sender, self._now_s)
        if not takes:
            self._verify()
        return takes

    def _pinged(self, sender: str, ping: GroupPing) -> GroupPong:
        takes = self._claimed(sender) if ping.proposes else self._order.takes(sender, self._now_s)
        if ping.proposes and sender == self._order.proposer:
            self._member.superseded(ping.active)
        follows = self._order.follows(self._now_s)
        return GroupPong(self._member.acknowledged_key, self._member.active_key, follows, takes)

    def _ponged(self, peer: str, ping: GroupPing, pong: GroupPong, sent_s: float) -> None:
        self._proposer.learn(pong.acknowledged)
        if pong.follows == peer and self._order.before(peer, self._me):
            self._order.heard(peer, self._now_s)  # it does propose: the turn isn't ours
        elif ping.proposes and self._order.mine:
            self._proposer.pong(peer, pong, sent_s, self._now_s)

    def _heed(self, sender: str, doubt: Doubt) -> None:
        """Somebody doubts a member, or says of itself that it leaves."""
        leaves = doubt.peer == sender
        if leaves:
            self._order.pass_over(sender, self._now_s)
        elif doubt.peer == self._order.proposer:
            self._verify()
        if self._order.mine and doubt.peer == NOBODY:
            self._proposer.renewed(doubt.key)
        elif self._order.mine and doubt.peer != self._me:
            self._proposer.doubted(doubt.peer, doubt.key, self._now_s, leaves=leaves)

    def _verify(self) -> None:
        """Ask the proposer whether it still is; it is passed over when it doesn't answer."""
        if not self._order.mine and self._now_s >= self._verified_s + VERIFY_EVERY_S:
            self._verified_s = self._now_s
            self._send(self._order.proposer, GroupPing(self._epoch, proposes=False, active=None))

    # What follows from it

    def _step(self) -> list[GroupCall]:
        now_s = self._now_s
        self._order.tick(now_s)
        if self._order.mine:
            self._doubts.clear()
            self._proposer.step(now_s)
        else:
            self._proposer.give_way()
            self._pass_doubts_on()
        return self._drain()

    def _pass_doubts_on(self) -> None:
        for peer, doubt in list(self._doubts.items()):
            to = self._order.next_after(peer) if peer == self._order.proposer else self._order.proposer
            known = peer == NOBODY or peer in self._order.others
            if self._now_s >= doubt.until_s or not known or to == self._me:
                del self._doubts[peer]
            elif doubt.due_s <= self._now_s:
                doubt.due_s = FOREVER
                self._send(to, doubt.message)

    def _send(self, to: str, message: Request) -> None:
        self._number += 1
        call = GroupCall(self._number, to, message, self._timing.answer_s)
        self._calls[call.number] = (call, self._now_s)
        self._out.append(call)

    def _drain(self) -> list[GroupCall]:
        out, self._out = self._out, []
        return out
