"""Whom a proposer may propose."""

from __future__ import annotations

import pytest

from p2pdrl.group.agreement import Roster
from p2pdrl.group.view import Timing

TIMING = Timing()


@pytest.fixture
def roster() -> Roster:
    made = Roster(TIMING)
    made.living(["a", "b"], 0.0)
    made.due(0.0)
    return made


def answers(roster, *peers, at_s=0.01):
    for peer in peers:
        roster.answered(peer, at_s, takes=True)


def test_newcomers_are_asked_at_once_and_then_every_second(roster):
    assert roster.due(5.0) == []  # not before there was an answer
    answers(roster, "a", "b")
    assert roster.due(1.0) == []
    assert sorted(roster.due(1.02)) == ["a", "b"]
    roster.living(["a", "b", "c"], 1.1)
    assert roster.due(1.1) == ["c"]


def test_only_those_that_answered_and_would_come_are_fit(roster):
    assert roster.fit(0.0) == set()
    roster.answered("a", 0.1, takes=True)
    roster.answered("b", 0.1, takes=False)
    assert roster.fit(0.1) == {"a"}
    roster.living(["b"], 0.2)
    assert roster.fit(0.2) == set()


def test_unknown_ones_are_awaited_for_a_moment(roster):
    answers(roster, "a")
    assert roster.must_wait((), 0.2)
    assert not roster.must_wait((), 0.26)
    answers(roster, "b")
    assert not roster.must_wait((), 0.2)


def test_before_the_first_view_those_still_in_another_mode_are_awaited(roster):
    answers(roster, "a")
    for at_s in (0.05, 0.5, 1.0):
        roster.failed("b", "elsewhere", at_s)
        assert "b" in roster.due(at_s + 0.11)  # it is asked again soon
    assert roster.must_wait((), 1.99)
    assert not roster.must_wait((), 2.0)
    assert not roster.must_wait(["a"], 1.0)
    answers(roster, "b", at_s=1.5)
    assert not roster.must_wait((), 1.6)


def test_who_goes_over_to_another_mode_is_out_at_once(roster):
    answers(roster, "a", "b")
    roster.failed("b", "elsewhere", 0.5)
    assert roster.fit(0.5) == {"a"}
    assert not roster.must_wait((), 0.6)
    roster.failed("a", "refused", 0.5)
    assert not roster.must_wait((), 0.6)


def test_present_members_that_follow_another_are_awaited_until_they_must_have_noticed(roster):
    answers(roster, "a")
    roster.answered("b", 0.1, takes=False)
    assert not roster.must_wait(["a"], 0.2)
    assert roster.must_wait(["a", "b"], 0.2)
    assert roster.must_wait(["a", "b"], 3.7)
    assert not roster.must_wait(["a", "b"], 3.76)


@pytest.mark.parametrize(("why", "times"), [("refused", 1), ("unreachable", 2), ("timeout", 5)])
def test_how_many_failures_cost_the_place(roster, why, times):
    answers(roster, "a", "b")
    now_s, count = 1.01, 0
    while "a" in roster.fit(now_s):
        now_s += 0.6 if why == "timeout" else 0.1
        roster.failed("a", why, now_s)
        count += 1
    assert count == times
    assert roster.fit(now_s) == {"b"}


def test_a_failed_one_is_asked_again_with_back_off(roster):
    waits_s, now_s = [], 0.0
    for _ in range(5):
        roster.failed("a", "unreachable", now_s)
        due_s = next(now_s + step * 0.05 for step in range(60) if "a" in roster.due(now_s + step * 0.05))
        waits_s.append(round(due_s - now_s, 2))
        now_s = due_s
    assert waits_s == sorted(waits_s)
    assert waits_s[-1] == TIMING.ping_s


@pytest.mark.parametrize(("doubted", "most_s"), [(False, 2.0), (True, 30.0)])
def test_rests_double_up_to_their_bound_and_are_forgotten(roster, doubted, most_s):
    rests_s, now_s = [], 0.0
    for _ in range(9):
        answers(roster, "a", at_s=now_s)
        roster.leave_out("a", now_s, doubted=doubted)
        roster.leave_out("a", now_s, doubted=doubted)  # of who is out already nothing is changed
        roster.answered("a", now_s, takes=True)
        rests_s.append(next(step * 0.1 for step in range(400) if "a" in roster.fit(now_s + step * 0.1)))
        now_s += rests_s[-1]
    assert rests_s[:3] == [pytest.approx(0.5), pytest.approx(1.0), pytest.approx(2.0)]
    assert rests_s[-1] == pytest.approx(most_s)
    roster.living(["a", "b"], now_s + 61.0)
    answers(roster, "a", at_s=now_s + 61.0)
    roster.leave_out("a", now_s + 61.0)
    roster.answered("a", now_s + 61.0, takes=True)
    assert roster.fit(now_s + 61.51) == {"a"}


def test_nothing_is_known_of_those_that_are_gone(roster):
    roster.living([], 1.0)
    for touch in (
        lambda: roster.answered("a", 1.0, takes=True),
        lambda: roster.acknowledged("a", 1.0),
        lambda: roster.failed("a", "timeout", 1.0),
        lambda: roster.leave_out("a", 1.0),
    ):
        touch()
    assert roster.fit(1.0) == set()
    assert not roster.must_wait(["a"], 1.0)


def test_a_new_turn_asks_everybody_anew(roster):
    answers(roster, "a", "b")
    roster.begin()
    roster.living(["a", "b"], 2.0)
    assert roster.fit(2.0) == set()
    assert sorted(roster.due(2.0)) == ["a", "b"]
