"""The core on pings, relays and their answers."""

from __future__ import annotations

import pytest

from p2pdrl.membership.events import Answered, Request, Respond, SendFailed, Tick
from p2pdrl.membership.messages import Ack, GossipMessage, Nack, Ping, PingReq
from p2pdrl.membership.records import Incarnation, with_relays

from .bench import BOOT_MS, KEYS, Bench, first_ping, record, suspicion


def test_a_good_probe_measures_and_heals() -> None:
    bench = Bench()
    bench.gossip(suspicion(0, 1))  # whoever is suspected may be slow itself
    assert bench.core.health == 1
    send = first_ping(bench)
    bench.now += 0.02
    bench.feed(Answered(send.call_id, Ack(Incarnation(BOOT_MS, 0))))
    view = bench.core.member(send.target_id, bench.now)
    assert view is not None
    assert view.rtt_s == pytest.approx(0.02)
    assert view.last_seen_s == 0.0
    assert bench.core.health == 0


def test_a_timeout_asks_relays_and_counts_their_nacks() -> None:
    bench = Bench()
    send = first_ping(bench)
    bench.sent.clear()
    bench.now += 0.5
    bench.feed(Tick())
    asked = [sent for sent in bench.sent if isinstance(sent.message, PingReq)]
    assert len(asked) == 3
    assert all(sent.target_id != send.target_id for sent in asked)
    bench.feed(Answered(asked[0].call_id, Nack("no answer")))
    bench.feed(Answered(asked[1].call_id, Nack("no answer")))
    bench.feed(SendFailed(asked[2].call_id, "timeout", "no answer within 0.5 s"))
    bench.feed(SendFailed(send.call_id, "timeout", "no answer within 1 s"))
    view = bench.core.member(send.target_id, bench.now)
    assert view is not None
    assert view.state == "suspect"
    assert view.state_reason == "no answer to probe; 2 of 3 relays could not reach it either (0 s ago)"
    assert bench.core.health == 1  # one nack is missing: maybe it is us


def test_a_relay_that_reaches_it_saves_it() -> None:
    bench = Bench()
    first_ping(bench)
    bench.sent.clear()
    bench.now += 0.5
    bench.feed(Tick())
    asked = [sent for sent in bench.sent if isinstance(sent.message, PingReq)]
    bench.feed(Answered(asked[0].call_id, Ack(Incarnation(BOOT_MS, 0))))
    bench.run(2.0)
    assert bench.events == []


def test_a_refusal_shows_life_unless_somebody_else_gives_it() -> None:
    bench = Bench()
    send = first_ping(bench)
    bench.feed(SendFailed(send.call_id, "refused", "it answered 429: busy", 429))
    assert bench.events == []
    bench.sent.clear()
    send = first_ping(bench)
    bench.feed(SendFailed(send.call_id, "refused", "it answered 403: another node lives here", 403))
    assert [event.kind for event in bench.events] == ["suspect"]


def test_our_own_trouble_accuses_nobody_at_once() -> None:
    bench = Bench()
    send = first_ping(bench)
    bench.feed(SendFailed(send.call_id, "local", "out of file descriptors"))
    assert bench.core.health == 1
    assert bench.events == []


def test_a_suspect_is_probed_with_the_accusation() -> None:
    bench = Bench(others=1)
    bench.core.assume([record(2)], 0.0)
    accusation = suspicion(1, 2)
    bench.gossip(accusation, sender=2)
    bench.sent.clear()
    while True:
        send = first_ping(bench)
        bench.sent.clear()
        if send.target_id == KEYS[1].node_id:
            break
    assert isinstance(send.message, Ping)
    assert accusation in send.message.records


def test_we_relay_only_to_addresses_that_we_know() -> None:
    bench = Bench()
    answer = bench.ask(1, PingReq(KEYS[7].node_id, Incarnation(BOOT_MS, 0)))
    assert isinstance(answer, Nack)
    bench.sent.clear()
    token = 10**7
    bench.feed(Request(token, KEYS[1].node_id, PingReq(KEYS[2].node_id, Incarnation(BOOT_MS, 0))))
    (send,) = [sent for sent in bench.sent if isinstance(sent.message, Ping)]
    assert send.to == "10.0.0.2:7600"
    assert send.deadline_s == pytest.approx(0.4)  # the nack comes at 80 % of the timeout
    bench.feed(SendFailed(send.call_id, "timeout", "no answer within 0.4 s"))
    assert Respond(token, Nack("no answer within 0.4 s")) in bench.other_effects


def test_who_doesnt_know_us_asks_and_is_told() -> None:
    bench = Bench()
    send = first_ping(bench)
    bench.sent.clear()
    bench.feed(Answered(send.call_id, Ack(Incarnation(BOOT_MS, 0), (), True)))
    (introduction,) = [sent for sent in bench.sent if isinstance(sent.message, GossipMessage)]
    assert isinstance(introduction.message, GossipMessage)
    assert bench.core.me in introduction.message.records


@pytest.mark.parametrize("how", ["unreachable", "timeout"])
def test_an_outbound_only_member_that_speaks_isn_t_accused_and_one_that_is_silent_is(how: str) -> None:
    """Nobody can dial it: when its relays fail, its own calls show that it lives."""
    bench = Bench(others=1)
    bench.gossip(record(1, 1, tags=with_relays({}, [])))
    bench.down[1] = how
    for _ in range(40):
        bench.run(1.5)
        bench.ask(1, Ping(Incarnation(BOOT_MS, 1), Incarnation(BOOT_MS, 0)))
    assert bench.kinds(1) == ["updated"]
    bench.run(30.0)
    assert bench.kinds(1) == ["updated", "suspect", "dead"]


def test_others_accusations_don_t_kill_an_outbound_only_member_that_speaks() -> None:
    bench = Bench()
    bench.gossip(record(1, 1, tags=with_relays({}, [KEYS[2].node_id])))
    bench.down[1] = "timeout"
    bench.gossip(*(suspicion(1, accuser, counter=1) for accuser in (2, 3, 4)), sender=2)
    for _ in range(20):
        bench.run(1.5)
        bench.ask(1, Ping(Incarnation(BOOT_MS, 1), Incarnation(BOOT_MS, 0)))
    assert bench.state(1) == "suspect"
    bench.run(10.0)
    assert bench.state(1) == "dead"


def test_a_direct_member_is_accused_though_it_speaks() -> None:
    bench = Bench(others=1)
    bench.down[1] = "unreachable"
    bench.run(1.5)
    bench.ask(1, Ping(Incarnation(BOOT_MS, 0), Incarnation(BOOT_MS, 0)))
    bench.run(1.5)
    assert bench.state(1) == "suspect"
