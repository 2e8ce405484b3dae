"""Who is taken in on a member's word, who answers a ping first, and how far one that makes up nodes comes."""

from __future__ import annotations

from p2pdrl.membership.events import Tick
from p2pdrl.membership.introductions import Introductions, itself_from
from p2pdrl.membership.messages import JoinRequest, Ping, Welcome
from p2pdrl.membership.parameters import MembershipConfig
from p2pdrl.membership.records import Incarnation

from .bench import BOOT_MS, KEYS, Bench, record

AT_ONCE = int(MembershipConfig().introduced_at_once)
NEW = range(10, 10 + 3 * AT_ONCE)


def introduce(bench: Bench, numbers: range, sender: int = 1) -> None:
    for first in numbers[::16]:
        last = min(first + 16, numbers.stop)
        bench.gossip(*(record(number) for number in range(first, last)), sender=sender)


def taken(bench: Bench, numbers: range = NEW) -> int:
    return sum(bench.state(number) == "alive" for number in numbers)


def test_a_few_are_taken_on_one_members_word_and_the_others_once_they_answer() -> None:
    bench = Bench()
    introduce(bench, NEW)
    assert taken(bench) == AT_ONCE
    bench.run(8.0)
    assert taken(bench) == len(NEW)
    assert all(bench.kinds(number) == ["joined"] for number in NEW)


def test_who_never_answers_is_never_taken_and_its_introducer_is_believed_no_more() -> None:
    bench = Bench()
    bench.down = dict.fromkeys(NEW, "unreachable")
    introduce(bench, NEW)
    bench.run(120.0)
    assert taken(bench) == 0
    assert sum("joined" in bench.kinds(number) for number in NEW) == AT_ONCE
    later = range(120, 130)
    bench.down |= dict.fromkeys(later, "timeout")
    introduce(bench, later)
    assert taken(bench, later) == 0
    bench.run(30.0)
    assert not any(bench.kinds(number) for number in later)


def test_another_members_word_is_as_good_as_ever_and_an_hour_heals_the_liars() -> None:
    bench = Bench()
    bench.down = dict.fromkeys(NEW, "unreachable")
    introduce(bench, NEW)
    bench.run(120.0)
    introduce(bench, range(120, 124), sender=2)
    assert taken(bench, range(120, 124)) == 4
    bench.run(3700.0)
    introduce(bench, range(130, 134))
    assert taken(bench, range(130, 134)) == 4


def test_a_liar_that_was_blamed_can_still_introduce_who_is_there() -> None:
    bench = Bench()
    bench.down = dict.fromkeys(NEW, "unreachable")
    introduce(bench, NEW)
    bench.run(120.0)
    introduce(bench, range(120, 124))
    assert taken(bench, range(120, 124)) == 0
    bench.run(2.0)
    assert taken(bench, range(120, 124)) == 4


def test_the_dead_whom_nobody_heard_come_back_only_by_answering() -> None:
    bench = Bench()
    bench.down = dict.fromkeys(NEW, "unreachable")
    introduce(bench, NEW)
    bench.run(120.0)
    again = [record(number, incarnation=Incarnation(BOOT_MS + 1, 0)) for number in NEW[:8]]
    bench.gossip(*again)
    assert taken(bench) == 0
    bench.down = {}
    bench.run(5.0)
    assert taken(bench, NEW[:8]) == 8


def test_those_who_bring_their_own_records_are_taken_by_network() -> None:
    bench = Bench()
    many = range(10, 10 + 5 * AT_ONCE)
    for number in many:
        answer = bench.ask(number, JoinRequest(record(number)), told_by="10.0.0.77")
        assert isinstance(answer, Welcome), "it gets its welcome all the same"
    assert taken(bench, many) == 4 * AT_ONCE
    answer = bench.ask(180, JoinRequest(record(180)), told_by="10.0.0.78")
    assert isinstance(answer, Welcome)
    assert bench.state(180) == "alive", "another network isn't concerned"
    bench.run(8.0)
    assert taken(bench, many) == len(many)


def test_no_more_wait_than_there_is_room_for_and_introducers_take_turns() -> None:
    config = MembershipConfig(introduced_at_once=0.0, introduced_waiting=2)
    made = Introductions(config)
    for number in range(10, 15):
        for introducer in ("a", "b"):
            if made.has_room(introducer, 0.0):
                made.wait(introducer, record(number + (50 if introducer == "b" else 0)), 0.0)
    assert len(made) == 4
    order = [made.next() for _ in range(5)]
    assert [found[0] if found else None for found in order] == ["a", "b", "a", "b", None]


def test_addresses_of_one_ipv6_network_share_its_word() -> None:
    assert itself_from("2001:db8::1") == itself_from("2001:db8::2") != itself_from("2001:db8:1::1")
    assert itself_from("10.0.0.1") != itself_from("10.0.0.2")


def test_a_newcomer_that_waits_is_pinged_by_its_own_id() -> None:
    bench = Bench(introduced_at_once=0.0)
    bench.gossip(record(20))
    while not any(send.target_id == KEYS[20].node_id for send in bench.sent):
        due = bench.core.next_wakeup()
        assert due is not None
        bench.now = due
        bench.sent = [send for send in bench.sent if send.target_id == KEYS[20].node_id]
        bench.feed(Tick())
    ping = next(send for send in bench.sent if send.target_id == KEYS[20].node_id)
    assert isinstance(ping.message, Ping)
    assert ping.to == "10.0.0.20:7600"
    assert bench.state(20) == "unknown"
