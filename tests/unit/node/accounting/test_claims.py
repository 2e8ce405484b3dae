"""What is believed of others' counts, by a clock that the test holds."""

from __future__ import annotations

import math

import pytest

from p2pdrl.node.accounting import claims
from p2pdrl.node.accounting.claims import ClaimBounds

ME, A, B, C, LIAR, UNKNOWN = "me", "a", "b", "c", "liar", "invented"
RATE = 1000.0


class Believer:
    """Hears counts, and keeps what it believes of them."""

    def __init__(self, *alive: str) -> None:
        self.bounds = ClaimBounds(ME, RATE)
        self.now_s = 100.0
        self.alive = alive
        self.known: dict[str, int] = {}
        self.bounds.look(alive, self.now_s)

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.bounds.look(self.alive, self.now_s)

    def hear(self, node: str, total: int, teller: str | None = None) -> bool:
        gain = total - self.known.get(node, 0)
        believed = self.bounds.admit(
            ("l0", node), node, total=total, gain=gain, teller=teller or node, now_s=self.now_s
        )
        if believed:
            self.known[node] = total
        return believed


def test_honest_counts_are_believed_at_once():
    one = Believer(A)
    total = 0
    for _ in range(600):
        one.wait(1.0)
        total += 500
        assert one.hear(A, total)
    assert one.bounds.held == 0


@pytest.mark.parametrize("lie", [10**9, 2**50])
def test_what_nobody_can_have_done_in_that_time_isnt_believed(lie):
    one = Believer(LIAR)
    one.wait(3600.0)
    for _ in range(100):
        one.wait(1.0)
        assert not one.hear(LIAR, lie)
    assert one.bounds.held == 100


def test_what_was_too_much_counts_when_time_has_passed():
    one = Believer(A)
    assert not one.hear(A, 60_000)
    one.wait(58.0)
    assert not one.hear(A, 60_000)
    one.wait(1.1)
    assert one.hear(A, 60_000)
    assert not one.hear(A, 60_000 + 6000)


def test_a_long_silence_saves_up_no_more_than_a_burst():
    one = Believer(A)
    one.wait(10_000.0)
    assert not one.hear(A, int(RATE * claims.BURST_S) + 1)
    assert one.hear(A, int(RATE * claims.BURST_S))


def test_a_node_makes_nothing_believable_while_it_isnt_alive():
    one = Believer(A)
    assert not one.hear(A, 10_000)
    one.alive = ()
    one.wait(0.0)
    one.wait(3600.0)
    assert not one.hear(A, 10_000, teller=B)
    one.alive = (A,)
    one.wait(0.0)
    one.wait(8.9)
    assert not one.hear(A, 10_000)
    one.wait(0.2)
    assert one.hear(A, 10_000)


def test_members_that_somebody_made_up_help_it_no_more_than_lies_about_itself():
    one = Believer(LIAR)
    one.wait(60.0)
    believed = sum(one.hear(f"{UNKNOWN} {number}", 1000, teller=LIAR) for number in range(1000))
    assert believed == claims.BURST_S
    assert not one.hear(UNKNOWN, 1, teller="no member either")


def test_a_liars_words_about_others_cost_them_nothing():
    one = Believer(A, LIAR)
    for number in range(100):
        one.hear(f"{UNKNOWN} {number}", 10**9, teller=LIAR)
    assert one.hear(A, 1000)


def newcomer(*alive: str, age_s: float = 1e6) -> Believer:
    one = Believer()
    one.bounds.joined(one.now_s, lambda: age_s)
    one.alive = alive
    one.wait(0.0)
    return one


def test_a_newcomer_believes_the_history_that_two_others_hold_true():
    one = newcomer(A, B, C)
    assert not one.hear(A, 10**6)
    assert not one.hear(A, 10**6, teller=B)
    assert one.hear(A, 10**6, teller=C)
    assert not one.hear(UNKNOWN, 10**7, teller=A)
    assert not one.hear(UNKNOWN, 10**7, teller=A)
    assert one.hear(UNKNOWN, 10**7, teller=B)


def test_counts_that_grow_while_they_get_around_are_vouched_for_too():
    one = newcomer(A, B, C)
    assert not one.hear(A, 10**6, teller=B)
    assert one.hear(A, 10**6 + 900, teller=C)
    assert one.known[A] == 10**6 + 900


def test_where_there_is_one_other_its_word_is_enough_and_so_is_the_only_members():
    assert newcomer(A, B).hear(A, 10**6, teller=B)
    assert newcomer(A).hear(A, 10**6)
    assert newcomer(A).hear(UNKNOWN, 10**6, teller=A)
    assert not newcomer(A, LIAR).hear(LIAR, 10**6)
    assert not newcomer(A, B, LIAR).hear(UNKNOWN, 10**6, teller=LIAR)


@pytest.mark.parametrize("age_s", [900.0, -5.0, math.nan])
def test_no_history_is_longer_than_the_swarm_is_old(age_s):
    one = newcomer(A, B, C, age_s=age_s)
    assert not any(one.hear(A, 10**6, teller=teller) for teller in (A, B, C))


def test_no_swarm_is_so_old():
    one = newcomer(A, age_s=math.inf)
    assert not one.hear(A, 2**50)


def test_who_is_here_for_long_believes_no_history():
    one = newcomer(A, B, C)
    one.wait(claims.HISTORY_S + 1)
    assert not any(one.hear(UNKNOWN, 10**7, teller=teller) for teller in (A, B, C))
    founder = Believer(A)
    assert not founder.hear(A, 10**6)


def test_a_machine_that_is_fast_itself_believes_others_to_be():
    one = Believer(A)
    for second in range(30):
        one.bounds.made(second * 10_000, one.now_s)
        one.wait(1.0)
    assert one.bounds.steps_per_s == pytest.approx(claims.OWN_RATES * 10_000)
    one.bounds.made(0, one.now_s)
    assert one.bounds.steps_per_s == pytest.approx(claims.OWN_RATES * 10_000)


def test_tables_are_bounded(monkeypatch):
    monkeypatch.setattr(claims, "MAX_MEMBERS", 3)
    monkeypatch.setattr(claims, "MAX_WORDS", 2)
    one = newcomer(A, B, C)
    one.alive = (A, B, LIAR)
    one.wait(1.0)
    assert one.hear(LIAR, 900), "C is gone and makes room"
    one.alive = (A, B, LIAR, UNKNOWN)
    one.wait(1.0)
    assert not one.hear(UNKNOWN, 1)
    for number in range(10):
        assert not one.hear(f"{UNKNOWN} {number}", 10**6, teller=A)
    assert [one.hear(f"{UNKNOWN} {number}", 10**6, teller=B) for number in range(3)] == [True, True, False]
