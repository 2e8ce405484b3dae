"""The core on what others say of members: alive, suspect, dead, and back."""

from __future__ import annotations

import msgspec

from p2pdrl.membership.events import Answered, Reject, Send, Tick
from p2pdrl.membership.messages import Ack, JoinRequest, Ping, Sync, Welcome
from p2pdrl.membership.records import Incarnation, Suspicion

from .bench import BOOT_MS, KEYS, Bench, first_ping, kill, record, suspicion

# Alive


def test_a_newcomer_is_told_once() -> None:
    bench = Bench()
    for _ in range(3):
        bench.gossip(record(6))
    assert bench.state(6) == "alive"
    assert bench.kinds(6) == ["joined"]


def test_a_newer_record_updates_and_an_older_one_doesnt() -> None:
    bench = Bench()
    bench.gossip(record(1, 2, address="10.9.9.9:1"))
    bench.gossip(record(1, 1, address="10.8.8.8:1"))
    view = bench.core.member(KEYS[1].node_id, 0.0)
    assert view is not None
    assert view.address == "10.9.9.9:1"
    assert bench.kinds(1) == ["updated"]


def test_the_same_key_at_a_new_address_is_taken_at_once() -> None:
    bench = Bench()
    moved = record(1, incarnation=Incarnation(BOOT_MS + 5, 0), address="10.9.9.9:1")
    bench.gossip(moved)
    view = bench.core.member(KEYS[1].node_id, 0.0)
    assert view is not None
    assert (view.address, view.state) == ("10.9.9.9:1", "alive")
    assert bench.events[-1].reason == "restarted at 10.9.9.9:1"


def test_a_forged_alive_or_left_is_refused_and_changes_nothing() -> None:
    bench = Bench()
    for changes in ({"state": "left"}, {"address": "6.6.6.6:6"}):
        forged = msgspec.structs.replace(record(1), incarnation=Incarnation(BOOT_MS, 9), **changes)
        answer = bench.gossip(forged)
        assert isinstance(answer, Reject)
        assert answer.status == 403
    assert bench.state(1) == "alive"
    assert bench.core.refused_records == 2
    assert bench.events == []


def test_an_incarnation_far_in_the_future_is_refused() -> None:
    bench = Bench()
    answer = bench.gossip(record(6, incarnation=Incarnation(BOOT_MS + 700_000, 0)))
    assert isinstance(answer, Reject)
    assert answer.status == 400
    assert bench.state(6) == "unknown"


def test_addresses_that_mustnt_be_dialled_are_refused() -> None:
    bench = Bench()
    for address in ("169.254.169.254:80", "127.0.0.1:7600"):
        answer = bench.ask(6, JoinRequest(record(6, address=address)), told_by="10.0.0.6")
        assert isinstance(answer, Reject)
        assert answer.status == 400
    assert bench.state(6) == "unknown"


def test_who_leaves_names_an_address_that_can_be_dialled() -> None:
    """It is called once more: an ack may bring the news, and ask for our record."""
    bench = Bench()
    ping = first_ping(bench)
    number = next(i for i, key in enumerate(KEYS) if key.node_id == ping.target_id)
    for count, address in enumerate(("no:address:at all", "10.0.0.1:0", "169.254.169.254:80"), 1):
        bad = record(number, count, state="left", address=address)
        assert isinstance(bench.gossip(bad, sender=number), Reject)
    bench.feed(Answered(ping.call_id, Ack(bad.incarnation, (bad,), want_record=True)))
    assert bench.state(number) == "alive"
    assert {send.to for send in bench.sent} == {f"10.0.0.{number}:7600"}
    assert isinstance(bench.gossip(record(number, 9, state="left"), sender=number), Ack)
    assert bench.state(number) == "left"


def test_a_full_view_takes_nobody_but_in_place_of_a_tombstone() -> None:
    bench = Bench(others=4, max_members=4)
    answer = bench.ask(6, JoinRequest(record(6)))
    assert isinstance(answer, Reject)
    assert answer.status == 429
    bench.gossip(record(1, 1, state="left"))
    assert isinstance(bench.ask(6, JoinRequest(record(6))), Welcome)
    assert (bench.state(1), bench.state(6)) == ("unknown", "alive")


# Suspect


def test_a_suspicion_then_two_more_then_death_at_the_minimum() -> None:
    bench = Bench()
    bench.down[1] = "timeout"
    bench.gossip(suspicion(1, 2), suspicion(1, 3), suspicion(1, 4))
    assert bench.state(1) == "suspect"
    view = bench.core.member(KEYS[1].node_id, bench.now)
    assert view is not None
    assert len(view.suspected_by) == 3
    assert view.state_reason == "n2 says: no answer (0 s ago)"
    bench.run(3.9)
    assert bench.state(1) == "suspect"
    bench.run(2.0)
    assert bench.state(1) == "dead"
    assert bench.kinds(1) == ["suspect", "dead"]


def test_a_lone_accuser_waits_for_the_maximum() -> None:
    bench = Bench(second_opinions=0, probe_interval_s=1.0)
    bench.gossip(suspicion(1, 2))
    bench.gossip(suspicion(1, 2))  # the same accuser counts once
    view = bench.core.member(KEYS[1].node_id, bench.now)
    assert view is not None
    assert view.suspected_by == (KEYS[2].node_id,)


def test_old_and_forged_suspicions_are_ignored() -> None:
    bench = Bench()
    bench.gossip(record(1, 3))
    bench.gossip(suspicion(1, 2, counter=2))
    assert bench.state(1) == "alive"
    forged = msgspec.structs.replace(suspicion(1, 2, counter=3), accuser=KEYS[3].node_id)
    assert isinstance(bench.gossip(forged), Reject)
    bench.gossip(suspicion(1, 7, counter=3))  # an accuser that nobody knows
    assert bench.state(1) == "alive"


def test_a_stale_accuser_is_corrected_in_the_answer() -> None:
    bench = Bench()
    newer = record(1, 3)
    bench.gossip(newer)
    answer = bench.gossip(suspicion(1, 2, counter=2))
    assert isinstance(answer, Ack)
    assert newer in answer.records


def test_a_refutation_clears_the_suspicion() -> None:
    bench = Bench()
    bench.gossip(suspicion(1, 2), suspicion(1, 3), suspicion(1, 4))
    bench.gossip(record(1, 1))
    bench.run(30.0)
    assert bench.state(1) == "alive"
    assert bench.kinds(1) == ["suspect", "alive"]


def test_a_stale_suspicion_timer_never_kills_a_node_suspected_anew() -> None:
    """The timer of the first suspicion runs out while a second, younger one stands."""
    bench = Bench(second_opinions=0, probe_interval_s=1.0)
    bench.down[1] = "timeout"
    bench.gossip(suspicion(1, 2), suspicion(1, 3), suspicion(1, 4))  # would kill at 4.0 s
    bench.now = 3.5
    bench.gossip(record(1, 1))
    bench.gossip(*(suspicion(1, accuser, counter=1) for accuser in (2, 3, 4)))  # kills at 7.5 s
    assert bench.state(1) == "suspect"
    for bench.now in (3.9, 4.1, 4.5, 6.0, 7.4):
        bench.feed(Tick())
        bench.sent.clear()
        assert bench.state(1) == "suspect", f"killed at {bench.now} by a stale timer"
    bench.run(3.0)
    assert bench.state(1) == "dead"


def test_a_dead_verdict_of_another_is_only_a_suspicion() -> None:
    bench = Bench()
    bench.gossip(suspicion(1, 2, verdict="dead"))
    assert bench.state(1) == "suspect"
    bench.run(2.0)
    assert bench.state(1) in ("suspect", "alive")


def test_enough_dead_verdicts_make_us_look_at_once() -> None:
    bench = Bench()
    bench.down[1] = "unreachable"
    bench.gossip(*(suspicion(1, accuser, verdict="dead") for accuser in (2, 3, 4)))
    bench.run(0.1)
    assert bench.state(1) == "dead"
    quick = Bench()
    quick.gossip(*(suspicion(1, accuser, verdict="dead") for accuser in (2, 3, 4)))
    quick.run(0.1)
    assert quick.state(1) == "suspect"  # it answered us


def test_a_suspect_that_answers_the_last_look_isnt_dead() -> None:
    bench = Bench()
    bench.gossip(suspicion(1, 2), suspicion(1, 3), suspicion(1, 4))
    bench.run(30.0)
    assert "dead" not in bench.kinds(1)


# Dead


def test_a_refused_connection_is_evidence_at_once_and_says_so() -> None:
    bench = Bench()
    kill(bench)
    view = bench.core.member(KEYS[1].node_id, bench.now)
    assert view is not None
    assert view.state_reason.startswith("it was unreachable (")
    assert bench.kinds(1) == ["suspect", "dead"]


def test_old_records_and_suspicions_dont_wake_the_dead() -> None:
    bench = Bench()
    kill(bench)
    bench.gossip(record(1, 0))
    bench.gossip(suspicion(1, 2))
    assert bench.state(1) == "dead"


def test_dead_then_alive_then_the_replay_of_its_death() -> None:
    bench = Bench()
    kill(bench)
    bench.down.clear()
    bench.gossip(record(1, 1))
    assert bench.state(1) == "alive"
    bench.gossip(suspicion(1, 2, counter=0, verdict="dead"))
    assert bench.state(1) == "alive"


def test_the_dead_that_ping_are_told_so_that_they_can_refute() -> None:
    bench = Bench()
    kill(bench)
    answer = bench.ask(1, Ping(Incarnation(BOOT_MS, 0), bench.core.me.incarnation))
    assert isinstance(answer, Ack)
    told = [item for item in answer.records if isinstance(item, Suspicion)]
    assert any(item.subject == KEYS[1].node_id and item.verdict == "dead" for item in told)


def test_the_dead_are_tried_again_and_taken_back() -> None:
    bench = Bench(others=2)
    kill(bench, 1)
    kill(bench, 2)
    bench.run(1.0)
    pings: list[Send] = []
    while not pings:
        due = bench.core.next_wakeup()
        assert due is not None
        bench.now = due
        bench.feed(Tick())
        pings = [send for send in bench.sent if isinstance(send.message, Ping)]
    send = pings[0]
    number = 1 if send.target_id == KEYS[1].node_id else 2
    bench.feed(Answered(send.call_id, Ack(Incarnation(BOOT_MS, 1), (record(number, 1),))))
    assert bench.state(number) == "alive"
    assert any(
        isinstance(send.message, Sync) and send.target_id == KEYS[number].node_id for send in bench.sent
    )


def test_tombstones_are_forgotten() -> None:
    bench = Bench(dead_tombstone_s=100.0, left_tombstone_s=50.0)
    bench.gossip(record(2, 1, state="left"))
    kill(bench)
    bench.run(90.0)
    assert (bench.state(2), bench.state(1)) == ("unknown", "dead")
    bench.run(100.0)
    assert bench.state(1) == "unknown"
