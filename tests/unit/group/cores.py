"""Cores of a group in some states."""

from __future__ import annotations

from p2pdrl.group.agreement import GroupCore
from p2pdrl.group.rendezvous import ranked
from p2pdrl.group.view import Accept, Acknowledged, Activate, GroupPing, GroupPong, GroupView, Invite, ViewKey

FIRST, SECOND, THIRD = ranked("group 1", [f"{number:032x}" for number in range(3)])

ALL = tuple(sorted([FIRST, SECOND, THIRD]))


def make(me, *others, now_s=0.0, first_generation=0):
    core = GroupCore(me, 1, lambda: b"note of " + me[-1:].encode(), now_s, first_generation=first_generation)
    return core, core.tick(others, now_s)


def of(kind, calls):
    return [call for call in calls if isinstance(call.message, kind)]


def view(generation, members=ALL, proposer=FIRST):
    return GroupView(ViewKey(1, generation, proposer), tuple(sorted(members)))


def pong(acknowledged=None, active=None, follows=FIRST, *, takes=True):
    return GroupPong(acknowledged, active, follows, takes)


def forming(core, calls, now_s=0.01):
    """Let all answer the pings; return the invitations."""
    out = []
    for call in of(GroupPing, calls):
        out += core.answered(call.number, pong(follows=""), now_s)
    return of(Invite, out)


def formed(*, now_s=0.02):
    """A first node in force with the two others."""
    core, calls = make(FIRST, SECOND, THIRD)
    out = []
    for call in forming(core, calls):
        out += core.answered(call.number, Accept(call.message.view.key, b"theirs"), now_s)
    told = of(Activate, out)
    for call in told:
        core.answered(call.number, Acknowledged(), now_s)
    return core


def joined(generation=5, now_s=0.0):
    """A third node in force in a view of the first."""
    core, _ = make(THIRD, FIRST, SECOND)
    answer, _ = core.request(FIRST, Invite(view(generation)), now_s)
    assert isinstance(answer, Accept)
    notes = dict.fromkeys(ALL, b"")
    answer, _ = core.request(FIRST, Activate(view(generation).key, notes), now_s)
    assert isinstance(answer, Acknowledged)
    return core
