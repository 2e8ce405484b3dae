"""The pure core of a group: invitations, acknowledgements, views."""

from __future__ import annotations

import pytest

from p2pdrl.group.agreement import GroupCore
from p2pdrl.group.view import MAX_GENERATION, Accept, Activate, GroupPing, GroupView, Invite, Refuse, ViewKey

from .cores import ALL, FIRST, SECOND, THIRD, formed, forming, joined, make, of, pong, view


def test_alone_a_view_of_one_is_in_force_at_once():
    core, calls = make(THIRD)
    assert calls == []
    assert core.active.view == GroupView(ViewKey(1, 1, THIRD), (THIRD,))
    assert core.active.notes == {THIRD: b"note of " + THIRD[-1:].encode()}


def test_who_isn_t_first_waits():
    core, calls = make(THIRD, FIRST, SECOND)
    assert calls == []
    assert core.active is None
    assert core.proposer == FIRST


def test_from_its_acknowledgement_on_a_member_acts_in_no_view():
    core = joined(5)
    assert core.active.view == view(5)
    answer, _ = core.request(FIRST, Invite(view(6)), 1.0)
    assert answer == Accept(view(6).key, b"note of " + THIRD[-1:].encode())
    assert core.active is None
    assert core.acknowledged == view(6)


def test_an_invitation_that_arrives_twice_is_acknowledged_alike_and_changes_nothing():
    notes = iter([b"1", b"2", b"3"])
    core = GroupCore(THIRD, 1, lambda: next(notes), 0.0)
    core.tick([FIRST, SECOND], 0.0)
    first, _ = core.request(FIRST, Invite(view(5)), 0.0)
    core.request(FIRST, Activate(view(5).key, dict.fromkeys(ALL, b"")), 0.1)
    again, _ = core.request(FIRST, Invite(view(5)), 0.2)
    assert again == first
    assert core.active.view == view(5)


@pytest.mark.parametrize(
    "invited",
    [
        view(4),
        view(5, members=[FIRST, THIRD]),
        view(6, members=[FIRST, SECOND]),
        view(6, proposer=SECOND),
        GroupView(ViewKey(2, 6, FIRST), ALL),
        GroupView(ViewKey(1, MAX_GENERATION, FIRST), ALL),
        GroupView(ViewKey(1, 6, FIRST), ALL[::-1]),
        GroupView(ViewKey(1, 6, FIRST), (*ALL, ALL[-1])),
    ],
    ids=["older", "same key", "without us", "another's", "epoch", "absurd", "unordered", "twice"],
)
def test_what_is_not_a_greater_view_with_us_is_refused(invited):
    core = joined(5)
    answer, _ = core.request(FIRST, Invite(invited), 0.1)
    assert isinstance(answer, Refuse)
    assert answer.acknowledged == view(5).key
    assert core.active.view == view(5)


def test_a_later_one_in_the_order_doesn_t_pull_us_out_of_a_view_in_which_all_is_well():
    core = joined(5)
    answer, calls = core.request(SECOND, Invite(view(6, proposer=SECOND)), 0.1)
    assert answer == Refuse(view(5).key, takes=False)
    assert [(call.to, call.message.proposes) for call in of(GroupPing, calls)] == [
        (FIRST, False)
    ]  # is it there?
    core.failed(calls[0].number, "unreachable", 0.2)
    answer, _ = core.request(SECOND, Invite(view(6, proposer=SECOND)), 0.3)
    assert isinstance(answer, Accept)


@pytest.mark.parametrize(
    ("sender", "key", "members"),
    [(SECOND, 5, ALL), (FIRST, 4, ALL), (FIRST, 5, ALL[:2])],
    ids=["another's", "old", "notes"],
)
def test_a_view_comes_in_force_only_by_its_proposer_and_with_all_notes(sender, key, members):
    core, _ = make(THIRD, FIRST, SECOND)
    core.request(FIRST, Invite(view(5)), 0.0)
    notes = dict.fromkeys(members, b"")
    answer, _ = core.request(sender, Activate(view(key).key, notes), 0.1)
    assert isinstance(answer, Refuse)
    assert core.active is None


def test_a_member_hears_that_the_others_went_on_without_it():
    core = joined(5)
    core.request(FIRST, GroupPing(1, proposes=True, active=view(5).key), 0.5)
    assert core.active is not None
    core.request(FIRST, GroupPing(1, proposes=True, active=view(9, [FIRST, SECOND]).key), 1.0)
    assert core.active is None


def test_a_note_is_cut_to_its_bound():
    core = GroupCore(FIRST, 1, lambda: bytes(300), 0.0)
    core.tick([], 0.0)
    assert core.active.notes == {FIRST: bytes(256)}


def test_a_view_is_in_force_when_all_have_acknowledged_not_before():
    core, calls = make(FIRST, SECOND, THIRD)
    one, other = forming(core, calls)
    assert one.message.view == view(1)
    core.answered(one.number, Accept(view(1).key, b"one"), 0.1)
    assert core.active is None
    told = core.answered(other.number, Accept(view(1).key, b"other"), 0.1)
    assert core.active.view == view(1)
    notes = {FIRST: b"note of " + FIRST[-1:].encode(), one.to: b"one", other.to: b"other"}
    assert core.active.notes == notes
    assert [call.message.notes for call in of(Activate, told)] == [notes, notes]


def test_generations_begin_above_the_given_one():
    core, calls = make(FIRST, SECOND, THIRD, first_generation=70)
    assert forming(core, calls)[0].message.view.key.generation == 71


def test_nobody_is_invited_before_it_answered():
    core, calls = make(FIRST, SECOND, THIRD)
    ping = next(call for call in of(GroupPing, calls) if call.to == SECOND)
    assert core.answered(ping.number, pong(follows=""), 0.01) == []
    invited = of(Invite, core.tick([SECOND, THIRD], 0.3))  # gathered long enough
    assert [(call.to, call.message.view.members) for call in invited] == [
        (SECOND, tuple(sorted([FIRST, SECOND])))
    ]


def test_an_invitation_that_got_lost_is_sent_again():
    core, calls = make(FIRST, SECOND, THIRD)
    one, _ = forming(core, calls)
    again = of(Invite, core.failed(one.number, "timeout", 0.5))
    assert [(call.to, call.message) for call in again] == [(one.to, one.message)]


def test_who_doesn_t_acknowledge_in_two_seconds_is_left_out_of_the_next():
    core, calls = make(FIRST, SECOND, THIRD)
    one, other = forming(core, calls)
    core.answered(one.number, Accept(view(1).key, b""), 0.1)
    assert of(Invite, core.tick([SECOND, THIRD], 1.9)) == []
    invited = of(Invite, core.tick([SECOND, THIRD], 2.1))
    assert {call.to for call in invited} == {one.to}
    assert invited[0].message.view == view(2, [FIRST, one.to])
    late = core.answered(other.number, Accept(view(1).key, b""), 2.2)
    assert core.active is None
    assert of(Activate, late) == []  # too late for the first view


def test_who_is_gone_is_left_out_of_the_next_at_once():
    core, calls = make(FIRST, SECOND, THIRD)
    one, other = forming(core, calls)
    core.failed(other.number, "refused", 0.05)
    invited = of(Invite, core.tick([SECOND, THIRD], 0.06))
    assert invited == []
    assert core.acknowledged == view(2, [FIRST, one.to])


def test_a_greater_view_is_met_by_a_greater_one_at_once():
    core, calls = make(FIRST, SECOND, THIRD)
    one, _ = forming(core, calls)
    out = core.answered(one.number, Refuse(ViewKey(1, 40, SECOND), takes=True), 0.1)
    assert {call.message.view for call in of(Invite, out)} == {view(41)}


def test_who_follows_another_is_not_invited_again_and_again():
    core, calls = make(FIRST, SECOND, THIRD)
    one, other = forming(core, calls)
    out = core.answered(one.number, Refuse(None, takes=False), 0.1)
    assert {(call.to, call.message.view.members) for call in of(Invite, out)} <= {
        (other.to, tuple(sorted([FIRST, other.to])))
    }


def test_a_member_that_missed_that_the_view_is_in_force_is_told_again():
    core = formed()
    pings = of(GroupPing, core.tick([SECOND, THIRD], 1.1))
    assert {call.to for call in pings} == {SECOND, THIRD}
    key = core.active.view.key
    out = core.answered(pings[0].number, pong(key, None), 1.2)
    assert [(call.to, call.message.key) for call in of(Activate, out)] == [(pings[0].to, key)]
    assert core.answered(pings[1].number, pong(key, key), 1.2) == []


@pytest.mark.parametrize("acknowledged", [None, ViewKey(1, 90, SECOND)])
def test_a_member_that_restarted_or_acknowledged_another_s_view_gets_a_new_one(acknowledged):
    core = formed()
    ping = of(GroupPing, core.tick([SECOND, THIRD], 1.1))[0]
    out = core.answered(ping.number, pong(acknowledged, None), 1.2)
    generation = 91 if acknowledged else 2
    assert {call.message.view for call in of(Invite, out)} == {view(generation)}


def test_an_answer_from_before_the_view_says_nothing_about_it():
    core, calls = make(FIRST, SECOND, THIRD)
    invited = forming(core, calls)
    late = of(GroupPing, core.tick([SECOND, THIRD], 1.05))
    for call in invited:
        core.answered(call.number, Accept(view(1).key, b""), 1.1)
    assert core.active is not None
    assert of(Invite, core.answered(late[0].number, pong(None, None), 1.2)) == []
    assert core.active is not None
