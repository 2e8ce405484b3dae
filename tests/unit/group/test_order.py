"""Whose turn it is to propose."""

from __future__ import annotations

import pytest

from p2pdrl.group.agreement import Succession
from p2pdrl.group.rendezvous import ranked

A, B, C, D = ranked("group 3", [f"{number:032x}" for number in range(4)])
SILENCE_S = 3.05


@pytest.fixture
def third() -> Succession:
    order = Succession(C, 3, 0.0, SILENCE_S)
    order.living([A, B, D], 0.0)
    return order


def test_alone_it_is_ours():
    order = Succession(C, 3, 0.0, SILENCE_S)
    assert (order.mine, order.proposer, order.follows(0.0)) == (True, C, C)
    assert order.next_after(C) == C


def test_the_first_of_the_living_proposes_and_epochs_differ(third):
    assert third.proposer == A
    third.living([B, D], 1.0)
    assert third.proposer == B
    firsts = {ranked(f"group {epoch}", [A, B, C, D])[0] for epoch in range(40)}
    assert firsts == {A, B, C, D}


def test_the_silent_are_passed_over_one_after_another_each_with_its_own_time(third):
    turns = []
    for tick in range(90):
        third.tick(tick * 0.1)
        turns.append(third.proposer)
    assert [turns.count(one) for one in (A, B)] == [31, 31]
    assert turns[-1] == C
    third.heard(B, 9.0)
    assert third.proposer == B
    third.heard(A, 9.0)
    assert third.proposer == A


def test_who_dies_and_comes_back_begins_anew(third):
    third.pass_over(A, 0.0)
    third.living([B, D], 1.0)
    third.living([A, B, D], 2.0)
    assert third.proposer == A


def test_strangers_are_neither_heard_nor_passed_over(third):
    third.heard("f" * 32, 0.0)
    third.pass_over("f" * 32, 0.0)
    assert third.proposer == A
    assert third.follows(0.0) == ""


@pytest.mark.parametrize(
    ("heard", "inviter", "takes"),
    [
        (None, A, True),
        (None, D, True),  # nobody was heard yet
        (A, A, True),
        (A, B, False),
        (A, D, False),
        (A, "f" * 32, False),
    ],
)
def test_who_follows_somebody_takes_only_those_before_him(third, heard, inviter, takes):
    if heard is not None:
        third.heard(heard, 1.0)
    assert third.takes(inviter, 2.0) is takes
    assert third.takes(inviter, 4.2) is True  # by then he is silent


def test_a_proposer_takes_only_those_before_itself(third):
    third.pass_over(A, 0.0)
    third.pass_over(B, 0.0)
    assert third.mine
    assert [third.takes(one, 1.0) for one in (A, B, D, "f" * 32)] == [True, True, False, False]


def test_the_first_few_of_the_order(third):
    assert third.first({B, A, D}, 2) == [A, B]
    assert third.next_after(A) == B
    assert third.before(A, D)
    assert not third.before(D, A)
