"""The pure core of a group when members die, are doubted or leave."""

from __future__ import annotations

from p2pdrl.group.view import MAX_GENERATION, Acknowledged, Doubt, GroupPing, Invite, Refuse, ViewKey

from .cores import FIRST, SECOND, THIRD, formed, forming, joined, make, of, pong, view


def test_who_dies_is_left_out_at_once():
    core = formed()
    out = core.tick([SECOND], 0.6)
    assert [call.message.view for call in of(Invite, out)] == [view(2, [FIRST, SECOND])]
    assert core.active is None


def test_a_broken_connection_costs_a_member_its_place_only_when_it_breaks_again():
    core = formed()
    ping = next(call for call in core.tick([SECOND, THIRD], 1.1) if call.to == THIRD)
    core.failed(ping.number, "unreachable", 1.1)
    assert core.active is not None
    again = next(call for call in core.tick([SECOND, THIRD], 1.25) if call.to == THIRD)
    core.failed(again.number, "unreachable", 1.25)
    assert core.active is None
    assert core.acknowledged.members == tuple(sorted([FIRST, SECOND]))


def test_a_first_one_that_turns_out_to_propose_makes_the_second_give_way():
    core, _ = make(SECOND, FIRST, THIRD)
    pings = of(GroupPing, core.tick([FIRST, THIRD], 3.6))  # nothing was heard of the first
    assert core.proposer == SECOND
    assert {call.to for call in pings} == {FIRST, THIRD}
    to_first = next(call for call in pings if call.to == FIRST)
    core.answered(to_first.number, pong(follows=FIRST, takes=False), 3.7)
    assert core.proposer == FIRST
    assert of(Invite, core.tick([FIRST, THIRD], 4.5)) == []


def test_nothing_follows_the_greatest_generation():
    core, calls = make(FIRST, SECOND, THIRD, first_generation=MAX_GENERATION - 2)
    one, _ = forming(core, calls)
    assert one.message.view.key.generation == MAX_GENERATION - 1
    out = core.answered(one.number, Refuse(ViewKey(1, MAX_GENERATION + 5, SECOND), takes=True), 0.1)
    assert of(Invite, out) == []


def test_the_proposer_leaves_out_whom_it_doubts_at_once():
    core = formed()
    out = core.doubt(THIRD, "connection refused", 1.0)
    assert [call.message.view for call in of(Invite, out)] == [view(2, [FIRST, SECOND])]


def test_a_doubt_about_a_member_goes_to_the_proposer_until_it_is_heard():
    core = joined(5)
    sent = of(Doubt, core.doubt(SECOND, "late" * 100, 0.1))
    assert [(call.to, call.message.peer, len(call.message.why)) for call in sent] == [(FIRST, SECOND, 200)]
    core.failed(sent[0].number, "timeout", 0.6)
    again = of(Doubt, core.tick([FIRST, SECOND], 0.8))
    assert len(again) == 1
    core.answered(again[0].number, Acknowledged(), 0.9)
    assert of(Doubt, core.tick([FIRST, SECOND], 2.0)) == []


def test_a_doubt_about_the_proposer_goes_to_the_next_and_asks_itself():
    core = joined(5)
    calls = core.doubt(FIRST, "connection refused", 0.1)
    assert [(call.to, type(call.message)) for call in calls] == [(FIRST, GroupPing), (SECOND, Doubt)]
    core.failed(calls[0].number, "unreachable", 0.1)
    assert core.proposer == SECOND


def test_the_next_takes_its_turn_when_a_doubted_proposer_doesn_t_answer():
    core, _ = make(SECOND, FIRST, THIRD)
    core.request(FIRST, GroupPing(1, proposes=True, active=None), 0.0)
    _, calls = core.request(THIRD, Doubt(1, None, FIRST, ""), 0.1)
    assert [(call.to, call.message.proposes) for call in of(GroupPing, calls)] == [(FIRST, False)]
    out = core.failed(calls[0].number, "unreachable", 0.1)
    assert core.proposer == SECOND
    assert {call.to for call in of(GroupPing, out)} == {FIRST, THIRD}


def test_a_doubt_from_an_older_view_is_of_no_interest():
    core = formed()
    old = ViewKey(1, 0, SECOND)
    core.request(SECOND, Doubt(1, old, THIRD, ""), 1.0)
    assert core.active is not None
    core.request(SECOND, Doubt(1, core.active.view.key, THIRD, ""), 1.0)
    assert core.active is None


def test_doubts_about_strangers_and_oneself_change_nothing():
    core = formed()
    assert core.doubt("f" * 32, "", 1.0) == []
    assert core.doubt(FIRST, "", 1.0) == []
    core.request(SECOND, Doubt(1, None, "f" * 32, ""), 1.0)
    core.request(SECOND, Doubt(1, None, FIRST, ""), 1.0)
    assert core.active is not None


def test_a_leaver_is_left_out_and_a_leaving_proposer_passes_its_turn_on():
    core = formed()
    core.request(THIRD, Doubt(1, core.active.view.key, THIRD, "it leaves"), 1.0)
    assert core.acknowledged.members == tuple(sorted([FIRST, SECOND]))
    second, _ = make(SECOND, FIRST, THIRD)
    second.request(FIRST, Doubt(1, None, FIRST, "it leaves"), 0.1)
    assert second.proposer == SECOND


def test_a_goodbye_goes_to_the_proposer_or_from_it_to_the_next():
    assert [(call.to, call.message.peer) for call in joined(5).leave()] == [(FIRST, THIRD)]
    assert [(call.to, call.message.peer) for call in formed().leave()] == [(SECOND, FIRST)]
    alone, _ = make(THIRD)
    assert alone.leave() == []
