"""One core on what it says of itself, on those who join, and on settings."""

from __future__ import annotations

import msgspec
import pytest

from p2pdrl.membership.events import (
    Answered,
    Reject,
    Send,
    SendFailed,
    SwarmChanged,
    Tick,
    TwinFound,
    Welcomed,
)
from p2pdrl.membership.identity import verify
from p2pdrl.membership.messages import Ack, GossipMessage, JoinRequest, Nack, Ping, Welcome
from p2pdrl.membership.records import BadRecordError, Incarnation, MemberRecord, Suspicion, Verifier

from .bench import BOOT_MS, KEYS, WALL_S, Bench, first_ping, kill, record, suspicion

# Ourselves


def test_we_refute_and_trust_ourselves_less() -> None:
    bench = Bench()
    answer = bench.gossip(suspicion(0, 2))
    assert bench.core.me.incarnation == Incarnation(BOOT_MS, 1)
    assert bench.core.health == 1
    assert isinstance(answer, Ack)
    assert bench.core.me in answer.records
    bench.gossip(suspicion(0, 3))  # about the incarnation that we have left behind
    assert bench.core.me.incarnation == Incarnation(BOOT_MS, 1)


def test_an_echo_of_an_earlier_life_is_outdone() -> None:
    bench = Bench()
    bench.gossip(record(0, 7, state="left"))
    assert bench.core.me.incarnation == Incarnation(BOOT_MS, 8)
    assert bench.core.me.state == "alive"


def test_a_twin_with_our_key_is_reported_and_not_fought() -> None:
    bench = Bench()
    bench.gossip(record(0, incarnation=Incarnation(BOOT_MS + 1, 0), address="10.7.7.7:1"))
    assert TwinFound("10.7.7.7:1") in bench.other_effects
    assert bench.core.me.incarnation == Incarnation(BOOT_MS, 0)


def test_being_held_up_accuses_nobody() -> None:
    bench = Bench()
    bench.gossip(suspicion(1, 2), suspicion(1, 3), suspicion(1, 4))
    bench.now = 2.0
    bench.feed(Tick())
    bench.now = 32.0  # stopped for 30 s
    bench.feed(Tick())
    assert bench.core.health >= 1
    assert bench.state(1) == "suspect"
    bench.run(0.5)
    assert [event.kind for event in bench.events] == ["suspect"]


def test_leaving_is_signed_told_to_three_and_final() -> None:
    bench = Bench()
    effects = bench.core.leave(0.0)
    told = [effect for effect in effects if isinstance(effect, Send)]
    assert len(told) == 3
    for send in told:
        assert isinstance(send.message, GossipMessage)
        (goodbye,) = send.message.records
        assert isinstance(goodbye, MemberRecord)
        assert goodbye.state == "left"
        Verifier("swarm", verify).check_member(goodbye, WALL_S)
    assert bench.core.next_wakeup() is None
    bench.gossip(suspicion(0, 1, counter=1))
    assert bench.core.me.state == "left"
    assert bench.core.leave(1.0) == []


def test_left_then_back_in_another_role() -> None:
    bench = Bench()
    bench.gossip(record(1, 1, state="left"))
    assert bench.state(1) == "left"
    bench.gossip(record(1, 0))  # an old record doesn't bring it back
    assert bench.state(1) == "left"
    bench.gossip(record(1, incarnation=Incarnation(BOOT_MS + 9, 0), tags={"role": "server"}))
    view = bench.core.member(KEYS[1].node_id, 0.0)
    assert view is not None
    assert (view.state, view.tags) == ("alive", {"role": "server"})
    assert bench.kinds(1) == ["left", "joined"]


def test_new_tags_raise_the_incarnation_and_spread() -> None:
    bench = Bench()
    bench.core.update_self(0.0, tags={"role": "x"})
    assert bench.core.me.incarnation.counter == 1
    answer = bench.ask(1, Ping(Incarnation(BOOT_MS, 0), Incarnation(BOOT_MS, 0)))
    assert isinstance(answer, Ack)
    assert bench.core.me in answer.records
    assert bench.core.update_self(0.0, tags={"role": "x"}) == []


# Joining and settings


def test_a_join_is_answered_with_the_whole_view_and_the_settings() -> None:
    bench = Bench()
    bench.core.propose("mode", {"name": "adpsgd"}, 0.0)
    answer = bench.ask(6, JoinRequest(record(6)), told_by="10.0.0.6")
    assert isinstance(answer, Welcome)
    ids = {item.id for item in answer.records if isinstance(item, MemberRecord)}
    assert ids == {KEYS[number].node_id for number in (0, 1, 2, 3, 4, 6)}
    assert answer.observed_host == "10.0.0.6"
    newcomer = Bench(others=0)
    newcomer.feed(Welcomed(KEYS[1].node_id, "10.0.0.1:7600", answer))
    assert newcomer.core.swarm.value("mode") == {"name": "adpsgd"}
    assert any(isinstance(effect, SwarmChanged) for effect in newcomer.other_effects)


def test_a_dead_member_that_joins_in_the_same_incarnation_is_told_to_refute() -> None:
    bench = Bench()
    kill(bench)
    answer = bench.ask(1, JoinRequest(record(1)))
    assert isinstance(answer, Welcome)
    assert any(isinstance(item, Suspicion) for item in answer.records)


def test_settings_spread_and_the_last_writer_wins() -> None:
    one, two = Bench(), Bench()
    setting, _ = one.core.propose("mode", 1, 0.0)
    two.gossip(setting)
    two.gossip(setting)
    assert two.core.swarm.value("mode") == 1
    assert two.other_effects.count(SwarmChanged(setting)) == 1


def test_a_setting_of_an_earlier_run_is_taken_up_spread_and_checked() -> None:
    one, two = Bench(), Bench()
    for value in range(1, 1200):  # further than a stranger's may jump
        setting, _ = one.core.propose("mode", value, 0.0)
    effects = two.core.recall(setting, 0.0)
    assert two.core.swarm.value("mode") == 1199
    assert SwarmChanged(setting) in effects
    assert two.core.recall(setting, 0.0) == []
    answer = two.ask(1, Ping(Incarnation(BOOT_MS, 0), Incarnation(BOOT_MS, 0)))
    assert isinstance(answer, Ack)
    assert setting in answer.records
    with pytest.raises(BadRecordError):
        two.core.recall(msgspec.structs.replace(setting, epoch=setting.epoch + 1), 0.0)
    assert two.core.swarm.value("mode") == 1199


def test_what_isnt_a_request_is_refused() -> None:
    answer = Bench().ask(1, Nack("hello"))
    assert isinstance(answer, Reject)
    assert answer.status == 400


def test_late_and_unknown_answers_are_ignored() -> None:
    bench = Bench()
    send = first_ping(bench)
    for _ in range(2):
        bench.feed(Answered(send.call_id, Ack(Incarnation(BOOT_MS, 0))))
    bench.feed(SendFailed(999_999, "timeout", "?"))
    assert bench.events == []
