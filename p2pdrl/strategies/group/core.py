"""Group views as one state machine: messages, failures and time in; messages out. No I/O.

`service.Group` carries the messages; `simulator` does so on invented time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from p2pdrl.strategies.group.member import Member
from p2pdrl.strategies.group.order import Succession
from p2pdrl.strategies.group.proposer import Proposer
from p2pdrl.strategies.group.view import (
    Activate,
    ActiveView,
    Done,
    Doubt,
    GroupView,
    Invite,
    Ping,
    Pong,
    Request,
    Response,
    Timing,
    ViewKey,
)

__all__ = ["Call", "GroupCore"]

FOREVER = float("inf")
DOUBT_LASTS_S = 3.0
VERIFY_EVERY_S = 0.25
NOBODY = ""
"""A doubt of this peer asks for a new view, and says nothing against any member."""
MAX_WHY_CHARS = 200


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
class _Doubt:
    """A doubt of ours, until the proposer has heard it."""

    message: Doubt
    until_s: float
    due_s: float


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
        self._timing = timing if timing is not None else Timing()
        self._now_s = now_s
        self._order = Succession(me, epoch, now_s, self._timing.silence_s)
        self._member = Member(me, epoch, note)
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
        self._calls: dict[int, tuple[Call, float]] = {}
        self._number = 0
        self._out: list[Call] = []

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

    def tick(self, peers: Iterable[str], now_s: float) -> list[Call]:
        """Time passed; ``peers`` live."""
        self._now_s = now_s
        self._order.living(peers, now_s)
        return self._step()

    def request(self, sender: str, message: Request, now_s: float) -> tuple[Response, list[Call]]:
        """A peer's message came: return what to answer."""
        self._now_s = now_s
        answer: Response
        if isinstance(message, Ping):
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
            answer = Done()
        return answer, self._step()

    def answered(self, number: int, response: Response, now_s: float) -> list[Call]:
        """A call of ours was answered."""
        self._now_s = now_s
        call, sent_s = self._calls.pop(number)
        message = call.message
        if isinstance(message, Ping):
            if isinstance(response, Pong):
                self._ponged(call.to, message, response, sent_s)
        elif isinstance(message, Invite):
            self._proposer.invitation_answered(call.to, message.view, response, now_s)
        elif isinstance(message, Activate):
            self._proposer.activation_answered(call.to, message.key, response)
        else:
            self._doubts.pop(message.peer, None)
        return self._step()

    def failed(self, number: int, why: str, now_s: float) -> list[Call]:
        """A call of ours failed; ``why`` is one of the words that `Roster.failed` knows."""
        self._now_s = now_s
        call, _ = self._calls.pop(number)
        message = call.message
        if isinstance(message, Doubt):
            if message.peer in self._doubts:
                self._doubts[message.peer].due_s = now_s + 0.1
        elif isinstance(message, Ping) and not message.proposes:
            if call.to == self._order.proposer:
                self._order.pass_over(call.to, now_s)
        else:
            self._proposer.failed(call.to, message, why, now_s)
        return self._step()

    def doubt(self, peer: str, why: str, now_s: float) -> list[Call]:
        """Ask for a view without ``peer``; the proposer itself is asked whether it lives."""
        self._now_s = now_s
        if peer not in self._order.others:
            return []
        message = Doubt(self._epoch, self._member.acknowledged_key, peer, why[:MAX_WHY_CHARS])
        self._heed(self._me, message)
        if not self._order.mine:
            self._doubts[peer] = _Doubt(message, now_s + DOUBT_LASTS_S, now_s)
        return self._step()

    def renew(self, key: ViewKey, why: str, now_s: float) -> list[Call]:
        """Ask for a view after ``key``, of all who are fit."""
        self._now_s = now_s
        message = Doubt(self._epoch, key, NOBODY, why[:MAX_WHY_CHARS])
        self._heed(self._me, message)
        if not self._order.mine:
            self._doubts[NOBODY] = _Doubt(message, now_s + DOUBT_LASTS_S, now_s)
        return self._step()

    def leave(self) -> list[Call]:
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

    def _pinged(self, sender: str, ping: Ping) -> Pong:
        takes = self._claimed(sender) if ping.proposes else self._order.takes(sender, self._now_s)
        if ping.proposes and sender == self._order.proposer:
            self._member.superseded(ping.active)
        follows = self._order.follows(self._now_s)
        return Pong(self._member.acknowledged_key, self._member.active_key, follows, takes)

    def _ponged(self, peer: str, ping: Ping, pong: Pong, sent_s: float) -> None:
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
            self._send(self._order.proposer, Ping(self._epoch, proposes=False, active=None))

    # What follows from it

    def _step(self) -> list[Call]:
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
        call = Call(self._number, to, message, self._timing.answer_s)
        self._calls[call.number] = (call, self._now_s)
        self._out.append(call)

    def _drain(self) -> list[Call]:
        out, self._out = self._out, []
        return out
